"""Process groups over gloo that run one collective at a time, as communicators of GPUs do.

By default torch gives each gloo group two threads. When two all-gathers of one group end at the same time, both write
the name of the last one without a lock, and the process dies with "malloc(): unaligned tcache chunk detected" (torch
2.13, ``ProcessGroupGloo::runLoop``). Generated steps start many collectives before they wait for the first, so the
groups that they use have one thread. This is the only module that touches torch's private options of gloo groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Within it, torch makes gloo groups of one thread."""
    if not dist.is_gloo_available():
        yield
        return
    original: Any = distributed_c10d.ProcessGroupGloo

    class OneThread(original):  # type: ignore[misc]
        """torch makes its gloo groups from a store, a rank, a size and a timeout, and leaves the options to them."""

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
    """The network devices that torch gives a gloo group when it is left the options.

    They are those of ``GLOO_SOCKET_IFNAME``, one name or several with commas between; without it the one of the
    address that the host's name resolves to.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:  # torch takes no notice of a name of one letter
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of `group` may take: what ``init_process_group`` or ``new_group`` was given."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return distributed_c10d.default_pg_timeout


def is_safe(group: dist.ProcessGroup) -> bool:
    """Whether several collectives of a group may be under way: not where it is one of gloo's with several threads."""
    if not dist.is_gloo_available() or "cpu" not in {device.type for device in group._device_types}:
        return True
    backend: Any = group._get_backend(torch.device("cpu"))
    is_gloo = isinstance(backend, distributed_c10d.ProcessGroupGloo)
    return not is_gloo or backend.options._threads == 1
