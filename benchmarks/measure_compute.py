"""How near the prices of compute come to a real step: the demo's GPT on one rank, or on several gloo ranks.

python benchmarks/measure_compute.py [ranks]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import median

import torch

import shardweave as sw
from shardweave.cost_model import Cluster, node_seconds, node_work
from shardweave.cost_model.device_profile import profile_device, profiled_ops
from shardweave.demo.model import GPT, GPTConfig


def measure(ranks: int) -> dict[str, float]:
    """Seconds of a step's compute, by each way of pricing it and by the clock; without the cache."""
    config = GPTConfig()
    tokens = torch.zeros(8, config.context, dtype=torch.int64)
    cluster = Cluster.local(ranks)
    torch.manual_seed(0)
    parallel = sw.compile_parallel(GPT(config), cluster, (tokens, tokens))
    assert isinstance(parallel, sw.ParallelModule)
    graphs = list(parallel.graphs.values())
    nodes = [node for graph in graphs for node in graph.graph.nodes if node_work(node) is not None]

    def total(priced: Cluster) -> float:
        return sum(node_seconds(node, priced) for node in nodes)

    found = {"nodes": len(nodes), "preset": total(cluster)}
    begin = time.perf_counter()
    cluster = replace(cluster, device=profile_device(cluster.device, cache=False))
    found |= {"profiling the device": time.perf_counter() - begin, "measured device": total(cluster)}
    formula = [node_seconds(node, cluster) for node in nodes]
    begin = time.perf_counter()
    cluster = profiled_ops(cluster, graphs, cache=False)
    found |= {"profiling the ops": time.perf_counter() - begin, "measured ops": total(cluster)}
    assert cluster.measured is not None
    found["distinct ops"] = len(cluster.measured.ops.times)
    found["formula / measured, median op"] = median(f / node_seconds(n, cluster) for n, f in zip(nodes, formula))
    found["slowdown"] = cluster.device.overlap_slowdown
    steps = []
    for _ in range(7):
        begin = time.perf_counter()
        parallel(tokens, tokens).backward()
        steps.append(time.perf_counter() - begin)
    return found | {"real step": median(steps)}


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    result = sw.launch(measure, nprocs=count, args=(count,))[0] if count > 1 else measure(1)
    for name, value in result.items():
        print(f"{name:32} {value:.4g}")
