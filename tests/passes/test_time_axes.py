"""A time axis on a factor is a space axis on it: pieces one after another on one device are parts on many."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from shardweave.ir import SEED, Assignment, Axis, BoundRule, Dims, Layout, Mesh
from shardweave.ir.layout import input_layouts, outermost_first, output_layouts
from shardweave.passes.partition import Shard, Sharder
from shardweave.sharding.annotate import depends_on_inputs, source_of
from shardweave.sharding.graphs import copied
from shardweave.sharding.rules import RULES, find_rule
from shardweave.sharding.rules.pointwise import draws
from shardweave.sharding.rules.registry import tensor_args
from tests.passes.cases import CASES, Draw
from tests.passes.harness import (
    assert_equal,
    bound,
    collectives,
    examples,
    graph_of,
    output_nodes,
    placeholders,
    run_sharded,
)

aten = torch.ops.aten
OPS = sorted(set(CASES) & set(RULES), key=str)
WHOLE = {
    aten.prod.default, aten.median.default, aten.nanmedian.default, aten.randperm.default,
    aten.nonzero_static.default, aten.repeat_interleave.Tensor, torch.ops.shardweave.region.default,
    aten._fused_moving_avg_obs_fq_helper_functional.default,
}  # fmt: skip
"""Ops whose rules have no free factor: they stay in one piece."""
COMBINE = {"sum": torch.add, "own": torch.add, "max": torch.maximum, "min": torch.minimum}
STEP_SEED = 7
Where = Mapping[str, tuple[int, int]]
"""For each factor that is cut: which piece, of how many."""


@dataclass(frozen=True)
class Call:
    """A graph of one op, the values of its placeholders, and the op's node."""

    module: fx.GraphModule
    values: list[Tensor]
    node: fx.Node

    @property
    def rule(self) -> BoundRule:
        return bound(self.node)

    @property
    def results(self) -> list[fx.Node]:
        """What the graph returns of the op, but for states that are of use to an op of the same piece alone."""
        return [value for value in output_nodes(self.module) if source_of(value)[1] not in self.rule.never_partial]


def drawn_call(target: object, d: Draw) -> Call | None:
    """A random call of an op, None where the call is one that is always written in other ops."""
    module, values = graph_of(target, *CASES[target](d))
    constant = set(module.graph.nodes) - depends_on_inputs(module.graph)
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    calls = [node for node in calls if node.target is target or node not in constant]
    return Call(module, values, calls[0]) if [call.target for call in calls] == [target] else None


