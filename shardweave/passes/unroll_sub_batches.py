"""The pass `UnrollSubBatches` copies the ops of a graph for each sub-batch, and for each slice of a sliced op.

Before this pass the graph computes one step of each such axis (one sub-batch, one slice), given its coordinate. Nodes
that depend on the coordinate are copied for each step. All others are shared by the steps: parameters are gathered
once, and values that do not depend on inputs are computed once. The ops `total` and `joined` mark where an axis ends:
there the steps are summed or concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from shardweave.ir import META, Axis, VerifyError
from shardweave.ops import coordinate, joined, total
from shardweave.passes.base import Pass, Property
from shardweave.passes.spmd_builder import remove_dead
from shardweave.sharding import fake_result, graph_outputs, info, module_of

aten = torch.ops.aten


@dataclass(frozen=True)
class UnrollSubBatches(Pass):
    """Unroll the time axes `axes`. The copies of a node follow each other.

    Requires a local graph that takes the coordinate of each axis. Ensures the same values without it. The
    `NodeInfo.steps` of a copy says which step of which axis it belongs to.
    """

    name = "unroll_sub_batches"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    ensures: ClassVar[frozenset[Property]] = frozenset({"unrolled"})
    axes: tuple[Axis, ...]

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for axis in self.axes:
            graph = _Unrolled(axis).of(graph)
        remove_dead(graph)
        graph.lint()
        return module_of(graph_module, graph)


class _Unrolled:
    """A copy of a graph in which one axis is unrolled."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.graph = axis, fx.Graph()
        self.shared: dict[fx.Node, Any] = {}
        self.steps: dict[fx.Node, list[Any]] = {}
        """For each node that depends on the coordinate: its copies, or the integers that it evaluates to."""

    def of(self, graph: fx.Graph) -> fx.Graph:
        """Copy `graph`, node by node."""
        for node in graph.nodes:
            if node.op == "placeholder" and node.name == coordinate(self.axis.name):
                self.steps[node] = list(range(self.axis.size))
            elif node.target in (total, joined) and node.args[1] == self.axis.name:
                self.shared[node] = self._join_steps(node)
            elif any(source in self.steps for source in node.all_input_nodes):
                self.steps[node] = [self._copy(node, step) for step in range(self.axis.size)]
            elif node.op == "output":
                self._output(node)
            else:
                self.shared[node] = self.graph.node_copy(node, self.shared.__getitem__)
        return self.graph

    def _output(self, node: fx.Node) -> None:
        outputs = graph_outputs(node.graph)
        if differing := [value.name for value in outputs if isinstance(value, fx.Node) and value in self.steps]:
            raise VerifyError(f"the outputs {differing} differ between the steps of {self.axis}: join the steps")
        out = self.graph.output(fx.node.map_arg(tuple(outputs), self.shared.__getitem__))
        out.meta = dict(node.meta)

    def _copy(self, node: fx.Node, step: int) -> Any:
        def taken(leaf: fx.Node) -> Any:
            return self.steps[leaf][step] if leaf in self.steps else self.shared[leaf]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken)
        if all(isinstance(arg, int) for arg in args) and not kwargs:  # arithmetic on the coordinate
            assert callable(node.target)
            return node.target(*args)
        copy = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_{self.axis.level}{step}")
        copy.meta = dict(node.meta)
        known = info(node)
        copy.meta[META] = replace(known, steps=(*known.steps, (self.axis.name, step)))
        return copy

    def _join_steps(self, node: fx.Node) -> fx.Node:
        """The steps of a value, summed or concatenated."""
        source = node.all_input_nodes[0]
        parts = self.steps.get(source, [self.shared.get(source)] * self.axis.size)
        if node.target is total:
            found: fx.Node = parts[0]
            for part in parts[1:]:
                add = aten.add_.Tensor if _may_accumulate_into(found) else aten.add.Tensor
                found = self._call(node, add, found, part, last=part is parts[-1])
            return found
        _, _, _, dim, outer, inner = node.args
        assert isinstance(dim, int) and isinstance(outer, int) and isinstance(inner, int)
        if outer == 1:
            return self._call(node, aten.cat.default, parts, dim)
        shape = list(parts[0].meta["val"].shape)
        split_shape = [*shape[:dim], outer, inner, *shape[dim + 1 :]]
        pieces = [self._call(node, aten.reshape.default, part, split_shape, last=False) for part in parts]
        whole = self._call(node, aten.cat.default, pieces, dim + 1, last=False)
        return self._call(node, aten.reshape.default, whole, list(node.meta["val"].shape))

    def _call(self, node: fx.Node, target: Callable[..., Any], *args: Any, last: bool = True) -> fx.Node:
        """A node in the place of the one that joined all steps. The `last` one takes over its name and layouts."""
        call = self.graph.create_node("call_function", target, args, {}, node.name if last else None)
        call.meta = dict(node.meta)
        if not last:
            call.meta[META] = replace(info(node), layouts=())
        call.meta["val"] = fake_result(target, args, {}, node.meta["val"].fake_mode)
        return call


def _may_accumulate_into(node: fx.Node) -> bool:
    """Whether the sum may be accumulated into a value in place: it is newly allocated, and nothing else reads it."""
    return not node.users and node.target in _FRESH


_FRESH = {aten.mm.default, aten.bmm.default, aten.add.Tensor, aten.add_.Tensor, aten._to_copy.default,
          aten.sum.dim_IntList, aten.embedding_dense_backward.default}  # fmt: skip
"""Ops whose results are never views."""
