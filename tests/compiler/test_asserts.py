"""Asserts of values, and branches that only raise an error, are kept in each kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.runtime import WorkerPool
from tests.compiler.checking import CheckedLoss, Checking
from tests.compiler.test_capture import assert_computes

asserted = torch.ops.shardweave.asserted.default


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (8, 4))
    return x, y


def build(kind: Any = Checking) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind() if kind is Checking else kind(8, 4)
    return model.double()


BAD = {
    "large input": torch.full((8, 8), 2000.0), "bad values of shape": torch.full((8, 8), torch.nan),
    "large hidden values": torch.full((8, 8), 900.0),
}  # fmt: skip


def test_a_check_of_elements_is_computed_with_them_and_a_check_of_a_number_with_the_output() -> None:
    captured = capture(build(), rows())
    assert_computes(captured, build(), rows(), {})
    checks = captured.graph.graph.find_nodes(op="call_function", target=asserted)
    assert [(check.args[0].meta["val"].shape, check.args[2]) for check in checks] == [
        ((8, 8), False), ((8, 16), False), ((8, 16), False), ((8, 16), True), ((8, 4), False)
    ]  # fmt: skip
    graph = capture(build(CheckedLoss), rows()[:1]).graph.graph
    (check,) = graph.find_nodes(op="call_function", target=asserted)
    assert graph.output_node().args[0][0] is check


def trains_with_checks(options: dict[str, Any]) -> list[str]:
    model, failures = build(), []
    parallel = sw.compile_parallel(build(), sw.Cluster.local(2), rows(), options=sw.Options(**options), progress=False)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, parallel)]
    for step in range(2):
        losses = [each(*rows(step)) for each in (model, parallel)]
        if not torch.allclose(*losses):
            failures.append(f"the loss of step {step}: {losses}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for message, x in BAD.items():
        try:
            parallel(x.double(), rows()[1])
            failures.append(f"no error: {message}")
        except AssertionError as error:
            if message not in str(error):
                failures.append(f"{message}: {error}")
    return failures


@pytest.mark.parametrize(
    "options",
    [{"force": {"*": "zdp"}}, {"force": {"*": "tensor:2"}}, {"micro_batches": 2}, {"sub_batches": 2}],
    ids=["zdp", "tensor", "micro_batches", "sub_batches"],
)
def test_checks_are_kept_in_every_kind_of_step(options: dict[str, Any], pool: WorkerPool) -> None:
    assert pool.run(trains_with_checks, options, nprocs=2) == [[], []]


def test_torch_compile_keeps_asserts() -> None:
    step: Any = torch.compile(build(CheckedLoss), backend="shardweave")
    x = rows()[0]
    torch.testing.assert_close(step(x), build(CheckedLoss)(x))
    with pytest.raises(AssertionError, match="large loss"):
        step(1e3 * x)


def test_a_check_of_a_number_of_the_whole_batch_does_not_go_with_micro_batches() -> None:
    options = sw.Options(micro_batches=2)
    with pytest.raises(sw.ParallelError, match="needs the sum over the whole batch"):
        sw.compile_parallel(build(CheckedLoss), sw.Cluster.local(1), rows()[:1], options=options, progress=False)
