"""OSDP's mixtures of DP and ZDP, planned under its memory limits."""

from __future__ import annotations

import pytest

from benchmarks import measure_osdp
from shardweave.validation import Setting, osdp


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of batch size is two sequences a GPU."""
    monkeypatch.setattr(osdp, "SEQUENCES", 2)


def test_a_mixture_is_as_fast_as_fsdp_where_dp_does_not_fit() -> None:
    """Between the memory that ZDP and DP take, some ops are DP; what the planner gains it gains within the limit."""
    (roomy,) = measure_osdp.plans(Setting(), (2048, 1024), limits=(8,)).values()
    assert list(roomy) == ["DP", "FSDP", "mixture"]
    limit = (roomy["DP"].peak_memory + roomy["FSDP"].peak_memory) / 2 / 2**30
    (tight,) = measure_osdp.plans(Setting(), (2048, 1024), limits=(limit,)).values()
    assert list(tight) == ["FSDP", "mixture"]
    mixture = tight["mixture"]
    assert 0 < measure_osdp.share(mixture) < 1 and mixture.peak_memory <= limit * 2**30
    assert roomy["mixture"].step_time <= mixture.step_time < tight["FSDP"].step_time == roomy["FSDP"].step_time
    assert {choice.strategy.rest for choice in mixture.choices.values()} == {1, 8}
