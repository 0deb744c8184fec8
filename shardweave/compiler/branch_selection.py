"""Selections: what both sides of a branch on a tensor do is traced, and `torch.where` takes the values of one of them.

Effects
    What a side assigns, puts into lists and dicts, and writes is noted, and taken back before the other side is traced
    (`_without_effects`). Whatever else it does is refused.

Rows
    A side that computes with selected rows alone needs no selection: it does nothing where there are none
    (`Selection.take_rows`). `without_rows` tells of which branches that is so.

`branches` says which branches and loops of a forward become selections.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import networkx
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

CHANGED_PARAMETER = "a branch on a tensor changes a parameter that is trained"
LISTED = "a list of selections, some of which have no rows and are not appended then, is used other than by torch.cat"


class NoSelectionError(Exception):
    """A branch does more than to assign tensors."""


_RETURNS = "RETURN_VALUE", "RETURN_CONST"
_RAISES = "RAISE", "RERAISE"
_REFUSED = *_RAISES, "YIELD", "SEND", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE", "IMPORT"
"""Instructions of these names leave a branch, or change more than local variables."""
LEAVE = -1


def instruction_flow(translator: Any) -> networkx.DiGraph:
    """The instructions that may follow each, by their indices; `LEAVE` follows a return."""
    flow = networkx.DiGraph()
    for index, each in enumerate(translator.instructions):
        if each.opname in _RETURNS:
            flow.add_edge(index, LEAVE)
        elif not each.opname.startswith((*_RAISES, "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            flow.add_edge(index, index + 1)
        if each.target is not None:
            flow.add_edge(index, translator.indexof[each.target])
    return flow


def _is_read(translator: Any, flow: networkx.DiGraph, name: str, start: int) -> bool:
    """Whether a local variable is read from an instruction on, before it is assigned; `flow` is of `instruction_flow`.

    Dynamo's own analysis does not count assignments in loops.
    """
    seen, waiting = {start, LEAVE}, [start]
    while waiting:
        index = waiting.pop()
        each = translator.instructions[index]
        following = {*flow.successors(index)}
        if each.exn_tab_entry:
            following.add(translator.indexof[each.exn_tab_entry.target])
        is_name = each.argval == name and not each.opname.endswith(("_ATTR", "_METHOD", "_GLOBAL", "_CONST"))
        if is_name and each.opname.startswith(("LOAD", "DELETE")):
            return True
        if not is_name or not each.opname.startswith("STORE"):
            waiting += following - seen
            seen |= following
    return False


@dataclass(frozen=True)
class _Write:
    """An op that writes into tensors: their storages, and the tensors by which it indexes them."""

    name: str
    storages: set[StorageWeakRef]
    indices: list[Tensor]


@dataclass
class _Effects:
    """What a side of a branch writes, the tensors that it appends to lists, and those that it puts into dicts.

    A buffer that is assigned is put into its module's dict of buffers.
    """

    writes: list[_Write] = field(default_factory=list)
    appended: list[tuple[Any, Any]] = field(default_factory=list)
    stored: dict[Any, tuple[Any, Any, Any]] = field(default_factory=dict)


@dataclass
class _Side:
    """What tracing one side of a branch gave."""

    end: int
    stack: list[Any]
    variables: dict[str, Any]
    nodes: list[fx.Node]
    effects: _Effects

    @property
    def written(self) -> set[StorageWeakRef]:
        return set[StorageWeakRef]().union(*(write.storages for write in self.effects.writes))

    def parameters(self) -> set[fx.Node]:
        """The trained parameters that it reads."""
        read = {arg for node in self.nodes for arg in node.all_input_nodes}
        values = {node: node.meta.get("example_value") for node in read}
        return {node for node, value in values.items() if isinstance(value, nn.Parameter) and value.requires_grad}


class Selection:
    """Traces both sides of a branch, and goes on behind them with the values that the condition selects.

    `selected` gets the tensors that must not be written from now on, with their versions and the source line. With
    `skips`, parameters that one side alone reads may have gradients of zero from the other.
    """

    def __init__(
        self, translator: Any, condition: Any, jumps_if: bool, selected: list[tuple[Tensor, int, str]], skips: bool
    ) -> None:
        self.translator, self.output, self.graph = translator, translator.output, translator.output.graph
        self.jumps_if, self.selected, self.skips = jumps_if, selected, skips
        self.condition = condition.as_proxy().node
        # The condition as one boolean
        value = self.condition.meta["example_value"]
        if value.numel() != 1:
            raise NoSelectionError
        if value.dim():
            condition = self.call("call_method", "reshape", condition.as_proxy(), ())
        if value.dtype != torch.bool:
            condition = self.call("call_method", "bool", condition.as_proxy())
        self.chosen = self.selecting = condition.as_proxy()
        self.made = set[fx.Node]()

    def call(self, kind: str, target: Any, *args: Any) -> Any:
        """A new node, as Dynamo's variable."""
        dynamo: Any = torch._dynamo
        proxy = self.output.create_proxy(kind, target, args, {})
        return dynamo.variables.builder.wrap_fx_proxy(self.translator, proxy)

    def __call__(self, starts: tuple[int, int], ends: set[int], item: Any = None) -> list[set[fx.Node]]:
        """Returns the trained parameters that each side reads.

        With an `item`, the first side is the body of a loop that starts with it, and the other one does nothing.
        """
        graph = self.graph
        before = {node: _state(node) for node in graph.nodes if _is_tensor(node)}
        self.returns = len(ends) > 1
        self.sides = [self.traced(each, ends, item) for each in self.from_here(starts)]
        self.inside = {node for side in self.sides for node in side.nodes}
        self.made |= self.inside
        parameters = [side.parameters() for side in self.sides]
        self.refuse_acts()
        old = [node for node in graph.nodes if node in before or node.op == "placeholder" and _is_tensor(node)]
        if not self.take_rows(old, before):
            self.select_written(old, before)
            if any(_state(node) != before.get(node, _state(node)) for node in old):
                raise NoSelectionError
            for side in self.sides:
                self.gate_inputs(old, side, side.nodes)
            lists = [[values for values, _ in side.effects.appended] for side in self.sides]
            if len(lists[0]) != len(lists[1]) or any(one is not other for one, other in zip(*lists, strict=True)):
                raise NoSelectionError
            pairs = zip(*([each for _, each in side.effects.appended] for side in self.sides), strict=True)
            appended, stored = [self.merged(*pair) for pair in pairs], self.merged_items()
            self.go_on(self.sides[-1], self.merged)
            self.append(lists[0], appended)
            for values, name, value in stored:
                values.call_method(self.translator, "__setitem__", [name, value], {})
        return parameters

    def from_here(self, starts: tuple[int, int]) -> Iterator[int]:
        """The starts of both sides, each of which finds the same state."""
        translator = self.translator
        stack, variables, blocks = [*translator.stack], dict(translator.symbolic_locals), [*translator.block_stack]
        for start in starts:
            translator.stack, translator.block_stack = [*stack], [*blocks]
            translator.symbolic_locals.clear()
            translator.symbolic_locals.update(variables)
            translator.instruction_pointer = start
            yield start

    def traced(self, start: int, ends: set[int], item: Any) -> _Side:
        translator, known, height = self.translator, {*self.graph.nodes}, len(self.translator.stack)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled()
        if item is not None and start not in ends:
            translator.push(item)
        with _without_effects() as effects:
            while (end := translator.instruction_pointer) not in ends:
                name = translator.instructions[end].opname
                leaves = item is not None and (name in _RETURNS or len(translator.stack) < height)
                if leaves or name.startswith(_REFUSED) or not translator.step():
                    raise NoSelectionError
        if (torch.is_grad_enabled(), torch.is_autocast_enabled()) != modes:
            raise NoSelectionError
        if (last := translator.instructions[end]).opname == "RETURN_CONST":
            translator.push(constant(last.argval))
        new = [node for node in self.graph.nodes if node not in known and node.op != "placeholder"]
        return _Side(end, translator.stack, dict(translator.symbolic_locals), new, effects)

    def refuse_acts(self) -> None:
        """Refuse what acts beside the values, and numbers that a side takes out of tensors for its ops.

        Such a number may only be the condition of a branch inside. The size of a selection is a number of its own.
        """
        taken = {node for node in self.inside if node.target in ("item", "tolist")}
        symbols = set[Any]().union(*(_symbols(node.meta.get("example_value")) for node in taken))
        for node in self.inside:
            acts = node.target is torch._assert_async or isinstance(node.target, torch._ops.HigherOrderOperator)
            users = [user for user in node.users if _is_tensor(user) and user.target is not torch.scalar_tensor]
            if acts or users and not _is_tensor(node) and symbols & _symbols(node.meta.get("example_value")):
                raise NoSelectionError

    def take_rows(self, old: list[fx.Node], before: Mapping[fx.Node, tuple[int, bool]]) -> bool:
        """Go on with the side that a selection with rows takes, if it does nothing where there are none.

        It then computes with these rows alone, and writes them where they were. Nothing needs to be selected.
        """
        if (none := without_rows(self.condition)) is None:
            return False
        side, other = self.sides[:: 1 if none.is_true == self.jumps_if else -1]
        # 1. What it computes with these rows has no elements, or is as it was. A gradient of zero of anything else is
        # not a number where a derivative is infinite.
        storages = {storage for node in old for storage in _storages(node.meta["example_value"])}
        same, empty = dict[fx.Node, fx.Node](), {node for node in old if none.has_none(node)}
        others, is_gated = list[fx.Node](), False
        for node in side.nodes:
            none.note_rows(node)
            value = node.meta.get("example_value")
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            if leaves and all(map(none.has_none, leaves)):
                empty.add(node)
            elif leaves and not empty.isdisjoint(node.all_input_nodes):
                base = node.args[0]
                if not isinstance(base, fx.Node) or base in empty or _name(node).strip("_") not in _BY_INDEX:
                    return False
                same[node] = same.get(base, base)
            elif leaves:
                others.append(node)
                is_gated |= any(leaf.requires_grad for leaf in leaves) and not _storages(leaves) <= storages
        inputs = {arg for node in others for arg in node.all_input_nodes}
        if is_gated and any(arg in same or _storages(arg.meta.get("example_value")) & side.written for arg in inputs):
            return False
        # 2. It writes by these rows alone.
        masks = [mask.meta["example_value"] for mask in none.masks]
        for write in side.effects.writes:
            by_rows = any(none.has_none(index) or any(index is mask for mask in masks) for index in write.indices)
            if write.storages & storages and not (by_rows and write.name in _WRITES_BY_INDEX):
                return False
        unknown = [node for node in old if not _storages(node.meta["example_value"]) & side.written]
        if other.written & storages or any(_state(node) != before.get(node, _state(node)) for node in unknown):
            return False
        # 3. It leaves the same values to the rest.

        def taken(one: Any, another: Any) -> Any:
            one, another = (each.realize() for each in ((one, another) if side is self.sides[0] else (another, one)))
            numbers = [none.number(_integer(each)) for each in (one, another)]
            if one is another or numbers[0] is not None and numbers[0] == numbers[1]:
                return one
            if _is_variable(one, "TensorVariable") and isinstance(another, type(one)):
                nodes = one.as_proxy().node, another.as_proxy().node
                shapes = [node.meta["example_value"].shape[1:] for node in nodes]
                is_empty = all(map(none.has_none, nodes)) and shapes[0] == shapes[1]
                if is_empty or same.get(nodes[0], nodes[0]) is nodes[1]:
                    return one
            raise NoSelectionError

        if side.effects.stored or other.effects.stored:
            return False
        one, another = (each.effects.appended for each in (side, other))
        if not all(none.has_none(each.as_proxy().node) for _, each in one):
            return False
        is_alike = len(one) == len(another)
        if another and not is_alike:
            return False
        try:
            if is_alike and any(pair[0][0] is not pair[1][0] for pair in zip(one, another, strict=True)):
                return False
            self.go_on(side, taken)
        except NoSelectionError:
            return False
        if is_gated:
            self.gate_inputs(old, side, others)
        self.append([values for values, _ in one], [each for _, each in one])
        for values, _ in one if not is_alike else ():
            _let_be_concatenated(values)
        return True

    def append(self, lists: list[Any], values: list[Any]) -> None:
        for each, value in zip(lists, values, strict=True):
            each.call_method(self.translator, "append", [value], {})

    def gated(self, proxy: fx.Proxy, if_true: bool, first: fx.Node) -> fx.Proxy:
        """A copy of a value, made before the node `first`, that passes gradients on if the condition is `if_true`."""
        pair = proxy, self.call("call_method", "detach", proxy).as_proxy()
        arguments = pair if if_true else pair[::-1]
        gate: fx.Proxy = self.call("call_function", torch.where, self.chosen, *arguments).as_proxy()
        for node in (pair[1].node, gate.node):
            first.prepend(node)
            self.made.add(node)
        return gate

    def select_written(self, old: list[fx.Node], before: dict[fx.Node, tuple[int, bool]]) -> None:
        """Let each side write into a copy of a tensor that was there before, and write the selected one into it."""
        graph, inside = self.graph, self.inside
        storages = {node: next(iter(_storages(node.meta["example_value"]))) for node in (*old, self.chosen.node)}
        every = self.sides[0].written | self.sides[1].written
        sources = {arg for node in inside for arg in node.all_input_nodes} & {*old}
        read = set[fx.Node]().union(*(_trained(node) for node in sources if node.meta["example_value"].requires_grad))
        if storages[self.chosen.node] in every:
            self.selecting = self.call("call_method", "clone", self.chosen).as_proxy()
        for storage in (each for each in dict.fromkeys(storages.values()) if each in every):
            names = [node for node in old if storages[node] == storage]
            used = [node for node in graph.nodes if node not in inside and not inside.isdisjoint(node.users)]
            used = [node for node in used if storage in _storages(node.meta.get("example_value"))]
            is_parameter = any(node.op == "placeholder" and before.get(node, _state(node))[1] for node in used)
            if is_parameter and self.reads_with_gradients(storage):
                raise RuntimeError(CHANGED_PARAMETER)
            is_one = len({id(node.meta["example_value"]) for node in used}) == 1 and used[0] in names
            takes_part = not is_parameter and any(_state(node)[1] for node in names)
            if not is_one or takes_part and not self.skips and not read <= _trained(used[0]):
                raise NoSelectionError  # there are several views, or it gives gradients to other parameters
            place = used[0]
            proxy, copies = fx.Proxy(place, self.output.current_tracer), list[fx.Proxy]()
            if is_parameter:  # no gradients pass through the write, nor through what the sides read of it
                proxy = self.call("call_method", "detach", proxy).as_proxy()
                self.sides[0].nodes[0].prepend(proxy.node)
            for side, is_target in zip(self.sides, (False, True), strict=True):
                copies.append(proxy)
                if storage in side.written:
                    first = side.nodes[0]
                    if before.get(place, (0, False))[1] and not is_parameter:
                        copies[-1] = self.gated(proxy, is_target == self.jumps_if, first)
                    else:
                        copies[-1] = self.call("call_method", "clone", proxy).as_proxy()
                        first.prepend(copies[-1].node)
                    for user, name in itertools.product(side.nodes, used):
                        user.replace_input_with(name, copies[-1].node)
            value = self.where(*copies)
            self.call("call_method", "copy_", proxy, value.as_proxy())
            before.update((node, _state(node)) for node in names)

    def reads_with_gradients(self, storage: StorageWeakRef) -> bool:
        """Whether a node of a side computes something from a tensor that gives gradients to it."""
        for node in self.inside:
            of_tensor = any(storage in _storages(arg.meta.get("example_value")) for arg in node.all_input_nodes)
            values = pytree.tree_leaves(node.meta.get("example_value"))
            made = [value for value in values if isinstance(value, Tensor) and storage not in _storages(value)]
            if of_tensor and any(value.requires_grad for value in made):
                return True
        return False

    def gate_inputs(self, old: list[fx.Node], side: _Side, users: list[fx.Node]) -> None:
        """Let gradients enter these nodes of a side only where it is taken."""
        known, is_target = {*old}, side is self.sides[1]
        for node in dict.fromkeys(arg for user in users for arg in user.all_input_nodes if arg in known):
            if node.meta["example_value"].requires_grad:
                proxy = fx.Proxy(node, self.output.current_tracer)
                gate = self.gated(proxy, is_target == self.jumps_if, side.nodes[0]).node
                for user in users:
                    user.replace_input_with(node, gate)

    def where(self, one: fx.Proxy, other: fx.Proxy) -> Any:
        """What the condition selects of the values of the first side and the other."""
        pair = (other, one) if self.jumps_if else (one, other)
        return self.call("call_function", torch.where, self.selecting, *pair)

    def merged(self, one: Any, other: Any) -> Any:
        """A variable that both sides give."""
        one, other = one.realize(), other.realize()
        if one is other:
            return other
        if one.is_python_constant() and other.is_python_constant():
            same = one.as_python_constant(), other.as_python_constant()
            if type(same[0]) is type(same[1]) and same[0] == same[1]:
                return other
        kinds = "TupleVariable", *["ConstDictVariable"] * self.returns  # nothing else is left of what sides return
        if type(one) is type(other) and _is_variable(one, *kinds) and len(one.items) == len(other.items):
            if isinstance(one.items, list):
                return one.clone(items=[*map(self.merged, one.items, other.items)])
            if [*one.items] == [*other.items]:
                return one.clone(items={key: self.merged(value, other.items[key]) for key, value in one.items.items()})
        one, other = self.as_tensor(one, other), self.as_tensor(other, one)
        if not (_is_variable(one, "TensorVariable") and isinstance(other, type(one))):
            raise NoSelectionError
        inputs = self.output.current_tracer.maybe_lift_tracked_freevar_to_input  # of the part that is a checkpoint's
        proxies = inputs(one.as_proxy()), inputs(other.as_proxy())
        nodes = [proxy.node for proxy in proxies]
        values = [node.meta["example_value"] for node in nodes]
        trained = [_trained(node) if node.meta["example_value"].requires_grad else None for node in nodes]
        is_alike = values[0].dtype == values[1].dtype and values[0].device == values[1].device
        if not is_alike or [*values[0].shape] != [*values[1].shape] or not self.skips and trained[0] != trained[1]:
            raise NoSelectionError
        result = self.where(*proxies)
        place = self.translator.frame_summary()
        line = f'\n  File "{place.filename}", line {place.lineno}, in {place.name}\n    {place.line}'
        values.append(result.as_proxy().node.meta["example_value"])
        self.selected.extend((value, value._version, line) for value in values)
        return result

    def merged_items(self) -> list[tuple[Any, Any, Any]]:
        """The dicts into which a side puts tensors, with their keys and what the condition selects."""
        one, other = (side.effects.stored for side in self.sides)
        found = []
        for place in one | other:
            name, before, _ = one.get(place) or other[place]
            if not (place in one and place in other):  # it may be written at the end, as a buffer is
                before = self.call("call_method", "clone", before.as_proxy())
            pair = [side[place][2] if place in side else before for side in (one, other)]
            found.append((place[0], name, self.merged(*pair)))
        return found

    def as_tensor(self, variable: Any, like: Any) -> Any:
        """A Python number, such as the 0.0 that a loss begins with, as a tensor where the other side has one."""
        value = like.as_proxy().node.meta["example_value"] if _is_variable(like, "TensorVariable") else None
        known = variable.as_python_constant() if variable.is_python_constant() else None
        if value is None or type(known) not in (int, float) or value.dim() or not value.is_floating_point():
            return variable
        return self.call("call_function", torch.full_like, like.as_proxy(), known)

    def go_on(self, side: _Side, merged: Callable[[Any, Any], Any]) -> None:
        """Go on where `side` ends, with what `merged` makes of each variable that is needed later, and of the stack."""
        one, other = self.sides
        translator, flow = self.translator, instruction_flow(self.translator)
        if len(one.stack) != len(other.stack):
            raise NoSelectionError
        stack = [merged(*pair) for pair in zip(one.stack, other.stack, strict=True)]
        variables = dict[str, Any]()
        for name in one.variables | other.variables:
            pair = one.variables.get(name), other.variables.get(name)
            if pair[0] is pair[1]:
                variables[name] = pair[0]
            elif _is_read(translator, flow, name, side.end):
                if None in pair:
                    raise NoSelectionError
                variables[name] = merged(*pair)
        returns = [each.end for each in self.sides if translator.instructions[each.end].opname == "RETURN_VALUE"]
        if translator.instructions[side.end].opname == "RETURN_CONST" and not returns:
            stack.pop()
        translator.instruction_pointer, translator.stack = (returns or [side.end])[0], stack
        translator.symbolic_locals.clear()
        translator.symbolic_locals.update(variables)


