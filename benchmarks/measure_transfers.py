"""Transfers between two hosts over gloo, one after another: torch's collectives, and direct sends.

python -m benchmarks.measure_transfers                # over 200 Mbit/s
python -m benchmarks.measure_transfers --mbit 1000

A step starts many collectives before it waits for the first. So twelve of a kind are started at once, and a row has the
milliseconds of each; "link" is what the bytes of a reduce-scatter take over the link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.hosts import hosts, run_ranks
from shardweave.distributed import RuntimeMesh, exchange, gather
from shardweave.ir import Mesh

SIZES = [2**power for power in (15, 17, 19, 20, 22)]
COUNT, ROUNDS = 12, 5
c10d = torch.ops._c10d_functional


def measure(mbit: int) -> None:
    """What each rank does; the first one prints the table."""
    dist.init_process_group("gloo")
    mesh = Mesh.of_levels([("node", 2)])
    name = RuntimeMesh(mesh).group_over(mesh.axes).group_name
    kinds = "all-reduce", "reduce-scatter", "all-to-all", "direct", "all-gather", "direct all-gather"
    table = Table("KiB", "link", *kinds, title=f"ms each, {COUNT} at once over {mbit} Mbit/s")
    for size in SIZES:
        starts = _starts(size, name)
        seconds: list[list[float]] = [[] for _ in starts]
        for _ in range(ROUNDS):
            for start, taken in zip(starts, seconds, strict=True):
                dist.barrier()
                begun = time.perf_counter()
                for started in [start() for _ in range(COUNT)]:
                    c10d.wait_tensor(started)
                taken.append((time.perf_counter() - begun) / COUNT)
        link = size / 2 * 8 / (mbit * 1e6)
        table.add_row(str(size // 1024), *(f"{1e3 * each:.1f}" for each in (link, *map(statistics.median, seconds))))
    if dist.get_rank() == 0:
        Console(width=120).print(table)
    dist.barrier()
    dist.destroy_process_group()


def _starts(size: int, name: str) -> list[Callable[[], torch.Tensor]]:
    """What starts a transfer of each kind, of a buffer of so many bytes in all."""
    whole, rows = torch.randn(size // 4), [size // 8] * 2
    half = whole[: size // 8].clone()
    return [
        lambda: c10d.all_reduce(whole, "sum", name),
        lambda: c10d.reduce_scatter_tensor(whole, "sum", 2, name),
        lambda: c10d.all_to_all_single(whole, rows, rows, name),
        lambda: exchange(whole, rows, rows, name),
        lambda: c10d.all_gather_into_tensor(half, 2, name),
        lambda: gather(half, name),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="rate of each host's link")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.mbit)
        return
    with hosts(2, given.mbit) as names:
        run_ranks(names, 1, "benchmarks.measure_transfers", sys.argv[1:], {})


if __name__ == "__main__":
    main()
