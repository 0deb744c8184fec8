"""A step written by hand, as a compiler would: one linear layer in tensor and sharded data parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from shardweave.ir import Layout, Mesh, ParameterSpec, StepSpec, ValueSpec
from shardweave.passes import Step

ROWS, FEATURES, OUTPUTS = 8, 4, 12
aten, comm = torch.ops.aten, torch.ops._c10d_functional


class Model(nn.Module):
    """One linear layer under two names, a scale, a count of calls, and a frozen parameter; names that may clash."""

    calls: torch.Tensor

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.local = nn.Linear(FEATURES, OUTPUTS, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.again = self.local

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y = self.local(x) * self.scale
        return (y - target).square().mean(), y


class Builder:
    """A graph under construction: placeholders by name, ops by call."""

    def __init__(self, *placeholders: str) -> None:
        self.graph = fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in placeholders]

    def __call__(self, op: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(op, args)

    def reduce(self, value: fx.Node, group: str) -> fx.Node:
        return self(comm.wait_tensor.default, self(comm.all_reduce.default, value, "sum", group))

    def finish(self, *outputs: Any) -> fx.GraphModule:
        self.graph.output(list(outputs))
        return fx.GraphModule(nn.Module(), self.graph)


def handmade_step(mesh: Mesh, dtype: str = "float64") -> Step:
    """`Model`'s step on 4 ranks: gpu0 on the outputs' features, gpu1 on the batch; the weight rests over both."""
    tensor, data = mesh.axis("gpu0"), mesh.axis("gpu1")
    coordinates = [f"coord_{axis.name}" for axis in mesh.axes]
    both = "gpu0.gpu1"

    f = Builder(*coordinates, "scale", "frozen", "weight", "bias", "calls", "x", "target")
    scale, _, weight, bias, calls, x, target = f.inputs[len(coordinates) :]
    counted = f(aten.add.Tensor, calls, 1)
    gathered = f(comm.all_gather_into_tensor.default, weight, data.size, "gpu1")
    whole = f(comm.wait_tensor.default, gathered)
    pre = f(aten.addmm.default, bias, x, f(aten.t.default, whole))
    y = f(aten.mul.Tensor, pre, scale)
    error = f(aten.sub.Tensor, y, target)
    squares = f(aten.sum.default, f(aten.mul.Tensor, error, error))
    loss = f(aten.div.Tensor, f.reduce(squares, both), float(ROWS * OUTPUTS))
    forward = f.finish(counted, loss, y, x, whole, pre, error, scale)

    b = Builder(*coordinates, "x", "whole", "pre", "error", "scale", "tangent_loss", "tangent_y")
    x, whole, pre, error, scale, tangent_loss, tangent_y = b.inputs[len(coordinates) :]
    of_loss = b(aten.mul.Tensor, b(aten.mul.Tensor, error, 2.0 / (ROWS * OUTPUTS)), tangent_loss)
    d_y = b(aten.add.Tensor, of_loss, tangent_y)
    d_scale = b.reduce(b(aten.sum.default, b(aten.mul.Tensor, d_y, pre)), both)
    d_pre = b(aten.mul.Tensor, d_y, scale)
    d_bias = b.reduce(b(aten.sum.dim_IntList, d_pre, [0]), "gpu1")
    d_whole = b(aten.mm.default, b(aten.t.default, d_pre), x)
    scattered = b(comm.reduce_scatter_tensor.default, d_whole, "sum", data.size, "gpu1")
    backward = b.finish(d_scale, b(comm.wait_tensor.default, scattered), d_bias)

    rows, columns = ROWS // data.size, OUTPUTS // tensor.size
    spec = StepSpec(
        mesh=mesh,
        parameters=(
            ParameterSpec("scale", Layout(()), dtype),
            ParameterSpec("frozen", Layout(((3,),)), dtype, trainable=False),
            ParameterSpec("local.weight", Layout(((tensor, data, columns // data.size), (FEATURES,))), dtype),
            ParameterSpec("local.bias", Layout(((tensor, columns),)), dtype),
        ),
        buffers=(ParameterSpec("calls", Layout(()), "int64", trainable=False),),
        inputs=(
            ValueSpec("x", Layout(((data, rows), (FEATURES,))), dtype),
            ValueSpec("target", Layout(((data, rows), (tensor, columns))), dtype),
        ),
        outputs=(
            ValueSpec("loss", Layout(()), dtype, differentiable=True),
            ValueSpec("y", Layout(((data, rows), (tensor, columns))), dtype, differentiable=True),
        ),
        mutated=("calls",),
        data_axes=(data,),
        graph_hash="handmade",
    )
    return Step(forward, backward, spec)
