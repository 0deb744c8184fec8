"""What the planner's plan gains over the best baseline, simulated: the table of docs/baselines.md.

python -m docs.measure_baselines [--models "gpt2 (xl)" ...] [--clusters dgx-a100 ...] [--limits 1 0.5] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import shardweave as sw
from docs.large_models import LARGE
from shardweave.compiler.baselines import all_for
from shardweave.compiler.comparison import Entry, compared
from shardweave.compiler.compiler import Compiler
from shardweave.units import readable_bytes, readable_seconds

PAGE = Path(__file__).parent / "baselines.md"
BEGIN, END = "<!-- measured: python -m docs.measure_baselines --write -->\n", "<!-- end -->\n"
CLUSTERS = ("dgx-a100", "dgx-h100", "frontier", "perlmutter", "rtx3090-nvlink", "rtx3090-pcie")
LIMITS = (1.0, 0.75, 0.5)
"""Parts of what the planner's plan takes where the device's memory is the limit; 1 is the device's memory."""
HEAD = ("model", "cluster, devices", "memory limit", "planner", "best baseline", "its step", "longer", "fit")

Cells = tuple[str, ...]


def measure(given: argparse.Namespace) -> Iterator[Cells]:
    """A row for each model, cluster and limit."""
    for name in given.models:
        model, inputs = LARGE[name]()
        compiler = Compiler(model, sw.Cluster.local(1), inputs, None, None)
        for preset in given.clusters:
            cluster = sw.Cluster.preset(preset, nodes=given.nodes)
            own = compiler._with(cluster).plan().peak_memory
            for part in given.limits:
                options = sw.Options(memory_limit=None if part == 1 else int(part * own))
                cells = name, f"{cluster.name}, {cluster.world_size}", readable_bytes(options.limit(cluster))
                yield (*cells, *against_baselines(compiler._with(cluster, options), given))


def against_baselines(compiler: Compiler, given: argparse.Namespace) -> Cells:
    """The planner's step, that of the best of the chosen baselines, and how many of them fit."""
    chosen = [each for each in all_for(compiler.cluster) if not given.systems or each.name in given.systems]
    try:
        found = compared(compiler, chosen, given.micro_batches)
    except sw.InfeasibleError:
        return "nothing fits", "", "", "", ""
    fit = f"{sum(entry.plan is not None for entry in found.baselines)} of {len(chosen)}"
    if found.best is None:
        return step(found.own), "none fits", "", "", fit
    return step(found.own), str(found.best.baseline), step(found.best), f"{100 * found.gain:+.1f} %", fit


def step(entry: Entry) -> str:
    """Its time, and in how many micro-batches."""
    count = entry.plan.micro_batches if entry.plan is not None else 0
    return readable_seconds(entry.step_time) + (f", {count} micro-batches" if count > 1 else "")


def table(rows: list[Cells]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *rows)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(LARGE), choices=list(LARGE), metavar="MODEL")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), metavar="PRESET")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--limits", nargs="*", type=float, default=list(LIMITS), help="parts of the planner's memory")
    parser.add_argument("--systems", nargs="*", default=[], help="of these alone, as Megatron-LM")
    parser.add_argument("--micro-batches", nargs="*", type=int, help="by default all that divide the batch")
    parser.add_argument("--write", action="store_true", help="put the table into docs/baselines.md")
    given = parser.parse_args()
    rows: list[Cells] = []
    begun = time.process_time()
    for row in measure(given):
        rows.append(row)
        print(table(rows).splitlines()[-1], f"{time.process_time() - begun:.0f} CPU-s", flush=True)
    if given.write:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
