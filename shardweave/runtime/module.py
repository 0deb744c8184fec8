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
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Sized
from datetime import timedelta
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DistributedSampler

from shardweave.distributed import RuntimeMesh, collective, gather_from_ranks
from shardweave.ir import (
    PLAIN_TYPES,
    ConstantsCheck,
    InputError,
    Layout,
    ParallelError,
    StepSpec,
    ValueSpec,
    arguments_opened,
    axes_size,
    refuse_changed,
    shown_value,
)
from shardweave.ops import Seeds, all_reduced
from shardweave.runtime.bound_step import (
    STRUCTURE,
    BoundStep,
    CompiledStep,
    OtherCall,
    Recompile,
    StepBinder,
    compare_graphs,
)
from shardweave.runtime.call_checks import Batch, PredictedStep, PredictionCheck, refuse_transforms
from shardweave.runtime.compute_kernels import InductorMode, RegionCompiler
from shardweave.runtime.grad_accumulation import Accumulation, Boxed
from shardweave.runtime.inputs import (
    CallSignature,
    autocast_dtypes,
)
from shardweave.runtime.module_tree import (
    ModuleTreeGuard,
    TensorLookup,
    UnsetTensors,
    copy_module_tree,
    copy_without_values,
    gather_buffers,
    layouts_in_steps,
    meta_tensor_names,
    shard_state_dict,
    share_buffers,
    submodule,
    without_extra_state,
)
from shardweave.runtime.optimizers import note_replaced, register_hook
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import ParallelTensor, distribute, gather, untraced

_STEP_ATTRIBUTES = ("spec", "graphs", "plan", "mesh", "_coordinates", "_planned", "_step", "_tree_guard", "_binder",
                    "_recompile", "_hidden", "_accumulation", "_steps", "_known", "_passes_parts")  # fmt: skip
"""Attributes of a parallel module that belong to its compiled steps."""
_ATTRIBUTES = (*_STEP_ATTRIBUTES, "_unset", "_seeds")
"""The attributes of a parallel module that the model does not have."""


