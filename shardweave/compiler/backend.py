"""``torch.compile(model, backend="shardweave", options={"cluster": cluster})``.

Every rank calls the compiled model with the same global tensors. Parameters stay the user's, whole on every rank. The
compute between is sharded (data and tensor parallel) by the same passes as those of `compile_parallel`. Outputs and
gradients come back whole. Autograd and the optimizer see an ordinary model.

This is the only module that touches torch's private backend interfaces, and that knows how AOTAutograd describes the
inputs and outputs of a graph.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import lru_cache, partial
from inspect import currentframe
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.compiler.capture_errors import refuse_open_sizes
from shardweave.compiler.compiler import Compiler, check_world
from shardweave.compiler.joint_graph import asserts_as_values, enclose_open_sizes, extend_backward, is_token
from shardweave.compiler.traceable_forms import recurrent_layers
from shardweave.cost_model import OLD_OPTION_NAMES, Cluster, Options
from shardweave.distributed import RuntimeMesh, control, gather_from_ranks, run_on_each_rank
from shardweave.ir import SEED, Axis, Captured, CaptureError, Mesh, ParallelError, digit_size
from shardweave.ops import Seeds, hash_seeds, seeded
from shardweave.passes import Step, graph_hash
from shardweave.planner import Plan
from shardweave.report import Reporter
from shardweave.runtime import (
    AgreedCall,
    InductorMode,
    RegionCompiler,
    agree_on_graph,
    boxed,
    compare_graphs,
    group_of_calls,
    ranks_agree,
)
from shardweave.sharding import copied, draws, graph_outputs, info, tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """An input of Dynamo's graph: the user's name for it, and its kind (parameter, buffer or input)."""

    name: str
    kind: str


def sources_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Source]:
    """The source of each input of Dynamo's graph."""
    found: list[Source] = []
    for node, value in zip((node for node in gm.graph.nodes if node.op == "placeholder"), example_inputs):
        text = str(node.meta["grapharg"].source.name) if "grapharg" in node.meta else ""
        path = re.findall(r"_(?:modules|parameters|buffers)\['([^']+)'\]", text)
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer" if "_buffers[" in text else "input"
        name = ".".join(path or re.findall(r"\['?([^'\]]+)'?\]", text)) or node.name
        found.append(Source(name if all(name != other.name for other in found) else node.name, kind))
    return found


def captured_from(joint: fx.GraphModule, sources: Sequence[Source], num_forward: int) -> Captured:
    """AOTAutograd's joint graph as a captured step: its inputs named, its gradients after the outputs."""
    # 1. Name the inputs.
    graph = copied(joint)
    described = joint.graph.output_node().meta["desc"]
    named: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    primals: list[str] = []
    tangents: dict[str, int] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        what = node.meta["desc"]
        if type(what).__name__ == "TangentAOTInput":
            tangents[node.name] = described.index(what.output)
            node.meta["partitioner_tag"] = "is_backward"
        elif type(what).__name__ == "PlainAOTInput":
            source = sources[what.idx]
            primals.append(source.name)
            if isinstance(node.meta["val"], Tensor):
                named[source.kind][node.name] = source.name
        elif is_token(what):
            raise CaptureError(
                "an op checks values, or says them, beside the graph. Of the functions of torch.linalg, call those "
                "whose names end in _ex (inv_ex, solve_ex), which return an error code; or use compile_parallel"
            )
        else:
            raise CaptureError(f"the graph has an input of the kind {type(what).__name__} ({what}): not supported")
    # 2. Put the gradients of parameters and inputs after the outputs.
    values = graph_outputs(graph.graph)
    if not all(isinstance(value, fx.Node) for value in values[:num_forward]):
        raise CaptureError("the graph returns something that is not a tensor, which is not supported")
    gradients = {name: value for name, value in zip(primals, values[num_forward:]) if value is not None}
    graph.graph.output_node().args = ([*values[:num_forward], *gradients.values()],)
    # 3. Fix symbolic sizes, and describe the step.
    given = [node for node in graph.graph.find_nodes(op="placeholder") if node.name not in tangents]
    if all(isinstance(size, int) for node in given for value in tensors(node.meta["val"]) for size in value.shape):
        enclose_open_sizes(graph, graph.graph)
    _fix_sizes(graph.graph)
    asserts_as_values(graph.graph, range(num_forward))
    for node in graph.graph.nodes:
        node.meta.setdefault("val", None)  # checks of values have none
    extend_backward(graph.graph)
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
        mutated=(),  # AOTAutograd returns their new values among the outputs, and writes them back
        aliases={},
        call=None,
        training=True,
        whole=True,
    )


