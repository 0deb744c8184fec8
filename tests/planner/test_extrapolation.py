"""What a layer takes of a step, as each of those takes it that were left out."""

from __future__ import annotations

from shardweave.cost_model import Timeline
from shardweave.cost_model.memory import Change, MemoryCurve
from shardweave.cost_model.timeline import COMPUTE, Event
from shardweave.planner.search.extrapolation import Layers, StepSeconds, mean_seconds, memory_with_repeated_layers

LAYERS = Layers({"add_7": "blocks.1"})


def event(op: str, seconds: float, kind: str = "compute", stream: str = COMPUTE) -> Event:
    return Event(op, stream, 0.0, seconds, "forward", kind, op=op)


def test_a_layer_takes_its_compute_and_what_is_waited_for_it() -> None:
    curve = MemoryCurve.of([], 1.0)
    events = (
        event("blocks.1.up", 2.0),
        event("add_7", 1.0),
        event("blocks.2.up", 4.0),
        event("blocks.2.up", 0.5, "wait"),
        event("blocks.2.up", 9.0, "all_gather", "node"),
        event("head", 7.0),
    )
    timeline = Timeline("cluster", events, (COMPUTE, "node"), 20.0, curve)
    assert mean_seconds(timeline, LAYERS, ["blocks.1", "blocks.2"]) == StepSeconds(3.5, 0.25)
    assert mean_seconds(timeline, LAYERS, ["blocks.2"]).times(2) == StepSeconds(8.0, 1.0)


def test_what_lasts_is_held_once_more_for_each_layer_that_is_left_out() -> None:
    changes = [
        Change(0.0, "parameters", 10, "blocks.1.weight (p)"),
        Change(0.0, "parameters", 10, "blocks.2.weight (p)"),
        Change(1.0, "working", 100, "blocks.1.up (mm)"),
        Change(1.0, "saved", 3, "blocks.1.up (mm)"),
        Change(2.0, "saved", 3, "blocks.2.up (mm)"),
        Change(3.0, "working", -100, "blocks.1.up (mm)"),
    ]
    repeated = [(["blocks.1", "blocks.2"], 5), (["head"], 0)]
    curve = memory_with_repeated_layers(MemoryCurve.of(changes, 4.0), LAYERS, repeated, ())
    # what only one of the two layers holds is on its way
    assert curve.total.tolist() == [0, 10, 20 + 5 * 10, 170, 173, 176 + 5 * 3, 91, 91]
    assert curve.peak == 191 and curve.at_peak() == {"working": 100, "parameters": 70, "saved": 21}


def test_what_the_last_layer_but_one_leaves_to_the_next_is_held_for_each_that_is_left_out() -> None:
    """The last one's neighbour keeps another value in its place."""
    changes = [
        Change(0.0, "saved", 1, "blocks.1.up (mm)"),
        Change(1.0, "saved", 4, "blocks.1 (add)"),
        Change(2.0, "saved", 1, "blocks.2.up (mm_1)"),
        Change(3.0, "saved", -1, "blocks.2.up (mm_1)"),
        Change(4.0, "saved", -4, "blocks.1 (add)"),
    ]
    curve = memory_with_repeated_layers(MemoryCurve.of(changes, 5.0), LAYERS, [(["blocks.1", "blocks.2"], 5)], {"add"})
    # the backward has not come to those left out when it has passed the last layer
    assert curve.total.tolist() == [0, 1, 5 + 5 * 4, 6 + 5 * 5, 5 + 5 * 5, 1 + 5 * 1, 1 + 5 * 1]


def test_layers_that_are_left_out_hold_their_gradients_while_the_first_layer_is_computed() -> None:
    """The backward has passed them then: gradients pile up that are more than what the forward saved."""
    changes = [
        Change(0.0, "saved", 3, "blocks.1.up (mm)"),
        Change(1.0, "saved", 3, "blocks.2.up (mm_1)"),
        Change(2.0, "working", 100, "blocks.2.up (mm_2)"),
        Change(3.0, "saved", -3, "blocks.2.up (mm_1)"),
        Change(3.0, "gradients", 50, "blocks.2.up.weight (mm_2)"),
        Change(3.0, "working", -100, "blocks.2.up (mm_2)"),
        Change(4.0, "working", 100, "blocks.1.up (mm_3)"),
        Change(5.0, "saved", -3, "blocks.1.up (mm)"),
        Change(5.0, "gradients", 50, "blocks.1.up.weight (mm_3)"),
        Change(5.0, "working", -100, "blocks.1.up (mm_3)"),
    ]
    curve = memory_with_repeated_layers(MemoryCurve.of(changes, 6.0), LAYERS, [(["blocks.1", "blocks.2"], 5)], ())
    last = [106 + 5 * 3, 103 + 5 * 3, 153 + 5 * 3, 53 + 5 * 3]
    first = [153 + 5 * 50, 150 + 5 * 50, 200 + 5 * 50, 100 + 5 * 50]
    assert curve.total.tolist() == [0, 3, 6 + 5 * 3, *last, *first, 100 + 5 * 50]
    assert curve.at_peak() == {"gradients": 350, "working": 100}
