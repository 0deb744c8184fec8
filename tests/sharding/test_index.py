"""Lookups and writes by index, where what is indexed lies in parts of its own: in pieces, along with its index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.ir import Assignment
from shardweave.ir.errors import RuleError
from shardweave.sharding.annotate import Annotate
from tests.passes.cases import CASES, Draw
from tests.passes.cases.draw import Made
from tests.passes.harness import (
    assert_equal,
    bound,
    examples,
    graph_of,
    mesh_of,
    meshes,
    placeholders,
    random_assignments,
    random_layout,
    run_sharded,
)

aten = torch.ops.aten


def _only(module: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is target)
    return node


@examples(40)
@given(data=st.data())
def test_lookups_in_pieces(data: st.DataObject) -> None:
    """A flattened (batch, sequence) is indexed: a rank's part of it is several pieces where the sequence is split."""
    d = Draw(data)
    b, s, width, rows = 4, 6, d.size(), d.size(among=[1, 4, 6])
    fake, graph = FakeTensorMode(), fx.Graph()
    values = [d.tensor(b, s, width), d.integers(b * s, rows), d.tensor(rows, width)]
    nodes = []
    for number, value in enumerate(values):
        node = graph.placeholder(f"p{number}")
        node.meta["val"] = fake.from_tensor(value)
        nodes.append(node)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with fake:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda leaf: leaf.meta["val"]))
        return node

    flat = call(aten.view.default, nodes[0], [b * s, width])
    found = call(aten.index.Tensor, flat, [nodes[1]])
    picked = call(aten.gather.default, flat, 0, call(aten.expand.default, call(aten.unsqueeze.default, nodes[1], 1),
                                                     [rows, width]))  # fmt: skip
    written = call(aten.index_put.default, flat, [nodes[1]], nodes[2], True)
    graph.output((found, picked, call(aten.view.default, written, [b, s, width])))
    module = Annotate()(fx.GraphModule(nn.Module(), graph))
    mesh = data.draw(meshes())
    assignments = random_assignments(module, mesh, d.rng, share=0.7)
    sources = {node.name: random_layout(node, mesh, d.rng) for node in placeholders(module)}
    run = run_sharded(module, values, mesh, assignments, sources)
    for index, expected in enumerate(module(*values)):
        assert_equal(run.whole(index), expected, str(assignments))


def test_a_piece_of_a_flattened_dimension_is_found() -> None:
    """The case above does meet pieces: an axis on the inner atom of what is looked up."""
    mesh = mesh_of(2)
    (axis,) = mesh.axes
    x, rows = torch.arange(24.0).view(4, 6), torch.tensor([0, 7, 23, 16])
    module, values = graph_of(aten.take.default, (x, rows), {})
    node = _only(module, aten.index.Tensor)
    assert bound(node).inputs[0] == (("v0.0", "v0.1"),)
    run = run_sharded(module, values, mesh, {node.name: Assignment.of({axis: "v0.1"})}, {})
    assert_equal(run.whole(0), x.flatten()[rows])


def test_a_counting_index_keeps_the_batch() -> None:
    """``x[arange(batch), last]`` and its gradient: the batch of the index is the batch of the value."""
    rows = torch.tensor([3, 0, 2, 1])
    module, values = graph_of(
        aten.index.Tensor, (torch.randn(4, 5, 6), [Made(aten.arange.default, (4,), {}), rows]), {}
    )
    rule = bound(_only(module, aten.index.Tensor))
    assert str(rule) == "n0 v1 i2, n0, n0 -> n0 i2"
    sizes = ((4, [4, 1, 1]), (6, [1, 1, 6]))
    mask = [Made(aten.view.default, (Made(aten.arange.default, (n,), {}), size), {}) for n, size in sizes]
    module, values = graph_of(aten.index.Tensor, (torch.rand(4, 6) < 0.5, mask), {})
    rule = bound(_only(module, aten.index.Tensor))
    assert rule.inputs[0] == (("n0",), ("n2",)) and rule.outputs[0] == (("n0",), (), ("n2",))
    assert not any(factor.blocked for factor in rule.factors)


@pytest.mark.parametrize("target", [aten.scatter_add.default, aten.scatter_reduce.two])
@examples(12)
@given(data=st.data())
def test_adding_to_what_is_there(target: Any, data: st.DataObject) -> None:
    """What is added to is counted once, on any number of ranks that hold parts of the index."""
    d = Draw(data)
    (zeros, *args), _ = CASES[aten.scatter_add.default](d)
    args = [*args, "sum"] if target is aten.scatter_reduce.two else args
    module, values = graph_of(target, (d.tensor(*zeros.args[0]), *args), {})
    mesh = data.draw(meshes())
    assignments = random_assignments(module, mesh, d.rng, share=0.8)
    sources = {node.name: random_layout(node, mesh, d.rng) for node in placeholders(module)}
    run = run_sharded(module, values, mesh, assignments, sources)
    assert_equal(run.whole(0), module(*values)[0])


def test_values_of_their_own_for_what_a_mask_selects_have_no_rule() -> None:
    """How much a mask selects is not known before the step. One number for all of it is a `torch.where`."""
    mask = [torch.ones(4, dtype=torch.bool)]
    with pytest.raises(RuleError, match="depends on the data"):
        graph_of(aten.index_put.default, (torch.randn(4), mask, torch.randn(4)), {})
    module, _ = graph_of(aten.index_put.default, (torch.randn(4), mask, torch.tensor(1.0)), {})
    assert [node.target for node in module.graph.nodes if node.op == "call_function"][-1] is aten.where.self
