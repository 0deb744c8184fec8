"""Predict before anyone measures: ``python -m benchmarks.predict`` writes docs/predictions.md and its figures.

Ten minutes on one core; `--only NAME` prints the section of one model instead.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardweave as sw
from shardweave.compiler.baselines import Baseline, fsdp, hsdp, megatron
from shardweave.compiler.compiler import Compiler
from shardweave.ir.errors import ParallelError
from shardweave.ir.formatting import readable_bytes, readable_seconds
from shardweave.planner.search.evaluation import Decision, Evaluation
from shardweave.sharding.annotate import last_match, layer_of

DOCS = Path(__file__).parents[1] / "docs"

HEAD = """# Predictions

Read predictions of two training steps on 512 and 16,384 GPUs, and which measurements would prove them wrong.
**Predicted on 2026-11-24**: nothing here has been measured, and no constant was adjusted to any of these numbers. This
command makes the page, its figures and the plans again, on a laptop:

    python -m benchmarks.predict

| assumed | |
| --- | --- |
| software | the generated step, kernel by kernel: no Inductor, no CUDA graphs, no fused norms or rotary embeddings \
(`transformers`' modules as torch writes them out); FlashAttention for causal attention; NCCL rings without \
in-switch reduction; no quantization. Anything that fuses makes a step shorter |
| parallelism | **no pipeline parallelism**, which this compiler does not have: the best plan without it |
| training | bfloat16 mixed precision, float32 masters and AdamW (16 bytes a parameter with gradients), gradients \
reduced in float32, no dropout, no data loading, no checkpoints. One step is the whole batch |
| planning | seconds by the clock, on one core that may have had other work |
| memory | at most nine tenths of a device's 80 GB; the rest is left to the context, NCCL and fragments |
"""

TAIL = """## What would prove this wrong

Run the plan (`sw.compile_parallel` on such a cluster) for some twenty steps, leave the first ten out, and profile one.
Any of these proves the prediction wrong:

- **A step time more than 15 % off** under the assumptions above. In the tables of [validation.md](validation.md) on
  levels of overlap and on schedules the mean errors are 2 to 5 %, and plans on 1,024 GPUs were too fast by up to 9 %.
  So a step is more likely to be slower than faster. The host is assumed to be ahead of the device; DeepSpeed's was not,
  on 1,024 GPUs.
- **A peak of `torch.cuda.max_memory_allocated()` above the predicted one.** The prediction is meant to cover it.
- **Another order**: a plan of the tables "planned instead" that is measured to be faster by more than 5 %.

The tables "if this were otherwise" tell which constant was wrong: each row is the same plan under one other constant.

| in the profile | wrong |
| --- | --- |
| compute is off, and all matrix products are off alike | matmul efficiency |
| compute is right by itself and slow beside collectives | the slowdown |
| compute is right, exposed communication is off, large collectives as much as small ones | bandwidth |
| compute is right, exposed communication is off, small collectives more | latency of the hops |
| none of these | the schedule: the order of starts and waits, which the timeline shows |

A gap says how far away the program's bound is: with a gap of 13 %, a plan may exist that is faster by so much. This
would make the plan poor, not the prediction wrong. The same holds for a baseline that is ahead of the plan in the
tables by a fraction of a percent: the planner stops when a simulated step is within a few percent of its bound.
"""


@dataclass(frozen=True)
class Case:
    """One prediction.

    Parameters
    ----------
    title, sizes : str
        What the section is called, and the model's sizes in words.
    model : callable
        Builds it; called on the meta device.
    sequences, length : int
        The batch of a step.
    nodes : int
        Of 8 H100s.
    baselines : tuple of Baseline
        What else is planned.
    """

    title: str
    sizes: str
    model: Callable[[], nn.Module]
    sequences: int
    length: int
    nodes: int
    baselines: tuple[Baseline, ...]

    @property
    def cluster(self) -> sw.Cluster:
        return sw.Cluster.preset("dgx-h100", nodes=self.nodes)

    def compiler(self) -> Compiler:
        with torch.device("meta"):
            model, tokens = self.model(), torch.zeros(self.sequences, self.length, dtype=torch.long)
        options = sw.Options(precision="bf16", optimizer="adamw", time_limit=60)
        return Compiler(model, self.cluster, {"input_ids": tokens, "labels": tokens}, options, None)


def llama() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(num_hidden_layers=80, use_cache=False, **sizes))
    return model


def gpt() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 51200, "n_embd": 25600, "n_head": 160, "n_layer": 128, "n_positions": 2048}
    sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))
    return model


CASES = {
    "llama-70b": Case(
        "Llama-3-70B on 512 H100",
        "80 layers, width 8192, 64 heads, 8 key-value heads, perceptron 28672, vocabulary 128256",
        llama, 512, 8192, 64,
        (fsdp(), hsdp(64), hsdp(128), megatron(8, zero=1), megatron(8, zero=3)),
    ),
    "gpt-1t": Case(
        "GPT of 1 trillion parameters on 16,384 H100",
        "128 layers, width 25600, 160 heads, vocabulary 51200 (arXiv 2104.04473, Table 1, there 3,072 sequences)",
        gpt, 4096, 2048, 2048,
        (fsdp(), megatron(8, zero=3), megatron(16, zero=3), megatron(32, zero=1)),
    ),
}  # fmt: skip
"""By name: what plan, figure and section are called."""


def evaluation(compiler: Compiler, plan: sw.Plan, cluster: sw.Cluster) -> Evaluation:
    """What the same plan takes on a cluster with other constants, with more of its layers simulated one by one."""
    strategies = {name: choice.strategy for name, choice in plan.choices.items()}
    layers = {layer_of(name) for name in strategies} - {""}
    modes = {layer: last_match(plan.overlap.recompute, layer, "none") for layer in layers}
    decision = Decision(strategies, compiler.lowering.joins_of(plan), modes)
    limit = compiler.options.limit(compiler.cluster)
    options = replace(compiler.options, micro_batches=plan.micro_batches, memory_limit=limit).with_overlap(plan.overlap)
    return compiler.with_(cluster).evaluate(decision, options)


def constants(cluster: sw.Cluster) -> Mapping[str, sw.Cluster]:
    """The cluster with one constant changed, by what is changed: what a measurement could show to be wrong."""
    device = cluster.device

    def matmul(factor: float) -> sw.Cluster:
        return replace(cluster, device=replace(device, matmul_efficiency=factor * device.matmul_efficiency))

    def level(index: int, **changes: Any) -> sw.Cluster:
        levels = list(cluster.levels)
        levels[index] = replace(levels[index], **changes)
        return replace(cluster, levels=tuple(levels))

    inside, between = cluster.levels
    return {
        "matmul efficiency +10 %": matmul(1.1),
        "matmul efficiency -10 %": matmul(0.9),
        "network between nodes -30 %": level(1, efficiency=0.7 * between.efficiency),
        "NVLink -30 %": level(0, efficiency=0.7 * inside.efficiency),
        "hops between nodes twice as slow": level(1, latency=2 * between.latency),
        "compute not slowed down beside communication": replace(cluster, device=replace(device, overlap_slowdown=1.0)),
    }


def machine() -> str:
    """The figures of the cluster that the predictions stand on."""
    cluster = sw.Cluster.preset("dgx-h100", nodes=1)
    inside, between = cluster.levels
    device = cluster.device
    rows = [
        ("peak in bfloat16, dense", f"{device.peak('bfloat16') / 1e12:.0f} TFLOP/s", "datasheet"),
        ("of it, large matrix products", f"{device.matmul_efficiency:.2f}", "modelling choice"),
        ("memory bandwidth", f"{device.memory_bandwidth / 1e12:.2f} TB/s", "datasheet"),
        ("of it, kernels", f"{device.memory_efficiency:.2f}", "modelling choice"),
        ("a kernel at the least", f"{device.launch_latency * 1e6:.1f} us", "modelling choice"),
        ("compute beside a collective", f"{device.overlap_slowdown:.2f} times as long", "arXiv 2507.03114"),
        ("a collective at the least", f"{device.collective_latency * 1e6:.1f} us", "NCCL's tuning.cc"),
    ]
    for level, name in ((inside, "NVLink"), (between, "network, an adapter a GPU")):
        rate = f"{level.bandwidth / 1e9:.0f} GB/s a direction, of it {level.efficiency:.2f}"
        rows.append((name, f"{rate}; {level.latency * 1e6:.1f} us a hop", "datasheet; NCCL's tests and tuning.cc"))
    said = [f"| {what} | {value} | {source} |" for what, value, source in rows]
    intro = "The machine is the preset `dgx-h100`, 8 GPUs a node; each figure's source is in its file:\n"
    return "\n".join([intro, "| figure | value | source |\n| --- | --- | --- |", *said, ""])


def section(name: str, case: Case) -> str:
    """A model's part of the page."""
    compiler = case.compiler()
    plan = compiler.plan(weigh=True)
    image = DOCS / "images" / f"prediction-{name}.png"
    timeline = plan.timeline()
    timeline.plot(memory_limit=plan.memory_limit).savefig(image, dpi=75)
    parameters = sum(math.prod(shape) for shape in compiler.model_key.parameters.values())
    flops = plan.model_flops
    lines = [
        f"## {case.title}\n",
        f"`transformers.{compiler.name}`: {case.sizes}; {parameters / 1e9:,.1f} billion parameters. A "
        f"step is {case.sequences:,} sequences of {case.length:,} tokens, {plan.tokens / 1e6:.1f} million, and "
        f"{flops:.3g} FLOPs without recomputation, attention counted in full.\n",
        _headline(plan, timeline.step_time),
        in_words(plan),
        _by_op(plan),
        f"![One step on one device](images/{image.name})\n",
        _against(compiler, plan, case.baselines),
        _sensitivity(compiler, plan),
    ]
    return "\n".join(lines)


def _headline(plan: sw.Plan, whole: float) -> str:
    rows = {
        "step time": readable_seconds(plan.step_time),
        "the same with every layer simulated (the figure)": readable_seconds(whole),
        "tokens a second": f"{plan.tokens_per_second:,.0f}",
        "MFU": f"{100 * plan.mfu:.1f} %",
        "compute, slowed down by communication": readable_seconds(plan.compute_time),
        "exposed communication": readable_seconds(plan.exposed_communication),
        "peak memory a device": f"{readable_bytes(plan.peak_memory)} of {readable_bytes(plan.memory_limit)}",
        "micro-batches": str(plan.micro_batches),
        "overlap": str(plan.overlap) or "nothing",
        "status": f"{plan.status}; {readable_seconds(plan.program_time)} in the program, bound "
        f"{readable_seconds(plan.bound)}, gap {100 * plan.gap:.2g} %, of the program's own answer "
        f"{100 * plan.proven_gap:.2g} %",
        "planning": f"{plan.planning_seconds:.0f} s after the capture, "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB",
    }
    return "\n".join(["| predicted | |\n| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items()), ""])


def in_words(plan: sw.Plan) -> str:
    """What the strategies have in common."""
    chosen = [choice.strategy for choice in plan.choices.values()]
    tensor = [strategy for strategy in chosen if strategy.degree > 1]
    said = [f"Of {len(chosen)} ops with a parameter {len(chosen) - len(tensor)} are data parallel"]
    if tensor:
        said.append(f"and {len(tensor)} tensor parallel, over {_listed({each.degree for each in tensor})} devices")
    rests = f"parameters are sharded over {_listed({each.rest for each in chosen})} devices in a step"
    states = f"optimizer states over {_listed({each.states for each in chosen})}"
    return f"{' '.join(said)}; {rests}, {states}.\n"


def _listed(numbers: set[int]) -> str:
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} or {last}" if others else last


def _by_op(plan: sw.Plan) -> str:
    """The plan's explanation as Markdown, without runner-ups."""
    report = plan.explain()
    kept = range(len(report.columns) - 1)
    cells = [report.columns, ["---"] * len(report.columns), *report.rows]
    return "\n".join("| " + " | ".join(row[column].strip() for column in kept) + " |" for row in cells) + "\n"


def _against(compiler: Compiler, plan: sw.Plan, baselines: tuple[Baseline, ...]) -> str:
    lines = ["| planned instead | a step | longer | exposed | memory |\n| --- | --- | --- | --- | --- |"]
    for baseline in baselines:
        try:
            found = compiler.with_(options=baseline.over(compiler.options)).plan()
        except ParallelError as error:
            lines.append(f"| {baseline} | none: {str(error).split('. ')[0]} | | | |")
            continue
        longer = f"{100 * (found.step_time / plan.step_time - 1):+.1f} %"
        exposed, memory = readable_seconds(found.exposed_communication), readable_bytes(found.peak_memory)
        lines.append(f"| {baseline} | {readable_seconds(found.step_time)} | {longer} | {exposed} | {memory} |")
    return "\n".join(lines) + "\n"


def _sensitivity(compiler: Compiler, plan: sw.Plan) -> str:
    lines = [
        "The same plan with one constant changed. More layers are simulated one by one here than when plans are "
        "compared, so the\nfirst row differs from the step time above. The figure has all layers.\n\n"
        "| if this were otherwise | a step | longer | compute | exposed |\n| --- | --- | --- | --- | --- |"
    ]
    before = evaluation(compiler, plan, compiler.cluster)
    for what, cluster in {"as it is": compiler.cluster, **constants(compiler.cluster)}.items():
        after = evaluation(compiler, plan, cluster) if cluster is not compiler.cluster else before
        times = [readable_seconds(each) for each in (after.step_time, after.compute_time, after.exposed_communication)]
        longer = f"{100 * (after.step_time / before.step_time - 1):+.1f} %"
        lines.append(f"| {what} | {times[0]} | {longer} | {times[1]} | {times[2]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(CASES), help="print the section of one model")
    arguments = parser.parse_args()
    if arguments.only:
        print(section(arguments.only, CASES[arguments.only]))
        return
    sections = [section(name, case) for name, case in CASES.items()]
    (DOCS / "predictions.md").write_text("\n".join([HEAD, machine(), *sections, TAIL]), encoding="utf-8")


if __name__ == "__main__":
    main()
