"""Profiles of this rank's device: rates of products and memory, launch latency, and compute beside collectives.

`profiled_ops` measures the ops of generated graphs: each distinct op and shape alone, or all of them as the graphs run.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import fx
from torch.utils._pytree import tree_map_only

from shardweave.cost_model import measured_tables
from shardweave.cost_model.cluster_description import build, describe
from shardweave.cost_model.machine import Device, M, Machine
from shardweave.cost_model.measured_tables import Measured, OpTable, OpTime, hardware
from shardweave.cost_model.op_work import Work, node_work
from shardweave.cost_model.streams import Contention
from shardweave.distributed import all_gather_objects
from shardweave.ir import ClusterError
from shardweave.sharding import is_start, is_wait, op_arguments, op_of, tensor_bytes

T = TypeVar("T")
aten = torch.ops.aten

# Timing of calls
_WARM_UP_CALLS = 2
_BATCH_SECONDS = 1e-3
_MAX_CALLS_PER_BATCH = 100
_MIN_BATCHES, _MAX_BATCHES = 3, 9
_LAUNCH_CYCLES = 100_000
"""Cycles of a GPU, about 50 µs, in which the host launches one call; an op on one number took it 13.5 µs."""
_SHARED_CORE_SECONDS = 0.03
"""Linux gives each of the ranks that share a core about 3 ms at a time; this is several of their turns."""

# Profiles of ops
_OP_SECONDS = 0.05
_RUNS_OF_A_GRAPH = 4
_FREE_MEMORY_SHARE = 0.5
"""The part of the free memory that the tensors of one op may take."""
_FLOPS_PER_BYTE = 10
"""FLOPs that count as much as a byte in the order of profiling: the balance of a CPU core, or of float32 on GPUs."""

# Profiles of devices
_LARGE_DIMENSION = {"cpu": 512, "cuda": 4096}
_TENSOR_BYTES = {"cpu": tuple(2**k for k in (16, 18, 20, 22, 23, 24, 25)), "cuda": (2**24, 2**26, 2**28)}
"""Bytes of each of the three tensors of a pointwise op. On CPUs they go from sizes that fit a cache to large ones."""
_MAX_TRAFFIC_SHARE = 0.5
"""A product shows the rate of arithmetic if its memory traffic takes less than this part of its time."""
_TRAINING_DTYPES = ("bfloat16", "float16", "float32")
"""The first of them that was measured gives `Device.matmul_efficiency` where peaks are known."""
_ALL_REDUCE_BYTES = {"cpu": 2**20, "cuda": 2**26}
_ALL_REDUCES_IN_FLIGHT = 8
_SLOWDOWN_ROUNDS = 4


def current_device() -> torch.device:
    """The device of this rank: its current GPU, or the CPU where there is no GPU or the world uses gloo alone."""
    if torch.cuda.is_available() and not (dist.is_initialized() and dist.get_backend() == "gloo"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def call_seconds(call: Callable[[], Any], device: torch.device, budget: float = 0.1) -> float:
    """Seconds of one call: the median over batches of calls, after a warm-up.

    Ranks may share the cores of a CPU and wait for their turns. So in a world of several ranks on CPUs it is the mean
    over several turns: a median of short batches would not include the waiting.

    Parameters
    ----------
    call : callable
        Runs on `device`; its result is dropped.
    budget : float
        Seconds to spend, about; a longer call is still made a few times.

    Examples
    --------
    >>> call_seconds(lambda: torch.ones(8) + 1, torch.device("cpu"), budget=1e-3) > 0
    True
    """
    _elapsed_seconds(call, _WARM_UP_CALLS, device)
    if device.type == "cpu" and dist.is_initialized() and dist.get_world_size() > 1:
        done, calls, spent = 0, _MIN_BATCHES, 0.0
        while spent < min(budget, _SHARED_CORE_SECONDS):
            spent += _elapsed_seconds(call, calls, device)
            done, calls = done + calls, min(2 * calls, _MAX_CALLS_PER_BATCH)
        return spent / done
    once = max(_elapsed_seconds(call, 1, device), 1e-9)
    calls = max(1, min(_MAX_CALLS_PER_BATCH, int(_BATCH_SECONDS / once)))
    batches = max(_MIN_BATCHES, min(_MAX_BATCHES, int(budget / (calls * once))))
    return max(median(_elapsed_seconds(call, calls, device) for _ in range(batches)) / calls, 1e-9)


def _elapsed_seconds(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        # The host launches all calls while the GPU waits: else a short kernel would take as long as its launch.
        torch.cuda._sleep(calls * _LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return 1e-3 * float(begin.elapsed_time(end))
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def start_together(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks, so that they measure at the same time, as they compute: they may share cores and memory."""
    if dist.is_initialized():
        dist.barrier(group)


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The `value` of rank 0, which can be pickled, on all ranks."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=0)
    return held[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of each rank, which can be pickled, on all ranks."""
    return all_gather_objects(value, group) if dist.is_initialized() else [value]


def is_rank_zero(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is rank 0, which writes the cache."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def median_over_ranks(seconds: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """The median over the ranks that measured a name, for each name; the same on all ranks.

    >>> median_over_ranks({"mm": 2.0})
    {'mm': 2.0}
    """
    found: dict[str, list[float]] = {}
    for part in gather_objects(dict(seconds), group):
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}


@dataclass(frozen=True)
class _DistinctOp:
    """A distinct op and shape: one of its nodes, and the number of such nodes."""

    node: fx.Node
    work: Work
    count: int

    @property
    def weight(self) -> float:
        return self.count * (self.work.flops / _FLOPS_PER_BYTE + self.work.num_bytes)


def profile_ops(
    graphs: Iterable[fx.Graph | fx.GraphModule],
    device: torch.device | str | None = None,
    seconds_budget: float = 60.0,
    *,
    in_step: bool = False,
    cache: bool = True,
) -> OpTable:
    """Measured times of all ops of `graphs`. Earlier measurements of this machine come from the cache.

    On a CPU an op that runs alone, again and again, finds what it reads in the caches: that may take less than half as
    long as in a step. With `in_step` the graphs are run from their first node to their last instead, collectives left
    out, and only what cannot run so is measured alone. On a GPU all ops are measured alone.

    Inputs are made before the timing: random numbers, and zeros for integers (valid as indices), or evenly spread
    indices of experts and of rows of an embedding. In a torch.distributed world all ranks measure at the same time, and
    all get the medians over the ranks.

    Parameters
    ----------
    graphs : iterable of Graph or GraphModule
        Their nodes carry local shapes in ``meta["val"]``.
    device : torch.device or str, optional
        By default that of this rank.
    seconds_budget : float
        Time to spend; ops with most FLOPs and bytes come first.
    in_step : bool
        Measure the ops where they are in the graphs, on a CPU.
    cache : bool
        Read and write times in `measured_tables.cache_directory`, under a key of hardware and versions.

    Returns
    -------
    OpTable
        The times of the graphs' ops; its `skipped` names those that could not be run alone, and why.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> y = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> y.meta["val"] = torch.empty(8, 8, device="meta")
    >>> table = profile_ops([graph], "cpu", cache=False)
    >>> list(table.times), table.seconds("aten.mm.default(float32[8,8], float32[8,8])") > 0
    (['aten.mm.default(float32[8,8], float32[8,8])'], True)
    """
    where = current_device() if device is None else torch.device(device)
    given = [each.graph if isinstance(each, fx.GraphModule) else each for each in graphs]
    cases = _distinct_ops(given)
    # 1. Read the times that are in the cache.
    key = {"format": 1, "device": where.type, "ranks": gather_objects(hardware())}
    runs_graphs = in_step and where.type == "cpu"
    name = f"ops-{'in-steps-' if runs_graphs else ''}{measured_tables.key_of(key)}"
    kept = (_cached(name, OpTable.from_dict) if cache else None) or OpTable()
    left = [case for case in cases if case.work.signature not in kept.times]
    # 2. Measure the other ops on all ranks.
    start_together()
    runs = _time_graphs(given, seconds_budget) if runs_graphs and left else {}
    in_place = {name: seconds for name, seconds in runs.items() if name not in kept.times}
    alone, skipped = _time_ops([case for case in left if case.work.signature not in runs], where, seconds_budget)
    reasons: dict[str, str] = {}
    for part in reversed(gather_objects(skipped)):
        reasons.update(part)
    # 3. Add the medians over the ranks to the cache.
    works = {case.work.signature: case.work for case in cases}
    times = median_over_ranks(in_place | alone)
    new = OpTable.of([OpTime(seconds, works[signature]) for signature, seconds in times.items()])
    if cache and times and is_rank_zero():
        measured_tables.store_cached(name, kept.merged(new).to_dict())
    found = kept.merged(new).times
    return OpTable(
        {signature: found[signature] for signature in works if signature in found},
        {signature: reasons.get(signature, "not run") for signature in works if signature not in found},
    )


def profiled_ops(
    cluster: M,
    graphs: Iterable[fx.Graph | fx.GraphModule],
    device: torch.device | str | None = None,
    seconds_budget: float = 60.0,
    *,
    in_step: bool = False,
    cache: bool = True,
) -> M:
    """`cluster` with the measured times of the ops of `graphs` added to its own (see `profile_ops`)."""
    return _with_ops(cluster, profile_ops(graphs, device, seconds_budget, in_step=in_step, cache=cache))


def _with_ops(cluster: M, table: OpTable) -> M:
    measured = cluster.measured or Measured()
    return replace(cluster, measured=replace(measured, ops=measured.ops.merged(table)))


def saved_ops(cluster: M, step: str) -> M | None:
    """`cluster` with the op times that `save_ops` saved for a step of this hardware; None without. Collective."""
    table = _cached(_name_of_step(step), OpTable.from_dict)
    return None if table is None else _with_ops(cluster, table)


def save_ops(cluster: Machine, step: str) -> None:
    """Save the op times of `cluster`, so that a later run of the step need not lower it. Collective."""
    name = _name_of_step(step)
    if is_rank_zero() and cluster.measured is not None:
        measured_tables.store_cached(name, cluster.measured.ops.to_dict())


def _name_of_step(step: str) -> str:
    return f"ops-of-step-{step}-{measured_tables.key_of({'ranks': gather_objects(hardware())})}"


def _distinct_ops(graphs: Iterable[fx.Graph]) -> list[_DistinctOp]:
    """The distinct ops and shapes of `graphs`, heaviest first."""
    found: dict[str, _DistinctOp] = {}
    for graph in graphs:
        for node in graph.nodes:
            if (work := node_work(node)) is not None:
                count = found[work.signature].count + 1 if work.signature in found else 1
                found[work.signature] = _DistinctOp(node, work, count)
    return sorted(found.values(), key=lambda case: -case.weight)


class _TimedRun(fx.Interpreter):
    """A run of a graph on the CPU that notes the seconds of each op, by signature. Collectives do not run.

    It raises TimeoutError after the time `until`.
    """

    def __init__(self, graph: fx.Graph, until: float) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.until = until
        self.seconds: dict[str, list[float]] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.op in ("placeholder", "get_attr") or is_start(node):
            return _value(node, node.meta["val"], torch.device("cpu"))
        if is_wait(node):
            return self.env[node.all_input_nodes[0]]
        if node.op == "output":
            return None
        work = node_work(node)
        if work is None:
            return super().run_node(node)
        args, kwargs = _on_device(fx.node.map_arg(op_arguments(node), self.env.__getitem__), torch.device("cpu"))
        _spread_indices(op_of(node), args)
        begun = time.perf_counter()
        if begun > self.until:
            raise TimeoutError(f"the time for profiling was over at {node.name}")
        result = op_of(node)(*args, **kwargs)
        self.seconds.setdefault(work.signature, []).append(time.perf_counter() - begun)
        return result


def _time_graphs(graphs: Sequence[fx.Graph], budget: float) -> dict[str, float]:
    """Seconds of the ops of graphs that run on the CPU, by signature; without those that are reached in no run."""
    until, free = time.perf_counter() + budget, _free_bytes(torch.device("cpu")) * _FREE_MEMORY_SHARE
    means: dict[str, list[float]] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for graph in graphs:
            if _run_bytes(graph) > free:
                continue
            for _ in range(_RUNS_OF_A_GRAPH):
                run = _TimedRun(graph, until)
                with suppress(Exception):  # an op that gets other values than in a step may raise anything
                    run.run()
                for name, taken in run.seconds.items():
                    means.setdefault(name, []).append(fmean(taken))
    return {name: median(taken[1:] or taken) for name, taken in means.items()}  # the first run warms up


def _run_bytes(graph: fx.Graph) -> int:
    """Bytes that a run of a graph needs at least: of its inputs, and of its outputs or of the largest op."""
    given = sum(tensor_bytes(node.meta.get("val")) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    largest = max((tensor_bytes(node.meta.get("val")) for node in graph.nodes), default=0)
    returned = [source for output in graph.find_nodes(op="output") for source in output.all_input_nodes]
    results = sum(tensor_bytes(node.meta.get("val")) for node in returned)
    return given + max(largest, results)


def _time_ops(
    cases: Sequence[_DistinctOp], device: torch.device, budget: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by signature, and the reason for each op without."""
    until = time.perf_counter() + budget
    seconds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for case in cases:
            signature = case.work.signature
            if time.perf_counter() > until:
                skipped[signature] = f"the {budget:g} s for profiling were over"
                continue
            try:
                seconds[signature] = _time_op(case.node, device)
            except Exception as error:  # an op that runs apart from its graph may raise anything
                skipped[signature] = f"it cannot be run alone: {str(error).splitlines()[0] if str(error) else error!r}"
    return seconds, skipped


def _time_op(node: fx.Node, device: torch.device) -> float:
    inputs: dict[fx.Node, Any] = {}  # without the seed of an op that draws random numbers
    fx.node.map_arg(op_arguments(node), lambda source: inputs.setdefault(source, source.meta.get("val")))
    needed = sum(map(tensor_bytes, inputs.values())) + tensor_bytes(node.meta.get("val"))
    free = _free_bytes(device) * _FREE_MEMORY_SHARE
    if needed > free:
        raise MemoryError(f"its tensors take {needed} bytes, expected at most {int(free)}: half of what is free")
    made: dict[fx.Node, Any] = {source: _value(source, held, device) for source, held in inputs.items()}
    args, kwargs = _on_device(fx.node.map_arg(op_arguments(node), made.__getitem__), device)
    target = op_of(node)
    _spread_indices(target, args)
    return call_seconds(lambda: target(*args, **kwargs), device, _OP_SECONDS)


def _on_device(arguments: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and keyword arguments of an op, with `device` for that of a tensor that it makes."""
    args, kwargs = tree_map_only(torch.device, lambda _: device, arguments)
    return args, kwargs


def _value(source: fx.Node, held: object, device: torch.device) -> object:
    if isinstance(held, torch.Tensor):
        return _example_tensor(held, device)
    if isinstance(held, int | float):
        return held
    raise ClusterError(f"its input {source.name}: expected a tensor or a number, got {type(held).__name__}")


def _example_tensor(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the shape and strides of `like`: numbers from 0.1 to 1, zeros for integers, or True."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride())) if like.numel() else 0
    flat = torch.zeros(length, dtype=like.dtype, device=device)
    if like.dtype == torch.bool:
        flat.fill_(True)
    elif like.is_floating_point():
        flat.copy_(torch.empty(length, device=device).uniform_(0.1, 1.0))
    return flat.as_strided(like.shape, like.stride())


def _spread_indices(target: Any, args: Sequence[Any]) -> None:
    """Spread indices evenly over the rows of an embedding, or over experts: equal indices take another time."""
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    if name == "aten::embedding":
        index, choices = args[1], args[0].shape[0]
    elif name == "aten::embedding_dense_backward":
        index, choices = args[1], args[2]
    elif name == "shardweave::expert_mm":
        index, choices = args[2], args[1].shape[0] * (args[3] if len(args) > 3 else 1)
    elif name == "shardweave::expert_outer":
        index, choices = args[2], args[3] * (args[4] if len(args) > 4 else 1)
    else:
        return
    # A step without a common factor reaches every choice. Near the golden ratio, neighbours are far apart.
    step = max(1, int(choices * 0.618))
    while math.gcd(step, choices) > 1:
        step += 1
    index.copy_((torch.arange(index.numel(), device=index.device) * step % max(1, choices)).view(index.shape))


def _free_bytes(device: torch.device) -> int:
    """Bytes free on `device`, for one of the ranks that share it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1)))
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(line for line in file if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024 // ranks
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // ranks


def profile_device(
    base: Device,
    device: torch.device | str | None = None,
    seconds_budget: float = 20.0,
    *,
    group: dist.ProcessGroup | None = None,
    cache: bool = True,
    reads: bool = True,
) -> Device:
    """`base` with measured figures. All ranks measure at the same time, as they may share cores.

    For each dtype of `base`, products of several shapes give the rate and `Device.matmul_half`. Pointwise ops give the
    rate of memory, `memory_half` and `memory_times`. An op on one number gives the launch latency. In a world of
    several ranks, compute beside all-reduces gives `Device.overlap_slowdown` and `Device.collective_slowdown`.

    The peak of a CPU is unknown: `flops` and `memory_bandwidth` become the measured rates, with efficiencies of 1. On a
    GPU the memory bandwidth and the peak of the training dtype stay those of the datasheet, and the efficiencies become
    the measured parts of them. The peaks of other dtypes become their measured rates divided by the efficiency. A dtype
    without matrix products on this device keeps its figures.

    Parameters
    ----------
    base : Device
        The known figures, as of a preset: the dtypes, the memory, and on GPUs the peaks.
    device : torch.device or str, optional
        By default that of this rank.
    seconds_budget : float
        Time to spend; a dtype for which no time is left keeps its figures.
    group : ProcessGroup, optional
        By default all ranks.
    cache : bool
        Read and write figures in `measured_tables.cache_directory`, under a key of hardware and versions.
    reads : bool
        False measures again, and replaces what is cached.

    Returns
    -------
    Device
        The same on all ranks.
    """
    where = current_device() if device is None else torch.device(device)
    key = {"format": 3, "device": where.type, "base": describe(base), "ranks": gather_objects(hardware(), group)}
    name = f"device-{measured_tables.key_of(key)}"
    kept = _cached(name, _device_of, group) if cache and reads else None
    if kept is not None:
        return kept
    start_together(group)
    times = median_over_ranks(_time_kernels(base, where, seconds_budget), group)
    found = _fit_device(base, where, times)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        beside = profile_contention(where, group=group)
        found = replace(found, overlap_slowdown=beside.compute, collective_slowdown=beside.collectives)
    if cache and is_rank_zero(group):
        measured_tables.store_cached(name, describe(found))
    return found


def profile_contention(
    device: torch.device | str | None = None, *, group: dist.ProcessGroup | None = None
) -> Contention:
    """The factors by which products take longer beside all-reduces, and all-reduces beside products. Collective.

    All ranks compute at the same time, first alone, then as long as some all-reduces are in flight. The all-reduces
    have sizes as in a step: larger ones keep the cores busier. Means are compared, since a collective's thread that
    takes a rank's core makes few products long.

    Raises
    ------
    ClusterError
        If torch.distributed does not run.
    """
    if not dist.is_initialized():
        raise ClusterError(
            "profile_contention: expected a running torch.distributed world, as it times compute beside an all-reduce; "
            "call torch.distributed.init_process_group() first"
        )
    where = current_device() if device is None else torch.device(device)
    size = _LARGE_DIMENSION[where.type] // 2
    left = torch.ones(size, size, device=where, dtype=torch.bfloat16 if where.type == "cuda" else torch.float32)
    buffers = [torch.zeros(_ALL_REDUCE_BYTES[where.type] // 4, device=where) for _ in range(_ALL_REDUCES_IN_FLIGHT)]

    def product() -> float:
        _synchronize(where)
        begin = time.perf_counter()
        aten.mm.default(left, left)
        _synchronize(where)
        return time.perf_counter() - begin

    def reductions(computes: bool) -> tuple[float, list[float]]:
        """Seconds of the all-reduces, one after another, and of each product beside them, if it `computes`."""
        start_together(group)
        begin, products = time.perf_counter(), list[float]()
        started = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        works = [work for work in started if work is not None]
        while computes:
            seconds = product()
            if works[-1].is_completed():
                break
            products.append(seconds)  # the all-reduces ran all the time
        for work in works:
            work.wait()
        _synchronize(where)
        return time.perf_counter() - begin, products

    alone: dict[str, list[float]] = {"compute": [], "collectives": []}
    beside: dict[str, list[float]] = {"compute": [], "collectives": []}
    with torch.no_grad():
        dist.all_reduce(buffers[0], group=group)  # makes the connections
        product()
        for _ in range(_SLOWDOWN_ROUNDS):
            start_together(group)
            alone["compute"] += [product() for _ in range(8)]
            alone["collectives"].append(reductions(computes=False)[0])
            seconds, products = reductions(computes=True)
            beside["collectives"].append(seconds)
            beside["compute"] += products
    ratios = {name: fmean(beside[name]) / fmean(alone[name]) for name in alone if beside[name]}
    found = median_over_ranks(ratios, group)
    return Contention(max(1.0, found.get("compute", 1.0)), max(1.0, found.get("collectives", 1.0)))


def _synchronize(device: torch.device) -> None:
    """Wait for the compute stream, not for the collective's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _cached(name: str, parse: Callable[[object], T], group: dist.ProcessGroup | None = None) -> T | None:
    """The cached data of rank 0 under `name`, on all ranks; None if there is none, or the file is damaged."""
    found = None
    if is_rank_zero(group):
        with suppress(ClusterError):
            found = parse(measured_tables.load_cached(name))
    return cast("T | None", broadcast_object(found, group))


def _device_of(data: object) -> Device:
    return Device(**build(Device, data, "device", keep=("flops",)))


def _product_shapes(large: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of the products to measure: cubes, and products with one small dimension."""
    few, some = large // 32, large // 8
    shapes = [(size, size, size) for size in (large, large // 2, some)]
    for size in (few, some):
        shapes += [(size, large, large), (large, size, large), (large, large, size)]
    return shapes


def _time_kernels(base: Device, device: torch.device, budget: float) -> dict[str, float]:
    """Seconds of kernels, by name: ``launch``, ``memory:<bytes>`` and ``<dtype>:<m>,<n>,<k>``."""
    until = time.perf_counter() + budget
    with torch.no_grad():
        one = torch.ones(1, device=device)
        found = {"launch": call_seconds(lambda: aten.add.Tensor(one, one), device)}
        for size in _TENSOR_BYTES[device.type]:
            left, right = (torch.ones(size // 4, device=device) for _ in range(2))
            found[f"memory:{3 * size}"] = call_seconds(partial(aten.add.Tensor, left, right), device)
        for dtype in sorted(base.flops, key=lambda name: (name not in _TRAINING_DTYPES, name)):
            kind = getattr(torch, dtype, None)
            for m, n, k in _product_shapes(_LARGE_DIMENSION[device.type]) if isinstance(kind, torch.dtype) else ():
                if time.perf_counter() > until:
                    return found
                try:
                    left, right = (torch.rand(s, device=device).to(kind) for s in ((m, k), (k, n)))
                    found[f"{dtype}:{m},{n},{k}"] = call_seconds(partial(aten.mm.default, left, right), device, 0.05)
                except RuntimeError:
                    break  # this device cannot multiply this dtype
    return found


def _fit_device(base: Device, device: torch.device, times: dict[str, float]) -> Device:
    """`base` with the figures that fit the `times` of `_time_kernels`."""
    # 1. Memory: seconds without the launch.
    latency = times["launch"]
    sizes = dict(sorted((float(name[7:]), s) for name, s in times.items() if name.startswith("memory:")))
    nets = [max(s - latency, 1e-2 * s) for s in sizes.values()]
    bandwidth, memory_half = fit_rate_and_half([((size,), net) for size, net in zip(sizes, nets, strict=True)])
    # 2. Products, by dtype: without those that are bound by memory.
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
            if traffic < _MAX_TRAFFIC_SHARE * net or m == n == k == _LARGE_DIMENSION[device.type]:
                points.append(((m, n, k), net))
        if points:
            limit = base.peak(dtype) / 2 if device.type != "cpu" else math.inf
            rate, halves[dtype] = fit_rate_and_half(points, limit)
            rates[dtype] = 2 * rate
    # 3. Efficiencies: parts of the known peaks of a GPU.
    efficiency = memory_efficiency = 1.0
    if device.type != "cpu":
        trained = next((dtype for dtype in _TRAINING_DTYPES if dtype in rates), "float32")
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


def fit_rate_and_half(
    points: Sequence[tuple[Sequence[float], float]], limit: float = math.inf
) -> tuple[float, float]:
    """The rate ``r`` and the half ``h`` for which ``prod(d + h for d in dims) / r`` fits the seconds best.

    The error is the mean distance of the logarithms, which limits the weight of a disturbed measurement.

    Parameters
    ----------
    points : sequence of (dims, seconds)
        At least one.
    limit : float
        The highest rate that the device can have; the fit extrapolates from sizes that do not reach its rate. A rate
        beyond it is fitted only if the points themselves show one.

    Examples
    --------
    >>> rate, half = fit_rate_and_half([((d, 512, 512), (d + 8) * 520 * 520 / 1e9) for d in (8, 64, 512)])
    >>> bool(abs(rate / 1e9 - 1) < 0.1), bool(6.5 < half < 9.5)
    (True, True)
    """
    least = min(min(dims) for dims, _ in points)
    best = (math.inf, 0.0, 0.0)
    steps = [0.0, *(least * 2 ** (step / 4) for step in range(-32, 21))] if len(points) > 1 else [0.0]
    for half in steps:
        logs = [math.log(math.prod(size + half for size in dims) / seconds) for dims, seconds in points]
        middle = median(logs)
        if half and math.exp(middle) > limit:
            break  # the rate rises with the half
        best = min(best, (sum(abs(value - middle) for value in logs) / len(logs), half, math.exp(middle)))
    return best[2], best[1]
