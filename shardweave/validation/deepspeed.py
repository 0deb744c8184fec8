"""DeepSpeed's ZeRO-3, as several papers measured it: what it does on the host for each of its collectives.

Before a gather or a scatter its host cuts a tensor into a list with one view a rank and puts them together again
(microsoft/DeepSpeed, ``all_gather_coalesced`` of ``runtime/zero/partition_parameters.py`` and
``reduce_scatter_coalesced`` of ``runtime/comm/coalesced_collectives.py``). On a few ranks the device computes
meanwhile; on a thousand the host is what a step takes. That the time grows with the ranks is explained by that code;
how much a rank takes is calibrated.
"""

from __future__ import annotations

from dataclasses import replace

from shardweave.cost_model import Cluster

HOST_SECONDS_PER_RANK = 1.6e-5
"""Calibrated: to one cell, AMSP's LLaMA-7B with ZeRO-3 on 1,024 GPUs."""


def hosted(cluster: Cluster) -> Cluster:
    """`cluster` as it trains with DeepSpeed's ZeRO-3.

    >>> hosted(Cluster.preset("dgx-a100", nodes=128)).device.collective_host_seconds
    0.016384
    """
    seconds = HOST_SECONDS_PER_RANK * cluster.world_size
    return replace(cluster, device=replace(cluster.device, collective_host_seconds=seconds))