class ParallelModule(nn.Module):
    """`model` trained by a generated step: each call runs this rank's part of it.

    Its class is a subclass of the model's class. It has the model's attributes, methods and submodules (of their own
    classes), and keeps no reference to the model or its tensors. Names of this class hide those of the model; a warning
    lists them.

    Every rank of the running ``torch.distributed`` world makes one, and all ranks call it together. Parameters are
    DTensors, sharded as the plan says, under the model's own names, with rank 0's values. A model on the meta device
    makes parameters without values, which `load_state_dict` or `torch.nn.init` fill. Any ``torch.optim`` optimizer
    takes them. A call takes the global batch or this rank's part of it, or with ``batch="local"`` samples of this
    rank's own. The gradient of a loss that the model computes is that of the global batch. Losses computed outside,
    from this rank's part of the outputs, are averaged over the ranks that have other parts.

    Parameters
    ----------
    model : nn.Module
        The model with the names and the values; it is not kept.
    first : CompiledStep
        The step of the calls that the model was compiled for.
    plan : object, optional
        The plan, for the user.
    timeout : timedelta, optional
        The timeout of collectives; by default that of ``init_process_group``.
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
    recompile : Recompile, optional
        Compiles steps for calls with other inputs, or in another mode. Without it such calls are refused.
    unset : collection of str, optional
        The names of the tensors that rank 0 has no values of; by default those of `model` on the meta device.

    Raises
    ------
    LostRankError
        If a rank does not take part.
    ParallelError
        If the world has another size than the step's mesh, if ranks have compiled different graphs, or if the model
        lacks a parameter of the step.
    """

    spec: StepSpec
    graphs: dict[str, fx.GraphModule]
    _step: BoundStep
    """The step that has run last."""
    _planned: StepSpec
    """Of the first step."""

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> ParallelModule:
        made: ParallelModule = object.__new__(parallel_class(type(model)) if cls is ParallelModule else cls)
        return made

    def __init_subclass__(cls) -> None:
        """Do not call the hook of the model's class, which may register its subclasses."""

    def __init__(
        self,
        model: nn.Module,
        first: CompiledStep,
        *,
        plan: Any = None,
        timeout: timedelta | None = None,
        batch: Batch = "global",
        whole: bool = False,
        checked_calls: float = 3,
        predicted: PredictedStep | None = None,
        inductor: InductorMode = "auto",
        recompile: Recompile | None = None,
        unset: Collection[str] | None = None,
    ) -> None:
        # 1. Agree with the other ranks on the graphs. All process groups are made before anything can fail on one rank
        # alone.
        vars(self).update(vars(nn.Module()))  # the model's own __init__ is not called
        self.training = model.training
        self.spec = first.step.spec
        self._seeds = Seeds(compare_graphs(first.step, timeout))
        self.plan = plan
        devices = {tensor.device.type for tensor in model.parameters()} - {"meta"}
        self.mesh = RuntimeMesh(self.spec.mesh, devices.pop() if len(devices) == 1 else None, timeout)
        self._coordinates = self.spec.mesh.coordinates(self.mesh.rank)
        self._binder = StepBinder(
            self.mesh, RegionCompiler(inductor, self.mesh.device_type), self.spec.data_axes, batch, whole, checked_calls
        )
        graphs_of_rank = self._binder.graphs(first.step)
        # 2. Copy the module tree, with sharded parameters.
        register_hook()
        specs = (*self.spec.parameters, *self.spec.buffers)
        self._unset = UnsetTensors(meta_tensor_names(model) if unset is None else unset)
        attributes = copy_module_tree(self, model, specs, self.mesh, self._unset.names)
        note_replaced(model.parameters())
        # 3. Set up the calls.
        self._accumulation, self._recompile, self._planned = Accumulation(), recompile, self.spec
        self._passes_parts: bool | None = None
        device = torch.device(self.mesh.device_type)
        check = None if predicted is None or self.mesh.rank > 0 else PredictionCheck(predicted, device)
        self._switch(self._bound(first, graphs_of_rank, check))
        self.register_load_state_dict_pre_hook(_shard_state_dict)  # type: ignore[no-untyped-call]
        self.register_state_dict_pre_hook(_check_replaced_parameters)  # type: ignore[no-untyped-call]
        self._hidden = {name: attributes[name] for name in attributes.keys() & vars(self).keys() - {"training"}}
        """The model's attributes that this module's own hide: hooks of the model, which are part of its steps."""
        self._take_attributes(model, attributes)
        self._tree_guard = ModuleTreeGuard(self)
        self._steps: list[BoundStep] = []
        self._known: dict[CallSignature, BoundStep] = {}
        self._switch(self._add(self._step, model, self.spec.trains))

    def _take_attributes(self, model: nn.Module, attributes: dict[str, Any]) -> None:
        """Take over the model's own attributes, except those whose names this module has."""
        own = vars(self)
        for name in [name for name in attributes if name in own and ("state_dict" in name or "_backward" in name)]:
            if isinstance(own[name], dict):  # the step runs the other hooks
                own[name].update(attributes[name])
            else:
                own[name] = attributes[name]
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
            On all ranks, if ranks pass tensors of different shapes, or the plan does not fit them; in the first calls
            also if ranks pass different tensors where they should pass the same.
        IndexRangeError
            If an index is out of range, such as a token without a row in the embedding.
        ParallelError
            If a tensor of a model from the meta device has no value yet; if a Python value that is a constant of the
            step has changed in the user's model, such as an attribute that the forward reads.
        """

        def given() -> Sequence[object]:
            run = self._step.execute
            refuse_transforms(lambda: [*tree_leaves((args, kwargs)), *run.parameters(), *run.buffers()])
            return self._step.compiled.flatten(args, kwargs)

        if not all(map(_is_plain, tree_leaves((args, kwargs)))):  # made from a parameter, or objects that hold tensors
            args, kwargs = tree_map_only(ParallelTensor, ParallelTensor.full_tensor, (args, kwargs))
            args, kwargs = arguments_opened(args, kwargs)
        if self._recompile is not None:
            self._choose_step(self._recompile, args, kwargs)
        step, local = self._step, self._step.calls.local
        with torch._C.DisableTorchFunctionSubclass():  # of each attribute of a parameter that is read here
            values, inputs = step.calls(given, self._running)
            if self._passes_parts is None:
                self._passes_parts = step.calls.passes_parts
            outputs = step.execute(inputs, values)
        if local is not None:
            return step.compiled.unflatten(local.returned(outputs))
        pairs = zip(outputs, self.spec.outputs, strict=True)
        return step.compiled.unflatten([self._as_user_output(value, spec) for value, spec in pairs])

    def _running(self) -> Mapping[str, bool]:
        """The mode of the next call, which all ranks must share; ParallelError if the step cannot run."""
        if self._unset.names:
            self._unset.check(self, self.spec)
        self._tree_guard.warn_of_global_hooks()
        if self._recompile is None:
            self._tree_guard.check()
            refuse_changed(self._step.changed(self))
        if (constants := self._steps[0].constants) is not None:
            constants.check_model(self)
        return self._step.execute.running()

    @property
    def unset(self) -> set[str]:
        """The names of tensors without values: see `initialise`, `load_weights`, `load_state_dict`, `to_empty`.

        One that is written, as `torch.nn.init` writes it, has a value from then on.
        """
        return self._unset.current(self)

    @torch.no_grad()
    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Take the values of all parameters and buffers away, to write one's own, as `nn.Module.to_empty` does.

        A parameter that is not written before the next call is refused. A buffer is zero then, with a warning.
        """
        if device is not None and torch.device(device).type != self.mesh.device_type:
            raise ParallelError(
                f"to_empty(device={str(device)!r}) would move the module, whose step was compiled for "
                f"{self.mesh.device_type!r}: give that device, or compile the model on the other one"
            )
        self._unset.empty(self, self.mesh.device_type, recurse)
        return self

    # -- steps for other inputs

    def _modes(self) -> tuple[Hashable, ...]:
        structure, *modes = self._tree_guard.modes()
        return self.training, structure, autocast_dtypes(), torch.get_default_dtype(), *modes

    def _choose_step(self, recompile: Recompile, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Switch to the step of a call. If there is none yet, compile it, which is collective."""
        # 1. Find a step that is compiled. If calls pass the global batch, one with the size of a rank's part of it may
        # be a smaller global batch: it is if all ranks pass the same.
        caught: Exception | None = None
        step: BoundStep | None = None
        values: list[torch.Tensor] = []
        call = ""
        try:
            modes, now = self._modes(), self._step
            # One whose structure has changed, or that lacks a parameter now, tells nothing of what is trained.
            whole = now.structure == modes[STRUCTURE] and not now.lacks()
            with torch._C.DisableTorchFunctionSubclass():
                parameters = now.execute.parameters() if whole else [*self.parameters()]
                wanted = CallSignature.of(recompile.signature, args, kwargs, modes, parameters)
                trains, step = wanted.trains, self._known.get(wanted)
                has_parameters = step is not None and (whole if step is now else not step.lacks())
                fits = step is not None and has_parameters and step.fits(self, trains)
            if not fits:
                call = wanted.text(recompile.signature, args, kwargs)
                step, values = self._accepting_step(wanted, args, kwargs)
        except Exception as error:  # the other ranks must be told, whatever the error is
            caught = error
        is_ambiguous = step is not None and self._passes_parts is False and step.calls.are_parts(values)
        if is_ambiguous and self._step.calls.are_equal(call, values):
            step, _ = self._accepting_step(wanted, args, kwargs, whole=True)
        if step is not None:
            self._use(step, wanted)
            return
        # 2. If there is none, check the call, and agree with the other ranks that all of them compile.
        is_part = None if caught is not None else self._passes_known_part(args, kwargs, call)
        try:
            if caught is None:
                refuse_transforms(lambda: tree_leaves((args, kwargs)))
                parts = self.data_world_size if is_part or (is_part is None and self._passes_parts) else 1
                call += f" (one of {parts} parts)" if parts > 1 else ""
                alike = [step for step in self._steps if step.structure == modes[STRUCTURE]]
                changed = {each.shown: each for step in alike for each in step.changed(self)}
                constants = "".join(f" and {name} = {shown_value(each.now)}" for name, each in changed.items())
                unfrozen = dict.fromkeys(name for step in alike if not step.lacks() for name in step.unfrozen())
                constants += f" and gradients of {', '.join(unfrozen)}" if trains and unfrozen else ""
                changes = self._tree_guard.changes
                constants += f" and a model in which {changes}" if changes else ""
                call += constants
                example = recompile.example(self._steps, call, args, kwargs, self.mesh.device_type)
                twin = self._without_values(trains)
        except Exception as error:  # as above
            caught = error
        self._step.calls.agree_to_compile(call, caught)
        # 3. Compile it from the plan.
        if self.mesh.rank == 0:
            recompile.warn(self._steps, self._step.calls.call, call, is_part is None, changed.values())
        compiled = recompile.compile(OtherCall(twin, example, parts, trains, layouts_in_steps(self)))
        compare_graphs(compiled.step, self.mesh.timeout)
        step = self._add_step(dataclasses.replace(compiled, call=compiled.call + constants), twin, trains, constants)
        self._use(step, wanted)

    def _accepting_step(
        self, wanted: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False
    ) -> tuple[BoundStep | None, list[torch.Tensor]]:
        """The step that computes a call, and the tensors of the call; None if there is no such step yet.

        If `whole`, the call has the global batch.
        """
        for step in self._steps:
            values = step.accepts(self, wanted, args, kwargs)
            if values is not None and not (whole and step.calls.are_parts(values)):
                return step, values
        return None, []

    def _passes_known_part(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: str) -> bool | None:
        """Whether a call that is to be compiled passes a part of the batch of a step that is there.

        None if its inputs have the sizes of no such step. May be collective.
        """
        for step in self._steps:
            with contextlib.suppress(InputError), torch.no_grad():  # whatever inputs require gradients
                values = step.checked(args, kwargs)
                is_part = step.calls.are_parts(values)
                if is_part and not self._passes_parts and self._step.calls.are_equal(call, values):
                    return None  # a smaller global batch
                return is_part
        return None

    def _use(self, step: BoundStep, wanted: CallSignature) -> None:
        self._known[wanted] = step
        if self._step is not step:
            self._step.execute.release()
            self._switch(step)

    def _switch(self, step: BoundStep) -> None:
        graphs = dict(step.compiled.graphs or {"forward": step.compiled.step.forward})
        vars(self).update(_step=step, spec=step.spec, graphs=graphs)

    def _without_values(self, trains: bool) -> nn.Module:
        """The model as it is now, with parameters on the meta device; if it `trains`, they require gradients."""
        kind = type(self).__bases__[-1]
        if kind is nn.Module:
            raise InputError("the class of this model is not known: call it with inputs as it was compiled for")
        own = {name: value for name, value in vars(self).items() if name not in _ATTRIBUTES}
        specs = [step.spec for step in self._steps if step.trains]
        known = {each.name: each.trainable for spec in specs for each in spec.parameters}
        named = self.named_parameters()
        trained = [name for name, each in named if trains and (each.requires_grad or known.get(name))]
        return copy_without_values(self, kind, {**own, **self._hidden}, trained)

    def _add_step(self, compiled: CompiledStep, model: nn.Module, trains: bool, told: str) -> BoundStep:
        """Bind a step for other calls. Collective."""
        spec = compiled.step.spec
        known = {each.name for step in self._steps for each in (*step.spec.parameters, *step.spec.buffers)}
        gather_buffers(self, [each for each in spec.buffers if each.name not in known])
        layouts = layouts_in_steps(self)
        for each in (*spec.parameters, *spec.buffers):
            layout = layouts[each.name]
            if layout != each.layout:
                raise InputError(
                    f"a step for these inputs keeps {each.name!r} in the layout {each.layout}, but the parameters lie "
                    f"where the first step has them, {layout}: compile the model with inputs that use the parameters "
                    "in the same way"
                )
        share_buffers(self, spec.buffers, self.mesh)
        return self._add(self._bound(compiled, self._binder.graphs(compiled.step)), model, trains, told)

    def _bound(
        self, compiled: CompiledStep, graphs: tuple[Boxed, Boxed | None], check: PredictionCheck | None = None
    ) -> BoundStep:
        return self._binder.bound(self, compiled, graphs, lambda: self._seeds(), self._accumulation, check)

    def _add(self, bound: BoundStep, model: nn.Module, trains: bool, told: str = "") -> BoundStep:
        reads = bound.compiled.reads
        constants = None if reads is None else ConstantsCheck(reads, model, self)
        step = dataclasses.replace(bound, constants=constants, modes=self._modes(), trains=trains, told=told)
        self._steps.append(step)
        return step

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
        shared = self._accumulation
        before, shared.syncs = shared.syncs, False
        try:
            yield
        finally:
            shared.syncs = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those accumulated under `no_sync`, which an optimizer's ``zero_grad`` keeps."""
        super().zero_grad(set_to_none)
        self._step.execute.drop_accumulated()

    def _as_user_output(self, value: torch.Tensor, spec: ValueSpec) -> torch.Tensor:
        """An output as a user sees it: this rank's part of the batch; a DTensor if other axes shard it."""
        if spec.differentiable or set(spec.layout.shard_axes) <= set(self.spec.data_axes):
            return value
        return distribute(value, spec.layout, self.mesh)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set the mode, as of any module. The first call in another mode compiles a step for it, from the same plan."""
        if self._recompile is not None:
            super().train(mode)
        elif mode != self.training:
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
        return self._parts(self._planned)[0]

    @property
    def data_rank(self) -> int:
        """The index of this rank's part, in ``[0, data_world_size)``."""
        return self._parts(self._planned)[1]

    def _parts(self, spec: StepSpec) -> tuple[int, int]:
        """The number of parts of a step's batch, and the index of this rank's part."""
        if self._step.calls.local is not None:
            return self.spec.mesh.world_size, self.mesh.rank
        index = 0
        for axis in spec.data_axes:
            index = index * axis.size + self._coordinates[axis.name]
        return axes_size(spec.data_axes), index

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
            If the tensor's first dimension does not divide by the number of parts of the last call's batch.
        """
        (parts, mine), steps = self._parts(self.spec), self.spec.micro_batches * self.spec.sub_batches
        if self._step.calls.local is not None:  # a rank's own samples are one piece, however many steps compute them
            steps = 1
        if parts > 1 and (tensor.ndim == 0 or tensor.shape[0] % (steps * parts)):
            each = f" in each of its {steps} micro- or sub-batches" if steps > 1 else ""
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)} does not divide into the {parts} parts of a batch{each}"
            )
        if parts == 1:
            return tensor
        return torch.cat([step.chunk(parts)[mine] for step in tensor.chunk(steps)])

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
    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the unsharded model: gathered, plain tensors on every rank. Collective.

        What modules return from ``get_extra_state`` is this rank's, as in any state dict.
        """
        whole: dict[torch.Tensor, torch.Tensor] = {}
        state = self.state_dict(keep_vars=True)
        tensors = without_extra_state(state)
        for name, tensor in tensors.items():
            if tensor not in whole:
                whole[tensor] = gather(tensor, self.layout_of(name, tensor.shape), self.mesh, name)
        return {**state, **{name: whole[tensor] for name, tensor in tensors.items()}}

    def layout_of(self, name: str, shape: Sequence[int]) -> Layout:
        """The layout of the tensor `name` with the global `shape`. Plain tensors are replicated."""
        path, _, leaf = name.rpartition(".")
        module = submodule(self, path)
        tensor = module._parameters.get(leaf, module._buffers.get(leaf))
        return tensor.sharding.layout if isinstance(tensor, ParallelTensor) else Layout.replicated(shape)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> tuple[str, ...]:
        """What DistributedDataParallel asks of a module that it wraps; ParallelError, as the step reduces gradients."""
        if self.spec.mesh.world_size > 1:
            raise ParallelError(
                "DistributedDataParallel cannot wrap a parallel module, which reduces its gradients itself: pass the "
                'parallel module on without it. If each rank reads samples of its own, compile with batch="local". Of '
                "Accelerate, prepare the optimizer and the loaders, not the model (docs/parallel-module.md)"
            )
        return ()

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
        twin._accumulation, twin._known, twin._tree_guard = Accumulation(), {}, ModuleTreeGuard(twin)
        # Steps for the module tree of now, which is the twin's first structure
        structure, current = self._tree_guard.structure(), self._step
        alike = [step for step in self._steps if step.structure == structure]
        if current not in alike:
            raise ParallelError(
                f"{self._tree_guard.changes} since the last call, so that this module has no step that a copy could "
                "share: call it once before it is copied"
            )
        twin._steps = [twin._of_twin(step) for step in alike]
        twin._switch(twin._steps[alike.index(current)])
        return twin

    def _of_twin(self, step: BoundStep) -> BoundStep:
        """A step of the module that this one is a copy of, with the tensors of this one."""
        execute = dataclasses.replace(
            step.execute,
            parameters=TensorLookup(self, step.spec.parameters, self.mesh),
            buffers=TensorLookup(self, step.spec.buffers, self.mesh),
            seeds=(lambda: self._seeds()) if step.spec.draws else None,
            check=None,
            shared=self._accumulation,
        )
        modes = (*step.modes[:STRUCTURE], self._tree_guard.structure(), *step.modes[STRUCTURE + 1 :])
        return dataclasses.replace(step, execute=execute, calls=dataclasses.replace(step.calls), modes=modes)

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


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)) and not isinstance(leaf, ParallelTensor)


