"""The other door: ``torch.compile(model, backend="shardweave", options={"cluster": cluster})``.

Every rank calls the compiled model with the same global tensors. Parameters stay the user's, whole on every rank; the
compute between is spread (data and tensor parallel) by the same passes as `compile_parallel`'s; outputs and gradients
come back whole. Autograd and the optimizer see an ordinary model.

The only module that touches torch's private backend interfaces.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from inspect import currentframe
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from shardweave.compiler.api import _Compiler, check_world
from shardweave.compiler.capture import Captured
from shardweave.compiler.codegen import Step
from shardweave.compiler.pipeline import copied
from shardweave.compiler.planner.candidates import legal
from shardweave.cost_model import Cluster
from shardweave.errors import CaptureError, ParallelError, PlanError
from shardweave.ir import Mesh, Strategy
from shardweave.options import Options
from shardweave.passes.annotate import graph_outputs, info
from shardweave.runtime.execute import boxed
from shardweave.runtime.mesh import RuntimeMesh
from shardweave.runtime.module import compare_graphs

aten = torch.ops.aten


def shardweave(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(..., backend="shardweave")`` calls for each graph of the model.

    Parameters
    ----------
    gm, example_inputs
        Dynamo's graph and its inputs.
    options : mapping, optional
        ``"cluster"``: a `Cluster`, by default the running world. ``"memory_limit"``, ``"force"``, ``"time_limit"``
        and the others: as in `Options` (outputs are always whole). ``"inspect"``: called with the `Plan` and the graph
        after each stage, of every step that is compiled.
    mode : str, optional
        There are none.

    Returns
    -------
    callable
        The graph's function. Without gradients it is computed whole on every rank.

    Raises
    ------
    ParallelError
        As itself: what `compile_parallel` raises; an unknown option; a dynamic shape.

    Examples
    --------
    >>> model = torch.compile(nn.Linear(8, 8), backend=shardweave, options={"cluster": Cluster.local(1)})
    >>> model(torch.ones(2, 8)).sum().backward()
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import ShortenTraceback

    try:
        request = _Request.of(options or {}, mode)
        check_world(request.cluster)
        partition = _Partition(request, _sources(gm, example_inputs))
        with torch._functorch.config.patch(donated_buffer=False):  # retain_graph=True may run a backward again
            compiled: Callable[..., Any] = aot_autograd(fw_compiler=_compiled, partition_fn=partition)(
                gm, example_inputs
            )
            return compiled
    except ParallelError as error:
        # Dynamo lets this kind of its errors through, where it would hide any other in a BackendCompilerFailed.
        kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
        raise kind(*error.args, first_useful_frame=currentframe()) from error


@dataclass(frozen=True)
class _Request:
    """What the user asked for in ``torch.compile``'s options."""

    cluster: Cluster
    options: Options
    inspect: Callable[[Any, Mapping[str, fx.GraphModule]], None] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], mode: str | None) -> _Request:
        if mode is not None:
            raise ParallelError(f"the backend shardweave has no modes, got mode={mode!r}: leave it out")
        known = {field.name for field in fields(Options)} - {"outputs"}
        unknown = sorted(set(given) - known - {"cluster", "inspect"})
        if unknown:
            raise ParallelError(
                f"the backend shardweave has no option {', '.join(map(repr, unknown))}; it has 'cluster', 'inspect', "
                f"{', '.join(map(repr, sorted(known)))}"
            )
        cluster = given.get("cluster")
        if cluster is None:
            cluster = Cluster.detect() if dist.is_initialized() else Cluster.local(1)
        if not isinstance(cluster, Cluster):
            raise ParallelError(f"the option 'cluster' must be a shardweave.Cluster, got {type(cluster).__name__}")
        return cls(cluster, Options(**{key: given[key] for key in known & set(given)}), given.get("inspect"))


@dataclass(frozen=True)
class _Source:
    """An input of Dynamo's graph: the user's name for it, and what it is."""

    name: str
    kind: str


