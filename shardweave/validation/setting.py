"""The setting that all rows of a validation share: the models of the papers, and how one row becomes a forced plan.

The models are ordinary PyTorch modules at their published sizes, on the meta device. `with_deepspeed_host` is the
cluster of a job under DeepSpeed's ZeRO-3. Before an all-gather or a reduce-scatter its host cuts a tensor into one view
a rank and puts the views together again (microsoft/DeepSpeed, ``all_gather_coalesced`` of
``runtime/zero/partition_parameters.py`` and ``reduce_scatter_coalesced`` of ``runtime/comm/coalesced_collectives.py``).
On a few ranks the device computes meanwhile; on a thousand ranks the host takes longer than the device. That code
explains why the time grows with the ranks; the time for each rank is calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler import Compiler
from shardweave.demo import GPT, GPTConfig
from shardweave.validation.clusters import cluster_of

Progress = Callable[[str], None]
"""Called with the name of each row before it is planned."""
HOST_SECONDS_PER_RANK = 1.6e-5
"""Calibrated: to one cell, AMSP's LLaMA-7B with ZeRO-3 on 1,024 GPUs."""


def with_deepspeed_host(cluster: sw.Cluster) -> sw.Cluster:
    """`cluster` as it trains with DeepSpeed's ZeRO-3.

    >>> with_deepspeed_host(sw.Cluster.preset("dgx-a100", nodes=128)).device.collective_host_seconds
    0.016384
    """
    seconds = HOST_SECONDS_PER_RANK * cluster.world_size
    return replace(cluster, device=replace(cluster.device, collective_host_seconds=seconds))


@dataclass(frozen=True)
class Setting:
    """The shared inputs of all rows of a validation.

    Parameters
    ----------
    progress : callable
        Called with the name of each row before it is planned.
    cluster : callable
        Maps a name to a cluster; by default to that of its file.
    options : mapping
        Fields of `Options` that override those of a row, to measure one effect.
    ablation : mapping
        Fields of `Ablation` that override those of a row.
    """

    progress: Progress = lambda _: None
    cluster: Callable[[str], sw.Cluster] = cluster_of
    options: Mapping[str, Any] = field(default_factory=dict)
    ablation: Mapping[str, Any] = field(default_factory=dict)

    def row_compiler(self, compiler: Compiler, cluster: sw.Cluster, **options: Any) -> Compiler:
        """The compiler of a row: with its options, on its cluster, within the memory of the device."""
        shared = {"memory_limit": cluster.device.memory, "keep_gathered": False, "buckets": False}
        asked = {**shared, **options, **self.options}
        if self.ablation:
            asked["ablation"] = replace(asked.get("ablation") or sw.Ablation(), **self.ablation)
        return compiler.with_(cluster, replace(compiler.options, **asked))

    def plan(
        self,
        compiler: Compiler,
        cluster: sw.Cluster,
        *,
        system: Callable[[sw.Cluster], sw.Cluster] | None = None,
        **options: Any,
    ) -> sw.Plan:
        """The forced plan of a row, on the cluster as `system` changes it.

        Raises
        ------
        InfeasibleError
            If the plan does not fit into the memory.
        PlanError
            If the compiler cannot build the plan.
        """
        return self.row_compiler(compiler, cluster if system is None else system(cluster), **options).plan()


@lru_cache(maxsize=16)
def captured(
    sizes: Sizes | GPTConfig | MinGPTSizes, sequences: int, tokens: int, precision: sw.Precision | None = None
) -> Compiler:
    """The captured step of a model on `sequences` of `tokens` tokens each. Rows with equal arguments share it."""
    with torch.device("meta"):
        model, batch = _MODELS[type(sizes)](sizes), torch.zeros(sequences, tokens, dtype=torch.long)
    return Compiler(model, sw.Cluster.local(1), (batch, batch), sw.Options(precision=precision), None)


def per_layer_increase(measured: Callable[[int], Sequence[float]], fewest: int = 2) -> tuple[float, ...]:
    """The increase of each figure of a model by one more layer, without the parts that do not depend on layers.

    Parameters
    ----------
    measured : callable
        Maps a number of layers to the figures.
    fewest : int
        The number of layers of the smaller model.

    Examples
    --------
    >>> per_layer_increase(lambda layers: (5.0 + 2.0 * layers, 3.0))
    (2.0, 0.0)
    """
    return tuple(more - less for more, less in zip(measured(fewest + 1), measured(fewest), strict=True))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a LLaMA, whose perceptron is 8/3 of its width in multiples of 256 (arXiv 2302.13971, section 2.2).

    >>> Sizes(layers=32, width=4096, heads=32).inner
    11008
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 32000

    @property
    def inner(self) -> int:
        return -(-8 * self.width // (3 * 256)) * 256

    def flops_per_token(self, sequence: int) -> float:
        """FLOPs of forward and backward, causal attention not halved (Narayanan et al., arXiv 2104.04473, appendix)."""
        return 6 * self.width * (12 * self.layers * self.width + 2 * self.layers * sequence + self.vocabulary)


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm.

    The norm is a LayerNorm without bias, which is one kernel, as the fused RMSNorm of training systems is; torch writes
    an RMSNorm out as six.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, time, width))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x


class Llama(nn.Module):
    """A LLaMA; its loss is that of the next token.

    >>> with torch.device("meta"):
    ...     model, tokens = Llama(Sizes(2, 256, 4)), torch.zeros(2, 8, dtype=torch.long)
    >>> model(tokens, tokens).shape
    torch.Size([])
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class MinGPTSizes:
    """Sizes of a `MinGPT`; its heads have 64 features each."""

    layers: int
    width: int
    vocabulary: int = 10
    context: int = 6


class MinGPTAttention(nn.Module):
    """Causal attention whose queries, keys and values are projected one by one."""

    def __init__(self, sizes: MinGPTSizes) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (_linear(sizes.width, sizes.width) for _ in range(4))
        self.heads, self.drop = max(1, sizes.width // 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, time, width)))
        return output


class MinGPTBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and before a dropout."""

    def __init__(self, sizes: MinGPTSizes) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attn = MinGPTAttention(sizes)
        self.mlp = nn.Sequential(_linear(width, 4 * width), nn.GELU(), _linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class MinGPT(nn.Module):
    """The model that OSDP's authors trained: minGPT (Karpathy) on sums of two numbers, ten tokens, six at a time.

    Its biases and the parameters of its norms, at most 0.3 % of a layer, are left out: they are in flat parameters with
    the weights there, and would each have collectives of its own here.

    >>> with torch.device("meta"):
    ...     model, tokens = MinGPT(MinGPTSizes(2, 64)), torch.zeros(2, 6, dtype=torch.long)
    >>> model(tokens, tokens).shape
    torch.Size([])
    """

    def __init__(self, sizes: MinGPTSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(1, sizes.context, sizes.width))
        self.blocks = nn.ModuleList(MinGPTBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, elementwise_affine=False)
        self.head = _linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


_MODELS: Mapping[type, Callable[[Any], nn.Module]] = {Sizes: Llama, GPTConfig: GPT, MinGPTSizes: MinGPT}
