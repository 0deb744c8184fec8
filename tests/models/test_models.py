"""The zoo itself: what the other tests take for granted of it."""

from __future__ import annotations

import pickle

import pytest
import torch

from shardweave.demo.model import GPT, GPTConfig
from tests.models import ZOO, Case


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_trains_and_repeats(case: Case) -> None:
    """Every parameter gets a gradient, the loss falls on a repeated batch, and two builds are equal."""
    model, again = case.model(), pickle.loads(pickle.dumps(case)).model()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    batch = case.batch(step=0)
    assert all(torch.equal(batch[name], case.batch(step=0)[name]) for name in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = case.loss(model(**batch))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_tied_models_share_one_parameter() -> None:
    for name in ("gpt", "llama"):
        tied, untied = ZOO[f"{name}-tied"].model(), ZOO[name].model()
        assert len(list(tied.named_parameters(remove_duplicate=False))) == len(list(tied.parameters())) + 1
        assert len(list(untied.named_parameters(remove_duplicate=False))) == len(list(untied.parameters()))


def test_demo_model_has_about_ten_million_parameters() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(GPTConfig()).parameters())
    assert 9.5e6 < count < 11.5e6
