"""What plans promise: within the memory limit, never faster with less memory, proven, the same every time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Device, Level, simulate
from shardweave.demo.model import GPT, GPTConfig
from shardweave.passes import partition
from shardweave.planner.problem import build_problem
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.space import Space
from shardweave.planner.search import evaluation
from shardweave.report.progress import Event
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import ALL_CASES
from tests.models import ZOO
from tests.passes.harness import examples
from tests.passes.joint import joint
from tests.planner.planners import WIDE, Planner, kinds, smallest_named


def wide_mlp() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        layers = (nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 4096))
        return nn.Sequential(*layers), torch.zeros(8192, 1024)


SETTINGS = {
    "gpt-local": lambda: (ZOO["gpt"].model(), ZOO["gpt"].batch(0), sw.Cluster.local(4)),
    "mlp-local": lambda: (ZOO["mlp"].model(), ZOO["mlp"].batch(0), sw.Cluster.local(8)),
    "llama-perlmutter": lambda: (ZOO["llama"].model(), ZOO["llama"].batch(0), sw.Cluster.preset("perlmutter", nodes=1)),
    "wide-gpt-dgx": lambda: (*WIDE.build(), sw.Cluster.preset("dgx-a100", nodes=1)),
    "wide-mlp-dgx": lambda: (*wide_mlp(), sw.Cluster.preset("dgx-a100", nodes=2)),
    "wide-mlp-pcie": lambda: (*wide_mlp(), sw.Cluster.preset("rtx3090-pcie")),
}


@cache
def planner(name: str) -> Planner:
    model, inputs, cluster = SETTINGS[name]()
    return Planner(model, cluster, inputs, **{"micro_batches": 1, **OPTIONS.get(name, {})})


OPTIONS: dict[str, dict[str, Any]] = {"wide-gpt-dgx": {"recompute": "none"}, "mlp-local": {"micro_batches": None}}
"""With recomputation some hundred plans lie about the GPT's smallest memory, all of which are simulated to tell it. Of
how many micro-batches is tested by `test_splits`, and here where it takes no time."""


def test_equal_convolutions_of_other_places_are_priced_apart() -> None:
    """A layer's layouts have the sizes of its own image."""
    first, second, third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
    layers = nn.Sequential(first, second, nn.AvgPool2d(2), third)
    found = Planner(layers, sw.Cluster.local(4), torch.zeros(8, 8, 16, 16)).plan()
    assert found.status == "optimal"


def falling(planner: Planner, factor: float) -> tuple[list[sw.Plan], sw.InfeasibleError]:
    """Plans under limits that fall by `factor` of the loosest plan's memory, until none fits."""
    plans = [planner.plan()]
    limit = plans[0].peak_memory
    while True:
        try:
            plans.append(planner.plan(memory_limit=limit))
        except sw.InfeasibleError as error:
            return plans, error
        limit = int(limit * factor)


def assert_sound(plan: sw.Plan) -> None:
    """Within the limit, covering the simulated memory, and no better than it says."""
    assert plan.timeline().peak_memory == plan.peak_memory <= plan.memory_limit
    assert plan.bound <= plan.program_time * (1 + 1e-9)
    assert plan.gap == pytest.approx((plan.program_time - plan.bound) / plan.program_time, abs=1e-9)
    assert 0 <= plan.proven_gap <= plan.gap
    assert (plan.status == "optimal") == (plan.gap <= 1e-9)


def assert_nothing_betters_what_is_proven(plans: list[sw.Plan]) -> None:
    """Of plans under less and less memory: what was proven with more holds with less."""
    proven = 0.0
    for plan in plans:
        assert plan.program_time >= proven * (1 - 1e-9)
        proven = max(proven, plan.bound)
    times = [plan.program_time for plan in plans if plan.status == "optimal"]
    assert times == sorted(times)


FACTORS = {"wide-gpt-dgx": 0.94, **dict.fromkeys(("gpt-local", "llama-perlmutter"), 0.9 if ALL_CASES else 0.8)}
"""By which limits fall, where not by 0.9."""


@cache
def fallen(name: str) -> tuple[list[sw.Plan], sw.InfeasibleError]:
    return falling(planner(name), FACTORS.get(name, 0.9))