_classes: WeakKeyDictionary[type[nn.Module], type[ParallelModule]] = WeakKeyDictionary()


def become_parallel(module: nn.Module, model: nn.Module, first: CompiledStep, **how: Any) -> ParallelModule:
    """Turn an existing module into the parallel module of `model`.

    Parameters
    ----------
    module : nn.Module
        Its class and attributes are replaced. After an error they are restored.
    model, first, **how
        As for `ParallelModule`.
    """
    kind, attributes = type(module), vars(module).copy()
    object.__setattr__(module, "__class__", parallel_class(type(model)))  # bypasses __setattr__ of both classes
    made = cast(ParallelModule, module)
    vars(made).clear()
    try:
        ParallelModule.__init__(made, model, first, **how)
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
    if callable(of_model := getattr(model_class, "save_pretrained", None)):
        names["save_pretrained"] = functools.wraps(of_model)(_save_pretrained)
    made: type[ParallelModule] = types.new_class(
        f"Parallel{model_class.__name__}", (ParallelModule, model_class), exec_body=lambda space: space.update(names)
    )
    _classes[model_class] = made
    return made


def _save_pretrained(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
    """Save the model as its class does (transformers, diffusers): rank 0 writes the files of one device. Collective."""
    whole = self.full_state_dict()
    args, kwargs = tree_map_only(ParallelTensor, ParallelTensor.full_tensor, (args, kwargs))  # a given state dict
    if self.mesh.rank > 0:
        return None
    model: Any = self._without_values(trains=True)
    model.load_state_dict(whole, assign=True)
    return model.save_pretrained(*args, **kwargs)


def _check_replaced_parameters(module: nn.Module, *_: object) -> None:
    """Before a state dict is made, check and mark parameters that users have replaced."""
    assert isinstance(module, ParallelModule)
    module._step.execute.parameters()


def _shard_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, ParallelModule)
    shard_state_dict(state, prefix, module, module.mesh)
    module._unset.names -= {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
