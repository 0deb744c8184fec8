"""Annotation: each node of a captured step gets its rule, the factors of its dimensions, and the name that plans use.

Atoms
    A linear layer multiplies ``(b s) k`` by a weight, and its result is viewed as ``b s (3 h d)``: the loops ``m`` and
    ``n`` of the product are themselves products of atoms. `refine` finds the atoms. Views cut loops, and the cuts
    spread to all ops along the dimensions of values, until nothing changes. Then rules are written in atoms, ``m`` as
    ``m.0 m.1``.

Factor classes
    The loops that the graph forces to be the same, by a union-find over the joint graph. A factor of an op and a factor
    of the op that computed its input are in one class if they are the same atom of the value between them. Classes tell
    which loops are the batch, and which loops some op cannot split.

Values without elements
    A value such as the weight of ``nn.Linear(8, 0)`` cannot be sharded or moved, and no rule has a loop of size 0. Such
    a value becomes a constant, and so do values that are computed only from such values. An op that combines one with
    other values is rewritten without it.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeVar

import torch
from networkx.utils import UnionFind
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from shardweave.ir import META, BoundRule, Dims, Factor, NodeInfo, RuleError
from shardweave.sharding.graphs import decompose, describe, info, op_name
from shardweave.sharding.moe_dispatch import undo_dispatch
from shardweave.sharding.rules import find_rule
from shardweave.sharding.rules.pointwise import draws
from shardweave.sharding.rules.registry import Factors, form_of, output_shapes, shape, tensor_args

aten = torch.ops.aten

WRITE_OPS = {
    aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default, aten.index_copy.default,
    aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_reduce.two,
    aten.slice_scatter.default, aten.masked_scatter.default,
}  # fmt: skip
"""Ops that write into their first argument: if there is nothing to write, the result is that argument."""


def remove_empty_tensors(graph: fx.Graph) -> None:
    """Remove all tensors without elements from `graph`; `RuleError` for an op that needs one."""
    if not any(_is_empty(node.meta.get("val")) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if node.op == "call_function":
            _remove_empty_inputs(graph, node)
        elif node.op == "placeholder" and _is_empty(node.meta.get("val")):
            late = next(other for other in graph.nodes if other.op != "placeholder")
            node.replace_all_uses_with(_constant(graph, node, 0, late))
    graph.eliminate_dead_code()


def _remove_empty_inputs(graph: fx.Graph, node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or _is_unused_result(node):
        return  # several results are read through their `getitem` nodes, each of which is rewritten
    if _is_empty(value):
        _replace(graph, node, _constant(graph, node, 0))
        return
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node):
        return
    arguments = tensor_args(source)
    empty = _empty_arguments(source)
    if not empty:
        return
    if node.target is aten.cat.default:
        kept = [argument for argument in arguments if argument not in empty]
        if len(kept) == 1:
            _replace(graph, node, kept[0])
        else:
            node.args = (kept, *node.args[1:])
    elif source.target is aten.addmm.default and arguments[0] not in empty:
        _replace(graph, node, _result_of_empty_product(graph, node))
    elif source.target in WRITE_OPS and arguments[0] not in empty:
        _replace(graph, node, arguments[0])
    elif len(empty) == len(arguments) or (_is_backward(source) and arguments[0] in empty):
        fill = _result_of_empty_inputs(source, node)
        _replace(graph, node, _constant(graph, node, fill))
    else:
        raise RuleError(
            f"{source.target} reads a tensor without elements, of shape {tuple(empty[0].meta['val'].shape)}, together "
            "with others: leave that tensor out where it has no elements, or give it at least one"
        )


def _empty_arguments(node: fx.Node) -> list[fx.Node]:
    return [item for item in tensor_args(node) if _is_empty(item.meta["val"]) and not _is_unused_result(item)]


def _is_unused_result(node: fx.Node) -> bool:
    """Whether an op leaves this one of its results empty, as batch norm its saved mean in evaluation.

    The op of its gradient takes the empty value.
    """
    if node.target is not operator.getitem or not _is_empty(node.meta["val"]):
        return False
    parent = node.args[0]
    if not isinstance(parent, fx.Node) or not isinstance(parent.target, torch._ops.OpOverload):
        return False
    return len(parent.target._schema.returns) > 1 and not _empty_arguments(parent)


def _result_of_empty_product(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The result of an `addmm` whose product has an empty contraction: its bias."""
    bias, value, beta = node.args[0], node.meta["val"], node.kwargs.get("beta", 1)
    with graph.inserting_before(node):
        made = graph.call_function(aten.expand.default, (bias, list(value.shape)))
        made.meta = dict(node.meta)
        if beta != 1:
            made = graph.call_function(aten.mul.Scalar, (made, beta))
            made.meta = dict(node.meta)
    return made


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _is_backward(node: fx.Node) -> bool:
    """Whether an op computes gradients: they are zeros if the incoming gradient is empty."""
    return isinstance(node.target, torch._ops.OpOverload) and "_backward" in str(node.target)