def _sources(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[_Source]:
    """Where each input of a graph comes from, by the user's names."""
    found: list[_Source] = []
    for node, value in zip((node for node in gm.graph.nodes if node.op == "placeholder"), example_inputs):
        text = str(node.meta["grapharg"].source.name) if "grapharg" in node.meta else ""
        path = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", text)
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer" if "_buffers[" in text else "input"
        if not isinstance(value, Tensor) or any(not isinstance(size, int) for size in node.meta["example_value"].shape):
            raise CaptureError(
                f"the size or number {text or node.name} is dynamic, but a step is planned for the sizes of its "
                "inputs: call torch.compile(..., dynamic=False), so that other sizes compile another step"
            )
        name = ".".join(path or re.findall(r"\['?([^'\]]+)'?\]", text)) or node.name
        found.append(_Source(name if all(name != other.name for other in found) else node.name, kind))
    return found


def _compiled(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A graph as AOTAutograd calls it; also that of a call without gradients, which every rank computes whole."""
    run = boxed(gm)

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class _Partition:
    """From AOTAutograd's joint graph to this rank's forward and backward."""

    request: _Request
    sources: Sequence[_Source]

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import default_partition
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # of fake tensors: ranks talk to each other here
            captured = _captured(joint, self.sources, num_fwd_outputs)
            compiler = _WholeCompiler(captured, self.request)
            if compiler.annotated.ops:
                return self._spread(compiler, joint, num_fwd_outputs)
        # Between two graph breaks there may be nothing to spread.
        whole: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs
        )
        return whole

    def _spread(
        self, compiler: _WholeCompiler, joint: fx.GraphModule, num_forward: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        plan = compiler._agreed_plan()
        compiled = compiler.lower(plan)
        if self.request.inspect is not None:
            self.request.inspect(plan, compiled.graphs)
        compare_graphs(compiled.step)
        return _bind(compiled.step, joint, num_forward)


class _WholeCompiler(_Compiler):
    """Compiles a step whose parameters rest whole on every rank."""

    def __init__(self, captured: Captured, request: _Request) -> None:
        self._given = captured
        super().__init__(captured.graph, request.cluster, None, request.options, None)

    def _capture(self, _: Any) -> Captured:
        return self._given

    def _forced(self, mesh: Mesh) -> dict[str, list[Strategy]]:
        """The strategies that spread no parameter at rest beyond the z of its grid, which is compute alone here."""
        found = {}
        forced = super()._forced(mesh)
        for op in self.annotated.ops:
            options = forced.get(op.name) or [option for option in legal(op, mesh) if option.rest == 1]
            fits = [replace(option, rest=1) for option in options if option.rest in (1, option.grid.z)]
            if not fits:
                raise PlanError(
                    f"{op.name} is forced to {options[0] if options else 'nothing that fits'}, but parameters cannot "
                    "rest sharded under torch.compile, which leaves them to you: force 'dp', or use compile_parallel"
                )
            found[op.name] = list(dict.fromkeys(fits))
        return found


def _captured(joint: fx.GraphModule, sources: Sequence[_Source], num_forward: int) -> Captured:
    """AOTAutograd's joint graph as a captured step: its inputs named, its gradients after the outputs."""
    graph = copied(joint)
    given = joint.graph.output_node()
    described = given.meta["desc"]
    named: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    primals: list[str] = []
    tangents: dict[str, int] = {}
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            continue
        what = node.meta["desc"]
        if type(what).__name__ == "TangentAOTInput":
            tangents[node.name] = described.index(what.output)
        elif type(what).__name__ == "PlainAOTInput":
            source = sources[what.idx]
            named[source.kind][node.name] = source.name
            primals.append(source.name)
        else:
            raise CaptureError(f"the graph has an input of the kind {type(what).__name__} ({what}): not supported")
    values = graph_outputs(graph.graph)
    if not all(isinstance(value, fx.Node) for value in values[:num_forward]):
        raise CaptureError("the graph returns something that is not a tensor, which is not supported")
    gradients = {name: value for name, value in zip(primals, values[num_forward:]) if value is not None}
    graph.graph.output_node().args = ([*values[:num_forward], *gradients.values()],)
    graph.graph.lint()
    graph.recompile()
    outputs = tuple(f"output{index}" for index in range(num_forward))
    return Captured(
        graph,
        named["parameter"],
        named["buffer"],
        named["input"],
        tangents,
        outputs,
        tuple(gradients),
        mutated_buffers=(),  # AOTAutograd returns their new values among the outputs, and writes them back
        aliases={},
        call=None,
        training=True,
        whole=True,
    )


def _bind(step: Step, joint: fx.GraphModule, num_forward: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """This rank's graphs of a step, in AOTAutograd's calling convention: whole inputs, a gradient for each."""
    assert step.backward is not None
    given = _placeholders(joint.graph)
    num_tangents = sum(type(node.meta["desc"]).__name__ == "TangentAOTInput" for node in given)
    primals, tangents = given[: len(given) - num_tangents], given[len(given) - num_tangents :]
    device = next(node.meta["val"].device.type for node in given)
    mesh = _runtime_mesh(step.spec.mesh, device, dist.group.WORLD if dist.is_initialized() else None)
    forward, backward = mesh.bind(step.forward), mesh.bind(step.backward)

    _fold(forward.graph, mesh.coordinates)
    _take_parts(forward.graph, primals, mesh)
    values = graph_outputs(forward.graph)
    _return(forward, [value for value in values if isinstance(value, fx.Node)])

    _fold(backward.graph, [*mesh.coordinates, *values[num_forward:]])  # what is saved follows the coordinates
    _take_parts(backward.graph, tangents, mesh)
    gradients = iter(graph_outputs(backward.graph))
    wanted = graph_outputs(joint.graph)[num_forward:]
    _return(backward, [None if value is None else next(gradients) for value in wanted])
    return forward, backward


@lru_cache(maxsize=4)
def _runtime_mesh(mesh: Mesh, device: str, _: object) -> RuntimeMesh:
    """The running world as a mesh; the same one for all steps, as each makes process groups."""
    return RuntimeMesh(mesh, device)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _return(module: fx.GraphModule, values: Sequence[fx.Node | None]) -> None:
    module.graph.output_node().args = (tuple(values),)
    module.graph.lint()
    module.recompile()


def _fold(graph: fx.Graph, first: Sequence[Any]) -> None:
    """Write the first placeholders that have a number, and the integer arithmetic on them, as numbers."""
    known = {node: value for node, value in zip(_placeholders(graph), first) if isinstance(value, int)}
    for node in list(graph.nodes):
        if node in known:
            value = known[node]
        elif node.target in (operator.add, operator.mul) and not node.all_input_nodes:
            value = node.target(*node.args)
        else:
            continue
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), _replacing(node, value))
        graph.erase_node(node)


def _replacing(old: fx.Node, new: int) -> Callable[[fx.Node], Any]:
    return lambda leaf: new if leaf is old else leaf


def _take_parts(graph: fx.Graph, whole: Sequence[fx.Node], mesh: RuntimeMesh) -> None:
    """Let the last placeholders of a graph be given as `whole` ones: this rank's part of each is taken first."""
    coordinates = mesh.mesh.coordinates(mesh.rank)
    placeholders = _placeholders(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node, given in zip(placeholders[len(placeholders) - len(whole) :], whole):
        node.meta["val"] = given.meta["val"]
        (layout,) = info(node).layouts
        part, users = node, list(node.users)
        with graph.inserting_before(first):
            if layout.shard_axes:  # the batch, in its first dimension
                index, size = 0, layout.local_shape[0]
                for axis in layout.shard_axes:
                    index = index * axis.size + coordinates[axis.name]
                part = graph.call_function(aten.slice.Tensor, (part, 0, index * size, (index + 1) * size))
            if not given.meta["val"].is_contiguous():  # the step was compiled for row-major memory
                part = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
        for user in users:
            user.replace_input_with(node, part)
