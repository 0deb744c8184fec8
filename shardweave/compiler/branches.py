"""Branches on tensors: how Dynamo traces them. A step is one graph, so that both sides are part of it.

Asserts
    A branch one side of which only raises an error is an assert (`raises_as_asserts`).

Selections
    Of other branches, both sides are traced, and `torch.where` selects what they assign (`branches_selected`).

Numbers
    A branch on a number that depends on tensors, such as ``x.amax().item() > 9``, is one on a tensor.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import networkx
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

_BRANCHES = [f"POP_JUMP_{way}IF_{value}" for way in ("", "FORWARD_", "BACKWARD_") for value in ("TRUE", "FALSE")]


Jump = Callable[[Any, Any], None]


@contextlib.contextmanager
def branches_traced(form: Callable[[Any, Any, bool, Jump], None]) -> Iterator[None]:
    """While this runs, Dynamo traces a branch on a tensor by `form`.

    That gets Dynamo's translator, the instruction, whether it jumps where the tensor is true, and what traces it
    otherwise.
    """
    dynamo: Any = torch._dynamo  # loaded by the first capture, not by the import of this package
    translators = dynamo.symbolic_convert
    kinds = (
        translators.InstructionTranslator,
        translators.InliningInstructionTranslator,
        translators.InliningGeneratorInstructionTranslator,
    )

    def patched(name: str, jump: Jump) -> Jump:
        jumps_if = name.endswith("TRUE")

        def branch(self: Any, instruction: Any) -> None:
            if isinstance(self.stack[-1], dynamo.variables.SymNodeVariable):
                self.stack[-1] = _known_or_tensor(self, self.stack[-1])
            if isinstance(self.stack[-1], dynamo.variables.TensorVariable):
                return form(self, instruction, jumps_if, jump)
            return jump(self, instruction)

        return branch

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            table: list[Any] = list(kind.dispatch_table)
            for name in set(_BRANCHES) & set(dis.opmap):
                table[dis.opmap[name]] = patched(name, table[dis.opmap[name]])
            stack.enter_context(mock.patch.object(kind, "dispatch_table", table))
        yield


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


class _NoSelectionError(Exception):
    """A branch does more than to assign tensors."""


_ENDS = "RETURN", "RAISE", "RERAISE"
_REFUSED = *_ENDS, "YIELD", "SEND", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE", "IMPORT"
"""Instructions of these names leave a branch, or change more than local variables."""


@contextlib.contextmanager
def branches_selected() -> Iterator[None]:
    """Let Dynamo trace both sides of a branch on a tensor, and select what they assign by `torch.where`.

    Of ``if not torch.isfinite(x).all(): x = torch.clamp(x, -1, 1)``, for one, Dynamo knows no graph. Each side may only
    assign local variables, to tensors of the same kind. The gradient that flows into a side passes through a selection
    too, so that what is infinite in the side that is not taken adds nothing.

    Raises
    ------
    RuntimeError
        What was selected, or selected from, is written in place later: the branch does not copy, a selection does.
    """
    selected: list[tuple[Tensor, int, str]] = []
    errors: Any = torch._dynamo.exc
    refusals = _NoSelectionError, errors.Unsupported, errors.ObservedException, errors.TorchRuntimeError

    def branch(self: Any, instruction: Any, jumps_if: bool, jump: Jump) -> None:
        starts = self.instruction_pointer, self.indexof[instruction.target]
        region, end = _region_of_branch(self, self.instruction_pointer - 1)
        if end is None:
            return jump(self, instruction)
        condition, line = self.pop(), self.lineno
        try:
            _select(self, condition, starts, region, end, jumps_if, selected)
        except refusals:
            self.push(condition)
            self.current_instruction = instruction
            self.starts_line(line)
            return jump(self, instruction)
        return None

    with branches_traced(branch):
        yield
    for value, version, line in selected:
        if value._version != version:
            raise RuntimeError(f"what a branch on a tensor assigns is written in place later{line}")


def _region_of_branch(translator: Any, branch: int) -> tuple[set[int], int | None]:
    """The instructions of the two sides of a branch, and where these meet; None if they may not, or are refused."""
    instructions, leave = translator.instructions, -1
    # 1. The instructions that may follow each
    flow = networkx.DiGraph()
    for index, each in enumerate(instructions):
        if each.opname.startswith(_ENDS):
            flow.add_edge(index, leave)
        elif each.opname not in ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"):
            flow.add_edge(index, index + 1)
        if each.target is not None:
            flow.add_edge(index, translator.indexof[each.target])
    # 2. The first one that both sides come to, whatever they do before
    end = networkx.immediate_dominators(flow.reverse(copy=False), leave).get(branch, leave)
    flow.remove_node(end)
    region = set() if end == leave else networkx.descendants(flow, branch)
    if end == leave or flow.has_node(branch) and any(branch in flow[index] for index in region):  # in a loop
        return region, None
    return region, None if any(instructions[index].opname.startswith(_REFUSED) for index in region) else end


def _select(
    translator: Any, condition: Any, starts: tuple[int, int], region: set[int], end: int, jumps_if: bool,
    selected: list[tuple[Tensor, int, str]],
) -> None:  # fmt: skip
    """Trace both sides of a branch, and go on behind them with the values that the condition selects.

    `selected` gets the tensors that must not be written from now on, with their versions and the source line.
    """
    dynamo: Any = torch._dynamo
    output, graph = translator.output, translator.output.graph

    def call(kind: str, target: Any, *args: Any) -> Any:
        proxy = output.create_proxy(kind, target, args, {})
        return dynamo.variables.builder.wrap_fx_proxy(translator, proxy)

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
    before = {node: node.meta["example_value"]._version for node in graph.nodes if _is_tensor(node)}
    stack, variables, blocks = [*translator.stack], dict(translator.symbolic_locals), [*translator.block_stack]
    sides: list[tuple[list[Any], dict[str, Any], list[fx.Node]]] = []
    for start in starts:
        translator.stack, translator.block_stack = [*stack], [*blocks]
        translator.symbolic_locals.clear()
        translator.symbolic_locals.update(variables)
        translator.instruction_pointer, known = start, {*graph.nodes}
        with _without_effects() as drawn:
            while translator.instruction_pointer != end:
                if translator.instruction_pointer not in region or not translator.step():
                    raise _NoSelectionError
        if drawn:
            raise _NoSelectionError
        new = [node for node in graph.nodes if node not in known and node.op != "placeholder"]
        sides.append((translator.stack, dict(translator.symbolic_locals), new))
    # 3. Refuse what acts beside the values, or writes in place what was there before.
    for node in (node for _, _, new in sides for node in new):
        acts = node.target is torch._assert_async or isinstance(node.target, torch._ops.HigherOrderOperator)
        if acts or isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise _NoSelectionError
    old = [node for node in graph.nodes if node in before or node.op == "placeholder" and _is_tensor(node)]
    if any(node.meta["example_value"]._version != before.get(node, 0) for node in old):
        raise _NoSelectionError
    # 4. Let gradients enter the side that is taken only.
    for (_, _, new), is_target in zip(sides, (False, True), strict=True):
        for node in {arg for user in new for arg in user.all_input_nodes if arg in old}:
            if node.meta["example_value"].requires_grad:
                proxy = fx.Proxy(node, output.current_tracer)
                pair = proxy, call("call_method", "detach", proxy).as_proxy()
                gate = call("call_function", torch.where, chosen, *(pair if is_target == jumps_if else pair[::-1]))
                places = gate.as_proxy().node, pair[1].node
                for made in places:
                    new[0].prepend(made)
                places[0].prepend(places[1])
                for user in new:
                    user.replace_input_with(node, places[0])

    # 5. Select each variable that is needed later, and what is left on the stack.
    def merged(one: Any, other: Any) -> Any:
        one, other = one.realize(), other.realize()
        if one.is_python_constant() and other.is_python_constant():
            same = one.as_python_constant(), other.as_python_constant()
            if type(same[0]) is type(same[1]) and same[0] == same[1]:
                return other
        if not (isinstance(one, dynamo.variables.TensorVariable) and isinstance(other, type(one))):
            raise _NoSelectionError
        inputs = output.current_tracer.maybe_lift_tracked_freevar_to_input  # of the part that is a checkpoint's
        proxies = inputs(one.as_proxy()), inputs(other.as_proxy())
        nodes = [proxy.node for proxy in proxies]
        values = [node.meta["example_value"] for node in nodes]
        kinds = {(value.shape, value.dtype, value.device, value.requires_grad) for value in values}
        if len(kinds) != 1 or values[0].requires_grad and _trained(nodes[0]) != _trained(nodes[1]):
            raise _NoSelectionError
        pair = proxies[::-1] if jumps_if else proxies
        result = call("call_function", torch.where, chosen, *pair)
        place = translator.frame_summary()
        line = f'\n  File "{place.filename}", line {place.lineno}, in {place.name}\n    {place.line}'
        values.append(result.as_proxy().node.meta["example_value"])
        selected.extend((value, value._version, line) for value in values)
        return result

    (one_stack, ones, _), (other_stack, others, _) = sides
    if len(one_stack) != len(other_stack):
        raise _NoSelectionError
    live = dynamo.bytecode_analysis.livevars_analysis(translator.instructions, translator.instructions[end])
    pairs = list(zip(one_stack, other_stack, strict=True))
    translator.stack = [other if one is other else merged(one, other) for one, other in pairs]
    for name in ones.keys() | others.keys():
        one, other = ones.get(name), others.get(name)
        if one is other:
            continue
        if name not in live:
            translator.symbolic_locals.pop(name, None)
        elif one is None or other is None:
            raise _NoSelectionError
        else:
            translator.symbolic_locals[name] = merged(one, other)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


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
def _without_effects() -> Iterator[list[Any]]:
    """While this runs, Dynamo refuses to change objects that were there before. Yields the ops that draw numbers."""
    from torch._dynamo.current_scope_id import enter_new_scope
    from torch._dynamo.side_effects import SideEffects
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch: Callable[..., Any] = FakeTensorMode.dispatch
    drawn: list[Any] = []

    def noted(self: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            drawn.append(op)
        return dispatch(self, op, *args, **kwargs)

    with (
        enter_new_scope(),
        mock.patch.object(SideEffects, "snapshot_attr_mutation", lambda *_: False, create=True),
        mock.patch.object(FakeTensorMode, "dispatch", noted),
    ):
        yield drawn