def drawn_axes(rule: BoundRule, d: Draw) -> dict[Axis, str]:
    """A time axis on a factor, and often a space axis on the same one or another; empty where none can be split."""
    factors = [factor for factor in rule.factors if not factor.blocked]
    if not factors:
        return {}
    factor = d.rng.choice(factors)
    steps = d.rng.choice([count for count in range(2, factor.size + 1) if factor.size % count == 0])
    assignment = {Axis("time", steps, 1, "time"): factor.name}
    left = {other.name: other.size for other in factors} | {factor.name: factor.size // steps}
    fits = [other.name for other in factors if left[other.name] % 2 == 0 and other.reduce == factor.reduce]
    if fits and d.flag():
        assignment[Axis("space", 2, steps)] = d.rng.choice(fits)
    return assignment


def where(assignment: Mapping[Axis, str], steps: Mapping[Axis, int]) -> Where:
    """The piece of each factor at these steps of its axes, the widest strides outermost."""
    found: dict[str, tuple[int, int]] = {}
    for axis in outermost_first(assignment):
        index, count = found.get(assignment[axis], (0, 1))
        found[assignment[axis]] = index * axis.size + steps[axis], count * axis.size
    return found


def window(whole: Tensor, dims: Dims, sizes: Mapping[str, int], at: Where) -> Tensor:
    """The piece of a row-major value: a view of it, with one dimension a factor."""
    names = [name for group in dims for name in group]
    view = whole.view([sizes[name] for name in names])
    for dim, name in enumerate(names):
        index, count = at.get(name, (0, 1))
        length = sizes[name] // count
        view = view.narrow(dim, index * length, length)
    return view


def piece(whole: Tensor, dims: Dims, sizes: Mapping[str, int], at: Where) -> Tensor:
    """A copy of a piece, in the shape that the op takes."""
    shape = [math.prod(sizes[name] // at.get(name, (0, 1))[1] for name in group) for group in dims]
    return window(whole.contiguous(), dims, sizes, at).reshape(shape).clone()


def add(whole: Tensor, part: Tensor, dims: Dims, rule: BoundRule, at: Where, begun: set[object]) -> None:
    """Put a piece of a result where it belongs, with the pieces that came before of factors that it does not have."""
    place = window(whole, dims, rule.sizes(), at)
    present = {name for group in dims for name in group}
    absent = [name for name in at if name not in present]
    key = tuple(sorted((name, at[name]) for name in at if name in present))
    if key not in begun:
        begun.add(key)
        place.copy_(part.reshape(place.shape))
    elif all(any(name in group for value in rule.inputs for group in value) for name in absent):
        (combine,) = {COMBINE[rule.factor(name).reduce] for name in absent}
        place.copy_(combine(place, part.reshape(place.shape)))
    else:  # no input has the factor either: each piece computes all of it
        assert torch.equal(place, part.reshape(place.shape))


def in_sequence(call: Call, local: fx.GraphModule, assignment: Mapping[Axis, str]) -> list[Tensor]:
    """Run an op's local form on one piece after another, on one device.

    Nothing goes in but the pieces of the inputs and the steps, and nothing comes out but the pieces of the results.
    """
    rule, sizes = call.rule, call.rule.sizes()
    dims = dict(zip([argument.name for argument in tensor_args(call.node)], rule.inputs))
    given_values = list(zip(placeholders(call.module), call.values))
    wholes = [torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in call.results]
    begun: list[set[object]] = [set() for _ in wholes]
    for position in itertools.product(*(range(axis.size) for axis in assignment)):
        steps = {axis.name: step for axis, step in zip(assignment, position)}
        at = where(assignment, dict(zip(assignment, position)))
        rest = iter(given_values)
        inputs: list[object] = []
        for node in placeholders(local):
            if node.name == SEED:
                inputs.append(STEP_SEED)
            elif node.name.startswith("coord_"):
                inputs.append(steps[node.name.removeprefix("coord_")])
            else:
                argument, value = next(rest)
                read = argument.name in dims  # some forms take none of it
                inputs.append(piece(value, dims[argument.name], sizes, at) if read else value)
        for result, part, whole, done in zip(call.results, fx.Interpreter(local).run(*inputs), wholes, begun):
            add(whole, part, rule.outputs[source_of(result)[1]], rule, at, done)
    return wholes


def layouts(call: Call, assignment: Mapping[Axis, str], mesh: Mesh) -> tuple[dict[str, Layout], list[Layout]]:
    """Where the op wants its inputs, by placeholder, and where its results then lie."""
    names = [argument.name for argument in tensor_args(call.node)]
    results = output_layouts(call.rule, assignment, mesh)
    sources = dict(zip(names, input_layouts(call.rule, assignment)))
    return sources, [results[source_of(value)[1]] for value in output_nodes(call.module)]


def check(call: Call, assignment: Mapping[Axis, str]) -> None:
    """The op in pieces of a time axis, against the whole op and against the parts of a space axis."""
    found = find_rule(call.node)
    is_view = found is not None and found.kind == "view"

    def assigned(axes: Mapping[Axis, str]) -> dict[str, Assignment]:
        return {} if is_view else {call.node.name: Assignment.of(axes)}

    mesh = Mesh(tuple(assignment))
    sources, wanted = layouts(call, assignment, mesh)
    local = Sharder(Shard(mesh, assigned(assignment), sources, wanted), copied(call.module)).run()
    assert not collectives(local)
    results = in_sequence(call, local, assignment)
    devices = {Axis(axis.name, axis.size, axis.stride): name for axis, name in assignment.items()}
    space = Mesh(tuple(devices))
    sources, wanted = layouts(call, devices, space)
    parts = run_sharded(copied(call.module), call.values, space, assigned(devices), sources, wanted, seed=STEP_SEED)
    expected: Sequence[Tensor] = [] if draws(call.node) else call.module(*call.values)
    for index, result in enumerate(results):
        what = f"{call.node.target} {call.rule} {assignment}"
        assert_equal(result, parts.whole(index), what)
        if not draws(call.node):  # pieces draw as devices do, each its own numbers: not those of the whole op
            assert_equal(result, expected[index], what)


@pytest.mark.parametrize("target", OPS, ids=str)
def test_time_is_space(target: object) -> None:
    """An op's local form depends on its piece and its position alone, and needs nothing of another piece."""
    split = 0

    def law(data: st.DataObject) -> None:
        nonlocal split
        d = Draw(data)
        call = drawn_call(target, d)
        if call is not None and (assignment := drawn_axes(call.rule, d)):
            check(call, assignment)
            split += 1

    for least in (1, 10, 30):  # where examples are few, the first may have no loop to split
        examples(10, at_least=least)(given(data=st.data())(law))()
        if split or target in WHOLE:
            break
    assert (split > 0) is (target not in WHOLE)
