"""The parallel model: an `nn.Module` with the model's own parameter names, whose call runs a generated step.

A parameter that the loss does not depend on gets no gradient, as on one device. Changes of the module tree after
compiling that the generated step would ignore raise an error.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.data import DistributedSampler

from shardweave.distributed import RuntimeMesh, collective, gather_from_ranks
from shardweave.ir import ConstantsCheck, InputError, Layout, ParallelError, Reads, StepSpec, ValueSpec, axes_size
from shardweave.ops import IndexChecks, Seeds, all_reduced
from shardweave.passes import Step, recompute_fusible
from shardweave.runtime.call_checks import Batch, CallChecks, group_of_calls
from shardweave.runtime.execute import Executor, boxed, refuse_transforms
from shardweave.runtime.grad_accumulation import Boxed, MicroBatchRunner
from shardweave.runtime.inductor import InductorMode, RegionCompiler
from shardweave.runtime.inputs import LocalBatch
from shardweave.runtime.module_tree import (
    TensorLookup,
    copy_module_tree,
    meta_tensor_names,
    shard_state_dict,
    submodule,
)
from shardweave.runtime.optimizers import register_hook
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.prediction_check import PredictedStep, PredictionCheck
from shardweave.runtime.tensor import ParallelTensor, distribute, gather, untraced

_RECOMPILE = "Make the change on the model and compile it again"


@dataclass(frozen=True)
class _Submodule:
    path: str
    parent: nn.Module
    name: str
    module: nn.Module
    training: bool
    hooks: tuple[int, ...]


class ModuleTreeGuard:
    """Checks that the submodules of `root` are those with which the step was compiled.

    >>> root = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> guard = ModuleTreeGuard(root)
    >>> root[1] = nn.GELU()
    >>> guard.check()
    Traceback (most recent call last):
    shardweave.ir.errors.ParallelError: '1' was a ReLU when the step was compiled, and is a GELU now: the step goes on \
computing the former. Make the change on the model and compile it again
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen = [
            _Submodule(f"{path}.{name}".lstrip("."), parent, name, module, module.training, _hooks(module))
            for path, parent in root.named_modules()
            for name, module in parent._modules.items()
            if module is not None
        ]

    def check(self) -> None:
        """Raise ParallelError if a submodule was replaced, or its mode or hooks have changed."""
        for seen in self._seen:
            module = seen.parent._modules.get(seen.name)
            if module is not seen.module:
                was, now = (type(each).__name__ for each in (seen.module, module))
                other = "another one" if was == now else f"a {now}"
                is_now = "is gone" if module is None else f"is {other} now"
                raise ParallelError(
                    f"{seen.path!r} was a {was} when the step was compiled, and {is_now}: the step goes on computing "
                    f"the former. {_RECOMPILE}"
                )
            if module.training is not seen.training:
                modes = ("evaluation", "training")
                raise ParallelError(
                    f"{seen.path!r} was in {modes[seen.training]} mode when the step was compiled, and is in "
                    f"{modes[module.training]} mode now, which the step does not hear of. {_RECOMPILE}"
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


_STEP_ATTRIBUTES = ("spec", "graphs", "plan", "mesh", "_coordinates", "_flatten", "_unflatten", "_layouts", "_execute",
             "_local", "_calls", "_tree_guard", "_constants", "_regions")  # fmt: skip
"""Attributes of a parallel module that belong to its compiled step."""
_ATTRIBUTES = (*_STEP_ATTRIBUTES, "unset", "_seeds")
"""The attributes of a parallel module that the model does not have."""
Flatten = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[object]]
Unflatten = Callable[[list[torch.Tensor]], Any]


