"""All layers' ops out of those of two: what piles up is waited for as it is in the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.collectives import Demand
from shardweave.cost_model.streams import Transfer
from shardweave.cost_model.timeline import StreamOp, replay
from shardweave.demo.model import GPT, GPTConfig
from shardweave.planner.search.extrapolation import Layers, reductions_queue_up, with_repeated_layers

DEVICE = sw.Cluster.preset("dgx-a100").device


@dataclass(frozen=True)
class Layer:
    """What one of equal layers does: gathers its weight a layer ahead, computes, sums its gradient.

    Parameters
    ----------
    kernels : tuple of float
        Seconds of each.
    gather, total : float
        Seconds of its collectives.
    gathers, sums : int
        Behind which kernel the next layer's gather, and its own sum or that of the layer before it, are started.
    late : bool
        Whether the sum is started in the next layer.
    blocks : bool
        Whether a sum is waited for at once.
    casts : bool
        Whether a kernel of the weight's comes ahead of its gather.
    """

    kernels: tuple[float, ...]
    gather: float
    total: float
    gathers: int
    sums: int
    late: bool
    blocks: bool
    casts: bool

    def ops(self, count: int) -> list[StreamOp]:
        """The ops of so many of them, between what comes before and after them."""
        found = [StreamOp(1, "head", 1.0)]
        transfers: dict[str, Transfer] = {}

        def start(kind: str, number: int) -> Iterator[StreamOp]:
            if 0 <= number < count:
                seconds = self.gather if kind == "all_gather" else self.total
                name, cause = f"{kind} b.{number}.w", "parameter" if kind == "all_gather" else "gradient"
                transfers[name] = Transfer(kind, Demand(0.1, seconds, {"node": 0.75}), cause, name=name)
                if self.casts and kind == "all_gather":
                    yield StreamOp(1, f"b.{number}.w", 0.125)
                yield StreamOp(1, f"b.{number}.w", transfer=transfers[name])
                if self.blocks and kind == "all_reduce":
                    yield wait(kind, number)

        def wait(kind: str, number: int) -> StreamOp:
            return StreamOp(1, f"b.{number}.w", transfer=transfers[f"{kind} b.{number}.w"], waits=True)

        found += start("all_gather", 0)
        for number in range(count):
            found.append(wait("all_gather", number))
            for place, seconds in enumerate(self.kernels):
                found.append(StreamOp(1, f"b.{number}.k{place}", seconds))
                found += start("all_reduce", number - self.late) if place == self.sums else ()
                found += start("all_gather", number + 1) if place == self.gathers else ()
        found += start("all_reduce", count - 1) if self.late else ()
        found += () if self.blocks else (wait("all_reduce", number) for number in range(count))
        return [*found, StreamOp(2, "optimizer", 1.0)]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    seconds = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
    kernels = draw(st.lists(seconds, min_size=1, max_size=4))
    place = st.integers(0, len(kernels) - 1)
    gather, total, gathers, sums = draw(seconds), draw(seconds), draw(place), draw(place)
    late = draw(st.booleans()) if sums < len(kernels) - 1 else False  # behind the last kernel nothing is late
    return Layer(tuple(kernels), gather, total, gathers, sums, late, draw(st.booleans()), draw(st.booleans()))


@given(layers(), st.integers(2, 9))
def test_two_layers_tell_what_all_of_them_take(layer: Layer, count: int) -> None:
    repeated = [(["b.0", "b.1"], count - 2)]
    found = with_repeated_layers(layer.ops(2), Layers({}), repeated, {"b.0.w", "b.1.w"})
    assert found is not None
    whole = layer.ops(count)
    assert len(found) == len(whole)
    assert replay(found, DEVICE) == pytest.approx(replay(whole, DEVICE), rel=1e-9)


def test_what_piles_up_are_sums_longer_than_the_kernels_of_their_layer() -> None:
    layer = Layer((1.0,), 0.5, 4.0, 0, 0, False, False, False)
    assert reductions_queue_up(layer.ops(2), Layers({}), [(["b.0", "b.1"], 3)])
    assert not reductions_queue_up(layer.ops(2), Layers({}), [(["b.0", "b.1"], 0)])
    assert not reductions_queue_up(replace(layer, total=0.25, gather=4.0).ops(2), Layers({}), [(["b.0", "b.1"], 3)])


def test_what_is_started_ahead_of_the_first_period_is_started_in_each() -> None:
    """All gathers of the step of two layers at its beginning: the second one's belongs to the period of the first."""
    ops = Layer((1.0, 2.0), 0.5, 4.0, 1, 0, False, False, True).ops(2)
    gathers = [op for op in ops if op.op == "b.1.w" and op.transfer and "gather" in op.transfer.name]
    early = [op for op in gathers if not op.waits]
    moved = [ops[0], *early, *(op for op in ops[1:] if op not in early)]
    found = with_repeated_layers(moved, Layers({}), [(["b.0", "b.1"], 3)], {"b.0.w", "b.1.w"})
    assert found is not None and len(found) == len(ops) + 3 * (len(ops) - 2) // 2
    assert Counter(op.waits for op in found if op.transfer) == {True: 10, False: 10}


def test_layers_without_kernels_and_such_as_share_their_sums_have_no_period() -> None:
    ops = Layer((1.0,), 0.5, 4.0, 0, 0, False, False, False).ops(2)
    assert with_repeated_layers(ops, Layers({}), [(["b.0", "b.9"], 3)], {"b.0.w", "b.1.w"}) is None
    shared = [op for op in ops if op.transfer is None or op.transfer.name != "all_reduce b.1.w"]
    assert with_repeated_layers(shared, Layers({}), [(["b.0", "b.1"], 3)], {"b.0.w", "b.1.w"}) is None


@pytest.mark.parametrize(
    "force",
    [{"*": "dp"}, {"*": "dp", "blocks.[0-4]": "zero2"}, {"*": "zero3", "blocks.[0-4]": "tensor:8"}],
    ids=["one stretch", "two of one degree", "two degrees"],
)
def test_a_plan_tells_its_time_where_gradients_pile_up(force: dict[str, str]) -> None:
    """Of two layers hardly anything hides: a fifth more was told than the whole step takes."""
    slow = sw.Cluster.preset("rtx3090-pcie", nodes=4)
    config = GPTConfig(vocabulary=512, context=512, layers=12, heads=16, width=1024)
    with torch.device("meta"):
        tokens = torch.zeros(64, config.context, dtype=torch.long)
        model = GPT(config)
    plain = {"micro_batches": 1, "sub_batches": 1, "buckets": False, "memory_limit": 10**13}
    compiler = Compiler(model, slow, (tokens, tokens), sw.Options(force=force, **plain), None)
    plan = compiler.plan()
    timeline = compiler.lowering.timeline(compiler.lower(plan))
    assert timeline.exposed_by_cause()["gradient"] > 0.05 * timeline.step_time
    assert plan.step_time == pytest.approx(timeline.step_time, rel=0.005)
