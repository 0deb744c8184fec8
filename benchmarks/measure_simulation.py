"""Time the simulator on a large model on many devices: a figure of docs/measured.md.

python -m benchmarks.measure_simulation [--layers 96] [--nodes 128]

The model is a GPT-3 of 96 layers, captured on the meta device and lowered as `plan` does: Megatron's column and row
inside a node, at rest sharded over the data ranks.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.demo.model import GPT, GPTConfig
from shardweave.planner.search.evaluation import Decision


def timed(what: str, call: Callable[[], Any]) -> Any:
    """The result of a call, its CPU seconds printed."""
    begun = time.process_time()
    found = call()
    print(f"{what:<34}{time.process_time() - begun:8.2f} CPU-s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=128)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cluster = sw.Cluster.preset("dgx-h100", nodes=given.nodes)
    with torch.device("meta"):
        config = GPTConfig(vocabulary=51200, context=2048, layers=given.layers, heads=96, width=12288)
        model = GPT(config).to(torch.bfloat16)
        tokens = torch.zeros(8 * given.nodes, 2048, dtype=torch.long)
    batch = {"tokens": tokens, "targets": tokens}
    compiler = timed("capture and annotate", lambda: Compiler(model, cluster, batch, None, None))
    rest = given.nodes
    grids = {"column": sw.Grid(x=8, y=1, z=1, data=rest), "row": sw.Grid(x=1, y=8, z=1, data=rest)}
    turned = ("down", "out")
    strategies = {
        op.name: sw.Strategy(grids["row" if op.name.endswith(turned) else "column"], rest=rest)
        for op in compiler.annotated.ops
    }
    decision = Decision(strategies, {}, {})
    compiled = timed("lower", lambda: compiler.lowering.draft(compiler.annotated, decision, compiler.options))
    graphs = (compiled.step.forward, compiled.step.backward)
    print(f"{cluster.world_size} devices, {sum(len(module.graph.nodes) for module in graphs):,} nodes")
    for again in ("", ", again"):
        timeline = timed("simulate" + again, lambda: compiler.lowering.timeline(compiled))
    causes = ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in timeline.exposed_by_cause().items())
    print(f"step {timeline.step_time:.2f} s, exposed {timeline.exposed_communication:.2f} s: {causes}")
    print("utilisation", {name: round(part, 3) for name, part in timeline.utilisation.items()})
    print(timed("report", timeline.memory_report))


if __name__ == "__main__":
    main()