@cache
def smallest(name: str) -> tuple[int, sw.Plan]:
    """The smallest memory that the error names, and the plan for it."""
    num_bytes = smallest_named(fallen(name)[1])
    return num_bytes, planner(name).plan(memory_limit=num_bytes)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_less_memory_never_makes_a_plan_faster(name: str) -> None:
    plans, _ = fallen(name)
    for plan in plans:
        assert_sound(plan)
    assert_nothing_betters_what_is_proven(plans)
    assert plans[1].step_time <= plans[0].step_time * (1 + 1e-9)  # no limit, and one that it just meets


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_smallest_memory_that_an_error_names_does_and_less_does_not(name: str) -> None:
    num_bytes, plan = smallest(name)
    assert_sound(plan)
    assert "Raise memory_limit" in str(fallen(name)[1])
    for less in (num_bytes - 1, 1):  # from however far below
        with pytest.raises(sw.InfeasibleError) as caught:
            planner(name).plan(memory_limit=less)
        assert smallest_named(caught.value) == num_bytes


@pytest.mark.parametrize("name", ["wide-gpt-dgx", "wide-mlp-dgx"])
def test_the_bound_of_the_smallest_plan_is_not_that_of_all_the_memory(name: str) -> None:
    """Though the program counts it as more than the limit."""
    assert smallest(name)[1].bound > fallen(name)[0][0].bound


def test_as_memory_falls_data_parallelism_gives_way_to_sharded_and_tensor_parallel_forms() -> None:
    names = "wide-gpt-dgx", "wide-mlp-dgx", "wide-mlp-pcie"
    seen = {name: [kinds(plan) for plan in fallen(name)[0]] for name in names}
    for name in ("wide-gpt-dgx", "wide-mlp-dgx"):
        assert seen[name][0] == {"data"}, seen[name]
        # of a GPT's layers: its tables and its head are small, and whole they fit (0.03 % faster)
        choices = fallen(name)[0][-1].choices
        last = [choice.strategy for op, choice in choices.items() if op not in ("tokens", "positions", "head")]
        assert "data" not in seen[name][-1] or all(each.degree > 1 or each.states > 1 for each in last), last
    # A head is used as soon as it is gathered: ZeRO-2 of it, once the states are sharded, holds as much as ZeRO-3.
    # Before DDP, ZeRO-2 and ZeRO-3 were simulated, too, tensor parallelism was between the two, and 2 to 3 % slower.
    assert seen["wide-gpt-dgx"][-1] - {"data"} == {"sharded"}, seen["wide-gpt-dgx"]
    # Memories of their own: which ones the fall comes by depends on what its first plan holds
    assert kinds(planner("wide-mlp-dgx").plan(memory_limit=134_934_381)) == {"data", "tensor"}
    # With sums scattered at biases, what fits into the smaller memory is 0.25 % faster than that
    whole = planner("wide-mlp-dgx").plan(memory_limit=150_000_000, sequence_parallel=False)
    assert kinds(whole) == {"tensor"}
    assert planner("wide-mlp-dgx").plan(memory_limit=150_000_000).step_time <= whole.step_time
    # ZeRO-2 of all is the fastest of the mixtures with DP and ZeRO-3 (by 0.1 to 26 %) and, simulated, the smallest
    last = planner("wide-mlp-pcie").plan(memory_limit=smallest_named(fallen("wide-mlp-pcie")[1]))
    assert kinds(last) == seen["wide-mlp-pcie"][-1] == {"data"}, seen["wide-mlp-pcie"]
    assert {choice.strategy.states for choice in last.choices.values()} == {4}


def test_a_mask_that_biases_are_added_to_is_cut_with_the_batch() -> None:
    """T5's biases have no batch, the mask has: each device has a part of the sum, if that is not partial."""
    annotated, cluster = joint("t5").annotated, sw.Cluster.local(4)
    builder = ProblemBuilder(Space(annotated, cluster, sw.Options(memory_limit=10**12)))
    built = builder.build()
    biases = [variable for variable in built.variables if "relative_attention_bias" in variable.name]
    values = [node.meta["val"] for node in annotated.captured.graph.graph.nodes if "val" in node.meta]
    batch = annotated.batch
    scores = max(v.numel() * v.element_size() for v in values if getattr(v, "ndim", 0) == 4 and v.shape[0] == batch)
    assert len(biases) == 2
    for variable in biases:
        whole = {port for port, strategy in zip(variable.port_of, variable.strategies) if strategy.grid.y == 1}
        assert len(whole) > 1 and max(variable.working[port] for port in whole) <= builder.facts.held(scores) / 4


