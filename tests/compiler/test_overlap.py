"""OverlapConfig changes no number: sub-batches, recomputation, buckets and the schedule, in any combination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.demo.model import GPTConfig
from shardweave.ir.errors import InfeasibleError, LayoutError, ParallelError, PlanError
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.step_boundary import Annotated, annotate
from shardweave.planner.problem.space import forced_strategies
from shardweave.runtime.launch import WorkerPool
from shardweave.sharding.annotate import layer_of
from shardweave.sharding.graphs import info
from tests.compiler.test_equality import LINEAR
from tests.compiler.test_micro_batches import Norm
from tests.compiler.training import (
    ALL_CASES,
    Way,
    compile_ways,
    differences,
    model_of,
    only_with_all_cases,
    train,
    train_packed,
)
from tests.models import TODAY, ZOO, gpt
from tests.passes.harness import examples, mesh_of
from tests.passes.joint import joint

FLAT = sw.Ablation(flat_parameter=True)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS, ROWS = 3 if ALL_CASES else 2, 16


def megatron(name: str, degree: int = 4) -> dict[str, Any]:
    """Columns, then rows; all else data parallel."""
    columns, rows = LINEAR[name]
    return {"*": "dp"} | dict.fromkeys(columns, f"column:{degree}") | dict.fromkeys(rows, f"row:{degree}")


def ways(name: str, **options: Any) -> list[Way]:
    """Megatron's tensor parallelism, sharded data parallelism, and a mixture of tensor, data and 3D."""
    columns, rows = LINEAR[name]
    mixed = {"*": "zdp", columns[0]: (2, 1, 1, 2), rows[0]: (1, 2, 2, 1), rows[-1]: (2, 2, 1, 1)}
    forced = {"tensor": megatron(name), "zdp": {"*": "zdp"}, "mixed": mixed}
    return [Way(way, force, options=options) for way, force in forced.items()]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_training_equals_one_device(name: str, pool: WorkerPool) -> None:
    @examples(20 if ALL_CASES else 2, shrink=False)
    @given(
        sub_batches=st.sampled_from([2, 1, 4]),
        recompute=st.sampled_from(["fine", "full", "none"]),
        operator_slices=st.sampled_from([2, 1, 4]),
        keep_gathered=st.sampled_from([{"*": 1}, False, True]),
        buckets=st.sampled_from([False, True, "small"]),
        ablation=st.builds(
            sw.Ablation,
            flat_parameter=st.booleans(),
            cross_pass=st.booleans(),
            blocking=st.sampled_from([(), ("gather", "reduce"), ("activation", "broadcast", "scatter")]),
            all_reduce_gradients=st.booleans(),
            regather_in_recompute=st.booleans(),
        ),
    )
    def law(**options: Any) -> None:
        check(name, ways(name, **options), pool)

    law()


def check(
    name: str,
    chosen: Sequence[Way],
    pool: WorkerPool,
    dtype: torch.dtype = torch.float64,
    *tolerances: float,
    rows: int = ROWS,
) -> None:
    case = {**ZOO, **TODAY}[name]
    model, accumulates = model_of(case, dtype), chosen[0].accumulates
    steps = compile_ways(model, case, dtype, 4, chosen, size=rows)
    expected = train(model, case, dtype, MOMENTUM, None, None, STEPS, rows, accumulates)
    given = name, dtype, steps, MOMENTUM, STEPS, rows, accumulates
    first, *others = pool.run(train_packed, *given, nprocs=4, timeout=300)
    wrong: list[str] = []
    for index, way in enumerate(chosen):
        ranks = [first[index], *(other[index] for other in others)]
        wrong += differences(way, expected, ranks, *(tolerances or (1e-10, 1e-10)))
    assert not wrong, "\n".join(wrong)


def test_sub_batches_of_micro_batches_equal_one_device(pool: WorkerPool) -> None:
    options = {"sub_batches": 2, "recompute": "fine"}
    check("gpt", [Way("both", megatron("gpt"), micro_batches=2, options=options)], pool)


