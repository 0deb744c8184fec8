"""The models of the papers as ordinary PyTorch modules, at their published sizes, on no device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
        """Of forward and backward, causal attention not halved (Narayanan et al., arXiv 2104.04473, appendix)."""
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

    Its biases and the parameters of its norms, at most 0.3 % of a layer, are left out: they lie in flat parameters with
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
