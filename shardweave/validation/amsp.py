"""AMSP (arXiv 2311.00257): Table V's levels of overlap, and the MFU of several systems on 8 to 1,024 GPUs.

Each row is a forced plan: the factors of its Table IV for parameters, gradients and optimizer states, the number of
micro-batches, and what is not overlapped. A micro-batch is one sequence a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import shardweave as sw
from shardweave.ir import Traffic
from shardweave.validation.rows import Paper, Row, table
from shardweave.validation.setting import Setting, Sizes, captured, with_deepspeed_host

MODELS = {
    "LLaMA-7B": Sizes(32, 4096, 32),
    "LLaMA-13B": Sizes(40, 5120, 40),
    "LLaMA-30B": Sizes(60, 6144, 48),  # not LLaMA-33B's 6656: MFU and TGS together give 181e9 FLOPs a token
}
PEAK_FLOPS = 312e12
SEQUENCE, BATCH_SEQUENCES = 4096, 1024
GPUS_PER_NODE = 8
PRECISION = sw.Precision(torch.bfloat16)
"""Gradients are also reduced in bfloat16."""
BLOCKING: dict[str, tuple[Traffic, ...]] = {
    "L3": (),
    "L2": ("broadcast",),
    "L1": ("broadcast", "reduce"),
    "L0": ("broadcast", "reduce", "scatter", "gather"),
}
"""The traffic that each level of overlap does not overlap."""
ABLATIONS = {level: sw.Ablation(blocking=kinds, all_reduce_gradients=True) for level, kinds in BLOCKING.items()}
"""Each level, with gradients all-reduced where optimizer states are sharded: Table V says so, and the authors' engine
(InternLM/InternEvo, ``hybrid_zero_optim.py``) and DeepSpeed's ZeRO-1 (``stage_1_and_2.py``,
``use_multi_rank_bucket_allreduce``) do it."""
OVERLAP: Mapping[str, Mapping[str, Any]] = {
    "AMSP": {"ablation": ABLATIONS["L2"]},
    "ZeRO-1": {"ablation": ABLATIONS["L0"], "buckets": True},
}
"""The overlap in section VI-B. Its text turns the overlap of AMSP's broadcast off. Other systems overlap nothing here:
this is calibrated, and contradicts the text, which turns their overlap on. ZeRO-1 reduces in buckets, as DeepSpeed
does by default."""
OTHERS: Mapping[str, Any] = {"ablation": sw.Ablation(blocking=BLOCKING["L0"])}
DEEPSPEED = ("ZeRO-3", "ZeRO++")
"""The systems whose host prepares each gather and scatter (see `with_deepspeed_host`)."""

Factors = Mapping[tuple[str, str], Mapping[str, Any]]
"""The rows of Table IV, by model and approach."""


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Table V in tokens a GPU and second and in MFU, as the two contradict each other; then the MFU of the text."""
    factors = {(row["model"], row["approach"]): row for row in table(paper, "amsp", "strategies_table4")}
    recompute = (paper.get("models") or {}).get("recompute", {})
    yield from _overlap(paper, setting, factors, recompute)
    yield from _end_to_end(paper, setting, factors, recompute)


def _overlap(paper: Paper, setting: Setting, factors: Factors, recompute: Mapping[str, bool]) -> Iterator[Row]:
    gpus = (paper.get("overlap_table5") or {}).get("gpus", 64)
    for model, level, count, published in _by_batch(paper):
        name = f"{level}, M={count}"
        setting.progress(f"AMSP Table V: {model} {name}")
        asked = {"micro_batches": count, "recompute": _mode(recompute, model), "ablation": ABLATIONS[level]}
        tgs = partial(_tgs, setting, factors, model, "AMSP", gpus, **asked)
        row = Row.of("AMSP Table V", model, name, "tokens/GPU/s", published["tgs"], tgs)
        yield row
        if published["mfu"] is not None:
            mfu = None if row.predicted is None else row.predicted * _mfu_per_tgs(model)
            yield replace(row, table="AMSP Table V, MFU", unit="MFU", published=published["mfu"], predicted=mfu)


