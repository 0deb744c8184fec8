"""What a strategy may not do is refused, and what has to be done in parts is done in parts."""

from __future__ import annotations

import pytest
import torch

from shardweave.ir import Assignment
from shardweave.ir.errors import LayoutError
from tests.passes.harness import assert_equal, assigned_nodes, graph_of, mesh_of, run_sharded

aten = torch.ops.aten


def test_a_loop_that_cannot_be_split_is_refused() -> None:
    module, values = graph_of(aten.sort.default, (torch.randn(8, 4),), {})
    (node,) = assigned_nodes(module)
    mesh = mesh_of(2)
    (blocked,) = (factor.name for factor in node.meta["shardweave"].rule.factors if factor.blocked)
    with pytest.raises(LayoutError, match=rf"\['{blocked}'\] of aten.sort.default .* cannot be split"):
        run_sharded(module, values, mesh, {node.name: Assignment.of({mesh.axes[0]: blocked})}, {})


def test_a_softmax_along_its_own_loop_is_done_in_parts() -> None:
    module, values = graph_of(aten._softmax.default, (torch.randn(8, 4), -1, False), {})
    (node,) = assigned_nodes(module)
    mesh = mesh_of(2)
    (blocked,) = (factor.name for factor in node.meta["shardweave"].rule.factors if factor.blocked)
    run = run_sharded(module, values, mesh, {node.name: Assignment.of({mesh.axes[0]: blocked})}, {})
    assert_equal(run.whole(0), module(*values)[0])
