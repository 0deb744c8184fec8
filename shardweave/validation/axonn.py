"""AxoNN (arXiv 2305.13525): Table III, the part of the peak that GPTs reach on Perlmutter, and section IV's ablation.

ZeRO-3's cells are forced plans. The paper does not print AxoNN's grids: its authors try the few that their
communication model puts first, and so does this module. Megatron-LM's and DeepSpeed's cells are pipeline-parallel,
which this compiler has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from shardweave.cost_model import Cluster
from shardweave.demo import GPTConfig
from shardweave.ir import Ablation, Grid, InfeasibleError, InputError, PlanError, Precision, Traffic
from shardweave.planner import Plan
from shardweave.validation.deepspeed import hosted
from shardweave.validation.grids import Bandwidths, ranking
from shardweave.validation.published import Paper, table
from shardweave.validation.rows import Row
from shardweave.validation.setting import Setting, captured

SEQUENCE, VOCABULARY = 2048, 50304  # GPT-2's, padded to a multiple of 128
PEAK_FLOPS = 312e12
GPUS_PER_NODE = 4
PRECISION = Precision(torch.bfloat16)
TRIED = 4
"""Grids that are simulated, of those that the communication model puts first."""
MICRO_SEQUENCES = 8
"""ZeRO-3's sequences a GPU in a micro-batch, at most. Not published: calibrated."""
WAITED: tuple[Traffic, ...] = ("gather", "scatter")
"""What ZeRO-3 does not overlap. Not published: calibrated."""
STEPS: Mapping[str, tuple[Traffic, ...]] = {
    "overlap_all_reduce": ("gather", "scatter"),
    "overlap_reduce_scatter": ("gather",),
    "overlap_all_gather": (),
    "cache_all_gather": (),
}
"""What each step of section IV still waits for; before the first, activations too."""


def rows(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Table III in parts of the peak, recomputation counted; then section IV's steps, as parts of a batch's time."""
    sizes = {row["name"]: row for row in table(paper, "axonn", "models_table1")}
    program = paper.get("code_comm_model") or {}
    degrees, bandwidths = program.get("min_tensor_parallel_degree", {}), program.get("perlmutter_bw_GiBps", ())
    batch = (paper.get("training_setup") or {}).get("batch_sequences_assumed", 2048)
    for row in table(paper, "axonn", "weak_scaling_table3"):
        if row["model"] not in sizes:
            raise InputError(f"axonn.yaml: expected a row of models_table1 for {row['model']!r}")
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
                used = partial(_utilisation, planned, config)
                yield Row.of("AxoNN Table III", system, row["model"], "part of peak", row[system], used)
    if ablation := paper.get("overlap_ablation_20b_16gpu"):
        yield from _ablation(ablation, config_of(sizes["GPT-20B"]), setting)


def zero3(setting: Setting, config: GPTConfig, gpus: int, batch: int) -> Plan:
    """States, gradients and parameters over all GPUs; DeepSpeed's host launches its collectives."""
    count = max(1, batch // gpus // MICRO_SEQUENCES)
    asked = {"force": {"*": "zero3"}, "micro_batches": count, "ablation": Ablation(blocking=WAITED)}
    return plan(setting, config, gpus, batch, system=hosted, **asked)


def fastest(
    setting: Setting, config: GPTConfig, gpus: int, batch: int, degree: int, bandwidths: Bandwidths = ()
) -> Plan:
    """The fastest of the grids that the communication model puts first, of those that can be built and fit.

    Parameters
    ----------
    degree : int
        Devices over which a layer is spread at the least: x, y and z together.
    bandwidths : sequence of mapping
        The table by which the authors' program ranks grids; without it, this cluster's links do.
    """
    cluster, found = _machine(setting, gpus), []
    for grid in ranking(cluster, config, batch, degree, bandwidths):
        try:
            found.append(plan(setting, config, gpus, batch, force={"*": _tensor(grid)}))
        except (InfeasibleError, PlanError):
            continue
        if len(found) == TRIED:
            break
    if not found:
        raise InfeasibleError(f"no grid over at least {degree} of {gpus} devices fits")
    return min(found, key=lambda each: each.step_time)


def plan(setting: Setting, config: GPTConfig, gpus: int, batch: int, **options: Any) -> Plan:
    """A forced plan of a batch of so many sequences, with all of each layer recomputed."""
    compiler = captured(config, batch, SEQUENCE, PRECISION)
    return setting.plan(compiler, _machine(setting, gpus), recompute="full", sub_batches=1, **options)


def _ablation(ablation: Mapping[str, Any], config: GPTConfig, setting: Setting) -> Iterator[Row]:
    """Of 16 sequences on 16 GPUs, 2 by 2 by 4: what each step takes off the time of the one before it."""
    kept = {f"blocks.{layer}.*": 1 for layer in range(config.layers)[-ablation["cached_layers"] :]}

    def seconds(blocking: tuple[Traffic, ...], **options: Any) -> float:
        ablation = Ablation(blocking=blocking)
        asked = {"force": {"*": "tensor:2x2x4"}, "micro_batches": 1, "ablation": ablation, **options}
        return plan(setting, config, 16, 16, **asked).step_time

    setting.progress("AxoNN section IV: nothing overlapped")
    first = last = seconds(("activation", "gather", "scatter"))
    for step, published in ablation["steps"].items():
        setting.progress(f"AxoNN section IV: {step}")
        before, last = last, seconds(STEPS[step], keep_gathered=kept if step == "cache_all_gather" else False)
        yield Row("AxoNN section IV", "GPT-20B, 16 GPUs", step, "part of time", published, 1 - last / before)
    total = ablation.get("total")
    if total is not None:
        yield Row("AxoNN section IV", "GPT-20B, 16 GPUs", "total", "part of time", total, 1 - last / first)


def hardware_flops(config: GPTConfig, tokens: int) -> float:
    """FLOPs of a step, recomputation counted (Narayanan et al., arXiv 2104.04473, equation 3)."""
    layer = 1 + SEQUENCE / (6 * config.width) + VOCABULARY / (16 * config.layers * config.width)
    return 96 * tokens * config.layers * config.width**2 * layer


def _utilisation(planned: Any, config: GPTConfig) -> float:
    """Hardware FLOPs over the peak."""
    found: Plan = planned()
    flops = hardware_flops(config, found.tokens)
    return flops / found.step_time / found.cluster.world_size / PEAK_FLOPS


def _pipelined() -> Plan:
    raise PlanError("pipeline parallelism is not built")


def _machine(setting: Setting, gpus: int) -> Cluster:
    return setting.cluster("axonn").fitted(min(GPUS_PER_NODE, gpus), max(1, gpus // GPUS_PER_NODE))


def _tensor(grid: Grid) -> str:
    return f"tensor:{grid.x}x{grid.y}x{grid.z}"


def config_of(row: Mapping[str, Any]) -> GPTConfig:
    """The model of a row of Table I."""
    return GPTConfig(VOCABULARY, SEQUENCE, row["layers"], row["heads"], row["hidden"], bias=True)
