"""What all tests share: one pool of local gloo ranks for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardweave.runtime.launch import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Local ranks: ``pool.run(fn, *args, nprocs=4)``; `fn` a function of a test module. Starts at the first run."""
    with WorkerPool() as workers:
        yield workers
