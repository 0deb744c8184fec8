"""The parallel model: an `nn.Module` with the model's own parameter names, whose call runs a generated step.

A parameter that no loss of a call depends on gets no gradient, as on one device. Changes that a user makes to the
module tree after compiling, and that the generated step would not follow, are refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.data import DistributedSampler

from shardweave.distributed import RuntimeMesh, collective, gather_from_ranks
from shardweave.ir import ConstantsCheck, InputError, Layout, ParallelError, Reads, StepSpec, ValueSpec, axes_size
from shardweave.ops import IndexChecks, Seeds, all_reduced
from shardweave.runtime.call_checks import Batch, CallChecks, group_of_calls
from shardweave.runtime.execute import Executor, boxed, refuse_transforms
from shardweave.runtime.grad_accumulation import AccumulationGraphs, Boxed, MicroBatchRunner
from shardweave.runtime.inputs import LocalBatch
from shardweave.runtime.module_tree import Finder, adopt, shard_whole, submodule, without_values
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import ParallelTensor, distribute, gather, untraced

_AGAIN = "Make the change on the model and compile it again"


@dataclass(frozen=True)
class _Seen:
    path: str
    parent: nn.Module
    name: str
    module: nn.Module
    training: bool
    hooks: tuple[int, ...]


class Watch:
    """The submodules of `root` as they were when the step was compiled.

    >>> root = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> watch = Watch(root)
    >>> root[1] = nn.GELU()
    >>> watch.check()
    Traceback (most recent call last):
    shardweave.ir.errors.ParallelError: '1' was a ReLU when the step was compiled, and is a GELU now: the step goes on \
computing the former. Make the change on the model and compile it again
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen = [
            _Seen(f"{path}.{name}".lstrip("."), parent, name, module, module.training, _hooks(module))
            for path, parent in root.named_modules()
            for name, module in parent._modules.items()
            if module is not None
        ]

    def check(self) -> None:
        """ParallelError where a submodule is another one, in another mode, or has other hooks."""
        for seen in self._seen:
            module = seen.parent._modules.get(seen.name)
            if module is not seen.module:
                was, now = (type(each).__name__ for each in (seen.module, module))
                other = "another one" if was == now else f"a {now}"
                is_now = "is gone" if module is None else f"is {other} now"
                raise ParallelError(
                    f"{seen.path!r} was a {was} when the step was compiled, and {is_now}: the step goes on computing "
                    f"the former. {_AGAIN}"
                )
            if module.training is not seen.training:
                modes = ("evaluation", "training")
                raise ParallelError(
                    f"{seen.path!r} was in {modes[seen.training]} mode when the step was compiled, and is in "
                    f"{modes[module.training]} mode now, which the step does not hear of. {_AGAIN}"
                )
            if (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or seen.hooks) and _hooks(
                module
            ) != seen.hooks:
                raise ParallelError(
                    f"hooks of {seen.path!r} were added or removed after the step was compiled: the step does not call "
                    "submodules, so that they would never run. Register them on the model before it is compiled, or "
                    "on the parallel module itself"
                )


def _hooks(module: nn.Module) -> tuple[int, ...]:
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(key for hooks in kinds for key in hooks)


class Step(Protocol):
    """The interface of a generated step: two graphs and their calling convention (see `ir.StepSpec`)."""

    @property
    def forward(self) -> fx.GraphModule: ...

    @property
    def backward(self) -> fx.GraphModule | None: ...

    @property
    def spec(self) -> StepSpec: ...

    @property
    def micro_batch_graphs(self) -> Callable[[], AccumulationGraphs] | None: ...


_COMPILED = ("spec", "graphs", "plan", "mesh", "_coordinates", "_flatten", "_unflatten", "_layouts", "_execute",
             "_local", "_calls", "_watch", "_unchanged")  # fmt: skip
"""Attributes of a parallel module that are of its step and not of its parameters' values."""
_OWN = (*_COMPILED, "unset", "_seeds")
"""All attributes of a parallel module that are not the model's."""
Flatten = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[object]]
Unflatten = Callable[[list[torch.Tensor]], Any]


