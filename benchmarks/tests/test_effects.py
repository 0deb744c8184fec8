"""One effect left out at a time: each leaves out what it says, and its rows are those of the paper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import measure_validation
from benchmarks.measure_validation import EFFECTS
from shardweave.cost_model import collective_seconds
from shardweave.validation import CalibratedCluster, memory_and_traffic


def test_a_group_alone_has_all_links_of_its_node() -> None:
    """Four adapters of one GPU each, or four that eight share: one device gets all; inside a node nothing changes."""
    alone = EFFECTS["sharing of a node's NICs"].cluster
    for name in ("axonn", "amsp"):
        cluster = CalibratedCluster.of(name).cluster
        assert alone(cluster).levels[-1].bandwidth == 100e9
        assert alone(cluster).levels[-1].shared_bandwidth is None
        assert alone(cluster).levels[0] == cluster.levels[0]


@pytest.mark.parametrize("effect", ["sharing of a node's NICs", "latency of collectives"])
def test_collectives_take_less_without(effect: str) -> None:
    cluster = CalibratedCluster.of("axonn").cluster.fitted(4, 4)
    axes = cluster.mesh().axes
    with_, without = (
        collective_seconds("all_gather", 1e8, axes[-2:], c) for c in (cluster, EFFECTS[effect].cluster(cluster))
    )
    assert without < with_


def test_a_figure_has_the_tables_that_an_effect_changes() -> None:
    """A bar an effect, beside the table as it is."""
    figure = measure_validation.drawn(
        {"V": {"nothing": 0.02, "latency": 0.3, "sharing": 0.1}, "same": {"nothing": 0.0}}
    )
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([30.0, 10.0])
    assert axes.get_title() == "V" and list(axes.lines[0].get_xdata()) == [2.0, 2.0]


def test_the_command_prints_a_row_an_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """States are 16 bytes with Adam, 8 without its moments; no effect of the machine changes them."""
    paper: dict[str, Any] = {"clusters": {"one": {"gpus": 8}}}
    (tmp_path / "osdp.yaml").write_text(yaml.safe_dump(paper))
    figure = tmp_path / "effects.png"
    few = ("nothing left out", "latency of collectives", "optimizer's moments")
    monkeypatch.setattr(measure_validation, "EFFECTS", {name: EFFECTS[name] for name in few})
    monkeypatch.setattr(sys, "argv", ["measure_validation", str(tmp_path), "osdp", "--figure", str(figure)])
    measure_validation.main()
    assert figure.exists()
    _, _, *rows = capsys.readouterr().out.splitlines()
    errors = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[2] for row in rows}
    assert tuple(errors) == few
    assert {name: error for name, error in errors.items() if error != "0.0 %"} == {"optimizer's moments": "50.0 %"}
    assert memory_and_traffic.BYTES_PER_PARAMETER == 16