def bind(
    step: Step,
    joint: fx.GraphModule,
    num_forward: int,
    seed: int,
    timeout: timedelta | None,
    inputs: Mapping[str, str] | None = None,
    checked_calls: float = 0,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """This rank's graphs of a step in AOTAutograd's calling convention: whole inputs, a gradient for each.

    The first seed of a step that draws random numbers is made of `seed`, which all ranks share, and of the graph's
    hash. In each call the ranks check that all of them run this graph. In the first `checked_calls` calls they compare
    the values of `inputs`, a mapping from placeholders to the user's names. If it is negative they do neither.
    """
    # 1. Split the joint graph's inputs, and bind the graphs to this rank's process groups.
    assert step.backward is not None
    given = joint.graph.find_nodes(op="placeholder")
    num_tangents = sum(type(node.meta["desc"]).__name__ == "TangentAOTInput" for node in given)
    primals, tangents = given[: len(given) - num_tangents], given[len(given) - num_tangents :]
    device = next(node.meta["val"].device.type for node in given if isinstance(node.meta["val"], Tensor))
    mesh = _runtime_mesh(step.spec.mesh, device, timeout, dist.group.WORLD)
    forward, backward = mesh.bind(step.forward), mesh.bind(step.backward)
    # 2. The forward: write the coordinates as numbers, ask for the seed, take this rank's part of whole inputs.
    _fold_constants(forward.graph, mesh.coordinates)
    if step.spec.draws:
        _seed_forward(forward, Seeds(hash_seeds(seed, int(step.spec.graph_hash[:16], 16))))
    _take_whole_inputs(forward.graph, primals, mesh)
    _insert_agreement(forward, step.spec.graph_hash, primals, inputs or {}, mesh, checked_calls)
    values = graph_outputs(forward.graph)
    _set_outputs(forward, [value for value in values if isinstance(value, fx.Node)])
    # 3. The backward takes the coordinates, then the saved values, then the tangents.
    _fold_constants(backward.graph, [*mesh.coordinates, *values[num_forward:]])
    _take_whole_inputs(backward.graph, tangents, mesh)
    gradients = iter(graph_outputs(backward.graph))
    wanted = graph_outputs(joint.graph)[num_forward:]
    _set_outputs(backward, [None if value is None else next(gradients) for value in wanted])
    return forward, backward


@lru_cache(maxsize=4)
def _runtime_mesh(mesh: Mesh, device: str, timeout: timedelta | None, _: object) -> RuntimeMesh:
    """The running world as a mesh. All steps share it, since each mesh makes process groups."""
    return RuntimeMesh(mesh, device, timeout)


def _replace_by_number(node: fx.Node, value: int) -> None:
    """Replace a node by a number."""
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), lambda leaf: value if leaf is node else leaf)
    node.graph.erase_node(node)


