"""Fused attention's forward and backward in one graph, as CUDA captures them."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.ir import Assignment, Mesh
from shardweave.ops.seeded_random import seeded
from shardweave.passes.base import verify
from shardweave.passes.partition import Shard, Sharder
from shardweave.sharding.annotate import Annotate
from shardweave.sharding.rules.matmul import ATTENTION_BACKWARD, ATTENTION_FORWARD
from tests.passes.harness import (
    bound,
    examples,
    graph_of,
    mesh_of,
    output_nodes,
    placeholders,
    random_assignment,
    random_assignments,
    random_layout,
    run_sharded,
)

aten = torch.ops.aten
CUDA = {
    "flash": (ATTENTION_FORWARD[1], ATTENTION_BACKWARD[1]),
    "efficient": (ATTENTION_FORWARD[2], ATTENTION_BACKWARD[2]),
    "cudnn": (ATTENTION_FORWARD[3], ATTENTION_BACKWARD[3]),
    "fused": (ATTENTION_FORWARD[4], ATTENTION_BACKWARD[4]),
}


def both(kind: str, values: list[Tensor], causal: bool, dropout: float) -> fx.GraphModule:
    """The annotated graph of a forward and its backward; `values` are query, key, value, the gradient, a mask."""
    forward, backward = CUDA[kind]
    graph = fx.Graph()
    given_ = []
    for index, value in enumerate(values):
        given_.append(graph.placeholder(f"p{index}"))
        given_[-1].meta["val"] = value
    q, k, v, grad, *mask = given_

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with values[0].fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*fx.node.map_arg(args, lambda leaf: leaf.meta["val"]))
        return node

    def items(node: fx.Node) -> list[Any]:
        found = []
        for index, value in enumerate(node.meta["val"]):
            found.append(call(operator.getitem, node, index) if isinstance(value, Tensor) else value)
        return found

    bias = [mask[0] if mask else None]
    if kind == "flash":
        out, *kept = items(call(forward, q, k, v, dropout, causal))
        found = call(backward, grad, q, k, v, out, *kept[:5], dropout, causal, *kept[5:7])
    elif kind == "efficient":
        out, *kept = items(call(forward, q, k, v, *bias, True, dropout, causal))
        found = call(backward, grad, q, k, v, *bias, out, *kept, dropout, [True, True, True, bool(mask)], causal)
    elif kind == "cudnn":
        out, lse, *kept = items(call(forward, q, k, v, *bias, True, dropout, causal))
        found = call(backward, grad, q, k, v, out, lse, *kept[4:6], *bias, *kept[:4], dropout, causal)
    else:
        out, *kept = items(call(forward, q, k, v, *bias, dropout, causal))
        needed = [True, True, True, bool(mask)]
        found = call(backward, grad, q, k, v, *bias, needed, out, *kept[:5], dropout, causal, *kept[5:7])
    gradients = [item for item in items(found) if isinstance(item, fx.Node)]
    graph.output((out, *gradients))
    graph.eliminate_dead_code()
    return Annotate()(fx.GraphModule({}, graph))


@pytest.mark.parametrize("kind", CUDA)
@examples(12, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_cuda_captures(kind: str, seed: int) -> None:
    """On fake CUDA values: any strategy gives local ops of the shapes that their layouts say."""
    rng = random.Random(seed)
    shared = rng.choice([1, 2, 4]) if kind in ("flash", "cudnn") else 1
    b, h, s, t, e = rng.choice([2, 4]), rng.choice([1, 2, 4]), rng.choice([8, 32]), rng.choice([8, 16]), 16
    sizes = [(b, h * shared, s, e), (b, h, t, e), (b, h, t, e), (b, h * shared, s, e)]
    if kind != "flash" and rng.random() < 0.5:
        sizes.append((rng.choice([1, b]), rng.choice([1, h * shared]), rng.choice([1, s]), t))
    with FakeTensorMode():
        values = [torch.empty(size, device="cuda", dtype=torch.float16) for size in sizes]
    dropout = rng.choice([0.0, 0.1])
    module = both(kind, values, rng.random() < 0.3, dropout)
    mesh = Mesh(tuple(rng.sample(axes := mesh_of(2, 2).axes, len(axes))))
    sources = {node.name: random_layout(node, mesh, rng) for node in placeholders(module)}
    assignments = random_assignments(module, mesh, rng, share=rng.choice([0.0, 1.0]))
    sharder = Sharder(Shard(mesh, assignments, sources, [None] * len(output_nodes(module))), module)
    local = sharder.run()
    verify(local, "shard")
    forward, backward = (next(node for node in module.graph.nodes if node.target is target) for target in CUDA[kind])
    assert any(node.target is seeded for node in local.graph.nodes) == (dropout > 0)
    if dropout:
        assert sharder.assigned[forward] == sharder.assigned[backward]


@examples(12, shrink=False)
@given(seed=st.integers(0, 10**6))
def test_dropout_of_the_backward_is_the_forwards(seed: int) -> None:
    """The output is linear in the value: <out, grad> = <value, its gradient> if both have dropped the same."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [(4, 4, 8, 4), (4, 2, 8, 4), (4, 2, 8, 4), (4, 4, 8, 4)]
    values = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    fake = FakeTensorMode()
    module = both("flash", [fake.from_tensor(value) for value in values], False, 0.4)
    mesh = Mesh(tuple(rng.sample(axes := mesh_of(2, 2, 2).axes, len(axes))))
    sources = {node.name: random_layout(node, mesh, rng) for node in placeholders(module)}
    assignments = random_assignments(module, mesh, rng, share=1.0)
    run = run_sharded(module, values, mesh, assignments, sources)
    out, grad_value = run.whole(0), run.whole(3)
    plain, *_ = aten._scaled_dot_product_flash_attention.default(*values[:3])
    assert not torch.allclose(out, plain)
    # the logsumexp that the backward reads is of float32
    torch.testing.assert_close((out * values[3]).sum(), (grad_value * values[2]).sum(), rtol=1e-5, atol=1e-5)


def test_query_rows_are_free_without_a_causal_mask() -> None:
    """Split, they make the gradients of key and value partial sums; a causal mask counts them from the start."""
    for causal in (False, True):
        q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
        module, _ = graph_of(aten._scaled_dot_product_flash_attention.default, (q, k, k, 0.0, causal), {})
        (node,) = (node for node in module.graph.nodes if node.target is ATTENTION_FORWARD[1])
        rule = bound(node)
        assert {factor.name for factor in rule.factors if not factor.blocked} == {"b", "h", "r", *"s" * (not causal)}
        assert str(rule).startswith(f"b (h r) {'[s]' if causal else 's'} [d], b h [t] [d], b h [t] [e] -> ")
        assert Assignment.of(random_assignment(rule, mesh_of(2), random.Random(0), 1.0)).items
