"""Generated steps made by hand, as the compiler makes them: what the tests of the simulator run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardweave.cost_model import Cluster
from shardweave.ir import META, Axis, Collective, Layout, NodeInfo, ParameterSpec, StepSpec, ValueSpec, group_name

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Builder:
    """An fx graph whose nodes carry shapes, on the meta device."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.graph = fx.Graph()
        for axis in axes:
            self.graph.placeholder(f"coord_{axis.name}").meta["val"] = 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        return self._noted(self.graph.placeholder(name), torch.empty(shape, dtype=dtype, device="meta"))

    def like(self, name: str, node: fx.Node) -> fx.Node:
        return self._noted(self.graph.placeholder(name), node.meta["val"])

    def call(self, target: Any, *args: Any, op: str = "") -> fx.Node:
        node = self.graph.call_function(target, args)
        real = fx.node.map_arg(args, lambda source: source.meta["val"])
        node.meta[META] = NodeInfo(op=op)
        return self._noted(node, target(*real))

    def start(self, kind: str, source: fx.Node, axes: Sequence[Axis], owner: str, cause: str) -> fx.Node:
        value, group, size = source.meta["val"], group_name(axes), math.prod(axis.size for axis in axes)
        shape, whole = list(value.shape), value.nbytes
        if kind == "all_reduce":
            node = self.graph.call_function(c10d.all_reduce.default, (source, "sum", group))
        elif kind == "all_gather":
            shape[0], whole = shape[0] * size, whole * size
            node = self.graph.call_function(c10d.all_gather_into_tensor.default, (source, size, group))
        else:
            shape[0] //= size
            node = self.graph.call_function(c10d.reduce_scatter_tensor.default, (source, "sum", size, group))
        what = Collective(kind, tuple(axes), whole, owner, "by hand", cause)  # type: ignore[arg-type]
        node.meta[META] = NodeInfo(op=owner, collective=what)
        return self._noted(node, torch.empty(shape, dtype=value.dtype, device="meta"))

    def wait(self, start: fx.Node) -> fx.Node:
        return self._noted(self.graph.call_function(c10d.wait_tensor.default, (start,)), start.meta["val"])

    def module(self, outputs: Sequence[fx.Node | None]) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        return fx.GraphModule({}, self.graph)

    @staticmethod
    def _noted(node: fx.Node, value: object) -> fx.Node:
        node.meta["val"] = value
        return node


def mlp(
    cluster: Cluster, axes: Sequence[Axis], *, layers: int, width: int, rows: int, prefetch: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule, StepSpec]:
    """Layers ``x = gelu(x @ w)`` with every w at rest sharded over `axes`: the step, and its specification.

    With `prefetch` every gather starts one layer early, else right before its use.
    """
    mesh, group = cluster.mesh(), math.prod(axis.size for axis in axes)
    names = [f"layers.{i}.weight" for i in range(layers)]

    ahead = Builder(mesh.axes)
    shards = [ahead.tensor(f"p{i}", width // group, width) for i in range(layers)]
    x = ahead.tensor("x", rows, width)
    started: dict[int, fx.Node] = {}

    def gather(builder: Builder, i: int, source: fx.Node) -> None:
        if 0 <= i < layers and i not in started:
            started[i] = builder.start("all_gather", source, axes, names[i], "parameter")

    inner, kept = x, []
    for i in range(layers):
        gather(ahead, i, shards[i])
        if prefetch:
            gather(ahead, i + 1, shards[min(i + 1, layers - 1)])
        whole = ahead.wait(started[i])
        before = ahead.call(aten.mm.default, inner, whole, op=f"layers.{i}")
        kept += [inner, before]
        inner = ahead.call(aten.gelu.default, before, op=f"layers.{i}")
    loss = ahead.call(aten.sum.default, inner, op="loss")
    saved = [*shards, *kept]
    forward = ahead.module([loss, *saved])

    back = Builder(mesh.axes)
    held = [back.like(f"saved_{i}", node) for i, node in enumerate(saved)]
    tangent = back.tensor("tangent")
    started.clear()
    gradient = back.call(aten.expand.default, tangent, [rows, width])
    reduced: list[fx.Node | None] = [None] * layers
    pending: tuple[int, fx.Node] | None = None
    for i in reversed(range(layers)):
        gather(back, i, held[i])
        if prefetch:
            gather(back, i - 1, held[max(i - 1, 0)])
        before_input, before = held[layers + 2 * i], held[layers + 2 * i + 1]
        inner_gradient = back.call(aten.gelu_backward.default, gradient, before, op=f"layers.{i}")
        turned = back.call(aten.t.default, before_input)
        whole_gradient = back.call(aten.mm.default, turned, inner_gradient, op=f"layers.{i}")
        if pending:  # one layer late: the wait frees the whole gradient that was sent
            reduced[pending[0]] = back.wait(pending[1])
        pending = i, back.start("reduce_scatter", whole_gradient, axes, names[i], "gradient")
        turned_weight = back.call(aten.t.default, back.wait(started[i]))
        gradient = back.call(aten.mm.default, inner_gradient, turned_weight, op=f"layers.{i}")
    if pending:
        reduced[pending[0]] = back.wait(pending[1])
    backward = back.module(reduced)

    spec = StepSpec(
        mesh=mesh,
        parameters=tuple(ParameterSpec(name, Layout(((*axes, width // group), (width,))), "float32") for name in names),
        buffers=(),
        inputs=(ValueSpec("x", Layout.replicated((rows, width)), "float32"),),
        outputs=(ValueSpec("loss", Layout.replicated(()), "float32", differentiable=True),),
    )
    return forward, backward, spec