def _result_of_empty_inputs(source: fx.Node, node: fx.Node) -> Any:
    """The number that all elements of the result have if all inputs are empty: the op is run on empty tensors."""
    if _is_backward(source):
        return 0

    def real(leaf: fx.Node) -> Any:
        value = leaf.meta["val"]
        return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    args, kwargs = fx.node.map_arg((source.args, source.kwargs), real)
    kwargs = {name: item for name, item in kwargs.items() if name != "device"}
    result = source.target(*args, **kwargs)  # type: ignore[operator]
    value = result if source is node else result[node.args[1]]
    return value.flatten()[0].item()


def _constant(graph: fx.Graph, node: fx.Node, fill: Any, at: fx.Node | None = None) -> fx.Node:
    """A constant of the shape of `node`'s value, filled with `fill`, before `node` or before `at`."""
    value = node.meta["val"]
    with graph.inserting_before(at or node):
        made = graph.call_function(
            aten.full.default, (list(value.shape), fill), {"dtype": value.dtype, "device": value.device}
        )
    made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "desc")}
    with value.fake_mode:
        made.meta["val"] = aten.full.default(list(value.shape), fill, dtype=value.dtype, device=value.device)
    return made


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)


T = TypeVar("T")


@dataclass(frozen=True)
class Annotate:
    """Give each node its `BoundRule` in ``node.meta["shardweave"]``.

    Requires a captured joint graph with global fake values. Ensures that every op that depends on an input has a rule,
    or is blocked in all factors. Ops that depend on no input (ranges, masks, rotary tables) are sharded as their
    readers need them.
    """

    name = "annotate"
    replicate_unknown_ops: bool = False
    """Replicate ops without a rule: all their factors are blocked. Otherwise such an op is an error."""
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    """A cache of decompositions, for graphs of one fake mode (see `decompose`)."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        remove_empty_tensors(graph_module.graph)
        undo_dispatch(graph_module.graph, self.known)
        waiting = deque(graph_module.graph.nodes)
        while waiting:  # the ops of a decomposition may have decompositions
            node = waiting.popleft()
            if (form := form_of(node)) is not None:
                target = node.target  # a decomposition may call its own op with other arguments
                waiting.extendleft(
                    part for part in reversed(decompose(node, form, self.known)) if part.target is not target
                )
        _merge_constants(graph_module.graph)
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
        bind_rules(graph_module.graph, self.replicate_unknown_ops)
        return graph_module


def source_of(value: fx.Node) -> Value:
    """The node that computes a value, and the index of its output; `getitem` nodes are skipped."""
    if value.target is operator.getitem:
        parent, index = value.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        outputs = [isinstance(item, torch.Tensor) for item in parent.meta["val"]]
        return parent, sum(outputs[:index])
    return value, 0


def graph_outputs(graph: fx.Graph) -> list[Any]:
    """The values that a graph returns, a flat list of nodes and constants."""
    values = graph.output_node().args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


def depends_on_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a placeholder or on random numbers; the others are constants of the step."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or draws(node) or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _check_supported(node: fx.Node) -> None:
    """Raise `RuleError` for a higher-order op, whose inner graph no rule sees, and for an op with sparse results."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise RuleError(
            f"{describe(node)} is a higher-order op, which has a graph of its own and no rule: write it with plain ops "
            "(for flex_attention: torch.nn.functional.scaled_dot_product_attention with a mask)"
        )
    if any(isinstance(value, torch.Tensor) and value.layout != torch.strided for value in _values(node)):
        raise RuleError(
            f"{describe(node)} computes a sparse tensor, and only dense tensors can be sharded: use a dense one (for "
            "embeddings: sparse=False)"
        )