def _end_to_end(paper: Paper, setting: Setting, factors: Factors, recompute: Mapping[str, bool]) -> Iterator[Row]:
    for row in table(paper, "amsp", "end_to_end_text"):
        model, approach, gpus, published = row["model"], row["approach"], row["gpus"], row.get("mfu")
        if published is None:
            continue
        title = "AMSP MFU, section VI-B", model, f"{approach}, {gpus} GPUs", "MFU", published
        setting.progress(f"AMSP MFU: {model} {approach} on {gpus} GPUs")
        asked = {"recompute": _mode(recompute, model), **OVERLAP.get(approach, OTHERS)}
        asked["micro_batches"] = max(1, BATCH_SEQUENCES // gpus)
        asked["system"] = with_deepspeed_host if approach in DEEPSPEED else None
        mfu = partial(_mfu, setting, factors, model, approach, gpus, **asked)
        yield Row.of(*title, mfu)


def plan(setting: Setting, model: str, gpus: int, chosen: sw.Strategy, micro_batches: int, **options: Any) -> sw.Plan:
    """The forced plan of one row, with one strategy for all ops."""
    if model not in MODELS:
        raise sw.InputError(f"amsp.yaml: the sizes of {model!r} are not known; known are {', '.join(MODELS)}")
    compiler = captured(MODELS[model], gpus * micro_batches, SEQUENCE, PRECISION)
    cluster = setting.cluster("amsp").fitted(min(GPUS_PER_NODE, gpus), max(1, gpus // GPUS_PER_NODE))
    return setting.plan(compiler, cluster, force={"*": chosen}, micro_batches=micro_batches, sub_batches=1, **options)


def strategy(factors: Factors, model: str, approach: str, gpus: int) -> sw.Strategy:
    """The strategy of a row of Table IV. R is the 8 GPUs of a node, N the number of nodes; ZeRO++ has two shardings."""
    if (model, approach) not in factors:
        raise sw.InputError(f"amsp.yaml, strategies_table4: expected a row for {approach} of {model}")
    row, nodes = factors[model, approach], max(1, gpus // GPUS_PER_NODE)
    sizes: dict[object, int] = {"R": min(GPUS_PER_NODE, gpus), "N": nodes}

    def degree(key: str) -> int:
        inside, across = (int(sizes.get(each, each)) for each in row[key])
        return inside * min(across, nodes)

    rest = degree("secondary_p" if "secondary_p" in row else "p")
    return sw.Strategy(sw.Grid(data=gpus), rest, states=degree("os"), gradients=max(rest, degree("g")))


def _mode(recompute: Mapping[str, bool], model: str) -> str:
    return "full" if recompute.get(model) else "none"


def _tgs(setting: Setting, factors: Factors, model: str, approach: str, gpus: int, **asked: Any) -> float:
    """Tokens per GPU and second."""
    found = plan(setting, model, gpus, strategy(factors, model, approach, gpus), **asked)
    return found.micro_batches * SEQUENCE / found.step_time


def _mfu(setting: Setting, factors: Factors, model: str, approach: str, gpus: int, **asked: Any) -> float:
    """Model FLOPs utilisation, with causal attention counted in full."""
    return _tgs(setting, factors, model, approach, gpus, **asked) * _mfu_per_tgs(model)


def _mfu_per_tgs(model: str) -> float:
    return MODELS[model].flops_per_token(SEQUENCE) / PEAK_FLOPS


def _by_batch(paper: Paper) -> list[tuple[str, str, int, Mapping[str, Any]]]:
    """Model, level, number of micro-batches, TGS and MFU of each cell of Table V that has a TGS, in order of the batch.
    """
    cells = []
    for row in table(paper, "amsp", "overlap_table5"):
        if row["level"] not in BLOCKING:
            raise sw.InputError(f"amsp.yaml, overlap_table5: level {row['level']!r} is none of {', '.join(BLOCKING)}")
        counts = paper["overlap_table5"]["M"]
        mfus = row.get("mfu") or [None] * len(counts)
        given = zip(counts, row["tgs"], mfus, strict=True)
        cells += [(row["model"], row["level"], n, {"tgs": t, "mfu": m}) for n, t, m in given if t is not None]
    return sorted(cells, key=lambda cell: (cell[0], cell[2]))
