"""Initial values of a model on the meta device: drawn as one device draws them, one module at a time, on every rank.

Initialisers run on CPU tensors that have memory only while they are used. This is the only module that touches torch's
dispatch modes and the size of storages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardweave.distributed import control, control_of, gather_from_ranks, run_on_all_ranks
from shardweave.ir import Layout, ParallelError
from shardweave.runtime.module import ParallelModule
from shardweave.runtime.module_tree import copy_with_tensors, named_tensors
from shardweave.runtime.parameters import local_part, local_tensor
from shardweave.runtime.tensor import gather, written_tensors

NamedTensors = list[tuple[str, torch.Tensor]]
Init = Callable[[nn.Module], object]


class LazyStorageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy of `model` on the CPU whose tensors get memory, and a value, at the first op on them inside this mode.

    Tensors that no op takes get none, so a loop over all parameters allocates nothing. `release` frees the memory.
    `fetch` takes the id of a storage and a tensor's name, and returns the tensor's value, or None if it has none yet.
    The attribute `model` is the copy.
    """

    def __init__(self, model: nn.Module, fetch: Callable[[int, str], torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fetch = fetch
        self._sizes: dict[int, int] = {}
        self._tensors: dict[int, NamedTensors] = {}
        self._allocated: dict[int, torch.UntypedStorage] = {}
        self._written: set[int] = set()
        storages: dict[int, torch.UntypedStorage] = {}

        def unallocated(name: str, tensor: torch.Tensor) -> torch.Tensor:
            size = tensor.untyped_storage().nbytes()
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            storage = storages.setdefault(storage_id(tensor), memory.untyped_storage())
            value = torch.empty(0, dtype=tensor.dtype, device="cpu")
            value.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            self._tensors.setdefault(id(storage), []).append((name, value))
            self._sizes[id(storage)] = size
            storage.resize_(0)
            return value

        self.model = copy_with_tensors(model, unallocated)

    def release(self, done: Callable[[int, NamedTensors], object]) -> None:
        """Free all memory. Before that, `done` gets the id of each storage that was written, and its named tensors."""
        while self._allocated:
            key, storage = self._allocated.popitem()
            if key in self._written:
                done(key, self._tensors[key])
            storage.resize_(0)
        self._written.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and storage_id(value) in self._tensors:
                self._allocate(storage_id(value), value.untyped_storage())
        self._written.update(map(storage_id, written_tensors(func, args, kwargs)))
        return func(*args, **kwargs)

    def _allocate(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._allocated:
            return
        storage.resize_(self._sizes[key])
        self._allocated[key] = storage
        for name, tensor in self._tensors[key]:
            value = self._fetch(key, name)
            if value is not None:
                tensor.copy_(value)
            else:  # an entry that is still NaN afterwards was not initialised
                tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, which its views share."""
    return id(tensor.untyped_storage())


def initialise(parallel: nn.Module, model: nn.Module, seed: int = 0, init: Init | None = None) -> None:
    """Initialise the parameters and buffers of `parallel`, bit for bit as `initialised` does.

    Every rank draws all values on the CPU with the same random numbers, module by module, and keeps its own parts. No
    more than one module's tensors are whole at a time, if the model was built under ``torch.device("meta")``.
    Collective. torch's own random state is not changed.

    Parameters
    ----------
    parallel : ParallelModule
        The result of `compile_parallel` for `model`.
    model : nn.Module
        The model, on the meta device or not; it is not changed. Tensors that have values (buffers that were not made
        on the meta device) keep them, unless an initialiser writes them.
    seed : int
        The same on all ranks.
    init : callable, optional
        Initialises the tensors of one module; called as ``model.apply(init)`` does. By default models of
        `transformers` are initialised by ``_init_weights`` in that library's order, other modules by
        ``reset_parameters()`` in the order of ``model.modules()``.

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
    run_on_parallel_module(parallel, "initialise", lambda module: initialise_tensors(module, model, seed, init))


def initialised(model: nn.Module, seed: int = 0, init: Init | None = None) -> nn.Module:
    """A whole copy of `model` on the CPU, with the initial values that `initialise` gives to many devices.

    They are those of ``torch.manual_seed(seed)``, ``model.to_empty(device="cpu")`` and the initialisers, called one
    after another. A tensor that several modules share has the value from the first of them.

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
    result = copy_with_tensors(
        model, lambda _, x: torch.empty_like(x, device="cpu") if x.is_meta else x.detach().cpu().clone()
    )
    tensors = dict(named_tensors(result))
    _run_initialisers(
        model, seed, init, lambda name: tensors[name].detach(), lambda name, value: tensors[name].copy_(value)
    )
    return result


def initialise_tensors(
    parallel: ParallelModule, model: nn.Module, seed: int, init: Init | None, only: Collection[str] | None = None
) -> None:
    """As `initialise`; with `only`, the modules with these names run, and the other tensors are kept. Collective."""
    # 1. Compare the ranks' seeds and models.
    ours, theirs = dict(named_tensors(parallel)), dict(named_tensors(model))
    different = sorted(
        name
        for name in {**ours, **theirs}
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    )
    given = gather_from_ranks((seed, different), parallel.mesh.timeout)
    if different:
        raise ParallelError(
            f"{', '.join(different)}: not in both the compiled and the given model, or in another shape: give the "
            "model that was compiled"
        )
    if any(other != given[0] for other in given):
        seeds = [other for other, _ in given]
        raise ParallelError(f"initialise expects one seed and one model on all ranks, got the seeds {seeds}")
    # 2. Run the initialisers, and keep this rank's part of each value.
    coordinates = parallel.mesh.mesh.coordinates(parallel.mesh.rank)

    def layout(name: str) -> Layout:
        return parallel.layout_of(name, theirs[name].shape)

    def read(name: str) -> torch.Tensor:
        return gather(ours[name], layout(name), parallel.mesh, name)

    def write(name: str, value: torch.Tensor) -> None:
        if only is None or name in only:
            local_tensor(ours[name]).detach().copy_(local_part(value, layout(name), coordinates))

    _run_initialisers(model, seed, init, read, write, only)
    parallel.unset.clear() if only is None else parallel.unset.difference_update(only)


def run_on_parallel_module(parallel: nn.Module, doing: str, action: Callable[[ParallelModule], object]) -> None:
    """Run `action` on a compiled parallel module; an error on one rank is raised on all. Collective."""

    def run() -> None:
        if not isinstance(parallel, ParallelModule):
            raise ParallelError(
                f"expected what compile_parallel returns, with a captured step, got a {type(parallel).__name__}: pass "
                "example_inputs to compile_parallel, or call its module once first"
            )
        action(parallel)

    groups = control_of(parallel.mesh) if isinstance(parallel, ParallelModule) else control()
    run_on_all_ranks(groups, doing, run)


def _run_initialisers(
    model: nn.Module,
    seed: int,
    init: Init | None,
    read: Callable[[str], torch.Tensor],
    write: Callable[[str, torch.Tensor], object],
    only: Collection[str] | None = None,
) -> None:
    """Run the initialisers of `model` on a lazy copy; `write` each module's values after its initialiser.

    A module that uses a tensor of another module gets its value from `read`.
    """
    given = dict(named_tensors(model))
    initialised: set[int] = set()  # storages that some module has written
    owned: set[int] = set()  # storages that one of their own modules has written
    own: set[int] = set()  # storages of the module that is initialised now

    def fetch(key: int, name: str) -> torch.Tensor | None:
        if key in own & owned:
            return None
        if key in initialised:
            return read(name)
        return None if given[name].is_meta else given[name].detach()

    def done(key: int, values: NamedTensors) -> None:
        if key in own & owned:  # a shared tensor: the values of its first module count
            return
        unfinished[key] = any(bool(value.isnan().any()) for _, value in values)
        for name, value in values:
            write(name, value)
        initialised.add(key)
        owned.update({key} & own)

    lazy = LazyStorageMode(model, fetch)
    wanted = {name: storage_id(tensor) for name, tensor in named_tensors(lazy.model) if only is None or name in only}
    unfinished = {key: given[name].is_meta for name, key in wanted.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for module, initialiser in _initialisers(lazy.model, init):
            own = {storage_id(x) for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
            if only is None or not own.isdisjoint(wanted.values()):
                with lazy:
                    initialiser(module)
                lazy.release(done)
    missing = [name for name, key in wanted.items() if unfinished[key]]
    if missing:
        raise ParallelError(
            f"nothing initialises {', '.join(missing)}, or not all of it: give its module a reset_parameters(), pass "
            "init=, which fills the tensors of one module, or build such a buffer outside of torch.device('meta')"
        )


def _initialisers(model: nn.Module, init: Init | None) -> Iterator[tuple[nn.Module, Init]]:
    """Each module once, with its initialiser, in the order of initialisation."""
    library: Any = sys.modules.get("transformers.modeling_utils")  # not imported here
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, pretrained: Any) -> Iterator[tuple[nn.Module, Init]]:
        if module in seen:
            return
        seen.add(module)
        if library is not None and isinstance(module, library.PreTrainedModel):
            pretrained = module
        after_children = init or (pretrained and pretrained._init_weights)
        if not after_children and isinstance(module, nn.MultiheadAttention):  # it writes its child's tensors, too
            after_children = nn.MultiheadAttention._reset_parameters
        reset = getattr(module, "reset_parameters", None)
        if not after_children and reset is not None:
            yield module, lambda _: reset()
        for child in module.children():
            yield from visit(child, pretrained)
        if after_children:
            yield module, after_children

    return visit(model, None)
