"""The models that people train: captured as they are, written in rules, split anyhow, they compute what they did."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import local_tensor
from tests.models import TODAY
from tests.passes.every_node import check_random_assignments, close, random_mesh
from tests.passes.harness import examples
from tests.passes.joint import joint

SEEDS = st.integers(0, 10**6)
SMALL = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]
LARGE = [(2, 2, 2, 2), (4, 4), (16,)]


@pytest.mark.parametrize("name", TODAY)
def test_the_annotated_graph_is_the_model(name: str) -> None:
    """With all that annotate writes in other ops: its loss, its gradients, the buffers that it changes."""
    step = joint(name, 4)
    model, batch = step.model, step.batch
    if name == "mixtral":  # torch's grouped product takes no float64: a loop over the experts is independent anyway
        model.config._experts_implementation = "eager"  # type: ignore[union-attr]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = TODAY[name].loss(model(**batch))
    loss.backward()
    outputs, gradients = step.results()
    captured = step.captured
    changed = dict(zip(captured.mutated, outputs))
    for buffer, value in model.named_buffers():
        close(changed.get(buffer, before[buffer]), value, f"{buffer} of {name}", step.tolerance)
        value.copy_(before[buffer])
    returned, *_ = outputs[len(captured.mutated) :]
    close(returned, loss.detach(), f"the loss of {name}", step.tolerance)
    parameters = dict(model.named_parameters())
    assert set(captured.gradients) == set(parameters)
    for parameter, gradient in zip(captured.gradients, gradients, strict=True):
        expected = parameters[parameter].grad
        assert expected is not None
        close(gradient, expected, f"the gradient of {parameter} of {name}", step.tolerance)
        parameters[parameter].grad = None


@pytest.mark.parametrize("name", TODAY)
@examples(2, shrink=False)
@given(seed=SEEDS)
def test_random_assignments(name: str, seed: int) -> None:
    """Each op, forward or backward, on factors of its own or following; inputs anywhere: every node has its value."""
    rng = random.Random(f"{name} {seed}")
    check_random_assignments(joint(name, 4), random_mesh(SMALL, rng), rng)


@pytest.mark.parametrize("name", TODAY)
@examples(1, shrink=False)
@given(seed=SEEDS)
def test_random_assignments_on_16_ranks(name: str, seed: int) -> None:
    """As above, on 16 ranks whose collectives are torch's own."""
    rng = random.Random(f"{name} {seed}")
    check_random_assignments(joint(name, 4), random_mesh(LARGE, rng), rng, local_tensor.run)
