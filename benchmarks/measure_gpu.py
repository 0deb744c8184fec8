"""One GPU: what `Cluster.detect` measures, equality with eager mode, and a Llama of 1.2 B parameters in bfloat16.

python -m benchmarks.measure_gpu                        # on a machine with a GPU; without one it says so
python -m benchmarks.measure_gpu --only cluster equality
python -m benchmarks.measure_gpu --hidden 128 --layers 2 --sequence 64 --any-device      # to try the script on a CPU

Steps are forward and backward, what `plan.step_time` predicts; they take turns. The step of AdamW is timed by itself.
Memory is the peak that the allocator counts above what lay there before, states of AdamW included.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw
from benchmarks.measure_one_rank import MODELS

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""FLOP/s of dense bfloat16 products, by a part of the GPU's name (data sheets of NVIDIA)."""


@dataclass
class Measured:
    """What was measured of one kind of step."""

    memory: int
    loss: float
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)


def synchronize(device: torch.device) -> float:
    """The time once all work of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def allocated(device: torch.device, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device))


def show_cluster(device: torch.device) -> None:
    """What `Cluster.detect` measures, briefly and by its full profile, and how long that takes."""
    for profile in (True, "full"):
        begun = time.perf_counter()
        cluster = sw.Cluster.detect(profile=profile, cache=False)
        found = cluster.device
        print(f"detect(profile={profile!r}): {time.perf_counter() - begun:.1f} s; {found.name}")
        print(f"  {found}")
        print(f"  covered: {cluster.measured.covered if cluster.measured else None}")


def show_equality(device: torch.device) -> None:
    """Differences from eager mode in float32: of the loss, and of gradients relative to the largest gradient."""
    torch.backends.cudnn.allow_tf32 = False
    for name, (build, batch) in MODELS.items():
        torch.manual_seed(0)
        model = build().to(device)
        inputs = {key: value.to(device) for key, value in batch().items()}
        for inductor in (False, True):
            options = sw.Options(inductor=inductor)
            parallel = sw.compile_parallel(copy.deepcopy(model), example_inputs=inputs, options=options, progress=False)
            expected, got = model(**inputs).loss, parallel(**inputs).loss
            expected.backward()
            got.backward()
            largest = max(float(each.grad.norm()) for each in model.parameters() if each.grad is not None)
            worst = 0.0
            for (key, mine), (_, theirs) in zip(parallel.named_parameters(), model.named_parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None, key
                whole = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                difference = (whole - theirs.grad).norm() / largest
                worst = max(worst, float(difference))
            off = float((got - expected).abs() / expected.abs())
            print(f"{name:8} inductor={inductor!s:5}: loss off by {off:.1e}, gradients by {worst:.1e} at most")
            model.zero_grad()


def llama(given: argparse.Namespace) -> nn.Module:
    heads = max(1, given.hidden // 64)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000,
            hidden_size=given.hidden,
            intermediate_size=4 * given.hidden,
            num_hidden_layers=given.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            max_position_embeddings=given.sequence,
            use_cache=False,
        )
    )
    return model


def one_step(step: Any, optimizer: torch.optim.Optimizer, inputs: Any, device: torch.device) -> tuple[float, ...]:
    """Loss, seconds of forward and backward, seconds of the optimizer."""
    optimizer.zero_grad()
    begun = synchronize(device)
    loss = step(**inputs).loss
    loss.backward()
    computed = synchronize(device)
    optimizer.step()
    return loss.item(), computed - begun, synchronize(device) - computed


def show_kernels(kind: str, step: Any, inputs: Any, device: torch.device, count: int = 14) -> None:
    """Milliseconds of the kernels of one forward and backward, by name, and until the host has launched them all."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    synchronize(device)
    begun = time.perf_counter()
    step(**inputs).loss.backward()
    launched = time.perf_counter() - begun
    with torch.profiler.profile(activities=[activity]) as profile:
        step(**inputs).loss.backward()
        synchronize(device)
    kernels = [(event.self_device_time_total, event.count, event.key) for event in profile.key_averages()]
    total, launches = sum(kernel[0] for kernel in kernels), sum(kernel[1] for kernel in kernels)
    print(f"{kind}: launched after {1e3 * launched:.1f} ms; {launches} kernels take {total / 1e3:.1f} ms")
    for microseconds, calls, name in sorted(kernels, reverse=True)[:count]:
        print(f"  {microseconds / 1e3:8.2f} ms {calls:5} x {name[:150]}")