class ParallelModule(nn.Module):
    """`model` trained by a generated step: each call runs this rank's part of it.

    Its class is a subclass of the model's class. It has the model's attributes, methods and submodules (of their own
    classes), and keeps no reference to the model or its tensors. Names of this class hide those of the model; a warning
    lists them.

    Every rank of the running ``torch.distributed`` world makes one, and all ranks call it together. Parameters are
    DTensors, sharded as the plan says, under the model's own names, with rank 0's values. A model on the meta device
    makes parameters without values, which `load_state_dict` fills. Any ``torch.optim`` optimizer takes them. A call
    takes the global batch or this rank's part of it, or with ``batch="local"`` samples of this rank's own. The gradient
    of a loss that the model computes is that of the global batch. Losses computed outside, from this rank's part of
    the outputs, are averaged over the ranks that have other parts.

    Parameters
    ----------
    model : nn.Module
        The model with the names and the values; it is not kept.
    step : Step
        The generated graphs and their calling convention.
    flatten : callable, optional
        Maps a call's ``(args, kwargs)`` to the tensors of ``spec.inputs``; by default `args` are these tensors.
    unflatten : callable, optional
        Maps the outputs to the result of a call; by default the one output, or the tuple of all.
    graphs : mapping, optional
        The graph after each stage, for the user.
    plan : object, optional
        The plan, for the user.
    reads : Reads, optional
        The Python values of the model that are constants of the step. A call after a change of one is an error.
    timeout : timedelta, optional
        The timeout of collectives; by default that of ``init_process_group``.
    checks : IndexChecks, optional
        The ranges of indices among the inputs.
    batch : {"global", "local"}
        The meaning of the batch: see `compile_parallel`.
    whole : bool
        The step returns its outputs whole on every rank.
    checked_calls : float
        The number of calls in which the ranks compare hashes of their inputs: see `Options.checked_calls`.
    predicted : PredictedStep, optional
        The plan's step time, if it is for this machine: rank 0 warns if the first steps take much more or less.
    inductor : "auto" or bool
        Inductor compiles the compute between collectives: see `Options.inductor`.

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
        checked_calls: float = 3,
        reads: Reads | None = None,
        predicted: PredictedStep | None = None,
        inductor: InductorMode = "auto",
    ) -> None:
        # 1. Agree with the other ranks on the graphs, and bind the graphs to process groups. All groups are made before
        # anything can fail on one rank alone.
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
        self._regions = RegionCompiler(inductor, self.mesh.device_type)
        pair = step.forward, step.backward
        if self._regions.is_on and step.backward is not None:
            pair = recompute_fusible(
                step.forward, step.backward, len(self.spec.mutated_buffers) + len(self.spec.outputs)
            )
        forward, backward = (None if graph is None else self._bound(graph) for graph in pair)
        assert forward is not None
        # 2. Copy the module tree, with sharded parameters.
        register_hook()
        specs = (*self.spec.parameters, *self.spec.buffers)
        self._layouts, attributes = copy_module_tree(self, model, specs, self.mesh)
        self.unset = meta_tensor_names(model)
        """Names of tensors without values: see `initialise`, `load_weights`, `load_state_dict`."""
        # 3. Set up the calls.
        make = step.micro_batch_graphs
        device = torch.device(self.mesh.device_type)
        check = None if predicted is None or self.mesh.rank > 0 else PredictionCheck(predicted, device)
        self._execute = Executor(
            self.spec,
            self.mesh.coordinates,
            forward,
            backward,
            TensorLookup(self, self.spec.parameters, "_parameters", self.mesh),
            TensorLookup(self, self.spec.buffers, "_buffers", self.mesh),
            () if step.backward is None else tangents_of_gradients(_single_run_backward(step), self.spec),
            (lambda: self._seeds()) if self.spec.draws else None,
            None if make is None else lambda: MicroBatchRunner(make(), self.spec, self.mesh.coordinates, self._bound),
            check,
        )
        self._local = LocalBatch(self.spec, self.mesh, whole) if batch == "local" and self.mesh.mesh.axes else None
        self._calls = CallChecks(self.spec, self.mesh, group_of_calls(self.mesh), self._local, checked_calls, checks)
        self.register_load_state_dict_pre_hook(_shard_state_dict)  # type: ignore[no-untyped-call]
        self.register_state_dict_pre_hook(_check_replaced_parameters)  # type: ignore[no-untyped-call]
        self._take_attributes(model, attributes)
        self._tree_guard = ModuleTreeGuard(self)
        self._constants = None if reads is None else ConstantsCheck(reads, model, self)

    def _take_attributes(self, model: nn.Module, attributes: dict[str, Any]) -> None:
        """Take over the model's own attributes, except those whose names this module has."""
        own = vars(self)
        hooks = [name for name in attributes if name in own and "state_dict" in name]  # the step runs the other hooks
        for name in hooks:
            own[name].update(attributes[name])
        users = {name for name in dir(type(model)) if not hasattr(nn.Module, name)}
        users |= {*model._modules, *model._parameters, *model._buffers, *(attributes.keys() - vars(nn.Module()).keys())}
        names = {name for name in (*vars(ParallelModule), *_ATTRIBUTES) if not name.startswith("_")}
        if hidden := sorted((users & names) - {"forward", "train", "zero_grad", "extra_repr"}):
            warnings.warn(
                f"{type(model).__name__} has {', '.join(hidden)} of its own, hidden by those of ParallelModule: its "
                "methods, called on the parallel module, find the latter. Rename them in the model to use both",
                stacklevel=3,
            )
        vars(self).update({name: value for name, value in attributes.items() if name not in own})

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a batch (see docs/inputs.md). Collective.

        Raises
        ------
        InputError
            On all ranks, if a tensor on one of them has another shape or dtype than the step was compiled for; in the
            first calls also if ranks pass different tensors where they should pass the same.
        IndexRangeError
            If an index is out of range, such as a token without a row in the embedding.
        ParallelError
            If a tensor of a model from the meta device has no value yet; if a Python value that is a constant of the
            step has changed, such as an attribute that the model's forward reads.
        """

        def given() -> Sequence[object]:
            refuse_transforms(self._execute, (args, kwargs))
            return self._flatten(args, kwargs)

        inputs = self._calls(given, self._running)
        outputs = self._execute(inputs)
        if self._local is not None:
            return self._unflatten(self._local.returned(outputs))
        return self._unflatten(
            [self._as_user_output(value, spec) for value, spec in zip(outputs, self.spec.outputs, strict=True)]
        )

    def _running(self) -> Mapping[str, bool]:
        """The mode of the next call, which all ranks must share; ParallelError if the step cannot run."""
        if self.unset and (read := self.unset & {spec.name for spec in (*self.spec.parameters, *self.spec.buffers)}):
            raise ParallelError(
                f"{', '.join(sorted(read)[:5])}: no values for {len(read)} tensors that the step reads, as the model "
                "was on the meta device. Give them some by shardweave.initialise, load_weights, load_checkpoint or "
                "load_state_dict before the first call"
            )
        self._tree_guard.check()
        if self._constants is not None:
            self._constants.check(self)
        return self._execute.running()

    def _bound(self, graph: fx.GraphModule) -> Boxed:
        return boxed(graph, self._regions(graph, self.mesh.bind_graph(graph.graph)), self.mesh)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of calls inside, as in DistributedDataParallel; forward and backward must be inside.

        The gradients are not in ``.grad`` yet. They accumulate with the layout of `Strategy.gradients`, and the
        backward of the next call outside reduces the sum. Parameters that the plan gathers once a step are gathered in
        the first call only. `zero_grad` of this module forgets the accumulated gradients.

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
        """Forget all gradients, also those accumulated under `no_sync`, which an optimizer's ``zero_grad`` keeps."""
        super().zero_grad(set_to_none)
        self._execute.drop_accumulated()

    def _as_user_output(self, value: torch.Tensor, spec: ValueSpec) -> torch.Tensor:
        """An output as a user sees it: this rank's part of the batch; a DTensor if other axes shard it."""
        if spec.differentiable or set(spec.layout.shard_axes) <= set(self.spec.data_axes):
            return value
        return distribute(value, spec.layout, self.mesh)

    def train(self, mode: bool = True) -> ParallelModule:
        """Accept the mode of the capture; raise ParallelError for the other one, which needs another graph."""
        if mode != self.training:
            now, wanted = ("training", "evaluation") if self.training else ("evaluation", "training")
            raise ParallelError(
                f"the step was captured in {now} mode, and the {wanted} mode of a model may compute something else. "
                f"Compile the model in {wanted} mode too, and share the parameters by load_state_dict; to compute "
                "without gradients in the captured mode, torch.no_grad() is enough"
            )
        return self

    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers of the following calls. Collective: all ranks call it with the same seed.

        Random ops (dropout) use a seed of the module, not torch's generators. At first it is the seed that
        ``torch.manual_seed`` set on rank 0 before compiling. `load_checkpoint` restores the state of the saved run. To
        continue without it, set another seed than at the start, such as ``seed + step``.

        Raises
        ------
        ParallelError
            On all ranks, if they give different seeds: replicas of a value would draw different numbers.
        """
        seeds = gather_from_ranks(seed, self.mesh.timeout)
        if len(set(seeds)) > 1:
            raise ParallelError(f"manual_seed expects one seed on all ranks, got {seeds}: give all the same")
        self._seeds = Seeds(seed)

    @property
    def data_world_size(self) -> int:
        """The number of parts of the batch: the data parallel degree, or with ``batch="local"`` one for each rank."""
        return self.spec.mesh.world_size if self._local is not None else axes_size(self.spec.data_axes)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part, in ``[0, data_world_size)``."""
        if self._local is not None:
            return self.mesh.rank
        index = 0
        for axis in self.spec.data_axes:
            index = index * axis.size + self._coordinates[axis.name]
        return index

    def sampler(self, dataset: Sized, **options: Any) -> DistributedSampler[Any]:
        """A sampler for this rank's part of `dataset`; `options` as for DistributedSampler (`shuffle`, `seed`, ...).

        Use it in a loader whose batch size is the global one divided by `data_world_size`.
        """
        return DistributedSampler(dataset, self.data_world_size, self.data_rank, **options)  # type: ignore[arg-type]

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a global batch, for example of the targets of a loss that is computed outside.

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
            The norm before; a plain tensor, the same on all ranks. It costs one all-reduce for any layouts.
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
        return total.to(parts[0].dtype.to_real())

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the unsharded model: gathered, plain tensors on every rank. Collective."""
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
        return tensor.sharding.layout if isinstance(tensor, ParallelTensor) else Layout.replicated(shape)

    def extra_repr(self) -> str:
        """The ranks, then the representation of the model's class."""
        world = self.spec.mesh.world_size
        axes = " x ".join(f"{axis.name}={axis.size}" for axis in self.spec.mesh.axes)
        where = f"on {world} ranks: {axes}" if world > 1 else "on 1 rank"
        return ", ".join(filter(None, (where, super().extra_repr())))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """A copy with its own parameters and buffers, as weight averaging needs. The compiled step is shared."""
        memo.update({id(vars(self)[name]): vars(self)[name] for name in _STEP_ATTRIBUTES})
        twin: ParallelModule = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        twin._calls = dataclasses.replace(self._calls)
        twin._execute = dataclasses.replace(
            self._execute,
            parameters=TensorLookup(twin, self.spec.parameters, "_parameters", self.mesh),
            buffers=TensorLookup(twin, self.spec.buffers, "_buffers", self.mesh),
            seeds=(lambda: twin._seeds()) if self.spec.draws else None,
            check=None,
        )
        twin._tree_guard = ModuleTreeGuard(twin)
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


