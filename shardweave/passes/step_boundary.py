"""The boundary of a step: the mesh in layout order, the axes of the batch, and the layouts of what goes in and out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from shardweave.cost_model import Options
from shardweave.ir import (
    SEED,
    Axis,
    Layout,
    Mesh,
    ParameterSpec,
    PlanError,
    StepSpec,
    Strategy,
    ValueSpec,
    axes_size,
    drop,
    dtype_name,
    normalise,
    outermost_first,
)
from shardweave.passes.annotated_step import Annotated
from shardweave.sharding import Op, Samples, graph_outputs


def mesh_for(mesh: Mesh, strategies: Mapping[str, Strategy], sizes: Mapping[str, int]) -> Mesh:
    """The mesh in layout order: the axes of tensor parallelism first, each kind from the outermost in.

    At-rest axes then lie inside them on every dimension, which keeps layouts plain DTensor placements. What others
    gather over some of these axes and more comes in another order than its ranks', and is copied: axes come first where
    the ops that are tensor parallel over them, and do not rest whole beside that, have the larger part of both by the
    `sizes` of their parameters.
    """
    asked, gathered = Counter[frozenset[Axis]](), Counter[frozenset[Axis]]()
    for name, size in sizes.items():
        axes = strategies[name].axes(mesh)
        gathered[frozenset(axes.states)] += size
        if axes.states:
            asked[frozenset((*axes.x, *axes.y))] += size
    first: set[Axis] = set()
    for tensor, size in asked.most_common():
        copied = sum(other for axes, other in gathered.items() if _ordered(axes, tensor) != outermost_first(axes))
        if size >= copied:
            first |= tensor
    return Mesh(tuple(_ordered(mesh.axes, first)))


def data_axes(ops: list[Op], strategies: Mapping[str, Strategy], mesh: Mesh) -> tuple[Axis, ...]:
    """The axes that every op puts on the batch: the ones that a user's batch is spread over."""
    common = set(mesh.axes)
    for op in ops:
        if op.batch > 1:
            axes = strategies[op.name].axes(mesh)
            common &= {*axes.z, *axes.data}
    return tuple(outermost_first(common)) if any(op.batch > 1 for op in ops) else ()


def _ordered(axes: Iterable[Axis], first: Container[Axis]) -> list[Axis]:
    return sorted(outermost_first(axes), key=lambda axis: axis not in first)


class Boundary:
    """Where what crosses the border of the step lies: inputs, outputs, tangents, parameters."""

    def __init__(self, annotated: Annotated, mesh: Mesh, data: tuple[Axis, ...], options: Options) -> None:
        self.annotated, self.mesh, self.data = annotated, mesh, data
        self.undivided = bool(options.weaving.undivided)
        captured = annotated.captured
        nodes = {node.name: node for node in captured.graph.graph.nodes if node.op == "placeholder"}
        self.values = {name: node.meta["val"] for name, node in nodes.items()}
        self.sources = {name: self._batch(self.values[name]) for name in captured.inputs}
        samples = Samples.of(captured, annotated.classes)
        self.rows = {name: samples.rows(nodes[name]) for name in captured.inputs}
        results = graph_outputs(captured.graph.graph)
        first = len(captured.mutated_buffers)
        self.returned = [node.meta["val"] for node in results[first : first + len(captured.outputs)]]
        mode = "whole" if captured.whole else options.outputs
        if mode == "auto":
            mode = "sharded" if annotated.loss_inside else "part"
        self.returned_rows = [samples.rows(node) for node in results[first : first + len(captured.outputs)]]
        outputs: list[Layout | None] = []
        for value in self.returned:
            if value.dim() == 0 or mode == "whole":
                outputs.append(Layout.replicated(value.shape))
            else:
                outputs.append(None if mode == "sharded" else self._batch(value))
        if captured.whole:
            self.sources |= {name: Layout.replicated(self.values[name].shape) for name in captured.parameters}
        self.tangents = {name: first + captured.tangents[name] for name in annotated.tangents}
        if captured.whole:  # a tangent comes whole, as its output went; each rank takes its part
            self.sources |= {name: self._batch(self.values[name]) for name in self.tangents}
            self.tangents = {}
        mutated = [Layout.replicated(node.meta["val"].shape) for node in results[:first]]
        self.wanted = [*mutated, *outputs, *(None for _ in captured.gradients)]

    def _batch(self, value: torch.Tensor) -> Layout:
        """The first dimension spread over the data axes, and over micro-batches, where it is the batch."""
        shape = value.shape
        layout = Layout.replicated(shape)
        axes = (*self.mesh.all_times, *self.data)
        if not shape or shape[0] != self.annotated.batch:
            return layout
        if shape[0] % axes_size(axes) and self.undivided:  # what is too small to be cut comes in whole
            axes = (*self.mesh.times, *self.data)
        if shape[0] % axes_size(axes):
            if times := self.mesh.all_times:
                cuts = " of ".join(f"{axis.size} {axis.name}-batches" for axis in reversed(times))
                names = " or ".join(f"{axis.name}_batches" for axis in times)
                raise PlanError(
                    f"the batch of {shape[0]} is no multiple of {axes_size(axes)}: {cuts} "
                    f"on {axes_size(self.data)} parts of the batch; use another batch or {names}"
                )
            return layout
        return Layout((normalise([*axes, shape[0] // axes_size(axes)]), *layout.dims[1:]))

    def finish(
        self,
        lies: Mapping[int, Layout],
        rests: Mapping[str, Layout],
        forward: fx.GraphModule,
        code: str,
    ) -> StepSpec:
        """How the step is called, given where its outputs lie, its parameters rest, and the hash of its code."""
        captured = self.annotated.captured
        dtype = {name: dtype_name(value.dtype) for name, value in self.values.items()}
        trainable = set(captured.gradients)
        parameters = tuple(
            ParameterSpec(
                name,
                rests.get(name, Layout.replicated(self.values[node].shape)),
                dtype_name(captured.dtypes[name].master) if name in captured.dtypes else dtype[node],
                name in trainable,
                captured.aliases.get(name, ()),
            )
            for node, name in captured.parameters.items()
        )
        buffers = tuple(
            ParameterSpec(name, Layout.replicated(self.values[node].shape), dtype[node], False)
            for node, name in captured.buffers.items()
        )
        times = self.mesh.times
        pieces = [drop(self.sources[node], self.mesh.woven) for node in captured.inputs]
        inputs = tuple(
            ValueSpec(name, drop(lies, times), dtype[node], rows=self.rows[node])
            for (node, name), lies in zip(captured.inputs.items(), pieces)
        )
        first = len(captured.mutated_buffers)
        outputs = []
        active = {captured.tangents[name] for name in self.annotated.tangents}
        for index, (name, value) in enumerate(zip(captured.outputs, self.returned)):
            layout = lies[first + index]
            pieces.append(layout)
            whole = drop(layout, times).without_partial()
            left_out = index in captured.tangents.values() and index not in active
            rows = self.returned_rows[index]
            outputs.append(ValueSpec(name, whole, dtype_name(value.dtype), index in active, left_out, rows))
        return StepSpec(
            replace(self.mesh, woven=(), slices=()),
            parameters,
            buffers,
            inputs,
            tuple(outputs),
            captured.mutated_buffers,
            self.data,
            code,
            any(node.op == "placeholder" and node.name == SEED for node in forward.graph.nodes),
            tuple(pieces) if times else (),
            axes_size(self.mesh.woven),
        )
