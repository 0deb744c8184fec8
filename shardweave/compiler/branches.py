"""Branches on tensors: how Dynamo traces them. A step is one graph, so that both sides are part of it.

Asserts
    A branch one side of which only raises an error is an assert (`raises_as_asserts`).

Selections
    Of other branches, both sides are traced, and `torch.where` selects what they assign, return, or write into buffers
    (`branches_selected`; `branch_selection` does it).

Numbers
    A branch on a number that depends on tensors, such as ``x.amax().item() > 9``, is one on a tensor. So is an index
    ``t`` of ``x[t] += y``.

Loops
    A loop over ``x.nonzero()`` is one over all places of x, where a branch skips those that are zero (`_all_places`).
    A loop over ``x.unique()`` is one over all indices that may be in x, as those of experts.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import networkx
import torch
from torch import Tensor, fx, nn

from shardweave.compiler.branch_selection import (
    LEAVE,
    NoSelectionError,
    Selection,
    constant,
    instruction_flow,
    lists_concatenated,
    size_indexed,
    without_rows,
)

_BRANCHES = [f"POP_JUMP_{way}IF_{value}" for way in ("", "FORWARD_", "BACKWARD_") for value in ("TRUE", "FALSE")]
Jump = Callable[[Any, Any], None]
_INDEX = "_Index"
"""The class of what `branches_selected` makes of a list whose length depends on values."""


@contextlib.contextmanager
def branches_traced(form: Callable[[Any, Any, bool, Jump], None]) -> Iterator[None]:
    """While this runs, Dynamo traces a branch on a tensor by `form`.

    That gets Dynamo's translator, the instruction, whether it jumps where the tensor is true, and what traces it
    otherwise. A tensor whose value is known while tracing is a number.
    """
    dynamo: Any = torch._dynamo  # loaded by the first capture, not by the import of this package

    def patched(name: str, jump: Jump) -> Jump:
        jumps_if = name.endswith("TRUE")

        def branch(self: Any, instruction: Any) -> None:
            if type(self.stack[-1]).__name__ == _INDEX:
                self.stack[-1] = self.stack[-1].sq_length(self)
            if isinstance(self.stack[-1], dynamo.variables.SymNodeVariable):
                self.stack[-1] = _known_or_tensor(self, self.stack[-1])
            if isinstance(self.stack[-1], dynamo.variables.TensorVariable):
                if (known := _known_number(self.stack[-1])) is not None:
                    self.stack[-1] = known
                    return jump(self, instruction)
                return form(self, instruction, jumps_if, jump)
            return jump(self, instruction)

        return branch

    with _instructions_traced({**dict.fromkeys(_BRANCHES, patched), "BINARY_SUBSCR": _augmented_subscript}):
        yield


def _augmented_subscript(_: str, subscript: Jump) -> Jump:
    """Traces what reads ``x[t]`` of ``x[t] += y``, where t is a number of a tensor, with t as a tensor.

    What is read then is a copy that is assigned afterwards (see `numbers_of_buffers`), not a view at an open place.
    """

    variables: Any = torch._dynamo.variables

    def select(self: Any, instruction: Any) -> None:
        before = self.instructions[max(self.instruction_pointer - 3, 0) : self.instruction_pointer - 1]
        is_augmented = [(each.opname, each.arg) for each in before] == [("COPY", 2)] * 2
        if is_augmented and isinstance(self.stack[-2].realize(), variables.TensorVariable):
            index = self.stack[-1].realize()
            is_tuple = isinstance(index, variables.TupleVariable)
            parts = [part.realize() for part in (index.items if is_tuple else [index])]
            are_numbers = [isinstance(part, variables.SymNodeVariable) for part in parts]
            for place, part in enumerate(parts):
                if are_numbers[place]:
                    parts[place] = _as_tensor(self, part.as_proxy(), torch.int64)
            if any(are_numbers):
                self.stack[-1] = self.stack[-3] = variables.TupleVariable(parts) if is_tuple else parts[0]
        return subscript(self, instruction)

    return select


@contextlib.contextmanager
def _instructions_traced(forms: Mapping[str, Callable[[str, Jump], Jump]]) -> Iterator[None]:
    """While this runs, Dynamo traces instructions by what `forms` make of their names and their own functions."""
    translators: Any = torch._dynamo.symbolic_convert
    kinds = (
        translators.InstructionTranslator,
        translators.InliningInstructionTranslator,
        translators.InliningGeneratorInstructionTranslator,
    )
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            table: list[Any] = list(kind.dispatch_table)
            for name in forms.keys() & dis.opmap.keys():
                table[dis.opmap[name]] = forms[name](name, table[dis.opmap[name]])
            stack.enter_context(mock.patch.object(kind, "dispatch_table", table))
        yield


def _known_number(variable: Any) -> Any:
    """The one element of a tensor whose value is known while tracing, as Dynamo's constant; else None."""
    constant = getattr(variable.as_proxy().node.meta.get("example_value"), "constant", None)
    if constant is None or constant.numel() != 1:
        return None
    return torch._dynamo.variables.ConstantVariable.create(constant.item())


