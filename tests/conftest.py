"""What all tests share: one pool of local gloo ranks for the whole run."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from shardweave.runtime.launch import WorkerPool
from tests.durations import UNRECORDED, Recorder, recorded, short_suite

hypothesis.settings.register_profile("shardweave", deadline=None)  # a shared machine stalls now and then
hypothesis.settings.load_profile("shardweave")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardweave")
    group.addoption("--part", choices=("all", "short", "long"), default="all", help="which tests: docs/testing.md")
    group.addoption("--record", action="store_true", help="note in tests/durations.json how long each test takes")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of xdist, and ranks, inherit it
        own = tempfile.TemporaryDirectory(prefix="shardweave-tests-")
        config.add_cleanup(own.cleanup)
        os.environ["SHARDWEAVE_CACHE"] = own.name
        os.environ["SHARDWEAVE_PLAN_CACHE"] = "0"  # tests watch how plans are made
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the part that is asked for; the longest files first, as files are dealt out whole."""
    seconds = recorded()
    part = config.getoption("--part")
    if part != "all":
        short = short_suite([item.nodeid for item in items], seconds)
        left_out = [item for item in items if (item.nodeid in short) != (part == "short")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (item.nodeid in short) == (part == "short")]
    of_file: dict[Path, float] = defaultdict(float)
    for item in items:
        of_file[item.path] += seconds.get(item.nodeid, UNRECORDED)
    items.sort(key=lambda item: -of_file[item.path])


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
