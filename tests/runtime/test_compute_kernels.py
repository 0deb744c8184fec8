"""Compute that Inductor compiles: the same numbers, the same order of collectives, equal regions once.

Without Inductor: ops that one kernel of torch computes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.distributed import is_collective
from shardweave.ops import seeded
from shardweave.runtime import bound_step, compute_kernels
from shardweave.runtime.compute_kernels import RegionCompiler, combine_ops
from shardweave.runtime.execute import boxed
from shardweave.runtime.grad_accumulation import Boxed
from shardweave.runtime.launch import WorkerPool
from shardweave.runtime.parameters import local_tensor
from tests.passes.cases import CASES, Draw
from tests.passes.harness import examples, graph_of
from tests.peak_memory import measured_peak

aten = torch.ops.aten
ROWS, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.5, self.training)
        return x + F.silu(self.down(hidden))


class Stack(nn.Module):
    """Equal layers with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Network(nn.Module):
    """Convolutions, a batch norm with buffers, and results of one op that are used apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.norm(self.first(x))).chunk(2, dim=2)
        return F.gelu(self.last(left * right)).square().mean()


def seeded_model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch(kind: type[nn.Module]) -> Tensor:
    shape = (ROWS, WIDTH) if kind is Stack else (ROWS, 3, 8, 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def compiled(kind: type[nn.Module], mode: compute_kernels.InductorMode, **options: Any) -> sw.ParallelModule:
    cluster = sw.Cluster.local(dist.get_world_size() if dist.is_initialized() else 1)
    asked = sw.Options(inductor=mode, **options)
    made = sw.compile_parallel(seeded_model(kind), cluster, batch(kind), options=asked)
    assert isinstance(made, sw.ParallelModule)
    return made


def train(parallel: sw.ParallelModule, kind: type[nn.Module]) -> list[Tensor]:
    """The loss, the gradients and the buffers of a second step."""
    for _ in range(2):
        parallel.zero_grad()
        loss = parallel(batch(kind))
        loss.backward()
    gradients = [parameter.grad for parameter in parallel.parameters() if parameter.grad is not None]
    return [loss.detach(), *(local_tensor(each).clone() for each in (*gradients, *parallel.buffers()))]


def check_same(kind: type[nn.Module], **options: Any) -> tuple[int, int]:
    """Compare compiled steps with plain ones; returns how many regions were compiled, and the number of calls."""
    calls = 0
    run = compute_kernels._Region.__call__

    def counted(region: Any, arguments: list[Any]) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        return run(region, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute_kernels._Region, "__call__", counted)
        plain, fused = compiled(kind, False, **options), compiled(kind, True, **options)
        expected = train(plain, kind)
        assert not calls
        torch.testing.assert_close(train(fused, kind), expected, rtol=1e-4, atol=1e-6)
    assert calls
    return len(fused._binder.regions.compiled), calls // 2


def check_same_without_prefetch() -> tuple[int, int]:
    return check_same(Stack, force={"*": "zero3"}, buckets=False, max_prefetch=1)


@pytest.mark.parametrize("kind", [Stack, Network])
def test_one_rank_computes_the_same(kind: type[nn.Module]) -> None:
    check_same(kind)


def test_ranks_compute_the_same_and_equal_layers_are_compiled_once(pool: WorkerPool) -> None:
    for regions, calls in pool.run(check_same_without_prefetch, nprocs=2, timeout=600):
        assert regions < calls


def plainly(region: Boxed, _: object) -> Boxed:
    """Stands for Inductor, which takes seconds a region."""
    return region


def test_collectives_keep_their_order() -> None:
    options = sw.Options(force={"*": "zero3"}, buckets=False, max_prefetch=1)
    compiler = Compiler(seeded_model(Stack), sw.Cluster.local(2), batch(Stack), options, None)
    step = compiler.lower(compiler.plan()).step
    assert step.backward is not None
    for module in (step.forward, step.backward):
        graph = RegionCompiler(True, "cpu")(module, copy.deepcopy(module.graph))
        before, after = (_in_place(each) for each in (module.graph, graph))
        assert [node.name for node in before] == [node.name for node in after]
        assert sum(node.target is torch.ops._c10d_functional.wait_tensor.default for node in after) > 4
        regions = [node for node in graph.nodes if isinstance(node.target, compute_kernels._Region)]
        assert len({node.target.code for node in regions}) < len(regions) < len(module.graph.nodes) / 4


def _in_place(graph: fx.Graph) -> list[fx.Node]:
    """The collectives and the random ops of a graph."""
    return [node for node in graph.nodes if is_collective(node)
            or node.target is seeded]  # fmt: skip


def test_values_are_freed_where_the_plain_graph_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_kernels, "_compiled", plainly)
    monkeypatch.setattr(bound_step, "recompute_fusible", lambda forward, backward, _: (forward, backward))
    peaks = []
    for mode in (False, True):
        parallel = compiled(Stack, mode)
        parallel(batch(Stack)).backward()
        x = batch(Stack)
        peaks.append(measured_peak(lambda: parallel(x).backward(), parallel.parameters()))  # noqa: B023
    assert peaks[0] == peaks[1]


def two_ops(x: Tensor) -> list[Tensor]:
    return [torch.ops.aten.neg.default(torch.ops.aten.exp.default(x))]


def run_two_ops(compiler: RegionCompiler, x: Tensor) -> Sequence[Any]:
    module = fx.symbolic_trace(two_ops)
    return boxed(module, compiler(module, module.graph))([x])


def test_another_memory_order_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_kernels, "_compiled", plainly)
    compiler = RegionCompiler(True, "cpu")
    module = fx.symbolic_trace(two_ops)
    run = boxed(module, compiler(module, module.graph))
    for number, x in enumerate((torch.ones(2, 3), torch.ones(3, 2).t(), torch.zeros(2, 3)), start=1):
        torch.testing.assert_close(run([x]), [-x.exp()])
        assert len(compiler.compiled) == min(number, 2)


def fails(*_: object) -> Boxed:
    raise RuntimeError("no lowering\n  target: aten.exp.default\n  args: none")


def test_an_op_that_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_kernels, "_compiled", fails)
    with pytest.raises(sw.ParallelError, match=r"cannot compile aten.exp.default: .*no lowering.*inductor=False"):
        run_two_ops(RegionCompiler(True, "cpu"), torch.ones(2))
    compiler = RegionCompiler("auto", "cuda")
    with pytest.warns(UserWarning, match=r"aten.exp.default.*run as they are"):
        run_two_ops(compiler, torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(run_two_ops(compiler, torch.ones(3)), [-torch.ones(3).exp()])


def test_cpus_run_the_plain_graph_by_default() -> None:
    assert [RegionCompiler("auto", device).is_on for device in ("cpu", "cuda")] == [False, True]
    assert not RegionCompiler(False, "cuda").is_on
    with pytest.raises(sw.PlanError, match="the option inductor must be"):
        sw.Options(inductor="always")  # type: ignore[arg-type]


def test_torch_compile_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(region: Boxed, arguments: object) -> Boxed:
        seen.append(region)
        return region

    monkeypatch.setattr(compute_kernels, "_compiled", noted)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())
    expected = model(batch(Stack))
    fused = torch.compile(model, backend="shardweave", options={"inductor": True})
    torch.testing.assert_close(fused(batch(Stack)), expected)
    assert seen


# -- without Inductor


class Layers(nn.Module):
    """Products with biases of all kinds: of matrices, of rows of sequences, of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head, self.bare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(3, 3, bias=False)
        self.conv, self.back = nn.Conv1d(WIDTH, 6, 3, padding=1), nn.ConvTranspose1d(6, WIDTH, 3, padding=1)
        self.plain = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.plain(self.back(self.conv(x.transpose(1, 2)).relu()))
        hidden = self.linear(channels.transpose(1, 2)).tanh()
        result: Tensor = self.bare(self.head(hidden.mean(1)).sin()).square().mean()
        return result