def _known_or_tensor(translator: Any, number: Any) -> Any:
    """A number that a branch reads, as it is if it does not depend on values; else as a tensor of one element."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, guard_bool

    is_bool = isinstance(number.sym_num, torch.SymBool)
    try:
        guard_bool(number.sym_num if is_bool else number.sym_num != 0)
        return number
    except GuardOnDataDependentSymNode:
        output, wrap = translator.output, torch._dynamo.variables.builder.wrap_fx_proxy
        value = number.as_proxy()
        if is_bool:
            value = wrap(translator, output.create_proxy("call_function", torch.sym_ite, (value, 1, 0), {})).as_proxy()
        return _as_tensor(translator, value)


def _as_tensor(translator: Any, number: Any, dtype: torch.dtype | None = None) -> Any:
    """A number of the graph as a tensor of one element."""
    options = {} if dtype is None else {"dtype": dtype}
    made = translator.output.create_proxy("call_function", torch.scalar_tensor, (number,), options)
    return torch._dynamo.variables.builder.wrap_fx_proxy(translator, made)


@contextlib.contextmanager
def raises_as_asserts() -> Iterator[None]:
    """Let Dynamo trace a branch on a tensor as an assert, if one side of it only raises an error.

    Of ``if torch.isnan(x).any(): raise ValueError(...)``, for one, Dynamo knows no graph, while asserts are ops. The
    error is an AssertionError then, with the message or the line of that one.
    """

    dynamo: Any = torch._dynamo
    functions = torch._assert, nn.functional.gaussian_nll_loss  # whose branches Dynamo does not trace by itself
    inlined = dict.fromkeys(functions, dynamo.variables.UserFunctionVariable)

    def branch(self: Any, instruction: Any, jumps_if: bool, jump: Jump) -> None:
        # 1. Which side raises: the next instruction, or the target of the jump?
        next_raises = _raised_message(self, self.instruction_pointer)
        target_raises = _raised_message(self, self.indexof[instruction.target])
        if (next_raises is None) == (target_raises is None):
            return jump(self, instruction)
        # 2. Assert that the other one is taken, and take it.
        condition = self.pop().as_proxy()
        if jumps_if == (next_raises is None):
            condition = self.output.create_proxy("call_method", "logical_not", (condition,), {})
        arguments = condition, next_raises or target_raises
        self.output.create_proxy("call_function", torch._assert_async, arguments, {})
        if next_raises is not None:
            self.jump(instruction)
        return None

    with mock.patch.dict(dynamo.trace_rules.get_torch_obj_rule_map(), inlined), branches_traced(branch):
        yield


def _raised_message(translator: Any, index: int) -> str | None:
    """The message of the error that the code from an instruction on raises, or its line; None if it does more."""
    texts: list[str] = []
    is_computed = False
    for instruction in translator.instructions[index:]:
        name = instruction.opname
        if name == "RAISE_VARARGS":
            line = linecache.getline(translator.f_code.co_filename, instruction.starts_line or 0).strip()
            return texts[0] if len(texts) == 1 and not is_computed else line or "an error is raised"
        if not name.startswith(("LOAD_", "BUILD_", "FORMAT_", "CALL", "PRECALL", "PUSH_NULL", "KW_NAMES", "BINARY_")):
            return None
        is_computed |= name.startswith(("BUILD_", "FORMAT_", "BINARY_"))
        local = translator.symbolic_locals.get(instruction.argval) if name == "LOAD_FAST" else None
        known = local.as_python_constant() if local is not None and local.is_python_constant() else instruction.argval
        if isinstance(known, str) and (local is not None or name == "LOAD_CONST"):
            texts.append(known)
    return None


LOOP = "a loop over what is nonzero leaves early, changes objects, or assigns no tensors of the same shape"
_KEEP_ORDER = "flatten", "reshape", "view", "ravel", "squeeze", "contiguous", "clone", torch.flatten, torch.squeeze
_NONZERO = "nonzero", "argwhere", torch.nonzero, torch.argwhere, torch.where


@contextlib.contextmanager
def branches_selected(model: nn.Module) -> Iterator[None]:
    """Let Dynamo trace both sides of a branch on a tensor, and select what they assign by `torch.where`.

    Of ``if not torch.isfinite(x).all(): x = torch.clamp(x, -1, 1)``, for one, Dynamo knows no graph. Each side may
    assign local variables, to tensors of the same kind, write into tensors that need no gradient, such as buffers, and
    return. The gradient that flows into a side passes through a selection too, so that what is infinite in the side
    that is not taken adds nothing.

    Raises
    ------
    RuntimeError
        What was selected, or selected from, is written in place later: the branch does not copy, a selection does.
    """
    selected: list[tuple[Tensor, int, str]] = []
    loops: dict[int, tuple[Any, list[Any]]] = {}
    skipped = _Skipped(model)
    inside: list[int] = []
    dynamo: Any = torch._dynamo
    errors: Any = torch._dynamo.exc
    refusals = NoSelectionError, errors.Unsupported, errors.ObservedException, errors.TorchRuntimeError

    def branch(self: Any, instruction: Any, jumps_if: bool, jump: Jump) -> None:
        starts = self.instruction_pointer, self.indexof[instruction.target]
        ends = _ends_of_branch(self, self.instruction_pointer - 1)
        if not ends:
            return jump(self, instruction)
        condition, line = self.pop(), self.lineno
        try:
            skips = bool(inside) or without_rows(condition.as_proxy().node) is not None
            selection = Selection(self, condition, jumps_if, selected, skips)
            sides = selection(starts, ends)
            if skips:
                skipped.note(self, starts[0], sides, selection.made)
            return None
        except (*refusals, RuntimeError) as error:
            self.current_instruction = instruction
            self.starts_line(line)
            if not isinstance(error, refusals):
                raise
            self.push(condition)
            return jump(self, instruction)

    def started(_: str, start: Jump) -> Jump:
        def iterate(self: Any, instruction: Any) -> None:
            if id(self.stack[-1]) in loops:  # of a list
                return None
            found = None
            if self.instructions[self.instruction_pointer].opname == "FOR_ITER":
                found = _all_places(self, self.stack[-1].realize())
            if found is None:
                return start(self, instruction)
            self.stack[-1] = found[0]
            loops[id(found[0])] = found
            return None

        return iterate

    def continued(_: str, step: Jump) -> Jump:
        def iterate(self: Any, instruction: Any) -> None:
            head, line = self.instruction_pointer - 1, self.lineno
            places, are_hit = loops.get(id(self.stack[-1]), (None, ()))
            index = 0 if places is None else places.index
            step(self, instruction)
            if index >= len(are_hit):
                return
            item = self.pop()
            inside.append(head)
            try:
                selection = Selection(self, are_hit[index], False, selected, True)
                body, _ = selection((head + 1, head), {head}, item)
                skipped.note(self, head, [body], selection.made)
            except refusals as error:
                self.current_instruction = instruction
                self.starts_line(line)
                raise RuntimeError(LOOP) from error
            finally:
                inside.pop()

        return iterate

    def formatted(_: str, form: Jump) -> Jump:
        def string(self: Any, instruction: Any) -> None:
            value = self.stack[-1].realize()
            if isinstance(value, dynamo.variables.TensorVariable) and not value.ndim:
                self.stack[-1] = _known_number(value) or value
            form(self, instruction)

        return string

    def tolist(self: Any, tx: Any) -> Any:
        """A list of what is nonzero is all places, as numbers, where a loop over it begins; else an index."""
        following = [each.opname for each in tx.instructions[tx.instruction_pointer :][:2]]
        value = self.as_proxy().node.meta["example_value"]
        if value.dim() != 1 or isinstance(value.shape[0], int) or value.dtype != torch.int64:
            return listed(self, tx)
        if following[0] != "GET_ITER":
            return _Index(self)
        found = _all_places(tx, self) if following[1] == "FOR_ITER" else None
        if found is None:
            return listed(self, tx)
        found[0].items = [_known_number(item) for item in found[0].items]
        loops[id(found[0])] = found
        return found[0]

    class _Index(dynamo.variables.base.VariableTracker):  # type: ignore[misc]
        """A list whose length depends on values: an index of tensors, as this tensor is, with a length."""

        def __init__(self, values: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.values = values

        def as_proxy(self) -> Any:
            return self.values.as_proxy()

        def python_type(self) -> Any:
            return list

        def sq_length(self, tx: Any) -> Any:  # else Dynamo takes it for true
            return self.values.call_method(tx, "size", [constant(0)], {})

    listed = dynamo.variables.TensorVariable.method_tolist
    forms = {"GET_ITER": started, "FOR_ITER": continued, "FORMAT_VALUE": formatted, "FORMAT_SIMPLE": formatted}
    as_list = mock.patch.object(dynamo.variables.TensorVariable, "method_tolist", tolist)
    with branches_traced(branch), _instructions_traced(forms), lists_concatenated(), as_list:
        yield
    for value, version, line in selected:
        if value._version != version:
            raise RuntimeError(f"what a branch on a tensor assigns is written in place later{line}")
    skipped.warn()


class _Skipped:
    """The parameters that one side of a branch alone reads, or some bodies of a loop, which may be skipped."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found, self.made = model, dict[Any, list[set[fx.Node]]](), set[fx.Node]()
        self.names = dict[fx.Node, str]()

    def note(self, translator: Any, place: int, sides: Sequence[set[fx.Node]], made: set[fx.Node]) -> None:
        """Note what the sides of the branch or loop at a place of the code read, and the nodes made for it."""
        if not torch.is_grad_enabled():
            return
        own = set[fx.Node]().union(*sides) - (set[fx.Node].intersection(*sides) if len(sides) > 1 else set())
        self.found.setdefault((translator, place), []).append(own)
        self.made |= made
        if new := own - self.names.keys():
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            inputs = translator.output.root_tracer.graph.find_nodes(op="placeholder")
            known = {id(node.meta["example_value"]): node.meta.get("grapharg") for node in inputs}
            for node in new:
                given = known.get(id(node.meta["example_value"]))
                self.names[node] = names.get(id(given.example), node.name) if given is not None else node.name

    def warn(self) -> None:
        read = set[fx.Node]()
        for several in self.found.values():  # what all of them read is not skipped as a whole
            read |= set[fx.Node]().union(*several)
            read -= set[fx.Node].intersection(*several) if len(several) > 1 else set()
        names = {self.names[node] for node in read if self.made.issuperset(node.users)}
        if not names:
            return
        ordered = [name for name, _ in self.model.named_parameters() if name in names]
        ordered += sorted(names.difference(ordered))
        shown = ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")
        warnings.warn(
            f"the forward reads {len(ordered)} parameters ({shown}) only where something is selected for them, as for "
            "an expert. Where nothing is, they get gradients of zero, where one device gives none: weight decay and "
            "momentum go on for them",
            stacklevel=2,
        )


