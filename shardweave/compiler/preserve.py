"""Preserve: a capture leaves the user's model, and what torch and Python hold for the whole process, as they were.

Torch's capture writes into both: it puts traced tensors in the place of parameters, installs names in the globals of
the user's module, and may fail at any point in between.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, also an error, `model` and the process' own state are afterwards as they were.

    Of the model: each module's class, attributes, parameters, buffers, submodules and hooks, the contents of its
    attributes that are dicts, lists or sets, and each tensor's ``requires_grad`` and ``grad``. Of the process: the
    generators of random numbers on the CPU, the default dtype, the grad and the autocast mode, and the names in the
    globals of the module where the model's ``forward`` is defined.

    Examples
    --------
    >>> model = nn.Linear(2, 2)
    >>> weight = model.weight
    >>> with contextlib.suppress(KeyError), preserved(model):
    ...     model.weight = nn.Parameter(torch.ones(2, 2))
    ...     raise KeyError
    >>> model.weight is weight
    True
    """
    modules = [_Module.of(module) for module in model.modules()]
    tensors = [(tensor, tensor.requires_grad, tensor.grad) for tensor in [*model.parameters(), *model.buffers()]]
    names = [(found, set(found)) for found in _globals(model)]
    python, cpu, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        for module in modules:
            module.restore()
        for tensor, requires_grad, gradient in tensors:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for found, before in names:
            for name in set(found) - before:
                if name.startswith("__"):  # as all that Dynamo installs; another thread may have added others
                    del found[name]
        random.setstate(python)
        torch.set_rng_state(cpu)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", autocast)


@dataclass(frozen=True)
class _Module:
    """What a module was: its class, its attributes, and what those of them hold that are containers."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    contents: dict[str, dict[Any, Any] | list[Any] | set[Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        attributes = dict(vars(module))
        contents: dict[str, dict[Any, Any] | list[Any] | set[Any]] = {}
        for name, value in attributes.items():
            for kind in (dict, list, set):
                if isinstance(value, kind):
                    contents[name] = kind(value)
        return cls(module, type(module), attributes, contents)

    def restore(self) -> None:
        if type(self.module) is not self.kind:
            self.module.__class__ = self.kind
        for name, before in self.contents.items():
            _restore(self.attributes[name], before)
        _restore(vars(self.module), self.attributes)


def _restore(container: Any, before: dict[Any, Any] | list[Any] | set[Any]) -> None:
    """Let a container hold what it did before, unless it does: what is written to may do more than to be written."""
    now, then = (list(each.items()) if isinstance(each, dict) else list(each) for each in (container, before))
    if len(now) == len(then) and all(_same(one, other) for one, other in zip(now, then, strict=True)):
        return
    container.clear()
    if isinstance(before, list):
        container.extend(before)
    else:
        container.update(before)


def _same(one: Any, other: Any) -> bool:
    """Whether these are the same object, or pairs of the same objects."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other


def _globals(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The globals into which Dynamo may install names: those of the function that it begins at."""
    for function in (model.forward, type(model).__call__):
        inner = getattr(function, "__func__", function)
        if isinstance(inner, FunctionType):
            yield inner.__globals__
