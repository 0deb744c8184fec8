"""Bucket: fewer collectives that move the same bytes, on one side of every border, with no copy more than needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.cost_model import Cluster, NodeCosts
from shardweave.cost_model.memory import liveness
from shardweave.cost_model.options import Options
from shardweave.ir import Ablation, Collective, Grid, Strategy
from shardweave.passes.base import verify
from shardweave.passes.bucket import Bucket, _Member, _Merger, sides
from shardweave.passes.codegen import MicroBatchGraphs
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.sharded_values import StateSharding
from shardweave.planner.problem.space import forced_strategies
from shardweave.sharding.graphs import alias_of, info
from tests.cost_model.handmade import Builder
from tests.passes.harness import collectives, mesh_of
from tests.passes.joint import joint

aten = torch.ops.aten
CLUSTER = Cluster.local(4)
AXES = CLUSTER.mesh().axes


def lowered(force: dict[str, Any], **options: Any) -> Compiled:
    mesh, step = mesh_of(2, 2), joint("gpt").annotated
    found = forced_strategies(force, step.ops, mesh, step.batch)
    return lower(step, {op.name: found[op.name][0] for op in step.ops}, mesh, Options(**options))


def moved(module: fx.GraphModule) -> Counter[tuple[str, str, int]]:
    """How many bytes are moved, by kind, cause and group."""
    found: Counter[tuple[str, str, int]] = Counter()
    for what in collectives(module):
        found[what.kind, what.cause, len(what.axes)] += what.bytes
    return found


def count(module: fx.GraphModule) -> int:
    return sum(what.cause != "activation" for what in collectives(module))


@pytest.mark.parametrize("word", ["zero1", "zero2", "zero3", "hsdp:2", "hpz:2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_form_of_a_step_moves_the_same_in_fewer_collectives(word: str, micro_batches: int) -> None:
    """What turns share is gathered by the first, what is behind the sums is reduced by the last."""
    several = [
        lowered({"*": word}, micro_batches=micro_batches, buckets=on).step.micro_batch_graphs for on in (False, True)
    ]
    plain, merged = (graphs() for graphs in several if graphs is not None)
    for before, after in zip(forms(plain), forms(merged)):
        assert moved(before) == moved(after)
        assert count(after) < count(before) or not count(before)


def forms(graphs: MicroBatchGraphs) -> list[fx.GraphModule]:
    flags = [(one, other) for one in (False, True) for other in (False, True)]
    return [graphs.finish, *(graphs.forward(*each) for each in flags), *(graphs.backward(*each) for each in flags)]


def test_all_that_a_layer_gathers_is_one_collective() -> None:
    """What is small against the latency of the link; and so are all gradients."""
    step = lowered({"*": "zero2"}, buckets=True).step
    assert step.backward is not None
    gathered, reduced = (
        [what.owner for what in collectives(module) if what.cause != "activation"]
        for module in (step.forward, step.backward)
    )
    assert len(gathered) == 2 and len(reduced) == 1  # of the only layer, and of all outside
    assert sum(owner.startswith("blocks.0") for owner in gathered) == 1


# -- flat

FLAT = Ablation(flat_parameter=True)


@pytest.mark.parametrize("word", ["dp", "zero1", "zero2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_whole_in_a_step_is_flat(word: str, micro_batches: int) -> None:
    """One gather before the forward, one reduction behind the backward, whatever they take; as many bytes."""
    several = [
        lowered({"*": word}, micro_batches=micro_batches, buckets=False, ablation=each).step.micro_batch_graphs
        for each in (Ablation(), FLAT)
    ]
    plain, flat = (forms(graphs()) for graphs in several if graphs is not None)
    for before, after in zip(plain, flat):
        assert moved(before) == moved(after)
        assert count(after) == len({(what.kind, what.axes, what.cause) for what in collectives(after)
                                    if what.cause != "activation"})  # fmt: skip
    step = lowered({"*": word}, ablation=FLAT).step
    assert step.backward is not None
    kinds = [[(what.kind, what.cause) for what in collectives(m)] for m in (step.forward, step.backward)]
    gathers = [] if word == "dp" else [("all_gather", "parameter")]
    assert kinds[0][: len(gathers)] == gathers and kinds[0].count(("all_gather", "parameter")) == len(gathers)
    assert kinds[1][-1] == ("all_reduce" if word == "dp" else "reduce_scatter", "gradient")


def test_a_large_parameter_is_in_a_flat_bucket_too() -> None:
    with FakeTensorMode():
        builder = Builder(AXES)
        outputs = [gathers(builder, name, 1, rows) for name, rows in (("a", 4), ("b", 2**22), ("c", 2**22))]
        module = builder.module(outputs)
    module = Bucket(CLUSTER, flat={"c": StateSharding(parameter=AXES)})(module)
    verify(module, "bucket")
    assert sorted(what.owner for what in collectives(module)) == ["a and 1 more", "c"]


@pytest.mark.parametrize("word", ["zero3", "hsdp:2", "hpz:2"])
def test_nothing_is_flat_of_what_is_gathered_at_each_use(word: str) -> None:
    usual, flat = (lowered({"*": word}, **each) for each in ({"buckets": True}, {"ablation": FLAT}))
    for part in ("forward", "backward"):
        assert collectives(usual.graphs[part]) == collectives(flat.graphs[part])


def test_a_flat_parameter_is_there_until_its_gradient_is() -> None:
    """What the backward has of parameters is held while their gradients are put together; what arrived whole is not."""
    step = lowered({"*": "zero2"}, ablation=FLAT).step
    assert step.backward is not None
    ((gathered, before), (reduced, behind)) = (
        (start, liveness(module.graph))
        for module, cause in ((step.forward, "parameter"), (step.backward, "gradient"))
        for start in module.graph.nodes
        if (what := info(start).collective) is not None and what.cause == cause
    )
    (cut,) = step.forward.graph.find_nodes(op="call_function", target=aten.split_with_sizes_copy.default)
    assert (gathered, 0) in before.dead[cut]
    joined = reduced
    while joined.target is not aten.cat.default:
        joined = joined.all_input_nodes[0]
    names = {f"{name}" for name in joint("gpt").annotated.captured.gradients}
    weights = {n for n in step.backward.graph.find_nodes(op="placeholder") if info(n).op in names}
    assert weights and {(node, 0) for node in weights} <= {*behind.dead[joined]}


# -- copies


def copies(module: fx.GraphModule) -> Counter[str]:
    """The nodes that do nothing but copy, and the pieces that one op makes of a buffer."""
    shaping = {aten.reshape.default: "shape", aten.clone.default: "shape", aten.cat.default: "cat"}
    found = Counter(shaping[n.target] for n in module.graph.nodes if n.target in shaping and alias_of(n) is None)
    splits = module.graph.find_nodes(op="call_function", target=aten.split_with_sizes_copy.default)
    found["shape"] += sum(len(split.users) for split in splits)
    return found


def test_what_arrives_is_copied_once() -> None:
    """A gather that a permutation follows is copied by that; one at rest on its first dimension once, by its piece. All
    of a reduction is a view."""
    for force in ({"*": "zero3"}, {"*": Strategy(Grid(x=2, data=2), rest=2)}):
        plain, merged = lowered(force), lowered(force, buckets=True)
        for part in ("forward", "backward"):
            before, after = copies(plain.graphs[part]), copies(merged.graphs[part])
            gathers = [n for n in plain.graphs[part].graph.nodes if (what := info(n).collective) is not None
                       and what.kind == "all_gather" and what.cause == "parameter"]  # fmt: skip
            permuted = [n for n in gathers for wait in n.users if any(_permutes(user) for user in wait.users)]
            assert after["cat"] - before["cat"] == count(merged.graphs[part])
            assert after["shape"] - before["shape"] == len(gathers) - len(permuted)


def _permutes(node: fx.Node) -> bool:
    return node.target is aten.permute.default or (
        node.target is aten.reshape.default and any(map(_permutes, node.users))
    )


# -- by hand


def gathers(builder: Builder, name: str, depth: int, rows: int = 4) -> fx.Node:
    """A parameter gathered in so many steps."""
    value = builder.tensor(name.replace(".", "_"), rows, 4)
    for _ in range(depth):
        value = builder.wait(builder.start("all_gather", value, AXES, name, "parameter"))
    return value


def bucketed(
    builder: Builder, outputs: Sequence[fx.Node], cut_points: Sequence[Sequence[str]] = (), only_small: bool = False
) -> list[str]:
    """The owners of what the bucketed graph moves."""
    module = Bucket(CLUSTER, cut_points, only_small=only_small)(builder.module(outputs))
    verify(module, "bucket")
    return sorted(what.owner for what in collectives(module))


def test_no_member_of_a_bucket_needs_another() -> None:
    with FakeTensorMode():
        builder = Builder(AXES)
        outputs = [gathers(builder, name, depth) for name, depth in (("a", 2), ("b", 1), ("c", 2))]
    assert bucketed(builder, outputs) == ["a and 1 more", "a and 2 more"]


def test_collectives_on_different_sides_of_a_cut_point_are_not_merged() -> None:
    with FakeTensorMode():
        builder = Builder(AXES)
        outputs = [gathers(builder, name, 1) for name in "abcd"]
        outputs[0] = builder.call(aten.neg.default, outputs[0])
        outputs[1] = builder.call(aten.neg.default, outputs[1])
    shared = [output.name for output in outputs[:2]]
    found = sides(builder.graph, [shared])
    assert found[builder.graph.find_nodes(op="placeholder", target="a")[0]] == (frozenset(), frozenset({0}))
    assert found[outputs[0]] == (frozenset({0}), frozenset({0}))
    assert found[outputs[2]] == (frozenset(), frozenset())
    assert bucketed(builder, outputs, [shared]) == ["a and 1 more", "c and 1 more"]


def test_what_would_keep_its_first_user_waiting_stays_apart() -> None:
    """A bucket ends where more bytes cost more than a latency saves."""
    with FakeTensorMode():
        builder = Builder(AXES)
        outputs = []
        for name, rows in (("small", 4), ("large", 2**22)):
            start = builder.start("all_gather", builder.tensor(name, rows, 4), AXES, name, "parameter")
            outputs.append(builder.wait(start))
    assert bucketed(builder, outputs) == ["large", "small"]


# -- sizes of buckets of gradients


def merger(seconds: Sequence[float], megabytes: Sequence[float], end: float, **device: float) -> _Merger:
    """Of all-reduces of gradients of these sizes that are there after these seconds of a backward."""
    cluster, start = replace(CLUSTER, device=replace(CLUSTER.device, **device)), fx.Graph().placeholder("start")
    members = [
        _Member(start, Collective("all_reduce", AXES, int(1e6 * size), "", "", "gradient"), at, 0, (frozenset(),) * 2)
        for at, size in zip(sorted(seconds), megabytes)
    ]
    return _Merger(members, NodeCosts(cluster), end, 2**40)


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(1e-3, 30.0)), min_size=1, max_size=30),
    st.floats(0, 1e-2),
    st.floats(1, 3),
    st.floats(1, 3),
)
def test_larger_buckets_are_taken_if_the_backward_ends_earlier(
    gradients: list[tuple[float, float]], latency: float, compute: float, collectives: float
) -> None:
    seconds, sizes = zip(*gradients)
    device = {"collective_latency": latency, "overlap_slowdown": compute, "collective_slowdown": collectives}
    each = merger(seconds, sizes, 0.1, **device)
    usual = each._merge_consecutive()
    found = each._fill_larger(usual)
    assert [member for run in found for member in run] == [*each.members]
    assert each._end_of(found) <= each._end_of(usual)
    assert found is usual or len(found) < len(usual)


def test_buckets_are_larger_where_overlap_hides_little() -> None:
    """A device whose cores also move the bytes computes at half speed meanwhile: latencies are worth more then."""
    seconds, sizes, counts = [0.002 * index for index in range(12)], [0.25] * 12, []
    for slowdown in (1.0, 3.0):
        each = merger(seconds, sizes, 0.024, collective_latency=1e-3, overlap_slowdown=slowdown)
        counts.append(len(each._fill_larger(each._merge_consecutive())))
    assert counts == [2, 1]


# -- small ones


@pytest.mark.parametrize("only_small", [False, True])
def test_what_is_small_is_one_collective_over_all_layers(only_small: bool) -> None:
    """It belongs to no layer, so that what one of equal layers takes is not taken for what all of them take."""
    with FakeTensorMode():
        builder = Builder(AXES)
        sizes = {"norm": 4, "up": 2**20, "down": 2**20}
        names = {f"blocks.{layer}.{part}": rows for layer in range(3) for part, rows in sizes.items()}
        outputs = [gathers(builder, name, 1, rows) for name, rows in names.items()]
    module = builder.module(outputs)
    found = Bucket(CLUSTER, only_small=only_small)(module)
    verify(found, "bucket")
    large = [name for name in names if not name.endswith("norm")]
    assert {what.owner for what in collectives(found)} == {"blocks.0.norm and 2 more", *large}
    merged = next(node for node in found.graph.nodes if (what := info(node).collective) and " and " in what.owner)
    assert info(merged).op == "blocks"
    assert len(found.graph.find_nodes(op="call_function", target=aten.split_with_sizes_copy.default)) == 1


def test_what_is_small_is_carried_where_the_copies_take_less_than_a_latency() -> None:
    for rows, expected in ((2**13, ["large and 1 more"]), (2**22, ["large", "small"])):
        with FakeTensorMode():
            builder = Builder(AXES)
            outputs = [gathers(builder, name, 1, size) for name, size in (("large", rows), ("small", 4))]
        assert bucketed(builder, outputs, only_small=True) == expected


def test_small_ones_of_all_layers_hold_no_more_than_the_largest_collective() -> None:
    with FakeTensorMode():
        builder = Builder(AXES)
        outputs = [gathers(builder, f"blocks.{layer}.norm", 1, 4 + 4 * (layer == 3)) for layer in range(4)]
    merged = bucketed(builder, outputs, only_small=True)
    assert merged == ["blocks.0.norm and 1 more", "blocks.2.norm", "blocks.3.norm"]
