"""Local ranks on one machine, over gloo: for notebooks, tests and the demo. Real jobs use ``torchrun``.

Ranks are forked from a process that has imported torch already, so they start in a fraction of a second. Each run has
new processes: process groups, caches or a crashed rank of one run do not affect the next.

If the function can be imported by name, `launch` forks from a clean helper process. For a function in ``__main__`` (a
notebook's cell, a script) or in another function it forks from the calling process. That fails after the caller has
used CUDA, or has run a backward on a machine with CUDA.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from shardweave.ir import LaunchError

Result = TypeVar("Result")

_GRACE_SECONDS = 0.3
"""Seconds to wait after a first failure: the peers of a killed rank report before its own end is seen."""


def launch(
    fn: Callable[..., Result], nprocs: int = 4, args: Sequence[Any] = (), timeout: float = 600.0
) -> list[Result]:
    """Run ``fn(*args)`` on `nprocs` local ranks and return their results, in the order of ranks.

    In every rank ``torch.distributed`` is initialised with gloo over the loopback interface, and torch computes with
    one thread.

    Parameters
    ----------
    fn : callable
        The function that every rank runs; a notebook's cell may define it.
    nprocs : int
        Number of ranks.
    args : sequence
        The arguments, the same on every rank.
    timeout : float
        Seconds after which the ranks are killed.

    Returns
    -------
    list
        The result of each rank. Results travel by pickle: return plain tensors, not DTensors.

    Raises
    ------
    LaunchError
        If a rank raises an error (with its traceback), is killed, returns a value that cannot be pickled, or is late.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> launch(dist.get_rank, nprocs=2)
    [0, 1]
    """
    try:
        importable = b"__main__" not in pickle.dumps((fn, args))
    except Exception:  # it cannot be pickled, so ranks must be forked from this process
        importable = False
    if importable:
        with WorkerPool() as pool:
            return pool.run(fn, *args, nprocs=nprocs, timeout=timeout)
    return [pickle.loads(result) for result in _fork_ranks(fn, args, nprocs, timeout)]


class WorkerPool:
    """A clean process that imports torch once, and forks the ranks of each run.

    The process starts at the first run and ends with `close`, or with its owner.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> with WorkerPool() as pool:
    ...     pool.run(dist.get_world_size, nprocs=2), pool.run(dist.get_rank, nprocs=3)
    ([2, 2], [0, 1, 2])
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, fn: Callable[..., Result], *args: Any, nprocs: int = 4, timeout: float = 120.0) -> list[Result]:
        """As `launch`; `fn` and `args` must be picklable, so `fn` must be importable by its module's name.

        A run that fails leaves the pool usable.
        """
        try:
            job = pickle.dumps((sys.path, os.getcwd(), pickle.dumps((fn, args)), nprocs, timeout))
        except Exception as error:
            raise LaunchError(f"{fn!r} or its arguments cannot be sent to the ranks: {error}. {_PICKLE}") from error
        connection = self._connect()
        try:
            connection.send_bytes(job)
            succeeded, payload = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise LaunchError(f"the process that starts the ranks of {fn!r} ended early") from error
        except BaseException:  # an interrupt: a later answer must not be taken for that of the next run
            self.close()
            raise
        if not succeeded:
            raise LaunchError(payload)
        return [pickle.loads(result) for result in payload]

    def close(self) -> None:
        """End the process and its ranks."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            self._server = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _connect(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            serve = f"from shardweave.runtime.launch import _serve; _serve({theirs.fileno()})"
            code = f"import sys; sys.path[:] = {sys.path!r}; {serve}"
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
            theirs.close()
            self._connection = Connection(ours.detach())
        return self._connection


_PICKLE = (
    "Functions must be importable by name, so not lambdas or nested ones, and results plain values and tensors, "
    "so not DTensors"
)


def _serve(descriptor: int) -> None:
    """The main loop of a pool's process: a run for each job received, until its owner ends."""
    # Imports of a capture and of a DTensor's first op, done here once and not by every rank.
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch.distributed.tensor.experimental  # noqa: F401

    _die_with_parent()
    connection = Connection(descriptor)
    while True:
        try:
            path, directory, call, nprocs, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        os.chdir(directory)
        answer: tuple[bool, list[bytes] | str]
        try:
            fn, args = pickle.loads(call)
            gc.freeze()  # or each rank's garbage collection would touch, and so copy, all memory of this process
            answer = True, _fork_ranks(fn, args, nprocs, timeout)
        except LaunchError as error:
            answer = False, str(error)
        except BaseException:
            answer = False, f"the ranks' function cannot be imported in a fresh process:\n{traceback.format_exc()}"
        gc.unfreeze()
        connection.send_bytes(pickle.dumps(answer))


