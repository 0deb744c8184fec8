"""Schedule and verify: collectives start early, are waited for late, and hold no more memory than allowed."""

from __future__ import annotations

import operator
import random
from bisect import bisect_left
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.cost_model import Cluster
from shardweave.cost_model.options import Options
from shardweave.ir import META, Collective, Grid, NodeInfo, Strategy
from shardweave.ir.errors import VerifyError
from shardweave.passes.base import verify
from shardweave.passes.candidate_orders import GLUE, WAIT
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.schedule import Schedule, fits
from shardweave.planner.problem.space import legal
from shardweave.sharding.graphs import copied, info
from tests.passes.harness import examples, mesh_of
from tests.passes.joint import joint

aten = torch.ops.aten


def zero(name: str, max_prefetch: int = 1) -> Compiled:
    """A step with all parameters sharded at rest."""
    step = joint(name)
    strategies = {op.name: Strategy(Grid(data=4), rest=4) for op in step.annotated.ops}
    return lower(step.annotated, strategies, mesh_of(4), Options(max_prefetch=max_prefetch))


def places(module: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(module.graph.nodes)}


def starts(module: fx.GraphModule, cause: str) -> list[fx.Node]:
    return [node for node in module.graph.nodes if (what := info(node).collective) is not None and what.cause == cause]


def is_compute(node: fx.Node) -> bool:
    """Whether a node takes a device's time: no wait, no reshape, no start, no arithmetic on coordinates."""
    if node.op != "call_function" or node.target in GLUE or info(node).collective is not None:
        return False
    return node.target not in (operator.getitem, operator.mul, operator.add)


def first_compute(node: fx.Node, at: dict[fx.Node, int]) -> int:
    """The place of the first compute, or of the output, that needs what `node` starts."""
    found = []
    for user in node.users:
        found.append(first_compute(user, at) if user.target in GLUE else at[user])
    return min(found, default=at[node])


def wait_of(node: fx.Node) -> fx.Node:
    (wait,) = node.users
    assert wait.target is WAIT
    return wait


# -- pairs


