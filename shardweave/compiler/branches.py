"""Branches on tensors: how Dynamo traces them. A step is one graph, so that both sides are part of it.

Asserts
    A branch one side of which only raises an error is an assert (`raises_as_asserts`).

Selections
    Of other branches, both sides are traced, and `torch.where` selects what they assign, return, or write into buffers
    (`branches_selected`).

Numbers
    A branch on a number that depends on tensors, such as ``x.amax().item() > 9``, is one on a tensor.

Loops
    A loop over ``x.nonzero()`` is one over all places of x, where a branch skips those that are zero (`_all_places`).
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import linecache
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import networkx
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

_BRANCHES = [f"POP_JUMP_{way}IF_{value}" for way in ("", "FORWARD_", "BACKWARD_") for value in ("TRUE", "FALSE")]


Jump = Callable[[Any, Any], None]


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
            if isinstance(self.stack[-1], dynamo.variables.SymNodeVariable):
                self.stack[-1] = _known_or_tensor(self, self.stack[-1])
            if isinstance(self.stack[-1], dynamo.variables.TensorVariable):
                if (known := _known_number(self.stack[-1])) is not None:
                    self.stack[-1] = known
                    return jump(self, instruction)
                return form(self, instruction, jumps_if, jump)
            return jump(self, instruction)

        return branch

    with _instructions_traced(dict.fromkeys(_BRANCHES, patched)):
        yield


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
        return wrap(translator, output.create_proxy("call_function", torch.scalar_tensor, (value,), {}))


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


CHANGED_PARAMETER = "a branch on a tensor changes a parameter that is trained"
LOOP = "a loop over what is nonzero leaves early, changes objects, or assigns no tensors of the same shape"


class _NoSelectionError(Exception):
    """A branch does more than to assign tensors."""


_KEEP_ORDER = "flatten", "reshape", "view", "ravel", "squeeze", "contiguous", "clone", torch.flatten, torch.squeeze
_NONZERO = "nonzero", "argwhere", torch.nonzero, torch.argwhere, torch.where
_RETURNS = "RETURN_VALUE", "RETURN_CONST"
_RAISES = "RAISE", "RERAISE"
_REFUSED = *_RAISES, "YIELD", "SEND", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE", "IMPORT"
"""Instructions of these names leave a branch, or change more than local variables."""


@contextlib.contextmanager
def branches_selected() -> Iterator[None]:
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
    bodies: dict[int, list[set[fx.Node]]] = {}
    inside: list[int] = []
    dynamo: Any = torch._dynamo
    errors: Any = torch._dynamo.exc
    refusals = _NoSelectionError, errors.Unsupported, errors.ObservedException, errors.TorchRuntimeError

    def branch(self: Any, instruction: Any, jumps_if: bool, jump: Jump) -> None:
        starts = self.instruction_pointer, self.indexof[instruction.target]
        ends = _ends_of_branch(self, self.instruction_pointer - 1)
        if not ends:
            return jump(self, instruction)
        condition, line = self.pop(), self.lineno
        try:
            return _select(self, condition, starts, ends, jumps_if, selected, bool(inside))
        except (*refusals, RuntimeError) as error:
            self.current_instruction = instruction
            self.starts_line(line)
            if not isinstance(error, refusals):
                raise
            self.push(condition)
            return jump(self, instruction)

    def started(_: str, start: Jump) -> Jump:
        def iterate(self: Any, instruction: Any) -> None:
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
            item, known = self.pop(), {*self.output.graph.nodes}
            inside.append(head)
            try:
                _select(self, are_hit[index], (head + 1, head), {head}, False, selected, True, item)
                bodies.setdefault(id(places), []).append(_trained_in(self.output.graph, known))
            except refusals as error:
                self.current_instruction = instruction
                self.starts_line(line)
                raise RuntimeError(LOOP) from error
            finally:
                inside.pop()
            if index == len(are_hit) - 1:
                _warn_of_zeros(bodies.pop(id(places)), line)

        return iterate

    def formatted(_: str, form: Jump) -> Jump:
        def string(self: Any, instruction: Any) -> None:
            value = self.stack[-1].realize()
            if isinstance(value, dynamo.variables.TensorVariable) and not value.ndim:
                self.stack[-1] = _known_number(value) or value
            form(self, instruction)

        return string

    forms = {"GET_ITER": started, "FOR_ITER": continued, "FORMAT_VALUE": formatted, "FORMAT_SIMPLE": formatted}
    with branches_traced(branch), _instructions_traced(forms):
        yield
    for value, version, line in selected:
        if value._version != version:
            raise RuntimeError(f"what a branch on a tensor assigns is written in place later{line}")


def _trained_in(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """The trained parameters that the nodes besides the `known` ones read."""
    read = {arg for node in graph.nodes if node not in known for arg in node.all_input_nodes}
    return {each for each in read if isinstance(each.meta.get("example_value"), torch.nn.Parameter) and _state(each)[1]}


def _warn_of_zeros(bodies: list[set[fx.Node]], line: int | None) -> None:
    """Warn of parameters that the bodies of a loop, of which some will be skipped, do not all read."""
    own = set[fx.Node]().union(*bodies) - set[fx.Node].intersection(*bodies)
    if own and torch.is_grad_enabled():
        warnings.warn(
            f"a loop over what is nonzero, in line {line} of a forward, reads {len(own)} parameters for some places "
            "alone, such as those of an expert. If a place is skipped, these get gradients of zero, where one device "
            "gives none: weight decay and momentum go on for them",
            stacklevel=2,
        )


def _ends_of_branch(translator: Any, branch: int) -> set[int]:
    """The instructions where both sides of a branch end: the one where they meet, or all returns; empty in a loop."""
    flow, leave = _flow(translator), _LEAVE
    # The first one that both sides come to, whatever they do before
    end = networkx.immediate_dominators(flow.reverse(copy=False), leave).get(branch, leave)
    ends = {end} if end != leave else {*flow.predecessors(leave)}
    flow.remove_nodes_from({end, leave})
    region = networkx.descendants(flow, branch) if flow.has_node(branch) else set()
    return set() if any(branch in flow[index] for index in region) else ends


_LEAVE = -1


def _flow(translator: Any) -> networkx.DiGraph:
    """The instructions that may follow each, by their indices; `_LEAVE` follows a return."""
    flow = networkx.DiGraph()
    for index, each in enumerate(translator.instructions):
        if each.opname in _RETURNS:
            flow.add_edge(index, _LEAVE)
        elif not each.opname.startswith((*_RAISES, "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            flow.add_edge(index, index + 1)
        if each.target is not None:
            flow.add_edge(index, translator.indexof[each.target])
    return flow


def _is_read(translator: Any, flow: networkx.DiGraph, name: str, start: int) -> bool:
    """Whether a local variable is read from an instruction on, before it is assigned; `flow` is that of `_flow`.

    Dynamo's own analysis does not count assignments in loops.
    """
    seen, waiting = {start, _LEAVE}, [start]
    while waiting:
        index = waiting.pop()
        each = translator.instructions[index]
        following = {*flow.successors(index)}
        if each.exn_tab_entry:
            following.add(translator.indexof[each.exn_tab_entry.target])
        if each.argval == name and each.opname.startswith(("LOAD", "DELETE")):
            return True
        if each.argval != name or not each.opname.startswith("STORE"):
            waiting += following - seen
            seen |= following
    return False


def _all_places(translator: Any, values: Any) -> tuple[Any, list[Any]] | None:
    """Of a tensor made by ``x.nonzero()`` of one dimension: an iterator over all places, and which are in the tensor.

    None of another tensor, or of what is no tensor. The places are tensors whose values are known while tracing.
    """
    dynamo: Any = torch._dynamo
    if not isinstance(values, dynamo.variables.TensorVariable):
        return None
    # 1. What was nonzero? The ops in between keep the order.
    source = values.as_proxy().node
    shape, dtype = source.meta["example_value"].shape, source.meta["example_value"].dtype
    while source.op != "placeholder" and (
        source.target in _KEEP_ORDER or source.target is operator.getitem and source.args[1] in (0, (slice(None), 0))
    ):
        source = source.args[0]
    if source.op == "placeholder" or source.target not in _NONZERO or len(source.args) != 1:
        return None
    size = source.args[0].meta["example_value"].shape
    is_list = len(shape) == 1 or len(shape) == 2 and shape[1] == 1
    if len(size) != 1 or not isinstance(size[0], int) or dtype != torch.int64:
        return None
    if not is_list or not isinstance(shape[0], torch.SymInt):
        return None

    def call(kind: str, target: Any, *args: Any) -> Any:
        proxy = translator.output.create_proxy(kind, target, args, {})
        return dynamo.variables.builder.wrap_fx_proxy(translator, proxy)

    # 2. Compare with all places. Writes into `values` from now on change nothing in a loop over them.
    every = call("call_function", torch.tensor, [*range(size[0])]).as_proxy()
    equal = call("call_method", "eq", call("call_method", "reshape", values.as_proxy(), -1, 1).as_proxy(), every)
    found = call("call_method", "any", equal.as_proxy(), 0).as_proxy()
    are_hit = [call("call_function", torch.select, found, 0, place) for place in range(size[0])]
    items = [call("call_function", torch.tensor, [place] if len(shape) == 2 else place) for place in range(size[0])]
    new = dynamo.variables.base.ValueMutationNew()
    return dynamo.variables.lists.ListIteratorVariable(items, mutation_type=new), are_hit


def _select(
    translator: Any, condition: Any, starts: tuple[int, int], ends: set[int], jumps_if: bool,
    selected: list[tuple[Tensor, int, str]], in_loop: bool, item: Any = None,
) -> None:  # fmt: skip
    """Trace both sides of a branch, and go on behind them with the values that the condition selects.

    `selected` gets the tensors that must not be written from now on, with their versions and the source line. With
    an `item`, the first side is the body of a loop that starts with it, and the other side does nothing. In such a
    loop, parameters may have gradients of zero from what is skipped.
    """
    dynamo: Any = torch._dynamo
    output, graph = translator.output, translator.output.graph

    def call(kind: str, target: Any, *args: Any) -> Any:
        proxy = output.create_proxy(kind, target, args, {})
        return dynamo.variables.builder.wrap_fx_proxy(translator, proxy)

    def gated(proxy: fx.Proxy, if_true: bool, first: fx.Node) -> fx.Proxy:
        """A copy of a value, made before the node `first`, that passes gradients on if the condition is `if_true`."""
        pair = proxy, call("call_method", "detach", proxy).as_proxy()
        gate: fx.Proxy = call("call_function", torch.where, chosen, *(pair if if_true else pair[::-1])).as_proxy()
        first.prepend(pair[1].node)
        first.prepend(gate.node)
        return gate

    # 1. The condition as one boolean
    value = condition.as_proxy().node.meta["example_value"]
    if value.numel() != 1:
        raise _NoSelectionError
    if value.dim():
        condition = call("call_method", "reshape", condition.as_proxy(), ())
    if value.dtype != torch.bool:
        condition = call("call_method", "bool", condition.as_proxy())
    chosen = condition.as_proxy()
    # 2. Trace both sides from the same state.
    before = {node: _state(node) for node in graph.nodes if _is_tensor(node)}
    stack, variables, blocks = [*translator.stack], dict(translator.symbolic_locals), [*translator.block_stack]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled()
    sides: list[tuple[list[Any], dict[str, Any], list[fx.Node]]] = []
    written: list[set[StorageWeakRef]] = []
    stops: list[int] = []
    for start in starts:
        translator.stack, translator.block_stack = [*stack], [*blocks]
        translator.symbolic_locals.clear()
        translator.symbolic_locals.update(variables)
        translator.instruction_pointer, known = start, {*graph.nodes}
        if item is not None and start not in ends:
            translator.push(item)
        with _without_effects() as writes:
            while (end := translator.instruction_pointer) not in ends:
                name = translator.instructions[end].opname
                leaves = item is not None and (name in _RETURNS or len(translator.stack) < len(stack))
                if leaves or name.startswith(_REFUSED) or not translator.step():
                    raise _NoSelectionError
        if (torch.is_grad_enabled(), torch.is_autocast_enabled()) != modes:
            raise _NoSelectionError
        if (last := translator.instructions[end]).opname == "RETURN_CONST":
            translator.push(dynamo.variables.ConstantVariable.create(last.argval))
        new = [node for node in graph.nodes if node not in known and node.op != "placeholder"]
        sides.append((translator.stack, dict(translator.symbolic_locals), new))
        written.append(writes)
        stops.append(end)
    inside = {node for _, _, new in sides for node in new}
    # 3. Refuse what acts beside the values.
    for node in inside:
        acts = node.target is torch._assert_async or isinstance(node.target, torch._ops.HigherOrderOperator)
        is_number = isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        users = [user for user in node.users if _is_tensor(user) and user.target is not torch.scalar_tensor]
        if acts or is_number and users:  # a number may only be the condition of a branch inside
            raise _NoSelectionError
    old = [node for node in graph.nodes if node in before or node.op == "placeholder" and _is_tensor(node)]
    # 4. Let each side write into a copy of a tensor that was there before, and write the selected one into it.
    storages = {node: next(iter(_storages(node.meta["example_value"]))) for node in (*old, chosen.node)}
    every = written[0] | written[1]
    selecting = call("call_method", "clone", chosen).as_proxy() if storages[chosen.node] in every else chosen
    for storage in (each for each in dict.fromkeys(storages.values()) if each in every):
        names = [node for node in old if storages[node] == storage]
        used = [node for node in graph.nodes if node not in inside and not inside.isdisjoint(node.users)]
        used = [node for node in used if storage in _storages(node.meta.get("example_value"))]
        if any(node.op == "placeholder" and before.get(node, _state(node))[1] for node in used):
            raise RuntimeError(CHANGED_PARAMETER)
        is_one = len({id(node.meta["example_value"]) for node in used}) == 1 and used[0] in names
        if not is_one or not in_loop and any(_state(node)[1] for node in names):
            raise _NoSelectionError  # there are several views, or it takes part in gradients
        place = used[0]
        proxy, copies = fx.Proxy(place, output.current_tracer), list[fx.Proxy]()
        for (_, _, new), writes, is_target in zip(sides, written, (False, True), strict=True):
            copies.append(proxy)
            if storage in writes:
                if before.get(place, (0, False))[1]:
                    copies[-1] = gated(proxy, is_target == jumps_if, new[0])
                else:
                    copies[-1] = call("call_method", "clone", proxy).as_proxy()
                    new[0].prepend(copies[-1].node)
                for user, name in itertools.product(new, used):
                    user.replace_input_with(name, copies[-1].node)
        value = call("call_function", torch.where, selecting, *(copies[::-1] if jumps_if else copies))
        call("call_method", "copy_", proxy, value.as_proxy())
        before.update((node, _state(node)) for node in names)
    if any(_state(node) != before.get(node, _state(node)) for node in old):
        raise _NoSelectionError
    # 5. Let gradients enter the side that is taken only.
    for (_, _, new), is_target in zip(sides, (False, True), strict=True):
        for node in dict.fromkeys(arg for user in new for arg in user.all_input_nodes if arg in old):
            if node.meta["example_value"].requires_grad:
                proxy = fx.Proxy(node, output.current_tracer)
                gate = gated(proxy, is_target == jumps_if, new[0]).node
                for user in new:
                    user.replace_input_with(node, gate)
    # 6. Select each variable that is needed later, and what is left on the stack.
    def merged(one: Any, other: Any) -> Any:
        one, other = one.realize(), other.realize()
        if one is other:
            return other
        if one.is_python_constant() and other.is_python_constant():
            same = one.as_python_constant(), other.as_python_constant()
            if type(same[0]) is type(same[1]) and same[0] == same[1]:
                return other
        containers = dynamo.variables.TupleVariable, *[dynamo.variables.ConstDictVariable] * (len(ends) > 1)
        if type(one) is type(other) and isinstance(one, containers) and len(one.items) == len(other.items):
            if isinstance(one.items, list):
                return one.clone(items=[*map(merged, one.items, other.items)])
            if [*one.items] == [*other.items]:  # of what both sides return, nothing else is left
                return one.clone(items={key: merged(value, other.items[key]) for key, value in one.items.items()})
        if not (isinstance(one, dynamo.variables.TensorVariable) and isinstance(other, type(one))):
            raise _NoSelectionError
        inputs = output.current_tracer.maybe_lift_tracked_freevar_to_input  # of the part that is a checkpoint's
        proxies = inputs(one.as_proxy()), inputs(other.as_proxy())
        nodes = [proxy.node for proxy in proxies]
        values = [node.meta["example_value"] for node in nodes]
        kinds = {(value.shape, value.dtype, value.device) for value in values}
        trained = [_trained(node) if node.meta["example_value"].requires_grad else None for node in nodes]
        if len(kinds) != 1 or not in_loop and trained[0] != trained[1]:
            raise _NoSelectionError
        pair = proxies[::-1] if jumps_if else proxies
        result = call("call_function", torch.where, selecting, *pair)
        place = translator.frame_summary()
        line = f'\n  File "{place.filename}", line {place.lineno}, in {place.name}\n    {place.line}'
        values.append(result.as_proxy().node.meta["example_value"])
        selected.extend((value, value._version, line) for value in values)
        return result

    (one_stack, ones, _), (other_stack, others, _) = sides
    if len(one_stack) != len(other_stack):
        raise _NoSelectionError
    pairs = list(zip(one_stack, other_stack, strict=True))
    translator.stack = [merged(one, other) for one, other in pairs]
    if of_values := [stop for stop in stops if translator.instructions[stop].opname == "RETURN_VALUE"]:
        translator.instruction_pointer = of_values[0]
    elif last.opname == "RETURN_CONST":
        translator.pop()
    flow = _flow(translator)
    for name in ones | others:
        one, other = ones.get(name), others.get(name)
        if one is other:
            continue
        if not _is_read(translator, flow, name, end):
            translator.symbolic_locals.pop(name, None)
        elif one is None or other is None:
            raise _NoSelectionError
        else:
            translator.symbolic_locals[name] = merged(one, other)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _state(node: fx.Node) -> tuple[int, bool]:
    """The version of a tensor, and whether it requires a gradient."""
    value = node.meta["example_value"]
    return value._version, value.requires_grad


def _storages(values: Any) -> set[StorageWeakRef]:
    """The storages of the tensors in `values`. References keep their addresses from being used again in a side."""
    reference: Any = StorageWeakRef
    leaves = pytree.tree_leaves(values)
    return {reference(leaf.untyped_storage()) for leaf in leaves if isinstance(leaf, Tensor)}


def _trained(node: fx.Node) -> set[fx.Node]:
    """The inputs of the graph that a value gives gradients to."""

    def has_gradient(arg: fx.Node) -> bool:
        values = pytree.tree_leaves(arg.meta.get("example_value"))
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    found, waiting = {node}, [node]
    while waiting:
        more = {arg for arg in waiting.pop().all_input_nodes if arg not in found and has_gradient(arg)}
        found |= more
        waiting += more
    return {node for node in found if node.op == "placeholder"}


@contextlib.contextmanager
def _without_effects() -> Iterator[set[StorageWeakRef]]:
    """While this runs, Dynamo refuses to change objects that were there before, other than tensors.

    Yields the storages that are written.
    """
    from torch._dynamo.current_scope_id import enter_new_scope
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable, TensorVariable
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch: Callable[..., Any] = FakeTensorMode.dispatch
    set_item: Callable[..., Any] = ConstDictVariable.call_method
    written: set[StorageWeakRef] = set()

    def noted(self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for index, described in enumerate(op._schema.arguments if hasattr(op, "_schema") else ()):
            if described.alias_info is not None and described.alias_info.is_write:
                given = args[index] if index < len(args) else (kwargs or {}).get(described.name)
                written.update(_storages(given))
        return dispatch(self, op, types, args, kwargs)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__setitem__" and args[0] in self:  # ``self.count += 1`` puts the same tensor there again
            pair = [value.realize() for value in (self.getitem_const(tx, args[0]), args[1])]
            examples = [each.as_proxy().node.meta["example_value"] for each in pair if isinstance(each, TensorVariable)]
            if len(examples) == 2 and examples[0] is examples[1]:
                return ConstantVariable.create(None)
        return set_item(self, tx, name, args, kwargs)

    with (
        enter_new_scope(),
        mock.patch.object(SideEffects, "snapshot_attr_mutation", lambda *_: False, create=True),
        mock.patch.object(FakeTensorMode, "dispatch", noted),
        mock.patch.object(ConstDictVariable, "call_method", call_method),
    ):
        yield written
