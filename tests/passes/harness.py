"""What the tests of the passes share: meshes, graphs of one op, random spreads, and runs on lockstep ranks."""

from __future__ import annotations

import operator
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.ir import Assignment, Axis, BoundRule, Collective, Layout, Mesh
from shardweave.ir.layout import dims_layout
from shardweave.passes.base import verify
from shardweave.passes.partition import Shard, Sharder
from shardweave.sharding.annotate import Annotate, depends_on_inputs, source_of
from shardweave.sharding.graphs import info
from shardweave.sharding.rules import find_rule
from tests import lockstep
from tests.passes.cases.draw import Made

REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "own": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


def examples(count: int, shrink: bool = True, at_least: int = 1) -> settings:
    """Hypothesis' settings for a property: the same examples in every run, `SHARDWEAVE_EXAMPLES` times as many if set.

    Without `shrink` (seeds do not get smaller in a useful sense) a failure is shown as it was found. `at_least` so many
    examples are drawn, however small that variable is.
    """
    times = float(os.environ.get("SHARDWEAVE_EXAMPLES", "1"))
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]
    return settings(
        max_examples=max(at_least, int(count * times)), deadline=None, derandomize=True, database=None, phases=phases
    )


def mesh_of(*sizes: int) -> Mesh:
    """A mesh with levels of these sizes, innermost first."""
    return Mesh.of_levels([("abcd"[index], size) for index, size in enumerate(sizes)])


@st.composite
def meshes(draw: st.DrawFn, most: int = 12) -> Mesh:
    """Meshes of one to three axes of sizes 2 and 3, in any layout order."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2)]))
    mesh = mesh_of(*sizes)
    if mesh.world_size > most:
        mesh = Mesh(mesh.axes[:2])
    return Mesh(tuple(draw(st.permutations(mesh.axes))))


def graph_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[fx.GraphModule, list[Tensor]]:
    """The annotated graph of one call, and the values of its placeholders; its outputs are the call's tensors.

    Empty ones are left out: what a batch norm in evaluation saves.
    """
    fake = FakeTensorMode()
    graph = fx.Graph()
    values: list[Tensor] = []

    made: dict[int, fx.Node] = {}

    def placeholder(tensor: Tensor) -> fx.Node:
        if id(tensor) not in made:
            node = made[id(tensor)] = graph.placeholder(f"p{len(values)}")
            node.meta["val"] = fake.from_tensor(tensor)
            values.append(tensor)
        return made[id(tensor)]

    def make(what: Made) -> fx.Node:
        args, kwargs = pytree.tree_map_only(Made, make, (what.args, what.kwargs))
        node = graph.call_function(what.target, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda leaf: leaf.meta["val"])
        with fake:
            node.meta["val"] = what.target(*values[0], **values[1])
        return node

    node_args, node_kwargs = pytree.tree_map_only(
        (Tensor, Made), lambda leaf: placeholder(leaf) if isinstance(leaf, Tensor) else make(leaf),
        (tuple(args), dict(kwargs)),
    )  # fmt: skip
    call = graph.call_function(target, node_args, node_kwargs)
    fakes = fx.node.map_arg((node_args, node_kwargs), lambda leaf: leaf.meta["val"])
    with fake:
        call.meta["val"] = target(*fakes[0], **fakes[1])
    results: list[fx.Node] = [call]
    if isinstance(call.meta["val"], (list, tuple)):
        results = []
        for index, value in enumerate(call.meta["val"]):
            if isinstance(value, Tensor) and value.numel():  # an empty one (a debug mask) is no result
                item = graph.call_function(operator.getitem, (call, index))
                item.meta["val"] = value
                results.append(item)
    graph.output(tuple(results))
    return Annotate()(fx.GraphModule(nn.Module(), graph)), values


def bound(node: fx.Node) -> BoundRule:
    rule = info(node).rule
    assert rule is not None
    return rule


def random_assignment(
    rule: BoundRule, mesh: Mesh, rng: random.Random, chance: float = 0.7, blocked: bool = False
) -> dict[Axis, str]:
    """Each axis, with this chance, on a factor that it divides."""
    assignment: dict[Axis, str] = {}
    left = rule.sizes()
    for axis in rng.sample(mesh.axes, len(mesh.axes)):
        fits = [f.name for f in rule.factors if (blocked or not f.blocked) and left[f.name] % axis.size == 0]
        if fits and rng.random() < chance:
            assignment[axis] = rng.choice(fits)
            left[assignment[axis]] //= axis.size
    return assignment


def random_layout(value: fx.Node, mesh: Mesh, rng: random.Random, partial: bool = False, chance: float = 0.5) -> Layout:
    """A layout of a value on the atoms of the op that makes it, or, with `partial`, also a partial sum of it."""
    node, index = source_of(value)
    rule = bound(node)
    whole = BoundRule(rule.factors, (), (rule.outputs[index],))
    present = {name for names in rule.outputs[index] for name in names}
    assignment = {
        axis: name
        for axis, name in random_assignment(whole, mesh, rng, chance, blocked=True).items()
        if name in present
    }
    layout = Layout(dims_layout(rule.outputs[index], rule.sizes(), assignment))
    if partial:
        free = [axis for axis in mesh.axes if axis not in assignment and rng.random() < 0.3]
        layout = Layout(layout.dims, tuple((axis, rng.choice(["sum", "own"])) for axis in free))
    return layout


def assigned_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that may be given an assignment: they have a rule, depend on an input, and are no views."""
    dependent = depends_on_inputs(module.graph)
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node in dependent and info(node).rule is not None:
            rule = find_rule(node)
            if rule is None or rule.kind != "view":
                found.append(node)
    return found


