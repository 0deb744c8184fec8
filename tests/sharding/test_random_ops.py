"""Random ops: replicas agree, shards draw independently, a fixed seed repeats."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from shardweave.compiler.capture import capture
from shardweave.cost_model.options import Options
from shardweave.ir import SEED, Assignment, Mesh
from shardweave.ir.captured import Captured
from shardweave.ir.layout import input_layouts, output_layouts
from shardweave.passes.base import verify
from shardweave.passes.partition import Shard, Sharder
from shardweave.passes.step_boundary import annotate
from shardweave.sharding.graphs import copied, info
from shardweave.sharding.rules import RULES
from shardweave.sharding.rules.pointwise import draws
from shardweave.sharding.rules.registry import tensor_args
from tests import lockstep
from tests.passes.cases import CASES, RANDOM, Draw
from tests.passes.harness import (
    Run,
    assert_equal,
    bound,
    examples,
    graph_of,
    mesh_of,
    meshes,
    output_nodes,
    placeholders,
    random_assignment,
    random_assignments,
    random_layout,
    run_sharded,
    together,
)

aten = torch.ops.aten


def test_every_op_that_draws_has_this_law() -> None:
    """None hides among the ops of test_rules.py; attention without dropout draws nothing."""
    tagged = {target for target in RULES if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())}
    assert {target for target in tagged if "attention" not in str(target)} == set(RANDOM)


@pytest.mark.parametrize("target", sorted(RANDOM, key=str), ids=str)
@examples(6)
@given(data=st.data())
def test_replicas_agree_and_shards_draw_their_own(target: object, data: st.DataObject) -> None:
    """The parts are drawn from the op's distribution, differ from each other, and depend on the seed alone."""
    d = Draw(data)
    module, values = graph_of(target, *CASES[target](d))
    mesh = data.draw(meshes())
    (node,) = (node for node in module.graph.nodes if node.target is target)
    rule = bound(node)
    assignment = random_assignment(rule, mesh, d.rng, chance=0.9)
    given_, results = input_layouts(rule, assignment), output_layouts(rule, assignment, mesh)
    sources = {argument.name: layout for argument, layout in zip(tensor_args(node), given_, strict=True)}

    def run(seed: int) -> Run:
        assigned = {node.name: Assignment.of(assignment)}
        return run_sharded(copied(module), values, mesh, assigned, sources, results, seed=seed)

    state = torch.random.get_rng_state()
    first, again, other = run(1), run(1), run(2)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator is not touched"
    assert not first.collectives
    for index in range(len(results)):
        assert torch.equal(first.whole(index), again.whole(index))  # and replicas agree, or there is no whole
    whole = first.whole(0)
    assert not torch.equal(whole, other.whole(0))
    value, chance = RANDOM[target]
    spread = 5 * math.sqrt(chance * (1 - chance) / whole.numel())
    assert abs(float((whole <= value).double().mean()) - chance) < spread
    axes = results[0].shard_axes
    parts = {tuple(axis.coordinate(rank) for axis in axes): part for rank, part in enumerate(first.parts[0])}
    assert all(not torch.equal(one, two) for one, two in combinations(parts.values(), 2))


def test_dropout_is_its_mask() -> None:
    """What is kept is scaled, what is not is zero, and the mask says which."""
    x = torch.randn(8, 64, dtype=torch.float64)
    module, values = graph_of(aten.native_dropout.default, (x, 0.25, True), {})
    mesh = mesh_of(2, 2)
    (node,) = (node for node in module.graph.nodes if node.target is aten.native_dropout.default)
    assignment = Assignment.of({mesh.axes[0]: "i0", mesh.axes[1]: "i1"})
    run = run_sharded(module, values, mesh, {node.name: assignment}, {})
    out, mask = run.whole(0), run.whole(1)
    assert mask.dtype == torch.bool
    torch.testing.assert_close(out, x * mask / 0.75, rtol=1e-12, atol=0)


# -- whole steps


