"""Figures that a plan has exactly: bytes of states, and volumes between nodes."""

from __future__ import annotations

from typing import Any

import pytest

from shardweave.ir.errors import InputError
from shardweave.validation import Row, Setting, memory_and_traffic, validate
from shardweave.validation.setting import Sizes


def rows(name: str, paper: dict[str, Any]) -> list[Row]:
    return list(validate({name: paper}).rows)


def test_zdp_takes_its_part_of_sixteen_bytes() -> None:
    """OSDP: in float32, parameter, gradient and two moments; to the byte."""
    found = rows("osdp", {"clusters": {"one": {"gpus": 8}, "two": {"gpus": 16}}})
    assert [(row.name, row.predicted) for row in found] == [
        ("DP, 8 GPUs", 16.0), ("ZDP, 8 GPUs", 2.0), ("DP, 16 GPUs", 16.0), ("ZDP, 16 GPUs", 1.0)
    ]  # fmt: skip
    assert all(row.error == 0 for row in found)
    # and the whole parameter while a step runs
    assert memory_and_traffic.state_bytes(Setting(), 8, "zero1") == 16 / 8 + 4


def test_mixed_precision_has_sixteen_bytes_too() -> None:
    """AMSP: 2 for the copy, 2 for the gradient, 12 for master and moments: 112 GB for 7 billion parameters."""
    stated = [
        {"model": "LLaMA-7B", "what": "model states, unsharded", "gb": 112},
        {"model": "LLaMA-30B", "peak_gb": 16},
    ]
    (row,) = rows("amsp", {"memory_text": {"rows": stated}})
    assert row.predicted == 112.0 == row.published


def test_what_moves_between_nodes() -> None:
    """Of ZeRO-3 forward, backward and gradients one model each; of ZeRO++ 0.75 in all; a published 0 is no row."""
    volumes = {
        "source": "sec 1.2",
        "zero3": {"fwd_allgather": 1.0, "bwd_allgather": 1.0, "grad_reduce_scatter": 1.0, "total": 3.0},
        "zeropp": {
            "fwd_allgather_qwZ_int8": 0.5, "bwd_allgather_hpZ": 0.0, "grad_a2a_qgZ_int4": 0.25, "total": 0.75,
            "grad_a2a_qgZ_int8": 0.5,
        },
    }  # fmt: skip
    found = rows("zeropp", {"volumes": volumes})
    assert [row.predicted for row in found if row.group == "zero3"] == [1.0, 1.0, 1.0, 3.0]
    assert [row.predicted for row in found if row.group == "zeropp"] == [0.5, 0.25, 0.75, 0.5]


def test_volumes_that_are_not_known_say_so() -> None:
    volumes = {"zeropp": {"rings": 1.0, "grad_int3": 0.2}, "zero4": {"total": 2.0}, "caveat": "a text", "unit": None}
    reasons = [row.reason for row in rows("zeropp", {"volumes": volumes})]
    assert reasons == [
        "no volume is called 'rings': names begin with fwd, bwd, grad, or are 'total'",
        "quantize['gradients'] is 8 or 4 bits, got 3",
        "no system is called 'zero4': built are zero3, zeropp",
    ]


def test_volumes_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(InputError, match=r"zeropp.yaml, volumes: expected a mapping of systems, got \[3.0\]"):
        rows("zeropp", {"volumes": [3.0]})


def test_of_the_whole_model_it_is_about_as_much() -> None:
    moved, weights = memory_and_traffic.node_traffic_of(Setting())(Sizes(2, 256, 4), "zero3", ())
    assert sum(moved.values()) == pytest.approx(3 * weights, rel=0.5)  # embeddings are not gathered for the backward
