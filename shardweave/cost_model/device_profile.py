"""Measures the live device: rates of products and of memory with their curves, launches, and overlapped compute."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist

from shardweave.cost_model import profile_cache
from shardweave.cost_model.cluster_description import build, describe
from shardweave.cost_model.machine import Device
from shardweave.cost_model.profile_cache import hardware
from shardweave.cost_model.timing import (
    call_seconds,
    from_all,
    from_first,
    is_first,
    live_device,
    median_of_all,
    running,
    start_together,
)
from shardweave.ir import ClusterError

aten = torch.ops.aten

_LARGE = {"cpu": 512, "cuda": 4096}  # a product of this size, cubed, is a large one
_SIZES = {"cpu": tuple(2**k for k in (16, 18, 20, 22, 23, 24, 25)), "cuda": (2**24, 2**26, 2**28)}
"""Bytes of each of a pointwise op's three tensors: on CPUs from what fits a cache to what is new memory each time."""
_MOST_TRAFFIC = 0.5  # of a product's time, for it to tell of arithmetic
_TRAINED = ("bfloat16", "float16", "float32")  # the first that was measured sets the efficiency where peaks are known
_OVERLAP_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of each of the all-reduces that run beside compute, as in a step
_OVERLAP_CALLS = 8
_ROUNDS = 6


def profile_device(
    base: Device,
    device: torch.device | str | None = None,
    seconds_budget: float = 20.0,
    *,
    group: dist.ProcessGroup | None = None,
    cache: bool = True,
) -> Device:
    """`base` with the figures of the live device, all ranks measuring at the same time: they may share its cores.

    Of each dtype of `base` a large product, smaller ones and skinny ones give the rate and `Device.matmul_half`;
    pointwise ones the memory's rate, `memory_half` and `memory_times`; an op on one number the launch latency;
    and in a world of several ranks, compute beside all-reduces gives `Device.overlap_slowdown`.

    On a CPU, whose peak nobody knows, `flops` and `memory_bandwidth` become what was reached, with efficiencies of 1.
    On a GPU the datasheet's memory bandwidth and its peak of the dtype that is trained in stay, and the efficiencies
    become the parts of them that were reached; other dtypes' peaks are such that their product with the efficiency is
    what was measured. A dtype that cannot be multiplied here keeps its figures.

    Parameters
    ----------
    base : Device
        What is known, as from a preset: the dtypes, the memory, and on GPUs the peaks.
    device : torch.device or str, optional
        That of this rank if not given.
    seconds_budget : float
        Time to spend; a dtype whose turn does not come keeps its figures.
    group : ProcessGroup, optional
        All ranks if not given.
    cache : bool
        Whether to read and to keep figures in `profile_cache.cache_directory`, under a key of hardware and versions.

    Returns
    -------
    Device
        The same on all ranks.
    """
    where = live_device() if device is None else torch.device(device)
    what = {"format": 2, "device": where.type, "base": describe(base), "ranks": from_all(hardware(), group)}
    name = f"device-{profile_cache.key_of(what)}"
    kept = from_first(_kept(name) if cache and is_first(group) else None, group)
    if kept is not None:
        return Device(**kept)
    start_together(group)
    times = median_of_all(_measure(base, where, seconds_budget), group)
    found = _described(base, where, times)
    if running() and dist.get_world_size(group) > 1:
        found = replace(found, overlap_slowdown=profile_slowdown(where, group=group))
    if cache and is_first(group):
        profile_cache.store(name, describe(found))
    return found