class Dropped(nn.Module):
    """Every way to draw: dropout, dropped channels and layers, noise, a learnt model's own random features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.3)
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        kept = torch.rand(hidden.shape[0], 1, dtype=x.dtype, device=x.device) < 0.7  # stochastic depth
        hidden = hidden * kept + F.dropout1d(hidden, 0.2)
        return F.mse_loss(F.dropout(self.last(hidden), 0.1), targets)


def captured_step() -> tuple[Captured, dict[str, Tensor]]:
    """The annotated step of `Dropped`, and the values of its placeholders."""
    torch.manual_seed(0)
    model = Dropped().double()
    batch = {"x": torch.randn(4, 8).double(), "targets": torch.randn(4, 8).double()}
    captured = capture(model, batch)
    annotate(captured, Options())
    tensors = {**{name: p.detach() for name, p in model.named_parameters()}, **batch}
    names = {**captured.parameters, **captured.inputs}
    values = {}
    for node in placeholders(captured.graph):
        values[node.name] = tensors[names[node.name]] if node.name in names else torch.ones((), dtype=torch.float64)
    return captured, values


class Given(fx.Interpreter):
    """One device's run of a step, with what was drawn put in."""

    def __init__(self, module: fx.GraphModule, drawn: dict[str, Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.drawn = drawn

    def run_node(self, n: fx.Node) -> object:
        return self.drawn[n.name] if n.name in self.drawn else super().run_node(n)


@examples(12, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_a_step_is_one_devices_with_what_was_drawn(seed: int) -> None:
    """Random strategies: put together, the masks give one device's values at every node, the backward's too."""
    rng = random.Random(seed)
    captured, values = captured_step()
    sizes = rng.choice([(2, 2), (4,), (2,), (2, 2, 2)])
    mesh = Mesh(tuple(rng.sample(axes := mesh_of(*sizes).axes, len(axes))))
    module = copied(captured.graph)
    assignments = random_assignments(module, mesh, rng, share=rng.choice([0.3, 1.0]))
    sources = {node.name: random_layout(node, mesh, rng) for node in placeholders(module)}
    sharder = Sharder(Shard(mesh, assignments, sources, [None] * len(output_nodes(module))), module)
    local = sharder.run()
    verify(local, "shard")
    held = set(local.graph.nodes)
    known = {node.name: found for node, found in sharder.values.canonical.items() if found[0] in held and found[1].dims}
    output = local.graph.output_node()
    output.args = (tuple(written for written, _ in known.values()),)
    given_ = [node for node in placeholders(local) if node.name != SEED and not node.name.startswith("coord_")]
    inputs = [
        lockstep.shard(value, info(node).layouts[0], mesh) for node, value in zip(given_, values.values(), strict=True)
    ]
    ranked = lockstep.run(local, mesh, inputs, seed)
    whole = {
        name: together([found[index] for found in ranked], layout, mesh)
        for index, (name, (_, layout)) in enumerate(known.items())
    }
    drawing = {node.name for node in module.graph.nodes if draws(node) or any(map(draws, node.all_input_nodes[:1]))}
    drawn = {node.name for node in module.graph.nodes if node.name in drawing and _is_drawn(node)}
    assert len(drawn & set(whole)) >= 6
    one = Given(captured.graph, {name: whole[name] for name in drawn & set(whole)})
    one.run(*values.values())
    expected = {node.name: value for node, value in one.env.items()}
    for name, value in whole.items():
        assert_equal(value, expected[name], name)


def _is_drawn(node: fx.Node) -> bool:
    """Whether a node's value is what an op drew: the op itself, or one of its outputs."""
    return (draws(node) and isinstance(node.meta["val"], Tensor)) or (
        "getitem" in str(node.target) and draws(node.all_input_nodes[0])
    )


def test_the_same_drawing_twice_is_two_drawings() -> None:
    """Two layers draw the same shape: what depends on no input is computed once, but not what is drawn."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight * torch.rand(8) * torch.rand(8)).sum()

    captured = capture(Twice(), (torch.randn(4, 8),))
    annotate(captured, Options())
    found = [node for node in captured.graph.graph.nodes if node.target is aten.rand.default]
    assert len(found) == 2
    local = Sharder(Shard(mesh := mesh_of(2), {}, {}, [None] * 2), captured.graph).run()
    drawn = [node.name for node in local.graph.nodes if draws_in(node)]
    output = local.graph.output_node()
    output.args = (tuple(node for node in local.graph.nodes if node.name in drawn),)
    values = [[torch.ones(node.meta["val"].shape)] * 2 for node in placeholders(local) if info(node).layouts]
    (one, two), replica = lockstep.run(local, mesh, values)
    assert not torch.equal(one, two) and torch.equal(one, replica[0]) and torch.equal(two, replica[1])


def draws_in(node: fx.Node) -> bool:
    """Whether a node of a local graph draws."""
    return getattr(node.target, "__name__", "") == "seeded"


def test_a_step_that_draws_nothing_takes_no_seed() -> None:
    module, values = graph_of(aten.relu.default, (torch.randn(4),), {})
    run = run_sharded(module, values, mesh_of(2), {}, {})
    assert all(node.name != SEED for node in placeholders(run.graph))