_BY_INDEX = "index_add", "index_put", "index_copy", "scatter_add", "scatter_reduce", "index_reduce"
_WRITES_BY_INDEX = {f"aten::{name}_" for name in _BY_INDEX}


@dataclass
class _NoRows:
    """What is known where a selection has no rows: symbols of numbers, masks without a true element; the condition."""

    numbers: dict[Any, Any]
    masks: list[fx.Node]
    is_true: bool

    def has_none(self, value: Any) -> bool:
        """Whether a tensor has no elements."""
        value = value.meta.get("example_value") if isinstance(value, fx.Node) else value
        return isinstance(value, Tensor) and any(self.number(size) == 0 for size in value.shape)

    def number(self, value: Any) -> Any:
        """An integer, in the symbols that are left; of a tensor, what equals nothing else."""
        value = value.meta.get("example_value") if isinstance(value, fx.Node) else value
        if isinstance(value, torch.SymInt):
            return value.node.expr.subs(self.numbers)
        return value if value is None or isinstance(value, int) else object()

    def note_rows(self, node: fx.Node) -> None:
        """Note the number of rows that are selected by a mask without true elements, or between equal bounds."""
        index = node.args[1] if _name(node) == "getitem" else node.args if _name(node) in _SELECTIONS else ()
        for each in index if isinstance(index, tuple) else (index,):
            is_empty = isinstance(each, slice) and self.number(each.start or 0) == self.number(each.stop)
            if is_empty or isinstance(each, fx.Node) and each in self.masks:
                known = set[Any]().union(*(_symbols(arg.meta.get("example_value")) for arg in node.all_input_nodes))
                self.numbers |= dict.fromkeys(_symbols(node.meta.get("example_value")) - known, 0)


