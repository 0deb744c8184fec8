"""Runs the ops of generated graphs on the live device, each distinct op and shape once, and keeps their times."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils._pytree import tree_map_only

from shardweave.cost_model import profile_cache
from shardweave.cost_model.machine import M
from shardweave.cost_model.measured_tables import Measured
from shardweave.cost_model.op_tables import OpTable, OpTime
from shardweave.cost_model.op_work import Work, node_work
from shardweave.cost_model.profile_cache import hardware
from shardweave.cost_model.timing import (
    call_seconds,
    from_all,
    from_first,
    is_first,
    live_device,
    median_of_all,
    start_together,
)
from shardweave.ir import ClusterError
from shardweave.sharding import op_arguments, op_of, tensor_bytes

_MEMORY_SHARE = 0.5  # of what is free, for the tensors of one op
_FLOPS_A_BYTE = 10  # weighs the two for the order of profiling: the balance of a CPU core or of float32 on a GPU
_OP_SECONDS = 0.05  # for one op, about


@dataclass(frozen=True)
class _Case:
    """A distinct op and shape: one of its nodes, and in how many places it stands."""

    node: fx.Node
    work: Work
    count: int

    @property
    def weight(self) -> float:
        return self.count * (self.work.flops / _FLOPS_A_BYTE + self.work.num_bytes)


def profile_ops(
    graphs: Iterable[fx.Graph | fx.GraphModule],
    device: torch.device | str | None = None,
    seconds_budget: float = 60.0,
    *,
    group: dist.ProcessGroup | None = None,
    cache: bool = True,
) -> OpTable:
    """Measured times of all ops of `graphs`; what this machine measured before is taken from the cache.

    Inputs are made outside of the timed part: random numbers, zeros for integers (valid as indices), spread evenly
    where they choose experts or rows of an embedding. In a torch.distributed world all ranks measure at the same time,
    as they compute at the same time, and all get the medians over the ranks.

    Parameters
    ----------
    graphs : iterable of Graph or GraphModule
        Their nodes carry local shapes in ``meta["val"]``.
    device : torch.device or str, optional
        That of this rank if not given.
    seconds_budget : float
        Time to spend; ops with most FLOPs and bytes come first.
    group : ProcessGroup, optional
        All ranks if not given.
    cache : bool
        Whether to read and to keep times in `profile_cache.cache_directory`, under a key of hardware and versions.

    Returns
    -------
    OpTable
        With the times of the graphs' ops; its `skipped` names those that could not be run alone, and why.

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
    where = live_device() if device is None else torch.device(device)
    cases = _cases(graphs)
    name = f"ops-{profile_cache.key_of({'format': 1, 'device': where.type, 'ranks': from_all(hardware(), group)})}"
    kept = OpTable.from_dict(from_first(_kept(name) if cache and is_first(group) else {}, group))
    start_together(group)
    mine, skipped = _run_all([case for case in cases if case.work.signature not in kept.times], where, seconds_budget)
    reasons: dict[str, str] = {}
    for part in reversed(from_all(skipped, group)):
        reasons.update(part)
    works = {case.work.signature: case.work for case in cases}
    times = median_of_all(mine, group)
    new = OpTable.of([OpTime(seconds, works[signature]) for signature, seconds in times.items()])
    if cache and times and is_first(group):
        profile_cache.store(name, kept.merged(new).to_dict())
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
    cache: bool = True,
) -> M:
    """`cluster` with the measured times of the ops of `graphs`, besides those that it has (see `profile_ops`)."""
    measured = cluster.measured or Measured()
    table = measured.ops.merged(profile_ops(graphs, device, seconds_budget, cache=cache))
    return replace(cluster, measured=replace(measured, ops=table))


def _kept(name: str) -> dict[str, Any]:
    try:
        return OpTable.from_dict(profile_cache.load(name)).to_dict()
    except ClusterError:
        return {}


def _cases(graphs: Iterable[fx.Graph | fx.GraphModule]) -> list[_Case]:
    """The distinct ops and shapes of `graphs`, heaviest first; of equal ones, in their order."""
    found: dict[str, _Case] = {}
    for graph in graphs:
        for node in graph.graph.nodes if isinstance(graph, fx.GraphModule) else graph.nodes:
            if (work := node_work(node)) is not None:
                count = found[work.signature].count + 1 if work.signature in found else 1
                found[work.signature] = _Case(node, work, count)
    return sorted(found.values(), key=lambda case: -case.weight)


def _run_all(cases: Sequence[_Case], device: torch.device, budget: float) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by signature, and why others have none."""
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
                seconds[signature] = _run(case.node, device)
            except Exception as error:  # whatever an op raises that is run apart from its graph
                skipped[signature] = f"it cannot be run alone: {str(error).splitlines()[0] if str(error) else error!r}"
    return seconds, skipped


def _run(node: fx.Node, device: torch.device) -> float:
    inputs: dict[fx.Node, Any] = {}  # not those that only say under which seed an op draws
    fx.node.map_arg(op_arguments(node), lambda source: inputs.setdefault(source, source.meta.get("val")))
    needed = sum(map(tensor_bytes, inputs.values())) + tensor_bytes(node.meta.get("val"))
    free = _free_bytes(device) * _MEMORY_SHARE
    if needed > free:
        raise MemoryError(f"its tensors take {needed} bytes, expected at most {int(free)}: half of what is free")
    made: dict[fx.Node, Any] = {source: _value(source, held, device) for source, held in inputs.items()}
    args, kwargs = fx.node.map_arg(op_arguments(node), made.__getitem__)
    args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
    target = op_of(node)
    _spread(target, args)
    return call_seconds(lambda: target(*args, **kwargs), device, _OP_SECONDS)


def _value(source: fx.Node, held: object, device: torch.device) -> object:
    if isinstance(held, torch.Tensor):
        return _tensor(held, device)
    if isinstance(held, int | float):
        return held
    raise ClusterError(f"its input {source.name}: expected a tensor or a number, got {type(held).__name__}")


def _tensor(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers that lie in memory as those of `like`: from 0.1 to 1, or zeros for integers, or true."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride())) if like.numel() else 0
    flat = torch.zeros(length, dtype=like.dtype, device=device)
    if like.dtype == torch.bool:
        flat.fill_(True)
    elif like.is_floating_point():
        flat.copy_(torch.empty(length, device=device).uniform_(0.1, 1.0))
    return flat.as_strided(like.shape, like.stride())


def _spread(target: Any, args: Sequence[Any]) -> None:
    """Give the rows of an embedding, and the experts of rows, even shares; all the same would be another time."""
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
    # A step without a common factor comes to every choice; near the golden ratio of them, neighbours are far apart.
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