def _merge_constants(graph: fx.Graph) -> None:
    """Compute equal constants once: each layer of a model may make the same mask."""
    dependent = depends_on_inputs(graph)
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in dependent:
            continue
        key = f"{node.target} {node.args} {node.kwargs}"
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def bind_rules(graph: fx.Graph, replicate_unknown_ops: bool = False) -> None:
    """Bind the rule of every node of `graph`, and cut the rules into atoms."""
    dependent = depends_on_inputs(graph)
    rules: dict[fx.Node, BoundRule] = {}
    inputs: dict[fx.Node, tuple[Value, ...]] = {}
    unruled: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        _check_supported(node)
        if node.op == "placeholder" or node not in dependent:
            if any(isinstance(value, torch.Tensor) for value in _values(node)):
                rules[node] = _own_factors(node)
            continue
        found = find_rule(node)
        if found is None:
            unruled.append(node)
            rules[node] = _own_factors(node, tensor_args(node), blocked=True)
        else:
            try:
                rules[node] = found.bind(node)
            except RuleError as error:
                raise RuleError(f"{describe(node)}: {error}") from None
        inputs[node] = tuple(source_of(argument) for argument in tensor_args(node))
    _check_unruled(unruled, replicate_unknown_ops)
    refined = refine(rules, inputs)
    distinct: dict[BoundRule | None, BoundRule | None] = {}
    for node in graph.nodes:
        known, rule = info(node), refined.get(node)
        node.meta[META] = replace(
            known,
            rule=distinct.setdefault(rule, rule),
            op=known.op or op_name(node),
            backward=node.meta.get("partitioner_tag") == "is_backward",
        )


def bind_new(nodes: Sequence[fx.Node], parents: Sequence[fx.Node]) -> list[fx.Node]:
    """Bind the rules of nodes that a decomposition added, in the atoms of the values that they read."""
    rules = {parent: BoundRule(rule.factors, (), rule.outputs) for parent in parents if (rule := info(parent).rule)}
    inputs: dict[fx.Node, tuple[Value, ...]] = {}
    for node in nodes:
        found = find_rule(node)
        rules[node] = found.bind(node) if found is not None else _own_factors(node, tensor_args(node), blocked=True)
        inputs[node] = tuple(source_of(argument) for argument in tensor_args(node))
    refined = refine(rules, inputs)
    for node in nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        node.meta[META] = NodeInfo(rule=refined[node], op=op_name(node), backward=backward)
    return list(nodes)


def modules_around(name: str) -> list[str]:
    """The names of a module and of all modules that contain it, outermost first.

    >>> modules_around("blocks.0.up")
    ['blocks', 'blocks.0', 'blocks.0.up']
    """
    parts = name.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


@lru_cache(2**16)  # a step has thousands of nodes of a few hundred modules
def covers(pattern: str, name: str) -> bool:
    """Whether a shell-style pattern matches a module or one that contains it.

    >>> covers("blocks.*", "blocks.0.up"), covers("*.0", "blocks.0.up"), covers("up", "blocks.0.up")
    (True, True, False)
    """
    return any(fnmatchcase(each, pattern) for each in modules_around(name))


def any_covers(patterns: Iterable[str], name: str) -> bool:
    """Whether one of these patterns matches a module or one that contains it.

    >>> any_covers(("head", "blocks.0"), "blocks.0.up")
    True
    """
    return any(covers(pattern, name) for pattern in patterns)


def last_match(patterns: Mapping[str, T], name: str, default: T) -> T:
    """The value of the last pattern that matches a module or one that contains it.

    >>> last_match({"*": 1, "blocks.*": 2}, "blocks.0.up", 0), last_match({}, "head", 0)
    (2, 0)
    """
    said = [value for pattern, value in patterns.items() if covers(pattern, name)]
    return said[-1] if said else default


