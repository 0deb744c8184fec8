"""What Megatron-LM's pipelines of AxoNN's Table III take, stage by stage.

python -m benchmarks.measure_stages FOLDER

Pipeline parallelism is not built. A stage is planned as a model of its own: its part of the layers, tensor parallel
over a node's GPUs, data parallel over the rest, nothing overlapped. The bubble (Narayanan et al., arXiv 2104.04473,
section 2.2) is a micro-batch more for each further stage. What stages send to each other is left out. Half a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from shardweave.demo.model import GPTConfig
from shardweave.ir import Ablation, Traffic
from shardweave.validation import Setting, axonn, load
from shardweave.validation.rows import table

STAGES = {"GPT-5B": 1, "GPT-20B": 4, "GPT-80B": 16}
"""The fewest with which a model's states fit; layers are rounded up to a multiple, as the paper says that it did."""
WAITED: tuple[Traffic, ...] = ("activation", "gather", "scatter", "reduce")


def part_of_peak(config: GPTConfig, gpus: int, stages: int, batch: int) -> float:
    """Hardware FLOPs over the peak, as the table counts them; one sequence a micro-batch and replica."""
    layers = -(-config.layers // stages)
    whole, stage = replace(config, layers=layers * stages), replace(config, layers=layers)
    replicas = gpus // (axonn.GPUS_PER_NODE * stages)
    count = batch // replicas
    turns = count + stages - 1
    force = {"*": f"tensor:{axonn.GPUS_PER_NODE}x1x1"}
    asked = {"force": force, "micro_batches": turns, "ablation": Ablation(blocking=WAITED)}
    plan = axonn.plan(Setting(), stage, gpus // stages, turns * replicas, **asked)
    flops = axonn.hardware_flops(whole, count * replicas * axonn.SEQUENCE)
    return flops / plan.step_time / gpus / axonn.PEAK_FLOPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    paper = load(parser.parse_args().folder)["axonn"]
    sizes = {row["name"]: axonn.config_of(row) for row in table(paper, "axonn", "models_table1")}
    print("| model, GPUs | stages | of the peak | Megatron-LM | DeepSpeed |\n| --- | --- | --- | --- | --- |")
    rows = [row for row in table(paper, "axonn", "weak_scaling_table3") if row["model"] in STAGES]
    for row in rows:
        name, gpus, stages = row["model"], row["gpus"], STAGES[row["model"]]
        found = part_of_peak(sizes[name], gpus, stages, paper["training_setup"]["batch_sequences_assumed"])
        print(f"| {name}, {gpus} | {stages} | {found:.2f} | {row['megatron_lm']} | {row['deepspeed_3d']} |", flush=True)


if __name__ == "__main__":
    main()
