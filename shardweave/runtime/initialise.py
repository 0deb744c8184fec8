"""Initial values of a model on the meta device: drawn as one device draws them, one module at a time, on every rank.

Initialisers run on CPU tensors that take memory only while they are used. This is the only module that touches torch's
dispatch modes and the size of storages.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardweave.distributed import Control, control, control_of, run_on_all_ranks
from shardweave.ir import Layout, ParallelError
from shardweave.runtime.module import ParallelModule, _from_all
from shardweave.runtime.module_tree import named_tensors
from shardweave.runtime.parameters import local_part, local_tensor
from shardweave.runtime.tensor import gather

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
    """The identity of a tensor's storage, which its views share."""
    return id(tensor.untyped_storage())


Init = Callable[[nn.Module], object]
Turn = tuple[nn.Module, Init]


def initialise(parallel: nn.Module, model: nn.Module, seed: int = 0, init: Init | None = None) -> None:
    """Initialise the parameters and buffers of `parallel`, bit for bit as `initialised` does.

    Every rank draws all of them on the CPU with the same random numbers, keeps its own parts and lets the rest go
    after each module: of a model that was built under ``torch.device("meta")`` no more than one module's tensors are
    ever whole. Collective. torch's own random state stays as it is.

    Parameters
    ----------
    parallel : ParallelModule
        What `compile_parallel` made of `model`.
    model : nn.Module
        The model, on the meta device or not; it stays as it is. Tensors of it that have values (buffers that were
        not made on the meta device) keep them, unless an initialiser writes them.
    seed : int
        The same on all ranks.
    init : callable, optional
        Initialises the tensors of one module; called as ``model.apply(init)`` does, instead of what is the default:
        ``_init_weights``, in `transformers`' order, for its models, ``reset_parameters()`` in the order of
        ``model.modules()`` for all other modules.

    Raises
    ------
    ParallelError
        On all ranks: if nothing initialises a parameter or a buffer, if `model` is another one than `parallel` was
        compiled from, if the ranks give different seeds, or if an initialiser fails on one of them.

    Examples
    --------
    >>> import shardweave as sw
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> parallel = sw.compile_parallel(model, sw.Cluster.local(1), torch.randn(4, 8))
    >>> sw.initialise(parallel, model, seed=1)
    >>> torch.equal(parallel.get_parameter("0.weight"), sw.initialised(model, seed=1)[0].weight)
    True
    """
    run_on_all_ranks(control_for(parallel), "initialise", lambda: fill(compiled_module(parallel), model, seed, init))


def initialised(model: nn.Module, seed: int = 0, init: Init | None = None) -> nn.Module:
    """A copy of `model`, on the CPU and whole, with first values: what `initialise` gives to many devices.

    It is what ``torch.manual_seed(seed)``, ``model.to_empty(device="cpu")`` and the initialisers, called one after
    another, give. A tensor that several modules share has the value from the first of them.

    Parameters
    ----------
    model, seed, init
        As for `initialise`.

    Raises
    ------
    ParallelError
        If nothing initialises a parameter or a buffer.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     model = nn.Linear(8, 8)
    >>> torch.manual_seed(3), model.to_empty(device="cpu").reset_parameters()  # doctest: +ELLIPSIS
    (<torch...>, None)
    >>> torch.equal(initialised(nn.Linear(8, 8, device="meta"), seed=3).weight, model.weight)
    True
    """
    made: dict[int, Any] = {}  # deepcopy's memo: it takes these for the model's own tensors
    for _, tensor in named_tensors(model):
        if id(tensor) not in made:
            value = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu().clone()
            made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    result = copy.deepcopy(model, made)
    places = dict(named_tensors(result))
    _draw(model, seed, init, lambda name: places[name].detach(), lambda name, whole: places[name].copy_(whole))
    return result


