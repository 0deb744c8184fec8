"""AMSP (arXiv 2311.00257): Table V's levels of overlap, and the MFU of several systems on 8 to 1,024 GPUs.

Each row is a forced plan: the factors of its Table IV for parameters, gradients and optimizer states, the number of
micro-batches, and what is not overlapped. A micro-batch is one sequence a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardweave.compiler.plan import Plan
from shardweave.errors import InputError
from shardweave.ir import Grid, Strategy, Traffic
from shardweave.precision import Precision
from shardweave.validation.models import Sizes
from shardweave.validation.published import Paper, table
from shardweave.validation.rows import Row
from shardweave.validation.setting import Setting, captured

MODELS = {
    "LLaMA-7B": Sizes(32, 4096, 32),
    "LLaMA-13B": Sizes(40, 5120, 40),
    "LLaMA-30B": Sizes(60, 6144, 48),  # not LLaMA-33B's 6656: MFU and TGS together give 181e9 FLOPs a token
}
PEAK_FLOPS = 312e12
SEQUENCE, BATCH_SEQUENCES = 4096, 1024
GPUS_PER_NODE = 8
PRECISION = Precision(torch.bfloat16)
"""Gradients are reduced in bfloat16, too."""
BLOCKING: dict[str, tuple[Traffic, ...]] = {
    "L3": (),
    "L2": ("broadcast",),
    "L1": ("broadcast", "reduce"),
    "L0": ("broadcast", "reduce", "scatter", "gather"),
}
"""What each level of overlap leaves open."""
WOVEN: Mapping[str, Mapping[str, Any]] = {
    "AMSP": {"blocking": BLOCKING["L2"]},
    "ZeRO-1": {"blocking": BLOCKING["L0"], "buckets": True},
}
"""Section VI-B's steps. Its text turns the overlap of AMSP's broadcast off. That other systems hide nothing is
calibrated, against the text, which turns their overlap on; ZeRO-1 reduces in buckets (DeepSpeed's, by default)."""
OTHERS: Mapping[str, Any] = {"blocking": BLOCKING["L0"]}


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Table V in tokens a GPU and second, then the MFU that the text gives."""
    factors = {(row["model"], row["approach"]): row for row in table(paper, "amsp", "strategies_table4")}
    recompute = (paper.get("models") or {}).get("recompute", {})
    gpus = (paper.get("overlap_table5") or {}).get("gpus", 64)
    for model, level, count, published in _by_batch(paper):
        name = f"{level}, M={count}"
        setting.progress(f"AMSP Table V: {model} {name}")
        asked = {"micro_batches": count, "recompute": _mode(recompute, model), "blocking": BLOCKING[level]}
        tgs = partial(_tgs, setting, model, gpus, strategy(factors, model, "AMSP", gpus), **asked)
        yield Row.of("AMSP Table V", model, name, "tokens/GPU/s", published, tgs)
    for row in table(paper, "amsp", "end_to_end_text"):
        model, approach, gpus = row["model"], row["approach"], row["gpus"]
        if row.get("mfu") is None or (model, approach) not in factors:
            continue
        setting.progress(f"AMSP MFU: {model} {approach} on {gpus} GPUs")
        asked = {"recompute": _mode(recompute, model), **WOVEN.get(approach, OTHERS)}
        asked["micro_batches"] = BATCH_SEQUENCES // gpus
        mfu = partial(_mfu, setting, model, gpus, strategy(factors, model, approach, gpus), **asked)
        yield Row.of("AMSP MFU, section VI-B", model, f"{approach}, {gpus} GPUs", "MFU", row["mfu"], mfu)


def plan(setting: Setting, model: str, gpus: int, chosen: Strategy, micro_batches: int, **options: Any) -> Plan:
    """The forced plan of one row, every op of it with one strategy."""
    if model not in MODELS:
        raise InputError(f"amsp.yaml: the sizes of {model!r} are not known; known are {', '.join(MODELS)}")
    compiler = captured(MODELS[model], gpus * micro_batches, SEQUENCE, PRECISION)
    cluster = setting.cluster("amsp").fitted(min(GPUS_PER_NODE, gpus), max(1, gpus // GPUS_PER_NODE))
    return setting.plan(compiler, cluster, force={"*": chosen}, micro_batches=micro_batches, sub_batches=1, **options)


def strategy(factors: Mapping[tuple[str, str], Mapping[str, Any]], model: str, approach: str, gpus: int) -> Strategy:
    """The factors of Table IV: R stands for a node's 8 GPUs, N for the nodes; ZeRO++ has parameters twice."""
    if (model, approach) not in factors:
        raise InputError(f"amsp.yaml, strategies_table4: expected a row for {approach} of {model}")
    row, nodes = factors[model, approach], max(1, gpus // GPUS_PER_NODE)
    sizes: dict[object, int] = {"R": min(GPUS_PER_NODE, gpus), "N": nodes}

    def degree(key: str) -> int:
        inside, across = (int(sizes.get(each, each)) for each in row[key])
        return inside * min(across, nodes)

    rest = degree("secondary_p" if "secondary_p" in row else "p")
    return Strategy(Grid(data=gpus), rest, states=degree("os"), gradients=max(rest, degree("g")))


def _mode(recompute: Mapping[str, bool], model: str) -> str:
    return "full" if recompute.get(model) else "none"


def _tgs(setting: Setting, model: str, gpus: int, chosen: Strategy, **asked: Any) -> float:
    """Tokens a GPU and second."""
    found = plan(setting, model, gpus, chosen, **asked)
    return found.micro_batches * SEQUENCE / found.step_time


def _mfu(setting: Setting, model: str, gpus: int, chosen: Strategy, **asked: Any) -> float:
    """The part of the peak that the model's own products take, causal attention counted in full."""
    tgs = _tgs(setting, model, gpus, chosen, **asked)
    return tgs * MODELS[model].flops_per_token(SEQUENCE) / PEAK_FLOPS


def _by_batch(paper: Paper) -> list[tuple[str, str, int, float]]:
    """Model, level, number of micro-batches and TGS of each cell of Table V; those of one batch follow each other."""
    cells = []
    for row in table(paper, "amsp", "overlap_table5"):
        if row["level"] not in BLOCKING:
            raise InputError(f"amsp.yaml, overlap_table5: level {row['level']!r} is none of {', '.join(BLOCKING)}")
        given = zip(paper["overlap_table5"]["M"], row["tgs"], strict=True)
        cells += [(row["model"], row["level"], count, tgs) for count, tgs in given if tgs is not None]
    return sorted(cells, key=lambda cell: (cell[0], cell[2]))
