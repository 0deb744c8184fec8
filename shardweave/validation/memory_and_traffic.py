"""Figures without a tolerance: bytes of states per parameter (OSDP, AMSP), and traffic between nodes (ZeRO++)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch

import shardweave as sw
from shardweave.compiler import Compiler
from shardweave.cost_model import ZERO_PLUS_PLUS, crossed_level, group_extents
from shardweave.ir import Collective, Quantized
from shardweave.sharding import info
from shardweave.validation.rows import Paper, Row, table
from shardweave.validation.setting import Setting, Sizes, captured, per_layer_increase

BYTES_PER_PARAMETER = 16
"""OSDP, section 2: parameter, gradient and Adam's two moments in float32."""
PARAMETERS = {"LLaMA-7B": 7e9, "LLaMA-30B": 30e9}
"""The number of parameters by AMSP's count."""
SYSTEMS: dict[str, tuple[str, Mapping[Quantized, int]]] = {"zero3": ("zero3", {}), "zeropp": ("hpz", ZERO_PLUS_PLUS)}
"""The strategy preset of each system, and the bits of its quantized traffic."""
VOLUMES = {"fwd": (0, "parameter"), "bwd": (1, "parameter"), "grad": (1, "gradient")}
"""The graph (0 forward, 1 backward) and the cause of the collectives of each volume, by the first word of its name."""
NodeTraffic = Callable[[Sizes, str, tuple[tuple[str, int], ...]], tuple[dict[str, int], int]]
"""Maps sizes, preset and bits to the bytes of each volume between nodes, and the bytes of all weights."""


def osdp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """Bytes of states per parameter: 16 with DP, 16/N with ZDP."""
    for gpus in sorted({int(cluster["gpus"]) for cluster in (paper.get("clusters") or {}).values()}):
        for word, share in (("dp", 1), ("zdp", gpus)):
            setting.progress(f"OSDP: {word} on {gpus} GPUs")
            name = f"{word.upper()}, {gpus} GPUs"
            stated = partial(state_bytes, setting, gpus, word)
            yield Row.of("OSDP, bytes of states", "all", name, "bytes/parameter", BYTES_PER_PARAMETER / share, stated)


def amsp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """GB of states of a whole model, with the master weights of mixed precision and bfloat16 gradients."""
    for row in table(paper, "amsp", "memory_text"):
        if row.get("gb") is None or row["model"] not in PARAMETERS:
            continue
        setting.progress(f"AMSP memory: {row['model']}")
        count = PARAMETERS[row["model"]]

        def gigabytes(count: float = count) -> float:
            return state_bytes(setting, 1, "dp", sw.Precision(torch.bfloat16)) * count / 1e9

        yield Row.of("AMSP memory", row["model"], row["what"], "GB", row["gb"], gigabytes)


def zeropp(paper: Paper, setting: Setting) -> Iterator[Row]:
    """The traffic of one iteration between nodes, in sizes of the model."""
    traffic, systems = node_traffic_of(setting), paper.get("volumes") or {}
    if not isinstance(systems, Mapping):
        raise sw.InputError(f"zeropp.yaml, volumes: expected a mapping of systems, got {systems!r}")
    for system, volumes in systems.items():
        for name, published in volumes.items() if isinstance(volumes, Mapping) else ():
            if isinstance(published, int | float) and published:  # there is no error relative to 0
                setting.progress(f"ZeRO++ volumes: {system} {name}")
                found = partial(volume, traffic, system, str(name))
                yield Row.of("ZeRO++ volumes", str(system), str(name), "M", published, found)


def state_bytes(setting: Setting, gpus: int, word: str, precision: sw.Precision | None = None) -> float:
    """Bytes of parameter, gradient and optimizer states on one device, per parameter of one more layer."""

    def stated(sizes: Sizes) -> tuple[int, int]:
        plan = _compiler(setting, sizes, gpus, precision, word).plan()
        return sum(choice.state_bytes for choice in plan.choices.values()), _count(plan)

    return _ratio(stated)


def volume(traffic: NodeTraffic, system: str, name: str) -> float:
    """Bytes between nodes over the bytes of the weights in 16 bits, for one more layer.

    Raises
    ------
    PlanError
        If there is no system or volume of this name.
    """
    if system not in SYSTEMS:
        raise sw.PlanError(f"no system is called {system!r}: built are {', '.join(SYSTEMS)}")
    word = name.split("_")[0]
    if word not in (*VOLUMES, "total"):
        raise sw.PlanError(f"no volume is called {name!r}: names begin with {', '.join(VOLUMES)}, or are 'total'")
    force, usual = SYSTEMS[system]
    bits = {str(kind): number for kind, number in usual.items()}
    if word in VOLUMES and (named := re.search(r"int(\d+)", name)):  # they may differ from those of the total
        bits[f"{VOLUMES[word][1]}s"] = int(named[1])

    def measured(sizes: Sizes) -> tuple[int, int]:
        moved, weights = traffic(sizes, force, tuple(bits.items()))
        return moved[word] if word in VOLUMES else sum(moved.values()), weights

    return _ratio(measured)


def _ratio(measured: Callable[[Sizes], tuple[int, int]]) -> float:
    """The ratio of two figures of a layer, without inputs and embedding."""
    numerator, denominator = per_layer_increase(lambda layers: measured(Sizes(layers, 256, 4)))
    return numerator / denominator


def node_traffic_of(setting: Setting) -> NodeTraffic:
    """Finds the bytes of each volume that the collectives of a node's devices move between nodes, and those of all
    weights, of a model with this preset and these bits of quantized collectives."""

    @cache
    def traffic(sizes: Sizes, word: str, bits: tuple[tuple[str, int], ...]) -> tuple[dict[str, int], int]:
        compiler = _compiler(setting, sizes, 16, sw.Precision(torch.bfloat16), word, quantize=dict(bits))
        plan = compiler.plan()
        step, moved = compiler.lower(plan).step, {}
        for name, (graph, cause) in VOLUMES.items():
            module = (step.forward, step.backward)[graph]
            assert module is not None
            found = [what for node in module.graph.nodes if (what := info(node).collective) is not None]
            moved[name] = sum(_between_nodes(each, compiler.cluster) for each in found if each.cause == cause)
        return moved, 2 * _count(plan)

    return traffic


def _between_nodes(what: Collective, cluster: sw.Cluster) -> int:
    """The bytes that a node sends to other nodes for a collective, over all its groups.

    The paper does not count the scales of blocks.
    """
    if what.scales or crossed_level(what.axes, cluster) != "node":
        return 0
    inside, _ = group_extents(what.axes, cluster)
    return what.bytes * cluster.levels[0].size // inside


def _count(plan: sw.Plan) -> int:
    return sum(torch.Size(shape).numel() for shape in plan.model_key.parameters.values())


def _compiler(
    setting: Setting, sizes: Sizes, gpus: int, precision: sw.Precision | None, word: str, **options: Any
) -> Compiler:
    cluster = sw.Cluster.preset("dgx-a100").fitted(min(8, gpus), max(1, gpus // 8))
    compiler = captured(sizes, gpus, 64, precision)
    asked = {"force": {"*": word}, "micro_batches": 1, "sub_batches": 1, "recompute": "none", **options}
    return setting.row_compiler(compiler, cluster, **asked)