def test_products_add_their_biases_and_gradients_of_convolutions_are_computed_together() -> None:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 5, WIDTH)
    compiler = Compiler(model, sw.Cluster.local(1), (x,), sw.Options(), None)
    step = compiler.lower(compiler.plan()).step
    assert step.backward is not None
    forward, backward = (
        [node.target for node in combine_ops(copy.deepcopy(module.graph)).nodes if node.op == "call_function"]
        for module in (step.forward, step.backward)
    )
    assert forward.count(aten.addmm.default) == 0 and forward.count(torch.addmm) == 2
    assert forward.count(torch.mm) == 1 and forward.count(torch.convolution) == 3
    assert torch.add not in forward and aten.add.Tensor not in forward
    names = [str(target) for target in backward]
    assert backward.count(aten.convolution_backward.default) == 2
    assert names.count("shardweave.conv_weight_grad.default") == 1  # the first convolution's input has no gradient
    assert "shardweave.conv_input_grad.default" not in names
    assert backward.count(torch.sum) == 3  # of the biases of two products and of that convolution
    parallel = sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), x)
    assert isinstance(parallel, sw.ParallelModule)
    for each in (model, parallel):
        each(x).backward()
    for (name, parameter), other in zip(model.named_parameters(), parallel.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(local_tensor(other.grad), parameter.grad, msg=name)


def test_biases_that_are_not_there_yet_are_added_later() -> None:
    graph = fx.Graph()
    values = {"a": torch.randn(2, 3), "b": torch.randn(3, 4), "bias": torch.randn(8)}
    nodes = {name: graph.placeholder(name) for name in values}
    product = graph.call_function(aten.mm.default, (nodes["a"], nodes["b"]))
    bias = graph.call_function(aten.slice.Tensor, (nodes["bias"], 0, 0, 4))  # stands for the wait of a gather
    graph.output(graph.call_function(aten.add.Tensor, (product, bias)))
    for node, value in [*((nodes[name], values[name]) for name in values), (product, torch.empty(2, 4))]:
        node.meta["val"] = value
    bias.meta["val"] = torch.empty(4)
    combined = combine_ops(graph)
    assert [node.target for node in combined.nodes if node.op == "call_function"] == [
        torch.mm, aten.slice.Tensor, torch.add,
    ]  # fmt: skip


def test_inputs_that_are_added_to_a_convolution_are_no_bias() -> None:
    graph = fx.Graph()
    x, weight = torch.randn(2, 3, 5), torch.randn(3, 3, 1)
    nodes = [graph.placeholder(name) for name in ("x", "weight")]
    product = graph.call_function(aten.convolution.default, (*nodes, None, [1], [0], [1], False, [0], 1))
    graph.output(graph.call_function(aten.add.Tensor, (product, nodes[0])))
    for node, value in zip((*nodes, product), (x, weight, x), strict=True):
        node.meta["val"] = value
    found = fx.GraphModule(nn.Module(), combine_ops(graph))(x, weight)
    torch.testing.assert_close(found, F.conv1d(x, weight) + x)


@examples(150, shrink=False)
@given(data=st.data(), target=st.sampled_from([each for each in CASES if "empty" not in str(each)]))
def test_ops_that_are_called_by_functions_of_torch_are_the_same(data: st.DataObject, target: Any) -> None:
    module, values = graph_of(target, *CASES[target](Draw(data)))
    combined = fx.GraphModule(module, combine_ops(copy.deepcopy(module.graph)))
    expected, found = (torch.manual_seed(0) and each(*values) for each in (module, combined))
    torch.testing.assert_close(found, expected, equal_nan=True)
