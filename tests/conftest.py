"""What all tests share: one pool of local gloo ranks for the whole run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shardweave.runtime.launch import WorkerPool


def pytest_collection_finish() -> None:
    """Collect garbage less often: most of the objects are modules of torch and graphs in use, gone through in vain."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Local ranks: ``pool.run(fn, *args, nprocs=4)``; `fn` a function of a test module. Starts at the first run."""
    with WorkerPool() as workers:
        yield workers