_SELECTIONS = "nonzero", "argwhere", "where", "masked_select"
_NOT = "logical_not", "invert", "__invert__", "not_", "sym_not"
_SAME_CONDITION = "scalar_tensor", "sym_ite", "item", "bool", "reshape", *_NOT
_COMPARISONS = "eq", "ne", "gt", "ge", "lt", "le"
_COUNTS = "any", "sum", "count_nonzero", "size", "numel", "bincount", "index_add", "histc"
_SAME_COUNT = "getitem", "select", "item", "cumsum", "to", "long", "int", "view", "reshape", "flatten", "add", "sub"


def without_rows(condition: fx.Node) -> _NoRows | None:
    """What is known where a selection has no rows, of whose number a condition asks whether it is zero; else None.

    That is ``mask.any()``, or a count that is compared with zero, or with another one by ``==`` or ``!=``, as bounds
    are.
    """
    # 1. What is the condition of?
    steps, node = list[fx.Node](), condition
    while _name(node) in (*_SAME_CONDITION, *_COMPARISONS) and node.all_input_nodes:
        if _name(node) == "item" and "example_value" not in node.all_input_nodes[0].meta:  # of a tolist()
            break
        steps.append(node)
        node = node.all_input_nodes[0]
    value, counted = node.meta.get("example_value"), node
    while _name(counted) in _SAME_COUNT and counted.all_input_nodes:
        counted = counted.all_input_nodes[0]
    is_number = isinstance(value, torch.SymInt)
    if isinstance(value, Tensor):
        is_number = not value.is_floating_point() and (value.dtype != torch.bool or _name(node) == "any")
    if not is_number or _name(counted) not in _COUNTS:
        return None

    # 2. Is it another one as soon as there is a row?
    def found(count: int) -> bool:
        number: Any = count
        for step in reversed(steps):
            if _name(step) in _COMPARISONS:
                values = (number, 0) if step is equality else (number if arg in inside else arg for arg in step.args)
                number = getattr(operator, _name(step))(*values)
            elif _name(step) in _NOT:
                number = not number
        return bool(number)

    inside, numbers = {*steps, node}, dict[Any, Any]()
    equality = next((step for step in steps if len(step.all_input_nodes) == 2), None)
    if equality is not None:
        given = [arg.meta.get("example_value") for arg in equality.all_input_nodes]
        bounds = [each.node.expr for each in given if isinstance(each, torch.SymInt)]
        if _name(equality) not in ("eq", "ne") or len(bounds) < 2:
            return None
        one, other = bounds
        numbers = {other: one} if other.is_Symbol else {one: other} if one.is_Symbol else {}
    if found(0) in map(found, (1, 2, 1000)):
        return None
    # 3. What does it say of symbols and masks? A number below zero is none of rows.
    items = [node, *(step for step in steps if _name(step) == "item")]
    sizes = [each.meta.get("example_value") for each in items] if equality is None else []
    for size in (each for each in sizes if isinstance(each, torch.SymInt)):
        symbols = size.node.expr.free_symbols
        values = [size.node.expr.subs(dict.fromkeys(symbols, count)) for count in (0, 1, 2, 3, 1000)]
        is_size = statically_known_true(size >= 0) or found(-1) != found(0)
        if is_size and len(symbols) == 1 and values[0] == 0 and 0 not in values[1:]:
            numbers |= dict.fromkeys(symbols, 0)
    masks = list[fx.Node]()
    if node is counted and len(node.args) == 1 and not node.kwargs:
        mask = node.args[0]
        is_mask = isinstance(mask, fx.Node) and getattr(mask.meta.get("example_value"), "dtype", None) == torch.bool
        if isinstance(mask, fx.Node) and is_mask and not _is_written(mask, node):
            masks.append(mask)
    return _NoRows(numbers, masks, found(0))


