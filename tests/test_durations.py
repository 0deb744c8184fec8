"""The short suite and the long one: no test is in neither, and the short one keeps to its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.durations import LONGEST_CASE, SHORT_SECONDS, short_suite

SECONDS = st.dictionaries(
    st.tuples(st.integers(0, 30), st.integers(0, 9)), st.floats(0.1, 400.0, allow_nan=False), min_size=1
)


@given(SECONDS)
def test_the_short_suite_has_a_case_of_every_quick_test_and_keeps_to_its_time(
    drawn: dict[tuple[int, int], float],
) -> None:
    seconds = {f"tests/test_a.py::test_{law}[{case}]": taken for (law, case), taken in drawn.items()}
    short = short_suite(list(seconds), seconds)
    quickest: dict[str, float] = {}
    for name, taken in seconds.items():
        law = name.partition("[")[0]
        quickest[law] = min(taken, quickest.get(law, taken))
    kept = {law: taken for law, taken in quickest.items() if taken <= LONGEST_CASE}
    assert {name.partition("[")[0] for name in short} == set(kept)
    assert all(seconds[name] <= LONGEST_CASE for name in short)
    assert sum(seconds[name] for name in short) <= max(SHORT_SECONDS, sum(kept.values())) + 1e-6


def test_what_has_no_record_is_in_the_short_suite() -> None:
    assert "tests/test_new.py::test_it" in short_suite(["tests/test_new.py::test_it"], {})
