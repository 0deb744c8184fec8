"""A generated step as plain values, to be sent to the ranks: fx keeps neither its nodes nor their order in a pickle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

import shardweave as sw
from shardweave.ir import StepSpec
from shardweave.ir.captured import TENSOR_OUTPUT, CallTree
from shardweave.passes.codegen import MicroBatchGraphs, Step
from shardweave.runtime.bound_step import CompiledStep
from shardweave.sharding.graphs import module_of


@dataclass(frozen=True)
class Reference:
    """A node among the arguments of another, by name; or an op by its full name."""

    name: str


@dataclass(frozen=True)
class PackedGraph:
    """The nodes of a graph, without their meta, and the tensors that it holds."""

    nodes: list[tuple[str, str, Any, Any, Any]]
    constants: dict[str, torch.Tensor]


def pack(module: fx.GraphModule) -> PackedGraph:
    """The graph of a module."""

    def packed(node: fx.Node) -> tuple[str, str, Any, Any, Any]:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda leaf: Reference(leaf.name))
        target, *values = (
            Reference(str(v)) if isinstance(v, torch._ops.OpOverload) else v for v in (node.target, *args)
        )
        return node.op, node.name, target, tuple(values), kwargs

    constants = {str(node.target): getattr(module, str(node.target)) for node in module.graph.nodes
                 if node.op == "get_attr"}  # fmt: skip
    return PackedGraph([packed(node) for node in module.graph.nodes], constants)


def unpack(packed: PackedGraph) -> fx.GraphModule:
    """The graph of these nodes."""
    held, graph = fx.GraphModule(nn.Module(), fx.Graph()), fx.Graph()
    for name, value in packed.constants.items():
        setattr(held, name, value)
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in packed.nodes:
        target = _resolved(target, nodes)
        args, kwargs = _resolved(args, nodes), _resolved(kwargs, nodes)
        nodes[name] = graph.create_node(op, target, args, kwargs, name)
    return module_of(held, graph)


def _resolved(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, Reference):
        if "." not in value.name:
            return nodes[value.name]
        namespace, operator, overload = value.name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    if isinstance(value, dict):
        return {key: _resolved(item, nodes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_resolved(item, nodes) for item in value])
    return value


@dataclass(frozen=True)
class PackedMicroBatchGraphs:
    """The forms of a step for several runs, as values."""

    forward: PackedGraph
    backward: PackedGraph
    working: tuple[str, ...]
    added: dict[str, str]
    totals: PackedGraph | None

    @classmethod
    def of(cls, graphs: MicroBatchGraphs) -> PackedMicroBatchGraphs:
        totals = None if graphs.whole_batch_sums is None else pack(graphs.whole_batch_sums)
        packed = pack(graphs.whole_forward), pack(graphs.whole_backward)
        return cls(*packed, tuple(graphs.gathered_parameters), dict(graphs.accumulators), totals)

    def unpacked(self) -> MicroBatchGraphs:
        totals = None if self.totals is None else unpack(self.totals)
        return MicroBatchGraphs(unpack(self.forward), unpack(self.backward), self.working, self.added, totals)


@dataclass(frozen=True)
class Packed:
    """A step that can be pickled."""

    forward: PackedGraph
    backward: PackedGraph
    spec: StepSpec
    call: CallTree
    plan: dict[str, Any]
    micro_batch_graphs: PackedMicroBatchGraphs | None = None

    @classmethod
    def of(cls, step: Step, call: CallTree, plan: sw.Plan, several: bool = False) -> Packed:
        """The step, and with `several` its forms for several runs before the optimizer's."""
        assert step.backward is not None and step.micro_batch_graphs is not None
        micro_batch_graphs = PackedMicroBatchGraphs.of(step.micro_batch_graphs()) if several else None
        return cls(pack(step.forward), pack(step.backward), step.spec, call, plan.to_dict(), micro_batch_graphs)

    def module(self, model: nn.Module) -> sw.ParallelModule:
        """`model` run by this step, as `compile_parallel` makes it."""
        micro_batch_graphs = None if self.micro_batch_graphs is None else self.micro_batch_graphs.unpacked
        step = Step(unpack(self.forward), unpack(self.backward), self.spec, micro_batch_graphs)
        # The mark of a tensor is told by identity, which a pickle does not keep.
        constants = self.call.output_constants
        marks = tuple(TENSOR_OUTPUT if constant == TENSOR_OUTPUT else constant for constant in constants)
        call = replace(self.call, output_constants=marks)
        return sw.ParallelModule(model, CompiledStep(step, call.flatten, call.unflatten))
