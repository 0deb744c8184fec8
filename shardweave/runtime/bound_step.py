"""A generated step bound to this rank, and what says for which calls it is.

A parallel module has a step for each kind of call: inputs of other sizes, another mode, other Python values that the
model reads. `BoundStep.accepts` tells whether a step computes a call. `Recompile` makes a step for calls that none of
them computes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardweave.distributed import RuntimeMesh, gather_from_ranks
from shardweave.ir import (
    Axis,
    ChangedConstant,
    ConstantsCheck,
    InputError,
    Layout,
    ParallelError,
    Reads,
    StepSpec,
    ValueSpec,
    canonical_arguments,
    dtype_name,
    leaf_names,
    refuse_layout,
    shown_value,
)
from shardweave.ops import IndexChecks
from shardweave.passes import Step, recompute_fusible
from shardweave.runtime.call_checks import Agreement, Batch, CallChecks, PredictionCheck, group_of_calls
from shardweave.runtime.compute_kernels import RegionCompiler
from shardweave.runtime.execute import Executor, boxed
from shardweave.runtime.grad_accumulation import Accumulation, Boxed, MicroBatchRunner
from shardweave.runtime.inputs import CallSignature, InputGradients, LocalBatch, check_tensor, wants_gradient
from shardweave.runtime.module_tree import TensorLookup

Flatten = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[object]]
Unflatten = Callable[[list[torch.Tensor]], Any]
STRUCTURE = 1
"""Where the modes of a step have the structure of the module tree."""


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[object]:
    if kwargs:
        raise InputError(f"this step takes its tensors by position, but the call names {', '.join(kwargs)}")
    return args


def _one_or_all(outputs: list[torch.Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@dataclass(frozen=True)
class CompiledStep:
    """A generated step, and what its calls need.

    Parameters
    ----------
    step : Step
        The generated graphs and their calling convention.
    flatten : callable
        Maps a call's ``(args, kwargs)`` to the tensors of ``spec.inputs``; by default `args` are these tensors.
    unflatten : callable
        Maps the outputs to the result of a call; by default the one output, or the tuple of all.
    graphs : mapping, optional
        The graph after each stage, for the user.
    reads : Reads, optional
        The Python values of the model that are constants of the step. A call after a change of one takes another step.
    checks : IndexChecks, optional
        The ranges of indices among the inputs.
    call : str
        The call that the step is for, in words.
    """

    step: Step
    flatten: Flatten = _positional
    unflatten: Unflatten = _one_or_all
    graphs: Mapping[str, fx.GraphModule] | None = None
    reads: Reads | None = None
    checks: IndexChecks | None = None
    call: str = ""


@dataclass(frozen=True)
class OtherCall:
    """A call that no compiled step computes.

    Parameters
    ----------
    model : nn.Module
        The model as it is now, with meta tensors.
    example_inputs : tuple
        ``(args, kwargs)`` of the call.
    parts : int
        The number of parts of the global batch of which these are one; 1 if they are the global batch.
    trains : bool
        Whether the step has a backward.
    layouts : mapping of str to Layout
        Where the parameters of `model` lie.
    """

    model: nn.Module
    example_inputs: tuple[Any, ...]
    parts: int
    trains: bool
    layouts: Mapping[str, Layout]


@dataclass(frozen=True)
class Recompile:
    """Compiles the steps of calls with other inputs, or in another mode.

    Parameters
    ----------
    signature : inspect.Signature
        Of the model's forward.
    compile : callable
        Makes the step of a call. Collective.
    limit : int
        The most steps of one module.
    """

    signature: inspect.Signature
    compile: Callable[[OtherCall], CompiledStep]
    limit: int

    def example(
        self, steps: Sequence[BoundStep], call: str, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
    ) -> tuple[Any, ...]:
        """The arguments of a call that is to be compiled, without their history.

        Raises
        ------
        InputError
            If no step takes them, or there are as many `steps` as the limit allows.
        """
        leaves, spec = tree_flatten(canonical_arguments(self.signature, args, kwargs))
        names = leaf_names(self.signature, args, kwargs)
        known = {each.name: each for step in steps for each in step.spec.inputs}
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                refuse_layout(name, leaf)
                dtype = known[name].dtype if name in known else dtype_name(leaf.dtype)
                check_tensor(leaf, ValueSpec(name, Layout.replicated(leaf.shape), dtype, True), device_type)
                leaves[index] = leaf.detach().requires_grad_(wants_gradient(leaf))
        if len(steps) >= self.limit:
            calls = "; ".join(step.calls.call for step in steps[:4])
            raise InputError(
                f"a call with {call} needs a step of its own, but {len(steps)} are compiled already, the most "
                f"that Options(recompile_limit={self.limit}) allows (for {calls}, ...). Pad the inputs to a few "
                "sizes (drop_last=True leaves out a smaller last batch), make a Python value that changes from call to "
                "call a tensor, as an input or a buffer, or set a higher limit"
            )
        found: tuple[Any, ...] = tree_unflatten(leaves, spec)
        return found

    def warn(
        self, steps: Sequence[BoundStep], now: str, call: str, is_other_size: bool, changed: Collection[ChangedConstant]
    ) -> None:
        """Warn once that inputs of other sizes compile a step each, and once that changed Python values do.

        `now` is the call of the step that ran last.
        """
        inputs = {step.calls.call.split(" in ")[0] for step in steps}
        reason = way_out = ""
        if changed and not any(step.told for step in steps):
            told = [f"{each.shown} is {shown_value(each.now)} and was {shown_value(each.before)}" for each in changed]
            reason, way_out = f"as {', '.join(told)}. Each value", "pass what changes often as a tensor, or in a buffer"
        elif is_other_size and len(inputs) == 1 and call.split(" in ")[0] not in inputs:
            reason = f"for {call}, as it was for {now}. Each size of the inputs"
            way_out = "pad the inputs to a few sizes, or leave out a smaller last batch (drop_last=True)"
        if reason:
            warnings.warn(
                f"the model is compiled again, {reason} takes a step of its own, and a module has at most "
                f"{self.limit} (Options(recompile_limit=...)): {way_out}, to compile less",
                stacklevel=9,
            )


@dataclass(frozen=True, eq=False)
class BoundStep:
    """A step bound to this rank, and the mode that it is for.

    Parameters
    ----------
    compiled : CompiledStep
    execute : Executor
    calls : CallChecks
    constants : ConstantsCheck, optional
        The Python values that are constants of the step.
    modes : tuple of Hashable
        As of `CallSignature`.
    trains : bool
        Whether it is for calls that want gradients.
    told : str
        The Python values by which its call differs from those of earlier steps, in words.
    """

    compiled: CompiledStep
    execute: Executor
    calls: CallChecks
    constants: ConstantsCheck | None = None
    modes: tuple[Hashable, ...] = ()
    trains: bool = True
    told: str = ""

    @property
    def spec(self) -> StepSpec:
        return self.compiled.step.spec

    @property
    def structure(self) -> Hashable:
        """The structure of the module tree that the step is for: see `ModuleTreeGuard`."""
        return self.modes[STRUCTURE]

    def changed(self, module: nn.Module) -> list[ChangedConstant]:
        """The constants of the step that have another value in `module` now."""
        return [] if self.constants is None else self.constants.changed(module)

    def lacks(self) -> bool:
        """Whether a parameter or buffer of the step is gone."""
        return self.execute.parameters.lacks() or self.execute.buffers.lacks()

    def unfrozen(self) -> list[str]:
        """The parameters that are to be trained now, and that the step has no gradients for."""
        return self.execute.unfrozen(self.execute.parameters()) if self.trains else []

    def fits(self, module: nn.Module, trains: bool) -> bool:
        """Whether a step has the Python values, and if the call `trains`, the trained parameters of now."""
        return not self.changed(module) and not (trains and self.unfrozen())

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call; InputError if the step does not take them."""
        return self.calls.checked(self.compiled.flatten(args, kwargs))

    def accepts(
        self, module: nn.Module, wanted: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor] | None:
        """The tensors of a call that the step computes; None if it does not.

        A step with a backward computes calls without gradients too. One with gradients of inputs does not compute calls
        with other gradients, which would take longer than they need.
        """
        if self.modes != wanted.modes or (wanted.trains and not self.trains) or self.lacks():
            return None
        try:
            values = self.checked(args, kwargs)
        except InputError:
            return None
        asked = tuple(index for index, value in enumerate(values) if wants_gradient(value))
        has_gradients = not wanted.trains or asked == self.spec.differentiable_inputs
        return values if has_gradients and self.fits(module, wanted.trains) else None


