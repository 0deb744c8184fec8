"""What each kind of weaving is worth, simulated: the table of docs/weaving.md.

python -m docs.measure_weaving             GPTs of Oases' Table 3 on both of its clusters
python -m docs.measure_weaving --write     and put them into docs/weaving.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardweave as sw
from shardweave.compiler.api import _Compiler
from shardweave.compiler.pipeline import lower
from shardweave.compiler.planner.force import forced_strategies
from shardweave.cost_model import Timeline
from shardweave.demo.model import GPT, GPTConfig
from shardweave.options import Options
from shardweave.units import readable_bytes, readable_seconds

PAGE = Path(__file__).parent / "weaving.md"
BEGIN, END = "<!-- measured: python -m docs.measure_weaving --write -->\n", "<!-- end -->\n"
CLUSTERS = ("rtx3090-nvlink", "rtx3090-pcie")
NODES, CONTEXT, VOCABULARY = 8, 1024, 50304

STAGES: dict[str, dict[str, Any]] = {
    "tensor parallel": {"recompute": "full", "cross_pass": False},
    "+ sub-batches": {"sub_batches": 2, "recompute": "full", "cross_pass": False},
    "+ cross-pass schedule": {"sub_batches": 2, "recompute": "full"},
    "+ fine recomputation": {"sub_batches": 2, "recompute": "fine"},
}
"""Oases' Table 3, from Megatron-LM over Merak to Oases without its planner."""


@dataclass(frozen=True)
class Setting:
    """A row of Oases' Table 4."""

    hidden: int
    layers: int
    heads: int
    tensor: int
    batch: int


SETTINGS = (Setting(2048, 24, 32, 4, 128), Setting(8192, 8, 128, 8, 8))


def compiler(setting: Setting, cluster: sw.Cluster) -> _Compiler:
    """The captured GPT, on no device."""
    config = GPTConfig(VOCABULARY, CONTEXT, setting.layers, setting.heads, setting.hidden)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(setting.batch, CONTEXT, dtype=torch.long)
    return _Compiler(model, cluster, (tokens, tokens), Options(precision="fp16"), None)


def megatron(setting: Setting) -> dict[str, Any]:
    """Columns, then rows; vocabulary parallel at both ends."""
    columns, rows = f"column:{setting.tensor}", f"row:{setting.tensor}"
    return {"*": rows, "*.qkv": columns, "*.up": columns, "*.out": rows, "*.down": rows, "head": columns}


def simulated(found: _Compiler, setting: Setting, **weaving: Any) -> Timeline:
    """The step under Megatron's tensor parallelism, woven so."""
    mesh = found.cluster.mesh()
    found.options = Options(precision="fp16", **weaving)
    forced = forced_strategies(megatron(setting), found.annotated.ops, mesh, found.annotated.batch)
    strategies = {name: options[0] for name, options in forced.items()}
    return found.timeline(lower(found.annotated, strategies, mesh, found.options, cluster=found.cluster, stages=False))


def measure() -> Iterator[tuple[str, Setting, str, Timeline]]:
    for setting in SETTINGS:
        for preset in CLUSTERS:
            found = compiler(setting, sw.Cluster.preset(preset, nodes=NODES))
            for name, weaving in STAGES.items():
                yield preset, setting, name, simulated(found, setting, **weaving)


def table(rows: list[tuple[str, Setting, str, Timeline]]) -> str:
    """Markdown: a row a stage, and how much faster it is than the first one."""
    lines = [
        "| cluster | hidden size | | a step | exposed communication | memory | faster than tensor parallel |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    first = 0.0
    for preset, setting, name, timeline in rows:
        first = timeline.step_time if name == next(iter(STAGES)) else first
        lines.append(
            f"| {preset} | {setting.hidden:,} | {name} | {readable_seconds(timeline.step_time)} "
            f"| {readable_seconds(timeline.exposed_communication)} | {readable_bytes(timeline.peak_memory)} "
            f"| {first / timeline.step_time:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put the table into docs/weaving.md")
    arguments = parser.parse_args()
    rows = []
    for row in measure():
        rows.append(row)
        print(table(rows).splitlines()[-1], flush=True)
    if arguments.write:
        text = PAGE.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
