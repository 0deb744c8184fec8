"""The peak memory of a call as the allocator counts it, with the scratch memory inside of kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shardweave.runtime.parameters import local_tensor


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of `tensors`, of DTensors this rank's part; what several share counts once.

    >>> x = torch.zeros(4)
    >>> held_bytes([x, x.view(2, 2), x[1:]])
    16
    """
    storages = {}
    for tensor in tensors:
        storage = local_tensor(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured_peak(call: Callable[[], object], held: Iterable[torch.Tensor] = ()) -> int:
    """The most bytes in use at once during ``call()``, on the device of `held` (the CPU where that is empty).

    On CUDA it is what the caching allocator says, ``torch.cuda.max_memory_allocated``, and counts everything that is
    in use on the device. The CPU's allocator keeps no such figure, but tells `torch.profiler` of every block that it
    gives and takes back; to the most that it gave during the call come the bytes of `held`, which lay there before.
    A profiled call is slow: use it for memory, not for time.

    Parameters
    ----------
    call : callable
        What is measured.
    held : iterable of Tensor
        What lies in memory before and after: parameters, optimizer states, inputs.

    Returns
    -------
    int
        Bytes. What other threads allocate (of oneDNN and gloo, for example) is not seen on a CPU.

    Examples
    --------
    >>> x = torch.zeros(1024)
    >>> measured_peak(lambda: x.neg().sum(), [x]) - 2 * 4096  # the sum itself
    4
    """
    before = list(held)
    if before and local_tensor(before[0]).is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    del result
    return held_bytes(before) + most_at_once(changes(recorded))


def changes(recorded: Any) -> list[tuple[int, int]]:
    """The allocations of a profile, in order: (address, bytes), positive when allocated, negative when freed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [event["args"] for event in events if event["name"] == "[memory]"]
    return [(args["Addr"], args["Bytes"]) for args in sorted(found, key=lambda args: int(args["Ev Idx"]))]


def most_at_once(blocks: Iterable[tuple[int, int]]) -> int:
    """The most bytes in use at once, of blocks given and taken back.

    A block that was given before the record began is left out when it is taken back, and one at the address of another
    tells that the other was taken back unseen, by another thread.

    >>> most_at_once([(1, 8), (2, 4), (1, -8), (3, 2), (9, -100)])
    12
    """
    alive: dict[int, int] = {}
    now = most = 0
    for address, size in blocks:
        now -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            now += size
            most = max(most, now)
    return most
