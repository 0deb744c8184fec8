"""Operator slices: an op's parameter is gathered, computed with and freed a slice at a time; gathers may be kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import LayoutError, PlanError
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.space import Space
from shardweave.planner.problem.step_choices import with_slices
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.graphs import info
from tests.compiler.test_overlap import check, lowered, moved
from tests.compiler.training import Way
from tests.planner.planners import MetaGPT, Planner, smallest_named


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
    step = lowered("gpt", {"*": "zdp"}, operator_slices={"blocks.0.up": 4}, max_prefetch=1).step
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
    cluster, options = sw.Cluster.local(4), {"force": {"*": "zdp"}, "max_prefetch": 0}
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


# -- slices as a part of a strategy


def test_slices_are_a_part_of_a_strategy() -> None:
    whole = Strategy(Grid(data=4), rest=4)
    strategy = replace(whole, slices=4)
    assert Strategy.from_dict(strategy.to_dict()) == strategy and Strategy.from_dict(whole.to_dict()) == whole
    assert str(strategy) == "(1, 1, 1, 4) ZDP in 4 slices"
    with pytest.raises(LayoutError, match="0 slices"):
        replace(whole, slices=0)


def test_a_strategy_in_slices_is_the_option_for_one_op() -> None:
    zdp = Strategy(Grid(data=4), rest=4)
    by_option = lowered("gpt", {"*": zdp}, operator_slices={"blocks.0.up": 4}).step
    by_strategy = lowered("gpt", {"*": zdp, "blocks.0.up": replace(zdp, slices=4)}).step
    for mine, other in ((by_strategy.forward, by_option.forward), (by_strategy.backward, by_option.backward)):
        assert mine is not None and other is not None
        assert mine.code == other.code


def test_slices_that_do_not_divide_cannot_be_forced() -> None:
    model, x = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)), torch.randn(8, 6)
    force = {"0": Strategy(Grid(data=2), rest=2, slices=4)}
    with pytest.raises(PlanError, match=r"4 slices divide none of its loops, of \[6, 10\] steps"):
        sw.plan(model, sw.Cluster.local(2), x, options=sw.Options(force=force))


def test_what_gathers_much_at_a_time_is_offered_in_slices() -> None:
    with torch.device("meta"):
        layers = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32768), nn.ReLU(), nn.Linear(32768, 16)
        model, x = nn.Sequential(*layers), torch.zeros(8, 256)
    cluster = sw.Cluster.preset("rtx3090-pcie", nodes=1)
    annotated = Compiler(model, cluster, x, None, None).annotated

    def builder(memory_limit: int, **options: Any) -> ProblemBuilder:
        return ProblemBuilder(Space(annotated, cluster, Options(memory_limit=memory_limit, **options)))

    tight = builder(200 * 2**20)
    costed = tight.build()
    offered = with_slices(tight, costed)
    for before, after in zip(costed.variables, offered.variables, strict=True):
        assert after.strategies[: len(before.strategies)] == before.strategies and after.ports == before.ports
        choices = [*zip(after.strategies, after.kept_slices, strict=True)]
        sliced = [index for index, (each, kept) in enumerate(choices) if each.slices > 1 and kept == 0]
        assert bool(sliced) == (before.name == "2"), before.name
        assert not sliced or after.prices is not None
        for index in sliced:
            assert after.prices is not None
            whole = choices.index((replace(after.strategies[index], slices=1), 0))
            held, costs = after.prices.transient_bytes, after.prices.costs.sum(axis=(0, 1))
            assert held[index] <= held[whole] / 3 and costs[index] > costs[whole]
            assert after.prices.state_bytes[index] == after.prices.state_bytes[whole]
    roomy = builder(2**40)
    assert [variable.strategies for variable in with_slices(roomy, roomy.build()).variables] == [
        variable.strategies for variable in offered.variables
    ]
    said = builder(200 * 2**20, operator_slices={"2": 2})
    assert with_slices(said, same := said.build()) is same


def test_what_fits_in_slices_alone_is_planned_in_slices() -> None:
    """Where parameters are most of it: of longer sequences gathers wait for room, and what is whole fits as well."""
    model, inputs = MetaGPT(GPTConfig(50304, 32, 1, 8, 1024), 16).build()
    planner = Planner(model, sw.Cluster.preset("rtx3090-pcie", nodes=4), inputs, micro_batches=1, sub_batches=1)
    with pytest.raises(sw.InfeasibleError) as caught:
        planner.plan(memory_limit=1, operator_slices={"head": 1})  # which says that it stays whole
    whole = smallest_named(caught.value)
    plan = planner.plan(memory_limit=whole - 1)
    sliced = [name for name, choice in plan.choices.items() if choice.strategy.slices > 1]
    assert sliced and plan.timeline().peak_memory <= plan.peak_memory < whole
    assert "in 4 slices" in str(plan.explain())