def show_llama(device: torch.device, given: argparse.Namespace) -> None:
    """Seconds, tokens/s, MFU and memory of a Llama, beside what the plan predicts."""
    torch.manual_seed(0)
    model = llama(given).to(device, torch.bfloat16)
    ids = torch.randint(0, 32000, (given.batch, given.sequence), device=device)
    inputs = {"input_ids": ids, "labels": ids}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"Llama of {parameters / 1e9:.2f} B parameters, {given.batch} x {given.sequence} tokens, bfloat16")

    cluster = sw.Cluster.detect()
    plans: dict[str, sw.Plan] = {}

    def ours(inductor: bool) -> Callable[[nn.Module], Any]:
        def compile(model: nn.Module) -> Any:
            options = sw.Options(inductor=inductor)
            parallel: Any = sw.compile_parallel(model, cluster, inputs, options=options, progress=False)
            plans[f"shardweave, inductor={inductor}"] = parallel.plan
            return parallel

        return compile

    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "eager": lambda model: model,
        "torch.compile": torch.compile,
        "shardweave, inductor=False": ours(False),
        "shardweave, inductor=True": ours(True),
    }
    running: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
    measured: dict[str, Measured] = {}
    for kind, compile in kinds.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = allocated(device)
        begun = time.perf_counter()
        try:
            step = compile(copy.deepcopy(model))
            adamw: Any = torch.optim.AdamW
            optimizer = adamw(step.parameters(), lr=1e-5, fused=device.type == "cuda")
            loss = [one_step(step, optimizer, inputs, device)[0] for _ in range(3)][0]
        except Exception:  # the other kinds are measured all the same: a GPU may be at hand for minutes
            traceback.print_exc()
            continue
        optimizer.zero_grad()
        running[kind] = step, optimizer
        measured[kind] = Measured(allocated(device, peak=True) - before, loss)
        print(f"  {kind}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
    for _ in range(given.rounds):
        for kind, (step, optimizer) in running.items():
            _, computed, updated = one_step(step, optimizer, inputs, device)
            optimizer.zero_grad()
            measured[kind].step_seconds.append(computed)
            measured[kind].optimizer_seconds.append(updated)

    for kind, (step, optimizer) in running.items() if given.kernels else ():
        show_kernels(kind, step, inputs, device)
        optimizer.zero_grad()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    flops = next(iter(plans.values())).model_flops if plans else 0.0
    for kind, found in measured.items():
        seconds = statistics.median(found.step_seconds)
        utilisation = f"{flops / seconds / peak:.1%} MFU" if peak else "MFU unknown"
        print(
            f"{kind:28} {1e3 * seconds:8.1f} ms, {ids.numel() / seconds:9.0f} tokens/s, {utilisation}, "
            f"AdamW {1e3 * statistics.median(found.optimizer_seconds):.1f} ms, "
            f"{found.memory / 2**30:.2f} GiB, loss {found.loss:.5f}"
        )
        if kind in plans:
            plan = plans[kind]
            print(f"{'  predicted':28} {1e3 * plan.step_time:8.1f} ms, {plan.peak_memory / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["cluster", "equality", "llama"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--any-device", action="store_true", help="run without a GPU, too, to try the script")
    parser.add_argument("--kernels", action="store_true", help="show which kernels take the time of the Llama")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.any_device:
        print("no GPU: nothing is measured (--any-device runs on the CPU)")
        return
    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    shows: dict[str, Callable[[], None]] = {
        "cluster": lambda: show_cluster(device),
        "equality": lambda: show_equality(device),
        "llama": lambda: show_llama(device, given),
    }
    for part in given.only:
        try:
            shows[part]()
        except Exception:  # as above
            traceback.print_exc()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
