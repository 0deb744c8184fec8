"""Models that something else has compiled, wrapped or sharded before: they are refused, with what to pass instead."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardweave.ir import CaptureError
from shardweave.runtime import ParallelModule

_PARALLEL = (
    "compile the original model again, the one that was given to compile_parallel; to go on from the weights of this "
    "one, save_checkpoint it and load_checkpoint into the new one"
)
_INSIDE = "pass the module that it wraps, its `.module`: data parallelism is one of the strategies that a plan chooses"
_SHARDED = "build the model anew and pass it before it is sharded; a plan shards it"


def refuse_wrapped(model: object, lazy: type[nn.Module]) -> None:
    """`CaptureError` where `model` is no plain module, or has a part that is compiled, wrapped or sharded already.

    A part that `torch.compile` made is captured as what it was made from, so only a whole model is refused there.

    Parameters
    ----------
    model : object
        What a user passes as the model.
    lazy : type
        The class of parallel modules that are not compiled yet.
    """
    if isinstance(model, type):
        raise CaptureError(f"the model must be an nn.Module, got the class {model.__name__}: pass an instance of it")
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"the model must be an nn.Module, got an object of {type(model).__name__}: pass the module itself, or one "
            "whose forward calls it"
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise _error(model, "", "what torch.compile made", "pass the module that was given to torch.compile")
    for name, module in _modules(model, ""):
        if isinstance(module, (ParallelModule, lazy)):
            raise _error(module, name, "a parallel module already", _PARALLEL)
        if isinstance(module, FSDPModule):
            raise _error(module, name, "sharded by fully_shard", _SHARDED)
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel, DataParallel)):
            raise _error(module, name, f"wrapped in {type(module).__name__}", _INSIDE)
        if isinstance(module, torch.jit.ScriptModule):
            raise _error(module, name, "what torch.jit made", "pass the module that was scripted or traced")
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if isinstance(tensor, DTensor):
                whole = f"{name}.{own}" if name else own
                raise _error(module, name, f"sharded: {whole} is a DTensor, {tensor.placements}", _SHARDED)


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and those below it; `named_modules` is refused by a parallel module that is not compiled yet."""
    yield name, module
    for own, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{name}.{own}" if name else own)


def _error(module: nn.Module, name: str, what: str, way_out: str) -> CaptureError:
    which = f"the model's part {name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    return CaptureError(f"{which} is {what}: {way_out}")
