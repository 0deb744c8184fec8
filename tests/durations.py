"""How long each test takes, as recorded, and the short suite: of every test some cases, and all of the quick tests.

`tests/durations.json` has the seconds of every test that takes more than `QUICK`; ``make record`` writes it anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
QUICK = 0.25
"""Seconds up to which a test is not recorded."""
UNRECORDED = 0.03
"""Seconds that a test is taken to need that has no record: about what the quick ones need on average."""
SHORT_SECONDS = 600.0
"""Of all tests of the short suite together, but for the quickest case of each: with ruff and mypy less than ten minutes
on two cores."""
LONGEST_CASE = 4.0
"""Seconds from which on not even one case of a test is in the short suite."""


def recorded() -> dict[str, float]:
    """Seconds by test, as pytest names it."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def short_suite(names: Sequence[str], seconds: Mapping[str, float]) -> frozenset[str]:
    """The tests that the short suite runs: of each test its quickest cases, for the same time each.

    >>> names = ["a.py::test_law[1]", "a.py::test_law[2]", "a.py::test_law[3]", "b.py::test_all"]
    >>> seconds = {"a.py::test_law[1]": 300.0, "a.py::test_law[2]": 3.0, "a.py::test_law[3]": 900.0}
    >>> sorted(short_suite(names, seconds))
    ['a.py::test_law[2]', 'b.py::test_all']
    """
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name in names:
        cases[name.partition("[")[0]].append((seconds.get(name, UNRECORDED), name))
    groups = [sorted(group) for group in cases.values()]

    def chosen(budget: float) -> list[tuple[float, str]]:
        """Of each test its quickest cases, in `budget` seconds together; at least one."""
        found = []
        for group in groups:
            spent = 0.0
            for case in group:
                if case[0] > LONGEST_CASE or (spent and spent + case[0] > budget):
                    break
                found.append(case)
                spent += case[0]
        return found

    low, high = 0.0, max((sum(each for each, _ in group) for group in groups), default=0.0)
    if sum(each for each, _ in chosen(high)) <= SHORT_SECONDS:
        low = high
    while high - low > 0.01:
        middle = (low + high) / 2
        if sum(each for each, _ in chosen(middle)) <= SHORT_SECONDS:
            low = middle
        else:
            high = middle
    return frozenset(name for _, name in chosen(low))


class Recorder:
    """A plugin of pytest that notes how long each test takes, fixtures included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(taken, 1) for name, taken in sorted(self.seconds.items()) if taken > QUICK}
        FILE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
