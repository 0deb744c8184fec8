"""The cluster that the running program finds itself on."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from shardweave.cost_model.cluster import Cluster
from shardweave.errors import ClusterError

_PRESETS = (  # the first whose words are all in torch's name of the GPU
    ("A100 40GB", "perlmutter"),
    ("A100", "dgx-a100"),
    ("A800", "dgx-a100"),
    ("H100", "dgx-h100"),
    ("H200", "dgx-h100"),
    ("3090", "rtx3090-pcie"),
    ("MI250X", "frontier"),
)


def detect() -> Cluster:
    """What `Cluster.detect` returns; see there."""
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1"))
    if not running and world > 1:
        raise ClusterError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Cluster.detect()"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if running else world
    if local < 1 or world % local:
        raise ClusterError(
            f"{world} ranks do not divide over nodes of LOCAL_WORLD_SIZE={local}; "
            "start the same number of ranks on every node, or describe the machine in a YAML file"
        )
    if not torch.cuda.is_available() or (running and dist.get_backend() == "gloo"):
        return Cluster.preset("local-cpu").resized(cpu=local, node=world // local)
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    cluster = Cluster.preset(preset_of_gpu(gpu.name)).fitted(local, world // local)
    return replace(cluster, device=replace(cluster.device, name=gpu.name, memory=int(gpu.total_memory)))


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