_INDICES: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1), "sort": (1, -1), "max": (1, None), "min": (1, None),
}  # fmt: skip
"""Functions whose second result are indices: the place of the dimension among their arguments, and its default."""
_PLACES: dict[str, tuple[int, int | None]] = {
    "argmax": (1, None), "argmin": (1, None), "argsort": (1, -1), "multinomial": (0, -1),
}  # fmt: skip
"""Functions that give indices alone."""
MAX_INDICES = 1024
"""A loop over so many indices at most is traced, once for each: other loops are over labels, say, not over experts."""
_SAME_VALUES = "getitem", "flatten", "reshape", "view", "ravel", "squeeze", "unsqueeze", "contiguous", "clone", "detach"


def size_indexed(node: fx.Node, derived: Sequence[fx.Node]) -> int | None:
    """The size of the dimension into which a tensor has indices, as those of `topk`; None if it may have other values.

    Also None if it, or one of the tensors `derived` from it, is written later.
    """
    # 1. Go back to what made the indices.
    chain: list[Any] = [node]
    while _name(chain[-1]) in _SAME_VALUES and _is_tensor(chain[-1].all_input_nodes[0]):
        chain.append(chain[-1].all_input_nodes[0])
    if any(each.meta["example_value"].dtype != torch.int64 for each in chain):
        return None
    if any(_state(each)[0] or _is_written(each, each) for each in (*chain, *derived)):  # versions miss those of x.data
        return None
    # 2. What is the dimension?
    source, known = chain[-1], _PLACES
    if _name(source) == "getitem" and source.args[1] == 1:
        source, known = source.args[0], _INDICES
    if _name(source) not in known or not source.args:
        return None
    place, default = known[_name(source)]
    shape = source.args[0].meta["example_value"].shape
    dim = source.args[place] if 0 < place < len(source.args) else source.kwargs.get("dim", default)
    size = shape.numel() if dim is None else shape[dim] if isinstance(dim, int) and shape else None
    return size if isinstance(size, int) and size <= MAX_INDICES else None


