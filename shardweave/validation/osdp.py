"""OSDP (arXiv 2209.13258): the profile of a transformer layer that its authors' code carries, in seconds and MB.

What is *stated* by the authors' code (Youhe-Jiang/IJCAI2023-OptimalShardedDataParallel on GitHub):

- `profiler_output.py` has the two tables. The columns are the levels of `osdp_model.py`: the linear layers of attention
  (levels 1 and 3), of the perceptron (2 and 3), or none (0) are wrapped by fairscale's FSDP one by one. The whole model
  is wrapped, too. All parameters outside of inner wrappers are one flat parameter: its shard is gathered once a step,
  and its gradient is reduce-scattered at the end. So "DP" moves as much as data parallelism, with sharded states and
  gradients: ZeRO-2, as a flat parameter.
- The training scripts run minGPT in float32 with Adam on 8 GPUs, on sums of two numbers: sequences of 6 tokens, 96 of
  them for each unit of batch size; MB are 2^20 bytes. Gradients are never cleared: each step adds to those that there
  are. In memory that is the second of two micro-batches.
- `scheduler.py` takes rows 1 to 3 as batch sizes 1 to 3; for each it picks a level a layer, by a knapsack over MB that
  minimises the sum of seconds, and of the batch sizes the one whose step is shortest, not the one fastest a sample.

What is *inferred* from the figures, as nothing says it: that the hardware is the paper's server of 8 TITAN RTX; that
row i has i units of 576 tokens a GPU (activations grow by 16.5 floats a token and feature a row); that row 0 has one
sequence and recomputes, as it holds no activations and ZDP takes twice as long as DP instead of 1.5 times; that memory
is what a layer adds to several, where several fit: by their digits, the figures are means over 12 layers of hidden size
1024, over 2 of 4096, and of one of 8192.

What is *calibrated*: compute waits for what is scattered, and one parameter is gathered ahead of its use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import shardweave as sw
from shardweave.ir import Traffic
from shardweave.validation.rows import Paper, Row
from shardweave.validation.setting import MinGPTSizes, Setting, captured, per_layer_increase

GPUS = 8
SEQUENCE, SEQUENCES = 6, 96
"""Tokens in a sequence, and sequences per GPU in one unit of batch size."""
ATTENTION, PERCEPTRON = "blocks.*.attn.*", "blocks.*.mlp.*"
LEVELS: Mapping[str, Sequence[str]] = {
    "DP": (),
    "attention ZDP": (ATTENTION,),
    "MLP ZDP": (PERCEPTRON,),
    "all ZDP": (ATTENTION, PERCEPTRON),
}
"""The columns: the modules of a layer with ZDP. All others are in the flat parameter of the whole model."""
BLOCKING: tuple[Traffic, ...] = ("broadcast", "reduce", "scatter")
OVERLAP: Mapping[str, Any] = {
    "sub_batches": 1,
    "max_prefetch": 1,
}


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Seconds and memory of each cell, for one more layer."""
    for hidden, row, level, seconds, megabytes in cells(paper):
        setting.progress(f"OSDP profile: hidden {hidden}, row {row}, {level}")
        cell, group, name = (setting, hidden, row, level), f"hidden {hidden}", f"{level}, row {row}"
        if seconds is not None:
            yield Row.of("OSDP profile, seconds", group, name, "s", seconds, partial(seconds_of_a_layer, *cell))
        if megabytes is not None:
            yield Row.of("OSDP profile, memory", group, name, "MB", megabytes, partial(megabytes_of_a_layer, *cell))


def seconds_of_a_layer(setting: Setting, hidden: int, row: int, level: str) -> float:
    """The increase of the step time by a second layer."""
    (found,) = per_layer_increase(lambda layers: (plan(setting, layers, hidden, row, level).step_time,), fewest=1)
    return found


def megabytes_of_a_layer(setting: Setting, hidden: int, row: int, level: str) -> float:
    """The increase of the peak memory by a third layer, or by a second one if three do not fit."""

    def figures(layers: int) -> tuple[float]:
        # As simulated: a plan's own peak is no less than the program's count, which rounds up
        return (plan(setting, layers, hidden, row, level, steps=2).timeline().peak_memory / 2**20,)

    try:
        (found,) = per_layer_increase(figures)
    except sw.InfeasibleError:
        (found,) = per_layer_increase(figures, fewest=1)
    return found


def plan(setting: Setting, layers: int, hidden: int, row: int, level: str, steps: int = 1) -> sw.Plan:
    """The forced plan of a cell, with `steps` micro-batches."""
    compiler = captured(MinGPTSizes(layers, hidden), steps * GPUS * max(1, SEQUENCES * row), SEQUENCE)
    force = {"*": "zero2", **dict.fromkeys(LEVELS[level], "zero3")}
    ablation = sw.Ablation(blocking=BLOCKING, flat_parameter=True, regather_in_recompute=not row)
    options = {"recompute": "none" if row else "full", "ablation": ablation, **OVERLAP}
    return setting.plan(compiler, setting.cluster("osdp-titan"), force=force, micro_batches=steps, **options)


def cells(paper: Paper) -> Iterator[tuple[int, int, str, float | None, float | None]]:
    """Hidden size, row, level, seconds and MB of each cell that has one of the two; the other is then None.

    >>> list(cells({"hidden": [512], "time_s": [[[0.1, None, 0.3]]], "mem_mb": [[[None, None, 40.0]]]}))
    [(512, 0, 'DP', 0.1, None), (512, 0, 'MLP ZDP', 0.3, 40.0)]
    """
    sizes = paper.get("hidden") or []
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise sw.InputError(f"osdp_profile.json, hidden: expected a list of sizes, got {sizes!r}")
    seconds, megabytes = (_table(paper, key, len(sizes)) for key in ("time_s", "mem_mb"))
    for index, hidden in enumerate(sizes):
        for row in range(max(len(seconds[index]), len(megabytes[index]))):
            for level, name in enumerate(LEVELS):
                found = _at(seconds[index], row, level), _at(megabytes[index], row, level)
                if found != (None, None):
                    yield hidden, row, name, *found


def _table(paper: Paper, key: str, sizes: int) -> list[list[list[float | None] | None]]:
    """The table of a key, by hidden size, row and level; empty if the paper has none."""
    table = [rows or [] for rows in _list(key, paper.get(key) or [None] * sizes)]
    if len(table) != sizes:
        expected = f"expected rows for each of {sizes} hidden sizes"
        raise sw.InputError(f"osdp_profile.json, {key}: {expected}, got {len(table)}")
    for cell in [cell for rows in table for row in _list(key, rows) for cell in _list(key, row or [])]:
        if cell is not None and not (isinstance(cell, int | float) and cell > 0):
            raise sw.InputError(f"osdp_profile.json, {key}: expected positive numbers or null, got {cell!r}")
    return table


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise sw.InputError(f"osdp_profile.json, {key}: expected lists by hidden size, row and level, got {value!r}")
    return value


def _at(rows: Sequence[Sequence[float | None] | None], row: int, level: int) -> float | None:
    found = rows[row] if row < len(rows) else None
    return found[level] if found and level < len(found) else None
