"""A small Llama from `transformers`: grouped-query attention, rotary embedding, SwiGLU, RMS norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
CONTEXT = 16


def build(tied: bool = False, layers: int = 2, heads: int = 4, key_value_heads: int = 2, width: int = 32) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def batch(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Tokens that are their own labels: the model shifts them itself."""
    tokens = torch.randint(0, VOCABULARY, (size, CONTEXT), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
