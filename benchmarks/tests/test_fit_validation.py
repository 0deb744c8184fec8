"""Fits of a cluster's constants: what clusters share is one constant, and a left-out group is not fitted to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import fit_validation
from benchmarks.fit_validation import print_left_out
from shardweave.validation import CalibratedCluster, Constant, Row


def test_constants_of_several_clusters_are_fitted_as_one() -> None:
    """Those with one range and source; each cluster takes its own besides."""
    described = {name: CalibratedCluster.of(name) for name in fit_validation.FITTED["oases"].clusters}
    constants, owners = fit_validation.constants_of(described, ["levels.gpu.efficiency", "device.matmul_efficiency"])
    assert sorted(map(len, owners.values())) == [1, 1, 2]
    values = {constant.key: 0.5 for constant in constants}
    values["oases-pcie:levels.gpu.efficiency"] = 0.3
    pcie, nvlink = (fit_validation.with_values(described[n], n, values, owners) for n in ("oases-pcie", "oases-nvlink"))
    assert (pcie.levels[0].efficiency, nvlink.levels[0].efficiency) == (0.3, 0.5)
    assert pcie.device.matmul_efficiency == nvlink.device.matmul_efficiency == 0.5


def test_what_is_left_out_is_not_fitted_to(capsys: pytest.CaptureFixture[str]) -> None:
    """Two models whose rows ask for speeds of 1 and 2: each fit meets the one that it is given and misses the other."""
    speed = Constant("speed", 1.4, 0.5, 3.0, "", True)

    def rows(values: Any) -> list[Row]:
        return [Row("t", model, "", "", published, values["speed"]) for model, published in (("7B", 1.0), ("30B", 2.0))]

    print_left_out([speed], rows, lambda row: row.group)
    _, _, without_7b, without_30b = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| 7B \| 0\.\d % \| (9[6-9]|100)\.\d % \|", without_7b)
    assert re.fullmatch(r"\| 30B \| 0\.\d % \| (49|50)\.\d % \|", without_30b)
