"""AMSP (arXiv 2311.00257): Table V's levels of overlap, and the MFU of several systems on 8 to 1,024 GPUs.

Each row is a forced plan: the factors of its Table IV for parameters, gradients and optimizer states, the number of
micro-batches, and what is not overlapped. A micro-batch is one sequence a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from shardweave.compiler.compiler import Compiler
from shardweave.compiler.plan import Plan
from shardweave.cost_model import Cluster
from shardweave.errors import InfeasibleError, InputError
from shardweave.ir import Grid, Strategy, Traffic
from shardweave.options import Options
from shardweave.precision import Precision
from shardweave.validation.clusters import ClusterOf, cluster_of
from shardweave.validation.models import Llama, Sizes
from shardweave.validation.published import Paper, Progress, table
from shardweave.validation.rows import Row

MODELS = {
    "LLaMA-7B": Sizes(32, 4096, 32),
    "LLaMA-13B": Sizes(40, 5120, 40),
    "LLaMA-30B": Sizes(60, 6144, 48),  # not LLaMA-33B's 6656: MFU and TGS together give 181e9 FLOPs a token
}
PEAK_FLOPS = 312e12
SEQUENCE, BATCH_SEQUENCES = 4096, 1024
PRECISION = Precision(torch.bfloat16)
"""Gradients are reduced in bfloat16, too."""
BLOCKING: dict[str, tuple[Traffic, ...]] = {
    "L3": (),
    "L2": ("broadcast",),
    "L1": ("broadcast", "reduce"),
    "L0": ("broadcast", "reduce", "scatter", "gather"),
}
"""What each level of overlap leaves open."""


def rows(paper: Paper, progress: Progress, cluster_of: ClusterOf = cluster_of) -> Iterator[Row]:
    """Table V in tokens a GPU and second, then the MFU that the text gives."""
    cluster = cluster_of("amsp")
    factors = {(row["model"], row["approach"]): row for row in table(paper, "amsp", "strategies_table4")}
    recompute = (paper.get("models") or {}).get("recompute", {})
    gpus = (paper.get("overlap_table5") or {}).get("gpus", 64)
    for model, level, micro_batches, published in _by_batch(paper):
        name = f"{level}, M={micro_batches}"
        progress(f"AMSP Table V: {model} {name}")
        strategy = _strategy(factors, model, "AMSP", gpus)
        found = plan(cluster, model, gpus, micro_batches, strategy, recompute.get(model), BLOCKING[level])
        yield Row("AMSP Table V", model, name, "tokens/GPU/s", published, _tgs(found))
    for row in table(paper, "amsp", "end_to_end_text"):
        model, approach, gpus = row["model"], row["approach"], row["gpus"]
        if row.get("mfu") is None or (model, approach) not in factors:
            continue
        progress(f"AMSP MFU: {model} {approach} on {gpus} GPUs")
        strategy = _strategy(factors, model, approach, gpus)
        found = plan(cluster, model, gpus, BATCH_SEQUENCES // gpus, strategy, recompute.get(model))
        tgs, name = _tgs(found), f"{approach}, {gpus} GPUs"
        mfu = None if tgs is None else tgs * MODELS[model].flops_per_token(SEQUENCE) / PEAK_FLOPS
        yield Row("AMSP MFU, section VI-B", model, name, "MFU", row["mfu"], mfu)


def plan(
    cluster: Cluster,
    model: str,
    gpus: int,
    micro_batches: int,
    strategy: Strategy,
    recompute: bool | None,
    blocking: tuple[Traffic, ...] = (),
) -> Plan | None:
    """The forced plan of one row; None where it does not fit the device."""
    if model not in MODELS:
        raise InputError(f"amsp.yaml: the sizes of {model!r} are not known; known are {', '.join(MODELS)}")
    options = Options(
        force={"*": strategy},
        memory_limit=cluster.device.memory,
        precision=PRECISION,
        micro_batches=micro_batches,
        sub_batches=1,
        recompute="full" if recompute else "none",
        keep_gathered=False,
        buckets=False,
        blocking=blocking,
    )
    try:
        return _captured(model, gpus * micro_batches).with_(cluster.fitted(8, gpus // 8), options).plan()
    except InfeasibleError:
        return None


@lru_cache(maxsize=1)
def _captured(model: str, sequences: int) -> Compiler:
    """Captured once for the rows that differ in their plans alone."""
    with torch.device("meta"):
        built, tokens = Llama(MODELS[model]), torch.zeros(sequences, SEQUENCE, dtype=torch.long)
    return Compiler(built, Cluster.local(1), (tokens, tokens), Options(precision=PRECISION), None)


def _by_batch(paper: Paper) -> list[tuple[str, str, int, float]]:
    """Model, level, number of micro-batches and TGS of each cell of Table V; those of one batch follow each other."""
    cells = []
    for row in table(paper, "amsp", "overlap_table5"):
        if row["level"] not in BLOCKING:
            raise InputError(f"amsp.yaml, overlap_table5: level {row['level']!r} is none of {', '.join(BLOCKING)}")
        given = zip(paper["overlap_table5"]["M"], row["tgs"], strict=True)
        cells += [(row["model"], row["level"], count, tgs) for count, tgs in given if tgs is not None]
    return sorted(cells, key=lambda cell: (cell[0], cell[2]))


def _tgs(found: Plan | None) -> float | None:
    """Tokens a GPU and second."""
    return None if found is None else found.micro_batches * SEQUENCE / found.step_time


def _strategy(factors: Mapping[tuple[str, str], Mapping[str, Any]], model: str, approach: str, gpus: int) -> Strategy:
    """The factors of Table IV: R stands for a node's 8 GPUs, N for the nodes; ZeRO++ has parameters twice."""
    if (model, approach) not in factors:
        raise InputError(f"amsp.yaml, strategies_table4: expected a row for {approach} of {model}")
    row, nodes = factors[model, approach], gpus // 8
    sizes: dict[object, int] = {"R": min(8, gpus), "N": nodes}

    def degree(key: str) -> int:
        inside, across = (sizes.get(each, each) for each in row[key])
        return prod((int(inside), min(int(across), nodes)))

    rest = degree("secondary_p" if "secondary_p" in row else "p")
    return Strategy(Grid(data=gpus), rest, states=degree("os"), gradients=max(rest, degree("g")))
