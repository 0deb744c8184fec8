"""Verify: graphs that are broken on purpose, each against one law, are refused with the pass, the node and the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from shardweave.cost_model import Cluster
from shardweave.cost_model.memory import peak_live_bytes
from shardweave.cost_model.node_cost import NodeCosts
from shardweave.cost_model.options import Options
from shardweave.ir import META
from shardweave.ir.errors import VerifyError
from shardweave.passes.base import verify, verify_memory
from shardweave.passes.pipeline import lower
from shardweave.passes.schedule import Schedule, fits
from shardweave.planner.problem.space import forced_strategies
from shardweave.sharding.graphs import copied, info
from tests.passes.harness import mesh_of
from tests.passes.joint import joint

aten = torch.ops.aten
CLUSTER = Cluster.local(4)


@pytest.fixture(scope="module")
def step() -> fx.GraphModule:
    """A GPT in tensor and sharded data parallelism, with all that overlap does."""
    mesh, annotated = mesh_of(2, 2), joint("gpt").annotated
    force: dict[str, Any] = {"*": "zdp", "*.up": "column:2", "*.down": "row:2"}
    found = forced_strategies(force, annotated.ops, mesh, annotated.batch)
    options = Options(sub_batches=2, recompute="fine", buckets=True)
    return lower(annotated, {op.name: found[op.name][0] for op in annotated.ops}, mesh, options).graphs["schedule"]


def start_of(module: fx.GraphModule, kind: str, cause: str) -> fx.Node:
    noted: list[tuple[fx.Node, Any]] = [(node, info(node).collective) for node in module.graph.nodes]
    return next(node for node, what in noted if what is not None and (what.kind, what.cause) == (kind, cause))


def wait_of(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return wait


def leave_out(module: fx.GraphModule, start: fx.Node) -> None:
    """Let what reads the result of a collective read its operand."""
    wait = wait_of(start)
    wait.replace_all_uses_with(start.all_input_nodes[0])
    module.graph.erase_node(wait)
    module.graph.erase_node(start)


def product(module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if node.target is aten.mm.default)
    return found


def written_into(module: fx.GraphModule, value: fx.Node) -> fx.Node:
    """A node that is written into a value, to be put somewhere."""
    node = module.graph.call_function(aten.neg_.default, (value,))
    node.meta = {"val": value.meta["val"], META: replace(info(value), collective=None)}
    return node


def read_too_early(module: fx.GraphModule) -> str:
    node = product(module)
    first = next(node for node in module.graph.nodes if node.op == "call_function")
    first.prepend(node)
    return f"{node.name} reads .* before it is computed"


def wait_before_its_start(module: fx.GraphModule) -> str:
    start = start_of(module, "all_reduce", "activation")
    start.prepend(wait_of(start))
    return f"{wait_of(start).name} reads {start.name} before it is computed"


def wait_for_nothing(module: fx.GraphModule) -> str:
    node = start_of(module, "all_gather", "parameter")
    wait = wait_of(node)
    wait.replace_input_with(node, node.all_input_nodes[0])
    module.graph.erase_node(node)
    return f"{wait.name} waits for .*, which starts no collective"


def unknown_collective(module: fx.GraphModule) -> str:
    node = start_of(module, "all_gather", "parameter")
    node.meta[META] = replace(info(node), collective=None)
    return f"{node.name} starts a collective that nothing is noted of"


def other_bytes(module: fx.GraphModule) -> str:
    node = start_of(module, "all_gather", "parameter")
    what = info(node).collective
    assert what is not None
    node.meta[META] = replace(info(node), collective=replace(what, bytes=what.bytes + 1))
    return f"{node.name} of .* is noted"


def other_group(module: fx.GraphModule) -> str:
    node = start_of(module, "all_reduce", "activation")
    node.args = (*node.args[:-1], "another")
    return f"{node.name} of .*'another'.* is noted"


def sum_left_out(module: fx.GraphModule) -> str:
    """The partial sums of a row-parallel product have the shape of the whole one."""
    leave_out(module, start_of(module, "all_reduce", "activation"))
    return "reads differs along .*, and no collective comes before its layout"


def gather_left_out(module: fx.GraphModule) -> str:
    leave_out(module, start_of(module, "all_gather", "parameter"))
    return "its op makes"


def another_operand(module: fx.GraphModule) -> str:
    node = product(module)
    node.args = (node.args[1], node.args[1])
    return f"{node.name} has the value .*, its op makes"


def another_dtype(module: fx.GraphModule) -> str:
    node = product(module)
    node.meta["val"] = node.meta["val"].float()
    return f"{node.name} has the value .*float32.*, its op makes .*float64"


def sent_and_written(module: fx.GraphModule) -> str:
    node = start_of(module, "reduce_scatter", "gradient")
    wait_of(node).prepend(written_into(module, node.all_input_nodes[0]))
    return f"neg_.* is written into .*, which {node.name} may still read"


def sent_and_written_through_a_view(module: fx.GraphModule) -> str:
    node = start_of(module, "reduce_scatter", "gradient")
    source = node.all_input_nodes[0]
    view = module.graph.call_function(aten.view.default, (source, [-1]))
    view.meta = {"val": source.meta["val"].view(-1), META: replace(info(source), layouts=())}
    wait_of(node).prepend(view)
    wait_of(node).prepend(written_into(module, view))
    return f"neg_.* is written into view.*, which {node.name} may still read"


def read_after_it_was_overwritten(module: fx.GraphModule) -> str:
    node = product(module)
    node.append(written_into(module, node))
    return f"reads {node.name}, into which neg_.* has been written"


BREAKS = [
    read_too_early, wait_before_its_start, wait_for_nothing, unknown_collective, other_bytes, other_group,
    sum_left_out, gather_left_out, another_operand, another_dtype, sent_and_written, sent_and_written_through_a_view,
    read_after_it_was_overwritten,
]  # fmt: skip


@pytest.mark.parametrize("damage", BREAKS)
def test_a_broken_graph_is_refused(damage: Callable[[fx.GraphModule], str], step: fx.GraphModule) -> None:
    module = copied(step)
    verify(module, "schedule")
    message = damage(module)
    with pytest.raises(VerifyError, match=f"^after a pass: .*{message}"):
        verify(module, "a pass")


def test_a_sum_may_be_written_into_a_value_that_nothing_else_reads(step: fx.GraphModule) -> None:
    """As gradients of sub-batches are."""
    module = copied(step)
    assert any(node.target is aten.add_.Tensor for node in module.graph.nodes)
    verify(module, "schedule")


# -- memory


def test_memory_beyond_the_limit_is_refused(step: fx.GraphModule) -> None:
    most, node = peak_live_bytes(step.graph, NodeCosts(CLUSTER))
    assert node is not None
    verify_memory(step, "schedule", CLUSTER, most + 8, other_bytes=8)
    with pytest.raises(VerifyError, match=f"^after schedule: .*{most + 8:,} bytes.* at {node.name} .*{most + 7:,}"):
        verify_memory(step, "schedule", CLUSTER, most + 7, other_bytes=8)


@pytest.mark.parametrize("sub_batches", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "fine"])
def test_a_schedule_fits_exactly_where_liveness_says_so(sub_batches: int, recompute: Any) -> None:
    mesh, annotated = mesh_of(2, 2), joint("llama").annotated
    found = forced_strategies({"*": "zdp"}, annotated.ops, mesh, annotated.batch)
    options = Options(sub_batches=sub_batches, recompute=recompute, operator_slices=2)
    strategies = {op.name: found[op.name][0] for op in annotated.ops}
    graphs = lower(annotated, strategies, mesh, options).graphs

    free = Schedule(CLUSTER, 1)(copied(graphs["unroll_sub_batches"]))
    most, _ = peak_live_bytes(free.graph, NodeCosts(CLUSTER))
    for limit in (most, most - 1):
        ordered = Schedule(CLUSTER, 1, memory_limit=limit)(copied(graphs["unroll_sub_batches"]))
        held, _ = peak_live_bytes(ordered.graph, NodeCosts(CLUSTER))
        assert fits(ordered) == (held <= limit)
    ordered = Schedule(CLUSTER, memory_limit=1)(copied(graphs["unroll_sub_batches"]))
    least, _ = peak_live_bytes(ordered.graph, NodeCosts(CLUSTER))
    assert not fits(ordered)  # and what it then holds is what it can do with
    assert fits(Schedule(CLUSTER, memory_limit=least)(copied(graphs["unroll_sub_batches"])))
