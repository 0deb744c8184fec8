"""A small GPT as an ordinary PyTorch module: nothing in it knows of devices, shards or shardweave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`; the defaults are the demo's: bytes in, bytes out, 10.8 million parameters.

    Parameters
    ----------
    vocabulary : int
        The number of tokens; 256 for bytes.
    context : int
        Longest sequence, in tokens.
    layers, heads, width : int
        Number of blocks, of attention heads a block, and features of the residual stream.
    bias : bool
        Whether linear layers and norms have biases.
    tied : bool
        Whether the head's weight is the token embedding's.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 6
    heads: int = 6
    width: int = 384
    bias: bool = False
    tied: bool = False


class Attention(nn.Module):
    """Causal self-attention with one fused projection to queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return output


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, bias=config.bias)
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class GPT(nn.Module):
    """A decoder-only transformer with learned positions, after nanoGPT (Karpathy).

    Parameters
    ----------
    config : GPTConfig
        Its sizes.

    Examples
    --------
    >>> model = GPT(GPTConfig(layers=1, heads=2, width=8, context=4))
    >>> tokens = torch.zeros(2, 4, dtype=torch.long)
    >>> model(tokens).shape, model(tokens, tokens).shape
    (torch.Size([2, 4, 256]), torch.Size([]))
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        if config.tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy where there are `targets`, the logits (batch, time, vocabulary) where not."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
