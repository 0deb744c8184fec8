"""What all tests share: one pool of local gloo ranks for the whole run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest

from shardweave.runtime.launch import WorkerPool

hypothesis.settings.register_profile("shardweave", deadline=None)  # a shared machine stalls now and then
hypothesis.settings.load_profile("shardweave")

LONGEST = (
    "test_planning.py",
    "test_notebook.py",
    "test_equality.py",
    "test_baselines.py",
    "test_models.py",
    "test_micro_batch_search.py",
    "test_state_sharding.py",
    "test_overlap.py",
    "test_api.py",
    "test_solver.py",
    "test_backend.py",
    "test_recompute_costs.py",
    "test_sweep.py",
    "test_brute_force.py",
    "test_micro_batches.py",
)
"""The files that take longest, in this order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: dealt out whole, one that begins last would leave all workers but one idle."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


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
