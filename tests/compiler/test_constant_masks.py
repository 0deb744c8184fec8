"""Attention masks that depend on no input: which ones become `is_causal`, and which ones stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import shardweave as sw
from shardweave.compiler import constants
from shardweave.compiler.capture import capture
from shardweave.compiler.constants import ATTENTION, fold_constant_masks

SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {**SIZES, "hidden_size": 32, "intermediate_size": 32}


class Masked(nn.Module):
    """Attention under a mask that a function makes for 8 positions."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask()).square().sum()


def lower() -> Tensor:
    return torch.arange(8)[:, None] >= torch.arange(8)


def written() -> Tensor:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[0, 7] = True
    return mask


MASKS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "lower": (lower, "causal"),
    "lower_for_each_head": (lambda: lower().expand(4, 2, 8, 8), "causal"),
    "added_to_the_scores": (lambda: torch.full((8, 8), float("-inf")).triu(1), "causal"),
    "added_as_the_least_number": (lambda: torch.where(lower(), 0.0, torch.finfo(torch.float32).min), "causal"),
    "all": (lambda: torch.ones(8, 8, dtype=torch.bool), "none"),
    "slopes": (lambda: -(torch.arange(8)[:, None] - torch.arange(8)).abs().float(), "kept"),
    "window": (lambda: lower() & (torch.arange(8)[:, None] - torch.arange(8) < 3), "kept"),
    "upper": (lambda: ~lower() | torch.eye(8, dtype=torch.bool), "kept"),
    "drawn": (lambda: torch.rand(8, 8) < 2, "kept"),
    "written": (written, "kept"),
}


def masks_of(model: nn.Module, inputs: Any) -> list[str]:
    """What each attention of a captured model does: ``"causal"``, ``"none"`` or ``"kept"``."""
    found = []
    for node in capture(model, inputs).graph.graph.nodes:
        if "scaled_dot_product" in str(node.target) and "backward" not in str(node.target):
            causal = node.kwargs.get("is_causal", node.args[4] if len(node.args) > 4 else False)
            found.append("causal" if causal else "none" if node.kwargs.get("attn_mask") is None else "kept")
    return found


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_constants_is_taken_for_what_it_is(name: str) -> None:
    mask, expected = MASKS[name]
    model, x = Masked(mask), torch.randn(4, 8, 16)
    assert masks_of(model, x) == [expected]
    if name != "drawn":
        parallel = sw.compile_parallel(model, sw.Cluster.local(1), x, progress=False)
        torch.testing.assert_close(parallel(x), model(x))


def test_a_mask_that_an_input_makes_stays() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mask = graph.call_method("tril", (graph.call_function(torch.ge, (x, 0)),))
    attention = graph.call_function(ATTENTION, (x, x, x, mask))
    fold_constant_masks(graph)
    assert attention.args == (x, x, x, mask)


def test_large_masks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_MAX_BYTES", 63)
    assert masks_of(Masked(lower), torch.randn(4, 8, 16)) == ["kept"]


def packed(sequences: int, length: int) -> Tensor:
    """A causal mask within documents, as models of transformers make it; each sequence is one document."""
    positions = torch.arange(length)[None].expand(sequences, -1)
    document = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    which = torch.arange(sequences)[:, None, None, None]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    return (document[which, rows] == document[which, columns]) & (rows >= columns)


def test_a_mask_that_is_the_same_for_all_sequences_takes_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_MAX_BYTES", 8 * 8)
    x = torch.randn(64, 8, 16)
    assert masks_of(Masked(lambda: ~(~lower().expand(64, 2, 8, 8))), x) == ["causal"]


def test_a_mask_within_documents_is_causal_where_each_sequence_is_one_document() -> None:
    assert masks_of(Masked(lambda: packed(64, 8)), torch.randn(64, 8, 16)) == ["causal"]


def test_a_mask_of_many_rows_is_compared_in_blocks() -> None:
    causal = torch.ones(2050, 2050, dtype=torch.bool).tril()
    assert constants._is_causal(causal)
    causal[2049, 2049] = False
    assert not constants._is_causal(causal)


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (LlamaForCausalLM(LlamaConfig(**LLAMA)), {}, "causal"),
        (GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.0)), {}, "causal"),
        (MistralForCausalLM(MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=4)), {}, "kept"),
        (LlamaForCausalLM(LlamaConfig(**LLAMA)), {"attention_mask": torch.ones(4, 8, dtype=torch.long)}, "kept"),
        (LlamaForCausalLM(LlamaConfig(**LLAMA)), {"position_ids": torch.arange(8).expand(4, 8)}, "kept"),
    ],
    ids=["llama", "gpt2", "mistral_window", "llama_padded", "llama_packed"],
)
def test_models_of_transformers(model: nn.Module, given: dict[str, Tensor], expected: str) -> None:
    ids = torch.randint(0, 64, (4, 8))
    assert masks_of(model, {"input_ids": ids, "labels": ids, "use_cache": False, **given}) == [expected]
