"""Gathers in the pauses of activations' collectives, and reductions beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.options import Options
from shardweave.ir import Axis, Collective
from shardweave.passes import schedule
from shardweave.passes.candidate_orders import Edge, candidate_keys, delayed_gathers, gather_groups_of, transfer_cause
from shardweave.passes.list_scheduler import CollectiveStart, TaskGraph, list_schedule
from shardweave.passes.schedule import GATHER_DEPTHS, Schedule
from tests.passes.bounds import exposed_at_least, seconds_at_least
from tests.passes.harness import examples
from tests.passes.test_list_scheduler import forced, random_tasks, step_of, tasks_of, unordered, without_slowdown


class Task(NamedTuple):
    """What is computed, or what a collective moves: its cause, and the links that it takes."""

    seconds: float
    needs: tuple[int, ...] = ()
    cause: str = ""
    links: str = ""


def chain(tasks: Sequence[Task]) -> TaskGraph:
    """Tasks of which each collective's wait is the one behind its start."""
    needs: list[list[int]] = []
    place: list[int] = []  # of what others need of a task
    transfers: list[CollectiveStart | None] = []
    started: list[int] = []
    for task in tasks:
        moved = None
        if task.cause:
            demand = Demand(0.0, task.seconds, dict.fromkeys(task.links.split(), 1.0))
            what = Collective("all_gather", (Axis(task.cause, 2),), 8, "", "", task.cause)
            moved = CollectiveStart(f"{task.cause} {task.links}", demand, what)
        needs.append([place[need] for need in task.needs])
        transfers.append(moved)
        started.append(-1)
        if moved is not None:
            needs.append([len(needs) - 1])
            transfers.append(None)
            started.append(len(needs) - 2)
        place.append(len(needs) - 1)
    count = len(needs)
    seconds = [0.0] * count
    for task, at in zip(tasks, place):
        seconds[at] = 0.0 if task.cause else task.seconds
    return tasks_of(needs, seconds, transfers, started)


def layers(gather: str, activation: float, reduces: str = "") -> TaskGraph:
    """Six of them: 2 s of compute with what is gathered in 2 s and an activation's collective over "a" of the last.

    Where a layer reduces a gradient, that takes 2 s too.
    """
    tasks: list[Task] = []
    before: tuple[int, ...] = ()
    for _ in range(6):
        tasks += [Task(2, (), "parameter", gather), Task(activation, before, "activation", "a")]
        tasks.append(Task(2, (len(tasks) - 2, len(tasks) - 1)))
        before = (len(tasks) - 1,)
        tasks += [Task(2, before, "gradient", reduces)] if reduces else []
    return chain(tasks)


def held(tasks: TaskGraph) -> list[list[Edge]]:
    """As the first order holds them."""
    keys = next(iter(candidate_keys(tasks)))
    return delayed_gathers(tasks, keys, gather_groups_of(tasks, keys), max(GATHER_DEPTHS))


def seconds_of(tasks: TaskGraph) -> float:
    return Schedule(without_slowdown("dgx-a100", 1)).best(tasks).seconds


def test_gathers_move_between_activations() -> None:
    """Layers of 3 s of activations, then 2 s of compute with a weight that takes 2 s of the same links."""
    found = layers("a", 3)
    (edges,) = held(found)
    causes = [transfer_cause(found, task) for task in range(len(found.nodes))]
    gathers, activations = ([t for t, cause in enumerate(causes) if cause == c] for c in ("parameter", "activation"))
    assert sorted(edges) == [(start + 1, gather) for start, gather in zip(activations, gathers[1:])]  # its wait
    assert seconds_of(found) <= 1.01 * seconds_at_least(found) == 1.01 * (2 + 6 * 5)


def test_a_model_exposes_less_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is tensor parallel, and what is sharded is gathered over the same links."""
    cluster = without_slowdown("rtx3090-nvlink", 8)
    step, force = step_of(6, 2048, 128), forced("attention", 4, cluster.mesh().world_size)
    forward, _ = unordered(cluster, step, force, Options(precision="fp16"))
    exposed, computed, bound = [], sum(forward.seconds), exposed_at_least(forward)
    for orders in (delayed_gathers, lambda *_: []):
        monkeypatch.setattr(schedule, "delayed_gathers", orders)
        exposed.append(Schedule(cluster).best(forward).seconds - computed)
    assert bound <= exposed[0] <= 1.15 * bound < 1.2 * bound < exposed[1]


def test_reductions_run_beside_activations_that_leave_their_links_alone() -> None:
    """They cross "b", as the gathers do that need "a" as well; the activations cross "a"."""
    found = layers("a b", 2, reduces="b")
    _, beside = held(found)
    assert len(beside) == 5  # behind the last one nothing is left to be kept waiting
    assert all(
        (transfer_cause(found, one), transfer_cause(found, two)) == ("activation", "gradient") for one, two in beside
    )
    assert all(found.needs[one] == found.needs[two] for one, two in beside)  # the next one of the same compute
    assert seconds_of(found) <= 1.01 * seconds_at_least(found)


def test_where_no_links_are_shared_nothing_is_held() -> None:
    tasks = [
        Task(2, (), "parameter", "a"),
        Task(3, (), "activation", "b"),
        Task(2, (0, 1)),
        Task(2, (2,), "gradient", "c"),
    ]
    assert held(chain(tasks)) == []


@examples(200, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_what_is_held_can_run(seed: int) -> None:
    """Each task once, behind what it needs and what it is held for."""
    tasks = random_tasks(seed)
    keys = [(task,) for task in range(len(tasks.nodes))]
    for edges in delayed_gathers(tasks, keys, gather_groups_of(tasks, keys), 2):
        woven = list_schedule(tasks.after(edges), keys, max_prefetch=1, reductions=1)
        at = {task: index for index, task in enumerate(woven.order)}
        assert len(at) == len(woven.order) == len(tasks.nodes)
        assert all(at[before] < at[start] for before, start in edges)
        assert all(at[need] < at[task] for task, needs in enumerate(tasks.needs) for need in needs)
