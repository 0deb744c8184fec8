"""Dropping a tangent is taking it as zero, and leaves nothing that only it would compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.compiler.capture import capture
from shardweave.ir.captured import Captured
from shardweave.passes.step_boundary import drop_tangents
from tests.passes.harness import placeholders


class TwoOutputs(nn.Module):
    """A loss and what it is computed from, with a residual, a view, and a branch that only the second output has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 4)
        self.other = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.first(x)) + x
        logits = self.second(hidden).view(2, 2, 4)
        return F.cross_entropy(logits.view(-1, 4), y), logits, self.other(hidden).exp()


def values_of(captured: Captured, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), "x": x, "y": y}
    names = {**captured.parameters, **captured.inputs}
    values = {}
    for node in placeholders(captured.graph):
        value = tensors[names[node.name]].detach() if node.name in names else torch.zeros_like(node.meta["val"])
        values[node.name] = torch.ones(value.shape, dtype=value.dtype) if node.meta["val"].dim() == 0 else value
    return {name: torch.zeros(v.shape, dtype=v.dtype) if name in captured.tangents and v.dim() else v
            for name, v in values.items()}  # fmt: skip


def test_a_dropped_tangent_is_zero() -> None:
    torch.manual_seed(0)
    model = TwoOutputs().double()
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(0, 4, (4,))
    captured = capture(model, (x, y))
    values = values_of(captured, model, x, y)
    expected = captured.graph(*values.values())
    dropped = [name for name, index in captured.tangents.items() if index > 0]
    assert len(dropped) == 2
    before = len(captured.graph.graph.nodes)
    drop_tangents(captured.graph, dropped)
    kept = [node.name for node in placeholders(captured.graph)]
    assert not set(dropped) & set(kept) and len(captured.graph.graph.nodes) < before
    found = captured.graph(*(values[name] for name in kept))
    for got, wanted in zip(found, expected, strict=True):
        if got is None or wanted is None:
            assert wanted is None or not wanted.any()
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_dropping_none_changes_nothing() -> None:
    model = TwoOutputs()
    captured = capture(model, (torch.randn(4, 6), torch.randint(0, 4, (4,))))
    before = captured.graph.code
    drop_tangents(captured.graph, [])
    assert captured.graph.code == before
