"""The setting that all rows of a validation share, and how one row becomes a forced plan.

`hosted` is the cluster of a job under DeepSpeed's ZeRO-3. Before an all-gather or a reduce-scatter its host cuts a
tensor into one view a rank and puts the views together again (microsoft/DeepSpeed, ``all_gather_coalesced`` of
``runtime/zero/partition_parameters.py`` and ``reduce_scatter_coalesced`` of
``runtime/comm/coalesced_collectives.py``). On a few ranks the device computes meanwhile; on a thousand ranks the host
takes longer than the device. That code explains why the time grows with the ranks; the time for each rank is
calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from shardweave.compiler import Compiler
from shardweave.cost_model import Cluster, Options
from shardweave.demo import GPT, GPTConfig
from shardweave.ir import Ablation, Precision
from shardweave.planner import Plan
from shardweave.validation.clusters import cluster_of
from shardweave.validation.models import Llama, MinGPT, MinGPTSizes, Sizes

HOST_SECONDS_PER_RANK = 1.6e-5
"""Calibrated: to one cell, AMSP's LLaMA-7B with ZeRO-3 on 1,024 GPUs."""


def hosted(cluster: Cluster) -> Cluster:
    """`cluster` as it trains with DeepSpeed's ZeRO-3.

    >>> hosted(Cluster.preset("dgx-a100", nodes=128)).device.collective_host_seconds
    0.016384
    """
    seconds = HOST_SECONDS_PER_RANK * cluster.world_size
    return replace(cluster, device=replace(cluster.device, collective_host_seconds=seconds))


Progress = Callable[[str], None]
"""Told the name of each row as its turn comes."""


@dataclass(frozen=True)
class Setting:
    """What all rows of a validation share.

    Parameters
    ----------
    progress : callable
        Told each row as its turn comes.
    cluster : callable
        The cluster of a name; by default that of its file, with its constants as committed.
    options : mapping
        Fields of `Options` that go before a row's own: to see what leaving one effect out does.
    ablation : mapping
        Fields of `Ablation` that go before a row's own.
    """

    progress: Progress = lambda _: None
    cluster: Callable[[str], Cluster] = cluster_of
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: Mapping[str, Any] = field(default_factory=dict)

    def asked(self, compiler: Compiler, cluster: Cluster, **options: Any) -> Compiler:
        """A row's compiler: one with its options, on its cluster, within the device's memory."""
        shared = {"memory_limit": cluster.device.memory, "keep_gathered": False, "buckets": False}
        asked = {**shared, **options, **self.options}
        if self.ablation:
            asked["ablation"] = replace(asked.get("ablation") or Ablation(), **self.ablation)
        return compiler.with_(cluster, replace(compiler.options, **asked))

    def plan(
        self,
        compiler: Compiler,
        cluster: Cluster,
        *,
        system: Callable[[Cluster], Cluster] | None = None,
        **options: Any,
    ) -> Plan:
        """The forced plan of a row, on what its system makes of a cluster.

        Raises
        ------
        InfeasibleError
            It does not fit.
        PlanError
            The compiler cannot build it: names what does not divide.
        """
        return self.asked(compiler, cluster if system is None else system(cluster), **options).plan()


_MODELS: Mapping[type, Callable[[Any], nn.Module]] = {Sizes: Llama, GPTConfig: GPT, MinGPTSizes: MinGPT}


@lru_cache(maxsize=16)
def captured(
    sizes: Sizes | GPTConfig | MinGPTSizes, sequences: int, tokens: int, precision: Precision | None = None
) -> Compiler:
    """A model's step on `sequences` of `tokens` tokens: captured once for the rows that follow each other."""
    with torch.device("meta"):
        model, batch = _MODELS[type(sizes)](sizes), torch.zeros(sequences, tokens, dtype=torch.long)
    return Compiler(model, Cluster.local(1), (batch, batch), Options(precision=precision), None)


def of_a_layer(measured: Callable[[int], Sequence[float]], fewest: int = 2) -> tuple[float, ...]:
    """What one more layer adds to each of the figures of a model: what is there once does not count.

    Parameters
    ----------
    measured : callable
        From a number of layers to the figures.
    fewest : int
        Layers of the smaller of the two models.

    Examples
    --------
    >>> of_a_layer(lambda layers: (5.0 + 2.0 * layers, 3.0))
    (2.0, 0.0)
    """
    return tuple(more - less for more, less in zip(measured(fewest + 1), measured(fewest), strict=True))
