"""The models of the papers as ordinary PyTorch modules, at their published sizes, on no device."""

from __future__ import annotations

from dataclasses import dataclass

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

    >>> import torch
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
