"""Runs a generated step: local tensors through the forward graph, and autograd's tangents through the backward one.

The seams to autograd: a call of a generated step as one node, which takes parameters and gives their gradients.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from shardweave.distributed import COLLECTIVES, RuntimeMesh, group_of, lost_rank, raise_if_rank_lost
from shardweave.ir import META, LostRankError, ParallelError, StepSpec, ValueSpec, axes_size
from shardweave.runtime.grad_accumulation import Boxed, Gradients, MicroBatchRunner, cut, in_places, joined
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import like, untraced


def boxed(constants: fx.GraphModule, graph: fx.Graph, mesh: RuntimeMesh | None = None) -> Boxed:
    """The code of `graph`, which it takes over, with its arguments in one list.

    A collective of it that loses a rank raises a LostRankError, which names it; so does each call afterwards. Where it
    fails on one rank by something else, that rank raises its error, and the others, which would wait for it, a
    ParallelError with the rank and the cause; so does each call of it afterwards. Where all ranks fail at the same op,
    all raise their own errors, and can go on.

    Parameters
    ----------
    constants : GraphModule
        Holds the tensors of `graph`.
    graph : Graph
        Of `RuntimeMesh.bound`.
    mesh : RuntimeMesh, optional
        The mesh it is bound to; where it is not given, the other ranks do not hear of a failure.

    Examples
    --------
    >>> double = fx.symbolic_trace(lambda x: [x + x])
    >>> arguments = [torch.ones(())]
    >>> boxed(double, copy.deepcopy(double.graph))(arguments), arguments
    ([tensor(2.)], [])
    """
    generator = copy.copy(graph._codegen)
    generator.gen_fn_def = MethodType(_boxed_definition, generator)  # type: ignore[method-assign]
    graph.set_codegen(generator)
    module = fx.GraphModule(constants, graph)
    run: Boxed = module.forward

    def guarded(arguments: list[Any]) -> Sequence[Any]:
        raise_if_rank_lost()
        if mesh is not None and mesh.closed is not None:
            raise ParallelError(
                f"this step cannot run any more, as an earlier call of it failed on {mesh.closed}. Compile the model "
                "again on all ranks, or start the job again from its last checkpoint"
            )
        try:
            return run(arguments)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            node = _raised_at(error, module.graph)
            found = _failure(error, node, mesh)
            if mesh is not None and not isinstance(found, LostRankError):
                alike = found is error and node is not None and mesh.all_failed_at(node.name)
                _wait_for_started(error, module.graph)
                if not alike:
                    mesh.close(error)
            if found is error:
                raise
            raise found from error

    return guarded


def _failure(error: Exception, node: fx.Node | None, mesh: RuntimeMesh | None) -> Exception:
    """The exception for an `error` at a node: itself, or a LostRankError if a collective failed with a rank."""
    if not isinstance(error, RuntimeError) or node is None or not _is_collective(node):
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
    """Wait for the collectives that were under way when `graph` raised `error`.

    The other ranks start these, too, as all start the same in one order. Until they are waited for they keep the
    connections open that `RuntimeMesh.close` is to close.
    """
    started = {node.name for node in graph.nodes if _is_collective(node) and node.target is not _WAIT}
    place = error.__traceback__
    while place is not None:
        for name in started & place.tb_frame.f_locals.keys():
            value = place.tb_frame.f_locals[name]
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    with contextlib.suppress(RuntimeError):  # another rank has failed before it came to start this one
                        _WAIT(tensor)
        place = place.tb_next


def _is_collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") in COLLECTIVES


def _raised_at(error: Exception, graph: fx.Graph) -> fx.Node | None:
    """The node in whose line of generated code `error` was raised."""
    lines = []
    place = error.__traceback__
    while place is not None:
        lines.append(linecache.getline(place.tb_frame.f_code.co_filename, place.tb_lineno))
        place = place.tb_next
    names = [line.split("=")[0].split(":")[0].strip() for line in lines]
    nodes = {node.name: node for node in graph.nodes}
    return next((nodes[name] for name in reversed(names) if name in nodes), None)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _boxed_definition(_: fx.graph.CodeGen, free_vars: list[str], annotation: str, **__: object) -> str:
    names = [variable.split(":")[0].split("=")[0].strip() for variable in free_vars if variable != "self"]
    unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
    return f"def forward(self, boxed){annotation}:{unpack}\n    boxed.clear()"


class Executor:
    """A step bound to this rank: its graphs with real groups, and where its parameters and buffers are found.

    Parameters
    ----------
    spec : StepSpec
        The calling convention.
    coordinates : tuple of int
        What both graphs take first.
    forward, backward : callable
        The boxed graphs of a step that is run once; no backward for a step that trains nothing.
    parameters, buffers : callable
        The current tensors of `spec.parameters` and `spec.buffers`, in order.
    sources : sequence of set of int
        For each gradient that `backward` gives, the outputs that it comes from; see `tangents_of_gradients`.
    seeds : callable, optional
        Gives each call its seed, the same on all ranks; None for a step that draws no random numbers.
    runner : callable, optional
        Makes the step's forms for several runs before the optimizer's; None where it has none.
    """

    def __init__(
        self,
        spec: StepSpec,
        coordinates: tuple[int, ...],
        forward: Boxed,
        backward: Boxed | None,
        parameters: Callable[[], list[torch.Tensor]],
        buffers: Callable[[], list[torch.Tensor]],
        sources: Sequence[frozenset[int]],
        seeds: Callable[[], int] | None = None,
        runner: Callable[[], MicroBatchRunner] | None = None,
    ) -> None:
        self.spec, self.coordinates = spec, coordinates
        self.forward, self.backward = forward, backward
        self.parameters, self.buffers, self.sources = parameters, buffers, sources
        self._seeds, self._make_runner = seeds, runner
        self._runner: MicroBatchRunner | None = None
        self.syncs = True
        """Whether gradients go to the states after each call, or are added up until they do."""
        self._tangent: torch.Tensor | None = None
        self._reached: frozenset[int] = frozenset()  # the outputs whose tangents gradients that add up come from

    @property
    def runner(self) -> MicroBatchRunner:
        """The forms of the step for several runs, made when they are first needed."""
        if self._runner is None:
            if self._make_runner is None:
                raise ParallelError("this step was generated without forms that add gradients up: compile the model")
            self._runner = self._make_runner()
        return self._runner

    def on(
        self,
        parameters: Callable[[], list[torch.Tensor]],
        buffers: Callable[[], list[torch.Tensor]],
        seeds: Callable[[], int] | None,
    ) -> Executor:
        """The same step on other tensors; gradients that add up are not shared."""
        given = self.forward, self.backward, parameters, buffers, self.sources, seeds, self._make_runner
        return Executor(self.spec, self.coordinates, *given)

    def drop_sums(self) -> None:
        """Forget gradients that are not yet where the states rest."""
        self._reached = frozenset()
        if self._runner is not None:
            self._runner.drop()

    def tangent(self) -> torch.Tensor:
        """The tangent of the loss that is expected: the last one."""
        if self._tangent is None:
            (loss,) = [output for output in self.spec.outputs if output.differentiable]
            device = local_tensor(self.parameters()[0]).device
            self._tangent = torch.ones((), dtype=getattr(torch, loss.dtype), device=device)
        return self._tangent

    def expect(self, tangent: torch.Tensor) -> None:
        """Expect this tangent of the loss next time, unless nothing could be made of it."""
        usable = torch.isfinite(tangent) & (tangent != 0)
        self._tangent = torch.where(usable, tangent, self.tangent()).detach()

    @property
    def adds_up(self) -> bool:
        """Whether gradients of earlier runs are accumulated and not yet reduced."""
        return self._runner is not None and self._runner.sums is not None

    def _trains(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self.backward is not None and torch.is_grad_enabled() and any(p.requires_grad for p in parameters)

    def running(self) -> dict[str, bool]:
        """How the next call runs the step, in words: ranks that do so differently would not meet in its collectives.

        Raises
        ------
        ParallelError
            If a parameter requires a gradient that the step has none for.
        """
        parameters = self.parameters()
        trains = self._trains(parameters)
        pairs = zip(self.spec.parameters, parameters, strict=True)
        thawed = [spec.name for spec, parameter in pairs if parameter.requires_grad and not spec.trainable]
        if trains and thawed:
            raise ParallelError(
                f"{', '.join(thawed[:5])}: {len(thawed)} parameters require a gradient that were frozen when the step "
                "was compiled, so that it has no gradient for them. Compile the model with them unfrozen, and freeze "
                "them by requires_grad_(False) until they are to be trained; or keep them frozen"
            )
        return {
            "with gradients": trains,
            "outside of no_sync()": self.syncs,
            "after others under no_sync()": self.adds_up,
        }

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The step's outputs, from the local parts of its inputs."""
        parameters = self.parameters()
        trains = self._trains(parameters)
        several = self.spec.micro_batches > 1
        if not trains:
            with torch.no_grad():
                return self.run_parts(parameters, inputs, None)[0] if several else self.run(parameters, inputs)[0]
        seam = MicroBatches if several else Step
        return list(seam.apply(self, inputs, parameters, *self.trained(parameters)))  # type: ignore[no-untyped-call]

    def trained(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of `parameters`, those that some loss gives a gradient: autograd, and hooks, shall not hear of the others."""
        trainable = [p for spec, p in zip(self.spec.parameters, parameters, strict=True) if spec.trainable]
        return [parameter for parameter, sources in zip(trainable, self.sources, strict=True) if sources]

    def run(
        self, parameters: Sequence[torch.Tensor], inputs: list[torch.Tensor], several: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Run the forward: the outputs and the saved values. Buffers that the step changes are updated.

        With `several`, as one of several runs before the optimizer's.
        """
        buffers = self.buffers()
        local = [local_tensor(buffer) for buffer in buffers]
        count = len(self.spec.mutated_buffers) + len(self.spec.outputs)
        if several:
            returned, saved = self.runner.forward(parameters, local, inputs, None, self._seed(), keeps=not self.syncs)
        else:
            first = [*self.coordinates, *self._seed()]
            results = list(self.forward([*first, *in_places(parameters, self.spec), *local, *inputs]))
            returned, saved = results[:count], results[count:]
        return self._written(returned, saved)

    def _written(self, returned: list[Any], saved: list[Any]) -> tuple[list[Any], list[Any]]:
        """Write the buffers' new values, keeping old ones that the backward needs; the outputs and the saved values."""
        mutated = len(self.spec.mutated_buffers)
        if mutated:
            by_name = dict(zip((buffer.name for buffer in self.spec.buffers), self.buffers(), strict=True))
            changing = [local_tensor(by_name[name]) for name in self.spec.mutated_buffers]
            saved = [x.clone() if any(x is buffer for buffer in changing) else x for x in saved]
            for buffer, value in zip(changing, returned, strict=False):
                buffer.copy_(value)
        return returned[mutated:], saved

    def _seed(self) -> list[int]:
        return [] if self._seeds is None else [self._seeds()]

    def run_parts(
        self, parameters: Sequence[torch.Tensor], inputs: list[torch.Tensor], tangent: torch.Tensor | None
    ) -> tuple[list[Any], Gradients, bool]:
        """Run micro-batch after micro-batch, each forward and, with a tangent for the loss, backward.

        Returns
        -------
        outputs : list of Tensor
            Of the whole batch.
        gradients : list of Tensor or None
            Where the states rest, or the sums of the micro-batches' where those are.
        closed : bool
            Which of the two.
        """
        (axis,) = self.spec.mesh.micro_batch_axes
        layouts = self.spec.micro_batch_layouts
        cuts = [cut(value, lies, axis) for value, lies in zip(inputs, layouts, strict=False)]
        pieces = [list(piece) for piece in zip(*cuts, strict=True)]
        buffers, seed = [local_tensor(buffer) for buffer in self.buffers()], self._seed()
        totals = self.runner.totals(parameters, buffers, pieces, seed)
        closes = self.syncs and not self.adds_up
        sums: Gradients | None = None
        parts = []
        for step, piece in enumerate(pieces):
            last = step == axis.size - 1
            keeps = not last or not self.syncs
            returned, saved = self.runner.forward(parameters, buffers, [*piece, *totals], step, seed, keeps)
            if tangent is not None:
                arguments = [*saved, tangent.clone()]
                saved.clear()
                sums = self.runner.backward(arguments, step, sums, last and closes)
            mutated = len(self.spec.mutated_buffers)
            parts.append(returned[mutated:])
        self._written(returned, [])
        if tangent is None and self.syncs:
            self.runner.release()
        outputs = layouts[len(inputs) :]
        return [joined(part, lies, axis) for part, lies in zip(zip(*parts), outputs, strict=True)], sums or [], closes

    def gradients(
        self, saved: list[Any], tangents: Sequence[torch.Tensor | None], several: bool, syncs: bool
    ) -> Gradients:
        """The gradient of each parameter that is trained, as a DTensor; None for all while they are only added up.

        `tangents` are those of all outputs; None for one that the user's loss does not need, and what only such outputs
        need has None for a gradient. A tangent of an output that is spread over data axes belongs to a loss of this
        rank's part alone: such losses are averaged over the data ranks, as DistributedDataParallel does.
        `several` says whether the forward was one of several runs, `syncs` whether it is the last of them.
        """
        assert self.backward is not None
        given = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        taken = {tangent.data_ptr() for tangent in given.values()}
        found: Gradients = [None] * len(self.sources)
        if given:  # else what the user computes from the outputs gives them no gradient at all
            arguments = [*saved]
            saved.clear()
            for index, output in enumerate(self.spec.outputs):
                if output.differentiable:
                    ranks = axes_size(axis for axis in output.layout.shard_axes if axis in self.spec.data_axes)
                    tangent = given[index] if index in given else _zeros(output, next(iter(given.values())).device)
                    arguments.append((tangent if ranks == 1 else tangent / ranks).contiguous())
            if several:
                found = self._added_up(arguments, syncs)
            else:
                boxed = [*self.coordinates, *arguments]
                arguments.clear()
                found = list(self.backward(boxed))
        return self._returned(found, frozenset(given), syncs, taken)

    def _added_up(self, arguments: list[Any], syncs: bool) -> Gradients:
        runner = self.runner
        before, runner.sums = runner.sums, None
        found = runner.backward(arguments, None, before, syncs)
        if not syncs:
            runner.sums = found
        return found

    def finished(self, found: Gradients, closed: bool, syncs: bool, factor: torch.Tensor) -> Gradients:
        """The gradients of a call's micro-batches, times `factor`, as `gradients` gives them."""
        if values := [value for value in found if value is not None]:
            torch._foreach_mul_(values, factor)
        if not closed:
            self.runner.add(found)
            found = self.runner.finish() if syncs else found
        loss = frozenset(index for index, output in enumerate(self.spec.outputs) if output.differentiable)
        return self._returned(found, loss, syncs, set())

    def _returned(self, found: Gradients, given: frozenset[int], syncs: bool, taken: set[int]) -> Gradients:
        """Gradients as autograd takes them, with those that wait to be summed with them.

        `given` are the outputs whose tangents they come from, `taken` where memory is that is not theirs.
        """
        parameters = self.trained(self.parameters())
        self._reached |= given
        if not syncs:
            return [None] * len(parameters)
        if self.adds_up:
            found = _summed(found, self.runner.finish())
        reached, self._reached = self._reached, frozenset()
        mine = [
            None if gradient is None or sources.isdisjoint(reached) else _owned(gradient, taken)
            for gradient, sources in zip(found, self.sources, strict=True)
            if sources
        ]
        return [None if g is None else like(g, parameter) for g, parameter in zip(mine, parameters, strict=True)]


def _summed(found: Gradients, more: Gradients) -> Gradients:
    return [b if a is None else a if b is None else a + b for a, b in zip(found, more, strict=True)]


def _owned(gradient: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """`gradient` in memory of its own, not at `taken`: users and later backwards write to gradients in place.

    Parameters that are added have one gradient, and that of a sum is one number, expanded.
    """
    gradient = gradient.contiguous()
    if gradient.data_ptr() in taken:
        gradient = gradient.clone()
    taken.add(gradient.data_ptr())
    return gradient


def _zeros(output: ValueSpec, device: torch.device) -> torch.Tensor:
    return torch.zeros(output.layout.local_shape, dtype=getattr(torch, output.dtype), device=device)


_ONCE = (
    "this step has been run backward already, and what it saved is freed: call the module again, or add "
    "the losses up before one backward"
)


_INSIDE = (
    "compute what needs such derivatives inside the model's forward, with torch.func (torch.func.grad, "
    "torch.func.jvp), which is captured, and compile the model with it; docs/how-it-works.md has an example"
)


class Step(torch.autograd.Function):
    """The seam to autograd: one node that takes the DTensor parameters and gives their gradients.

    What the forward graph saves is held in a plain list and not by autograd, so that the backward graph frees each
    value after its last use; so a step can be run backward once only.
    """

    @staticmethod
    def forward(
        ctx: Any, executor: Executor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.several = not executor.syncs or executor.adds_up
        outputs, saved = executor.run(parameters, inputs, ctx.several)
        # an output that held itself through its own autograd node would never be freed
        ctx.saved = [x.detach() if any(x is output for output in outputs) else x for x in saved]
        ctx.executor, ctx.syncs = executor, executor.syncs
        ctx.inputs = [x for x in inputs if any(x is other for other in saved)]
        ctx.versions = _versions([*parameters, *ctx.inputs])
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_first_order(tangents)
        _check_tangents(ctx.executor, tangents)
        if ctx.saved is None:
            raise ParallelError(_ONCE)
        if ctx.versions != _versions([*ctx.executor.parameters(), *ctx.inputs]):
            raise ParallelError(
                "a parameter or an input was changed in place between forward and backward, so the gradients would "
                "belong to neither value: call backward before optimizer.step(), and before inputs are written to"
            )
        saved, ctx.saved, ctx.inputs = ctx.saved, None, None
        executor: Executor = ctx.executor
        return (None, None, None, *executor.gradients(saved, tangents, ctx.several, ctx.syncs))


class MicroBatches(torch.autograd.Function):
    """The seam for a call of several micro-batches.

    Each runs backward right after its forward, so that only its own activations are held: with the tangent that the
    loss had last time, 1 at first. What its own tangent differs by is made up for when it is known, as gradients are
    linear in it.
    """

    @staticmethod
    def forward(
        ctx: Any, executor: Executor, inputs: list[torch.Tensor], parameters: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.syncs, ctx.tangent = executor, executor.syncs, executor.tangent()
        outputs, ctx.found, ctx.closed = executor.run_parts(parameters, inputs, ctx.tangent)
        _mark(ctx, executor, outputs)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _check_first_order(tangents)
        _check_tangents(ctx.executor, tangents)
        if ctx.found is None:
            raise ParallelError(_ONCE)
        found, ctx.found = ctx.found, None
        executor: Executor = ctx.executor
        (tangent,) = [x for x, spec in zip(tangents, executor.spec.outputs, strict=True) if spec.differentiable]
        if tangent is None:  # what the user computes from the loss gives it no gradient at all
            return (None, None, None, *(None for _ in executor.trained(executor.parameters())))
        executor.expect(tangent)
        return (None, None, None, *executor.finished(found, ctx.closed, ctx.syncs, tangent / ctx.tangent))


def _mark(ctx: Any, executor: Executor, outputs: Sequence[torch.Tensor]) -> None:
    specs = executor.spec.outputs
    ctx.set_materialize_grads(False)
    pairs = zip(outputs, specs, strict=True)
    ctx.mark_non_differentiable(*(x for x, spec in pairs if not (spec.differentiable or spec.left_out)))


def refuse_transforms(executor: Executor, arguments: object) -> None:
    """`ParallelError` where a call with these arguments is differentiated in a way that its step does not hear of."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise ParallelError(
            "a compiled step is called inside a transform of torch.func (grad, vjp, jvp, vmap, hessian, ...), which "
            f"cannot see into it: call it outside of the transform, or {_INSIDE}"
        )
    if forward_ad._current_level < 0:
        return
    for tensor in [*tree_leaves(arguments), *executor.parameters(), *executor.buffers()]:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ParallelError(
                "a compiled step is called with a dual tensor of torch.autograd.forward_ad, but it has a backward "
                f"and no forward-mode derivative: {_INSIDE}"
            )


def _check_first_order(tangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse second derivatives (``create_graph=True``) and batched gradients."""
    if torch.is_grad_enabled():  # inside a backward, that is what create_graph=True says
        raise ParallelError(
            "create_graph=True asks for gradients that can be differentiated again, but the backward of a compiled "
            "step is a generated graph without a derivative: second-order terms, such as those of a gradient penalty "
            f"or a Hessian-vector product, would be lost. If gradients are all you need, leave it out; else {_INSIDE}"
        )
    functorch = torch._C._functorch
    batched = any(tangent is not None and functorch.is_legacy_batchedtensor(tangent) for tangent in tangents)
    if batched or functorch.maybe_current_level() is not None:
        raise ParallelError(
            "the backward of a compiled step is run inside vmap (is_grads_batched=True, or vectorize=True of "
            f"torch.autograd.functional), which cannot see into it: run one backward after another, or {_INSIDE}"
        )


def _check_tangents(executor: Executor, tangents: Sequence[torch.Tensor | None]) -> None:
    """Refuse a gradient of an output that the step has none for."""
    pairs = zip(tangents, executor.spec.outputs, strict=True)
    if asked := [spec.name for tangent, spec in pairs if tangent is not None and spec.left_out]:
        raise ParallelError(
            f"the loss depends on the output {', '.join(asked)}, but where a model returns a loss of its own, its "
            "backward starts there and at nothing else: compute the whole loss in the model, or none of it; or detach "
            "the output, if no gradient is wanted through it"
        )


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