def _is_written(value: Any, since: fx.Node) -> bool:
    """Whether a tensor may be written in place after a node of the graph, up to its end."""
    storages = _storages(value.meta["example_value"])
    for node in itertools.takewhile(lambda node: node is not since, reversed(since.graph.nodes)):
        given = [each for each in (*node.args[:1], node.kwargs.get("out")) if isinstance(each, fx.Node)]
        if writes_in_place(node) and storages & _storages([each.meta.get("example_value") for each in given]):
            return True
    return False


AUGMENTED_ASSIGNMENTS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
        "irshift",
    )
)  # fmt: skip
"""The functions of Python's augmented assignments, as ``x /= y``, which write into a tensor."""
_WRITING_OPERATORS = frozenset({operator.setitem, *AUGMENTED_ASSIGNMENTS})


def writes_in_place(node: fx.Node) -> bool:
    """Whether a call of a torch function or method in a traced graph may write into an argument.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> [writes_in_place(graph.call_method(name, (x, 1))) for name in ("add_", "add", "__setitem__")]
    [True, False, True]
    >>> [writes_in_place(graph.call_function(target, (x, 1))) for target in (operator.iand, operator.and_)]
    [True, False]
    """
    if node.op not in ("call_function", "call_method"):
        return False
    if getattr(node.target, "__module__", "") == "_operator":  # where `and_` is no method of a tensor
        return node.target in _WRITING_OPERATORS
    name = _name(node)
    if name.endswith("__"):
        return name.strip("_") in {each.__name__ for each in _WRITING_OPERATORS}
    return name.endswith("_") or "out" in node.kwargs


