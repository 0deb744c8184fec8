"""Operator slices: an op's parameter is gathered, computed with and freed a slice at a time; gathers may be kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import shardweave as sw
from shardweave.errors import PlanError
from shardweave.passes.annotate import info
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_weaving import check, lowered, moved
from tests.compiler.training import Way


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_slices_of_conv1d_tied_heads_and_experts(name: str, pool: WorkerPool) -> None:
    check(name, [Way("slices", {"*": "zdp"}, options={"operator_slices": 2})], pool, torch.float32, 1e-5, 1e-4)


def gathers(module: fx.GraphModule | None, parameter: str) -> list[tuple[int, fx.Node]]:
    found = moved(module, "parameter")
    return [(size, node) for _, size, node in found if info(node).op == parameter]


@pytest.mark.parametrize(
    ("name", "owner"), [("gpt", "blocks.0.up.weight"), ("llama", "model.layers.0.mlp.up_proj.weight")]
)
def test_slices_are_gathered_one_by_one(name: str, owner: str) -> None:
    """OSDP, section 3.3: as many bytes as of the whole, a slice at a time."""
    whole, sliced = (lowered(name, {"*": "zdp"}, operator_slices=slices).step for slices in (1, 4))
    for before, after in ((whole.forward, sliced.forward), (whole.backward, sliced.backward)):
        ((size, _),) = gathers(before, owner)
        assert [each for each, _ in gathers(after, owner)] == [size // 4] * 4
    ((size, _),) = [(size, node) for _, size, node in moved(whole.backward, "gradient") if info(node).op == owner]
    reduced = [size for _, size, node in moved(sliced.backward, "gradient") if info(node).op == owner]
    assert reduced == [size // 4] * 4
    mine, others = ({spec.name: spec.layout for spec in step.spec.parameters} for step in (sliced, whole))
    assert mine[owner] == others[owner]  # slices rest as the whole does


@pytest.mark.parametrize(("kept", "again"), [({"*": 3}, 1), (True, 0), ({"*": True, "blocks.0.up": 0}, 4)])
def test_what_is_kept_is_not_gathered_again(kept: Any, again: int) -> None:
    """Three slices of four stay gathered, or all of them: AxoNN's cache (section IV-D)."""
    step = lowered("gpt", {"*": "zdp"}, operator_slices={"blocks.*.up": 4}, keep_gathered=kept).step
    assert len(gathers(step.forward, "blocks.0.up.weight")) == 4
    assert len(gathers(step.backward, "blocks.0.up.weight")) == again
    assert len(gathers(step.backward, "blocks.0.down.weight")) == 0


@pytest.mark.parametrize("mode", ["full", "fine"])
def test_recomputation_reads_what_is_kept(mode: str) -> None:
    step = lowered("gpt", {"*": "zdp"}, recompute=mode, keep_gathered=True).step
    assert moved(step.forward, "parameter") and not moved(step.backward, "parameter")
    assert step.backward is not None
    assert any(info(node).recomputed and "mm" in node.name for node in step.backward.graph.nodes)


def test_few_slices_are_there_at_once() -> None:
    """While one slice is computed with the next one arrives; those before are freed."""
    step = lowered("gpt", {"*": "zdp"}, operator_slices={"blocks.0.up": 4}, lookahead=1).step
    for module in (step.forward, step.backward):
        assert module is not None
        nodes = list(module.graph.nodes)
        at = {node: index for index, node in enumerate(nodes)}
        spans = []
        for _, start in gathers(module, "blocks.0.up.weight"):
            (wait,) = start.users
            spans.append((at[start], max(at[user] for user in [wait, *wait.users])))
        together = max(sum(begin <= point <= end for begin, end in spans) for point, _ in spans)
        assert len(spans) == 4 and together <= 2


def test_slices_take_less_memory() -> None:
    model, x = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 512)), torch.randn(16, 512)
    cluster, options = sw.Cluster.local(4), {"force": {"*": "zdp"}, "lookahead": 0}
    peaks = [
        sw.plan(model, cluster, x, options=sw.Options(operator_slices=slices, **options)).timeline().peak_memory
        for slices in (1, 2, 4)
    ]
    weight = 512 * 4096 * 4
    assert peaks[0] - peaks[1] > 0.4 * weight and peaks[1] - peaks[2] > 0.2 * weight


def test_the_last_pattern_holds() -> None:
    """Also where its number divides no loop: such an op stays whole."""
    step = lowered("gpt", {"*": "zdp"}, operator_slices={"blocks.*": 2, "*": 3, "blocks.0.down": 4}).step
    names = ("blocks.0.up", "blocks.0.down", "head")
    assert [len(gathers(step.forward, f"{name}.weight")) for name in names] == [1, 4, 3]


def test_slices_that_fit_nothing_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)), torch.randn(8, 6)
    options = sw.Options(operator_slices={"0": 4}, force={"*": "zdp"})
    with pytest.raises(PlanError, match=r"operator_slices\['0'\] = 4 fits nothing.*0: 4 slices divide none.*\[6, 10\]"):
        sw.plan(model, sw.Cluster.local(2), x, options=options)
    with pytest.raises(PlanError, match=r"operator_slices\['up'\] matches no op"):
        sw.plan(model, sw.Cluster.local(2), x, options=sw.Options(operator_slices={"up": 2}))
    with pytest.raises(PlanError, match="positive"):
        sw.Options(operator_slices=0)
