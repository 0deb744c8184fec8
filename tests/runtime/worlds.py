"""Worlds as a user's script makes them, by ``init_process_group``, whose ranks a test may stop, kill or cut off."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class World(AbstractContextManager["World"]):
    """Forks `size` ranks of this process; each makes the world and runs ``fn(*args)``. All are killed on leaving.

    Parameters
    ----------
    fn : callable
        What each rank runs.
    size : int
        Number of ranks.
    timeout : float
        Seconds, as given to ``init_process_group``.
    address : str
        Where rank 0's store listens.
    enter : callable, optional
        Called with its rank by each process before it makes the world, to go to its host.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        size: int,
        timeout: float = 60.0,
        address: str = "127.0.0.1",
        enter: Callable[[int], None] | None = None,
    ) -> None:
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        context = get_context("fork")
        self.ranks, self._readers = [], []
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            where = rank, size, f"tcp://{address}:{port}", timeout, enter
            process = context.Process(target=_rank, args=(fn, args, writer, *where), daemon=True)
            process.start()
            writer.close()
            self.ranks.append(process)
            self._readers.append(reader)

    def results(self, ranks: Sequence[int], within: float = 100.0) -> list[Any]:
        """What `ranks` return; an error if one raises, or is not done in time."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + within
        while missing := [rank for rank in ranks if rank not in found]:
            ready = wait([self._readers[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {missing} are not done after {within:g} s"
            for rank in missing:
                if self._readers[rank] in ready:
                    succeeded, found[rank] = pickle.loads(self._readers[rank].recv_bytes())
                    assert succeeded, f"rank {rank}: {found[rank]}"
        return [found[rank] for rank in ranks]

    def __exit__(self, *exception: object) -> None:
        for process in self.ranks:
            process.kill()
        for process, reader in zip(self.ranks, self._readers, strict=True):
            process.join()
            reader.close()


def _rank(
    fn: Callable[..., Any],
    args: Sequence[Any],
    writer: Connection,
    rank: int,
    size: int,
    address: str,
    timeout: float,
    enter: Callable[[int], None] | None,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if enter is not None:
            enter(rank)
        patience = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=patience)
        answer = True, fn(*args)
    except BaseException:  # for the test to show
        answer = False, traceback.format_exc()
    writer.send_bytes(pickle.dumps(answer))
    time.sleep(600)  # a rank that left would break the connections of others; the test ends it


def stop() -> None:
    """Stop this process, as a machine that hangs does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    """End this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
