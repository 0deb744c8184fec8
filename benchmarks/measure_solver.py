"""Solve synthetic planning problems and print CPU seconds, status and gap for each: the figures of docs/measured.md.

python benchmarks/measure_solver.py [--sizes 32x64 96x1024] [--gap 1e-3]

The tables are drawn with a seed, like those of a transformer: equal layers of eleven ops with residual edges. Grids
that split more compute less well and communicate more; weights that rest on more devices keep less and load the links
in both windows; an op that is recomputed saves less and computes more. Links hide behind compute, a change of layout
does not.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardweave.planner.problem.problem import Candidate, Edge, Op, Problem
from shardweave.planner.solver.solver import smallest, solve

WINDOWS = (("compute", "inner", "outer"), ("compute", "inner", "outer"))
NAMES = ("norm1", "qkv", "rope", "attention", "proj", "add1", "norm2", "gate", "act", "down", "add2")
WEIGHTS = {"norm1": 0.0001, "qkv": 1.5, "proj": 1.0, "norm2": 0.0001, "gate": 7.0, "down": 3.5}
"""Parameters of a layer's ops, in units of the width squared."""

AGAIN = ("attention", "gate", "act")
"""Ops that can be recomputed."""

INNER = 8
"""Devices that the inner level joins."""


@dataclass(frozen=True)
class Grid:
    """Devices that split the batch, the sequence or the weights' columns, and the weights' rows."""

    data: int
    columns: int
    rows: int


def grids(devices: int) -> list[Grid]:
    powers = [2**i for i in range(devices.bit_length())]
    return [
        Grid(devices // (columns * rows), columns, rows)
        for columns, rows in itertools.product(powers, powers)
        if columns * rows <= min(devices, 128)
    ]


def synthetic(layers: int, devices: int, boundness: float, seed: int = 0) -> Problem:
    """A problem without a limit. `boundness` is how long the links take for what compute does in a second."""
    random = np.random.default_rng(seed)
    shapes = grids(devices)
    work = 3e-2 * 64 / devices
    link = work * boundness

    def candidates(name: str) -> tuple[Candidate, ...]:
        weight = WEIGHTS.get(name, 0.0)
        flops = work * (weight or (2.0 if name == "attention" else 0.05)) * random.uniform(0.9, 1.1)
        found = []
        for port, grid in enumerate(shapes):
            tensor = grid.columns * grid.rows
            compute = flops * (1.0 + 0.02 * np.log2(tensor) ** 2) * random.uniform(0.95, 1.05)
            block = link * (0.04 if weight > 0.01 else 0.005) * (grid.columns - 1 + 1.5 * (grid.rows - 1)) / 8
            block *= 6.0 if tensor > INNER else 1.0
            saved = int(2**26 * (0.5 + weight / 8) * 64 / devices * random.uniform(0.9, 1.1))
            rests = sorted({1, min(INNER, grid.data), grid.data}) if weight > 0.01 else [1]
            for rest, again in itertools.product(
                rests, (False, True) if name in ("attention", "act", "gate") else (False,)
            ):
                state = int(2**24 * weight * (0.15 + 0.85 / rest) * 16 / tensor)
                gathered = link * weight / tensor * random.uniform(0.95, 1.05)
                reduced = gathered * (grid.data > 1)
                gathered *= rest > 1
                outer = 1.5 if rest > INNER else 0.25
                forward = (compute + block, gathered, gathered * outer * (rest > INNER))
                backward = (2 * compute + 2 * block + compute * again, gathered + reduced, outer * (gathered + reduced))
                found.append(
                    Candidate(
                        f"{grid} /{rest}{' again' if again else ''}",
                        2e-6,
                        state_bytes=state,
                        saved_bytes=saved // 16 if again else saved,
                        transient_bytes=int(2**21 * (weight / tensor * (rest > 1) + saved / 2**26)) if weight else 0,
                        in_port=port,
                        out_port=port,
                        loads=(*forward, *backward),
                    )
                )
        return tuple(found)

    def change(size: float) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        ways = len(shapes)
        seconds = np.zeros((ways, ways))
        factor = np.array(
            [[sum(abs(np.log2(x / y)) for x, y in ((a.data, b.data), (a.columns, b.columns), (a.rows, b.rows)))
              for b in shapes] for a in shapes]
        )  # fmt: skip
        blocking = link * size * 0.1 * factor * random.uniform(0.8, 1.2, (ways, ways))
        nothing = np.zeros((ways, ways))
        loads = np.stack([blocking, nothing, nothing, blocking, nothing, nothing])
        kept = (2**22 * size * (factor > 2)).astype(np.int64)
        return seconds, loads, kept

    tables = {name: candidates(name) for name in NAMES}
    ends = {name: candidates("proj") for name in ("embedding", "head")}
    changes = {name: change(0.5 if name in ("qkv", "act") else 1.0) for name in (*NAMES, "residual")}
    ops, edges = [Op("embedding", ends["embedding"], "embedding")], []
    for layer in range(layers):
        begin = len(ops) - 1
        for name in NAMES:
            edges.append(Edge(len(ops) - 1, len(ops), *changes[name]))
            ops.append(Op(f"{layer}.{name}", tables[name], name))
        middle, end = begin + 1 + NAMES.index("add1"), len(ops) - 1
        edges += [Edge(begin, middle, *changes["residual"]), Edge(middle, end, *changes["residual"])]
    edges.append(Edge(len(ops) - 1, len(ops), *changes["norm1"]))
    ops.append(Op("head", ends["head"], "head"))
    return Problem(tuple(ops), tuple(edges), windows=WINDOWS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["32x64", "96x1024"], help="layers x devices")
    parser.add_argument("--boundness", nargs="+", type=float, default=[0.3, 3.0, 30.0])
    parser.add_argument("--memory", nargs="+", type=float, default=[0.02, 0.2, 0.6, 2.0],
                        help="0: the least that does, 1: as much as the fastest would like")  # fmt: skip
    parser.add_argument("--gap", type=float, default=1e-3)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("layers devices boundness memory   CPU-s  wall-s  status         step      gap")
    for size, boundness in itertools.product(args.sizes, args.boundness):
        layers, devices = map(int, size.split("x"))
        problem = synthetic(layers, devices, boundness, args.seed)
        least = smallest(problem)
        assert least is not None
        low, high = problem.memory(least), problem.memory(solve(problem, gap=args.gap).choice)
        for memory in args.memory:
            limited = replace(problem, memory_limit=low + int(memory * (high - low)))
            begin = time.process_time()
            found = solve(limited, time_limit=args.time_limit, gap=args.gap)
            seconds = time.process_time() - begin
            print(f"{layers:6} {devices:7} {boundness:9} {memory:6} {seconds:7.2f} {found.seconds:7.2f}  "
                  f"{found.status:9} {found.objective:9.4f} {found.gap:8.5f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
