"""A model's modules without its tensors: the same classes, attributes, hooks and methods, on other tensors.

The copy shares with the model what knows nothing of its modules and tensors (a configuration, a tokenizer), and has
copies of what does (a list of blocks, a bound method, a function that closes over a module), so that the copy never
computes with the model's tensors and does not keep them alive.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

_SHARED = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype,
    torch.device, torch.Generator, fx.Graph, fx.Node,
)  # fmt: skip
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_TORCHS = frozenset(vars(nn.Module()))
"""Attributes that each module has one of its own of: tensors, submodules and hooks by name."""


class Skeleton:
    """Copies the modules of `model`, with other tensors in the place of its own.

    Parameters
    ----------
    model : nn.Module
        Stays as it is.
    root : nn.Module
        An empty module that takes the place of `model` itself.
    tensors : mapping of Tensor to Tensor
        What stands for each parameter and buffer.
    """

    def __init__(self, model: nn.Module, root: nn.Module, tensors: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._made: dict[int, Any] = {id(old): new for old, new in tensors.items()}
        for module in model.modules():
            self._made[id(module)] = _empty(module)
        self._made[id(model)] = root
        self._targets = frozenset(self._made)
        self._reaching = _reaching([*model.modules(), *tensors], self._targets)
        for module in model.modules():
            if module is not model:
                vars(self._made[id(module)]).update(self.attributes(module))
        for old, new in tensors.items():
            self._adorn(old, new)

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of `module`, as its copy has them."""
        return {
            name: copy.copy(value) if name in _TORCHS and id(value) not in self._reaching else self._copied(value)
            for name, value in vars(module).items()
        }

    def _adorn(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Give a tensor the attributes and hooks that users gave to the one that it stands for."""
        vars(new).update({name: self._copied(value) for name, value in vars(old).items()})
        for kind in _HOOKS:
            register: Any = new.register_hook if kind == "_backward_hooks" else new.register_post_accumulate_grad_hook
            for hook in (getattr(old, kind, None) or {}).values():
                register(self._copied(hook))

    def _copied(self, value: Any) -> Any:
        """`value` itself, or a copy of it where it leads to the model's modules or tensors."""
        if id(value) in self._made:
            return self._made[id(value)]
        if id(value) not in self._reaching:
            return value
        if isinstance(value, types.FunctionType):
            return self._copied_function(value)
        if isinstance(value, types.MethodType):
            return self._keep(value, types.MethodType(value.__func__, self._copied(value.__self__)))
        if isinstance(value, functools.partial):
            keywords = {name: self._copied(item) for name, item in value.keywords.items()}
            return self._keep(value, type(value)(self._copied(value.func), *map(self._copied, value.args), **keywords))
        if isinstance(value, weakref.ref):
            return self._keep(value, weakref.ref(self._copied(value())))
        if isinstance(value, tuple):
            items = [self._copied(item) for item in value]
            return self._keep(value, type(value)(*items) if hasattr(value, "_fields") else type(value)(items))
        try:
            twin = copy.copy(value)
        except Exception:  # whatever an object's __copy__ or __reduce__ raises: it cannot have a copy, and is shared
            return value
        self._made[id(value)] = twin
        if isinstance(twin, dict):
            items = [(self._copied(key), self._copied(item)) for key, item in value.items()]
            twin.clear()
            twin.update(items)
        elif isinstance(twin, (list, set, deque)):
            items = [self._copied(item) for item in value]
            twin.clear()
            twin.update(items) if isinstance(twin, set) else twin.extend(items)
        elif isinstance(twin, frozenset):
            twin = self._made[id(value)] = type(value)(map(self._copied, value))
        if hasattr(twin, "__dict__"):
            vars(twin).update({name: self._copied(item) for name, item in vars(value).items()})
        return twin

    def _copied_function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        twin.__kwdefaults__ = value.__kwdefaults__
        self._made[id(value)] = functools.update_wrapper(twin, value, updated=())
        vars(twin).pop("__wrapped__", None)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if (content := _content(old)) is not _EMPTY:
                cell.cell_contents = self._copied(content)
        return twin

    def _keep(self, value: Any, twin: Any) -> Any:
        self._made[id(value)] = twin
        return twin


_EMPTY = object()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return _EMPTY


def _empty(module: nn.Module) -> nn.Module:
    """A module of the same class without attributes; a plain one where the class holds its state elsewhere."""
    kind = nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    if kind is nn.Module:
        nn.Module.__init__(twin)
    return twin


def _reaching(starts: list[Any], targets: frozenset[int]) -> set[int]:
    """The ids of all objects that lead from `starts` to `targets`."""
    parents: dict[int, list[int]] = {}
    seen: dict[int, Any] = {}
    waiting = list(starts)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for item in _items(value):
            if not isinstance(item, _SHARED):
                parents.setdefault(id(item), []).append(id(value))
                waiting.append(item)
    found: set[int] = set()
    reached = [parent for target in targets for parent in parents.get(target, [])]
    while reached:
        value = reached.pop()
        if value not in found:
            found.add(value)
            reached += parents.get(value, [])
    return found


def _items(value: Any) -> Iterator[Any]:
    """What an object holds."""
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (content for cell in value.__closure__ or () if (content := _content(cell)) is not _EMPTY)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    if isinstance(value, torch.Tensor):
        yield from (hook for kind in _HOOKS for hook in (getattr(value, kind, None) or {}).values())
    if not isinstance(value, (types.MethodType, types.FunctionType)) and isinstance(
        attributes := getattr(value, "__dict__", None), dict
    ):
        yield from attributes.values()
