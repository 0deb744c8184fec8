"""Recomputation and the all-gathers of parameters: whole ones are shared with the backward, those of slices are not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Options
from shardweave.demo.model import GPTConfig
from shardweave.ir import Mesh
from shardweave.ops import is_coordinate
from shardweave.passes import Step, recompute_fusible
from shardweave.sharding import graph_outputs, info
from tests import lockstep
from tests.models import ZOO
from tests.planner.planners import MetaGPT

GPT = MetaGPT(GPTConfig(vocabulary=256, context=64, layers=2, heads=4, width=64), batch=8)


def backward_gathers(slices: int) -> Counter[str]:
    """How many all-gathers of each parameter the backward of a recomputed ZeRO-3 step starts."""
    model, inputs = GPT.build()
    options = Options(force={"*": "zdp"}, recompute="full", operator_slices=slices, sub_batches=1, keep_gathered=False,
                      micro_batches=1, buckets=False)  # fmt: skip
    compiler = Compiler(model, sw.Cluster.local(2), inputs, options, None)
    graph: fx.Graph = compiler.lower(compiler.plan()).step.backward.graph
    collectives = [known.collective for node in graph.nodes if (known := info(node)).collective is not None]
    return Counter(each.owner for each in collectives if each is not None and each.cause == "parameter")


@pytest.mark.parametrize(("slices", "gathers"), [(1, 1), (4, 8)])
def test_only_parameters_that_are_gathered_whole_are_shared_with_the_recomputation(slices: int, gathers: int) -> None:
    found = backward_gathers(slices)
    products = {name: count for name, count in found.items() if name.startswith("blocks.0") and "up.weight" in name}
    assert set(products.values()) == {gathers}, found


def lowered(name: str, strategy: str, precision: str | None) -> Step:
    case = ZOO[name]
    options = Options(force={"*": strategy}, precision=precision)
    compiler = Compiler(case.model(), sw.Cluster.local(2), case.batch(0), options, None)
    return compiler.lower(compiler.plan()).step


def saved_bytes(values: list[fx.Node]) -> int:
    tensors = [value.meta["val"] for value in values if value.op != "placeholder"]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def results_of(forward: fx.GraphModule, backward: fx.GraphModule, num_results: int, mesh: Mesh) -> list[torch.Tensor]:
    """The results and gradients on both ranks, of random numbers."""
    generator = torch.Generator().manual_seed(0)

    def drawn(placeholder: fx.Node) -> list[torch.Tensor]:
        like = placeholder.meta["val"]
        made = torch.randint(0, 2, like.shape, generator=generator)
        if like.is_floating_point():
            made = made + torch.rand(like.shape, generator=generator)
        return [made.to(like.dtype)] * 2

    def inputs(module: fx.GraphModule) -> list[fx.Node]:
        return [node for node in module.graph.find_nodes(op="placeholder") if not is_coordinate(node)]

    first = lockstep.run(forward, mesh, [drawn(node) for node in inputs(forward)])
    saved = [[rank[index] for rank in first] for index in range(num_results, len(first[0]))]
    tangents = [drawn(node) for node in inputs(backward)[len(saved) :]]
    last = lockstep.run(backward, mesh, [*saved, *tangents])
    return [value for ranks, count in ((first, num_results), (last, None)) for rank in ranks for value in rank[:count]]


@pytest.mark.parametrize(
    ("name", "strategy", "precision"),
    [("llama", "zero3", "bf16"), ("llama", "tensor:2", None), ("gpt", "dp", None), ("mlp", "zero3", None)],
)
def test_pointwise_ops_are_recomputed_from_what_is_saved(name: str, strategy: str, precision: str | None) -> None:
    step = lowered(name, strategy, precision)
    assert step.backward is not None
    num_results = len(step.spec.mutated) + len(step.spec.outputs)
    pair = recompute_fusible(step.forward, step.backward, num_results)
    before, after = (graph_outputs(each.graph)[num_results:] for each in (step.forward, pair[0]))
    assert saved_bytes(after) < saved_bytes(before) * (0.6 if name == "llama" else 1)
    for old, new in zip((step.forward, step.backward), pair, strict=True):
        starts = [[node.name for node in each.graph.nodes if info(node).collective] for each in (old, new)]
        assert starts[0] == starts[1]
    expected, found = (
        results_of(*each, num_results, step.spec.mesh) for each in ((step.forward, step.backward), pair)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_recomputed_from_others_keeps_none_of_them_longer() -> None:
    """A value is recomputed before the backward frees what it is made from."""
    forward, backward = fx.Graph(), fx.Graph()
    aten = torch.ops.aten
    x = forward.placeholder("x")
    sums = forward.call_function(aten.cumsum.default, (x, 0))
    exp = forward.call_function(aten.exp.default, (sums,))
    forward.output((forward.call_function(aten.tanh.default, (sums,)), sums, exp))
    saved_sums, saved_exp, tangent = (backward.placeholder(name) for name in ("sums", "exp", "tangent"))
    early = backward.call_function(aten.mul.Tensor, (tangent, saved_sums))
    late = backward.call_function(aten.cumsum.default, (early, 0))
    backward.output((backward.call_function(aten.mul.Tensor, (late, saved_exp)),))
    for node in (*forward.nodes, *backward.nodes):
        node.meta["val"] = torch.empty(4)
    held = torch.nn.Module()
    _, changed = recompute_fusible(fx.GraphModule(held, forward), fx.GraphModule(held, backward), 1)
    names = [node.name for node in changed.graph.nodes]
    assert f"{exp.name}_again" in names[: names.index(early.name)]