@pytest.mark.parametrize(("micro_batches", "accumulates"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_buckets_of_several_runs_equal_one_device(micro_batches: int, accumulates: int, pool: WorkerPool) -> None:
    """Every form of a step, with parameters gathered once and at each use, gradients reduced before and behind sums."""
    only_with_all_cases((micro_batches, accumulates) not in ((1, 1), (2, 2)))
    rests = {"*": "zero3", "head": "dp", "*.up": "zero2", "*.down": "mics:2", "*.qkv": "hpz:2", "*.out": "zero1"}
    chosen = [
        Way(f"{name}, {on}", force, micro_batches=micro_batches, accumulates=accumulates, options=on)
        for name, force in {"zero1": {"*": "zero1"}, "hsdp": {"*": "hsdp:2"}, "mixed": rests}.items()
        for on in ({"buckets": True}, {"buckets": "small"}, {"ablation": FLAT})
    ]
    woven = Way("woven", rests, micro_batches=micro_batches, accumulates=accumulates,
                options={"buckets": True, "sub_batches": 2, "recompute": "full",
                         "ablation": sw.Ablation(all_reduce_gradients=True)})  # fmt: skip
    check("gpt", [*chosen, woven], pool)


# -- the graphs


@cache
def deep() -> Annotated:
    """A GPT of three layers."""
    config = GPTConfig(vocabulary=32, context=8, layers=3, heads=4, width=16)
    return annotate(capture(gpt.build(config), gpt.batch(torch.Generator(), 8, config)), sw.Options())


def lowered(name: str, force: dict[str, Any], **options: Any) -> Compiled:
    mesh, step = mesh_of(4), deep() if name == "deep" else joint(name).annotated
    found = forced_strategies(force, step.ops, mesh, step.batch)
    return lower(step, {op.name: found[op.name][0] for op in step.ops}, mesh, sw.Options(**options))


def moved(module: fx.GraphModule | None, cause: str = "activation") -> list[tuple[str, int, fx.Node]]:
    assert module is not None
    every = [(info(node).collective, node) for node in module.graph.nodes]
    return [(what.kind, what.bytes, node) for what, node in every if what is not None and what.cause == cause]


def in_layers(found: list[tuple[str, int, fx.Node]]) -> list[tuple[str, int, fx.Node]]:
    return [each for each in found if layer_of(info(each[2]).op)]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sub_batches_are_twice_as_many_collectives_of_half_the_size(name: str) -> None:
    whole, halves = (lowered(name, megatron(name), sub_batches=count).step for count in (1, 2))
    for before, after in ((whole.forward, halves.forward), (whole.backward, halves.backward)):
        once = Counter((kind, size) for kind, size, node in in_layers(moved(before)))
        twice = Counter((kind, 2 * size) for kind, size, node in in_layers(moved(after)))
        assert once and twice == once + once
        # gradients and parameters are one for both
        assert {cause: sum(size for _, size, _ in moved(before, cause)) for cause in ("gradient", "parameter")} == {
            cause: sum(size for _, size, _ in moved(after, cause)) for cause in ("gradient", "parameter")
        }


@pytest.mark.parametrize("options", [{}, {"sub_batches": 2}, {"micro_batches": 2}])
def test_data_parallelism_sums_nothing_but_gradients(options: Any) -> None:
    """Not what becomes one, either: that of positions, which is summed over the batch before it is their gradient."""
    step = lowered("gpt", {"*": "dp"}, **options).step
    assert not moved(step.backward) and moved(step.backward, "gradient")


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("sub_batches", [1, 2])
def test_fine_recomputation_repeats_no_collective(name: str, sub_batches: int) -> None:
    """Oases, section 3.2: of each block's three all-reduces with plain recomputation two are left."""
    plain, fine, full = (
        lowered(name, megatron(name), sub_batches=sub_batches, recompute=mode).step for mode in ("none", "fine", "full")
    )
    counts = {mode: Counter(kind for kind, *_ in moved(step.backward)) for mode, step in
              (("none", plain), ("fine", fine), ("full", full))}  # fmt: skip
    assert counts["fine"] == counts["none"]
    assert counts["full"].total() > counts["none"].total()
    again = [node for *_, node in moved(full.backward) if info(node).recomputed]
    assert len(again) == counts["full"].total() - counts["none"].total()
    saved = [saved_bytes(step.backward) for step in (full, fine, plain)]
    assert saved == sorted(set(saved))


@pytest.mark.parametrize("mode", ["fine", "full"])
def test_what_is_gathered_once_a_step_is_not_gathered_again_to_compute_a_layer_again(mode: Any) -> None:
    """Of ZeRO-2 no gather runs in the backward."""
    plain, again = (lowered("deep", {"*": "zero2"}, recompute=each).step for each in ("none", mode))
    assert moved(again.forward, "parameter") and not moved(again.backward, "parameter")
    assert saved_bytes(again.backward) < saved_bytes(plain.backward)


def test_a_checkpoint_around_sharded_modules_gathers_a_third_time() -> None:
    """OSDP, section 2: of ZeRO-3 what is computed again comes once more; without recomputation, or of ZeRO-2, nothing.

    A layer's last product is not computed again, as the next layer keeps its result.
    """

    def gathered(word: str, mode: Any, *, again: bool) -> tuple[int, int]:
        step = lowered("gpt", {"*": word}, recompute=mode, ablation=sw.Ablation(regather_in_recompute=again)).step
        found = [moved(module, "parameter") for module in (step.forward, step.backward)]
        forward, backward = (sum(size for _, size, node in each if layer_of(info(node).op)) for each in found)
        return forward, backward

    forward, shared = gathered("zero3", "full", again=False)
    twice = gathered("zero3", "full", again=True)
    assert twice[0] == forward and shared + forward / 2 < twice[1] < shared + forward
    for word, mode in (("zero3", "none"), ("zero2", "full")):
        assert gathered(word, mode, again=True) == gathered(word, mode, again=False)


def saved_bytes(module: fx.GraphModule | None) -> int:
    assert module is not None
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_while_one_sub_batch_communicates_the_other_computes(part: str) -> None:
    """Oases, Algorithm 1 and 2, in the order of the generated graph: between the start and the wait of a layer's
    collective there is compute of the other sub-batch."""
    module = lowered("deep", megatron("gpt"), sub_batches=2).graphs[part]
    nodes = list(module.graph.nodes)
    at = {node: index for index, node in enumerate(nodes)}
    hidden = 0
    found = [node for kind, _, node in in_layers(moved(module)) if kind != "all_gather"]
    for start in found:
        (wait,) = start.users
        ((_, mine),) = info(start).steps
        between = nodes[at[start] + 1 : at[wait]]
        hidden += any(info(node).steps == (("sub", 1 - mine),) and "mm" in node.name for node in between)
    assert found and hidden >= len(found) // 2  # where both wait, nothing is left to compute


def test_a_barrier_keeps_recomputation_from_the_gradients_of_other_layers() -> None:
    def mixed(cross_pass: bool) -> int:
        module = lowered("deep", megatron("gpt"), sub_batches=2, recompute="fine",
                         ablation=sw.Ablation(cross_pass=cross_pass))
        assert module.step.backward is not None
        seen = [
            (layer_of(info(node).op), info(node).recomputed)
            for node in module.step.backward.graph.nodes
            if "mm" in node.name and layer_of(info(node).op)
        ]
        return sum(one != other for one, other in zip(seen, seen[1:]))

    assert mixed(cross_pass=False) < mixed(cross_pass=True)


class Checkpointed(nn.Module):
    """A user's own activation checkpoint, in a model whose other layer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False)).square().mean()


def test_the_users_checkpoints_are_honoured() -> None:
    mesh, options = mesh_of(4), sw.Options()
    step = annotate(capture(Checkpointed(), torch.randn(8, 8)), options)
    strategies = forced_strategies({"*": "dp"}, step.ops, mesh, step.batch)
    compiled = lower(step, {name: each[0] for name, each in strategies.items()}, mesh, options)
    assert compiled.step.backward is not None
    again = {info(node).op for node in compiled.step.backward.graph.nodes if info(node).recomputed}
    assert again and all(name.startswith("first") for name in again)


def test_what_needs_the_whole_batch_is_refused_by_name() -> None:
    options = sw.Options(sub_batches=2)
    with pytest.raises(LayoutError, match="norm.*whole batch.*sub-batches.*sub_batches=1"):
        sw.plan(Norm(), sw.Cluster.local(4), torch.randn(16, 8), options=options)
    with pytest.raises(ParallelError, match="batch of 7"):
        sw.plan(nn.Linear(8, 8), sw.Cluster.local(4), torch.randn(7, 8), options=options)


@pytest.mark.parametrize("outputs", ["whole", "part"])
def test_a_loss_outside_of_the_model(outputs: Any, pool: WorkerPool) -> None:
    """Outputs are those of the whole batch or of this rank's part, in its order, and so are tangents."""
    for found, expected in pool.run(outside, outputs, nprocs=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def outside(outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
    x, weight = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    options = sw.Options(sub_batches=2, force={"*": "zdp"}, outputs=outputs)
    parallel = sw.compile_parallel(model, sw.Cluster.local(2), x, options=options)
    y = parallel(x)
    (y * (weight if outputs == "whole" else parallel.local(weight))).sum().backward()
    expected = model(x)
    (expected * weight).sum().backward()
    if outputs == "part":  # losses of parts are averaged
        expected = parallel.local(expected)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
    mine = [y.detach(), *(p.grad.full_tensor() for p in parallel.parameters() if isinstance(p.grad, DTensor))]
    return mine, [expected.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# -- plans and options


def test_a_plan_is_woven_as_it_says(tmp_path: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(8, 8)
    cluster = sw.Cluster.local(1)
    options = sw.Options(sub_batches=2, recompute={"0": "full"}, buckets=True)
    plan = sw.plan(model, cluster, x, options=options)
    assert "2 sub-batches, recomputation 0 full, buckets" in str(plan.explain())
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again.overlap == plan.overlap
    parallel = sw.compile_parallel(model, cluster, x, plan=again)
    assert any(info(node).steps for node in parallel.graphs["forward"].graph.nodes)
    with pytest.raises(PlanError, match="overlap options 2 sub-batches.*the options ask for 4 sub-batches"):
        sw.compile_parallel(model, cluster, x, plan=again, options=sw.Options(sub_batches=4))


def test_a_flat_step_is_evaluated_whole_and_refused_where_it_does_not_fit() -> None:
    """A flat bucket is of all layers; one that reduces each gradient as it appears would take less."""
    model, batch = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), torch.randn(8, 512)
    cluster = sw.Cluster.preset("rtx3090-pcie", nodes=1)
    asked = {"force": {"*": "zero1"}, "sub_batches": 1, "recompute": "none"}
    plan, usual = (
        sw.plan(model, cluster, batch, options=sw.Options(**on, **asked))
        for on in ({"ablation": FLAT}, {"buckets": True})
    )
    assert plan.step_time == pytest.approx(plan.timeline().step_time) and "a flat parameter" in str(plan.overlap)
    assert plan.peak_memory > usual.peak_memory
    with pytest.raises(InfeasibleError):
        sw.plan(model, cluster, batch, options=sw.Options(ablation=FLAT, memory_limit=usual.peak_memory, **asked))
    with pytest.raises(PlanError, match="buckets must be .*got 'round'"):
        sw.Options(buckets="round")  # type: ignore[arg-type]  # what is wrong with it


def test_a_plan_says_what_each_choice_is_worth(tmp_path: Any) -> None:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model, batch = nn.Sequential(*layers), torch.randn(4096, 64)
    cluster = sw.Cluster.preset("rtx3090-pcie", nodes=1)
    force = {"*.0": "column", "*.2": (1, 2, 1, 2)}
    asked = {"sub_batches": 2, "recompute": "full", "keep_gathered": True, "max_prefetch": 1}
    asked |= {"operator_slices": {"1.2": 2}, "buckets": False}

    def timeline(**left_out: Any) -> sw.Timeline:
        same = {name: choice.strategy for name, choice in plan.choices.items()}  # where states rest, too
        options = sw.Options(force=same, **{**asked, **left_out})
        return sw.plan(model, cluster, batch, options=options).timeline()

    plan = sw.plan(model, cluster, batch, options=sw.Options(force=force, **asked))
    worth = {saving.choice: saving for saving in plan.savings}
    whole = plan.timeline()
    for choice, left_out in {
        "2 sub-batches": {"sub_batches": 1},
        "recomputation * full": {"recompute": {}},
        "recomputation while gradients are reduced": {"ablation": sw.Ablation(cross_pass=False)},
        "1.2 in 2 slices": {"operator_slices": {}},
        "* kept gathered": {"keep_gathered": False},
        "at most 1 gathered ahead": {"max_prefetch": None},
    }.items():
        other, saving = timeline(**left_out), worth.pop(choice)
        assert saving.seconds == pytest.approx(other.step_time - whole.step_time, abs=1e-12), choice
        assert saving.bytes == other.peak_memory - whole.peak_memory, choice
    assert not worth and plan.savings[1].bytes > 0  # recomputation
    plan.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json").savings == plan.savings
    assert "what each is predicted to change: 2 sub-batches" in str(plan.explain())
    assert not sw.plan(model, cluster, batch, options=sw.Options(force=force, sub_batches=1, buckets=False)).savings


@pytest.mark.parametrize("option", ["recompute", "keep_gathered", "exclude_from_sub_batches"])
def test_patterns_that_name_nothing_are_refused(option: str) -> None:
    choice: Any = {"block.*": "full" if option == "recompute" else True}
    if option == "exclude_from_sub_batches":
        choice = list(choice)
    with pytest.raises(PlanError, match=rf"{option}\['block.\*'\] names nothing of the model; close to it: .*blocks"):
        lowered("gpt", {"*": "zdp"}, **{option: choice})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"recompute": "some"}, "must be one of 'none', 'fine', 'full', got 'some'"), ({"sub_batches": 0}, "positive")],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        sw.Options(**options)