def _fork_ranks(fn: Callable[..., Any], args: Sequence[Any], nprocs: int, timeout: float) -> list[bytes]:
    """Fork `nprocs` ranks of this process, and return their pickled results."""
    if nprocs < 1:
        raise LaunchError(f"nprocs must be at least 1, got {nprocs}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or every rank would print the buffered text
    context = multiprocessing.get_context("fork")
    readers: list[Connection] = []
    ranks: list[ForkProcess] = []
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, nprocs)) as listener:
        for rank in range(nprocs):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(fn, args, rank, nprocs, listener, timeout, writer), daemon=True
            )
            process.start()
            writer.close()
            readers.append(reader)
            ranks.append(process)
    try:
        return _collect(readers, ranks, timeout)
    finally:
        for process in ranks:
            process.kill()
        for process, reader in zip(ranks, readers, strict=True):
            process.join()
            reader.close()


def _collect(readers: list[Connection], ranks: list[ForkProcess], timeout: float) -> list[bytes]:
    """The results of all ranks; LaunchError with the most telling failure."""
    deadline = time.monotonic() + timeout
    results: dict[int, bytes] = {}
    failure = ""
    pending = dict(enumerate(readers))
    while pending:
        ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            if failure:
                break
            late = ", ".join(map(str, pending))
            raise LaunchError(
                f"after {timeout:g} s rank {late} of {len(ranks)} is not done. Either the ranks wait for each other, "
                "or the work takes longer: pass a larger timeout"
            )
        for rank in [rank for rank, reader in pending.items() if reader in ready]:
            try:
                succeeded, payload = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:  # no report: the process was killed, which explains its peers' errors
                ranks[rank].join()
                raise LaunchError(f"rank {rank} of {len(ranks)} ended {_exit_reason(ranks[rank].exitcode)}") from None
            if succeeded:
                results[rank] = payload
            elif not failure:
                failure = f"rank {rank} of {len(ranks)} failed: {payload}"
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failure:
        raise LaunchError(failure)
    return [results[rank] for rank in range(len(ranks))]


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"by signal {signal.Signals(-code).name}: it was killed (perhaps for want of memory) or crashed"
    return f"with exit status {code} before it returned"


def _rank_main(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    nprocs: int,
    listener: socket.socket,
    timeout: float,
    writer: Connection,
) -> None:
    """The main function of a rank. It ends by `os._exit`, without the exit handlers of the parent."""
    _die_with_parent()
    answer: tuple[bool, bytes | str]
    try:
        result = _run_rank(fn, args, rank, nprocs, listener, timeout)
        try:
            answer = True, pickle.dumps(result)
        except Exception as error:
            answer = False, f"its result, a {type(result).__name__}, cannot be pickled: {error}. {_PICKLE}"
    except BaseException as error:
        hint = ""
        if "fork" in str(error):  # torch's words for CUDA, or autograd's CUDA threads, in a forked process
            hint = "\nMove the function into a module that can be imported: it then runs in a clean process."
        answer = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}{hint}"
    writer.send_bytes(pickle.dumps(answer))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _run_rank(
    fn: Callable[..., Any], args: Sequence[Any], rank: int, nprocs: int, listener: socket.socket, timeout: float
) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but missing from its __all__

    from shardweave.distributed import collective, single_threaded_gloo
    from shardweave.runtime.checkpoint.checkpoint import finish_saving

    torch.set_num_threads(1)  # also because OpenMP's threads do not survive a fork
    _pin_to_core(rank, nprocs)
    port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(nprocs),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = timedelta(seconds=timeout)
    descriptor = listener.detach() if rank == 0 else None
    store = TCPStore("127.0.0.1", port, nprocs, rank == 0, patience, master_listen_fd=descriptor)
    with single_threaded_gloo():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=nprocs, timeout=patience)
    result = fn(*args)
    finish_saving()  # a rank leaves without joining its threads
    if dist.is_initialized():
        with collective("waiting for the others at the end"):
            dist.barrier()  # or a rank that leaves early would break the connections of those still at work
    return result


def _pin_to_core(rank: int, nprocs: int) -> None:
    """Pin all threads of a rank to one core if ranks share cores.

    A thread of gloo spins while another holds the lock of a connection, which takes long if that one has no core:
    collectives of four ranks on two cores took five times as long.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if nprocs >= len(cores):
            os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _die_with_parent() -> None:
    """On Linux, end this process with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
