"""The simulator: what streams and memory do in steps small enough to follow by hand, and laws of larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.cost_model import Cluster, Timeline, collective_seconds, node_seconds, simulate
from shardweave.cost_model.collectives import collective_demand
from shardweave.cost_model.node_cost import NodeCosts, optimizer_seconds
from shardweave.cost_model.timeline import COMPUTE
from shardweave.ir import Axis, Layout, ParameterSpec, StepSpec, ValueSpec
from shardweave.ir.errors import VerifyError
from shardweave.sharding.graphs import info
from tests.cost_model.handmade import Builder, aten, mlp


def steady(cluster: Cluster, slowdown: float = 1.0) -> Cluster:
    """`cluster`, where compute is slowed down by communication this much."""
    return replace(cluster, device=replace(cluster.device, overlap_slowdown=slowdown))


CLUSTER = steady(Cluster.preset("perlmutter", nodes=2))
AXES = CLUSTER.mesh().axes
WIDTH, ROWS = 1024, 2048


def run(cluster: Cluster = CLUSTER, axes: Sequence[Axis] = AXES, **options: object) -> Timeline:
    sizes = {"layers": 4, "width": WIDTH, "rows": ROWS} | options
    return simulate(*mlp(cluster, axes, **sizes), cluster)  # type: ignore[arg-type]


def spec_of(*shapes: tuple[int, ...], cluster: Cluster = CLUSTER) -> StepSpec:
    inputs = tuple(ValueSpec(f"x{i}", Layout.replicated(shape), "float32") for i, shape in enumerate(shapes))
    return StepSpec(cluster.mesh(), (), (), inputs, (ValueSpec("y", Layout.replicated((4,)), "float32"),))


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e-2])
def test_a_step_takes_no_less_than_its_host(seconds: float) -> None:
    """What the host takes is hidden while the device is behind it, and exposed, as communication, where it is not."""
    late = replace(CLUSTER, device=replace(CLUSTER.device, collective_host_seconds=seconds))
    before, after = run(CLUSTER), run(late)
    starts = sum(event.stream != COMPUTE for event in after.events)
    assert after.step_time >= max(before.step_time, starts * seconds) * (1 - 1e-9)
    assert after.step_time - before.step_time <= starts * seconds + 1e-12
    computed = after.step_time - after.exposed_communication
    assert computed == pytest.approx(before.step_time - before.exposed_communication)
    assert (after.step_time > 1.5 * before.step_time) == (seconds > 1e-3)


def test_a_wait_exposes_what_compute_does_not_hide() -> None:
    builder = Builder(AXES)
    x = builder.tensor("x", 4096, 4096)
    start = builder.start("all_reduce", x, AXES, "x", "activation")
    work = builder.call(aten.neg.default, x)
    waited = builder.wait(start)
    last = builder.call(aten.add.Tensor, waited, work)
    timeline = simulate(builder.module([last]), None, spec_of((4096, 4096)), CLUSTER)
    communication = collective_seconds("all_reduce", 4 * 4096**2, AXES, CLUSTER)
    hidden, after = node_seconds(work, CLUSTER), node_seconds(last, CLUSTER)
    assert communication > hidden
    assert timeline.exposed_communication == pytest.approx(communication - hidden)
    assert timeline.exposed_by_cause() == {"activation": timeline.exposed_communication}
    assert timeline.step_time == pytest.approx(communication + after)
    assert [event.stream for event in timeline.events] == ["node", COMPUTE, COMPUTE, COMPUTE]


def test_one_group_has_one_collective_after_another_and_two_links_two_at_once() -> None:
    gpu, node = [AXES[0]], [AXES[-1]]
    for axes, together in (((gpu, gpu), False), ((gpu, node), True)):
        timeline, seconds = beside_each_other(CLUSTER, axes)
        assert timeline.step_time == pytest.approx(max(seconds) if together else sum(seconds))


def test_two_groups_share_the_links_that_both_cross() -> None:
    """Each has half of them: both end when they would one after the other, but for one latency."""
    cluster = steady(Cluster.preset("dgx-a100", nodes=4))
    first, second = ([axis] for axis in cluster.mesh().axes[-2:])
    timeline, seconds = beside_each_other(cluster, (first, second))
    latency = collective_demand("all_reduce", 4 * 4096**2, first, cluster).latency
    assert timeline.step_time == pytest.approx(sum(seconds) - latency)
    one, other = (event for event in timeline.events if event.stream == "node")
    assert one.start == other.start == 0 and one.end == pytest.approx(other.end)
    assert timeline.utilisation["node"] == pytest.approx(1 - latency / timeline.step_time)


def beside_each_other(cluster: Cluster, groups: Sequence[Sequence[Axis]]) -> tuple[Timeline, list[float]]:
    """All-reduces over these groups, started at once: the step, and the seconds of each alone."""
    builder = Builder(cluster.mesh().axes)
    x = builder.tensor("x", 4096, 4096)
    starts = [builder.start("all_reduce", x, group, "x", "activation") for group in groups]
    waits = [builder.wait(start) for start in starts]
    timeline = simulate(builder.module(waits), None, spec_of((4096, 4096), cluster=cluster), cluster)
    return timeline, [collective_seconds("all_reduce", 4 * 4096**2, group, cluster) for group in groups]


def test_a_collective_waits_for_its_input() -> None:
    builder = Builder(AXES)
    y = builder.call(aten.neg.default, builder.tensor("x", 1024, 1024))
    builder.wait(start := builder.start("all_reduce", y, AXES, "x", "activation"))
    timeline = simulate(builder.module([start]), None, spec_of((1024, 1024)), CLUSTER)
    assert timeline.events[1].start == pytest.approx(node_seconds(y, CLUSTER))


def test_the_step_ends_when_the_links_rest() -> None:
    builder = Builder(AXES)
    start = builder.start("all_reduce", builder.tensor("x", 1024, 1024), AXES, "x", "gradient")
    timeline = simulate(builder.module([start]), None, spec_of((1024, 1024)), CLUSTER)
    assert timeline.step_time == pytest.approx(timeline.communication_time)
    assert timeline.exposed_communication == pytest.approx(timeline.step_time)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["dgx-h100", "perlmutter", "rtx3090-nvlink", "local-cpu"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([128, 1024]),
    st.booleans(),
    st.sampled_from([1.0, 1.2, 2.0]),
    st.data(),
)
def test_laws_of_every_step(
    name: str, nodes: int, layers: int, width: int, prefetch: bool, slowdown: float, data: st.DataObject
) -> None:
    cluster = steady(Cluster.preset(name, nodes=nodes).resized(node=2 ** (nodes - 1)), slowdown)
    axes = [axis for axis in cluster.mesh().axes if data.draw(st.booleans())]
    timeline = run(cluster, axes, layers=layers, width=width, rows=512, prefetch=prefetch)
    hold_laws(timeline, slowdown)
    for group in {event.group for event in timeline.events}:
        events = [event for event in timeline.events if event.group == group]
        for before, after in pairwise(events):
            assert after.start >= before.end - 1e-12


def hold_laws(timeline: Timeline, slowdown: float) -> None:
    """What the simulator's docstring says of every step."""
    step, alike = timeline.step_time, pytest.approx(timeline.step_time, rel=1e-9, abs=1e-15)
    least = timeline.compute_time - timeline.slowdown_time
    assert timeline.compute_time + timeline.exposed_communication == alike
    assert least <= timeline.compute_time * (1 + 1e-9)
    assert timeline.compute_time <= slowdown * least * (1 + 1e-9)
    assert timeline.exposed_communication <= timeline.communication_time * (1 + 1e-9)
    assert step <= (timeline.compute_time + timeline.communication_time) * (1 + 1e-9)
    groups = {event.group for event in timeline.events if event.stream != COMPUTE}
    for group in groups:
        assert sum(event.alone for event in timeline.events if event.group == group) <= step * (1 + 1e-9)
    for level, busy in timeline.busy.items():
        assert busy <= step * (1 + 1e-9), level
    assert all(0 <= part <= 1 for part in timeline.utilisation.values())
    assert all(0 <= part <= 1 + 1e-9 for _, load in timeline.loads for part in load)
    for event in timeline.events:
        assert event.seconds >= event.alone * (1 - 1e-9)  # nothing is faster than alone
    causes = {"parameter", "gradient", "activation"}
    assert set(timeline.exposed_by_cause()) <= causes
    assert {cause for cause, _ in timeline.exposed_by_op()} <= causes
    assert sum(timeline.exposed_by_cause().values()) == pytest.approx(timeline.exposed_communication)
    assert sum(timeline.exposed_by_op().values()) == pytest.approx(timeline.exposed_communication)
    assert timeline.memory.bytes.min() >= 0
    assert timeline.memory.seconds.tolist() == sorted(timeline.memory.seconds)
    assert set(timeline.memory.at_rest()) <= {"parameters", "optimizer", "buffers", "inputs"}
    starts = timeline.memory.bytes[timeline.memory.seconds == 0]
    assert (starts == timeline.memory.bytes[-1]).all(axis=1).any(), "memory ends where it began: states at rest"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["perlmutter", "frontier", "local-cpu"]), st.sampled_from([1.0, 1.3]), st.data())
