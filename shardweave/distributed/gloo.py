"""Gloo: groups of one thread, and transfers between its ranks without waiting for one another.

Groups over gloo run one collective at a time, as communicators of GPUs do. By default torch gives each gloo group two
threads. When two all-gathers of one group end at the same time, both write the name of the last one without a lock, and
the process dies with "malloc(): unaligned tcache chunk detected" (torch 2.13, ``ProcessGroupGloo::runLoop``). Generated
steps start many collectives before they wait for the first, so the groups that they use have one thread.

A rank of gloo sends only when the receiver has said that it waits for this. A collective says so as it begins, behind
what it still sends of the one before, so that over a slow link each direction often waits for the other. And gloo has
no reduce-scatter: torch reduces a copy of the whole input (``reduce_scatter_tensor_coalesced``), which moves twice as
many bytes as are needed. So the parts of an all-to-all, a reduce-scatter and an all-gather are sent from rank to rank
(`exchange`, `gather`), all of them ready to be received when they are started. docs/performance.md has what that saves.

Each rank sends to each other one then. A group whose members share the links of their hosts would send the same bytes
over these several times, where a ring does so once (`is_sent_directly`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import distributed_c10d

from shardweave.ir import Axis, axes_size

c10d = torch.ops._c10d_functional

_KINDS: dict[Any, str] = {
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
}
"""The collectives that may be sent directly."""
_RING_PASSES = {"all_gather": 1, "reduce_scatter": 2, "all_to_all": math.inf}
"""How often gloo passes their whole buffer round a ring: it reduces all of it for a reduce-scatter, and has no ring for
an all-to-all."""
_TAG = 1
"""What is sent from rank to rank has a tag that no collective of gloo has: theirs are multiples of ``2**24``."""


def sends_directly(kind: str, axes: Iterable[Axis], group: dist.ProcessGroup) -> bool:
    """Whether steps on CPUs send the parts of a sum, or of another collective, over `axes` from rank to rank.

    In a group over gloo, where that loads no link more than gloo's own ring.
    """
    return gloo_backend(group) is not None and _loads_links_less(kind, axes)


def is_sent_directly(start: fx.Node, axes: Iterable[Axis]) -> bool:
    """Whether a collective of a generated graph over `axes` is sent from rank to rank, if its group is over gloo."""
    kind = _KINDS.get(start.target)
    is_maximum = kind == "reduce_scatter" and start.args[1] != "sum"
    return kind is not None and not is_maximum and _loads_links_less(kind, axes)


def _loads_links_less(kind: str, axes: Iterable[Axis]) -> bool:
    """Whether direct transfers load no link more than gloo does.

    Each member behind a link sends a part to each one that is not. A ring passes all parts but one over the link.

    >>> node, gpu = Axis("node0", 2, stride=2), Axis("gpu0", 2)
    >>> kinds = "all_gather", "reduce_scatter"
    >>> [[_loads_links_less(kind, axes) for kind in kinds] for axes in ([node], [node, gpu])]
    [[True, True], [False, True]]
    """
    if kind not in _RING_PASSES:
        return False
    inside_out = sorted(axes, key=lambda axis: axis.stride)
    size, behind, most = axes_size(inside_out), 1, 0
    for _, own in groupby(inside_out, key=lambda axis: axis.level):
        most = max(most, behind * (size - behind))  # parts that leave the members behind one link
        behind *= axes_size(own)
    return most <= _RING_PASSES[kind] * (size - 1)


def send_directly(start: fx.Node, axes: Iterable[Axis], group: dist.ProcessGroup) -> None:
    """Send the parts of a bound graph's collective over `axes` from rank to rank, if it may be sent so.

    A sum is made after the wait.
    """
    if gloo_backend(group) is None or not is_sent_directly(start, axes):
        return
    graph, kind, source, name = start.graph, _KINDS[start.target], start.args[0], start.args[-1]
    with graph.inserting_before(start):
        if kind == "all_gather":
            moved = graph.call_function(gather, (source, name))
        elif kind == "all_to_all":
            moved = graph.call_function(exchange, start.args)
        else:
            count: Any = start.args[2]
            parts = graph.call_function(torch.unflatten, (source, 0, (count, -1)))
            moved = graph.call_function(exchange, (parts, [1] * count, [1] * count, name))
    moved.meta = start.meta
    start.replace_all_uses_with(moved)
    graph.erase_node(start)
    for wait in [*moved.users] if kind == "reduce_scatter" else []:
        readers = [*wait.users]
        with graph.inserting_after(wait):
            total = graph.call_function(sum_of_parts, (wait,))
        total.meta = {**wait.meta}
        for reader in readers:
            reader.replace_input_with(wait, total)


def exchange(
    sent: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group_name: str
) -> torch.Tensor:
    """Start an all-to-all of the rows of `sent`; its result is to be waited for as that of `c10d` is.

    The parts to be received are announced before anything is sent.
    """
    received = sent.new_empty((sum(output_sizes), *sent.shape[1:]))
    # A kernel may return other strides than its fake one said; torch's own collectives copy what is not contiguous.
    leaving, arriving = torch.split(sent.contiguous(), [*input_sizes]), torch.split(received, [*output_sizes])
    _send(leaving, arriving, received, group_name)
    return received


def gather(sent: torch.Tensor, group_name: str) -> torch.Tensor:
    """Start an all-gather along the first dimension; its result is to be waited for as that of `c10d` is."""
    size = group_named(group_name).size()
    received = sent.new_empty((size * sent.shape[0], *sent.shape[1:]))
    _send([sent.contiguous()] * size, torch.split(received, sent.shape[0]), received, group_name)
    return received


def _send(
    leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], received: torch.Tensor, group_name: str
) -> None:
    """Send and receive a part for each rank of a group. What waits for `received` waits for all of them."""
    group = group_named(group_name)
    own, size = group.rank(), group.size()
    others = [(own + distance) % size for distance in range(1, size)]
    for rank in others:
        if arriving[rank].numel():
            torch._C._distributed_c10d._register_work(received, group.recv([arriving[rank]], rank, _TAG))
    for rank in others:
        if leaving[rank].numel():
            torch._C._distributed_c10d._register_work(received, group.send([leaving[rank]], rank, _TAG))
    arriving[own].copy_(leaving[own])


def group_named(name: str) -> dist.ProcessGroup:
    """The group that a collective of a bound graph names."""
    resolving: Any = distributed_c10d  # the function is missing in its type stubs
    group: dist.ProcessGroup = resolving._resolve_process_group(name)
    return group


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in the same dtype.

    >>> sum_of_parts(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    tensor([4, 6], dtype=torch.int32)
    """
    return parts.sum(0, dtype=parts.dtype)


@contextmanager
def single_threaded_gloo() -> Iterator[None]:
    """In this context torch makes gloo groups of one thread."""
    if not dist.is_gloo_available():
        yield
        return
    original: Any = distributed_c10d.ProcessGroupGloo

    class OneThread(original):  # type: ignore[misc]
        """torch passes a store, a rank, a size and a timeout, and no options."""

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = original._Options()
            options._devices = _devices(original)
            options._threads = 1
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]


def _devices(gloo: Any) -> list[Any]:
    """The network devices that torch gives a gloo group without options.

    They are the comma-separated interfaces of ``GLOO_SOCKET_IFNAME``, else the interface of the address that the host
    name resolves to.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:  # torch ignores a name of one letter
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]


def allows_concurrent_collectives(group: dist.ProcessGroup) -> bool:
    """Whether several collectives of a group may run at once: not in a gloo group of several threads."""
    backend = gloo_backend(group)
    return backend is None or backend.options._threads == 1


def gloo_backend(group: dist.ProcessGroup) -> Any:
    """The backend of a group for CPUs if that is gloo, else None."""
    if not dist.is_gloo_available() or "cpu" not in {device.type for device in group._device_types}:
        return None
    backend: Any = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, distributed_c10d.ProcessGroupGloo) else None