for _name in _ATTRIBUTES:  # class attributes, so that properties of the model's class do not take their place
    setattr(ParallelModule, _name, None)


_classes: WeakKeyDictionary[type[nn.Module], type[ParallelModule]] = WeakKeyDictionary()


def become_parallel(module: nn.Module, model: nn.Module, step: Step, **how: Any) -> ParallelModule:
    """Turn an existing module into the parallel module of `model`.

    Parameters
    ----------
    module : nn.Module
        Its class and attributes are replaced. After an error they are restored.
    model, step, **how
        As for `ParallelModule`.
    """
    kind, attributes = type(module), vars(module).copy()
    object.__setattr__(module, "__class__", parallel_class(type(model)))  # bypasses __setattr__ of both classes
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
    if model_class is nn.Module or issubclass(model_class, (ParallelModule, torch.jit.ScriptModule)):
        return ParallelModule
    if model_class in _classes:
        return _classes[model_class]

    @functools.wraps(model_class.forward)
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return ParallelModule.forward(self, *args, **kwargs)

    names = {"forward": forward, "__call__": nn.Module.__call__, "__doc__": ParallelModule.__doc__}
    made: type[ParallelModule] = types.new_class(
        f"Parallel{model_class.__name__}", (ParallelModule, model_class), exec_body=lambda space: space.update(names)
    )
    _classes[model_class] = made
    return made


