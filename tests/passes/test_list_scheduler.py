"""The list scheduler against the best order that there is, and against what none can beat.

On layers and on random tasks CP-SAT proves the best order; for whole models there are the bounds of `bounds`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model
from torch import fx

from shardweave.compiler.capture import capture
from shardweave.cost_model import Cluster
from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.node_cost import NodeCosts
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir import META, UNLIMITED, Axis, Collective, Grid, NodeInfo, RecomputeMode, Strategy
from shardweave.passes.candidate_orders import WAIT, bidirectional_schedules, gather_ahead_edges, gather_groups_of
from shardweave.passes.list_scheduler import CollectiveStart, LeftOut, TaskGraph, list_schedule, simulate_order
from shardweave.passes.pipeline import lower
from shardweave.passes.schedule import Schedule
from shardweave.passes.step_boundary import Annotated, annotate
from shardweave.planner.problem.space import forced_strategies
from shardweave.sharding.graphs import info
from tests.compiler.test_overlap import megatron
from tests.passes.bounds import exposed_at_least, seconds_at_least
from tests.passes.harness import examples
from tests.passes.joint import joint

TICKS = 1e7
"""A second's, for CP-SAT."""


def best_seconds(tasks: TaskGraph, time_limit: float = 60.0, enough: float = math.inf) -> tuple[float, bool]:
    """The least that any order takes, or as low as it is known to be; one collective of a group at a time.

    It is `enough` to know that none takes less than that.
    """
    model = cp_model.CpModel()
    ticks = [round((t.demand.seconds if t else s) * TICKS) for t, s in zip(tasks.transfers, tasks.seconds)]
    horizon = sum(ticks)
    begins = [model.new_int_var(0, horizon, f"b{task}") for task in range(len(ticks))]
    end = model.new_int_var(0, horizon, "end")
    machines: dict[str, list[cp_model.IntervalVar]] = {}
    for task, (begin, length) in enumerate(zip(begins, ticks)):
        for need in tasks.needs[task]:
            model.add(begin >= begins[need] + ticks[need])
        model.add(end >= begin + length)
        transfers = tasks.transfers[task]
        if length:
            machine = "compute" if transfers is None else transfers.group
            machines.setdefault(machine, []).append(model.new_fixed_size_interval_var(begin, length, f"i{task}"))
    for intervals in machines.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = 2
    solver.best_bound_callback = lambda bound: solver.stop_search() if bound >= enough * TICKS else None
    status = solver.solve(model)
    return solver.best_objective_bound / TICKS, status == cp_model.OPTIMAL


def rounding(tasks: TaskGraph) -> float:
    """How far what takes whole ticks may be from the truth, in seconds."""
    return len(tasks.nodes) / 2 / TICKS


def random_tasks(seed: int) -> TaskGraph:
    """Chains of compute with collectives of two groups between them, and leaves beside them."""
    rng = random.Random(seed)
    count = rng.randint(6, 14)
    needs: list[list[int]] = []
    seconds: list[float] = []
    transfers: list[CollectiveStart | None] = []
    started: list[int] = []
    while len(needs) < count:
        pick = [task for task in range(len(needs)) if transfers[task] is None]
        needs.append(sorted(rng.sample(pick, min(len(pick), rng.randint(0, 2)))))
        seconds.append(rng.choice([0.0, 0.001, 0.002, 0.004]))
        transfers.append(None)
        started.append(-1)
        if rng.random() < 0.4:
            group = rng.choice(["a", "b"])
            demand = Demand(0.0, rng.choice([0.001, 0.003]), {group: 1.0})
            cause = rng.choice(["activation", "gradient", "parameter"])
            what = Collective("all_reduce", (Axis(group, 2),), 8, "", "", cause)
            needs += [[len(needs) - 1], [len(needs)]]
            seconds += [0.0, 0.0]
            transfers += [CollectiveStart(group, demand, what), None]
            started += [-1, len(needs) - 2]
    return tasks_of(needs, seconds, transfers, started)


def tasks_of(
    needs: Sequence[Sequence[int]],
    seconds: Sequence[float],
    transfers: Sequence[CollectiveStart | None],
    started: Sequence[int],
) -> TaskGraph:
    """Tasks that hold no memory, of nodes that only tell waits from the others."""
    users: list[list[int]] = [[] for _ in needs]
    for task, mine in enumerate(needs):
        for need in mine:
            users[need].append(task)
    graph, none, zero = fx.Graph(), [list[int]() for _ in needs], [0] * len(needs)
    nodes = [graph.call_function(WAIT if start >= 0 else torch.neg) for start in started]
    return TaskGraph(nodes, needs, users, seconds, transfers, started, none, none, zero, zero, (), ())


