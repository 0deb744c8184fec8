"""What each kind of overlap is worth, simulated: the table and the figure of docs/overlap.md.

python -m benchmarks.measure_overlap             GPTs of Oases' Table 3 on both of its clusters
python -m benchmarks.measure_overlap --write     and put them into docs/overlap.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Timeline
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir.formatting import readable_bytes, readable_seconds
from shardweave.ir.precision import Precision
from shardweave.passes.pipeline import lower
from shardweave.planner.problem.space import forced_strategies

PAGE = Path(__file__).parents[1] / "docs" / "overlap.md"
FIGURE = PAGE.parent / "images" / "overlap.png"
BEGIN, END = "<!-- measured: python -m benchmarks.measure_overlap --write -->\n", "<!-- end -->\n"
CLUSTERS = ("rtx3090-nvlink", "rtx3090-pcie")
NODES, CONTEXT, VOCABULARY = 8, 1024, 50304
PRECISION = Precision(torch.float16)
"""Gradients are reduced in the dtype that they are computed in: Megatron-LM's default in fp16."""

STAGES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"recompute": "full", "ablation": sw.Ablation(cross_pass=False)},
    "+ sub-batches": {"sub_batches": 2, "recompute": "full", "ablation": sw.Ablation(cross_pass=False)},
    "+ cross-pass schedule": {"sub_batches": 2, "recompute": "full"},
    "+ fine recomputation": {"sub_batches": 2, "recompute": "fine"},
}
"""Oases' Table 3, from Megatron-LM over Merak to Oases without its planner."""


@dataclass(frozen=True)
class Setting:
    """A row of Oases' Table 4, computed so many times for a reduction of the gradients and a step of the optimizer."""

    hidden: int
    layers: int
    heads: int
    tensor: int
    batch: int
    micro_batches: int = 1


SETTINGS = (Setting(2048, 24, 32, 4, 128), Setting(8192, 8, 128, 8, 8), Setting(8192, 8, 128, 8, 8, micro_batches=8))


def compiler(setting: Setting, cluster: sw.Cluster) -> Compiler:
    """The captured GPT, on no device."""
    config = GPTConfig(VOCABULARY, CONTEXT, setting.layers, setting.heads, setting.hidden)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(setting.batch * setting.micro_batches, CONTEXT, dtype=torch.long)
    options = Options(precision=PRECISION, micro_batches=setting.micro_batches)
    return Compiler(model, cluster, (tokens, tokens), options, None)


def megatron(setting: Setting) -> dict[str, Any]:
    """Columns, then rows; vocabulary parallel at both ends."""
    columns, rows = f"column:{setting.tensor}", f"row:{setting.tensor}"
    return {"*": rows, "*.qkv": columns, "*.up": columns, "*.out": rows, "*.down": rows, "head": columns}


def simulated(found: Compiler, setting: Setting, **overlap: Any) -> Timeline:
    """The step under Megatron's tensor parallelism with these overlap options."""
    mesh = found.cluster.mesh()
    found.options = Options(precision=PRECISION, micro_batches=setting.micro_batches, **overlap)
    forced = forced_strategies(megatron(setting), found.annotated.ops, mesh, found.annotated.batch)
    strategies = {name: options[0] for name, options in forced.items()}
    return found.lowering.timeline(
        lower(found.annotated, strategies, mesh, found.options, cluster=found.cluster, draft=True)
    )


def measure() -> Iterator[tuple[str, Setting, str, Timeline]]:
    for setting in SETTINGS:
        for preset in CLUSTERS:
            found = compiler(setting, sw.Cluster.preset(preset, nodes=NODES))
            for name, overlap in STAGES.items():
                yield preset, setting, name, simulated(found, setting, **overlap)


def table(rows: list[tuple[str, Setting, str, Timeline]]) -> str:
    """Markdown: a row a stage, and how much faster it is than the first one."""
    lines = [
        "| cluster | hidden size | micro-batches | | a step | exposed communication | memory "
        "| faster than tensor parallel |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    first = 0.0
    for preset, setting, name, timeline in rows:
        first = timeline.step_time if name == next(iter(STAGES)) else first
        lines.append(
            f"| {preset} | {setting.hidden:,} | {setting.micro_batches} | {name} "
            f"| {readable_seconds(timeline.step_time)} | {readable_seconds(timeline.exposed_communication)} "
            f"| {readable_bytes(timeline.peak_memory)} | {first / timeline.step_time:.2f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[tuple[str, Setting, str, Timeline]]) -> Figure:
    """A bar a stage, of what the step takes: compute, and communication that nothing hides."""
    groups: dict[tuple[str, Setting], list[tuple[str, Timeline]]] = {}
    for preset, setting, name, timeline in rows:
        groups.setdefault((preset, setting), []).append((name, timeline))
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(len(SETTINGS), len(CLUSTERS), squeeze=False)
    for (preset, setting), stages in groups.items():
        axis = axes[SETTINGS.index(setting)][CLUSTERS.index(preset)]
        names = [name for name, _ in stages]
        compute = [timeline.compute_time for _, timeline in stages]
        exposed = [timeline.exposed_communication for _, timeline in stages]
        axis.barh(names, compute, color="#4878b0", label="compute")
        axis.barh(names, exposed, left=compute, color="#e0a458", label="exposed communication")
        for index, (_, timeline) in enumerate(stages):
            gain = stages[0][1].step_time / timeline.step_time
            axis.text(timeline.step_time, index, f" {gain:.2f}x", va="center", fontsize=8)
        batches = f", {setting.micro_batches} micro-batches" if setting.micro_batches > 1 else ""
        axis.set_title(f"{preset}, hidden size {setting.hidden:,}{batches}", fontsize=9)
        axis.margins(x=0.15)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("seconds a step", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put the table and the figure into docs/")
    arguments = parser.parse_args()
    rows = []
    for row in measure():
        rows.append(row)
        print(table(rows).splitlines()[-1], flush=True)
    if arguments.write:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
        draw(rows).savefig(FIGURE, dpi=150)


if __name__ == "__main__":
    main()