def fill(
    parallel: ParallelModule, model: nn.Module, seed: int, init: Init | None, only: Collection[str] | None = None
) -> None:
    """As `initialise`; with `only` just these names, by the modules that have them. Collective."""
    places, theirs = dict(named_tensors(parallel)), dict(named_tensors(model))
    different = [
        name
        for name in {**places, **theirs}
        if name not in places or name not in theirs or places[name].shape != theirs[name].shape
    ]
    seeds = _from_all((seed, sorted(different)), parallel.mesh.timeout)
    if different:
        raise ParallelError(
            f"{', '.join(sorted(different))}: not in both the compiled and the given model, or in another shape: give "
            "the model that was compiled"
        )
    if any(other != seeds[0] for other in seeds):
        listed = [other for other, _ in seeds]
        raise ParallelError(f"initialise expects one seed and one model on all ranks, got the seeds {listed}")
    coordinates = parallel.mesh.mesh.coordinates(parallel.mesh.rank)

    def layout(name: str) -> Layout:
        return parallel.layout_of(name, theirs[name].shape)

    def read(name: str) -> torch.Tensor:
        return gather(places[name], layout(name), parallel.mesh, name)

    def keep(name: str, whole: torch.Tensor) -> None:
        if only is None or name in only:
            local_tensor(places[name]).detach().copy_(local_part(whole, layout(name), coordinates))

    _draw(model, seed, init, read, keep, only)
    parallel.unset.clear() if only is None else parallel.unset.difference_update(only)


def compiled_module(parallel: nn.Module) -> ParallelModule:
    """The ParallelModule that `compile_parallel` returned, or that its first call made."""
    found = parallel if isinstance(parallel, ParallelModule) else getattr(parallel, "compiled", None)
    if not isinstance(found, ParallelModule):
        raise ParallelError(
            f"expected what compile_parallel returns, with a captured step, got a {type(parallel).__name__}: pass "
            "example_inputs to compile_parallel, or call its module once first"
        )
    return found


def control_for(parallel: nn.Module) -> Control | None:
    """The groups in which the ranks of a parallel module agree; the world's groups for another module."""
    found = parallel if isinstance(parallel, ParallelModule) else getattr(parallel, "compiled", None)
    return control_of(found.mesh) if isinstance(found, ParallelModule) else control()


def _draw(
    model: nn.Module,
    seed: int,
    init: Init | None,
    read: Callable[[str], torch.Tensor],
    keep: Callable[[str, torch.Tensor], object],
    only: Collection[str] | None = None,
) -> None:
    """Run the initialisers of `model`; call `keep` with the tensors of each module after its initialiser."""
    given = dict(named_tensors(model))
    made: set[int] = set()
    owned: set[int] = set()
    own: set[int] = set()  # of the module whose turn it is

    def fetch(key: int, name: str) -> torch.Tensor | None:
        if key in own & owned:
            return None
        if key in made:
            return read(name)
        return None if given[name].is_meta else given[name].detach()

    def done(key: int, values: Named) -> None:
        if key in own & owned:  # the module drew numbers as it would by itself, but the first owner's count
            return
        unfinished[key] = any(bool(whole.isnan().any()) for _, whole in values)
        for name, whole in values:
            keep(name, whole)
        made.add(key)
        owned.update({key} & own)

    hollow = Hollow(model, fetch)
    wanted = {name: key_of(tensor) for name, tensor in named_tensors(hollow.model) if only is None or name in only}
    unfinished = {key: given[name].is_meta for name, key in wanted.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for module, start in _turns(hollow.model, init):
            own = {key_of(tensor) for tensor in _direct(module)}
            if only is None or not own.isdisjoint(wanted.values()):
                with hollow:
                    start(module)
                hollow.release(done)
    missing = [name for name, key in wanted.items() if unfinished[key]]
    if missing:
        raise ParallelError(
            f"nothing initialises {', '.join(missing)}, or not all of it: give its module a reset_parameters(), pass "
            "init=, which fills the tensors of one module, or build such a buffer outside of torch.device('meta')"
        )


def _turns(model: nn.Module, init: Init | None) -> Iterator[Turn]:
    """Every module once, in the order of initialisation, with what initialises it."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, owner: Any) -> Iterator[Turn]:
        if module in seen:
            return
        seen.add(module)
        owner = module if _is_pretrained(module) else owner
        last = init or (owner and owner._init_weights)
        if not last and isinstance(module, nn.MultiheadAttention):  # its own name for it; it writes its child's too
            last = _reset_attention
        reset = getattr(module, "reset_parameters", None)
        if not last and reset is not None:
            yield module, lambda _: reset()
        for child in module.children():
            yield from visit(child, owner)
        if last:
            yield module, last

    return visit(model, None)


def _is_pretrained(module: nn.Module) -> bool:
    """Whether `module` is a model of `transformers`; without importing it."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _reset_attention(module: nn.MultiheadAttention) -> None:
    module._reset_parameters()


def _direct(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