def _ends_of_branch(translator: Any, branch: int) -> set[int]:
    """The instructions where both sides of a branch end: the one where they meet, or all returns; empty in a loop."""
    flow, leave = instruction_flow(translator), LEAVE
    # The first one that both sides come to, whatever they do before
    end = networkx.immediate_dominators(flow.reverse(copy=False), leave).get(branch, leave)
    ends = {end} if end != leave else {*flow.predecessors(leave)}
    flow.remove_nodes_from({end, leave})
    region = networkx.descendants(flow, branch) if flow.has_node(branch) else set()
    return set() if any(branch in flow[index] for index in region) else ends


def _all_places(translator: Any, values: Any) -> tuple[Any, list[Any]] | None:
    """Of a tensor made by ``x.nonzero()`` of one dimension: an iterator over all places, and which are in the tensor.

    So is ``x.unique()`` of indices, as those of `topk`: all that there may be. None of another tensor, or of what is no
    tensor. The places are tensors whose values are known while tracing.
    """
    dynamo: Any = torch._dynamo
    if not isinstance(values, dynamo.variables.TensorVariable):
        return None
    # 1. What was nonzero, or unique? The ops in between keep the order.
    source = values.as_proxy().node
    derived = [source]
    shape, dtype = source.meta["example_value"].shape, source.meta["example_value"].dtype
    while source.op != "placeholder" and (
        source.target in _KEEP_ORDER or source.target is operator.getitem and source.args[1] in (0, (slice(None), 0))
    ):
        source = source.args[0]
        derived.append(source)
    if source.op == "placeholder" or len(source.args) != 1:
        return None
    found, size = values.as_proxy(), None
    if source.target in _NONZERO:
        sizes = source.args[0].meta["example_value"].shape
        size = sizes[0] if len(sizes) == 1 else None
    elif source.target in ("unique", torch.unique) and source.kwargs in ({}, {"sorted": True}):
        found = fx.Proxy(source.args[0], translator.output.current_tracer)
        size = size_indexed(source.args[0], derived)
    is_list = len(shape) == 1 or len(shape) == 2 and shape[1] == 1
    if not isinstance(size, int) or dtype != torch.int64:
        return None
    if not is_list or not isinstance(shape[0], torch.SymInt):
        return None

    def call(kind: str, target: Any, *args: Any) -> Any:
        proxy = translator.output.create_proxy(kind, target, args, {})
        return dynamo.variables.builder.wrap_fx_proxy(translator, proxy)

    # 2. Compare with all places. Writes into `values` from now on change nothing in a loop over them.
    every = call("call_function", torch.tensor, [*range(size)]).as_proxy()
    equal = call("call_method", "eq", call("call_method", "reshape", found, -1, 1).as_proxy(), every)
    hit = call("call_method", "any", equal.as_proxy(), 0).as_proxy()
    are_hit = [call("call_function", torch.select, hit, 0, place) for place in range(size)]
    items = [call("call_function", torch.tensor, [place] if len(shape) == 2 else place) for place in range(size)]
    new = dynamo.variables.base.ValueMutationNew()
    return dynamo.variables.lists.ListIteratorVariable(items, mutation_type=new), are_hit
