"""The annotated step: a captured step whose ops have rules, from which the planner and every lowering start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from shardweave.cost_model import Options
from shardweave.ir import Captured
from shardweave.passes.drop_zero_tangents import drop_tangents
from shardweave.sharding import (
    Annotate,
    Classes,
    Op,
    batch_classes,
    find_classes,
    find_ops,
    graph_outputs,
    info,
    op_name,
    with_forms,
)


@dataclass
class Annotated:
    """A captured step whose ops have rules: what the planner and every lowering start from."""

    captured: Captured
    classes: Classes
    ops: list[Op]
    batch: int
    tangents: tuple[str, ...]
    """The placeholders of the outputs that a backward may start from."""
    loss_inside: bool


def annotate(captured: Captured, options: Options) -> Annotated:
    """Bind every op to its sharding rule, and find the ops that a plan decides on.

    If the model returns a scalar loss, the backward starts there, and the other outputs have no gradient. For
    torch.compile, where autograd passes a tangent for each output, all of them keep theirs.
    """
    values = graph_outputs(captured.graph.graph)
    first = len(captured.mutated_buffers)
    returned = values[first : first + len(captured.outputs)]
    scalars = {index for index, value in enumerate(returned) if value.meta["val"].dim() == 0}
    loss_inside = any(index in scalars for index in captured.tangents.values())
    if loss_inside and not captured.whole:
        unused = [name for name, index in captured.tangents.items() if index not in scalars]
        drop_tangents(captured.graph, unused)
    Annotate(options.replicate_unknown_ops, captured.known)(captured.graph)
    classes = find_classes(captured.graph.graph)
    _, batch = batch_classes(captured, classes)
    kept = {node.name for node in captured.graph.graph.nodes if node.op == "placeholder"}
    tangents = tuple(name for name in captured.tangents if name in kept)
    ops = with_forms(find_ops(captured, classes), classes, captured.graph.graph, batch)
    return Annotated(captured, classes, ops, batch, tangents, loss_inside)


def join_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every forward op with several inputs: its module, its op, and its number in that module.

    A saved plan uses these names, as names of nodes may change when the model is captured again.
    """
    counts: Counter[str] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not info(node).backward and len(node.all_input_nodes) > 1:
            module = op_name(node) if info(node).op != node.name else ""
            kind = f"{module}:{getattr(getattr(node.target, '_schema', None), 'name', node.target)}".replace(
                "aten::", ""
            )
            found[node] = f"{kind}:{counts[kind]}"
            counts[kind] += 1
    return found