def random_assignments(module: fx.GraphModule, mesh: Mesh, rng: random.Random, share: float) -> dict[str, Assignment]:
    """Assignments for about a `share` of the ops, by node name."""
    return {
        node.name: Assignment.of(random_assignment(bound(node), mesh, rng))
        for node in assigned_nodes(module)
        if rng.random() < share
    }


def output_nodes(module: fx.GraphModule) -> list[Any]:
    values = module.graph.output_node().args[0]
    assert isinstance(values, (list, tuple))
    return list(values)


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


@dataclass
class Run:
    """A sharded run: the local graph, and for each output where it lies and its parts on the ranks."""

    graph: fx.GraphModule
    layouts: list[Layout]
    parts: list[list[Tensor]]
    mesh: Mesh

    def whole(self, index: int) -> Tensor:
        """Output `index`, put together."""
        return together(self.parts[index], self.layouts[index], self.mesh)

    @property
    def collectives(self) -> list[Collective]:
        return collectives(self.graph)


def collectives(module: fx.GraphModule) -> list[Collective]:
    """What the graph's collectives are, in order."""
    return [what for node in module.graph.nodes if (what := info(node).collective) is not None]


def together(parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The value whose parts these are: partial ones combined first; replicas must agree."""
    for axis, reduce in layout.partial:
        groups = [mesh.group_ranks([axis], rank) for rank in range(mesh.world_size)]
        parts = [REDUCE[reduce](torch.stack([parts[peer] for peer in group])) for group in groups]
    return lockstep.unshard(parts, layout.without_partial(), mesh)


def run_sharded(
    module: fx.GraphModule,
    values: Sequence[Tensor],
    mesh: Mesh,
    assignments: Mapping[str, Assignment],
    sources: Mapping[str, Layout],
    wanted: Sequence[Layout | None] | None = None,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Shard a graph and run it on lockstep ranks."""
    outputs = output_nodes(module)
    wanted = wanted or [None] * len(outputs)
    sharder = Sharder(Shard(mesh, assignments, sources, wanted, **options), module)
    local = sharder.run()
    verify(local, "shard")
    inputs = [
        lockstep.shard(value, sources.get(node.name, Layout.replicated(value.shape)), mesh)
        for node, value in zip(placeholders(module), values, strict=True)
    ]
    results = lockstep.run(local, mesh, inputs, seed)
    layouts = [
        want or sharder.values.layout(value).without_partial() for want, value in zip(wanted, output_nodes(module))
    ]
    return Run(local, layouts, [[ranked[index] for ranked in results] for index in range(len(outputs))], mesh)


def assert_equal(got: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal to the rounding of the dtype, also where sums of parts cancel."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got.shape, expected.shape)
    if not (expected.is_floating_point() or expected.is_complex()):
        assert torch.equal(got, expected), what
        return
    tolerance = 1e-11 if expected.dtype in (torch.float64, torch.complex128) else 2e-5
    scale = max(1.0, float(expected.abs().nan_to_num(0, 0, 0).max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
