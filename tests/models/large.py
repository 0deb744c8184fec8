"""The models of the zoo in sizes that people train, a few layers of each, on the meta device: for docs/models.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]
LAYERS = 2


def _built(model: Callable[[], nn.Module], inputs: Callable[[], dict[str, Tensor]]) -> Callable[[], Built]:
    """On the meta device, floating-point values in bfloat16."""

    def build() -> Built:
        with torch.device("meta"):
            made, given = model().to(torch.bfloat16), inputs()
        return made, {key: v.to(torch.bfloat16) if v.is_floating_point() else v for key, v in given.items()}

    return build


def _tokens(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    def inputs() -> dict[str, Tensor]:
        ids = torch.zeros(batch, length, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    return inputs


def _masked(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    tokens = _tokens(batch, length)
    return lambda: {**tokens(), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(256, 3, 224, 224), "labels": torch.zeros(256, dtype=torch.long)}


def _noisy() -> dict[str, Tensor]:
    image = torch.zeros(128, 3, 32, 32)
    return {"noisy": image, "timestep": torch.zeros(128, dtype=torch.long), "noise": image}


class Denoiser(nn.Module):
    """The U-Net of the DDPM paper for CIFAR-10, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DModel(
            sample_size=32,
            block_out_channels=(128, 256, 256, 256),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
        )

    def forward(self, noisy: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.unet(noisy, timestep).sample, noise)


def _llama_like(config: type[Any], model: type[Any], **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: model(config(num_hidden_layers=LAYERS, use_cache=False, **sizes))


LARGE: dict[str, Callable[[], Built]] = {
    "gpt2 (xl)": _built(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=LAYERS, n_embd=1600, n_head=25, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
            )
        ),
        _tokens(64, 1024),
    ),
    "llama (3-8B)": _built(
        _llama_like(
            transformers.LlamaConfig, transformers.LlamaForCausalLM, vocab_size=128256, hidden_size=4096,
            intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        ),
        _tokens(8, 2048),
    ),
    "qwen3 (8B)": _built(
        _llama_like(
            transformers.Qwen3Config, transformers.Qwen3ForCausalLM, vocab_size=151936, hidden_size=4096,
            intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        ),
        _tokens(8, 2048),
    ),
    "bert (large)": _built(
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                hidden_size=1024, num_hidden_layers=LAYERS, num_attention_heads=16, intermediate_size=4096,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        ),
        _masked(256, 512),
    ),
    "t5 (large)": _built(
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=1024, d_kv=64, d_ff=4096, num_layers=LAYERS, num_heads=16, decoder_start_token_id=0,
                dropout_rate=0.0, use_cache=False,
            )
        ),
        _tokens(128, 512),
    ),
    "vit (large)": _built(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=1024, num_hidden_layers=LAYERS, num_attention_heads=16, intermediate_size=4096,
                num_labels=1000,
            )
        ),
        _images,
    ),
    "mixtral (8x7B)": _built(
        _llama_like(
            transformers.MixtralConfig, transformers.MixtralForCausalLM, hidden_size=4096, intermediate_size=14336,
            num_attention_heads=32, num_key_value_heads=8, num_local_experts=8,
        ),
        _tokens(8, 2048),
    ),
    "unet (ddpm)": _built(Denoiser, _noisy),
}  # fmt: skip
"""By name; each builds a model and its inputs."""
