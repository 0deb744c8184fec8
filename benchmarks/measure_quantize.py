"""What quantized collectives cost in accuracy, and what they are predicted to gain: the tables of docs/quantize.md.

python -m benchmarks.measure_quantize              both
python -m benchmarks.measure_quantize --steps 200  of a longer training
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.options import Options
from shardweave.demo.model import GPT, GPTConfig
from shardweave.demo.run import Recipe, train, train_single
from shardweave.ir import Quantized
from shardweave.ir.formatting import readable_bytes, readable_seconds

BITS: dict[str, Mapping[Quantized, int]] = {
    "none": {},
    "parameters in int8": {"parameters": 8},
    "gradients in int8": {"gradients": 8},
    "gradients in int4": {"gradients": 4},
    "both in int8": {"parameters": 8, "gradients": 8},
    '`"zero++"`': {"parameters": 8, "gradients": 4},
}
SMALL = GPTConfig(context=64, layers=2, heads=4, width=128)
NODES = sw.Cluster.preset("local-cpu").fitted(devices=2, nodes=2)
"""Four ranks as two nodes of two, so that a gradient takes two stages."""
LARGE = GPTConfig(vocabulary=32000, context=1024, layers=24, heads=16, width=2048)
CLUSTERS = {"dgx-a100": 4, "rtx3090-pcie": 8}
"""With 1,600 and 100 Gbit/s a node, and their nodes."""


def measured(recipe: Recipe) -> None:
    """Losses of training on one device, and on four ranks with each choice of bits."""
    alone = train_single(recipe).losses
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{index}.json") for index, _ in enumerate(BITS)]
        for path, bits in zip(paths, BITS.values(), strict=True):
            options = Options(force={"*": "hpz:2"}, quantize=bits, micro_batches=1)
            sw.plan(recipe.build(), NODES, recipe.text().draw(0), options=options).save(path)
        found = sw.launch(trained, nprocs=4, args=(recipe, paths))[0]
    print(f"| quantized | loss after {recipe.steps} steps | difference from one device | largest on the way |")
    print("| --- | --- | --- | --- |")
    print(f"| one device | {alone[-1]:.4f} | | |")
    for name, losses in zip(BITS, found, strict=True):
        parts = [got / want - 1 for got, want in zip(losses, alone, strict=True)]
        print(f"| {name} | {losses[-1]:.4f} | {100 * parts[-1]:+.4f} % | {100 * max(map(abs, parts)):.4f} % |")


def trained(recipe: Recipe, paths: list[str]) -> list[tuple[float, ...]]:
    """The losses of each plan, on one of the ranks."""
    found = []
    for path in paths:
        plan = sw.Plan.load(path)
        parallel = sw.compile_parallel(recipe.build(), plan.cluster, recipe.text().draw(0), plan=plan)
        assert isinstance(parallel, sw.ParallelModule)
        found.append(train(recipe, parallel, parallel, path, show=False).losses)
    return found


def simulated() -> None:
    """Steps of a GPT of 1.3 billion parameters, states sharded over all devices."""
    with torch.device("meta"):
        model, tokens = GPT(LARGE), torch.zeros(64, LARGE.context, dtype=torch.long)
    compiler = Compiler(model, sw.Cluster.local(1), (tokens, tokens), Options(precision="bf16"), None)
    print("| cluster | states | quantized | a step | exposed communication | memory |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, nodes in CLUSTERS.items():
        cluster = sw.Cluster.preset(name, nodes=nodes)
        for word in ("zero3", "hpz"):
            for said, bits in BITS.items():
                asked: dict[str, Any] = {"sub_batches": 1, "recompute": "full", "buckets": True, "keep_gathered": False}
                options = Options(force={"*": word}, precision="bf16", micro_batches=1, quantize=bits, **asked)
                plan = compiler.with_(cluster, options).plan()
                times = readable_seconds(plan.step_time), readable_seconds(plan.exposed_communication)
                print(f"| {name} | `{word}` | {said} | {' | '.join(times)} | {readable_bytes(plan.peak_memory)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    measured(Recipe(SMALL, steps=steps))
    print()
    simulated()


if __name__ == "__main__":
    main()