def _integer(variable: Any) -> Any:
    """An integer of a forward, symbolic or not; None of what is no integer."""
    if _is_variable(variable, "SymNodeVariable"):
        return variable.sym_num if isinstance(variable.sym_num, torch.SymInt) else None
    known = variable.as_python_constant() if variable.is_python_constant() else None
    return known if type(known) is int else None


def _is_variable(variable: Any, *kinds: str) -> bool:
    """Whether this is Dynamo's variable of a kind."""
    dynamo: Any = torch._dynamo
    return isinstance(variable, tuple(getattr(dynamo.variables, kind) for kind in kinds))


def constant(value: Any) -> Any:
    """Dynamo's variable of a value that is known while tracing."""
    dynamo: Any = torch._dynamo
    return dynamo.variables.ConstantVariable.create(value)


def _name(node: fx.Node) -> str:
    """The name of the function or method that a node calls; none of an input."""
    return "" if node.op == "placeholder" else str(getattr(node.target, "__name__", node.target))


def _symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in the sizes of tensors, that depend on values."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return set().union(*(free_unbacked_symbols(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, kinds)))


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
def _without_effects() -> Iterator[_Effects]:
    """While this runs, Dynamo refuses to change objects that were there before, other than tensors.

    Yields what is written into these, and what is put into lists and dicts, which is taken away again at the end.
    """
    from torch._dynamo.current_scope_id import enter_new_scope
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable, ListVariable, TensorVariable
    from torch._dynamo.variables.base import is_side_effect_safe
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatch: Callable[..., Any] = FakeTensorMode.dispatch
    set_item: Callable[..., Any] = ConstDictVariable.call_method
    of_list: Callable[..., Any] = ListVariable.call_method
    effects = _Effects()

    def noted(self: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = op._schema.arguments if hasattr(op, "_schema") else ()
        given = dict(zip((each.name for each in described), args, strict=False)) | (kwargs or {})
        into = [given.get(each.name) for each in described if each.alias_info is not None and each.alias_info.is_write]
        if into:
            indices = pytree.tree_leaves([given.get("index"), given.get("indices")])
            indices = [each for each in indices if isinstance(each, Tensor)]
            effects.writes.append(_Write(op._schema.name, _storages(into), indices))
        return dispatch(self, op, types, args, kwargs)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "__setitem__" and args[0] in self:  # ``self.count += 1`` puts the same tensor there again
            pair = [value.realize() for value in (self.getitem_const(tx, args[0]), args[1])]
            examples = [each.as_proxy().node.meta["example_value"] for each in pair if isinstance(each, TensorVariable)]
            if len(examples) == 2 and examples[0] is examples[1]:
                return ConstantVariable.create(None)
            if len(examples) == 2 and self.is_mutable() and not is_side_effect_safe(self.mutation_type):
                key = next(key for key in self.items if key.vt.as_python_constant() == args[0].as_python_constant())
                effects.stored[self, key] = *effects.stored.get((self, key), (args[0], pair[0]))[:2], pair[1]
                self.items[key] = pair[1]
                return ConstantVariable.create(None)
        return set_item(self, tx, name, args, kwargs)

    def append(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_older = self.is_mutable() and not is_side_effect_safe(self.mutation_type)
        if name != "append" or not is_older or not isinstance(args[0].realize(), TensorVariable):
            return of_list(self, tx, name, args, kwargs)
        effects.appended.append((self, args[0].realize()))
        vars(self)["items"].append(args[0].realize())
        return ConstantVariable.create(None)

    try:
        with (
            enter_new_scope(),
            mock.patch.object(SideEffects, "snapshot_attr_mutation", lambda *_: False, create=True),
            mock.patch.object(FakeTensorMode, "dispatch", noted),
            mock.patch.object(ConstDictVariable, "call_method", call_method),
            mock.patch.object(ListVariable, "call_method", append),
        ):
            yield effects
    finally:
        for values, _ in effects.appended:
            vars(values)["items"].pop()
        for (values, key), (_, before, _) in effects.stored.items():
            values.items[key] = before


def _let_be_concatenated(values: Any) -> None:
    """Let a list that has tensors without rows, which one device does not append, be used by `torch.cat` alone."""
    kind = type(values)
    if kind.__name__ == _CONCATENATED:
        return

    def refuse(*_: Any) -> Any:
        raise RuntimeError(LISTED)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "append":
            return refuse()
        own = type(self)
        self.__class__ = kind
        try:
            return self.call_method(tx, name, args, kwargs)
        finally:
            self.__class__ = own

    def as_python_constant(self: Any) -> Any:
        raise NotImplementedError  # so says Dynamo of a list that is not constant

    members: dict[str, Any] = {"items": property(refuse), "call_method": call_method, "__repr__": object.__repr__}
    values.__class__ = type(_CONCATENATED, (kind,), members | {"as_python_constant": as_python_constant})


_CONCATENATED = "_Concatenated"


@contextlib.contextmanager
def lists_concatenated() -> Iterator[None]:
    """While this runs, `torch.cat` takes the lists of `_let_be_concatenated`."""
    dynamo: Any = torch._dynamo
    kind = dynamo.variables.TorchInGraphFunctionVariable
    call = kind.call_function

    def plain(value: Any) -> Any:
        is_one = type(value.realize()).__name__ == _CONCATENATED
        return dynamo.variables.ListVariable([*vars(value.realize())["items"]]) if is_one else value

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in (torch.cat, torch.concat, torch.concatenate):
            args, kwargs = [*map(plain, args)], {name: plain(value) for name, value in kwargs.items()}
        return call(self, tx, args, kwargs)

    with mock.patch.object(kind, "call_function", call_function):
        yield
