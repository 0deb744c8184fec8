"""Steps over slow links, beside what people write by hand: the tables of docs/performance.md. Run by `make bench`.

python -m benchmarks.bench                                             # all cases at 200 Mbit/s, two hosts of a rank
python -m benchmarks.bench --cases gpt vit --mbit 1000 --ranks-per-host 2
python -m benchmarks.bench --cases llama-wide --memory-share 0.6       # a limit that rules out whole states
python -m benchmarks.bench --ablations                                 # what each kind of choice is worth

For each case the plan of this package and the peers (`benchmarks/peers.py`) run in the same processes, with the same
weights and batch. First their losses are compared. Then their steps take turns, forward to optimizer, so that other
work of the machine meets all. A row has the medians of the planned step and of the best peer, with the half of the
range between the quartiles. With `--ablations` the plans that are made without a kind of choice run beside them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shardweave as sw
from benchmarks.hosts import hosts, run_ranks
from benchmarks.peers import CASES, Batch, peers

SKIPPED_ROUNDS = 3
MAX_LOSS_DIFFERENCE = 1e-4
"""A peer whose loss differs by this part of the loss or more computes something else, and is left out."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "without overlap": {"ablation": sw.Ablation(blocking=("gather", "scatter", "reduce", "broadcast", "activation"))},
    "one sub-batch": {"sub_batches": 1},
    "without buckets": {"buckets": False},
    "prefetch of one": {"max_prefetch": 1},
    "data parallel only": {"force": {"*": "dp"}},
    "tensor parallel only": {"force": {"*": "tensor:2"}},
    "by device rates": {"measure_ops": False},
}
"""Options that take a kind of choice from the planner."""


@dataclass(frozen=True)
class Row:
    """What was measured of a case, in seconds and bytes."""

    case: str
    plan: str
    step: float
    spread: float
    predicted: float
    compute: float
    peers: dict[str, float]
    left_out: dict[str, str]
    ablations: dict[str, float] = field(default_factory=dict)
    """Seconds of the step of a plan without a kind of choice, by its name in `ABLATIONS`."""

    @property
    def best_peer(self) -> str:
        return min(self.peers, key=self.peers.__getitem__)

    @property
    def speedup(self) -> float:
        """The best peer's step over the planned one."""
        return self.peers[self.best_peer] / self.step


def measure(
    name: str,
    samples: int | None,
    rounds: int,
    memory_share: float,
    ranks_per_host: int,
    device_rates: bool,
    ablations: bool,
) -> Row:
    """What each rank does for a case."""
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(samples or case.samples)
    cluster = sw.Cluster.detect()
    limit = None
    if memory_share < 1.0:
        whole = sw.plan(model, cluster, batch, options=sw.Options(force={"*": "dp"}), progress=False)
        limit = int(memory_share * whole.peak_memory)
    options = sw.Options(memory_limit=limit, measure_ops=False if device_rates else "auto")
    parallel: Any = sw.compile_parallel(copy.deepcopy(model), cluster, batch, options=options, progress=False)
    steps = {"shardweave": _step(parallel, batch)}
    reference = parallel(**batch).item()
    left_out: dict[str, str] = {}
    for peer in peers(case, model, batch, ranks_per_host, replicated=limit is None):
        try:
            loss = peer.module(**peer.batch).detach().clone()
        except Exception as error:  # what a model lacks for a peer is another thing for each
            left_out[peer.name] = str(error).splitlines()[0]
            continue
        if peer.averages:
            dist.all_reduce(loss, dist.ReduceOp.SUM)
            loss /= dist.get_world_size()
        if abs(loss.item() - reference) > MAX_LOSS_DIFFERENCE * abs(reference):
            left_out[peer.name] = f"its loss is {loss.item():.6f}, that of the planned step {reference:.6f}"
            continue
        steps[peer.name] = _step(peer.module, peer.batch)
    restricted = _restricted_steps(model, cluster, batch, options, left_out) if ablations else {}
    steps |= restricted
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds + SKIPPED_ROUNDS):
        for kind, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            dist.barrier()
            seconds[kind].append(time.perf_counter() - begun)
    medians = {kind: statistics.median(taken[SKIPPED_ROUNDS:]) for kind, taken in seconds.items()}
    low, _, high = statistics.quantiles(seconds["shardweave"][SKIPPED_ROUNDS:], n=4)
    plan, own = parallel.plan, medians.pop("shardweave")
    without = {name: medians.pop(name) for name in restricted}
    grids = sorted({str(choice.strategy) for choice in plan.choices.values()})
    text = f"{', '.join(grids[:2])}{', ...' if len(grids) > 2 else ''}; {plan.overlap}".rstrip("; ")
    return Row(name, text, own, (high - low) / 2, plan.step_time, plan.compute_time, medians, left_out, without)


