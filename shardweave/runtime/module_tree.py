"""The module tree of a parallel module: the model's classes, attributes and methods, with tensors of its own.

`ModuleTreeCopy` copies a tree of modules without its tensors. Objects that lead to modules or tensors of the model (a
list of blocks, a bound method, a function that closes over a module) are copied, so that the copy never computes with
the model's tensors and does not keep them alive. Other objects (a configuration, a tokenizer) are shared.

`copy_module_tree` puts the model's parameters and buffers into the copy, as DTensors under the model's own names.
`TensorLookup` finds tensors by name. `ModuleTreeGuard` finds changes of the tree that a generated step does not follow.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _has_any_global_hook

from shardweave.distributed import RuntimeMesh
from shardweave.ir import Layout, ParallelError, ParameterSpec, StepSpec
from shardweave.runtime.parameters import Sharding, local_shard, local_tensor, set_sharding_in_step, sharding_in_step
from shardweave.runtime.tensor import (
    ParallelTensor,
    attributes_of,
    broadcast_from_rank_0,
    check_rank,
    distribute,
    mark_replicated,
)

_SHARED = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype,
    torch.device, torch.Generator, fx.Graph, fx.Node,
)  # fmt: skip
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of modules and of tensors, by their attributes."""
_MODULE_DICTS = frozenset(vars(nn.Module()))
"""Attributes of every module: its tensors, submodules and hooks by name."""


