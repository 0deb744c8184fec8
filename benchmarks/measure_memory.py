"""Predicted and measured peak memory of generated steps on local gloo ranks: the figures of docs/measured.md.

python -m benchmarks.measure_memory                    every model under every way to spread it
python -m benchmarks.measure_memory gpt unet --ranks 2
"""

from __future__ import annotations

import argparse
import warnings

from shardweave.runtime.launch import WorkerPool
from tests.measured_memory import CASES, WAYS, measure_all, prepare, ways_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    ways = "of " + ", ".join(WAYS) + "; in four micro-batches: 'zero1 x4'"
    parser.add_argument("--ways", nargs="*", default=list(WAYS), help=ways)
    given = parser.parse_args()
    warnings.simplefilter("ignore")

    errors: list[float] = []
    print("| model | plan | predicted, bytes | measured | off | off, states at rest not counted | rest off |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with WorkerPool() as pool:
        for name in given.models or CASES:
            prepared = prepare(CASES[name], given.ranks, ways_of(given.ways))
            plans = [plan.to_dict() for _, plan, _ in prepared]
            ranks = pool.run(measure_all, CASES[name], given.ranks, plans, nprocs=given.ranks, timeout=600.0)
            for (way, _, timeline), *figures in zip(prepared, *ranks, strict=True):
                worst = max(figures, key=lambda found: found.peak)
                off = timeline.peak_memory / worst.peak - 1
                rest = sum(timeline.memory.at_rest().values())
                errors.append(off)
                print(
                    f"| {name} | {way} | {timeline.peak_memory:,} | {worst.peak:,} | {off:+.1%} |"
                    f" {(timeline.peak_memory - rest) / (worst.peak - worst.rest) - 1:+.1%} | {worst.rest - rest} |",
                    flush=True,
                )
    off = max(abs(off) for off in errors)
    print(f"{len(errors)} steps: the peak is off by at most {off:.1%}")


if __name__ == "__main__":
    main()