def _check_replaced_parameters(module: nn.Module, *_: object) -> None:
    """Before a state dict is made, check and mark parameters that users have replaced."""
    assert isinstance(module, ParallelModule)
    module._execute.parameters()


def _shard_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, ParallelModule)
    shard_state_dict(state, prefix, module._layouts, module.mesh)
    module.unset -= {name.removeprefix(prefix) for name in state if name.startswith(prefix)}


def _single_run_backward(step: Step) -> fx.GraphModule:
    """The backward that takes no accumulated gradients."""
    assert step.backward is not None
    several = step.micro_batch_graphs is not None and step.spec.micro_batches > 1
    return step.micro_batch_graphs().backward(False, True) if several else step.backward  # type: ignore[misc]


def compare_graphs(step: Step, timeout: timedelta | None = None) -> int:
    """Raise ParallelError on all ranks if they have generated different graphs, whose collectives would not match.

    Returns
    -------
    int
        A seed that all ranks share: torch's initial seed on rank 0.
    """
    mine = step.spec.graph_hash or sha256(step.forward.code.encode()).hexdigest()
    hashes, seeds = zip(*gather_from_ranks((mine, torch.initial_seed()), timeout), strict=True)
    if len(set(hashes)) > 1:
        ranks = {value: [rank for rank, other in enumerate(hashes) if other == value] for value in hashes}
        listed = "; ".join(f"ranks {ranks[value]}: {value[:12]}" for value in ranks)
        raise ParallelError(
            f"the ranks have generated different graphs ({listed}). Compile the same model, with the same inputs' "
            "shapes, options and version of shardweave, on all ranks, or make the plan once and load it everywhere"
        )
    return int(seeds[0])


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[object]:
    if kwargs:
        raise InputError(f"this step takes its tensors by position, but the call names {', '.join(kwargs)}")
    return args


def _one_or_all(outputs: list[torch.Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def tangents_of_gradients(backward: fx.GraphModule, spec: StepSpec) -> list[frozenset[int]]:
    """For each gradient that `backward` returns, the indices of the outputs whose tangents it depends on.

    A gradient that depends on no tangent (zeros, of an embedding that looks up nothing) counts as dependent on all.

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
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = placeholders[len(placeholders) - len(differentiable) :]
    found = {node: frozenset({index}) for node, index in zip(tangents, differentiable, strict=True)}
    for node in backward.graph.nodes:
        if node not in found:
            found[node] = frozenset(index for argument in node.all_input_nodes for index in found[argument])
    every = frozenset(differentiable)
    (returned,) = backward.graph.output_node().args
    values = returned if isinstance(returned, (list, tuple)) else (returned,)
    return [found[value] or every if isinstance(value, fx.Node) else frozenset() for value in values]
