"""What the benchmarks compare: small models with a batch each, and the steps that people write for them by hand.

A peer is DistributedDataParallel, FSDP2, tensor parallelism by `parallelize_module`, or FSDP2 over that. Each comes
with several settings; the benchmark takes the best. All begin with the same weights and get the same global batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

Batch = dict[str, Tensor]


class Denoiser(nn.Module):
    """A U-Net and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
                                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                up_block_types=("AttnUpBlock2D", "UpBlock2D"))  # fmt: skip

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.unet(noisy, times).sample, noise)
        return loss


class WithLoss(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


@dataclass(frozen=True)
class Case:
    """A model with its global batch.

    Parameters
    ----------
    build : callable
        Makes the model, whose call returns the loss.
    batch : callable
        Makes a global batch of so many samples.
    samples : int
        By default.
    columns, rows : tuple of str
        Patterns of the linear layers that tensor parallelism shards by output and by input features; none without it.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    samples: int
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def _tokens(samples: int, length: int = 128) -> Batch:
    ids = torch.randint(0, 1024, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _pixels(samples: int) -> Batch:
    numbers = torch.Generator().manual_seed(1)
    pixels = torch.randn(samples, 3, 32, 32, generator=numbers)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (samples,), generator=numbers)}


def _noise(samples: int) -> Batch:
    numbers = torch.Generator().manual_seed(1)
    noisy, noise = (torch.randn(samples, 3, 16, 16, generator=numbers) for _ in range(2))
    return {"noisy": noisy, "times": torch.randint(0, 1000, (samples,), generator=numbers), "noise": noise}


def _llama(width: int, layers: int) -> nn.Module:
    sizes = {"vocab_size": 1024, "hidden_size": width, "intermediate_size": 11 * width // 4}
    return WithLoss(LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
                                                 use_cache=False, **sizes)))  # fmt: skip


def _gpt() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=1024, n_embd=256, n_layer=4, n_head=4, n_positions=128, use_cache=False, **off)
    return WithLoss(GPT2LMHeadModel(config))


def _vit() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return WithLoss(ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes)))


def _moe() -> nn.Module:
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    return WithLoss(MixtralForCausalLM(MixtralConfig(num_attention_heads=4, num_key_value_heads=4, num_local_experts=4,
                                                     use_cache=False, **sizes)))  # fmt: skip


_COLUMNS = ("model.model.layers.*.self_attn.[qkv]_proj", "model.model.layers.*.mlp.gate_proj",
            "model.model.layers.*.mlp.up_proj")  # fmt: skip
_ROWS = ("model.model.layers.*.self_attn.o_proj", "model.model.layers.*.mlp.down_proj")

CASES: dict[str, Case] = {
    "llama-deep": Case(lambda: _llama(256, 6), _tokens, 4, _COLUMNS, _ROWS),
    "llama-wide": Case(lambda: _llama(512, 2), _tokens, 4, _COLUMNS, _ROWS),
    "gpt": Case(_gpt, _tokens, 4),
    "vit": Case(_vit, _pixels, 32),
    "unet": Case(Denoiser, _noise, 16),
    "moe": Case(_moe, _tokens, 4),
}


@dataclass(frozen=True)
class Peer:
    """A step written by hand.

    Parameters
    ----------
    name : str
    module : nn.Module
    batch : dict of str to Tensor
        What this rank passes: its part of the batch, or all of it.
    averages : bool
        The mean of the ranks' losses is the loss of the batch.
    """

    name: str
    module: nn.Module
    batch: Batch
    averages: bool


def peers(case: Case, model: nn.Module, batch: Batch, ranks_per_host: int, replicated: bool) -> Iterator[Peer]:
    """The peers of a case, each with a copy of the model; without those that hold all states if not `replicated`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = {name: value.chunk(world)[rank].contiguous() for name, value in batch.items()}
    if replicated:
        for megabytes in (1, 4, 25):
            ddp = DistributedDataParallel(
                copy.deepcopy(model), bucket_cap_mb=megabytes, gradient_as_bucket_view=True, static_graph=True
            )
            yield Peer(f"DDP, buckets of {megabytes} MB", ddp, own, True)
    meshes = {"FSDP2": init_device_mesh("cpu", (world,))}
    if 1 < ranks_per_host < world:
        meshes["HSDP"] = init_device_mesh("cpu", (world // ranks_per_host, ranks_per_host),
                                          mesh_dim_names=("replicate", "shard"))  # fmt: skip
    for name, mesh in meshes.items():
        for reshard in (True, False):
            twin = copy.deepcopy(model)
            _fully_sharded(twin, mesh, reshard)
            yield Peer(f"{name}{'' if reshard else ', gathered once'}", twin, own, True)
    if case.columns and replicated:
        yield Peer("tensor parallel", _tensor_parallel(case, model, init_device_mesh("cpu", (world,))), batch, False)
    if case.columns and 1 < ranks_per_host < world:
        both = init_device_mesh("cpu", (world // ranks_per_host, ranks_per_host), mesh_dim_names=("data", "tensor"))
        twin = _tensor_parallel(case, model, both["tensor"])
        _fully_sharded(twin, both["data"], True)
        part = rank // ranks_per_host
        mine = {name: value.chunk(world // ranks_per_host)[part].contiguous() for name, value in batch.items()}
        yield Peer("FSDP2 over tensor parallel", twin, mine, True)


def _fully_sharded(model: nn.Module, mesh: Any, reshard: bool) -> None:
    """Wrap each block of a list of blocks, and then the rest."""
    blocks = [block for each in model.modules() if isinstance(each, nn.ModuleList) for block in each.children()]
    for module in (*reversed(blocks), model):  # the inner ones first
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def _tensor_parallel(case: Case, model: nn.Module, mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {pattern: ColwiseParallel() for pattern in case.columns}
    plan |= {pattern: RowwiseParallel() for pattern in case.rows}
    return parallelize_module(copy.deepcopy(model), mesh, plan)
