"""Figures that a plan has exactly: bytes of states, and volumes between nodes."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.validation import Row, Setting, exact, validate
from shardweave.validation.models import Sizes


def rows(name: str, paper: dict[str, Any]) -> list[Row]:
    return list(validate({name: paper}).rows)


def test_zdp_takes_its_part_of_sixteen_bytes() -> None:
    """OSDP: in float32, parameter, gradient and two moments; to the byte."""
    found = rows("osdp", {"clusters": {"one": {"gpus": 8}, "two": {"gpus": 16}}})
    assert [(row.name, row.predicted) for row in found] == [
        ("DP, 8 GPUs", 16.0), ("ZDP, 8 GPUs", 2.0), ("DP, 16 GPUs", 16.0), ("ZDP, 16 GPUs", 1.0)
    ]  # fmt: skip
    assert all(row.error == 0 for row in found)
    assert exact.state_bytes(Setting(), 8, "zero1") == 16 / 8 + 4  # and the whole parameter while a step runs


def test_mixed_precision_has_sixteen_bytes_too() -> None:
    """AMSP: 2 for the copy, 2 for the gradient, 12 for master and moments: 112 GB for 7 billion parameters."""
    stated = [
        {"model": "LLaMA-7B", "what": "model states, unsharded", "gb": 112},
        {"model": "LLaMA-30B", "peak_gb": 16},
    ]
    (row,) = rows("amsp", {"memory_text": {"rows": stated}})
    assert row.predicted == 112.0 == row.published


def test_zero_3_moves_three_models_between_nodes() -> None:
    """Forward, backward and gradients one each; what no collective quantizes says so; a published 0 is no row."""
    volumes = {
        "zero3": {"fwd_allgather": 1.0, "bwd_allgather": 1.0, "grad_reduce_scatter": 1.0, "total": 3.0},
        "zeropp": {"fwd_allgather_qwZ_int8": 0.5, "bwd_allgather_hpZ": 0.0, "total": 0.75},
    }
    found = rows("zeropp", {"volumes": volumes})
    assert [row.predicted for row in found if row.group == "zero3"] == [1.0, 1.0, 1.0, 3.0]
    assert {row.reason for row in found if row.group == "zeropp"} == {"quantized collectives are not built"}
    moved = exact._crossing(Setting(), Sizes(2, 256, 4), "total")
    assert moved[0] == pytest.approx(3 * moved[1], rel=0.5)  # embeddings are not gathered for the backward
