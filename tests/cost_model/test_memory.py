"""Memory: which values share storages, how long they live, and that a real run uses what is predicted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from shardweave.cost_model import Cluster
from shardweave.cost_model.memory import liveness, storage_bytes
from tests.cost_model.handmade import Builder, aten

AXES = Cluster.local(4).mesh().axes


def test_views_share_the_storage_of_their_base_and_keep_it() -> None:
    builder = Builder([])
    x = builder.tensor("x", 4, 4)
    y = builder.call(aten.neg.default, x)
    view = builder.call(aten.t.default, builder.call(aten.view.default, y, [2, 8]))
    other = builder.call(aten.neg.default, x)
    end = builder.call(aten.neg.default, view)
    found = liveness(builder.graph)
    assert found.where[view] == found.where[y] == ((y, 0),)
    assert (y, 0) not in found.dead.get(other, ())
    assert (y, 0) in found.dead[end]


def test_a_reshape_copies_only_what_is_strided() -> None:
    builder = Builder([])
    x = builder.tensor("x", 4, 6)
    flat = builder.call(aten.reshape.default, x, [24])
    copied = builder.call(aten.reshape.default, builder.call(aten.t.default, x), [24])
    found = liveness(builder.graph)
    assert found.where[flat] == ((x, 0),)
    assert found.where[copied] == ((copied, 0),)


def test_a_reshape_of_what_is_strided_is_a_view_where_it_can_be() -> None:
    """(heads, rows, 8) with the heads inside, as attention has it: a head may be given a dimension of its own."""
    builder = Builder([])
    x = builder.tensor("x", 16, 2, 8)
    heads = builder.call(aten.transpose.int, x, 0, 1)
    grouped = builder.call(aten.reshape.default, heads, [1, 2, 16, 8])
    merged = builder.call(aten.reshape.default, heads, [32, 8])
    found = liveness(builder.graph)
    assert found.where[grouped] == ((x, 0),)
    assert found.where[merged] == ((merged, 0),)


def test_elements_of_several_outputs_have_storages_of_their_own() -> None:
    builder = Builder([])
    x, weight = builder.tensor("x", 4, 8), builder.tensor("weight", 8)
    norm = builder.call(aten.native_layer_norm.default, x, [8], weight, weight, 1e-5)
    mean = builder.call(operator.getitem, norm, 1)
    parts = builder.call(aten.split.Tensor, x, 2)
    second = builder.call(operator.getitem, parts, 1)
    found = liveness(builder.graph)
    assert found.where[mean] == ((norm, 1),)
    assert [storage_bytes(storage) for storage in found.born[norm]] == [128, 16, 16]
    assert found.where[second] == ((x, 0),)
    assert parts not in found.born


def test_a_collective_holds_its_input_until_its_wait() -> None:
    builder = Builder(AXES)
    x = builder.call(aten.neg.default, builder.tensor("x", 8, 8))
    start = builder.start("reduce_scatter", x, AXES, "w", "gradient")
    between = builder.call(aten.neg.default, builder.tensor("y", 2))
    wait = builder.wait(start)
    found = liveness(builder.graph)
    assert (x, 0) not in found.dead.get(between, ())
    assert (x, 0) in found.dead[wait]
    assert found.where[wait] == ((start, 0),)
    assert wait not in found.born


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most bytes that tensors made inside hold at once, `given` ones and their views apart."""

    def __init__(self, given: tuple[torch.Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.given:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.gelu(x @ w)
    left, right = (y @ w.t()).split(16, dim=1)  # type: ignore[no-untyped-call]
    total: torch.Tensor = (left * right).transpose(0, 1).reshape(-1).sum()
    return total


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    heads = (x @ w).view(8, 4, 4, 8).transpose(1, 2)
    scores = (heads @ heads.transpose(-1, -2)).softmax(-1)
    return torch.nn.functional.layer_norm((scores @ heads).transpose(1, 2).reshape(32, 32) + x, [32])


def backward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(chain(x, w) + attention(x, w).square().sum(), w)
    return gradient


@pytest.mark.parametrize("function", [chain, attention, backward])
def test_the_predicted_peak_is_that_of_a_real_run(function: Callable[..., torch.Tensor]) -> None:
    inputs = torch.randn(32, 32), torch.randn(32, 32)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert predicted_peak(module.graph) == pytest.approx(measured_peak(module, inputs), rel=0.02)


def predicted_peak(graph: fx.Graph) -> int:
    found = liveness(graph)
    now = peak = 0
    mine = [node for node in graph.nodes if node.op == "call_function"]
    for node in mine:
        now += sum(map(storage_bytes, found.born.get(node, ())))
        peak = max(peak, now)
        now -= sum(storage_bytes(storage) for storage in found.dead.get(node, ()) if storage[0] in mine)
    return peak


def measured_peak(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> int:
    with Watch(inputs) as watch, torch.no_grad():
        module(*inputs)
    return int(watch.peak)