def _fix_sizes(graph: fx.Graph) -> None:
    """Replace symbolic sizes by their current values. Dynamo's guards check these: other sizes compile another step."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()

    def fixed(tensor: Tensor) -> Tensor:
        with fake:
            size, stride = [int(n) for n in tensor.shape], [int(n) for n in tensor.stride()]
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)

    refuse_open_sizes(graph)
    if not any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            _replace_by_number(node, int(value))
        else:
            node.meta["val"] = pytree.tree_map_only(Tensor, fixed, value)


def _set_outputs(module: fx.GraphModule, values: Sequence[fx.Node | None]) -> None:
    module.graph.output_node().args = (tuple(values),)
    module.graph.lint()
    module.recompile()


def _fold_constants(graph: fx.Graph, first: Sequence[Any]) -> None:
    """Replace the first placeholders, where their value is a number, and the arithmetic on them, by numbers."""
    known = {node: value for node, value in zip(graph.find_nodes(op="placeholder"), first) if isinstance(value, int)}
    for node in list(graph.nodes):
        if node in known:
            _replace_by_number(node, known[node])
        elif node.target in (operator.add, operator.mul) and not node.all_input_nodes:
            _replace_by_number(node, node.target(*node.args))


class _NextSeed(nn.Module):
    """The seed of a call. The graph calls this module for it, as AOTAutograd passes only the user's tensors."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()
        self.seeds = seeds

    def forward(self) -> int:
        return self.seeds()


def _seed_forward(module: fx.GraphModule, seeds: Seeds) -> None:
    """Let the forward graph call for its seed instead of taking it; CaptureError if the backward needs it, too."""
    (seed,) = (node for node in module.graph.find_nodes(op="placeholder") if node.name == SEED)
    if module.graph.output_node() in seed.users:
        raise CaptureError(
            "the model draws random numbers in its backward, which torch.compile cannot do with this backend: "
            "draw them in the forward, or use compile_parallel"
        )
    seed.replace_all_uses_with(_insert_seed(module, seeds))
    module.graph.erase_node(seed)


def _insert_seed(module: fx.GraphModule, seeds: Seeds) -> fx.Node:
    """Insert a call for the seed before all other calls."""
    module.add_submodule("seeds", _NextSeed(seeds))
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        asked = module.graph.call_module("seeds")
    asked.meta["val"] = None
    return asked


def seed_draws(module: fx.GraphModule, seeds: Seeds) -> None:
    """Let all ranks draw the same random numbers in a graph that each rank computes whole."""
    drawing = [node for node in module.graph.nodes if draws(node)]
    if not drawing:
        return
    seed = _insert_seed(module, seeds)
    for index, node in enumerate(drawing):
        with module.graph.inserting_before(node):
            again = module.graph.call_function(seeded, (node.target, seed, index, 0, *node.args), node.kwargs)
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again)
        module.graph.erase_node(node)
    module.recompile()


def _insert_agreement(
    module: fx.GraphModule,
    graph_hash: str,
    whole: Sequence[fx.Node],
    inputs: Mapping[str, str],
    mesh: RuntimeMesh,
    checked_calls: float,
) -> None:
    """Insert the ranks' agreement on a call into a graph that takes `whole` inputs."""
    group = group_of_calls(mesh)
    pairs = zip(module.graph.find_nodes(op="placeholder"), whole, strict=True)
    found = [(node, inputs[given.name]) for node, given in pairs if given.name in inputs]
    if group is None or not ranks_agree(checked_calls):
        return
    module.add_submodule("agreed_call", AgreedCall([name for _, name in found], graph_hash, group, checked_calls))
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        module.graph.call_module("agreed_call", tuple(node for node, _ in found)).meta["val"] = None