@pytest.mark.parametrize("name", ["mlp", "gpt", "llama"])
@examples(3, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_starts_and_waits_pair(name: str, seed: int) -> None:
    """Under any plan: one wait a start, after it; the same collectives as before; forward before backward."""
    rng = random.Random(seed)
    step, mesh = joint(name), mesh_of(4)
    strategies = {op.name: rng.choice(legal(op, mesh)) for op in step.annotated.ops}
    compiled = lower(step.annotated, strategies, mesh, Options(max_prefetch=rng.choice([0, 1, 2])))
    for stage in ("shard", "schedule", "forward", "backward"):
        module = compiled.graphs[stage]
        at = places(module)
        begun = [node for node in module.graph.nodes if info(node).collective is not None]
        assert all(at[wait_of(node)] > at[node] for node in begun)
        waits = [node for node in module.graph.nodes if node.target is WAIT]
        assert sorted(node.args[0].name for node in waits) == sorted(node.name for node in begun)
    before, after = ({node.name for node in compiled.graphs[stage].graph.nodes} for stage in ("shard", "schedule"))
    assert before == after
    stages = [info(node).backward for node in compiled.graphs["schedule"].graph.nodes if node.op == "call_function"]
    assert stages == sorted(stages)


def test_scheduling_is_deterministic() -> None:
    first, second = zero("gpt"), zero("gpt")
    assert first.step.forward.code == second.step.forward.code
    assert first.step.spec.graph_hash == second.step.spec.graph_hash


# -- early and late


@pytest.mark.parametrize("name", ["chain", "gpt", "llama"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_gathers_start_before_the_op_before(name: str, part: str) -> None:
    """While one gathered parameter is used, the next one is on its way; it is waited for at its own use."""
    module = zero(name).graphs[part]
    at = places(module)
    gathers = sorted(starts(module, "parameter"), key=lambda node: first_compute(node, at))
    assert len(gathers) >= 2
    for before, node in zip(gathers, gathers[1:]):
        assert at[node] < first_compute(before, at), f"{node.name} starts after the use of {before.name}"
    compute = [index for node, index in at.items() if is_compute(node)]
    for node in gathers:
        between = [index for index in compute if at[wait_of(node)] < index < first_compute(node, at)]
        assert not between, f"{node.name} is waited for long before its use"
        hidden = [index for index in compute if at[node] < index < at[wait_of(node)]]
        assert hidden or node is gathers[0] or first_compute(node, at) == first_compute(gathers[0], at)


@pytest.mark.parametrize("name", ["chain", "gpt", "llama"])
def test_gradients_are_waited_for_later(name: str) -> None:
    """A gradient's reduction starts with its operand, and compute runs before it is waited for, until none is left."""
    module = zero(name).step.backward
    assert module is not None
    at = places(module)
    compute = [index for node, index in at.items() if is_compute(node)]
    reductions = starts(module, "gradient")
    for node in reductions:
        (operand,) = node.all_input_nodes
        while operand.target in GLUE or operand.target is operator.getitem:
            operand = operand.all_input_nodes[0]
        assert not [index for index in compute if at[operand] < index < at[node]], f"{node.name} starts late"
    for index, node in enumerate(reductions[:-2]):
        later = [place for place in compute if at[node] < place]
        overlapped = [place for place in later if place < at[wait_of(node)]]
        together = at[reductions[index + 1]] < at[wait_of(node)]
        assert together and (overlapped or not later or _same_operand(node, reductions[index + 1])), node.name


def _same_operand(left: fx.Node, right: fx.Node) -> bool:
    """Whether two reductions start at once: a norm's backward gives two gradients."""

    def source(node: fx.Node) -> fx.Node:
        while node.target in GLUE or node.target is operator.getitem or info(node).collective is not None:
            node = node.all_input_nodes[0]
        return node

    return source(left) is source(right)


def test_activations_are_waited_for_at_their_use() -> None:
    """What the next op needs is started as soon as it is computed, and its wait is the last thing before its use."""
    step, mesh = joint("chain"), mesh_of(2, 2, 2)
    swapped = iter([False, True, False])
    strategies = {op.name: Strategy(Grid(2, 2, 2), rest=2, y_inside=next(swapped)) for op in step.annotated.ops}
    compiled = lower(step.annotated, strategies, mesh, Options())
    for part in ("forward", "backward"):
        module = compiled.graphs[part]
        at = places(module)
        order = list(module.graph.nodes)
        for node in starts(module, "activation"):
            assert at[node] == at[node.all_input_nodes[0]] + 1
            use = first_compute(node, at)
            assert all(not is_compute(other) for other in order[at[wait_of(node)] + 1 : use])


# -- memory


@pytest.mark.parametrize("name", ["chain", "gpt", "llama"])
@pytest.mark.parametrize("max_prefetch", [0, 1, 2, 5])
def test_gathers_in_flight_are_bounded(name: str, max_prefetch: int) -> None:
    """At any compute, at most the parameters of the next `max_prefetch` ops that have some are gathered or being so."""
    compiled = zero(name, max_prefetch)
    for part in ("forward", "backward"):
        module = compiled.graphs[part]
        at = places(module)
        spans = [(at[node], first_compute(node, at)) for node in starts(module, "parameter")]
        for node, index in at.items():
            if is_compute(node):
                ahead = {use for start, use in spans if start < index < use}
                assert len(ahead) <= max_prefetch, (part, node.name)


@pytest.mark.parametrize("max_prefetch", [0, 1, 3])
def test_reductions_in_flight_are_bounded(max_prefetch: int) -> None:
    """No more than `max_prefetch` gradients are being reduced beside the newest one."""
    module = zero("gpt", max_prefetch).step.backward
    assert module is not None
    at = places(module)
    for node in (reductions := starts(module, "gradient")):
        open_ones = [other for other in reductions if at[other] < at[node] < at[wait_of(other)]]
        assert len(open_ones) <= max_prefetch


def test_gathered_weights_are_not_saved() -> None:
    """The backward gathers again: of a parameter only its part at rest is kept between forward and backward."""
    compiled = zero("gpt")
    assert compiled.step.backward is not None
    gathered = {wait_of(node).name for node in starts(compiled.step.forward, "parameter")}
    assert not gathered & {node.name for node in compiled.step.backward.graph.nodes if node.op == "placeholder"}


# -- verify


def lowered_chain() -> fx.GraphModule:
    return copied(zero("chain").graphs["schedule"])


def remove_wait(module: fx.GraphModule) -> str:
    node = starts(module, "gradient")[0]
    wait_of(node).replace_all_uses_with(node)
    return "must be waited for once"


def read_before_wait(module: fx.GraphModule) -> str:
    node = starts(module, "parameter")[0]
    with module.graph.inserting_after(node):
        module.graph.call_function(aten.neg.default, (node,))
    return "read by nothing else"


def wait_twice(module: fx.GraphModule) -> str:
    node = starts(module, "parameter")[0]
    with module.graph.inserting_after(node):
        module.graph.call_function(WAIT, (node,))
    return "must be waited for once"


def forward_needs_backward(module: fx.GraphModule) -> str:
    late = next(node for node in module.graph.nodes if is_compute(node) and info(node).backward)
    with module.graph.inserting_after(late):
        early = module.graph.call_function(aten.neg.default, (late,))
    early.meta[META] = NodeInfo(backward=False)
    return "of the forward needs"


def wrong_shape(module: fx.GraphModule) -> str:
    node = next(node for node in module.graph.nodes if node.target is aten.mm.default)
    (layout,) = info(node).layouts
    node.meta["val"] = node.meta["val"].new_empty([size + 1 for size in layout.local_shape])
    return "has the shape"


@pytest.mark.parametrize("damage", [remove_wait, read_before_wait, wait_twice, forward_needs_backward, wrong_shape])
def test_verify_refuses(damage: Callable[[fx.GraphModule], str]) -> None:
    """A broken graph is refused with the pass after which it broke and the rule that it breaks."""
    module = lowered_chain()
    verify(module, "schedule")
    message = damage(module)
    with pytest.raises(VerifyError, match=f"^after a pass: .*{message}"):
        verify(module, "a pass")


# -- by hand


def by_hand() -> fx.GraphModule:
    """``mm(exp(neg(x)), gather(w))``, the gather written where it is needed."""
    graph = fx.Graph()
    (axis,) = mesh_of(2).axes
    fake = FakeTensorMode()

    def made(node: fx.Node, shape: list[int], collective: Collective | None = None) -> fx.Node:
        with fake:
            node.meta["val"] = torch.empty(shape)
        node.meta[META] = NodeInfo(collective=collective)
        return node

    w, x = made(graph.placeholder("w"), [2, 4]), made(graph.placeholder("x"), [4, 4])
    neg = made(graph.call_function(aten.neg.default, (x,)), [4, 4])
    exp = made(graph.call_function(aten.exp.default, (neg,)), [4, 4])
    what = Collective("all_gather", (axis,), 64, "w", "gather from rest", "parameter")
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    start = made(graph.create_node("call_function", target, (w, 2, axis.name), name="start"), [4, 4], what)
    wait = made(graph.create_node("call_function", WAIT, (start,), name="wait"), [4, 4])
    mm = made(graph.call_function(aten.mm.default, (exp, wait)), [4, 4])
    graph.output((mm,))
    return fx.GraphModule(nn.Module(), graph)


def test_by_hand() -> None:
    """The start goes up to where its operand is, the wait stays at its use; with no lookahead nothing moves."""
    names = [node.name for node in Schedule(Cluster.local(4), max_prefetch=1)(by_hand()).graph.nodes]
    assert names == ["w", "x", "start", "neg_default", "exp_default", "wait", "mm_default", "output"]
    names = [node.name for node in Schedule(Cluster.local(4), max_prefetch=0)(by_hand()).graph.nodes]
    assert names == ["w", "x", "neg_default", "exp_default", "start", "wait", "mm_default", "output"]


def saving(*saved: int) -> fx.GraphModule:
    """Layers that keep so many rows of four floats each for their backward."""
    graph = fx.Graph()
    fake = FakeTensorMode()

    def made(node: fx.Node, rows: int, layer: int, backward: bool) -> fx.Node:
        with fake:
            node.meta["val"] = torch.empty(rows, 4)
        node.meta[META] = NodeInfo(op=f"blocks.{layer}.up", backward=backward)
        return node

    inputs = [made(graph.placeholder(f"x{layer}"), rows, layer, False) for layer, rows in enumerate(saved)]
    kept = [made(graph.call_function(aten.exp.default, (x,)), *(saved[at], at, False)) for at, x in enumerate(inputs)]
    used = [made(graph.call_function(aten.neg.default, (x,)), *(saved[at], at, True)) for at, x in enumerate(kept)]
    graph.output(tuple(used))
    return fx.GraphModule(nn.Module(), graph)


def test_what_saves_least_of_equal_layers_stands_for_those_left_out() -> None:
    """The one next to other layers may keep its output in their layout, too: all were thought to."""
    step = saving(256, 512, 128)

    def needed(*few: str) -> int:
        """The least memory that an order fits into with five more of these."""

        def within(limit: int) -> bool:
            return fits(Schedule(Cluster.local(4), memory_limit=limit, repeated_layers=[(few, 5)])(copied(step)))

        return bisect_left(range(2**20), True, key=within)

    assert needed("blocks.0", "blocks.1") == needed("blocks.1", "blocks.0") == needed("blocks.0") < needed("blocks.1")