def test_laws_of_collectives_that_share_links(name: str, slowdown: float, data: st.DataObject) -> None:
    """Any number of groups at once, started and waited for in any order, with compute between."""
    cluster = steady(Cluster.preset(name, nodes=4), slowdown)
    axes = cluster.mesh().axes
    builder = Builder(axes)
    x = builder.tensor("x", 1024, 256)
    pending: list[object] = []
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["start", "wait", "compute"]))
        if kind == "start":
            group = data.draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3, unique=True))
            cause = data.draw(st.sampled_from(["parameter", "gradient", "activation"]))
            pending.append(builder.start("all_reduce", x, sorted(group, key=axes.index), "x", cause))
        elif kind == "wait" and pending:
            builder.wait(pending.pop(data.draw(st.integers(0, len(pending) - 1))))  # type: ignore[arg-type]
        else:
            x = builder.call(aten.neg.default, x)
    timeline = simulate(builder.module([x]), None, spec_of((1024, 256), cluster=cluster), cluster)
    hold_laws(timeline, slowdown)
    demands = dict.fromkeys(timeline.busy, 0.0)
    for node in builder.graph.nodes:
        if (what := info(node).collective) is not None:
            demand = NodeCosts(cluster).collective(what)
            for level, part in demand.use.items():
                demands[level] += part * demand.transfer
    assert timeline.busy == pytest.approx(demands), "what links have to move does not depend on how they are shared"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.booleans(), st.sampled_from([1.0, 1.5]), st.floats(1.1, 10.0), st.data())
