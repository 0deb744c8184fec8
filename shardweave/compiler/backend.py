"""The other door: ``torch.compile(model, backend="shardweave", options={"cluster": cluster})``.

Every rank calls the compiled model with the same global tensors. Parameters stay the user's, whole on every rank; the
compute between is spread (data and tensor parallel) by the same passes as `compile_parallel`'s; outputs and gradients
come back whole. Autograd and the optimizer see an ordinary model.

Only this module and `aot` touch torch's private backend interfaces.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import currentframe
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from shardweave.compiler.aot import Source, bind, captured_from, seed_draws, sources_of
from shardweave.compiler.compiler import Compiler, check_world, control_of
from shardweave.cost_model import Cluster, Options
from shardweave.distributed import in_step
from shardweave.ir import Captured, ParallelError
from shardweave.ops import Seeds, mixed
from shardweave.passes import graph_hash
from shardweave.planner import Plan
from shardweave.report import Reporter
from shardweave.runtime import agree_on_graph, agreed_seed, boxed, compare_graphs
from shardweave.sharding import draws


def shardweave(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that ``torch.compile(..., backend="shardweave")`` calls for each graph of the model.

    Each graph is planned for itself, and for the sizes of its inputs: other sizes compile another step. A model that
    is one graph (``fullgraph=True``) gets the best plan; in a broken one, forced names must be found in every graph
    that trains.

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
        As itself, not as Dynamo's BackendCompilerFailed: what `compile_parallel` raises; an unknown option.

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
        asked = Options(**{key: given[key] for key in known & set(given)})
        return cls(Cluster.of(cluster), asked, given.get("inspect"))


def _compiled(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A graph as AOTAutograd calls it; also that of a call without gradients, which every rank computes whole."""
    run = boxed(gm, copy.deepcopy(gm.graph))

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

        # Ranks talk to each other here: with real tensors, and without the Python dispatcher, which calls gloo with the
        # GIL held, while gloo's thread may want it to let an earlier collective's tensors go.
        with _disable_current_modes(), no_python_dispatcher():
            compiler = self._captured(joint, num_fwd_outputs)
            if compiler.annotated.ops:
                return self._spread(compiler, joint, num_fwd_outputs)
        # Between two graph breaks there may be nothing to spread.
        whole: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs
        )
        if any(draws(node) for module in whole for node in module.graph.nodes):
            with _disable_current_modes(), no_python_dispatcher():
                first = mixed(agreed_seed(self.request.options.patience), int(graph_hash(*whole)[:16], 16))
            for index, module in enumerate(whole):
                seed_draws(module, Seeds(mixed(first, index)))
        return whole

    def _captured(self, joint: fx.GraphModule, num_forward: int) -> _WholeCompiler:
        """The compiler of this graph; what goes wrong on one rank is raised on all. Collective."""
        found: list[_WholeCompiler] = []

        def start() -> None:
            found.append(_WholeCompiler(captured_from(joint, self.sources, num_forward), self.request))

        groups, checks = control_of(self.request.options), self.request.options.checks
        if groups is not None and (checks is None or checks >= 0):
            agree_on_graph(groups.talk, None)
        in_step(groups, "the capture of the model", start)
        return found[0]

    def _spread(
        self, compiler: _WholeCompiler, joint: fx.GraphModule, num_forward: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        plan = compiler.agreed_plan()
        compiled = compiler.lowered_together(plan)
        if self.request.inspect is not None:
            self.request.inspect(plan, compiled.graphs)
        timeout = self.request.options.patience
        bound: list[tuple[fx.GraphModule, fx.GraphModule]] = []

        def build() -> None:
            seed = compare_graphs(compiled.step, timeout)
            given, checks = compiler.captured.inputs, compiler.options.checks
            bound.append(bind(compiled.step, joint, num_forward, seed, timeout, given, checks))

        in_step(control_of(self.request.options), "making the process groups", build)
        return bound[0]


class _WholeCompiler(Compiler):
    """Compiles a step whose parameters rest whole on every rank."""

    def __init__(self, captured: Captured, request: _Request) -> None:
        self._given = captured
        super().__init__(captured.graph, request.cluster, None, request.options, Reporter.of_ranks(None))

    def _capture(self, *_: Any) -> Captured:
        return self._given
