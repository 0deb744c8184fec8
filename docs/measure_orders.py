"""How close the schedule comes to what no order can beat, and how long it takes to find: the table of docs/weaving.md.

python -m docs.measure_orders
"""

from __future__ import annotations

import time

from shardweave.options import Options
from shardweave.passes.schedule import Schedule
from tests.passes.bounds import exposed_at_least
from tests.passes.test_weave import forced, step_of, unordered, without_slowdown

MODELS = [
    ("rtx3090-nvlink", "tensor", 12, 2048, 2, "fine"),
    ("rtx3090-nvlink", "zdp", 12, 2048, 2, "none"),
    ("rtx3090-nvlink", "tensor and zdp", 12, 2048, 1, "fine"),
    ("rtx3090-pcie", "tensor and zdp", 12, 2048, 2, "fine"),
    ("rtx3090-nvlink", "tensor", 8, 8192, 2, "fine"),
    ("rtx3090-nvlink", "attention", 12, 2048, 1, "none"),
    ("rtx3090-nvlink", "attention", 12, 2048, 2, "none"),
    ("rtx3090-nvlink", "tensor and zdp", 96, 2048, 1, "fine"),
    ("rtx3090-nvlink", "tensor and zdp", 96, 2048, 2, "fine"),
]
"""Cluster of 8 nodes, plan (see `forced`), layers, hidden size, sub-batches, recomputation."""
BOUNDED = 24
"""Layers up to which the bound, which is quadratic, is computed."""


def main() -> None:
    print("| cluster | plan | layers | hidden size | sub-batches | recompute | nodes | order | exposed / bound |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for preset, plan, layers, width, sub_batches, recompute in MODELS:
        cluster, degree = without_slowdown(preset, 8), 4 if width == 2048 else 8
        force = forced(plan, degree, cluster.mesh().world_size)
        options = Options(precision="fp16", sub_batches=sub_batches, recompute=recompute)
        parts = unordered(cluster, step_of(layers, width, 128 if width == 2048 else 64), force, options)
        begun = time.process_time()
        exposed = sum(Schedule(cluster)._best(tasks, None).seconds - sum(tasks.seconds) for tasks in parts)
        seconds, nodes = time.process_time() - begun, sum(len(tasks.nodes) for tasks in parts)
        close = f"{exposed / sum(map(exposed_at_least, parts)):.2f}" if layers <= BOUNDED else ""
        row = (preset, plan, layers, f"{width:,}", sub_batches, recompute, f"{nodes:,}", f"{seconds:.1f} CPU-s", close)
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
