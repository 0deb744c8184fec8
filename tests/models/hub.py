"""Small models of `transformers` and `diffusers`, from their configs and as they come, but for dropout.

Dropout is off where a model has it: its numbers on many ranks are other draws than one device's.
"""

from __future__ import annotations

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 8
IMAGE = 16
CLASSES = 8

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
DECODER = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    """Fused ``c_attn`` in Conv1D layout, learned positions, tied head."""
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, **sizes, **dropout, use_cache=False))


def qwen3() -> nn.Module:
    """Grouped key-value heads with norms of their own."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8, use_cache=False))


def mixtral() -> nn.Module:
    """A mixture of four experts, two a token."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **experts, use_cache=False))


def bert() -> nn.Module:
    """An encoder with a padding mask."""
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT, vocab_size=VOCABULARY, max_position_embeddings=32)
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    """An encoder and a decoder with relative positions."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, **special, dropout_rate=0.0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    """Patches by a convolution, a class token."""
    config = transformers.ViTConfig(**SIZES, **NO_DROPOUT, image_size=IMAGE, patch_size=4, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


class Denoiser(nn.Module):
    """A U-Net of `diffusers` and the loss that it is trained with."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DModel(
            sample_size=IMAGE,
            in_channels=4,
            out_channels=4,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=8,
        )

    def forward(self, noisy: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.unet(noisy, timestep).sample, noise)


def unet() -> nn.Module:
    """Convolutions, group norms, attention, skip connections."""
    return Denoiser()


def tokens(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    ids = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Tokens of which some are padding and only some have labels."""
    batch = tokens(generator, size)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (size, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    hidden = torch.rand(size, LENGTH, generator=generator) < 0.5
    labels = batch["labels"].masked_fill(~hidden | (mask == 0), -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def images(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Images and their classes."""
    return {
        "pixel_values": torch.randn(size, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, CLASSES, (size,), generator=generator),
    }


def noisy(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    """Noisy images, how noisy they are, and the noise."""
    shape = size, 4, IMAGE, IMAGE
    return {
        "noisy": torch.randn(shape, generator=generator),
        "timestep": torch.randint(0, 1000, (size,), generator=generator),
        "noise": torch.randn(shape, generator=generator),
    }
