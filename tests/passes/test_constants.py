"""Constants of a step are made in parts where parts are wanted, and by each of forward and backward for itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardweave.compiler.capture import capture
from shardweave.ir import META, Assignment, Layout
from shardweave.passes.partition import Shard
from shardweave.sharding.annotate import Annotate
from tests.passes.harness import graph_of, mesh_of, output_nodes, run_sharded

aten = torch.ops.aten


def spread(target: object, args: tuple[object, ...], layout: Layout) -> list[int]:
    """The elements of each value of the local graph of a constant that is wanted at `layout`."""
    module, values = graph_of(target, args, {})
    run = run_sharded(module, values, mesh_of(2, 2), {}, {}, [layout])
    assert torch.equal(run.whole(0), module(*values)[0])
    found = [node.meta["val"] for node in run.graph.graph.nodes if node.op == "call_function"]
    return [value.numel() for value in found if isinstance(value, Tensor)]


def test_a_block_of_zeros_is_made_in_parts() -> None:
    inner, outer = sorted(mesh_of(2, 2).axes, key=lambda axis: axis.stride)
    assert spread(aten.full.default, ([8, 6], 0), Layout(((outer, 4), (inner, 3)))) == [12]


def test_a_range_is_made_in_parts() -> None:
    axes = sorted(mesh_of(2, 2).axes, key=lambda axis: -axis.stride)
    assert max(spread(aten.arange.start_step, (3, 19, 2), Layout(((*axes, 2),)))) == 2


def test_a_range_that_is_wanted_in_strides_is_cut() -> None:
    inner, _ = sorted(mesh_of(2, 2).axes, key=lambda axis: axis.stride)
    assert max(spread(aten.arange.default, (8,), Layout(((4, inner),)))) == 8


class Masked(nn.Module):
    """A product with a mask that is made of ranges, as causal masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.arange(8)[:, None], torch.arange(16)
        return torch.where(rows * 2 >= columns, x @ self.weight, 0.0).square().sum()


def test_each_rank_makes_its_part_of_a_mask() -> None:
    """The mask of 8 x 16 never exists whole, and what the backward needs of it is not kept by the forward."""
    captured = capture(Masked(), {"x": torch.randn(8, 4)})
    module = Annotate()(captured.graph)
    mesh = mesh_of(2)
    (axis,) = mesh.axes
    nodes = {node.name: node for node in module.graph.nodes}
    (product,) = (node for node in nodes.values() if node.target is aten.mm.default and not node.meta[META].backward)
    (rows,) = (factor.name for factor in product.meta[META].rule.factors if factor.name.startswith("m"))
    local = Shard(mesh, {product.name: Assignment.of({axis: rows})}, {}, [None] * len(output_nodes(module)))(module)
    made = [node for node in local.graph.nodes if node.op == "call_function" and node.meta["val"] is not None]
    masks = [node for node in made if getattr(node.meta["val"], "dtype", None) == torch.bool]
    assert masks and max(node.meta["val"].numel() for node in masks) == 4 * 16
    for node in masks:
        assert len({user.meta[META].backward for user in node.users}) == 1
