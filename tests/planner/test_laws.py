"""Laws of planning, on 200 draws: more choices, memory or bandwidth never make a plan slower, nor impossible.

A draw is a step, a cluster and options (`drawn`). Some draws break a law, by so much as is listed here: the program and
the schedule of the generated step are not exact, so a plan that would be faster may not be proposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest

import shardweave as sw
from tests.planner.drawn import Drawn, scaled
from tests.planner.planners import Planner

WITHIN = 1.005
"""The ratio by which a plan may be slower than another before a law is said to be broken."""

NUM_DRAWS = {"choices": 100, "memory": 50, "bandwidth": 50}
"""By law."""

KNOWN = {("choices", 51): 1.025}
"""Draws that break a law, by its name and the seed, and by which ratio at most. Its products run in slices."""


def planned(planner: Planner, options: Mapping[str, Any], limit: int | None = None) -> sw.Plan | None:
    """The plan; None where none fits, or the step cannot be cut as the options say."""
    try:
        return planner.plan(**options, **({} if limit is None else {"memory_limit": limit}))
    except sw.ParallelError:
        return None


drawn_of = lru_cache(maxsize=1)(Drawn.of)


@lru_cache(maxsize=2)
def planned_without_limit(seed: int, fewer: bool) -> sw.Plan | None:
    """The plan of a draw in all memory that there is, which several laws compare."""
    drawn = drawn_of(seed)
    return planned(drawn.planner, drawn.fewer if fewer else drawn.options)


def compared(law: str, seed: int) -> tuple[sw.Plan | None, sw.Plan | None]:
    """The plan that a law says is at least as fast, and the other one."""
    drawn = drawn_of(seed)
    options = drawn.options if law == "choices" else drawn.fewer
    more, limit = planned_without_limit(seed, law != "choices"), None
    if more is not None and (law == "memory" or (law == "choices" and drawn.memory_part is not None)):
        limit = int((drawn.memory_part or 0.9) * more.peak_memory)
    if law == "memory":
        return more, None if more is None else planned(drawn.planner, options, limit)
    if law == "bandwidth":
        return planned(drawn.planner.on(scaled(drawn.cluster, drawn.factors)), options), more
    if limit is None:
        return more, planned_without_limit(seed, True)
    return planned(drawn.planner, options, limit), planned(drawn.planner, drawn.fewer, limit)


@pytest.mark.parametrize(
    ("law", "seed"),
    [(law, seed) for seed in range(max(NUM_DRAWS.values())) for law, count in NUM_DRAWS.items() if seed < count],
)
def test_more_never_makes_a_plan_slower(law: str, seed: int) -> None:
    more, less = compared(law, seed)
    if less is not None:
        assert more is not None, "a plan fits with less, but none with more"
        assert more.step_time <= KNOWN.get((law, seed), WITHIN) * less.step_time


def test_the_same_inputs_give_the_same_plan() -> None:
    first, second = (Drawn.of(3) for _ in range(2))
    plans = [planned(each.planner, each.options) for each in (first, second)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].choices == plans[1].choices and plans[0].overlap == plans[1].overlap