@dataclass(frozen=True)
class StepBinder:
    """Binds the steps of one module to this rank.

    Parameters
    ----------
    mesh : RuntimeMesh
    regions : RegionCompiler
    data_axes : tuple of Axis
        Those of the first step.
    batch, whole, checked_calls
        As for `ParallelModule`.
    """

    mesh: RuntimeMesh
    regions: RegionCompiler
    data_axes: tuple[Axis, ...]
    batch: Batch
    whole: bool
    checked_calls: float
    agreement: Agreement = field(default_factory=Agreement, init=False)

    def graphs(self, step: Step) -> tuple[Boxed, Boxed | None]:
        """The forward and the backward of a step, bound to process groups. Collective."""
        forward, backward = step.forward, step.backward
        if backward is not None and self.regions.is_on:
            num_results = len(step.spec.mutated) + len(step.spec.outputs)
            forward, backward = recompute_fusible(forward, backward, num_results)
        return self.graph(forward, self.agreement), None if backward is None else self.graph(backward)

    def graph(self, graph: fx.GraphModule, agreement: Agreement | None = None) -> Boxed:
        """One graph, bound to process groups. Collective."""
        return boxed(graph, self.regions(graph, self.mesh.bind_graph(graph.graph)), self.mesh, agreement)

    def bound(
        self,
        module: nn.Module,
        compiled: CompiledStep,
        graphs: tuple[Boxed, Boxed | None],
        seeds: Callable[[], int],
        shared: Accumulation,
        check: PredictionCheck | None = None,
    ) -> BoundStep:
        """A step of `module` whose bound forward and backward are `graphs`. Collective."""
        step, spec, mesh = compiled.step, compiled.step.spec, self.mesh
        make = step.micro_batch_graphs
        local = LocalBatch(spec, mesh, self.whole) if self.batch == "local" and mesh.mesh.axes else None
        execute = Executor(
            spec,
            mesh.coordinates,
            *graphs,
            TensorLookup(module, spec.parameters, mesh),
            TensorLookup(module, spec.buffers, mesh),
            sources_of_gradients(step),
            InputGradients(spec, mesh, local),
            seeds if spec.draws else None,
            None if make is None else lambda sums: MicroBatchRunner(make(), spec, mesh.coordinates, self.graph, sums),
            self.agreement,
            check,
            shared,
        )
        calls = CallChecks(
            spec,
            mesh,
            group_of_calls(mesh),
            local,
            self.checked_calls,
            compiled.checks,
            compiled.call,
            self.agreement,
            takes_parts=spec.data_axes == self.data_axes,
        )
        return BoundStep(compiled, execute, calls)


def sources_of_gradients(step: Step) -> Sequence[frozenset[int]]:
    """For each gradient of a parameter, the outputs that it depends on: see `tangents_of_gradients`."""
    backward = step.backward
    if backward is None:
        return ()
    if step.micro_batch_graphs is not None and step.spec.micro_batches > 1:  # takes no accumulated gradients
        backward = step.micro_batch_graphs().backward(False, True)
    return tangents_of_gradients(backward, step.spec)[len(step.spec.differentiable_inputs) :]


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
