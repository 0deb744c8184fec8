"""The planner chooses what is computed again: never without need, and as little as fits."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import RECOMPUTE_MODES
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.problem import FORBIDDEN
from shardweave.planner.problem.space import Space
from shardweave.planner.problem.step_choices import with_modes
from tests.planner.planners import Planner

CONFIG = GPTConfig(vocabulary=128, context=256, layers=4, heads=4, width=256)
BATCH = 32


@cache
def planner() -> Planner:
    with torch.device("meta"):
        tokens = torch.zeros(BATCH, CONFIG.context, dtype=torch.long)
        cluster = sw.Cluster.preset("dgx-a100", nodes=1)
        return Planner(GPT(CONFIG), cluster, (tokens, tokens), micro_batches=1)  # the other way to save is test_splits'


def test_what_fits_is_not_computed_again() -> None:
    plan = planner().plan()
    assert not plan.overlap.recompute and plan.peak_memory <= plan.memory_limit


def test_where_memory_is_short_layers_are_computed_again() -> None:
    """Below what any plan that keeps everything needs; the generated step fits, and does compute again."""
    with pytest.raises(sw.InfeasibleError) as error:
        planner().plan(memory_limit=1, recompute={})
    assert error.value.needed_bytes is not None
    limit = error.value.needed_bytes - 1
    with pytest.raises(sw.InfeasibleError):
        planner().plan(memory_limit=limit, recompute="none")
    plan = planner().plan(memory_limit=limit)
    assert set(plan.overlap.recompute.values()) & {"fine", "full"}
    timeline = plan.timeline()
    assert timeline.peak_memory <= plan.peak_memory <= limit
    assert timeline.compute_time > planner().plan().timeline().compute_time
    text = str(plan.explain())
    assert "recomputation" in text


def test_more_is_computed_again_only_as_memory_falls() -> None:
    least, most = _least(), planner().plan().peak_memory
    again = []
    for part in (0.3, 0.7):
        limit = int(least + part * (most - least))
        plan = planner().plan(memory_limit=limit)
        assert plan.timeline().peak_memory <= limit
        again.append(plan.timeline().compute_time)
    assert again == sorted(again, reverse=True)


@cache
def _least() -> int:
    with pytest.raises(sw.InfeasibleError) as error:
        planner().plan(memory_limit=1)
    assert error.value.needed_bytes is not None
    return error.value.needed_bytes


def test_keeping_everything_is_the_problem_without_modes() -> None:
    """With every layer's mode "none" times are as they were, and memory, but for what ops leave and saved more of.

    An op counts the larger of what it saves and of what it leaves; of what it saves inside of its layer an edge counts.
    """
    compiler = planner()._compiler
    options = sw.Options(memory_limit=10**10)
    builder = ProblemBuilder(Space(compiler.annotated, compiler.cluster, options))
    before = builder.build()
    after = with_modes(builder, before)
    layers = [variable.modes for variable in after.variables if variable.modes]
    assert layers == [RECOMPUTE_MODES] * CONFIG.layers
    rng = random.Random(0)
    tried = 0
    for _ in range(50):
        picked = [rng.randrange(len(op.candidates)) for op in before.problem.ops]
        known = dict(zip((op.name for op in before.problem.ops), picked))
        choice = [known.get(op.name, 0) for op in after.problem.ops]
        left = sum(min(op.left_bytes, op.saved_bytes) for op in before.problem.chosen(picked))
        assert 0 <= after.problem.memory(choice) - before.problem.memory(picked) + len(picked) <= left + 2 * len(picked)
        assert after.problem.ticks(choice) == before.problem.ticks(picked)
        tried += before.problem.ticks(picked) != FORBIDDEN
        for mode, (less, slower) in enumerate(((False, False), (True, True), (True, True))):
            other = [known.get(op.name, mode) for op in after.problem.ops]
            assert (after.problem.memory(other) < after.problem.memory(choice)) == less
            assert (after.problem.objective(other) > after.problem.objective(choice)) == slower
    assert tried


def test_what_the_user_says_of_recomputation_holds() -> None:
    plan = planner().plan(recompute={"blocks.1": "fine"})
    assert plan.overlap.recompute == {"blocks.1": "fine"}


def test_the_program_counts_what_is_asked_to_be_computed_again() -> None:
    """As the simulator does: a plan of which the user says so is chosen by what it takes and holds so."""
    asked = {mode: planner().plan(force={"*": "dp"}, recompute=mode) for mode in RECOMPUTE_MODES}
    for plan in asked.values():
        assert plan.program_time == pytest.approx(plan.step_time, rel=0.05)
    assert asked["full"].program_time > 1.05 * asked["none"].program_time
    assert asked["full"].peak_memory < asked["none"].peak_memory
    mixed = {"blocks.*": "full", "blocks.0": "none"}
    plan = planner().plan(force={"*": "dp"}, recompute=mixed)
    assert plan.overlap.recompute == mixed
    assert asked["none"].program_time < plan.program_time < asked["full"].program_time


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + (torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if index % 2 else layer(x))
        return x.square().mean()


def test_a_model_with_checkpoints_keeps_them() -> None:
    """Where the user says by checkpoints what is computed again, the planner adds nothing."""
    planner = Planner(Checkpointed(), sw.Cluster.local(2), torch.zeros(64, 64), micro_batches=1)
    assert not planner.plan(memory_limit=planner.smallest()).overlap.recompute


def test_what_collectives_gather_is_kept_where_none_is_repeated() -> None:
    """In the mode fine: the gathered input of a product that is spread over features, not of a data-parallel one."""
    compiler = planner()._compiler
    builder = ProblemBuilder(Space(compiler.annotated, compiler.cluster, sw.Options(memory_limit=10**12)))
    costed = with_modes(builder, builder.build())
    problem = costed.problem
    (up,) = (number for number, variable in enumerate(costed.variables) if variable.name == "blocks.1.up")
    (mode,) = (edge for edge in problem.edges if edge.producer == up and costed.variables[edge.consumer].modes)
    fine, whole = RECOMPUTE_MODES.index("fine"), BATCH * CONFIG.context * CONFIG.width * 4
    assert mode.kept is not None
    for candidate, strategy in zip(problem.ops[up].candidates, costed.variables[up].strategies, strict=True):
        kept = mode.kept[candidate.out_port, fine]
        if strategy.grid.x == compiler.cluster.world_size:
            assert kept >= whole
        if strategy.grid.data == compiler.cluster.world_size:
            assert kept == 0