def test_time_grows_with_latency_and_falls_with_bandwidth(
    layers: int, prefetch: bool, slowdown: float, factor: float, data: st.DataObject
) -> None:
    """For steps whose collectives are all of one group. (Several groups may block each other in another order then.)"""
    axes = [axis for axis in AXES if data.draw(st.booleans())]

    def seconds(**scales: float) -> float:
        levels = tuple(replace(v, **{k: getattr(v, k) * scale for k, scale in scales.items()}) for v in CLUSTER.levels)
        cluster = steady(replace(CLUSTER, levels=levels), slowdown)
        return run(cluster, axes, layers=layers, prefetch=prefetch, width=512, rows=256).step_time

    now = seconds() * (1 - 1e-9)
    assert seconds(latency=factor) >= now
    assert seconds(bandwidth=1 / factor) >= now
    wider = {"layers": layers, "prefetch": prefetch, "rows": 256}
    assert run(steady(CLUSTER, slowdown), axes, width=1024, **wider).step_time >= now


def test_prefetching_hides_gathers_and_costs_memory() -> None:
    late, early = run(prefetch=False), run(prefetch=True)
    assert early.exposed_communication < late.exposed_communication
    assert early.compute_time == pytest.approx(late.compute_time)
    assert early.peak_memory > late.peak_memory


def test_memory_by_hand() -> None:
    """One device, two layers: everything that lives at the peak, in the first layer of the backward."""
    cluster = Cluster.local(1)
    timeline = simulate(*mlp(cluster, [], layers=2, width=64, rows=32), cluster)
    weight, activation = 64 * 64 * 4, 32 * 64 * 4
    at = {kind: timeline.memory.bytes[:, k].max() for k, kind in enumerate(timeline.memory.kinds)}
    assert at["parameters"] == at["gradients"] == 2 * weight
    assert at["optimizer"] == 4 * weight
    assert at["inputs"] == activation
    assert at["saved"] == 3 * activation  # mm 0, gelu 0, mm 1; the input of layer 0 is not saved anew


def test_what_rests_sharded_takes_its_part() -> None:
    whole, part = run(axes=[]), run(axes=AXES)
    row, other = whole.memory.bytes[1:].max(0), part.memory.bytes[1:].max(0)
    for kind in ("parameters", "optimizer", "gradients"):
        column = whole.memory.kinds.index(kind)
        assert other[column] * 8 == row[column]


