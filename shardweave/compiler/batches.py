"""The batch size, where it is left open: the one of which a sample takes the least time.

OSDP (arXiv 2209.13258, Algorithm 1) plans for one batch size after another until none fits, and takes the plan with the
most samples a second. Larger batches mostly spend less on communication for each sample, until memory asks for slower
plans. So sizes double here until nothing fits or nothing is gained; then the sizes between the last that fits and the
first that does not are halved a few times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardweave.compiler.plan import Plan
from shardweave.compiler.sweep import Point, Sweep
from shardweave.cost_model import Cluster
from shardweave.errors import InfeasibleError

GAIN = 0.01
"""The part of a sample's time that twice the batch has to save for four times of it to be looked at."""

HALVINGS = 3
"""How often sizes between one that fits and one that does not are halved."""


def batches(cluster: Cluster, memory_limit: int, planned: Callable[[int], Plan]) -> Sweep:
    """The plans of several batch sizes, from the smallest on; `Sweep.batch` is the best.

    Parameters
    ----------
    memory_limit : int
        Of the plans.
    planned : callable
        From a number of samples, a global batch, to its plan.
    """
    points: dict[int, Point] = {}

    def seconds(size: int) -> float:
        """Seconds that a sample takes; infinite where nothing fits."""
        try:
            plan = planned(size)
        except InfeasibleError as error:
            points[size] = Point(memory_limit, cluster, None, str(error), size)
        else:
            points[size] = Point(memory_limit, cluster, plan, "", size)
        return points[size].seconds

    low, high = cluster.world_size, 0
    last = seconds(low)
    while last == math.inf and low > 1:
        low, high = low // 2, low
        last = seconds(low)
    while not high and last < math.inf:
        found = seconds(2 * low)
        if found == math.inf:
            high = 2 * low
        else:
            low, gained, last = 2 * low, found <= last * (1 - GAIN), found
            if not gained:
                break
    for _ in range(HALVINGS if last < math.inf else 0):
        middle = (low + high) // 2
        middle -= middle % min(cluster.world_size, low)  # of which each device has as many
        if not low < middle < high:
            break
        low, high = (low, middle) if seconds(middle) == math.inf else (middle, high)
    return Sweep(tuple(points[size] for size in sorted(points)))