def _values(node: fx.Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (list, tuple)) else (value,)


def _own_factors(node: fx.Node, arguments: Sequence[fx.Node] = (), blocked: bool = False) -> BoundRule:
    """A rule in which each dimension of each value is a factor of its own."""
    factors = Factors()
    given, results = (
        [[factors.new(size, blocked) for size in value] for value in values]
        for values in ([shape(argument) for argument in arguments], output_shapes(node))
    )
    return factors.rule(given, results)


def _may_be_activation(value: torch.Tensor) -> bool:
    """Whether a value may be an activation: indices and masks are not, and they are small."""
    return value.dtype.is_floating_point or value.dtype.is_complex


def unruled_ops(graph: fx.Graph) -> tuple[str, ...]:
    """The ops of an annotated graph that every device computes whole, as they have no rule, each with its module."""
    dependent = depends_on_inputs(graph)
    return tuple(
        dict.fromkeys(
            f"{node.target} in {info(node).op}"
            for node in graph.nodes
            if node.op == "call_function"
            and node in dependent
            and node.target is not operator.getitem
            and find_rule(node) is None
        )
    )


def _check_unruled(unruled: Sequence[fx.Node], allow: bool) -> None:
    floating = [
        node for node in unruled if any(isinstance(v, torch.Tensor) and _may_be_activation(v) for v in _values(node))
    ]
    listed = "\n  ".join(sorted({describe(node) for node in (unruled if allow else floating)}))
    if floating and not allow:
        raise RuleError(
            f"no sharding rule for {len(floating)} op(s) that activations pass through; these ops, and all after them, "
            f"would be replicated on every device:\n  {listed}\n"
            "Write these lines with other ops, add a rule with shardweave.rule(op, pattern), "
            "or allow it with Options(replicate_unknown_ops=True)."
        )
    if unruled:
        listed = listed or ", ".join(sorted({str(node.target) for node in unruled}))
        warnings.warn(
            f"computed whole on every device, because they have no sharding rule:\n  {listed}\n"
            "Write these lines with other ops, or add a rule with shardweave.rule(op, pattern), to share this work.",
            stacklevel=2,
        )


def layer_of(name: str) -> str:
    """The layer that contains a module: its name up to the first number; "" outside of all layers.

    >>> layer_of("model.layers.3.mlp.up"), layer_of("head")
    ('model.layers.3', '')
    """
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def checkpoint_of(node: fx.Node) -> str:
    """The activation checkpoint that recomputes a node of a captured graph; "" if there is none."""
    again = node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return f"checkpoint {node.meta.get('ac_graph_id', '')}" if again else ""


Value = tuple[fx.Node, int]  # a node and the index of its output


