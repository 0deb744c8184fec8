"""What docs/models.md promises of models holds."""

from __future__ import annotations

import pytest

import shardweave as sw
from benchmarks.measure_models import SLOWER, Measured, local
from tests.models import TODAY


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("cnn", local(8)), ("gpt2", local(4)),  # of the others, latencies make the planner leave a part replicated
        ("cnn", local(8, SLOWER)), ("gpt2", local(8, SLOWER)), ("mixtral", local(8, SLOWER)),
    ],
)  # fmt: skip
def test_nothing_is_replicated_by_the_planners_choice(name: str, cluster: sw.Cluster) -> None:
    """On devices with little arithmetic, whatever the planner leaves replicated is what rules do not allow."""
    case = TODAY[name]
    compiler = Measured.of(case.model(), case.batch(0), cluster)
    found = compiler.shared(compiler.plan())
    assert 0.99 <= found.share <= 1.0, found.alike
