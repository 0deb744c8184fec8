"""What the planner's plan gains over the best baseline, simulated: the table of docs/baselines.md.

python -m benchmarks.measure_baselines [--models "gpt2 (xl)" ...] [--clusters dgx-a100 ...] [--limits 1 0.5] [--write]
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import shardweave as sw
from shardweave.compiler.baselines import Baseline, all_for
from shardweave.compiler.compiler import Compiler
from shardweave.ir.formatting import readable_bytes, readable_seconds
from tests.models.large import LARGE

PAGE = Path(__file__).parents[1] / "docs" / "baselines.md"
BEGIN, END = "<!-- measured: python -m benchmarks.measure_baselines --write -->\n", "<!-- end -->\n"
CLUSTERS = ("dgx-a100", "dgx-h100", "frontier", "perlmutter", "rtx3090-nvlink", "rtx3090-pcie")
LIMITS = (1.0, 0.75, 0.5)
"""Parts of what the planner's plan takes where the device's memory is the limit; 1 is the device's memory."""
HEAD = ("model", "cluster, devices", "memory limit", "planner", "best baseline", "its step", "longer")
SLACK = 0.03
"""By how much of a step twice as many micro-batches, or less memory, are thought to be faster at the most."""

Cells = tuple[str, ...]
Setting = tuple[int, int]
"""Which system, and in how many micro-batches."""


def measure(given: argparse.Namespace) -> Iterator[Cells]:
    """A row for each model, cluster and limit."""
    for name in given.models:
        model, inputs = LARGE[name]()
        captured = Compiler(model, sw.Cluster.local(1), inputs, None, None)
        for preset in given.clusters:
            compiler = captured.with_(sw.Cluster.preset(preset, nodes=given.nodes))
            cluster, systems = compiler.cluster, all_for(compiler.cluster)
            chosen = [each for each in systems if not given.systems or each.name in given.systems]
            race = Race(compiler, chosen, given.micro_batches or list(compiler.space.micro_batches))
            own = compiler.plan().peak_memory
            for part in given.limits:
                options = sw.Options(memory_limit=None if part == 1 else int(part * own))
                cells = name, f"{cluster.name}, {cluster.world_size}", readable_bytes(options.limit(cluster))
                yield (*cells, *against(race, options))


def against(race: Race, options: sw.Options) -> Cells:
    """The planner's step, and the fastest of the baselines."""
    try:
        own = race.compiler.with_(options=options).plan()
    except sw.InfeasibleError:
        return "nothing fits", "", "", ""
    found = race.fastest(options)
    if found is None:
        return step(own), "none fits", "", ""
    baseline, best = found
    return step(own), str(baseline), step(best), f"{100 * (best.step_time / own.step_time - 1):+.1f} %"


@dataclass
class Race:
    """Baselines on one model and cluster, of which the fastest is looked for under one memory limit after another.

    Each is planned under the device's memory, in one micro-batch, and in more or under less where it may win.
    """

    compiler: Compiler
    baselines: list[Baseline]
    counts: list[int]
    free: dict[Setting, sw.Plan | None] = field(default_factory=dict)
    """Plans under the device's memory."""

    def fastest(self, options: sw.Options) -> tuple[Baseline, sw.Plan] | None:
        """The fastest that fits, and its plan."""
        limit, best = options.limit(self.compiler.cluster), None
        waiting = [(0.0, at, count) for at in range(len(self.baselines)) for count in self.counts[:1]]
        heapq.heapify(waiting)
        while waiting:
            least, at, count = heapq.heappop(waiting)
            if best is not None and least >= best[1].step_time:
                break
            setting = at, count
            if (free := self._free(setting)) is not None:
                least = max(least, (1 - SLACK) * free.step_time)
            if count != self.counts[-1]:
                heapq.heappush(waiting, (least, at, self.counts[self.counts.index(count) + 1]))
            if free is None or (best is not None and least >= best[1].step_time):
                continue
            plan = free if free.peak_memory <= limit else self._plan(setting, options)
            if plan is not None and (best is None or plan.step_time < best[1].step_time):
                best = self.baselines[at], plan
        return best

    def _free(self, setting: Setting) -> sw.Plan | None:
        if setting not in self.free:
            self.free[setting] = self._plan(setting, sw.Options())
        return self.free[setting]

    def _plan(self, setting: Setting, options: sw.Options) -> sw.Plan | None:
        """None where nothing fits, or the sizes do not divide."""
        at, count = setting
        asked = replace(self.baselines[at].over(options), micro_batches=count)
        try:
            return self.compiler.with_(options=asked).plan()
        except sw.ParallelError:
            return None


def step(plan: sw.Plan) -> str:
    """Its time, and in how many micro-batches."""
    count = plan.micro_batches
    return readable_seconds(plan.step_time) + (f", {count} micro-batches" if count > 1 else "")


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
