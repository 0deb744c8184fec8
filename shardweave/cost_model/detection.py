"""The cluster that the running program finds itself on, and what is measured on it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardweave.cost_model import profile_cache
from shardweave.cost_model.device_profile import profile_device
from shardweave.cost_model.machine import M, Machine
from shardweave.cost_model.measured_tables import Measured
from shardweave.cost_model.profile_cache import hardware
from shardweave.cost_model.profiling import PATIENCE, fitted_links, profile_collectives
from shardweave.cost_model.timing import from_all, from_first, is_first, live_device, running
from shardweave.distributed import collective, control, forget_failure, in_step
from shardweave.ir import ClusterError, LostRankError

_PRESETS = (  # the first whose words are all in torch's name of the GPU
    ("A100 40GB", "perlmutter"),
    ("A100", "dgx-a100"),
    ("A800", "dgx-a100"),
    ("H100", "dgx-h100"),
    ("H200", "dgx-h100"),
    ("3090", "rtx3090-pcie"),
    ("MI250X", "frontier"),
)


@dataclass(frozen=True)
class RunningMachine:
    """What the program finds that it runs on.

    Parameters
    ----------
    devices : int
        Of each node.
    nodes : int
    gpu : str, optional
        Torch's name of the GPUs; None where the ranks compute on CPUs.
    memory : int
        Bytes of a GPU.
    """

    devices: int
    nodes: int
    gpu: str | None = None
    memory: int = 0


def running_machine() -> RunningMachine:
    """The machine of the running world, or of the ranks that a launcher has started.

    Raises
    ------
    ClusterError
        Where several ranks were started but torch.distributed is not initialised, or they do not divide over nodes.
    """
    world = dist.get_world_size() if running() else int(os.environ.get("WORLD_SIZE", "1"))
    if not running() and world > 1:
        raise ClusterError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Cluster.detect()"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if running() else world
    if local < 1 or world % local:
        raise ClusterError(
            f"{world} ranks do not divide over nodes of LOCAL_WORLD_SIZE={local}; "
            "start the same number of ranks on every node, or describe the machine in a YAML file"
        )
    if live_device().type == "cpu":
        return RunningMachine(local, world // local)
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return RunningMachine(local, world // local, gpu.name, int(gpu.total_memory))


def profiled(cluster: M, seconds: float = 30.0) -> M:
    """`cluster`, the running world, with what was measured on it: now, or earlier on the same hardware and versions.

    The measurements are those of rank 0 on all ranks. They are kept in `profile_cache.cache_directory`.

    Parameters
    ----------
    cluster : Machine
        The one that runs.
    seconds : float
        Time that measuring may take.

    Raises
    ------
    ClusterError
        On all ranks, with the rank and its cause: where one fails, or does not come within a minute.
    """
    if not running():
        alone = Measured(key=_key(cluster, [hardware()]), covered="one rank: there are no collectives to measure")
        return replace(cluster, measured=alone, device=profile_device(cluster.device))
    found: list[M] = []
    try:
        in_step(control(PATIENCE), "profiling the cluster", lambda: found.append(_measured(cluster, seconds)))
    except (RuntimeError, LostRankError) as error:
        forget_failure()  # the groups are the profile's own: the world goes on without it
        raise ClusterError(
            f"profiling the cluster failed on rank {dist.get_rank()} of {dist.get_world_size()}: expected every rank "
            f"to call Cluster.detect(profile=True) and to take part within {PATIENCE.seconds} s a step, got: {error}"
        ) from error
    return fitted_links(found[0]) if cluster.library == "gloo" else found[0]


def _measured(cluster: M, seconds: float) -> M:
    """`cluster` with what the ranks measure together."""
    world = dist.new_group(timeout=PATIENCE)
    try:
        with collective("a step of profiling the cluster", world, apart=True):
            key = _key(cluster, from_all(hardware(), world))
            measured = from_first(profile_cache.read(key) if is_first(world) else None, world)
            if measured is None:
                table, coverage = profile_collectives(cluster, world, seconds=seconds)
                measured = from_first(Measured(table, key=key, covered=coverage.text(cluster)), world)
                if is_first(world) and table.curves:
                    profile_cache.write(measured)
            return replace(cluster, measured=measured, device=profile_device(cluster.device, group=world))
    finally:
        dist.destroy_process_group(world)  # where this rank has failed, the others then notice at once


def _key(cluster: Machine, ranks: list[Any]) -> str:
    levels = [[level.name, level.size] for level in cluster.levels]
    return profile_cache.key_of({"format": 2, "levels": levels, "library": cluster.library, "ranks": ranks})


def preset_of_gpu(name: str) -> str:
    """The preset whose device has the figures of the GPU that torch calls `name`.

    Raises
    ------
    ClusterError
        Where none has.

    Examples
    --------
    >>> preset_of_gpu("NVIDIA A100-SXM4-40GB"), preset_of_gpu("NVIDIA H100 80GB HBM3")
    ('perlmutter', 'dgx-h100')
    """
    for words, preset in _PRESETS:
        if all(word in name for word in words.split()):
            return preset
    raise ClusterError(
        f"no preset knows the GPU {name!r}; write its figures to a YAML file (docs/cluster.md) "
        "and use Cluster.load(path) in place of Cluster.detect()"
    )
