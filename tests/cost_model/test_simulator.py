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
from shardweave.cost_model.timeline import COMPUTE
from shardweave.errors import VerifyError
from shardweave.ir import Axis, Layout, ParameterSpec, StepSpec, ValueSpec
from tests.cost_model.handmade import Builder, aten, mlp

CLUSTER = Cluster.preset("perlmutter", nodes=2)
AXES = CLUSTER.mesh().axes
WIDTH, ROWS = 1024, 2048


def run(cluster: Cluster = CLUSTER, axes: Sequence[Axis] = AXES, **options: object) -> Timeline:
    sizes = {"layers": 4, "width": WIDTH, "rows": ROWS} | options
    return simulate(*mlp(cluster, axes, **sizes), cluster)  # type: ignore[arg-type]


def spec_of(*shapes: tuple[int, ...]) -> StepSpec:
    inputs = tuple(ValueSpec(f"x{i}", Layout.replicated(shape), "float32") for i, shape in enumerate(shapes))
    return StepSpec(CLUSTER.mesh(), (), (), inputs, (ValueSpec("y", Layout.replicated((4,)), "float32"),))


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


def test_one_link_carries_one_collective_after_another_and_two_links_two_at_once() -> None:
    gpu, node = [AXES[0]], [AXES[-1]]
    for axes, together in (((gpu, gpu), False), ((gpu, node), True)):
        builder = Builder(AXES)
        x = builder.tensor("x", 4096, 4096)
        starts = [builder.start("all_reduce", x, group, "x", "activation") for group in axes]
        waits = [builder.wait(start) for start in starts]
        timeline = simulate(builder.module(waits), None, spec_of((4096, 4096)), CLUSTER)
        seconds = [collective_seconds("all_reduce", 4 * 4096**2, group, CLUSTER) for group in axes]
        assert timeline.step_time == pytest.approx(max(seconds) if together else sum(seconds))


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
    st.data(),
)
def test_laws_of_every_step(
    name: str, nodes: int, layers: int, width: int, prefetch: bool, data: st.DataObject
) -> None:
    cluster = Cluster.preset(name, nodes=nodes).resized(node=2 ** (nodes - 1))
    axes = [axis for axis in cluster.mesh().axes if data.draw(st.booleans())]
    timeline = run(cluster, axes, layers=layers, width=width, rows=512, prefetch=prefetch)
    assert timeline.step_time == pytest.approx(timeline.compute_time + timeline.exposed_communication)
    assert timeline.exposed_communication <= timeline.communication_time * (1 + 1e-9)
    for stream in timeline.streams:
        events = [event for event in timeline.events if event.stream == stream]
        for before, after in pairwise(events):
            assert after.start >= before.end - 1e-12
    assert timeline.memory.bytes.min() >= 0
    assert timeline.memory.seconds.tolist() == sorted(timeline.memory.seconds)
    left = dict(zip(timeline.memory.kinds, timeline.memory.bytes[-1], strict=True))
    held = ("parameters", "optimizer", "inputs", "outputs")
    assert all(left[kind] > 0 for kind in held)
    assert all(left[kind] == 0 for kind in left if kind not in held), left


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


def test_the_optimizer_step_is_memory_bound() -> None:
    forward, backward, spec = mlp(CLUSTER, [], layers=2, width=WIDTH, rows=ROWS)
    adam = simulate(forward, backward, spec, CLUSTER)
    sgd = simulate(forward, backward, spec, CLUSTER, optimizer_bytes_per_parameter_byte=0.0)
    size = 2 * WIDTH * WIDTH * 4
    rate = CLUSTER.device.memory_bandwidth * CLUSTER.device.memory_efficiency
    assert adam.events[-1].phase == "optimizer"
    assert adam.events[-1].seconds == pytest.approx(7 * size / rate)
    assert adam.peak_memory - sgd.peak_memory == 2 * size


def test_frozen_parameters_have_no_states() -> None:
    forward, backward, spec = mlp(CLUSTER, [], layers=1, width=64, rows=8)
    frozen = ParameterSpec("layers.0.weight", spec.parameters[0].layout, "float32", trainable=False)
    spec = StepSpec(spec.mesh, (frozen,), (), spec.inputs, spec.outputs)
    timeline = simulate(forward, backward, spec, CLUSTER)
    assert timeline.memory.at_peak().get("optimizer", 0) == 0


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
