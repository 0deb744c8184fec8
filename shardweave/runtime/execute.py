"""Runs a generated step: local tensors through the forward graph, and autograd's tangents through the backward graph.

For autograd a call of the step is one node, which takes the parameters and returns their gradients.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import fx

from shardweave.distributed import RuntimeMesh, group_of, is_collective, lost_rank, raise_if_rank_lost
from shardweave.ir import META, LostRankError, ParallelError, StepSpec, axes_size
from shardweave.runtime.call_checks import Agreement, PredictionCheck, check_backward
from shardweave.runtime.grad_accumulation import (
    Accumulation,
    Boxed,
    Gradients,
    MicroBatchRunner,
    join_steps,
    local_parameters,
    split_steps,
)
from shardweave.runtime.inputs import InputGradients, wants_gradient
from shardweave.runtime.module_tree import TensorLookup
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import in_layout_of, untraced


def boxed(
    constants: fx.GraphModule, graph: fx.Graph, mesh: RuntimeMesh | None = None, agreement: Agreement | None = None
) -> Boxed:
    """The compiled code of `graph`, with its arguments in one list. It takes `graph` over.

    - If a collective loses a rank, this call and all later ones raise a LostRankError that names the rank.
    - If this rank alone fails, it raises its error. The other ranks, which would wait for it, raise a ParallelError
      with the rank and the cause, in this call and in all later ones.
    - If all ranks fail at the same op, each raises its own error, and later calls run.

    Parameters
    ----------
    constants : GraphModule
        Holds the tensors of `graph`.
    graph : Graph
        The result of `RuntimeMesh.bound`.
    mesh : RuntimeMesh, optional
        The mesh that `graph` is bound to. Without it, other ranks are not told of a failure.
    agreement : Agreement, optional
        Called before the first collective of `graph`, or at its end. Its errors are those of all ranks.

    Examples
    --------
    >>> double = fx.symbolic_trace(lambda x: [x + x])
    >>> arguments = [torch.ones(())]
    >>> boxed(double, double.graph)(arguments), arguments
    ([tensor(2.)], [])
    """
    if agreement is not None:
        with graph.inserting_before(next(filter(is_collective, graph.nodes), graph.output_node())):
            graph.call_function(agreement)
    generator = copy.copy(graph._codegen)
    generator.gen_fn_def = MethodType(_boxed_definition, generator)  # type: ignore[method-assign]
    graph.set_codegen(generator)
    module = fx.GraphModule(constants, graph)
    run: Boxed = module.forward
    device = "cpu" if mesh is None else mesh.device_type

    def guarded(arguments: list[Any]) -> Sequence[Any]:
        if torch.is_autocast_enabled(device):  # the graph has the casts of its capture
            with torch.autocast(device, enabled=False):
                return guarded(arguments)
        raise_if_rank_lost()
        if mesh is not None and mesh.closed is not None:
            raise ParallelError(
                f"this step cannot run any more, as an earlier call of it failed on {mesh.closed}. Compile the model "
                "again on all ranks, or start the job again from its last checkpoint"
            )
        try:
            return run(arguments)
        except Exception as error:  # the other ranks must not wait for this one, whatever the error is
            node = _raised_at(error, module.graph)
            if node is not None and node.target is agreement:
                raise
            if agreement is not None:
                agreement()  # the other ranks wait for it; if they refuse the call, this error does not matter
            found = _failure(error, node, mesh)
            if mesh is not None and not isinstance(found, LostRankError):
                all_failed = found is error and node is not None and mesh.all_failed_at(node.name)
                _wait_for_started(error, module.graph)
                if not all_failed:
                    mesh.close(error)
            if found is error:
                raise
            raise found from error

    return guarded


def _failure(error: Exception, node: fx.Node | None, mesh: RuntimeMesh | None) -> Exception:
    """The exception to raise for an `error` at a node: itself, or one that names the rank that caused it."""
    if not isinstance(error, RuntimeError) or node is None or not is_collective(node):
        return error
    if mesh is not None and (elsewhere := mesh.failure()) is not None:
        return ParallelError(
            f"rank {mesh.rank} cannot finish this step, as it failed on {elsewhere}. Mend that; then compile "
            "the model again on all ranks, or start the job again from its last checkpoint"
        )
    return _lost(error, node) or error


def _lost(error: RuntimeError, node: fx.Node) -> LostRankError | None:
    """The LostRankError of the collective `node`; None if something else went wrong."""
    start = node.all_input_nodes[0] if node.target is _WAIT else node
    group = group_of(start) if start.op == "call_function" else None
    what = start.meta[META].collective if META in start.meta else None
    if what is None:
        return lost_rank(error, f"the collective {start.name}", group)
    where = "backward" if start.meta[META].backward else "forward"
    doing = f"the {what.kind} of {what.owner} in the {where}" + (f" ({what.reason})" if what.reason else "")
    return lost_rank(error, doing, group, f"axes {', '.join(axis.name for axis in what.axes)}")


def _wait_for_started(error: Exception, graph: fx.Graph) -> None:
    """Wait for the collectives that were running when `graph` raised `error`.

    The other ranks start them too. Until then they keep the connections open that `RuntimeMesh.close` closes.
    """
    started = {node.name for node in graph.nodes if is_collective(node) and node.target is not _WAIT}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in started & frame.f_locals.keys():
            value = frame.f_locals[name]
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    with contextlib.suppress(RuntimeError):  # another rank failed before it started this one
                        _WAIT(tensor)


def _raised_at(error: Exception, graph: fx.Graph) -> fx.Node | None:
    """The node whose line of generated code raised `error`."""
    places = traceback.walk_tb(error.__traceback__)
    lines = [linecache.getline(frame.f_code.co_filename, number) for frame, number in places]
    names = [line.split("=")[0].split(":")[0].strip() for line in lines]
    nodes = {node.name: node for node in graph.nodes}
    return next((nodes[name] for name in reversed(names) if name in nodes), None)


def _memory(tensor: torch.Tensor) -> int:
    """The storage of a tensor."""
    return int(tensor.untyped_storage()._cdata)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _boxed_definition(_: fx.graph.CodeGen, free_vars: list[str], annotation: str, **__: object) -> str:
    """The head of a function that takes its arguments in one list, and empties it.

    torch's own `_BoxedCodeGen` keeps memory longer: the step of `tests/compiler/test_precision_memory.py` held 7.6
    instead of 5.9 bytes a parameter (torch 2.13, CPU).
    """
    names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
    unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
    return f"def forward(self, boxed){annotation}:{unpack}\n    boxed.clear()"


@dataclass
class Executor:
    """A step bound to this rank: its graphs with real process groups, its parameters and buffers."""

    spec: StepSpec
    coordinates: tuple[int, ...]
    """The first arguments of both graphs."""
    forward: Boxed
    backward: Boxed | None
    """None for a step that trains nothing."""
    parameters: TensorLookup
    """Returns the current tensors of `spec.parameters`, in order."""
    buffers: TensorLookup
    """Returns the current tensors of `spec.buffers`, in order."""
    sources: Sequence[frozenset[int]]
    """For each gradient of a parameter, the outputs that it depends on; see `tangents_of_gradients`."""
    input_gradients: InputGradients
    """Brings gradients of inputs to the ranks that passed them."""
    seeds: Callable[[], int] | None = None
    """Returns the seed of a call, the same on all ranks; None for a step that draws no random numbers."""
    make_runner: Callable[[Accumulation], MicroBatchRunner] | None = None
    """Makes the `MicroBatchRunner` of a step that accumulates gradients."""
    agreement: Agreement = field(default_factory=Agreement)
    """What the ranks agree on while a call begins. `forward` waits for it before its first collective."""
    check: PredictionCheck | None = None
    """Compares the first training steps with what the plan predicts."""
    shared: Accumulation = field(default_factory=Accumulation)
    """What calls accumulate; the steps of a module for other inputs share it."""
    _runner: MicroBatchRunner | None = field(default=None, init=False)
    _tangent: torch.Tensor | None = field(default=None, init=False)

    @property
    def syncs(self) -> bool:
        """Whether a backward reduces its gradients, or accumulates them, as under `ParallelModule.no_sync`."""
        return self.shared.syncs

    @property
    def runner(self) -> MicroBatchRunner:
        """The graphs for gradient accumulation, made at their first use."""
        if self._runner is None:
            if self.make_runner is None:
                raise ParallelError("this step has no graphs for gradient accumulation: compile the model again")
            self._runner = self.make_runner(self.shared)
        return self._runner

    def drop_accumulated(self) -> None:
        """Forget accumulated gradients that are not reduced yet."""
        self.shared.drop()
        self.release()

    def release(self) -> None:
        """Free the parameters that calls under `ParallelModule.no_sync` keep gathered."""
        if self._runner is not None:
            self._runner.release()

    def tangent(self) -> torch.Tensor:
        """The expected tangent of the loss: that of the last call, 1 at first."""
        if self._tangent is None:
            (loss,) = [output for output in self.spec.outputs if output.differentiable]
            device = local_tensor(self.parameters()[0]).device
            self._tangent = torch.ones((), dtype=getattr(torch, loss.dtype), device=device)
        return self._tangent

    def expect(self, tangent: torch.Tensor) -> None:
        """Expect this tangent of the loss in the next call, unless it is zero or not finite."""
        usable = torch.isfinite(tangent) & (tangent != 0)
        self._tangent = torch.where(usable, tangent, self.tangent()).detach()

    @property
    def accumulates(self) -> bool:
        """Whether there are accumulated gradients that are not reduced yet."""
        return self.shared.sums is not None

    @property
    def _is_whole_step(self) -> bool:
        """Whether the gradients are those of this call alone, and reduced: as the plan predicts it."""
        return self.syncs and not self.accumulates

    def backward_ended(self) -> None:
        """The gradients of a call are computed."""
        if self.check is not None and self._is_whole_step:
            self.check.backward_ends()

    def _trains(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self.backward is not None and any(map(wants_gradient, tensors))

    def unfrozen(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Which of the current `parameters` require a gradient, and were frozen when the step was compiled."""
        pairs = zip(self.spec.parameters, parameters, strict=True)
        return [spec.name for spec, parameter in pairs if parameter.requires_grad and not spec.trainable]

    def running(self) -> dict[str, bool]:
        """The mode of the next call, in words. All ranks need the same mode, or their collectives would not match.

        Raises
        ------
        ParallelError
            If a parameter requires a gradient that the step has none for.
        """
        parameters = self.parameters()
        trains = self._trains(parameters)
        if trains and (unfrozen := self.unfrozen(parameters)):
            raise ParallelError(
                f"{', '.join(unfrozen[:5])}: {len(unfrozen)} parameters require a gradient that were frozen when the "
                "step was compiled, so that it has no gradient for them. Compile the model with them unfrozen, and "
                "freeze them by requires_grad_(False) until they are to be trained; or keep them frozen"
            )
        return {
            "with gradients": trains,
            "outside of no_sync()": self.syncs,
            "after others under no_sync()": self.accumulates,
        }

    def __call__(self, inputs: list[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The step's outputs, from the local parts of its inputs, which the user has passed as `given`."""
        parameters = self.parameters()
        self._change_parameters(parameters)
        wanted = [given[index] for index in self.spec.differentiable_inputs]
        trains = self._trains([*parameters, *wanted])
        several = self.spec.micro_batches > 1
        if not trains:
            with torch.no_grad():
                run = self.run_micro_batches if several else self.run
                return list(run(parameters, inputs)[0])
        if self.check is not None and self._is_whole_step:
            self.check.forward_begins()
        function = _MicroBatchesFunction if several else _StepFunction
        passed = [_Passed(tuple(value.shape), _averaging_ranks(value)) for value in wanted]
        trained = self.trained(parameters)
        return list(function.apply(self, inputs, passed, parameters, *wanted, *trained))  # type: ignore[no-untyped-call]

    def _change_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Change the parameters that the forward changes element by element, each rank its part."""
        changes = [spec.change for spec in self.spec.parameters]
        if not any(changes):
            return
        self.agreement()
        for change, parameter in zip(changes, parameters, strict=True):
            if change is not None:
                part = local_tensor(parameter).detach()
                part.copy_(change(part))
                torch.autograd.graph.increment_version(parameter)  # those that were gathered are out of date

    def trained(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The `parameters` that some output depends on. Autograd and hooks must not see the others."""
        trainable = [p for spec, p in zip(self.spec.parameters, parameters, strict=True) if spec.trainable]
        return [parameter for parameter, sources in zip(trainable, self.sources, strict=True) if sources]

    def frozen(self, ctx: Any) -> frozenset[int]:
        """The gradients of parameters that are not wanted in a call, as these were frozen after compiling."""
        wanted = iter(ctx.needs_input_grad[len(_NO_GRADIENT) + len(self.spec.differentiable_inputs) :])
        return frozenset(index for index, sources in enumerate(self.sources) if sources and not next(wanted))

    def trains_inputs_alone(self, frozen: frozenset[int]) -> bool:
        """Whether all parameters are `frozen`: the call has no part in what calls accumulate."""
        return all(index in frozen for index, sources in enumerate(self.sources) if sources)

    def lost(self, syncs: bool, frozen: frozenset[int]) -> list[str]:
        """The parameters whose accumulated gradients would be lost, as they are `frozen` in a call that reduces."""
        if not syncs or self.trains_inputs_alone(frozen):
            return []
        names = [spec.name for spec in self.spec.parameters if spec.trainable]
        return [names[index] for index in sorted(self.shared.reached & frozen)]

    def run(
        self, parameters: Sequence[torch.Tensor], inputs: list[torch.Tensor], several: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Run the forward: the outputs and the saved values. Buffers that the step changes are updated.

        With `several`, the graphs for gradient accumulation run.
        """
        if several or self.seeds is not None:  # a call that is refused draws no seed
            self.agreement()
        buffers = self.buffers()
        local = [local_tensor(buffer) for buffer in buffers]
        count = len(self.spec.mutated) + len(self.spec.outputs)
        if several:
            returned, saved = self.runner.forward(parameters, local, inputs, None, self._seed(), keeps=not self.syncs)
        else:
            first = [*self.coordinates, *self._seed()]
            results = list(self.forward([*first, *local_parameters(parameters, self.spec), *local, *inputs]))
            returned, saved = results[:count], results[count:]
        return self._update_states(parameters, returned, saved)

    def _update_states(
        self, parameters: Sequence[torch.Tensor], returned: list[Any], saved: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Update buffers, and parameters that the forward changes; the outputs and the saved values.

        Of old values that the backward needs, it has copies.
        """
        mutated = len(self.spec.mutated)
        if mutated:
            specs, states = (*self.spec.parameters, *self.spec.buffers), (*parameters, *self.buffers())
            by_name = {spec.name: state for spec, state in zip(specs, states, strict=True)}
            changing = [by_name[name] for name in self.spec.mutated]
            parts = [local_tensor(state).detach() for state in changing]
            memory = {_memory(part) for part in parts}
            saved = [x.clone() if isinstance(x, torch.Tensor) and _memory(x) in memory else x for x in saved]
            for state, part, value in zip(changing, parts, returned, strict=False):
                part.copy_(local_tensor(in_layout_of(value, state)))
                torch.autograd.graph.increment_version(state)  # parameters that were gathered are out of date
        return returned[mutated:], saved

    def _seed(self) -> list[int]:
        return [] if self.seeds is None else [self.seeds()]

    def run_micro_batches(
        self, parameters: Sequence[torch.Tensor], inputs: list[torch.Tensor], tangent: torch.Tensor | None = None
    ) -> tuple[list[Any], Gradients, Gradients, bool]:
        """Run one micro-batch after another: its forward and, with a tangent of the loss, its backward.

        Returns
        -------
        outputs : list of Tensor
            The outputs of the whole batch.
        of_inputs : list of Tensor or None
            The gradients of differentiable inputs.
        gradients : list of Tensor or None
            The gradients, or their sums over the micro-batches, which are not reduced yet.
        is_reduced : bool
            Which of the two.
        """
        self.agreement()
        # 1. Split the inputs, and compute the values that are summed over the whole batch first.
        (axis,) = self.spec.mesh.micro_batch_axes
        layouts = self.spec.micro_batch_layouts
        splits = [split_steps(value, layout, axis) for value, layout in zip(inputs, layouts, strict=False)]
        pieces = [list(piece) for piece in zip(*splits, strict=True)]
        buffers, seed = [local_tensor(buffer) for buffer in self.buffers()], self._seed()
        totals = self.runner.totals(parameters, buffers, pieces, seed)
        # 2. Run the micro-batches. The last backward reduces, unless there are sums of earlier calls.
        reduces = self.syncs and not self.accumulates
        sums: Gradients | None = None
        parts, of_inputs = [], []
        for step, piece in enumerate(pieces):
            last = step == axis.size - 1
            keeps = not last or not self.syncs
            returned, saved = self.runner.forward(parameters, buffers, [*piece, *totals], step, seed, keeps)
            if tangent is not None:
                arguments = [*saved, tangent.clone()]
                saved.clear()
                mine, sums = self.runner.backward(arguments, step, sums, last and reduces)
                of_inputs.append(mine)
            mutated = len(self.spec.mutated)
            parts.append(returned[mutated:])
        # 3. Update the buffers, and join the outputs and the gradients of inputs.
        self._update_states(parameters, returned, [])
        if tangent is None and self.syncs:
            self.runner.release()
        results = [[*part, *mine] for part, mine in zip(parts, of_inputs or [[]] * len(parts), strict=True)]
        joined = [None if part[0] is None else join_steps(part, layout, axis)
                  for part, layout in zip(zip(*results), layouts[len(inputs) :])]  # fmt: skip
        count = len(self.spec.outputs)
        return joined[:count], joined[count:], sums or [], reduces

    def gradients(
        self,
        saved: list[Any],
        tangents: Sequence[torch.Tensor | None],
        several: bool,
        syncs: bool,
        frozen: frozenset[int],
        parameters: Sequence[torch.Tensor],
    ) -> tuple[Gradients, Gradients]:
        """The gradients of differentiable inputs, as the step has them, and those of the trained parameters.

        The latter are DTensors, and all None while gradients only accumulate.

        A tangent is None for an output that the user's loss does not depend on, and a gradient is None if all outputs
        that it depends on have no tangent. The tangent of an output that is sharded over data axes belongs to a loss of
        this rank's part alone. Such losses are averaged over the data ranks, as under DistributedDataParallel.

        Parameters
        ----------
        several : bool
            The forward ran the graphs for gradient accumulation.
        syncs : bool
            This call reduces the gradients.
        frozen : frozenset of int
            The gradients that are not wanted.
        parameters : sequence of Tensor
            Those that the forward was called with.
        """
        assert self.backward is not None
        given = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        taken = {tangent.data_ptr() for tangent in given.values()}
        if _graph_is_kept():
            taken |= {value.data_ptr() for value in saved if isinstance(value, torch.Tensor)}
        of_inputs: Gradients = [None] * len(self.spec.differentiable_inputs)
        found: Gradients = [None] * len(self.sources)
        if given:  # without any tangent, no parameter gets a gradient
            arguments = [*saved]
            saved.clear()
            for index, output in enumerate(self.spec.outputs):
                if output.differentiable:
                    ranks = axes_size(axis for axis in output.layout.shard_axes if axis in self.spec.data_axes)
                    if (tangent := given.get(index)) is None:
                        dtype, device = getattr(torch, output.dtype), next(iter(given.values())).device
                        tangent = torch.zeros(output.layout.local_shape, dtype=dtype, device=device)
                    arguments.append((tangent if ranks == 1 else tangent / ranks).contiguous())
            if several:
                of_inputs, found = self._accumulated(arguments, syncs, frozen)
            else:
                boxed = [*self.coordinates, *arguments]
                arguments.clear()
                results = list(self.backward(boxed))
                of_inputs, found = results[: len(of_inputs)], results[len(of_inputs) :]
        of_inputs = [None if gradient is None else _owned(gradient, taken) for gradient in of_inputs]
        return of_inputs, self._for_autograd(found, frozenset(given), syncs, taken, frozen, parameters)

    def _accumulated(
        self, arguments: list[Any], syncs: bool, frozen: frozenset[int]
    ) -> tuple[Gradients, Gradients]:
        runner = self.runner
        if frozen:
            of_inputs, found = runner.backward(arguments, None, None, False)
            self._add(found, frozen)
            return of_inputs, runner.finish() if syncs else found
        before, runner.sums = runner.sums, None
        of_inputs, found = runner.backward(arguments, None, before, syncs)
        if not syncs:
            runner.sums = found
        return of_inputs, found

    def returned(self, found: Gradients, tangents: Sequence[torch.Tensor | None], ctx: Any) -> Gradients:
        """The gradients `found` of differentiable inputs as the user passed the inputs, for those that require one."""
        finish = self.input_gradients
        given = (index for index, tangent in enumerate(tangents) if tangent is not None)
        ranks = max(map(finish.averaging_ranks, given), default=1)
        asked = ctx.needs_input_grad[len(_NO_GRADIENT) :]
        return [
            finish(gradient, index, how.shape, max(ranks, how.ranks)) if wants and gradient is not None else None
            for gradient, index, how, wants in zip(found, self.spec.differentiable_inputs, ctx.passed, asked)
        ]

    def _add(self, found: Gradients, frozen: frozenset[int]) -> None:
        """Add to the accumulated gradients, except those that are `frozen`."""
        for index in frozen:
            if (gradient := found[index]) is not None:
                gradient.zero_()
        self.runner.add(found)

    def scaled(
        self,
        found: Gradients,
        is_reduced: bool,
        syncs: bool,
        factor: torch.Tensor,
        frozen: frozenset[int],
        parameters: Sequence[torch.Tensor],
    ) -> Gradients:
        """The gradients of a call's micro-batches times `factor`, as `gradients` returns them."""
        if values := [value for value in found if value is not None]:
            torch._foreach_mul_(values, factor)
        if not is_reduced and not self.trains_inputs_alone(frozen):
            self._add(found, frozen)
            found = self.runner.finish() if syncs else found
        loss = frozenset(index for index, output in enumerate(self.spec.outputs) if output.differentiable)
        return self._for_autograd(found, loss, syncs, set(), frozen, parameters)

    def _for_autograd(
        self,
        found: Gradients,
        given: frozenset[int],
        syncs: bool,
        taken: set[int],
        frozen: frozenset[int],
        parameters: Sequence[torch.Tensor],
    ) -> Gradients:
        """Gradients of these parameters as autograd takes them, with the accumulated ones added.

        `given` are the outputs whose tangents they come from. `taken` has the addresses of memory of other tensors.
        """
        parameters = self.trained(parameters)
        if self.trains_inputs_alone(frozen):
            return [None] * len(parameters)
        mine = {index for index, sources in enumerate(self.sources) if not given.isdisjoint(sources)}
        self.shared.reached |= mine - frozen
        if not syncs:
            return [None] * len(parameters)
        if self.accumulates:
            pairs = zip(found, self.runner.finish(), strict=True)
            found = [b if a is None else a if b is None else a + b for a, b in pairs]
        reached, self.shared.reached = self.shared.reached, frozenset()
        owned = [
            None if gradient is None or index not in reached else _owned(gradient, taken)
            for index, (gradient, sources) in enumerate(zip(found, self.sources, strict=True))
            if sources
        ]
        return [None if g is None else in_layout_of(g, p) for g, p in zip(owned, parameters, strict=True)]


@dataclass(frozen=True)
class _Passed:
    """An input as the user has passed it: its shape, and over how many ranks an earlier parallel module averages."""

    shape: tuple[int, ...]
    ranks: int


def _averaging_ranks(value: torch.Tensor) -> int:
    """The number of ranks over which parallel modules that computed `value` average their gradients; 1 without any."""
    ranks, seen = 1, set()
    stack: list[tuple[Any, int]] = [(value.grad_fn, value.output_nr)]
    while stack:
        node, output = stack.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        executor = getattr(node, "executor", None)
        if isinstance(executor, Executor):
            ranks = max(ranks, executor.input_gradients.averaging_ranks(output))
        else:
            stack += node.next_functions
    return ranks


def _owned(gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """`gradient` in memory of its own, not at `taken`, as users and later backwards write to gradients in place.

    Two parameters that are added share a gradient, and the gradient of a sum is an expanded number.
    """
    gradient = gradient.contiguous()
    if gradient.data_ptr() in taken:
        gradient = gradient.clone()
    taken.add(gradient.data_ptr())
    return gradient


_NO_GRADIENT = (None, None, None, None)
"""The gradients of the first arguments of these functions: the executor and three lists."""


class _StepFunction(torch.autograd.Function):
    """A call of a step as one node of autograd.

    It takes the user's inputs and the DTensor parameters that are trained, and returns their gradients.

    The saved values are in a plain list, so that the backward graph frees each after its last use. With
    ``retain_graph=True`` it takes a copy of the list.
    """

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        inputs: list[torch.Tensor],
        passed: list[_Passed],
        parameters: list[torch.Tensor],
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.frozen = executor.frozen(ctx)
        ctx.several = (not executor.syncs or executor.accumulates) and not executor.trains_inputs_alone(ctx.frozen)
        outputs, saved = executor.run(parameters, inputs, ctx.several)
        # An output that held itself through its own autograd node would never be freed.
        ctx.saved = [x.detach() if any(x is output for output in outputs) else x for x in saved]
        ctx.executor, ctx.passed, ctx.syncs = executor, passed, executor.syncs
        ctx.inputs = [x for x in inputs if any(x is other for other in saved)]
        ctx.parameters = parameters  # which torch.func.functional_call replaces for this call
        ctx.versions = _versions([*parameters, *ctx.inputs])
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        executor: Executor = ctx.executor
        check_backward(executor.spec, tangents, ctx.saved, executor.lost(ctx.syncs, ctx.frozen))
        with torch._C.DisableTorchFunctionSubclass():
            versions = _versions([*ctx.parameters, *ctx.inputs])
        if ctx.versions != versions:
            raise ParallelError(
                "a parameter or an input was changed in place between forward and backward, so the gradients would "
                "belong to neither value: call backward before optimizer.step(), and before inputs are written to"
            )
        saved, parameters = ctx.saved, ctx.parameters
        if _graph_is_kept():
            saved = [*saved]
        else:
            ctx.saved = ctx.inputs = ctx.parameters = None
        found, gradients = executor.gradients(saved, tangents, ctx.several, ctx.syncs, ctx.frozen, parameters)
        executor.backward_ended()
        return *_NO_GRADIENT, *executor.returned(found, tangents, ctx), *gradients


class _MicroBatchesFunction(torch.autograd.Function):
    """A call of several micro-batches as one node of autograd.

    Each micro-batch runs backward right after its forward, so that only its own activations are in memory. The backward
    starts from the tangent that the loss had in the last call. As gradients are linear in the tangent, they are scaled
    when the real one is known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        inputs: list[torch.Tensor],
        passed: list[_Passed],
        parameters: list[torch.Tensor],
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.passed, ctx.syncs, ctx.tangent = executor, passed, executor.syncs, executor.tangent()
        ctx.parameters = parameters
        ctx.frozen = executor.frozen(ctx)
        outputs, *ctx.found, ctx.is_reduced = executor.run_micro_batches(parameters, inputs, ctx.tangent)
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        executor: Executor = ctx.executor
        check_backward(executor.spec, tangents, ctx.found, executor.lost(ctx.syncs, ctx.frozen))
        of_inputs, found = ctx.found
        if _graph_is_kept():  # the sums are scaled in place
            found = [None if gradient is None else gradient.clone() for gradient in found]
        else:
            ctx.found = None
        (tangent,) = [x for x, spec in zip(tangents, executor.spec.outputs, strict=True) if spec.differentiable]
        if tangent is None:  # the user's loss does not depend on the step's
            return *_NO_GRADIENT, *(None for _ in (*of_inputs, *executor.trained(ctx.parameters)))
        executor.expect(tangent)
        factor = tangent / ctx.tangent
        gradients = executor.scaled(found, ctx.is_reduced, ctx.syncs, factor, ctx.frozen, ctx.parameters)
        executor.backward_ended()
        mine = [None if gradient is None else gradient * factor for gradient in of_inputs]
        return *_NO_GRADIENT, *executor.returned(mine, tangents, ctx), *gradients


def _mark(ctx: Any, executor: Executor, outputs: Sequence[torch.Tensor]) -> None:
    specs = executor.spec.outputs
    ctx.set_materialize_grads(False)
    pairs = zip(outputs, specs, strict=True)
    ctx.mark_non_differentiable(*(x for x, spec in pairs if not (spec.differentiable or spec.left_out)))


def _graph_is_kept() -> bool:
    """Whether the backward that runs now was called with ``retain_graph=True``."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
