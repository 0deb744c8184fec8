"""Listings show one op's nodes with local shapes, and say whose each collective is."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.ir import META, Axis, Collective, NodeInfo
from shardweave.report import listing

gather = torch.ops._c10d_functional.all_gather_into_tensor.default
wait = torch.ops._c10d_functional.wait_tensor.default


def graph() -> fx.GraphModule:
    """A weight gathered over two devices and used by a matmul, and an op of another layer."""
    written = fx.Graph()
    weight, x = written.placeholder("blocks_0_up_weight"), written.placeholder("x")
    weight.meta.update({"val": torch.zeros(2, 4), META: NodeInfo(op="blocks.0.up.weight")})
    axes = (Axis("gpu0", 2),)
    collective = Collective("all_gather", axes, 2048, "blocks.0.up.weight", "gather from rest", "parameter")
    started = written.call_function(gather, (weight, 2, "gpu0"))
    started.meta.update({"val": torch.zeros(4, 4), META: NodeInfo(op="blocks.0.up.weight", collective=collective)})
    waited = written.call_function(wait, (started,))
    waited.meta.update({"val": torch.zeros(4, 4), META: NodeInfo(op="blocks.0.up.weight")})
    product = written.call_function(torch.ops.aten.mm.default, (x, waited))
    product.meta.update({"val": torch.zeros(8, 4), META: NodeInfo(op="blocks.0.up")})
    other = written.call_function(torch.ops.aten.relu.default, (product,))
    other.meta.update({"val": torch.zeros(8, 4), META: NodeInfo(op="blocks.1.act", backward=True)})
    written.output(other)
    return fx.GraphModule(torch.nn.Module(), written)


def test_an_op_with_its_parameter() -> None:
    lines = listing(graph(), "blocks.0.up").splitlines()
    assert lines[0].startswith("blocks_0_up_weight = at rest") and lines[0].endswith("# [2, 4]")
    assert lines[1] == "# blocks.0.up.weight: all_gather of 2.0 KiB over gpu0 (2 devices), gather from rest"
    assert lines[-1].startswith("mm_default = mm(x, wait_tensor_default)") and lines[-1].endswith("# [8, 4]")
    assert len({line.index("# [") for line in lines if "# [" in line}) == 1


def test_forward_or_backward_only() -> None:
    module = graph()
    assert "relu" not in listing(module, backward=False)
    assert listing(module, backward=True).startswith("relu_default = relu(mm_default)")
    assert listing(module, "blocks.7.*") == ""