def test_an_infeasible_limit_names_what_takes_the_memory() -> None:
    told = r"saved .* [KMG]iB.*Raise memory_limit, or use more devices"
    with pytest.raises(sw.InfeasibleError, match=told):
        planner("wide-gpt-dgx").plan(memory_limit=1)


figure = st.floats(0.1, 10.0)


@st.composite
def clusters(draw: st.DrawFn) -> sw.Cluster:
    """Machines of 4 to 12 devices, of all proportions of compute, memory and links."""
    levels = [Level("gpu", draw(st.sampled_from([2, 4])), 1e9 * draw(figure), 1e-6 * draw(figure))]
    if draw(st.booleans()):
        levels.append(Level("node", draw(st.sampled_from([2, 3])), 1e8 * draw(figure), 1e-5 * draw(figure)))
    device = Device(
        "any",
        {"float32": 10 ** draw(st.floats(6, 12))},
        memory=2**30,
        memory_bandwidth=10 ** draw(st.floats(7, 12)),
        launch_latency=1e-6 * draw(st.floats(0, 10)),
        collective_latency=1e-6 * draw(st.floats(0, 10)),
    )
    return sw.Cluster("any", tuple(levels), device)


@examples(7)
@given(clusters(), st.floats(0.7, 0.9))
def test_the_laws_of_memory_hold_on_any_machine(cluster: sw.Cluster, factor: float) -> None:
    other = small_mlp().on(cluster)
    plans, error = falling(other, factor)
    for plan in plans:
        assert_sound(plan)
    assert_nothing_betters_what_is_proven(plans)
    assert_sound(other.plan(memory_limit=smallest_named(error)))


def test_less_memory_never_betters_what_is_proven() -> None:
    """Found by the test above: a plan that is repaired after simulation was beaten by 0.1 % with less memory."""
    device = Device(
        "any", {"float32": 1e6}, memory=2**30, memory_bandwidth=62981847.34111548, launch_latency=0.0,
        collective_latency=1.9793807669718013e-06,
    )  # fmt: skip
    levels = (Level("gpu", 4, 993606497.5087544, 3.5122861999103832e-06),)
    plans, _ = falling(small_mlp().on(sw.Cluster("any", levels, device)), 0.9647206999747739)
    assert_nothing_betters_what_is_proven(plans)
    for before, after in pairwise(plans):  # by the simulator, which has the last word
        assert before.step_time <= after.step_time * (1 + 5e-4)


@cache
def small_mlp() -> Planner:
    """Sizes that 2, 3 and 4 divide, in part."""
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6), nn.Tanh(), nn.Linear(6, 10))
    return Planner(model, sw.Cluster.local(4), torch.zeros(48, 12))


def figures(plan: sw.Plan) -> dict[str, Any]:
    """All of a plan but how long it took to make."""
    data = plan.to_dict()
    del data["planning_seconds"]
    return data


def plan_of_zoo(name: str, meta: bool = False) -> dict[str, Any]:
    case = ZOO[name]
    if meta:
        with torch.device("meta"):
            model = case.build()
        inputs = {key: value.to("meta") for key, value in case.batch(0).items()}
    else:
        model, inputs = case.model(), case.batch(0)
    return figures(sw.plan(model, sw.Cluster.local(4), inputs))


@pytest.mark.parametrize("name", ["gpt-tied", "llama"])
def test_the_same_plan_every_time_in_every_process_and_from_the_meta_device(name: str, pool: WorkerPool) -> None:
    expected = plan_of_zoo(name)
    assert plan_of_zoo(name) == expected
    (elsewhere,) = pool.run(plan_of_zoo, name, True, nprocs=1)  # a process with other hashes
    assert elsewhere == expected


