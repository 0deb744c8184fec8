"""Predicted peak memory is what the allocator measures on real ranks, to the byte but for the optimizer's counters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from shardweave.cost_model.options import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir import RECOMPUTE_MODES, Ablation
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import ALL_CASES
from tests.measured_memory import WAYS, measure_all, prepare, ways_of
from tests.models import ZOO, Case, gpt

ZOO_WAYS = {"gpt": ["zdp", "zero2", "column", "zero1 x2", "zero2 x4"], "mlp": ["planned"]}


@pytest.mark.parametrize("name", ZOO_WAYS)
def test_the_predicted_peak_is_the_measured_one(name: str, pool: WorkerPool) -> None:
    check(ZOO[name], ways_of(ZOO_WAYS[name]), pool)


def check(case: Case, ways: Mapping[str, Options], pool: WorkerPool) -> None:
    prepared = prepare(case, 2, ways)
    assert [way for way, _, _ in prepared] == [*ways]
    ranks = pool.run(measure_all, case, 2, [plan.to_dict() for _, plan, _ in prepared], nprocs=2, timeout=900.0)
    counters = 4 * len([*case.model().parameters()])  # AdamW counts its steps
    for (way, _, timeline), *figures in zip(prepared, *ranks, strict=True):
        for found in figures:
            assert timeline.peak_memory == pytest.approx(found.peak, rel=0.02), way
            assert sum(timeline.memory.at_rest().values()) + counters == found.rest, way


# -- woven

CONFIG = GPTConfig(vocabulary=256, context=64, layers=4, heads=4, width=64)
"""Of 5 to 20 MB a rank, most of them activations."""


def rows(generator: torch.Generator, size: int) -> dict[str, Tensor]:
    """Enough of them for four sub-batches of two micro-batches on two ranks."""
    return gpt.batch(generator, max(size, 16), CONFIG)


DEEP = Case("deep gpt", partial(gpt.build, CONFIG), rows)
WOVEN = {
    "zdp": Options(sub_batches=2, recompute="fine", buckets=True, operator_slices=4, keep_gathered={"*": 1}),
    "column": Options(sub_batches=2, recompute="full", buckets=True, micro_batches=2),
    "zero1": Options(quantize="zero++", micro_batches=2, sub_batches=1, recompute="none", buckets=True),
    "zero2": Options(micro_batches=2, sub_batches=1, recompute="none", ablation=Ablation(flat_parameter=True)),
}


def woven() -> dict[str, Options]:
    """Some combinations, in which each choice is met beside others; with all cases every one."""
    if not ALL_CASES:
        return {f"{word}, {options.overlap}": replace(options, force=WAYS[word]) for word, options in WOVEN.items()}
    every = itertools.product(("zdp", "zero1", "column"), (1, 2, 4), RECOMPUTE_MODES, (False, True), (1, 2))
    chosen = [
        Options(force=WAYS[word], sub_batches=sub, recompute=mode, buckets=on, micro_batches=micro)
        for word, sub, mode, on, micro in every
    ]
    return {f"{dict(options.force)} x{options.micro_batches}, {options.overlap}": options for options in chosen}


def test_the_predicted_peak_of_a_woven_step_is_the_measured_one(pool: WorkerPool) -> None:
    check(DEEP, woven(), pool)
