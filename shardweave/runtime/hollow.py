"""Tensors on the CPU that take memory only while they are used: what initialisers run on.

This is the only module that touches torch's dispatch modes and the size of storages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardweave.runtime.state import named_tensors

Named = list[tuple[str, torch.Tensor]]


class Hollow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy of `model` whose tensors are on the CPU, without memory until an op meets one of them.

    Inside of this mode, the first op on a tensor (or on a view of it) gives it memory, and `fetch` its value. Only
    what an op really meets gets any: a loop over the names of all parameters does not count. `release` takes it away.

    Parameters
    ----------
    model : nn.Module
        Stays as it is; on the meta device or not.
    fetch : callable
        From a key and a name to the value that the tensor has now; None for one that has none yet.

    Attributes
    ----------
    model : nn.Module
        The copy.
    """

    def __init__(self, model: nn.Module, fetch: Callable[[int, str], torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fetch = fetch
        self._sizes: dict[int, int] = {}
        self._members: dict[int, Named] = {}
        self._whole: dict[int, torch.UntypedStorage] = {}
        self._written: set[int] = set()
        storages: dict[int, torch.UntypedStorage] = {}
        made: dict[int, Any] = {}  # deepcopy's memo: it takes these for the model's own tensors
        for name, tensor in named_tensors(model):
            if id(tensor) in made:
                continue
            size = tensor.untyped_storage().nbytes()
            storage = storages.setdefault(
                key_of(tensor), torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
            )
            value = torch.empty(0, dtype=tensor.dtype, device="cpu")
            value.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            twin = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            twin.__dict__.update(tensor.__dict__)
            made[id(tensor)] = twin
            self._members.setdefault(id(storage), []).append((name, twin))
            self._sizes[id(storage)] = size
            storage.resize_(0)
        self.model = copy.deepcopy(model, made)

    def release(self, done: Callable[[int, Named], object]) -> None:
        """Take all memory back; before, `done` gets the key of each tensor that was written, and its names."""
        while self._whole:
            key, storage = self._whole.popitem()
            if key in self._written:
                done(key, [(name, tensor.detach()) for name, tensor in self._members[key]])
            storage.resize_(0)
        self._written.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and key_of(value) in self._members:
                self._fill(key_of(value), value.untyped_storage())
        for argument, value in zip(func._schema.arguments, args):
            self._note_write(argument, value)
        for argument in func._schema.arguments[len(args) :]:
            self._note_write(argument, (kwargs or {}).get(argument.name))
        return func(*args, **(kwargs or {}))

    def _note_write(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            self._written.update(key_of(tensor) for tensor in tree_iter(value) if isinstance(tensor, torch.Tensor))

    def _fill(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._whole:
            return
        storage.resize_(self._sizes[key])
        self._whole[key] = storage
        for name, tensor in self._members[key]:
            value = self._fetch(key, name)
            if value is not None:
                tensor.detach().copy_(value)
            else:  # not a number: what is left of it shows that nobody initialised it
                tensor.detach().fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)


def key_of(tensor: torch.Tensor) -> int:
    """What a tensor shares with its views, and with no other tensor that lives."""
    return id(tensor.untyped_storage())