def profile_slowdown(
    device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None, rounds: int = _ROUNDS
) -> float:
    """What products' time is multiplied by while all-reduces of all ranks run; at least 1. All ranks must call it.

    Alone, all ranks compute at the same time; then they compute for as long as some all-reduces are in flight, of sizes
    as in a step: much larger ones keep the cores busier. Means are compared, as a thread of the collective that takes a
    rank's core for a while shows in few products, but long ones.

    Raises
    ------
    ClusterError
        Where torch.distributed does not run.
    """
    if not running():
        raise ClusterError(
            "profile_slowdown: expected a running torch.distributed world, as it times compute beside an all-reduce; "
            "call torch.distributed.init_process_group() first"
        )
    where = live_device() if device is None else torch.device(device)
    size = _LARGE[where.type] // 2
    left = torch.ones(size, size, device=where, dtype=torch.bfloat16 if where.type == "cuda" else torch.float32)
    buffers = [torch.zeros(_OVERLAP_BYTES[where.type] // 4, device=where) for _ in range(_OVERLAP_CALLS)]

    def once() -> float:
        _synchronize(where)
        begin = time.perf_counter()
        aten.mm.default(left, left)
        _synchronize(where)
        return time.perf_counter() - begin

    with torch.no_grad():
        dist.all_reduce(buffers[0], group=group)  # makes the connections
        once()
        alone: list[float] = []
        beside: list[float] = []
        for _ in range(rounds):
            start_together(group)
            alone += [once() for _ in range(8)]
            start_together(group)
            started = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
            works = [work for work in started if work is not None]
            while True:
                seconds = once()
                if works[-1].is_completed():
                    break
                beside.append(seconds)  # they ran all the while
            for work in works:
                work.wait()
    found = median_of_all({"alone": fmean(alone)} | ({"beside": fmean(beside)} if beside else {}), group)
    return max(1.0, found["beside"] / found["alone"]) if "beside" in found else 1.0


def _synchronize(device: torch.device) -> None:
    """Wait for this stream; not for the collective's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _kept(name: str) -> dict[str, object] | None:
    try:
        raw = build(Device, profile_cache.load(name), "device", keep=("flops",))
        Device(**raw)
    except ClusterError:
        return None
    return raw


def _shapes(large: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of the products to run: the large one, smaller ones, and each dimension small by itself."""
    few, some = large // 32, large // 8
    shapes = [(size, size, size) for size in (large, large // 2, some)]
    for size in (few, some):
        shapes += [(size, large, large), (large, size, large), (large, large, size)]
    return shapes


def _measure(base: Device, device: torch.device, budget: float) -> dict[str, float]:
    """Seconds by what was run: ``launch``, ``memory:<bytes>`` and ``<dtype>:<m>,<n>,<k>``."""
    until = time.perf_counter() + budget
    with torch.no_grad():
        one = torch.ones(1, device=device)
        found = {"launch": call_seconds(lambda: aten.add.Tensor(one, one), device)}
        for size in _SIZES[device.type]:
            left, right = (torch.ones(size // 4, device=device) for _ in range(2))
            found[f"memory:{3 * size}"] = call_seconds(partial(aten.add.Tensor, left, right), device)
        for dtype in sorted(base.flops, key=lambda name: (name not in _TRAINED, name)):
            kind = getattr(torch, dtype, None)
            for m, n, k in _shapes(_LARGE[device.type]) if isinstance(kind, torch.dtype) else ():
                if time.perf_counter() > until:
                    return found
                try:
                    left, right = (torch.ones(s, device=device).to(kind) for s in ((m, k), (k, n)))
                    found[f"{dtype}:{m},{n},{k}"] = call_seconds(partial(aten.mm.default, left, right), device, 0.05)
                except RuntimeError:
                    break  # this device cannot multiply this dtype
    return found


def _described(base: Device, device: torch.device, times: dict[str, float]) -> Device:
    """The device that these times tell of."""
    latency = times["launch"]
    sizes = dict(sorted((float(name[7:]), s) for name, s in times.items() if name.startswith("memory:")))
    nets = [max(s - latency, 1e-2 * s) for s in sizes.values()]
    bandwidth, memory_half = fitted([((size,), net) for size, net in zip(sizes, nets, strict=True)])
    rates: dict[str, float] = {}
    halves = dict(base.matmul_half)
    for dtype in base.flops:
        points = []
        for name, seconds in times.items():
            kind, _, dims = name.partition(":")
            if kind != dtype:
                continue
            m, n, k = map(int, dims.split(","))
            net = max(seconds - latency, 1e-2 * seconds)
            traffic = getattr(torch, dtype).itemsize * (m * k + k * n + m * n) / bandwidth
            if traffic < _MOST_TRAFFIC * net or m == n == k == _LARGE[device.type]:
                points.append(((m, n, k), net))
        if points:
            rate, halves[dtype] = fitted(points)
            rates[dtype] = 2 * rate
    efficiency = memory_efficiency = 1.0
    if device.type != "cpu":
        trained = next((dtype for dtype in _TRAINED if dtype in rates), "float32")
        efficiency = min(1.0, rates.get(trained, base.matmul_efficiency * base.peak(trained)) / base.peak(trained))
        memory_efficiency = min(1.0, bandwidth / base.memory_bandwidth)
    reached = {dtype: rates.get(dtype, peak * base.matmul_efficiency) for dtype, peak in base.flops.items()}
    return replace(
        base,
        name=f"{base.name}, measured",
        flops={dtype: rate / efficiency for dtype, rate in reached.items()},
        memory_bandwidth=bandwidth / memory_efficiency,
        launch_latency=latency,
        matmul_efficiency=efficiency,
        memory_efficiency=memory_efficiency,
        matmul_half=halves,
        memory_half=memory_half,
        memory_times=tuple(zip(sizes, itertools.accumulate(nets, max), strict=True)),
    )


def fitted(points: Sequence[tuple[Sequence[float], float]]) -> tuple[float, float]:
    """The rate ``r`` and the half ``h`` for which ``prod(d + h for d in dims) / r`` is nearest to the seconds.

    Nearest is in the mean of the logarithms' distances, so that one disturbed measurement counts as one.

    Parameters
    ----------
    points : sequence of (dims, seconds)
        At least one.

    Examples
    --------
    >>> rate, half = fitted([((d, 512, 512), (d + 8) * 520 * 520 / 1e9) for d in (8, 64, 512)])
    >>> bool(abs(rate / 1e9 - 1) < 0.1), bool(6.5 < half < 9.5)
    (True, True)
    """
    least = min(min(dims) for dims, _ in points)
    best = (math.inf, 0.0, 0.0)
    steps = [0.0, *(least * 2 ** (step / 4) for step in range(-32, 21))] if len(points) > 1 else [0.0]
    for half in steps:
        logs = [math.log(math.prod(size + half for size in dims) / seconds) for dims, seconds in points]
        middle = median(logs)
        best = min(best, (sum(abs(value - middle) for value in logs) / len(logs), half, math.exp(middle)))
    return best[2], best[1]
