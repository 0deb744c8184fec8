"""What a model returns goes where its batch came from: the border of a problem, against the steps that are lowered."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir.op_rule import Assignment
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.space import Space
from shardweave.planner.problem.step_choices import BORDER, with_outputs
from shardweave.planner.problem.variables import Costed
from tests.compiler.test_micro_batches import Loss
from tests.planner.planners import Planner

CLUSTER = sw.Cluster.preset("rtx3090-pcie", nodes=1)


def layers() -> list[nn.Module]:
    return [nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 4096)]


def planner(model: nn.Module, batch: int = 512, **options: object) -> Planner:
    plain = {"sub_batches": 1, "buckets": False, "recompute": "none", "micro_batches": 1}
    return Planner(model, CLUSTER, torch.zeros(batch, 512), **{**plain, **options})


def costed(found: Planner, **options: Any) -> tuple[Costed, Costed]:
    """The problem without its outputs, and with them."""
    compiler = found._compiler
    given = sw.Options(memory_limit=10**12, **options)
    builder = ProblemBuilder(Space(compiler.annotated, compiler.cluster, given))
    before = builder.build()
    return before, with_outputs(builder, before, lambda name: name)


def parts_of(assignment: Assignment) -> int:
    return math.prod(axis.size for axis, _ in assignment.items)


def test_a_loss_has_no_border() -> None:
    before, after = costed(planner(Loss(*layers())))
    assert after is before


def test_a_border_forbids_larger_degrees_than_its_own() -> None:
    before, after = costed(planner(nn.Sequential(*layers())), sequence_parallel=False)
    assert [op.name for op in after.problem.ops[len(before.problem.ops) :]] == [BORDER]
    *variables, border = after.variables
    assert border.degrees == (1, 2, 4)
    rng = random.Random(0)
    seen = set()
    for _ in range(60):
        choice = tuple(rng.randrange(len(op.candidates)) for op in before.problem.ops)
        if before.problem.ticks(choice) is None:
            continue
        most = max(v.strategies[i].degree for v, i in zip(variables, choice, strict=True) if v.op is not None)
        allowed = [after.problem.ticks((*choice, at)) is not None for at in range(3)]
        assert allowed == [degree >= most for degree in border.degrees]
        seen.add(most)
        times = [after.problem.objective((*choice, at)) for at in range(3) if allowed[at]]
        assert times == sorted(times) and times[0] >= before.problem.objective(choice)
    assert seen == {1, 2, 4}


def test_a_border_holds_what_each_device_returns_and_its_gradient() -> None:
    """Of tensor parallel ops all of a batch's outputs: such plans were thought the smallest, and were not."""
    found = planner(nn.Sequential(*layers()), batch=512)
    _, after = costed(found, sequence_parallel=False)
    part = 512 * 4096 * 4 // 4
    index = max(at for at, variable in enumerate(after.variables) if variable.op is not None)
    last, edge = after.variables[index], after.problem.edges[-1]
    assert (edge.producer, edge.consumer) == (index, len(after.variables) - 1)
    for strategy, port, candidate in zip(last.strategies, last.port_of, after.problem.ops[index].candidates):
        lies = 4 // (strategy.grid.z * strategy.grid.data * strategy.grid.x)  # sums over y are whole
        assert edge.kept is not None
        assert edge.kept[port].tolist() == [2 * part * max(0, wanted - lies) for wanted in (1, 2, 4)], str(strategy)
        assert candidate.saved_bytes >= lies * part  # the gradient, until the backward has read it

    _, after = costed(found)  # the last sum may be scattered otherwise than by its op, and is returned from there
    last, edge = after.variables[-2], after.problem.edges[-1]
    assert last.op is None and (edge.producer, edge.consumer) == (len(after.variables) - 2, len(after.variables) - 1)
    lies_of = [4 // parts_of(assignment) for (assignment,) in (port.values() for port in last.ports)]
    assert edge.kept is not None and set(lies_of) == {1, 2, 4}
    for lies, kept in zip(lies_of, edge.kept[last.port_of], strict=True):
        assert kept.tolist() == [2 * part * max(0, wanted - lies) for wanted in (1, 2, 4)]


def test_outputs_that_lie_as_they_were_computed_take_nothing_and_whole_ones_are_gathered() -> None:
    found = planner(nn.Sequential(*layers()))
    before, after = costed(found, outputs="sharded")
    assert after is before
    _, whole = costed(found, outputs="whole")
    assert whole.variables[-1].degrees == (1,)
    fastest = found.plan(outputs="sharded").step_time
    assert found.plan(outputs="part").step_time >= fastest
    assert found.plan(outputs="whole").step_time > 1.2 * fastest


@pytest.mark.parametrize("force", ["dp", "column:4", "column:2"])
def test_the_program_counts_what_is_gathered(force: str) -> None:
    plan = planner(nn.Sequential(*layers()), batch=4096).plan(force={"*": force})
    assert plan.program_time == pytest.approx(plan.step_time, rel=0.2)


class Residual(nn.Module):
    """Layers that are folded: what is returned follows the last one's sum."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


def test_outputs_of_equal_layers_belong_to_the_last_of_them_and_a_plan_is_a_start_for_another() -> None:
    found = planner(Residual(6))
    plan = found.plan()
    assert len(plan.choices) == 6 and plan.step_time <= 1.02 * found.plan(force={"*": "dp"}).step_time
    assert plan.resolve(max_prefetch=1).step_time >= plan.step_time * (1 - 1e-9)


def test_a_batch_of_one_is_returned_whole() -> None:
    _, after = costed(planner(nn.Sequential(*layers()), batch=1))
    assert after.variables[-1].degrees == (4,)