class ModuleTreeCopy:
    """Copies the modules of `model`, with the new `tensors` for its parameters and buffers.

    The empty module `root` becomes the copy of `model` itself.
    """

    def __init__(self, model: nn.Module, root: nn.Module, tensors: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._copies: dict[int, Any] = {id(old): new for old, new in tensors.items()}
        for module in model.modules():
            self._copies[id(module)] = _empty(module)
        self._copies[id(model)] = root
        self._targets = frozenset(self._copies)
        self._to_copy = _objects_leading_to([*model.modules(), *tensors], self._targets)
        for module in model.modules():
            if module is not model:
                vars(self._copies[id(module)]).update(self.attributes(module))
        for old, new in tensors.items():
            self._copy_attributes_and_hooks(old, new)

    @classmethod
    def with_copies(cls, model: nn.Module, values: list[Any], copies: Mapping[int, Any]) -> ModuleTreeCopy:
        """For `values` that may lead to modules and tensors of `model`, whose `copies`, by their ids, are made."""
        made = cls.__new__(cls)
        made._copies = dict(copies)
        made._targets = frozenset(map(id, [*model.modules(), *(tensor for _, tensor in named_tensors(model))]))
        made._to_copy = _objects_leading_to(values, made._targets)
        return made

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """The attributes of the copy of `module`."""
        return {
            name: copy.copy(value) if name in _MODULE_DICTS and id(value) not in self._to_copy else self.copied(value)
            for name, value in vars(module).items()
        }

    def _copy_attributes_and_hooks(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy the attributes and hooks that users gave to a tensor."""
        vars(new).update({name: self.copied(value) for name, value in vars(old).items()})
        for kind in _HOOKS:
            register: Any = new.register_hook if kind == "_backward_hooks" else new.register_post_accumulate_grad_hook
            for hook in (getattr(old, kind, None) or {}).values():
                register(self.copied(hook))

    def copied(self, value: Any) -> Any:
        """`value` itself, or a copy if it leads to the model's modules or tensors."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) not in self._to_copy:
            return value
        if isinstance(value, types.FunctionType):
            return self._copied_function(value)
        if isinstance(value, types.MethodType):
            return self._keep(value, types.MethodType(value.__func__, self.copied(value.__self__)))
        if isinstance(value, functools.partial):
            keywords = {name: self.copied(item) for name, item in value.keywords.items()}
            return self._keep(value, type(value)(self.copied(value.func), *map(self.copied, value.args), **keywords))
        if isinstance(value, weakref.ref):
            return self._keep(value, weakref.ref(self.copied(value())))
        if isinstance(value, tuple):
            items = [self.copied(item) for item in value]
            return self._keep(value, type(value)(*items) if hasattr(value, "_fields") else type(value)(items))
        try:
            twin = copy.copy(value)
        except Exception:  # an object without a copy is shared
            return value
        self._copies[id(value)] = twin
        if isinstance(twin, dict):
            items = [(self.copied(key), self.copied(item)) for key, item in value.items()]
            twin.clear()
            twin.update(items)
        elif isinstance(twin, (list, set, deque)):
            items = [self.copied(item) for item in value]
            twin.clear()
            twin.update(items) if isinstance(twin, set) else twin.extend(items)
        elif isinstance(twin, frozenset):
            twin = self._copies[id(value)] = type(value)(map(self.copied, value))
        if hasattr(twin, "__dict__"):
            vars(twin).update({name: self.copied(item) for name, item in vars(value).items()})
        return twin

    def _copied_function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        defaults = self.copied(value.__defaults__)
        twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        twin.__kwdefaults__ = self.copied(value.__kwdefaults__)
        self._copies[id(value)] = functools.update_wrapper(twin, value, updated=())
        vars(twin).pop("__wrapped__", None)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            if (content := _cell_content(old)) is not _EMPTY:
                cell.cell_contents = self.copied(content)
        return twin

    def _keep(self, value: Any, twin: Any) -> Any:
        self._copies[id(value)] = twin
        return twin


_EMPTY = object()


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return _EMPTY


def _empty(module: nn.Module) -> nn.Module:
    """A module of the same class without attributes; a plain nn.Module for ScriptModules."""
    kind = nn.Module if isinstance(module, torch.jit.ScriptModule) else type(module)
    twin: nn.Module = object.__new__(kind)
    if kind is nn.Module:
        nn.Module.__init__(twin)
    return twin


def _objects_leading_to(starts: list[Any], targets: frozenset[int]) -> set[int]:
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
    """The attributes and items of an object."""
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (content for cell in value.__closure__ or () if (content := _cell_content(cell)) is not _EMPTY)
        yield from (value.__defaults__, value.__kwdefaults__)
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


@dataclass(frozen=True)
class _Seen:
    """A module as it was when the tree was last looked at."""

    path: str
    module: nn.Module
    children: list[tuple[str, nn.Module | None]]
    keys: tuple[int, ...]
    """Of its hooks: numbers that torch gives out once."""


_Structure = dict[str, tuple[nn.Module, list[Any]]]
"""The modules of a tree by their paths, each with its hooks."""


class ModuleTreeGuard:
    """Tells the structures of the tree of `root` apart: its submodules and their hooks, which a step is compiled for.

    >>> root = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> guard = ModuleTreeGuard(root)
    >>> root[1] = nn.GELU()
    >>> guard.structure(), guard.changes
    (1, "'1' is a GELU, not a ReLU")
    >>> guard.check()
    Traceback (most recent call last):
    shardweave.ir.errors.ParallelError: since the step was compiled, '1' is a GELU, not a ReLU, and the step goes on \
as before. Make the change on the model and compile it again
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self._told, self._current = root, False, 0
        self._seen: list[_Seen] = []
        self._structures: list[_Structure] = []
        self._look()
        self._modes = self.modes()

    def _look(self) -> None:
        """Look at the whole tree."""
        self._seen = [
            _Seen(path, module, [*module._modules.items()], _hook_keys(module) if path else ())
            for path, module in self._root.named_modules()
        ]
        found = {seen.path: (seen.module, _hooks(seen.module) if seen.path else []) for seen in self._seen}
        if found not in self._structures:
            self._structures.append(found)
        self._current = self._structures.index(found)

    def structure(self) -> int:
        """The number of the present structure; 0 is the first one, and one that was there before has its number."""
        for seen in self._seen:
            module = seen.module
            if ((now := module._modules) or seen.children) and [*now.items()] != seen.children:
                self._look()
                break
            if _hook_keys(module) != seen.keys and seen.path:
                self._look()
                break
        return self._current

    def modes(self) -> tuple[int, ...]:
        """The number of the structure, and whether each submodule is in training mode."""
        structure = self.structure()
        return structure, *[seen.module.training for seen in self._seen[1:]]

    @property
    def changes(self) -> str:
        """What differs from the first structure, in words that are the same on all ranks; empty if nothing does."""
        before, now = self._structures[0], self._structures[self._current]
        told: dict[str, str] = {}
        for path in [*now, *(path for path in before if path not in now)]:
            if any(path.startswith(f"{other}.") for other in told):
                continue
            (module, hooks), (former, others) = now.get(path, (None, [])), before.get(path, (None, []))
            if module is not former:
                is_now, was = ("absent" if each is None else f"a {type(each).__name__}" for each in (module, former))
                told[path] = f"{path!r} is {'another one' if is_now == was else f'{is_now}, not {was}'}"
            elif hooks != others:
                told[path] = f"{path!r} has {len(hooks)} hooks and had {len(others)}"
        return ", ".join(told.values())

    def check(self) -> None:
        """Raise ParallelError if the structure, or the mode of a submodule, is not the first one."""
        changes = self.changes if self.structure() else ""
        if not changes and (modes := self.modes()) != self._modes:
            differs = (a is not b for a, b in zip(modes[1:], self._modes[1:], strict=True))
            seen = next(seen for seen, differ in zip(self._seen[1:], differs, strict=True) if differ)
            now, was = ("training", "evaluation") if seen.module.training else ("evaluation", "training")
            changes = f"{seen.path!r} is in {now} mode, not in {was} mode"
        if changes:
            raise ParallelError(
                f"since the step was compiled, {changes}, and the step goes on as before. Make the change on the "
                "model and compile it again"
            )

    def warn_of_global_hooks(self) -> None:
        """Warn once if a hook is registered for all modules."""
        if not self._told and _has_any_global_hook():  # type: ignore[no-untyped-call]
            self._told = True
            warnings.warn(
                "a hook is registered for all modules, but the step does not call submodules: it runs for the parallel "
                "module alone. To look at a submodule, use the model on one device",
                stacklevel=2,
            )


def _hook_keys(module: nn.Module) -> tuple[int, ...]:
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(key for hooks in kinds for key in hooks) if any(kinds) else ()  # read in each call


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module, each with its kind."""
    flags = "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"
    return [
        (kind, hook, *(key in getattr(module, flag) for flag in flags))
        for kind in _MODULE_HOOKS
        for key, hook in getattr(module, kind).items()
    ]


def copy_module_tree(
    target: nn.Module, model: nn.Module, specs: Iterable[ParameterSpec], mesh: RuntimeMesh, unset: Collection[str]
) -> dict[str, Any]:
    """Copy the model's module tree into `target`, with parameters and buffers in the layouts of `specs`.

    Values are rank 0's; tensors whose names are `unset` there get none. Tensors without a spec are replicated. Tied
    tensors stay tied. Collective, unless no tensor has a value.

    The dictionaries of `target` are filled directly, as a submodule may have the name of a method of `target`.

    Returns
    -------
    dict of str to object
        The other attributes of the model itself.

    Raises
    ------
    ParallelError
        If the model lacks a tensor of `specs`, or has it in another shape.
    """
    wanted = {spec.name: spec.layout for spec in specs}
    adopted: dict[torch.Tensor, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        if tensor not in adopted:
            layout = wanted.pop(name, None) or Layout.replicated(tensor.shape)
            if layout.global_shape != tuple(tensor.shape):
                raise ParallelError(
                    f"the step was compiled for {name!r} of shape {layout.global_shape}, but this model has it of "
                    f"shape {tuple(tensor.shape)}: compile the step for this model"
                )
            adopted[tensor] = _distributed(name, tensor, layout, mesh, name in unset)
    if wanted:
        raise ParallelError(
            f"the step was compiled for another model: this one has no {', '.join(sorted(wanted))}; compile it again"
        )
    attributes = ModuleTreeCopy(model, target, adopted).attributes(model)
    for tree in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(target)[tree] = attributes.pop(tree)
    return attributes


def layouts_in_steps(module: nn.Module) -> dict[str, Layout]:
    """The layout that steps have of each parameter and buffer of a parallel module, by all names."""
    found: dict[str, Layout] = {}
    for name, tensor in named_tensors(module):
        sharding = tensor.sharding if isinstance(tensor, ParallelTensor) else sharding_in_step(tensor)
        found[name] = Layout.replicated(tensor.shape) if sharding is None else sharding.layout
    return found


@torch.no_grad()
def gather_buffers(root: nn.Module, specs: Iterable[ParameterSpec]) -> None:
    """Make the buffers of `specs` that are sharded whole tensors, where a step has them whole. Collective.

    Users may register tensors that they compute from sharded parameters, as `torch.nn.utils.prune` registers masks.
    """
    for spec in specs:
        path, _, leaf = spec.name.rpartition(".")
        buffers = submodule(root, path)._buffers
        tensor = buffers.get(leaf)
        if isinstance(tensor, ParallelTensor) and spec.layout == Layout.replicated(tensor.shape):
            buffers[leaf] = tensor.full_tensor()


@torch.no_grad()
def share_buffers(root: nn.Module, specs: Iterable[ParameterSpec], mesh: RuntimeMesh) -> None:
    """Give the plain tensors of `specs` rank 0's values, as users may have registered some. Collective."""
    if mesh.device_mesh is None:
        return
    for name in (spec.name for spec in specs):
        path, _, leaf = name.rpartition(".")
        tensor = submodule(root, path)._buffers.get(leaf)
        if tensor is not None and not isinstance(tensor, DTensor):
            tensor.copy_(broadcast_from_rank_0(tensor, mesh, name))


def meta_tensor_names(model: nn.Module) -> set[str]:
    """The names of the tensors on the meta device."""
    return {name for name, tensor in named_tensors(model) if tensor.is_meta}


def without_value(shape: Iterable[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A part of a tensor that has no value yet: it is NaN, or zero where there is no NaN.

    >>> part = without_value((2,), torch.float32, "cpu")
    >>> has_value(part), has_value(part.fill_(0))
    (False, True)
    """
    can_be_nan = dtype.is_floating_point or dtype.is_complex
    return torch.full((*shape,), torch.nan if can_be_nan else 0, dtype=dtype, device=device)


def has_value(part: torch.Tensor) -> bool:
    """Whether a part that had no value has been written; one of no numbers needs none."""
    if part.is_floating_point() or part.is_complex():
        return not part.numel() or not bool(part.isnan().all())
    return part._version > 0 or not part.numel()


class UnsetTensors:
    """The tensors of a parallel module that have no values yet, by their names; they are written later.

    One that is written, as `torch.nn.init` writes it, has a value from then on.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names, self._emptied = {*names}, set[str]()
        """The latter are buffers that `empty` has emptied."""

    def current(self, module: nn.Module) -> set[str]:
        """The names, without those that were written since."""
        if self.names:
            tensors = dict(named_tensors(module))
            found = {name: tensors.get(name) for name in self.names}
            self.names -= {name for name, own in found.items() if own is None or has_value(local_tensor(own))}
        return self.names

    def empty(self, module: nn.Module, device_type: str, recurse: bool) -> None:
        """Take the values of all tensors away; without `recurse` those of the module's own ones."""
        for name, tensor in named_tensors(module):
            if not recurse and "." in name:
                continue
            part = local_tensor(tensor)
            part.copy_(without_value(part.shape, part.dtype, device_type))
            if tensor.is_floating_point() or tensor.is_complex():
                self.names.add(name)
                self._emptied.update(() if isinstance(tensor, nn.Parameter) else (name,))

    def check(self, module: nn.Module, spec: StepSpec) -> None:
        """Raise ParallelError if a tensor that a step reads has no value."""
        if empty := self.current(module) & self._emptied:
            warnings.warn(
                f"to_empty has emptied {', '.join(sorted(empty)[:5])}, and nothing has written "
                f"{'it' if len(empty) == 1 else 'them'} since: now zero. Write what is to have another value",
                stacklevel=2,
            )
            tensors = dict(named_tensors(module))
            for name in empty:
                local_tensor(tensors[name]).zero_()
            self._emptied.clear()
        if read := self.current(module) & {each.name for each in (*spec.parameters, *spec.buffers)}:
            raise ParallelError(
                f"{', '.join(sorted(read)[:5])}: no values for {len(read)} tensors that the step reads, as the model "
                "was on the meta device. Give them some by shardweave.initialise, load_weights, load_checkpoint or "
                "load_state_dict before the first call, or write them, as torch.nn.init does. A state dict has no "
                "buffers that are not persistent: build such a module outside of torch.device('meta')"
            )


class TensorLookup:
    """Looks up the current tensors of `specs`, in order. Users may have replaced some.

    A plain parameter that replaces a DTensor stays whole on every rank, and gets rank 0's values. That is collective.
    """

    def __init__(
        self,
        root: nn.Module,
        specs: Iterable[ParameterSpec],
        mesh: RuntimeMesh,
    ) -> None:
        self._specs, self._mesh = tuple(specs), mesh
        self._places = [self._place_of(root, spec.name) for spec in self._specs]
        self._aliases = [
            (spec, self._place_of(root, spec.name), self._place_of(root, alias))
            for spec in self._specs
            for alias in spec.aliases
        ]
        self._dtypes = [getattr(torch, spec.dtype) for spec in self._specs]
        found = [tensors.get(leaf) for tensors, leaf in self._places]
        # A user's own parameter that no step has taken so far is checked at the first call.
        new = [type(each) is nn.Parameter and sharding_in_step(each) is None for each in found]
        self._known = [None if is_new else each for each, is_new in zip(found, new, strict=True)]

    def _place_of(self, root: nn.Module, name: str) -> tuple[dict[str, torch.Tensor | None], str]:
        path, _, leaf = name.rpartition(".")
        owner = submodule(root, path)
        return owner._buffers if leaf in owner._buffers else owner._parameters, leaf  # type: ignore[return-value]

    def __call__(self) -> list[torch.Tensor]:
        """The current tensors.

        Raises
        ------
        ParallelError
            If one is gone, or has another shape or dtype than the step was compiled for.
        """
        found = []
        for index, (tensors, leaf) in enumerate(self._places):
            tensor = tensors.get(leaf)
            if tensor is None or tensor is not self._known[index] or tensor.dtype is not self._dtypes[index]:
                tensor = self._known[index] = self._checked(self._specs[index], tensor, self._dtypes[index])
            found.append(tensor)
        for spec, (tensors, leaf), (others, other) in self._aliases:
            if tensors.get(leaf) is not others.get(other):
                raise ParallelError(
                    f"{spec.name!r} was one parameter with {', '.join(spec.aliases)} when the step was compiled, and "
                    "one of them was replaced: give all of these names the same parameter, or compile the model with "
                    "different ones"
                )
        return found

    def lacks(self) -> bool:
        """Whether one of the tensors is gone."""
        return any(tensors.get(leaf) is None for tensors, leaf in self._places)

    def _checked(self, spec: ParameterSpec, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Check a tensor that was replaced since the last call."""
        if tensor is None:
            raise ParallelError(
                f"{spec.name!r} was deleted, or set to None, but the step was compiled with it: put a tensor of shape "
                f"{spec.layout.global_shape} in its place, or compile the model without it"
            )
        if tuple(tensor.shape) != spec.layout.global_shape or tensor.dtype != dtype:
            raise ParallelError(
                f"the step was compiled for {spec.name!r} of shape {spec.layout.global_shape} and {dtype}, but it is "
                f"of shape {tuple(tensor.shape)} and {tensor.dtype} now: compile the model in these (change its sizes, "
                "or call model.to(...), before compile_parallel; Options(precision=...) is for another dtype of the "
                "computation)"
            )
        has_layout = isinstance(tensor, ParallelTensor) and tensor.sharding.layout == spec.layout
        if has_layout or self._mesh.device_mesh is None:
            return tensor
        if not isinstance(tensor, nn.Parameter):  # a buffer; or given to torch.func.functional_call, on all ranks
            if spec.layout.shard_axes:
                set_sharding_in_step(tensor, Sharding(spec.layout, self._mesh))
            return tensor
        if isinstance(tensor, DTensor):
            raise ParallelError(
                f"{spec.name!r} was replaced by a {type(tensor).__name__} with the placements {tensor.placements}, but "
                f"the step was compiled for {spec.layout}: put a whole, plain tensor there, or write its values with "
                "parameter.data.copy_(whole)"
            )
        mark_replicated(tensor, Sharding(spec.layout, self._mesh), spec.name)
        return tensor


def shard_state_dict(state: dict[str, Any], prefix: str, module: nn.Module, mesh: RuntimeMesh) -> None:
    """Replace the whole tensors of a state dict by this rank's parts, before `module` loads it."""
    for name, tensor in named_tensors(module):
        if not isinstance(tensor, ParallelTensor):
            continue
        layout, value = tensor.sharding.layout, state.get(prefix + name)
        if isinstance(value, DTensor):
            check_rank(value, Sharding(layout, mesh))
        elif isinstance(value, torch.Tensor) and tuple(value.shape) == layout.global_shape:  # torch refuses others
            part = local_shard(value.detach(), layout, mesh.mesh.coordinates(mesh.rank))
            state[prefix + name] = distribute(part.to(mesh.device_type), layout, mesh)


def _distributed(
    name: str, tensor: torch.Tensor, layout: Layout, mesh: RuntimeMesh, is_unset: bool
) -> torch.Tensor:
    """This rank's part of rank 0's `tensor`: a DTensor parameter, or a buffer (plain where it is replicated)."""
    if is_unset:
        local = without_value(layout.local_shape, tensor.dtype, mesh.device_type)
    else:
        whole = torch.empty_like(tensor, device=mesh.device_type) if tensor.is_meta else tensor  # on other ranks
        local = local_shard(broadcast_from_rank_0(whole, mesh, name), layout, mesh.mesh.coordinates(mesh.rank))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(distribute(local, layout, mesh), requires_grad=tensor.requires_grad)
    return local if layout.is_replicated else distribute(local, layout, mesh)


def without_extra_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict, without what modules return from ``get_extra_state``."""
    return {name: value for name, value in state.items() if not is_extra_state(name)}


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is of what a module returns from ``get_extra_state``.

    Examples
    --------
    >>> is_extra_state("layers.0._extra_state"), is_extra_state("layers.0.weight")
    (True, False)
    """
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers, each under all its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def copy_with_tensors(model: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy of `model` in which `replace`, called with names and tensors, returns the values of all tensors.

    Tied tensors stay tied, and keep the attributes that users gave them.
    """
    memo: dict[int, Any] = {}  # deepcopy's: it takes these for copies of the model's tensors
    for name, tensor in named_tensors(model):
        if id(tensor) not in memo:
            value = replace(name, tensor)
            made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            vars(made).update(vars(tensor))
            memo[id(tensor)] = made
    memo.update(_copies_of_computed_tensors(model))
    twin = copy.deepcopy(model, memo)
    _let_hooks_read_copies(model, memo)
    return twin


def _copies_of_computed_tensors(model: nn.Module) -> dict[int, torch.Tensor]:
    """Copies of the attributes of modules that are computed from parameters, by their ids: deepcopy refuses these.

    `torch.nn.utils.prune` keeps such weights, which it computes anew in each forward. What reads a copy finds a tensor
    that needs a gradient, which a capture refuses.
    """
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    copies = {}
    for tensor in computed:
        is_sharded = isinstance(tensor, DTensor)
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_sharded else tensor.detach().clone()
        copies[id(tensor)] = value.requires_grad_()
    return copies


def _let_hooks_read_copies(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let hooks of a deep copy of `model` that close over a module or tensor read its copy: functions are shared.

    `copies` is deepcopy's memo.
    """
    for owner in filter(None, (copies.get(id(each)) for each in model.modules())):
        for hooks in (getattr(owner, kind) for kind in _MODULE_HOOKS):
            if functions := {key: hook for key, hook in hooks.items() if not isinstance(hook, types.MethodType)}:
                copier = ModuleTreeCopy.with_copies(model, [*functions.values()], copies)
                hooks.update({key: copier.copied(hook) for key, hook in functions.items()})


def copy_without_values(
    module: nn.Module, kind: type[nn.Module], attributes: Mapping[str, Any], trained: Collection[str]
) -> nn.Module:
    """A deep copy of `module` as one of the class `kind` with these `attributes`, and with meta parameters.

    Buffers that are plain tensors keep their values. Of the parameters, those that are `trained` require a gradient.
    """
    twin: nn.Module = object.__new__(kind)
    memo: dict[int, Any] = {id(module): twin}
    for name, tensor in named_tensors(module):
        if id(tensor) not in memo and (isinstance(tensor, (nn.Parameter, DTensor))):
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            made = nn.Parameter(value, name in trained) if isinstance(tensor, nn.Parameter) else value
            vars(made).update(attributes_of(tensor))
            memo[id(tensor)] = made
    memo.update(_copies_of_computed_tensors(module))
    vars(twin).update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})
    _let_hooks_read_copies(module, memo)
    return twin


def submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` below `root`, also if an attribute hides it."""
    for name in filter(None, path.split(".")):
        child = root._modules[name]
        assert child is not None
        root = child
    return root