def _take_whole_inputs(graph: fx.Graph, whole: Sequence[fx.Node], mesh: RuntimeMesh) -> None:
    """Let the last placeholders of a graph take `whole` values, and insert the ops that select this rank's part.

    Placeholders for numbers, which are constants of the graph by now, are added and not used.
    """
    coordinates = mesh.mesh.coordinates(mesh.rank)
    tensors = [given for given in whole if isinstance(given.meta["val"], Tensor)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    placeholders = graph.find_nodes(op="placeholder")
    mine = [*placeholders[len(placeholders) - len(tensors) :], first]
    for given in whole:
        if not isinstance(given.meta["val"], Tensor):
            with graph.inserting_before(mine[0]):
                graph.placeholder(given.name).meta = dict(given.meta)
            continue
        node = mine.pop(0)
        node.meta["val"] = given.meta["val"]
        (layout,) = info(node).layouts
        part, users = node, list(node.users)
        with graph.inserting_before(first):
            if layout.shard_axes:  # the batch, in its first dimension
                sizes = [digit_size(digit) for digit in layout.dims[0]]
                part = graph.call_function(aten.reshape.default, (part, [*sizes, *layout.local_shape[1:]]))
                for index, digit in reversed(list(enumerate(layout.dims[0]))):
                    if isinstance(digit, Axis):
                        part = graph.call_function(aten.select.int, (part, index, coordinates[digit.name]))
                part = graph.call_function(aten.reshape.default, (part, list(layout.local_shape)))
            if not given.meta["val"].is_contiguous():  # the step was compiled for row-major memory
                part = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
        for user in users:
            user.replace_input_with(node, part)


def shardweave(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(..., backend="shardweave")`` calls for each graph of the model.

    Each graph gets a plan of its own, for the sizes of its inputs: other sizes compile another step. A model that is
    one graph (``fullgraph=True``) gets the best plan. Names in ``force`` must be in every graph that trains.

    Parameters
    ----------
    gm, example_inputs
        Dynamo's graph and its inputs.
    options : mapping, optional
        ``"cluster"``: as for `compile_parallel`, by default the running world. ``"memory_limit"``, ``"force"``,
        ``"time_limit"`` and the others: as in `Options` (outputs are always whole, and a precision is refused).
        ``"inspect"``: called with the `Plan` and the graph after each stage, of every step that is compiled.
    mode : str, optional
        There are none.

    Returns
    -------
    callable
        The graph's function. Without gradients it is computed whole on every rank.

    Raises
    ------
    ParallelError
        As in `compile_parallel`, or for an unknown option. It is not wrapped in Dynamo's BackendCompilerFailed.

    Examples
    --------
    >>> model = torch.compile(torch.nn.Linear(8, 8), backend=shardweave, options={"cluster": Cluster.local(1)})
    >>> model(torch.ones(2, 8)).sum().backward()
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import ShortenTraceback

    try:
        request = _Request.of(options or {}, mode)
        check_world(request.cluster)
        partition = _Partition(request, sources_of(gm, example_inputs))
        finish = partial(_compile_whole, inductor=request.options.inductor)
        # retain_graph=True may run a backward again
        with torch._functorch.config.patch(donated_buffer=False), recurrent_layers():
            compiled: Callable[..., Any] = aot_autograd(fw_compiler=finish, partition_fn=partition)(gm, example_inputs)
            return compiled
    except ParallelError as error:
        # Dynamo lets this kind of its errors through, where it would hide any other in a BackendCompilerFailed.
        kind = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
        raise kind(*error.args, first_useful_frame=currentframe()) from error


@dataclass(frozen=True)
class _Request:
    """The options of ``torch.compile``."""

    cluster: Cluster
    options: Options
    inspect: Callable[[Plan, Mapping[str, fx.GraphModule]], None] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], mode: str | None) -> _Request:
        if mode is not None:
            raise ParallelError(f"the backend shardweave has no modes, got mode={mode!r}: leave it out")
        if given.get("precision") is not None:
            raise ParallelError(
                "the backend shardweave leaves parameters to you, whole and in your dtype, so that it takes no "
                "precision: convert the model yourself, model.to(torch.bfloat16), or use compile_parallel"
            )
        if given.get("measure_ops") is True:
            raise ParallelError(
                "measure_ops is for compile_parallel: the backend shardweave plans while torch traces, where no op runs"
            )
        known = {field.name for field in fields(Options)} - {"outputs"}
        accepted = known | OLD_OPTION_NAMES
        unknown = sorted(set(given) - accepted - {"cluster", "inspect"})
        if unknown:
            raise ParallelError(
                f"the backend shardweave has no option {', '.join(map(repr, unknown))}; it has 'cluster', 'inspect', "
                f"{', '.join(map(repr, sorted(known)))}"
            )
        cluster = given.get("cluster")
        if cluster is None:
            cluster = _running_world() if dist.is_initialized() else Cluster.local(1)
        asked = Options(**{key: given[key] for key in accepted & set(given)})
        return cls(Cluster.of(cluster), asked, given.get("inspect"))