def test_the_optimizer_step_comes_last() -> None:
    forward, backward, spec = mlp(CLUSTER, [], layers=2, width=WIDTH, rows=ROWS)
    adam = simulate(forward, backward, spec, CLUSTER)
    sgd = simulate(forward, backward, spec, CLUSTER, optimizer_bytes_per_parameter_byte=0.0)
    size = 2 * WIDTH * WIDTH * 4
    assert adam.events[-1].phase == "optimizer"
    assert adam.events[-1].seconds == pytest.approx(optimizer_seconds([size // 2] * 2, 2.0, CLUSTER))
    assert adam.peak_memory - sgd.peak_memory == 2 * size


def test_frozen_parameters_have_no_states() -> None:
    forward, backward, spec = mlp(CLUSTER, [], layers=1, width=64, rows=8)
    frozen = ParameterSpec("layers.0.weight", spec.parameters[0].layout, "float32", trainable=False)
    spec = StepSpec(spec.mesh, (frozen,), (), spec.inputs, spec.outputs)
    timeline = simulate(forward, backward, spec, CLUSTER)
    assert timeline.memory.at_peak().get("optimizer", 0) == 0


def test_compute_is_slower_while_communication_runs() -> None:
    builder = Builder(AXES)
    x = builder.tensor("x", 4096, 4096)
    start = builder.start("all_reduce", x, AXES, "x", "activation")
    work = builder.call(aten.neg.default, x)
    builder.call(aten.neg.default, builder.wait(start))
    cluster = steady(CLUSTER, 1.5)
    timeline = simulate(builder.module([work]), None, spec_of((4096, 4096)), cluster)
    alone = node_seconds(work, cluster)
    beside, after = (event for event in timeline.events if event.kind == "compute")
    assert beside.seconds == pytest.approx(1.5 * alone) and after.seconds == pytest.approx(alone)
    assert timeline.slowdown_time == pytest.approx(0.5 * alone)


def test_equal_nodes_are_priced_once() -> None:
    forward, backward, spec = mlp(CLUSTER, AXES, layers=12, width=64, rows=8)
    prices = NodeCosts(CLUSTER)
    calls = [node for module in (forward, backward) for node in module.graph.nodes if node.op == "call_function"]
    assert len({id(prices.of(node)) for node in calls}) < len(calls) / 6


def test_flops_are_those_of_the_matmuls() -> None:
    assert run(layers=3).flops == 3 * 3 * 2 * ROWS * WIDTH * WIDTH


def test_more_bytes_on_the_link_never_make_a_step_faster() -> None:
    slower = CLUSTER.from_dict(
        CLUSTER.to_dict()
        | {"levels": [level | {"bandwidth": level["bandwidth"] / 10} for level in CLUSTER.to_dict()["levels"]]}
    )
    assert run(slower, slower.mesh().axes).step_time > run().step_time


def test_graphs_against_the_convention_are_errors() -> None:
    forward, backward, spec = mlp(CLUSTER, AXES, layers=2, width=64, rows=8)
    with pytest.raises(VerifyError, match=r"takes 3 tensors.*expected 2: 1 parameters, 0 buffers, 1 inputs"):
        simulate(forward, backward, StepSpec(spec.mesh, spec.parameters[:1], (), spec.inputs, spec.outputs), CLUSTER)
    with pytest.raises(VerifyError, match="called coord_<axis>"):
        simulate(no_coordinates(), None, spec_of((4,)), CLUSTER)
    with pytest.raises(VerifyError, match=r"expected step_seed.*got \['p0'\]"):
        simulate(forward, backward, replace(spec, draws=True), CLUSTER)


def no_coordinates() -> torch.fx.GraphModule:
    builder = Builder([])
    holders = [builder.tensor(f"x{i}", 4) for i in range(len(AXES) + 1)]
    return builder.module([builder.call(aten.neg.default, holders[0])])


def test_a_start_without_its_note_is_an_error() -> None:
    builder = Builder(AXES)
    start = builder.start("all_reduce", builder.tensor("x", 4), AXES, "x", "activation")
    start.meta.pop("shardweave")
    with pytest.raises(VerifyError, match=r"expected node\.meta"):
        simulate(builder.module([builder.wait(start)]), None, spec_of((4,)), CLUSTER)