@examples(40, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_an_order_is_one(seed: int) -> None:
    """Each task once, behind what it needs; it takes no less than the best, and no more than all one after another."""
    tasks = random_tasks(seed)
    woven = list_schedule(tasks, [(task,) for task in range(len(tasks.nodes))], max_prefetch=1, reductions=1)
    assert sorted(woven.order) == list(range(len(tasks.nodes)))
    at = {task: index for index, task in enumerate(woven.order)}
    assert all(at[need] < at[task] for task, needs in enumerate(tasks.needs) for need in needs)
    bound, proven = best_seconds(tasks)
    assert not proven or seconds_at_least(tasks) <= bound + 1e-6
    whole = sum(tasks.seconds) + sum(t.demand.seconds for t in tasks.transfers if t is not None)
    assert bound - 1e-6 <= woven.seconds <= whole + 1e-9


def holding(tasks: TaskGraph) -> TaskGraph:
    """The tasks, each with a result of one byte."""
    count = len(tasks.nodes)
    lives = [[task, *needs] for task, needs in enumerate(tasks.needs)]
    kept = [not users for users in tasks.users]
    return replace(tasks, born=[[task] for task in range(count)], lives=lives, sizes=[1] * count, kept=kept)


@examples(40, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_limits_that_an_order_is_for_make_the_same_one(seed: int) -> None:
    tasks = holding(random_tasks(seed))
    keys = [(task,) for task in range(len(tasks.nodes))]
    limits = [(math.inf, math.inf), *((a, b) for a in range(0, 12, 2) for b in range(1, 12, 2))]
    made = {
        (compute, communication): list_schedule(
            tasks,
            keys,
            gather_groups_of(tasks, keys),
            max_prefetch=1,
            reductions=2,
            compute_limit=compute,
            communication_limit=communication,
        )
        for compute, communication in limits
    }
    for limit, found in made.items():
        assert found.is_for(*limit)
        assert all(other == found for others, other in made.items() if found.is_for(*others))


@examples(40, shrink=False)
@given(seed=st.integers(0, 10**6), ahead=st.booleans())
def test_less_room_holds_less(seed: int, ahead: bool) -> None:
    """What grows memory waits for its turn where there is no room; with all the room that it takes, it does not."""
    tasks = holding(random_tasks(seed))
    count = len(tasks.nodes)
    keys = [(task,) for task in range(count)]
    free = list_schedule(tasks, keys, max_prefetch=1, reductions=1)
    if ahead:
        same = list_schedule(tasks, keys, max_prefetch=1, reductions=1, compute_limit=free.peak_bytes)
        assert same.order == free.order
    else:
        least = list_schedule(tasks, keys, max_prefetch=1, reductions=1, compute_limit=0)
        assert sorted(least.order) == list(range(count)) and least.peak_bytes <= free.peak_bytes


@pytest.mark.parametrize("most", [3, 5, 100])
def test_gradients_are_waited_for_where_no_more_may_be_held(most: int) -> None:
    """Links that are slower than compute leave more and more gradients on their way: as many as there is room for."""
    count, needs, started = 12, list[list[int]](), list[int]()
    seconds, transfers = list[float](), list[CollectiveStart | None]()
    what = Collective("reduce_scatter", (Axis("a", 2),), 8, "", "", "gradient")
    for index in range(count):
        needs += [[3 * index - 3] if index else [], [3 * index], [3 * index + 1]]
        seconds += [0.001, 0.0, 0.0]
        transfers += [None, CollectiveStart("a", Demand(0.0, 0.002, {"a": 1.0}), what), None]
        started += [-1, -1, 3 * index + 1]
    born = [[task // 3] if task % 3 == 0 else [] for task in range(3 * count)]
    lives = [[task // 3] for task in range(3 * count)]
    tasks = tasks_of(needs, seconds, transfers, started)
    tasks = replace(tasks, born=born, lives=lives, sizes=[1] * count, kept=[False] * count)
    woven = list_schedule(
        tasks, [(task,) for task in range(3 * count)], max_prefetch=1, reductions=UNLIMITED, communication_limit=most
    )
    assert sorted(woven.order) == list(range(3 * count))
    free = list_schedule(tasks, [(task,) for task in range(3 * count)], max_prefetch=1, reductions=UNLIMITED)
    assert woven.peak_bytes == min(most, free.peak_bytes) and free.peak_bytes > 5
    assert woven.seconds == pytest.approx(0.001 + 0.002 * count)  # the links are never idle


def parts_of(graph: fx.Graph, cluster: Cluster) -> Iterator[TaskGraph]:
    """The forward and the backward."""
    for backward in (False, True):
        nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and info(n).backward == backward]
        yield TaskGraph.of(graph, nodes, NodeCosts(cluster))


@examples(40, shrink=False)
@given(seed=st.integers(0, 10**6), part=st.sampled_from([0.3, 0.6, 1.0]))
def test_no_order_beats_the_bound(seed: int, part: float) -> None:
    """Two groups that each take a part of the same links, together no more than these have or more."""
    tasks = random_tasks(seed)
    shared = [t and replace(t, demand=replace(t.demand, use={"links": part})) for t in tasks.transfers]
    tasks = replace(tasks, transfers=shared)
    woven = list_schedule(tasks, [(task,) for task in range(len(tasks.nodes))], max_prefetch=1, reductions=1)
    assert seconds_at_least(tasks) <= woven.seconds + 1e-9


def without_slowdown(preset: str, nodes: int) -> Cluster:
    """A cluster on which overlapped compute is not slowed down, which CP-SAT and the bounds do not know."""
    cluster = Cluster.preset(preset, nodes=nodes)
    return replace(cluster, device=replace(cluster.device, overlap_slowdown=1.0))


def unordered(cluster: Cluster, step: Annotated, force: dict[str, Any], options: Options) -> list[TaskGraph]:
    """The forward and the backward of a step under forced strategies, as they come to the schedule."""
    mesh = cluster.mesh()
    found = forced_strategies(force, step.ops, mesh, step.batch)
    graphs = lower(step, {op.name: found[op.name][0] for op in step.ops}, mesh, options, cluster=cluster).graphs
    last = "unroll_sub_batches" if options.overlap.sub_batches > 1 else "recompute"
    return list(parts_of(graphs[last].graph, cluster))


@pytest.mark.parametrize("preset", ["rtx3090-nvlink", "rtx3090-pcie"])
@pytest.mark.parametrize(("sub_batches", "recompute"), [(1, "none"), (2, "none"), (1, "fine")])
def test_a_layer_is_within_five_percent_of_the_best_order(
    preset: str, sub_batches: int, recompute: RecomputeMode
) -> None:
    cluster, options = without_slowdown(preset, 1), Options(sub_batches=sub_batches, recompute=recompute)
    force = megatron("gpt", cluster.mesh().world_size)
    check_within_five_percent(cluster, unordered(cluster, joint("gpt").annotated, force, options))


def check_within_five_percent(cluster: Cluster, parts: Sequence[TaskGraph]) -> None:
    for tasks in parts:
        found = Schedule(cluster).best(tasks).seconds
        best, _ = best_seconds(tasks, enough=found / 1.05)  # or what CP-SAT has proven when it runs out of time
        assert best > 0
        assert best - rounding(tasks) <= found <= 1.05 * best


@pytest.mark.parametrize(
    ("preset", "nodes", "plan", "sub_batches", "recompute"),
    [
        ("rtx3090-nvlink", 1, "tensor", 1, "full"),
        ("rtx3090-pcie", 2, "tensor and zdp", 1, "none"),
        ("rtx3090-pcie", 2, "tensor and zdp", 1, "full"),
        ("dgx-a100", 1, "tensor", 2, "none"),
    ],
)
def test_a_wide_layer_is_within_five_percent_of_the_best_order(
    preset: str, nodes: int, plan: str, sub_batches: int, recompute: RecomputeMode
) -> None:
    """A layer as wide as those that are trained."""
    cluster = without_slowdown(preset, nodes)
    options = Options(precision="fp16", sub_batches=sub_batches, recompute=recompute)
    force = forced(plan, 4, cluster.mesh().world_size)
    check_within_five_percent(cluster, unordered(cluster, step_of(1, 2048, 32), force, options))


@examples(40, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_orders_from_both_ends_take_what_they_say(seed: int) -> None:
    """Where no two groups share a link, and nothing is started while something else is computed."""
    tasks = random_tasks(seed)
    found = bidirectional_schedules(tasks)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    for each in found:
        at = {task: index for index, task in enumerate(each.order)}
        assert sorted(each.order) == list(range(len(tasks.nodes)))
        assert all(at[need] < at[task] for task, needs in enumerate(tasks.needs) for need in needs)
        woven = simulate_order(tasks, each.order)
        assert sorted(woven.order) == sorted(each.order) and woven.seconds >= seconds_at_least(tasks) - 1e-9
    assert simulate_order(tasks, found[0].order).seconds <= 1.5 * found[0].seconds


@cache
def step_of(layers: int, width: int, batch: int) -> Annotated:
    """The step of a GPT that is as large as those that are trained, on no device."""
    with torch.device("meta"):
        model = GPT(GPTConfig(50304, 1024, layers, width // 64, width))
        tokens = torch.zeros(batch, 1024, dtype=torch.long)
    options = Options(precision="fp16")
    return annotate(capture(model, (tokens, tokens), precision=options.mixed_precision), options)


def forced(plan: str, degree: int, devices: int) -> dict[str, Any]:
    """Sharded data parallelism; or Megatron's, its weights resting whole or sharded over the data axes.

    "attention": each for its part of a layer.
    """
    if plan == "zdp":
        return {"*": "zdp"}
    data = devices // degree
    rest = data if plan == "tensor and zdp" else 1
    columns, rows = (Strategy(grid, rest=rest) for grid in (Grid(x=degree, data=data), Grid(y=degree, data=data)))
    if plan == "attention":
        return {"*": "zdp", "*.qkv": columns, "*.out": rows}
    return {"*": rows, "*.qkv": columns, "*.up": columns, "head": columns}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gathers_in_two_stages_are_held_back_by_what_computes_with_them(recompute: RecomputeMode) -> None:
    # By the second stage they were, which may be written far ahead of that: then each waited for the other
    cluster, options = without_slowdown("rtx3090-pcie", 2), Options(precision="fp16", recompute=recompute)
    for tasks in unordered(cluster, step_of(4, 256, 32), {"*": "hpz"}, options):
        groups = gather_groups_of(tasks, [(task,) for task in range(len(tasks.nodes))])
        assert all(tasks.seconds[use] > 0 for group in groups for use in group.uses)
        for each in bidirectional_schedules(tasks.after(gather_ahead_edges(tasks, 1))):
            assert sorted(each.order) == list(range(len(tasks.nodes)))


class Model(NamedTuple):
    """A GPT on a cluster of 8 nodes, under a plan of `forced`."""

    preset: str
    plan: str
    layers: int
    width: int
    sub_batches: int
    recompute: RecomputeMode

    def unordered(self) -> tuple[Cluster, list[TaskGraph]]:
        """The cluster, and the parts of the step as they come to the schedule."""
        cluster = without_slowdown(self.preset, 8)
        batch, degree = (128, 4) if self.width == 2048 else (64, 8)
        force = forced(self.plan, degree, cluster.mesh().world_size)
        options = Options(precision="fp16", sub_batches=self.sub_batches, recompute=self.recompute)
        return cluster, unordered(cluster, step_of(self.layers, self.width, batch), force, options)


MODELS = [
    Model("rtx3090-nvlink", "tensor", 12, 2048, 2, "fine"),
    Model("rtx3090-nvlink", "zdp", 12, 2048, 2, "none"),
    Model("rtx3090-nvlink", "tensor and zdp", 12, 2048, 1, "fine"),
    Model("rtx3090-pcie", "tensor and zdp", 12, 2048, 2, "fine"),
    Model("rtx3090-nvlink", "tensor", 8, 8192, 2, "fine"),
    Model("rtx3090-nvlink", "attention", 12, 2048, 2, "none"),
]


def exposed_seconds(cluster: Cluster, parts: Sequence[TaskGraph]) -> float:
    """Of communication, in the orders that the schedule finds."""
    return sum(Schedule(cluster).best(tasks).seconds - sum(tasks.seconds) for tasks in parts)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model)))
def test_models_expose_what_they_must(model: Model) -> None:
    """No more than a tenth above what no order can hide."""
    cluster, parts = model.unordered()
    bound = sum(map(exposed_at_least, parts))
    assert 0 < bound * 0.999 <= exposed_seconds(cluster, parts) <= 1.1 * bound


def test_layers_that_are_left_out_run_before_the_first_kernel_that_reads_what_they_lead_to() -> None:
    """A gather of the layer behind them may be far ahead of its turn, and a recomputation as well."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.neg, (x,))
    gather = graph.call_function(torch.clone, (x,))
    view = graph.call_function(torch.detach, (first,))
    kernel = graph.call_function(torch.mul, (view, gather))
    nodes = [first, gather, view, kernel]
    for node, op in zip(nodes, ("blocks.1.up", "blocks.2.up", "blocks.2", "blocks.2.up"), strict=True):
        node.meta[META] = NodeInfo(op=op)
    left_out = LeftOut(3, frozenset({first}), ("blocks.1", "blocks.2"))
    needs, seconds = [[], [], [0], [2, 1]], [1.0, 1.0, 0.0, 1.0]
    assert left_out.before(nodes, needs, seconds) == 3
    assert left_out.count(first) == 3 and left_out.count(kernel) == 0
