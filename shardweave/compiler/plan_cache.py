"""Plans of earlier runs: a model that is compiled again, for the same cluster and options, takes the plan it had.

A plan is saved under a hash of all that it depends on: the captured graph, the cluster's figures, the options, the
versions of torch and OR-Tools, and the source code of this package. So a change of any of them is another key. What
another program wrote there, or half of a file, is replaced after a warning.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from shardweave.cost_model import Cluster, Options, cache_directory, store_cached
from shardweave.ir import Captured, PlanError
from shardweave.planner import ModelKey, Plan
from shardweave.sharding import info

SWITCH = "SHARDWEAVE_PLAN_CACHE"
"""The environment variable that switches the cache off, by ``0``."""


def is_on() -> bool:
    """Whether plans are saved and taken."""
    return os.environ.get(SWITCH, "1") != "0"


def plan_key(captured: Captured, cluster: Cluster, options: Options) -> str:
    """A hash of what a plan is made from, in thirty-two hex digits; the same in each process.

    Examples
    --------
    >>> import torch
    >>> from shardweave.compiler.capture import capture
    >>> steps = [capture(torch.nn.Linear(8, size), torch.ones(4, 8)) for size in (8, 8, 16)]
    >>> first, again, other = (plan_key(step, Cluster.local(2), Options()) for step in steps)
    >>> first == again, first == other
    (True, False)
    """
    nodes = [
        (node.op, str(node.target), str((node.args, node.kwargs)), _described(node.meta.get("val")), repr(info(node)))
        for node in captured.graph.graph.nodes
    ]
    names = (
        captured.parameters, captured.buffers, captured.inputs, captured.tangents, captured.outputs, captured.gradients,
        captured.mutated_buffers, captured.aliases, captured.training, captured.whole, captured.dtypes,
    )  # fmt: skip
    asked = replace(options, timeout=None, check_inputs=0, inductor=False).key  # they are no part of a plan
    versions = torch.__version__, version("ortools"), _source_hash()
    text = repr((nodes, names, cluster.name, cluster.fingerprint, asked, versions))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _described(value: object) -> str:
    """The shapes, strides and dtypes of a node's values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    return str([*map(_described, value)]) if isinstance(value, list | tuple) else str(value)


@cache
def _source_hash() -> str:
    """A hash of this package's source code: a plan is as its planner makes it."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def cached_plan(key: str, model_key: ModelKey, cluster: Cluster) -> Plan | None:
    """The plan that was saved under a key; None if there is none, or after a warning if the file is none of ours."""
    path = cache_directory() / f"{_name(key)}.json"
    if not path.is_file():
        return None
    try:
        plan = Plan.load(path)
        plan.check(model_key, cluster)
    except PlanError as error:
        warnings.warn(f"the cached plan is not used, and made again: {error}", stacklevel=2)
        return None
    return plan


def save_plan(key: str, plan: Plan, options: Options) -> None:
    """Save a plan for later runs, unless the time limit may have ended its search."""
    if plan.planning_seconds < options.time_limit:
        data: dict[str, Any] = plan.to_dict()
        store_cached(_name(key), data)


def _name(key: str) -> str:
    return f"plan-{key}"