def _running_world() -> Cluster:
    """The running world, measured with real tensors, which Dynamo's modes would replace."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher():
        return Cluster.detect()


def _compile_whole(gm: fx.GraphModule, inputs: Sequence[Any], inductor: InductorMode) -> Callable[[list[Any]], Any]:
    """A graph as AOTAutograd calls it. Without gradients, every rank computes the whole graph."""
    device = next((value.device.type for value in inputs if isinstance(value, Tensor)), "cpu")
    run = boxed(gm, RegionCompiler(inductor, device)(gm, copy.deepcopy(gm.graph)))

    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class _Partition:
    """From AOTAutograd's joint graph to this rank's forward and backward."""

    request: _Request
    sources: Sequence[Source]

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._dispatch.python import no_python_dispatcher
        from torch._functorch.partitioners import default_partition
        from torch.utils._python_dispatch import _disable_current_modes

        # The ranks communicate here, so tensors must be real. The Python dispatcher must be off: it calls gloo while it
        # holds the GIL, which gloo's thread may need to free the tensors of an earlier collective.
        with _disable_current_modes(), no_python_dispatcher():
            compiler = self._capture(joint, num_fwd_outputs)
            if compiler.annotated.ops:
                return self._shard(compiler, joint, num_fwd_outputs)
        # Without ops to shard, such as between two graph breaks, every rank computes the whole graph.
        whole: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs
        )
        if any(draws(node) for module in whole for node in module.graph.nodes):
            with _disable_current_modes(), no_python_dispatcher():
                seed = gather_from_ranks(torch.initial_seed(), self.request.options.collective_timeout)[0]
                first = hash_seeds(seed, int(graph_hash(*whole)[:16], 16))
            for index, module in enumerate(whole):
                seed_draws(module, Seeds(hash_seeds(first, index)))
        return whole

    def _capture(self, joint: fx.GraphModule, num_forward: int) -> Compiler:
        """The compiler of this graph; an error of one rank is raised on all. Collective."""
        options = self.request.options
        groups = control(options.collective_timeout)
        if groups is not None and ranks_agree(options.checked_calls):
            agree_on_graph(groups.exchange, None)

        def capture() -> Compiler:
            captured = captured_from(joint, self.sources, num_forward)
            told = Reporter.of_ranks(None)
            return Compiler(captured.graph, self.request.cluster, None, options, told, captured=captured)

        return run_on_each_rank(groups, "the capture of the model", capture)

    def _shard(
        self, compiler: Compiler, joint: fx.GraphModule, num_forward: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        plan = compiler.agreed_plan()
        compiled = compiler.lower_on_all_ranks(plan)
        if self.request.inspect is not None:
            self.request.inspect(plan, compiled.graphs)
        timeout = self.request.options.collective_timeout

        def build() -> tuple[fx.GraphModule, fx.GraphModule]:
            seed = compare_graphs(compiled.step, timeout)
            given, checked_calls = compiler.captured.inputs, compiler.options.checked_calls
            return bind(compiled.step, joint, num_forward, seed, timeout, given, checked_calls)

        return run_on_each_rank(control(self.request.options.collective_timeout), "making the process groups", build)
