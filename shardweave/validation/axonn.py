"""AxoNN (arXiv 2305.13525): Table III, the part of the peak that GPTs reach on Perlmutter, and section IV's ablation.

ZeRO-3's cells are forced plans. The paper does not print AxoNN's grids. Its authors try the few grids that their
communication model ranks first, and so does this module: `ranking` orders grids by a cluster's links, or by the table
of bandwidths of the authors' program. Megatron-LM's and DeepSpeed's cells use pipeline parallelism, which this
compiler does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

import shardweave as sw
from shardweave.cost_model import collective_seconds
from shardweave.demo import GPTConfig
from shardweave.ir import Traffic
from shardweave.validation.rows import Paper, Row, table
from shardweave.validation.setting import Setting, captured, with_deepspeed_host

SEQUENCE, VOCABULARY = 2048, 50304  # GPT-2's, padded to a multiple of 128
PEAK_FLOPS = 312e12
GPUS_PER_NODE = 4
PRECISION = sw.Precision(torch.bfloat16)
SIMULATED_GRIDS = 4
"""The number of grids that are simulated, those that the communication model ranks first."""
MAX_MICRO_BATCH_SEQUENCES = 8
"""The largest number of sequences for each GPU in a micro-batch of ZeRO-3. Not published: calibrated."""
ZERO3_BLOCKING: tuple[Traffic, ...] = ("gather", "scatter")
"""The traffic that ZeRO-3 does not overlap. Not published: calibrated."""
ABLATION_BLOCKING: Mapping[str, tuple[Traffic, ...]] = {
    "overlap_all_reduce": ("gather", "scatter"),
    "overlap_reduce_scatter": ("gather",),
    "overlap_all_gather": (),
    "cache_all_gather": (),
}
"""The traffic that is not overlapped after each step of section IV; before the first, also activations."""

Bandwidths = Sequence[Mapping[str, Any]]
"""Rows of the authors' table: GiB/s of a group of ``my`` devices at distance ``ip``."""


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Table III in parts of the peak, recomputation counted; then section IV's steps, as parts of a batch's time."""
    sizes = {row["name"]: row for row in table(paper, "axonn", "models_table1")}
    program = paper.get("code_comm_model") or {}
    degrees, bandwidths = program.get("min_tensor_parallel_degree", {}), program.get("perlmutter_bw_GiBps", ())
    batch = (paper.get("training_setup") or {}).get("batch_sequences_assumed", 2048)
    for row in table(paper, "axonn", "weak_scaling_table3"):
        if row["model"] not in sizes:
            raise sw.InputError(f"axonn.yaml: expected a row of models_table1 for {row['model']!r}")
        config, gpus = config_of(sizes[row["model"]]), row["gpus"]
        systems = {
            "zero3": partial(zero3, setting, config, gpus, batch),
            "axonn": partial(fastest, setting, config, gpus, batch, degrees.get(row["model"], 1), bandwidths),
            "megatron_lm": _pipelined,
            "deepspeed_3d": _pipelined,
        }
        for system, planned in systems.items():
            if row.get(system) is not None:
                setting.progress(f"AxoNN Table III: {row['model']} {system} on {gpus} GPUs")
                utilisation = partial(_utilisation, planned, config)
                yield Row.of("AxoNN Table III", system, row["model"], "part of peak", row[system], utilisation)
    if ablation := paper.get("overlap_ablation_20b_16gpu"):
        yield from _ablation(ablation, config_of(sizes["GPT-20B"]), setting)


def zero3(setting: Setting, config: GPTConfig, gpus: int, batch: int) -> sw.Plan:
    """The plan of ZeRO-3 over all GPUs, on a cluster with DeepSpeed's host overhead."""
    count = max(1, batch // gpus // MAX_MICRO_BATCH_SEQUENCES)
    asked = {"force": {"*": "zero3"}, "micro_batches": count, "ablation": sw.Ablation(blocking=ZERO3_BLOCKING)}
    return plan(setting, config, gpus, batch, system=with_deepspeed_host, **asked)


def fastest(
    setting: Setting, config: GPTConfig, gpus: int, batch: int, degree: int, bandwidths: Bandwidths = ()
) -> sw.Plan:
    """The fastest plan among the grids that the communication model ranks first, and that fit and can be built.

    Parameters
    ----------
    degree : int
        The smallest number of devices that a layer is sharded over, x * y * z.
    bandwidths : sequence of mapping
        The table by which the authors' program ranks grids. By default the links of the cluster rank them.
    """
    cluster, found = _machine(setting, gpus), []
    for grid in ranking(cluster, config, batch, degree, bandwidths):
        try:
            found.append(plan(setting, config, gpus, batch, force={"*": _tensor(grid)}))
        except (sw.InfeasibleError, sw.PlanError):
            continue
        if len(found) == SIMULATED_GRIDS:
            break
    if not found:
        raise sw.InfeasibleError(f"no grid over at least {degree} of {gpus} devices fits")
    return min(found, key=lambda each: each.step_time)


def plan(setting: Setting, config: GPTConfig, gpus: int, batch: int, **options: Any) -> sw.Plan:
    """A forced plan for `batch` sequences, with each layer recomputed."""
    compiler = captured(config, batch, SEQUENCE, PRECISION)
    return setting.plan(compiler, _machine(setting, gpus), recompute="full", sub_batches=1, **options)


def _ablation(ablation: Mapping[str, Any], config: GPTConfig, setting: Setting) -> Iterator[Row]:
    """The part of the time that each step saves over the one before, for 16 sequences on 16 GPUs."""
    kept = {f"blocks.{layer}.*": 1 for layer in range(config.layers)[-ablation["cached_layers"] :]}

    def step_time(blocking: tuple[Traffic, ...], **options: Any) -> float:
        ablation = sw.Ablation(blocking=blocking)
        asked = {"force": {"*": "tensor:2x2x4"}, "micro_batches": 1, "ablation": ablation, **options}
        return plan(setting, config, 16, 16, **asked).step_time

    setting.progress("AxoNN section IV: nothing overlapped")
    first = last = step_time(("activation", "gather", "scatter"))
    for step, published in ablation["steps"].items():
        setting.progress(f"AxoNN section IV: {step}")
        gathered = kept if step == "cache_all_gather" else False
        before, last = last, step_time(ABLATION_BLOCKING[step], keep_gathered=gathered)
        yield Row("AxoNN section IV", "GPT-20B, 16 GPUs", step, "part of time", published, 1 - last / before)
    total = ablation.get("total")
    if total is not None:
        yield Row("AxoNN section IV", "GPT-20B, 16 GPUs", "total", "part of time", total, 1 - last / first)


def hardware_flops(config: GPTConfig, tokens: int) -> float:
    """FLOPs of a step, recomputation counted (Narayanan et al., arXiv 2104.04473, equation 3)."""
    layer = 1 + SEQUENCE / (6 * config.width) + VOCABULARY / (16 * config.layers * config.width)
    return 96 * tokens * config.layers * config.width**2 * layer


def _utilisation(planned: Any, config: GPTConfig) -> float:
    """Hardware FLOPs per second over the peak."""
    found: sw.Plan = planned()
    flops = hardware_flops(config, found.tokens)
    return flops / found.step_time / found.cluster.world_size / PEAK_FLOPS


def _pipelined() -> sw.Plan:
    raise sw.PlanError("pipeline parallelism is not built")


def _machine(setting: Setting, gpus: int) -> sw.Cluster:
    return setting.cluster("axonn").fitted(min(GPUS_PER_NODE, gpus), max(1, gpus // GPUS_PER_NODE))


def _tensor(grid: sw.Grid) -> str:
    return f"tensor:{grid.x}x{grid.y}x{grid.z}"


def config_of(row: Mapping[str, Any]) -> GPTConfig:
    """The model of a row of Table I."""
    return GPTConfig(VOCABULARY, SEQUENCE, row["layers"], row["heads"], row["hidden"], bias=True)


def ranking(
    cluster: sw.Cluster, config: GPTConfig, batch: int, degree: int = 1, bandwidths: Bandwidths = ()
) -> list[sw.Grid]:
    """All grids of a cluster's devices, the grid with the least communication first.

    Grids are ranked by `communication_seconds`, or by `table_seconds` if there are `bandwidths`.

    >>> from shardweave.validation.clusters import cluster_of
    >>> cluster, small = cluster_of("axonn").fitted(4, 2), GPTConfig(256, 2048, 2, 8, 1024)
    >>> ranking(cluster, small, batch=8, degree=4)[0]  # data parallelism between nodes, weights gathered inside
    Grid(z=4, data=2)
    """
    devices = cluster.world_size
    powers = [2**exponent for exponent in range(devices.bit_length())]
    grids = [
        sw.Grid(x, y, z, devices // (x * y * z))
        for x, y, z in product(powers, repeat=3)
        if degree <= x * y * z <= devices and batch % (devices // (x * y)) == 0
    ]

    def seconds(grid: sw.Grid) -> float:
        if bandwidths:
            return table_seconds(bandwidths, config, batch, grid)
        return communication_seconds(cluster, config, batch, grid)

    return sorted(grids, key=lambda grid: (seconds(grid), str(grid)))


def communication_seconds(cluster: sw.Cluster, config: GPTConfig, batch: int, grid: sw.Grid) -> float:
    """The time of a layer's collectives, one after another, with the volumes of AxoNN's equations 1 to 5.

    A weight of ``k, n`` is gathered over z for the forward, the recomputation and the backward. Its gradient is
    reduce-scattered over z and reduced over data. Outputs are reduced over y, also in the recomputation, and gradients
    of inputs over x. In every second layer x and y are swapped. The cluster decides which links a group uses.
    """
    axes = sw.Strategy(grid).axes(cluster.mesh())
    tokens = batch * config.context // (grid.z * grid.data)
    seconds = 0.0
    for index, (inner, outer) in enumerate(weight_shapes(config.width)):
        columns, rows_ = (grid.x, grid.y) if index % 2 == 0 else (grid.y, grid.x)
        over_columns, over_rows = (axes.x, axes.y) if index % 2 == 0 else (axes.y, axes.x)
        weight = 2 * inner * outer / (columns * rows_)
        for kind, count, size, over in (
            ("all_gather", 3, weight, axes.z),
            ("reduce_scatter", 1, weight, axes.z),
            ("all_reduce", 1, weight / grid.z, axes.data),
            ("all_reduce", 2, 2 * tokens * outer / columns, over_rows),
            ("all_reduce", 1, 2 * tokens * inner / rows_, over_columns),
        ):
            seconds += count * collective_seconds(kind, size, over, cluster)
    return seconds


def weight_shapes(width: int) -> tuple[tuple[int, int], ...]:
    """The rows and columns of each weight of a layer."""
    return (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)


def table_seconds(bandwidths: Bandwidths, config: GPTConfig, batch: int, grid: sw.Grid) -> float:
    """`communication_seconds` as the authors' program counts it (axonn-ai/Megatron-AxoNN, ``comm_model.py``).

    It assumes rings without latency, with the bandwidths of a table. Weights are gathered twice, and their gradients
    are reduced over data in float32.

    >>> rows = [{"ip": 1, "my": ">=2", "bw": 1.0}, {"ip": ">=2", "my": "any", "bw": 0.5}]
    >>> gather = table_seconds(rows, GPTConfig(256, 2048, 1, 8, 1024), 2, sw.Grid(z=2))
    >>> round(gather * 2**30) == 3 * 12 * 1024**2  # two gathers and a scatter of half of each weight's two bytes
    True
    """
    tokens, width, seconds = batch * config.context // (grid.z * grid.data), config.width, 0.0
    distance = {"x": 1, "y": grid.x, "z": grid.x * grid.y, "data": grid.x * grid.y * grid.z}
    for index, (inner, outer) in enumerate(weight_shapes(width)):
        x, y = ("x", "y") if index % 2 == 0 else ("y", "x")
        columns, rows = getattr(grid, x), getattr(grid, y)
        weight = 2 * inner * outer / (columns * rows)
        for axis, passes, size in (
            ("z", 3, weight),
            ("data", 4, weight / grid.z),
            (y, 4, 2 * tokens * outer / columns),
            (x, 2, 2 * tokens * inner / rows),
        ):
            devices = getattr(grid, axis)
            if devices > 1:
                moved = passes * size * (devices - 1) / devices
                seconds += moved / (2**30 * _bandwidth(bandwidths, distance[axis], devices))
    return seconds


def _bandwidth(bandwidths: Bandwidths, distance: int, devices: int) -> float:
    for row in bandwidths:
        if _matches(row["ip"], distance) and _matches(row["my"], devices):
            return float(row["bw"])
    raise sw.InputError(
        f"axonn.yaml, code_comm_model: no bandwidth for groups of {devices} devices that are {distance} apart"
    )


def _matches(condition: int | str, number: int) -> bool:
    """Whether a number meets a condition: ``4``, ``">=4"``, ``">4"`` or ``"any"``."""
    if isinstance(condition, str) and condition != "any":
        return number >= int(condition[2:]) if condition.startswith(">=") else number > int(condition[1:])
    return condition in ("any", number)
