"""How close the schedule comes to what no order can beat, and how long it takes to find: the table of docs/overlap.md.

python -m benchmarks.measure_orders
"""

from __future__ import annotations

import time

from tests.passes.bounds import exposed_at_least
from tests.passes.test_list_scheduler import MODELS, Model, exposed_seconds

ROWS = [
    *MODELS,
    Model("rtx3090-nvlink", "attention", 12, 2048, 1, "none"),
    Model("rtx3090-nvlink", "tensor and zdp", 96, 2048, 1, "fine"),
    Model("rtx3090-nvlink", "tensor and zdp", 96, 2048, 2, "fine"),
]
BOUNDED = 24
"""Layers up to which the bound, which is quadratic, is computed."""


def main() -> None:
    print("| cluster | plan | layers | hidden size | sub-batches | recompute | nodes | order | exposed / bound |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in ROWS:
        cluster, parts = model.unordered()
        begun = time.process_time()
        exposed = exposed_seconds(cluster, parts)
        seconds, nodes = time.process_time() - begun, sum(len(tasks.nodes) for tasks in parts)
        close = f"{exposed / sum(map(exposed_at_least, parts)):.2f}" if model.layers <= BOUNDED else ""
        said = [f"{each:,}" if isinstance(each, int) else each for each in model]
        print("|", " | ".join([*said, f"{nodes:,}", f"{seconds:.1f} CPU-s", close]), "|", flush=True)


if __name__ == "__main__":
    main()