def refine(rules: Mapping[fx.Node, BoundRule], inputs: Mapping[fx.Node, tuple[Value, ...]]) -> dict[fx.Node, BoundRule]:
    """Write the rules in atoms.

    Parameters
    ----------
    rules : mapping from node to BoundRule
        Placeholders and constants have a rule without inputs.
    inputs : mapping from node to values
        The value that each input of a node's rule reads.
    """
    users: dict[Value, list[fx.Node]] = {}
    for node, values in inputs.items():
        for value in values:
            users.setdefault(value, []).append(node)
    value_cuts: dict[tuple[fx.Node, int, int], set[int]] = {}
    factor_cuts: dict[tuple[fx.Node, str], set[int]] = {}
    queue = deque(rules)
    waiting = set(rules)
    while queue:
        # 1. Take a node whose values have new cuts.
        node = queue.popleft()
        waiting.discard(node)
        rule = rules[node]
        sizes = rule.sizes()
        sides = [(value, dims) for value, dims in zip(inputs.get(node, ()), rule.inputs)]
        sides += [((node, index), dims) for index, dims in enumerate(rule.outputs)]
        # 2. The cuts of its values cut its factors.
        for (source, index), dims in sides:
            for dim, names in enumerate(dims):
                for cut in value_cuts.get((source, index, dim), ()):
                    low = 1
                    for name in reversed(names):
                        high = low * sizes[name]
                        if low < cut < high and cut % low == 0:
                            _add(factor_cuts.setdefault((node, name), set()), cut // low, sizes[name])
                        low = high
        # 3. The cuts of its factors cut its values; then all other nodes that read or compute these are next.
        for (source, index), dims in sides:
            for dim, names in enumerate(dims):
                low, total = 1, math.prod(sizes[name] for name in names)
                changed = False
                cuts = value_cuts.setdefault((source, index, dim), set())
                for name in reversed(names):
                    changed |= low > 1 and _add(cuts, low, total)
                    for cut in sorted(factor_cuts.get((node, name), ())):
                        changed |= _add(cuts, low * cut, total)
                    low *= sizes[name]
                if changed:
                    for other in (source, *users.get((source, index), ())):
                        if other in rules and other not in waiting:
                            waiting.add(other)
                            queue.append(other)
    return {node: _cut(rule, {f.name: factor_cuts.get((node, f.name), set()) for f in rule.factors})
            for node, rule in rules.items()}  # fmt: skip


def _add(cuts: set[int], cut: int, size: int) -> bool:
    """Add a cut if the cuts still form a chain of divisors of `size`, and return whether they changed."""
    if cut in cuts or not 1 < cut < size or size % cut:
        return False
    if any(cut % other and other % cut for other in cuts):
        return False  # two views cut this loop incompatibly: the first cut is kept
    cuts.add(cut)
    return True


def _cut(rule: BoundRule, cuts: Mapping[str, set[int]]) -> BoundRule:
    if not any(cuts.values()):
        return rule
    atoms: dict[str, tuple[str, ...]] = {}
    factors: list[Factor] = []
    for factor in rule.factors:
        bounds = [factor.size, *sorted(cuts[factor.name], reverse=True), 1]
        steps = [high // low for high, low in zip(bounds, bounds[1:])]
        names = [f"{factor.name}.{index}" for index in range(len(steps))] if len(steps) > 1 else [factor.name]
        atoms[factor.name] = tuple(names)
        factors += [Factor(name, size, factor.blocked, factor.reduce) for name, size in zip(names, steps)]

    def dims(value: Dims) -> Dims:
        return tuple(tuple(atom for name in names for atom in atoms[name]) for names in value)

    return replace(
        rule, factors=tuple(factors), inputs=tuple(map(dims, rule.inputs)), outputs=tuple(map(dims, rule.outputs))
    )


Loop = tuple[fx.Node, str]


@dataclass(frozen=True)
class Classes:
    """The number of the class of each loop (node, factor), and the classes that some op cannot split."""

    of: Mapping[Loop, int]
    blocked: frozenset[int]


def find_classes(graph: fx.Graph) -> Classes:
    """The factor classes of an annotated graph.

    An op that can be decomposed, such as a softmax, does not block its loops.
    """
    same: UnionFind = UnionFind()
    for node in graph.nodes:
        bound = info(node).rule
        if bound is None:
            continue
        for factor in bound.factors:
            same[node, factor.name]
        for argument, dims in zip(tensor_args(node) if node.op == "call_function" else (), bound.inputs):
            source, index = source_of(argument)
            made = info(source).rule
            if made is None or index >= len(made.outputs):
                continue
            sizes, made_sizes = bound.sizes(), made.sizes()
            for names, other in zip(dims, made.outputs[index]):
                if [sizes[name] for name in names] == [made_sizes[name] for name in other]:
                    for mine, theirs in zip(names, other):
                        same.union((node, mine), (source, theirs))
    numbers: dict[Loop, int] = {}
    of = {loop: numbers.setdefault(same[loop], len(numbers)) for loop in list(same)}
    blocked = set()
    for node in graph.nodes:
        bound, rule = info(node).rule, find_rule(node) if node.op == "call_function" else None
        if bound is not None and not (rule is not None and rule.decompose is not None):
            blocked |= {of[node, factor.name] for factor in bound.factors if factor.blocked}
    return Classes(of, frozenset(blocked))
