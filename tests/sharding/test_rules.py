"""Every rule is proven: parts of an op computed apart, put together, are the whole op."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardweave.ir import Assignment, Layout
from shardweave.ir.layout import input_layouts, output_layouts
from shardweave.sharding.annotate import depends_on_inputs, source_of
from shardweave.sharding.rules import RULES, find_rule
from shardweave.sharding.rules.registry import CONDITIONAL, DECOMPOSITIONS, tensor_args
from tests.passes.cases import CASES, RANDOM, Draw
from tests.passes.harness import (
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
)

aten = torch.ops.aten
OPS = sorted(set(CASES) - set(RANDOM), key=str)  # test_random_ops.py has the law of the others
SINGLE = [target for target in OPS if target in RULES or target not in {**DECOMPOSITIONS, **CONDITIONAL}]


def test_every_rule_has_a_case() -> None:
    """A new rule cannot be added untested."""
    assert {*RULES, *DECOMPOSITIONS, *CONDITIONAL} <= set(CASES)


@pytest.mark.parametrize("target", SINGLE, ids=str)
@examples(12)
@given(data=st.data())
def test_parts_make_the_whole(target: object, data: st.DataObject) -> None:
    """The rule alone: inputs cut as it says, no communication, outputs put together as it says."""
    d = Draw(data)
    module, values = graph_of(target, *CASES[target](d))
    constant = set(module.graph.nodes) - depends_on_inputs(module.graph)
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    calls = [node for node in calls if node.target is target or node not in constant]
    assume([call.target for call in calls] == [target])  # some calls of some ops are always decomposed
    expected = module(*values)
    mesh = data.draw(meshes())
    (node,) = calls
    rule = bound(node)
    assignment = random_assignment(rule, mesh, d.rng, chance=0.9)
    given_, results = input_layouts(rule, assignment), output_layouts(rule, assignment, mesh)
    sources = {argument.name: layout for argument, layout in zip(tensor_args(node), given_, strict=True)}
    wanted = [results[source_of(value)[1]] for value in output_nodes(module)]
    found = find_rule(node)
    assignments = {} if found is not None and found.kind == "view" else {node.name: Assignment.of(assignment)}
    run = run_sharded(module, values, mesh, assignments, sources, wanted)
    assert not run.collectives
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value, f"{target} {rule} {assignment}")


@pytest.mark.parametrize("target", OPS, ids=str)
@examples(12)
@given(data=st.data())
def test_from_anywhere_to_anywhere(target: object, data: st.DataObject) -> None:
    """The op in a graph: inputs lie anyhow, parts of it follow or have strategies, outputs are wanted anyhow."""
    d = Draw(data)
    module, values = graph_of(target, *CASES[target](d))
    expected = module(*values)
    mesh = data.draw(meshes())
    sources = {
        node.name: random_layout(node, mesh, d.rng, partial=value.is_floating_point() or value.is_complex(), chance=0.7)
        for node, value in zip(placeholders(module), values)
    }
    assignments = random_assignments(module, mesh, d.rng, share=data.draw(st.sampled_from([0.0, 0.5])))
    wanted: list[Layout | None] = [
        random_layout(value, mesh, d.rng) if data.draw(st.booleans()) else None for value in output_nodes(module)
    ]
    run = run_sharded(module, values, mesh, assignments, sources, wanted)
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value, f"{target} from {list(map(str, sources.values()))} on {assignments}")


@pytest.mark.parametrize("kept", [None, 0, 1])
def test_scale_by_frequency_counts_the_whole_batch(kept: int | None) -> None:
    """Counting tokens needs the whole batch, which no rank has: a wrong gradient would be silent."""
    tokens = torch.tensor([1, 0, 1, 2, 1, 3, 0, 3])
    module, values = graph_of(aten.embedding_dense_backward.default, (torch.randn(8, 6), tokens, 5, 3, True), {})
    mesh = mesh_of(2)
    (axis,) = mesh.axes
    layouts = {"p0": Layout(((axis, 4), (6,))), "p1": Layout(((axis, 4),))}
    run = run_sharded(module, values, mesh, {}, layouts if kept is None else {f"p{kept}": layouts[f"p{kept}"]})
    assert_equal(run.whole(0), module(*values)[0])