def _restricted_steps(
    model: torch.nn.Module, cluster: sw.Cluster, batch: Batch, options: sw.Options, left_out: dict[str, str]
) -> dict[str, Callable[[], None]]:
    """The step of a plan without a kind of choice, for each of `ABLATIONS` that can be planned."""
    found: dict[str, Callable[[], None]] = {}
    for name, changes in ABLATIONS.items():
        allowed = replace(options, **changes)
        try:
            twin: Any = sw.compile_parallel(copy.deepcopy(model), cluster, batch, options=allowed, progress=False)
        except sw.ParallelError as error:  # as a memory limit rules it out
            left_out[name] = str(error).splitlines()[0]
            continue
        found[name] = _step(twin, batch)
    return found


def _step(module: torch.nn.Module, batch: Batch) -> Callable[[], None]:
    """A training step of a module that returns its loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        module(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(title: str, rows: Sequence[Row]) -> None:
    """The rows as a table, and the geometric mean of the speedups."""
    table = Table("case", "planned, ms", "predicted", "best peer", "ms", "speedup", "plan", title=title)
    for row in rows:
        own = f"{1e3 * row.step:.0f} ± {1e3 * row.spread:.0f}"
        best = f"{1e3 * row.peers[row.best_peer]:.0f}"
        table.add_row(row.case, own, f"{1e3 * row.predicted:.0f}", row.best_peer, best, f"{row.speedup:.2f}", row.plan)
    console = Console(width=160)
    console.print(table)
    for row in rows:
        for name, why in row.left_out.items():
            console.print(f"{row.case}: without {name}: {why}")
    if any(row.ablations for row in rows):
        console.print(_ablation_table(rows))
    mean = statistics.geometric_mean(row.speedup for row in rows)
    console.print(f"geometric mean of the speedups {mean:.2f}, least {min(row.speedup for row in rows):.2f}")


def _ablation_table(rows: Sequence[Row]) -> Table:
    """How many times as long the step of a plan takes without a kind of choice."""
    table = Table("", *(row.case for row in rows), "mean", title="times as long as the planned step")
    for name in ABLATIONS:
        ratios = [row.ablations[name] / row.step if name in row.ablations else None for row in rows]
        known = [ratio for ratio in ratios if ratio is not None]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(name, *cells, f"{statistics.geometric_mean(known):.2f}" if known else "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--mbit", type=int, default=200, help="rate of each host's link")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--samples", type=int, help="of the global batch; by default the case's own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-share", type=float, default=1.0, help="memory limit, as a part of what DDP needs")
    parser.add_argument("--device-rates", action="store_true", help="plan without times of the step's ops")
    parser.add_argument("--ablations", action="store_true", help="also run plans without a kind of choice each")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, as JSON")
    given = parser.parse_args()
    if "RANK" in os.environ:
        _run_rank(given)
        return
    with hosts(given.hosts, given.mbit) as names, tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        own = {"SHARDWEAVE_CACHE": folder, "BENCH_ROWS": str(found)}
        run_ranks(names, given.ranks_per_host, "benchmarks.bench", sys.argv[1:], own)
        rows = [Row(**row) for row in json.loads(found.read_text())]
    where = f"{len(names)} hosts at {given.mbit} Mbit/s" if names else "loopback"
    show(f"{where}, {given.ranks_per_host} ranks each", rows)
    if given.out is not None:
        given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _run_rank(given: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = (
        given.samples, given.rounds, given.memory_share, given.ranks_per_host, given.device_rates, given.ablations
    )  # fmt: skip
    rows = [measure(name, *settings) for name in given.cases]
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_ROWS"]).write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