class ParallelModule(nn.Module):
    """`model` trained by a generated step: each call runs this rank's part of it.

    It looks like the model: it is of a subclass of the model's class, has the model's attributes, methods and
    submodules (of their own classes), and keeps no reference to the model or its tensors. Names of this class hide
    those of the model; a warning says which.

    Every rank of the running ``torch.distributed`` world makes one, and all call it together. Parameters are DTensors
    at rest where the plan has them, under the model's own names, with rank 0's values; a model on the meta device
    gives parameters without values, which `load_state_dict` fills. Any ``torch.optim`` optimizer takes them. A call
    takes the global batch or this rank's part of it, or with ``batch="local"`` samples of this rank's own. The gradient
    of a loss that the model computes is that of the global batch; losses computed outside, from this rank's part of
    the outputs, are averaged over the ranks that have other parts.

    Parameters
    ----------
    model : nn.Module
        Gives the names and the values; it is not kept.
    step : Step
        The generated graphs and their calling convention.
    flatten : callable, optional
        From a call's ``(args, kwargs)`` to the tensors of ``spec.inputs``; by default `args` are these tensors.
    unflatten : callable, optional
        From the outputs to what a call returns; by default the one output, or the tuple of them.
    graphs : mapping, optional
        The graph after each stage, for the user to look at.
    plan : object, optional
        The plan, for the user to look at.
    reads : Reads, optional
        The Python values of the model that are constants of the step: a call after one has changed is an error.
    timeout : timedelta, optional
        How long a rank waits for the others in one collective; by default as ``init_process_group`` was told.
    checks : IndexChecks, optional
        What indices among the inputs are checked for.
    batch : {"global", "local"}
        What a call passes: see `compile_parallel`.
    whole : bool
        The step returns its outputs whole on every rank.
    check_inputs : int, optional
        In how many calls the ranks compare hashes of their inputs; None for all calls.

    Raises
    ------
    LostRankError
        If a rank does not take part.
    ParallelError
        If the world has another size than the step's mesh, if ranks have compiled different graphs, or if the model
        lacks a parameter of the step.
    """

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> ParallelModule:
        made: ParallelModule = object.__new__(parallel_class(type(model)) if cls is ParallelModule else cls)
        return made

    def __init_subclass__(cls) -> None:
        """Do not call the hook of the model's class, which may register its subclasses."""

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        *,
        flatten: Flatten | None = None,
        unflatten: Unflatten | None = None,
        graphs: Mapping[str, fx.GraphModule] | None = None,
        plan: Any = None,
        timeout: timedelta | None = None,
        checks: IndexChecks | None = None,
        batch: Batch = "global",
        whole: bool = False,
        check_inputs: int | None = 3,
        reads: Reads | None = None,
    ) -> None:
        vars(self).update(vars(nn.Module()))  # the model's own __init__ is not called
        self.training = model.training
        self.spec = step.spec
        self._seeds = Seeds(compare_graphs(step, timeout))
        self.graphs = dict(graphs or {"forward": step.forward})
        self.plan = plan
        devices = {tensor.device.type for tensor in model.parameters()} - {"meta"}
        self.mesh = RuntimeMesh(self.spec.mesh, devices.pop() if len(devices) == 1 else None, timeout)
        self._coordinates = self.spec.mesh.coordinates(self.mesh.rank)
        self._flatten = flatten or _positional
        self._unflatten = unflatten or _one_or_all
        forward = self._bound(step.forward)  # all process groups are made before anything can fail on one rank alone
        backward = None if step.backward is None else self._bound(step.backward)
        self._layouts, attributes = adopt(self, model, (*self.spec.parameters, *self.spec.buffers), self.mesh)
        self.unset = without_values(model)
        """Names of tensors that nobody has given a value yet: see `initialise`, `load_weights`, `load_state_dict`."""
        make = step.micro_batch_graphs
        self._execute = Executor(
            self.spec,
            self.mesh.coordinates,
            forward,
            backward,
            Finder(self, self.spec.parameters, "_parameters", self.mesh),
            Finder(self, self.spec.buffers, "_buffers", self.mesh),
            () if step.backward is None else tangents_of_gradients(_alone(step), self.spec),
            (lambda: self._seeds()) if self.spec.draws else None,
            None if make is None else lambda: MicroBatchRunner(make(), self.spec, self.mesh.coordinates, self._bound),
        )
        self._local = LocalBatch(self.spec, self.mesh, whole) if batch == "local" and self.mesh.mesh.axes else None
        self._calls = CallChecks(self.spec, self.mesh, group_of_calls(self.mesh), self._local, check_inputs, checks)
        self.register_load_state_dict_pre_hook(_shard_whole)  # type: ignore[no-untyped-call]
        self.register_state_dict_pre_hook(_take_replaced)  # type: ignore[no-untyped-call]
        self._take_attributes(model, attributes)
        self._watch = Watch(self)
        self._unchanged = None if reads is None else ConstantsCheck(reads, model, self)

    def _take_attributes(self, model: nn.Module, attributes: dict[str, Any]) -> None:
        """The model's own attributes, as far as this module has none of their names."""
        own = vars(self)
        hooks = [name for name in attributes if name in own and "state_dict" in name]  # a step has the others in it
        for name in hooks:
            own[name].update(attributes[name])
        users = {name for name in dir(type(model)) if not hasattr(nn.Module, name)}
        users |= {*model._modules, *model._parameters, *model._buffers, *(attributes.keys() - vars(nn.Module()).keys())}
        names = {name for name in (*vars(ParallelModule), *_OWN) if not name.startswith("_")}
        if hidden := sorted((users & names) - {"forward", "train", "zero_grad", "extra_repr"}):
            warnings.warn(
                f"{type(model).__name__} has {', '.join(hidden)} of its own, hidden by those of ParallelModule: its "
                "methods, called on the parallel module, find the latter. Rename them in the model to use both",
                stacklevel=3,
            )
        vars(self).update({name: value for name, value in attributes.items() if name not in own})

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on the batch, as `compile_parallel` was told what that is: see docs/inputs.md. Collective.

        Raises
        ------
        InputError
            On all ranks, if a tensor has another shape or dtype on one of them than the step was compiled for; in the
            first calls also if ranks pass different tensors where they should pass the same.
        IndexRangeError
            If an index lies outside of what it looks up: a token that an embedding has no row for.
        ParallelError
            If the model was on the meta device and a tensor has no value yet; if a Python value that is a constant of
            the step has changed, such as an attribute that the model's forward reads.
        """

        def given() -> Sequence[object]:
            refuse_transforms(self._execute, (args, kwargs))
            return self._flatten(args, kwargs)

        inputs = self._calls(given, self._running)
        outputs = self._execute(inputs)
        if self._local is not None:
            return self._unflatten(self._local.returned(outputs))
        return self._unflatten(
            [self._shown(value, spec) for value, spec in zip(outputs, self.spec.outputs, strict=True)]
        )

    def _running(self) -> Mapping[str, bool]:
        """How the next call runs the step, which has to be the same on all ranks; ParallelError if it cannot."""
        if self.unset and (read := self.unset & {spec.name for spec in (*self.spec.parameters, *self.spec.buffers)}):
            raise ParallelError(
                f"{', '.join(sorted(read)[:5])}: no values for {len(read)} tensors that the step reads, as the model "
                "was on the meta device. Give them some by shardweave.initialise, load_weights, load_checkpoint or "
                "load_state_dict before the first call"
            )
        self._watch.check()
        if self._unchanged is not None:
            self._unchanged.check(self)
        return self._execute.running()

    def _bound(self, graph: fx.GraphModule) -> Boxed:
        return boxed(graph, self.mesh.bound(graph.graph), self.mesh)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up in the calls inside, as DistributedDataParallel's: their forward and backward both.

        The gradients are in no ``.grad`` yet. They are added up where the plan has them (`Strategy.gradients`) until
        the backward of a call outside brings their sum to the states, and parameters that are gathered once a step
        are gathered for the first call alone. `zero_grad` of this module forgets them.

        >>> model = nn.Linear(4, 1, bias=False)
        >>> import shardweave as sw
        >>> parallel = sw.compile_parallel(model, sw.Cluster.local(1), torch.ones(2, 4))
        >>> with parallel.no_sync():
        ...     parallel(torch.ones(2, 4)).sum().backward()
        >>> parallel.weight.grad is None
        True
        >>> parallel(torch.ones(2, 4)).sum().backward()
        >>> parallel.weight.grad
        tensor([[4., 4., 4., 4.]])
        """
        before, self._execute.syncs = self._execute.syncs, False
        try:
            yield
        finally:
            self._execute.syncs = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those under `no_sync` too, which an optimizer's ``zero_grad`` does not know of."""
        super().zero_grad(set_to_none)
        self._execute.drop_accumulated()

    def _shown(self, value: torch.Tensor, spec: ValueSpec) -> torch.Tensor:
        """An output as a user sees it: this rank's part of the batch; a DTensor where it is spread further."""
        if spec.differentiable or set(spec.layout.shard_axes) <= set(self.spec.data_axes):
            return value
        return distribute(value, spec.layout, self.mesh)

    def train(self, mode: bool = True) -> ParallelModule:
        """Stay in the mode of the capture; ParallelError for the other one, whose graph is not this one."""
        if mode != self.training:
            now, wanted = ("training", "evaluation") if self.training else ("evaluation", "training")
            raise ParallelError(
                f"the step was captured in {now} mode, and the {wanted} mode of a model may compute something else. "
                f"Compile the model in {wanted} mode too, and share the parameters by load_state_dict; to compute "
                "without gradients in the captured mode, torch.no_grad() is enough"
            )
        return self

    def manual_seed(self, seed: int) -> None:
        """Let the next call draw as the first one after this seed does. Collective: all ranks call it, with one seed.

        Random ops (dropout) draw from a seed of the module's own, not from torch's generators. The first one is what
        ``torch.manual_seed`` set on rank 0 before compiling. `load_checkpoint` goes on where the saved run stood; to go
        on without it, give another seed than the one that the run began with, such as ``seed + step``.

        Raises
        ------
        ParallelError
            On all ranks, if they give different seeds: replicas of a value would draw different numbers.
        """
        seeds = gather_values(seed, self.mesh.timeout)
        if len(set(seeds)) > 1:
            raise ParallelError(f"manual_seed expects one seed on all ranks, got {seeds}: give all the same")
        self._seeds = Seeds(seed)

    @property
    def data_world_size(self) -> int:
        """The number of parts of the batch that ranks pass: the data parallel degree, or one part for each rank.

        The second with ``batch="local"``.
        """
        return self.spec.mesh.world_size if self._local is not None else axes_size(self.spec.data_axes)

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's, in ``[0, data_world_size)``."""
        if self._local is not None:
            return self.mesh.rank
        index = 0
        for axis in self.spec.data_axes:
            index = index * axis.size + self._coordinates[axis.name]
        return index

    def sampler(self, dataset: Sized, **options: Any) -> DistributedSampler[Any]:
        """A sampler for this rank's part of `dataset`; `options` as for DistributedSampler (`shuffle`, `seed`, ...).

        A loader with it and a batch size of the global one over `data_world_size` gives this rank's part of a batch.
        """
        return DistributedSampler(dataset, self.data_world_size, self.data_rank, **options)  # type: ignore[arg-type]

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global batch: of the targets of a loss that is computed outside, for example.

        Raises
        ------
        InputError
            If the tensor's first dimension does not divide by `data_world_size`.
        """
        parts, steps = self.data_world_size, self.spec.micro_batches * self.spec.sub_batches
        if self._local is not None:  # a rank's own samples are one piece, however many steps compute them
            steps = 1
        if parts > 1 and (tensor.ndim == 0 or tensor.shape[0] % (steps * parts)):
            each = f" in each of its {steps} micro- or sub-batches" if steps > 1 else ""
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} does not divide into the {parts} parts of a batch{each}"
            )
        if parts == 1:
            return tensor
        return torch.cat([step.chunk(parts)[self.data_rank] for step in tensor.chunk(steps)])

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm, taken over all ranks, is at most `max_norm`; as torch's function.

        Returns
        -------
        Tensor
            The norm before; a plain tensor, the same on all ranks. It costs one all-reduce, whatever the layouts are.
        """
        found = {name: parameter for name, parameter in self.named_parameters() if parameter.grad is not None}
        parts = [local_tensor(parameter.grad) for parameter in found.values() if parameter.grad is not None]
        if not parts:
            return torch.zeros((), device=self.mesh.device_type)
        least = math.inf if norm_type < 0 else 0.0
        some = [part if part.numel() else part.new_full((), least) for part in parts]  # nothing has no maximum
        norms = torch.stack([norm.to(torch.float64) for norm in torch._foreach_norm(some, norm_type)])
        if math.isinf(norm_type):
            largest = norm_type > 0
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
            total = self._all_reduced(norms.max() if largest else norms.min(), op)
        else:
            world = self.spec.mesh.world_size
            layouts = [self.layout_of(name, parameter.shape) for name, parameter in found.items()]
            copies = [world // axes_size(layout.shard_axes) for layout in layouts]
            sums = norms.pow(norm_type) / norms.new_tensor(copies)
            total = self._all_reduced(sums.sum(), dist.ReduceOp.SUM).pow(1.0 / norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for part in parts:
            part.mul_(factor.to(part.dtype))
        return total.to(parts[0].dtype)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the unsharded model: whole, plain tensors on every rank. Collective."""
        whole: dict[torch.Tensor, torch.Tensor] = {}
        state = self.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if tensor not in whole:
                whole[tensor] = gather(tensor, self.layout_of(name, tensor.shape), self.mesh, name)
        return {name: whole[tensor] for name, tensor in state.items()}

    def layout_of(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of the tensor `name` with the global `shape`. Plain tensors are replicated."""
        path, _, leaf = name.rpartition(".")
        module = submodule(self, path)
        tensor = module._parameters.get(leaf, module._buffers.get(leaf))
        return tensor.place.layout if isinstance(tensor, ParallelTensor) else Layout.replicated(shape)

    def extra_repr(self) -> str:
        """The ranks, then the representation of the model's class."""
        world = self.spec.mesh.world_size
        axes = " x ".join(f"{axis.name}={axis.size}" for axis in self.spec.mesh.axes)
        where = f"on {world} ranks: {axes}" if world > 1 else "on 1 rank"
        return ", ".join(filter(None, (where, super().extra_repr())))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy with parameters and buffers of its own, as weight averaging needs. The compiled step is shared."""
        memo.update({id(vars(self)[name]): vars(self)[name] for name in _COMPILED})
        twin: ParallelModule = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        twin._calls = self._calls.fresh()
        twin._execute = self._execute.with_tensors(
            Finder(twin, self.spec.parameters, "_parameters", self.mesh),
            Finder(twin, self.spec.buffers, "_buffers", self.mesh),
            (lambda: twin._seeds()) if self.spec.draws else None,
        )
        twin._watch = Watch(twin)
        return twin

    def __copy__(self) -> ParallelModule:
        """A module that shares everything with this one, as ``copy.copy`` of a module does."""
        twin: ParallelModule = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __reduce_ex__(self, _: Any) -> Any:
        """Raise ParallelError: the compiled step is bound to the running ranks and cannot be pickled."""
        raise ParallelError(
            "a parallel module cannot be pickled, as torch.save(parallel) does, since its step is bound to the ranks "
            "that run it. Save shardweave.save_checkpoint(...), or torch.save(parallel.full_state_dict(), path) on one "
            "rank, and compile the model again to load it; plan.save(path) saves planning again"
        )

    def _all_reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        if self.mesh.device_mesh is not None:
            group = self.mesh.world_group()
            with collective("the all_reduce of the gradients' norm", group):
                return all_reduced(tensor, op, group)
        return tensor


for _name in _OWN:  # plain attributes of the class, so that a property of the model's class does not take their place
    setattr(ParallelModule, _name, None)


_classes: WeakKeyDictionary[type[nn.Module], type[ParallelModule]] = WeakKeyDictionary()


def become_parallel(module: nn.Module, model: nn.Module, step: Step, **how: Any) -> ParallelModule:
    """Make an existing module the parallel module of `model`: it takes the class and the attributes of one.

    Parameters
    ----------
    module : nn.Module
        Loses what it has, unless this fails: then it stays as it is.
    model, step, **how
        As for `ParallelModule`.
    """
    kind, attributes = type(module), vars(module).copy()
    object.__setattr__(module, "__class__", parallel_class(type(model)))  # whatever the class of either says of it
    made = cast(ParallelModule, module)
    vars(made).clear()
    try:
        ParallelModule.__init__(made, model, step, **how)
    except BaseException:
        object.__setattr__(module, "__class__", kind)
        vars(module).clear()
        vars(module).update(attributes)
        raise
    return made


def parallel_class(model_class: type[nn.Module]) -> type[ParallelModule]:
    """The class of the parallel module of a model of `model_class`: a subclass of both."""
    if model_class not in _classes:
        _classes[model_class] = _make_class(model_class)
    return _classes[model_class]


def _make_class(model_class: type[nn.Module]) -> type[ParallelModule]:
    if model_class is nn.Module or issubclass(model_class, (ParallelModule, torch.jit.ScriptModule)):
        return ParallelModule

    @functools.wraps(model_class.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    names = {"forward": forward, "__call__": nn.Module.__call__, "__doc__": ParallelModule.__doc__}
    made: type[ParallelModule] = types.new_class(
        f"Parallel{model_class.__name__}", (ParallelModule, model_class), exec_body=lambda space: space.update(names)
    )
    return made


def _take_replaced(module: nn.Module, *_: object) -> None:
    """Before a state dict is made: what users put in the place of parameters becomes parallel."""
    assert isinstance(module, ParallelModule)
    module._execute.parameters()


def _shard_whole(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, ParallelModule)
    shard_whole(state, prefix, module._layouts, module.mesh)
    module.unset -= {name.removeprefix(prefix) for name in state if name.startswith(prefix)}


def _alone(step: Step) -> fx.GraphModule:
    """The backward that takes no sums of gradients before it."""
    assert step.backward is not None
    several = step.micro_batch_graphs is not None and step.spec.micro_batches > 1
    return step.micro_batch_graphs().backward(False, True) if several else step.backward  # type: ignore[misc]


def compare_graphs(step: Step, timeout: timedelta | None = None) -> int:
    """ParallelError on all ranks if they have generated different graphs: their collectives would not meet.

    Returns
    -------
    int
        A seed on which the ranks agree: rank 0's of torch.
    """
    mine = step.spec.graph_hash or sha256(step.forward.code.encode()).hexdigest()
    hashes, seeds = zip(*gather_values((mine, torch.initial_seed()), timeout), strict=True)
    if len(set(hashes)) > 1:
        ranks = {value: [rank for rank, other in enumerate(hashes) if other == value] for value in hashes}
        listed = "; ".join(f"ranks {ranks[value]}: {value[:12]}" for value in ranks)
        raise ParallelError(
            f"the ranks have generated different graphs ({listed}). Compile the same model, with the same inputs' "
            "shapes, options and version of shardweave, on all ranks, or make the plan once and load it everywhere"
        )
    return int(seeds[0])


def agreed_seed(timeout: timedelta | None = None) -> int:
    """The seed that rank 0 gave torch. Collective."""
    return int(gather_values(torch.initial_seed(), timeout)[0])


def gather_values(value: Any, timeout: timedelta | None = None) -> list[Any]:
    """The values of all ranks, in their order; `value` alone where no other rank runs."""
    return gather_from_ranks(value, "a comparison of what the ranks were given", timeout)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[object]:
    if kwargs:
        raise InputError(f"this step takes its tensors by position, but the call names {', '.join(kwargs)}")
    return args


def _one_or_all(outputs: list[torch.Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def tangents_of_gradients(backward: fx.GraphModule, spec: StepSpec) -> list[frozenset[int]]:
    """For each gradient that `backward` returns, the outputs of the step (by index) whose tangents it is made of.

    A gradient that is the same whatever the tangents are (zeros, of an embedding that looks up nothing) comes from any.

    Examples
    --------
    >>> from shardweave.ir import Layout, Mesh, ParameterSpec, ValueSpec
    >>> whole = Layout.replicated(())
    >>> parameters = tuple(ParameterSpec(name, whole, "float32") for name in ("weight", "aside", "unused"))
    >>> outputs = tuple(ValueSpec(name, whole, "float32", True) for name in ("loss", "other"))
    >>> spec = StepSpec(Mesh(()), parameters, (), (), outputs)
    >>> backward = fx.symbolic_trace(lambda saved, loss, other: (loss * saved + other, -other, None))
    >>> [sorted(found) for found in tangents_of_gradients(backward, spec)]
    [[0, 1], [1], []]
    """
    differentiable = [index for index, output in enumerate(spec.outputs) if output.differentiable]
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    tangents = placeholders[len(placeholders) - len(differentiable) :]
    found = {node: frozenset({index}) for node, index in zip(tangents, differentiable, strict=True)}
    for node in backward.graph.nodes:
        if node not in found:
            found[node] = frozenset(index for argument in node.all_input_nodes for index in found[argument])
    every = frozenset(differentiable)
    return [found[value] or every if isinstance(value, fx.Node) else frozenset() for value in _results(backward)]


def _results(module: fx.GraphModule) -> Iterator[object]:
    (returned,) = module.graph.output_node().args
    yield from returned if isinstance(returned, (list, tuple)) else (returned,)
