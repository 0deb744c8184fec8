"""Figures that a plan has exactly: bytes of states a parameter (OSDP, AMSP), and volumes between nodes (ZeRO++)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from shardweave.compiler.compiler import Compiler
from shardweave.compiler.plan import Plan
from shardweave.cost_model import Cluster
from shardweave.cost_model.collectives import crossed_level
from shardweave.cost_model.graphs import info
from shardweave.errors import PlanError
from shardweave.precision import Precision
from shardweave.validation.models import Sizes
from shardweave.validation.published import Paper, table
from shardweave.validation.rows import Row
from shardweave.validation.setting import Setting, captured, of_a_layer

BYTES_PER_PARAMETER = 16
"""OSDP, section 2: parameter, gradient and Adam's two moments in float32."""
PARAMETERS = {"LLaMA-7B": 7e9, "LLaMA-30B": 30e9}
"""As AMSP counts them, by name."""
VOLUMES = {
    "fwd_allgather": (0, "all_gather"),
    "bwd_allgather": (1, "all_gather"),
    "grad_reduce_scatter": (1, "reduce_scatter"),
}
"""Of each volume the graph (forward, backward) and the collective."""


def osdp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Bytes of states for each parameter: 16 with DP, 16/N with ZDP."""
    for gpus in sorted({int(cluster["gpus"]) for cluster in (paper.get("clusters") or {}).values()}):
        for word, share in (("dp", 1), ("zdp", gpus)):
            setting.progress(f"OSDP: {word} on {gpus} GPUs")
            name = f"{word.upper()}, {gpus} GPUs"
            stated = partial(state_bytes, setting, gpus, word)
            yield Row.of("OSDP, bytes of states", "all", name, "bytes/parameter", BYTES_PER_PARAMETER / share, stated)


def amsp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """GB of states of a whole model, mixed precision's copies and bfloat16 gradients counted."""
    for row in table(paper, "amsp", "memory_text"):
        if row.get("gb") is None or row["model"] not in PARAMETERS:
            continue
        setting.progress(f"AMSP memory: {row['model']}")
        count = PARAMETERS[row["model"]]

        def gigabytes(count: float = count) -> float:
            return state_bytes(setting, 1, "dp", Precision(torch.bfloat16)) * count / 1e9

        yield Row.of("AMSP memory", row["model"], row["what"], "GB", row["gb"], gigabytes)


def zeropp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """What one iteration sends between nodes, in sizes of the model."""
    volumes = paper.get("volumes") or {}
    for system in ("zero3", "zeropp"):
        for name, published in (volumes.get(system) or {}).items():
            if published:  # an error relative to 0 is none
                setting.progress(f"ZeRO++ volumes: {system} {name}")
                found = partial(zero3_volume, setting, name) if system == "zero3" else _quantized
                yield Row.of("ZeRO++ volumes", system, name, "M", published, found)


def state_bytes(setting: Setting, gpus: int, word: str, precision: Precision | None = None) -> float:
    """Bytes of parameters, gradients and optimizer states on one device for each parameter: of what a layer adds."""

    def stated(sizes: Sizes) -> tuple[int, int]:
        plan = _compiler(setting, sizes, gpus, precision, word).plan()
        return sum(choice.state_bytes for choice in plan.choices.values()), _count(plan)

    return _ratio(stated)


def zero3_volume(setting: Setting, name: str) -> float:
    """Bytes between nodes over those of the weights: of what a layer adds."""
    return _ratio(lambda sizes: _crossing(setting, sizes, name))


def _ratio(measured: Callable[[Sizes], tuple[int, int]]) -> float:
    """A ratio of two figures of a layer: the inputs and an embedding do not count."""
    amount, of = of_a_layer(lambda layers: measured(Sizes(layers, 256, 4)))
    return amount / of


def _crossing(setting: Setting, sizes: Sizes, name: str) -> tuple[int, int]:
    """The bytes that collectives move between nodes, and those of all weights."""
    compiler = _compiler(setting, sizes, 16, Precision(torch.bfloat16), "zero3")
    plan = compiler.plan()
    step, cluster = compiler.lower(plan).step, compiler.cluster
    moved = 0
    for graph, kind in VOLUMES.values() if name == "total" else (VOLUMES[name],):
        module = (step.forward, step.backward)[graph]
        assert module is not None
        found = [what for node in module.graph.nodes if (what := info(node).collective) is not None]
        moved += sum(each.bytes for each in found if each.kind == kind and crossed_level(each.axes, cluster) == "node")
    return moved, 2 * _count(plan)


def _count(plan: Plan) -> int:
    return sum(torch.Size(shape).numel() for shape in plan.model_key.parameters.values())


def _compiler(setting: Setting, sizes: Sizes, gpus: int, precision: Precision | None, word: str) -> Compiler:
    cluster = Cluster.preset("dgx-a100").fitted(min(8, gpus), max(1, gpus // 8))
    compiler = captured(sizes, gpus, 64, precision)
    return setting.asked(compiler, cluster, force={"*": word}, micro_batches=1, sub_batches=1, recompute="none")


def _quantized() -> float:
    raise PlanError("quantized collectives are not built")