def test_equal_layers_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(op: Any, *args: Any) -> Any:
        calls.append(op.name)
        return price(op, *args)

    price = build_problem.price_op
    monkeypatch.setattr(build_problem, "price_op", counted)

    def priced(layers: int) -> list[str]:
        calls.clear()
        tokens = torch.zeros(8, 16, dtype=torch.long)
        model = GPT(GPTConfig(vocabulary=64, context=16, layers=layers, heads=4, width=32))
        sw.plan(model, sw.Cluster.local(4), (tokens, tokens))
        return list(calls)

    assert priced(2) == priced(5)


def test_what_was_planned_is_not_sharded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    class Counted(partition.Sharder):
        def run(self) -> Any:
            runs.append("run")
            return super().run()

    monkeypatch.setattr(partition, "Sharder", Counted)
    compiler = Compiler(ZOO["mlp"].model(), sw.Cluster.local(4), ZOO["mlp"].batch(0), None, None)
    plans = []
    for word in ("dp", "zdp"):
        compiler.options = sw.Options(force={"*": word})
        plans.append(compiler.plan())
        runs.clear()
        assert "reduce" in compiler.lower(plans[-1]).step.backward.code and not runs
    compiler.options = sw.Options()
    first, second = (compiler.lower(plan).step.backward.code for plan in plans)
    assert len(runs) == 2 and first != second  # other options may shard otherwise


def test_what_was_simulated_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For another plan of the same step; on another cluster it is."""
    runs: list[sw.Cluster] = []

    def counted(*args: Any, **options: Any) -> sw.Timeline:
        runs.append(args[3])
        return simulate(*args, **options)

    monkeypatch.setattr(evaluation, "simulate", counted)
    planner, other = Planner(ZOO["mlp"].model(), sw.Cluster.local(4), ZOO["mlp"].batch(0)), sw.Cluster.local(2)
    first, count = planner.plan(), len(runs)
    assert figures(planner.plan()) == figures(first) and len(runs) == count > 0
    assert figures(planner.on(other).plan()) != figures(first)
    assert runs[count:] and all(cluster is other for cluster in runs[count:])


def test_equal_layers_get_equal_plans() -> None:
    choices = planner("wide-gpt-dgx").plan().choices
    for op in ("attention.qkv", "attention.out", "up", "down"):
        assert choices[f"blocks.0.{op}"].strategy == choices[f"blocks.1.{op}"].strategy


def test_a_saved_plan_is_the_plan(tmp_path: Path) -> None:
    plan = planner("mlp-local").plan()
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert figures(loaded) == figures(plan)
    model, inputs, cluster = SETTINGS["mlp-local"]()
    assert Planner(model, cluster, inputs).lowered(loaded).spec == planner("mlp-local").lowered(plan).spec


def test_what_a_plan_says_adds_up() -> None:
    plan = planner("wide-gpt-dgx").plan()
    assert plan.tokens == WIDE.batch * WIDE.config.context
    assert plan.tokens_per_second == pytest.approx(plan.tokens / plan.step_time)
    width, layers = WIDE.config.width, WIDE.config.layers
    parameters = layers * 12 * width**2 + WIDE.config.vocabulary * width  # of the matrices that tokens meet
    attention = 2 * 2 * layers * WIDE.config.context * width  # per token: two products a layer, over all positions
    assert plan.model_flops == pytest.approx(3 * plan.tokens * (2 * parameters + attention), rel=0.25)
    assert 0 < plan.mfu < 1
    timeline = plan.timeline()
    assert plan.compute_time + plan.exposed_communication == pytest.approx(timeline.step_time)
    assert timeline.step_time == pytest.approx(plan.step_time, rel=1e-9)
    assert timeline.step_time == pytest.approx(plan.program_time, rel=0.5)  # which knows no overlap
    assert sum(choice.seconds for choice in plan.choices.values()) <= plan.program_time * (1 + 1e-9)


def test_progress_names_the_stages() -> None:
    events: list[Event] = []
    sw.plan(ZOO["mlp"].model(), sw.Cluster.local(2), ZOO["mlp"].batch(0), progress=events.append)
    assert [event.stage for event in events][:4] == ["capture", "annotate", "price", "solve"]
