"""Whole training steps under random strategies are the step of one device: outputs, gradients, and every node."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardweave.cost_model.options import Options
from shardweave.ir import Mesh, Strategy
from shardweave.passes.pipeline import Compiled, lower
from shardweave.planner.problem.space import legal
from tests import lockstep
from tests.passes.every_node import check_random_assignments, close, random_mesh
from tests.passes.harness import examples, mesh_of, together
from tests.passes.joint import CASES, Joint, joint

SEEDS = st.integers(0, 10**6)
MESHES: dict[str, list[tuple[int, ...]]] = {
    "mlp": [(6,), (2, 3), (4,)],
    "mlp-even": [(2, 2, 2), (4,)],
    "chain": [(4, 2), (2, 2)],
    "gpt": [(4, 2), (2, 3), (4,)],
    "cnn": [(2, 3), (4,), (2, 2)],
    "llama": [(4, 2), (4,)],
}


# -- a strategy for every op


@pytest.mark.parametrize("name", CASES)
@examples(3, shrink=False)
@given(seed=SEEDS)
def test_random_assignments(name: str, seed: int) -> None:
    """Each op, forward or backward, on factors of its own or following; inputs anywhere: every node has its value."""
    rng = random.Random(seed)
    check_random_assignments(joint(name, 4), random_mesh([(2, 2), (2, 3), (3,), (2, 2, 2)], rng), rng)


# -- a strategy for every parameter, through the pipeline


def run_step(step: Joint, compiled: Compiled) -> tuple[list[Tensor], list[Tensor]]:
    """Written buffers and outputs, and gradients, of a lowered step on lockstep ranks, put together."""
    spec, captured = compiled.step.spec, step.captured
    mesh, ranks = spec.mesh, range(spec.mesh.world_size)
    tensors = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers()), **step.batch}
    given = [(value.name, value.layout) for value in (*spec.parameters, *spec.buffers)]
    given += [(value.name, value.layout) for value in spec.inputs]
    inputs = [lockstep.shard(tensors[name].detach(), layout, mesh) for name, layout in given]
    results = lockstep.run(compiled.step.forward, mesh, inputs)
    first = len(spec.mutated)
    count = first + len(spec.outputs)
    layouts = {buffer.name: buffer.layout for buffer in spec.buffers}
    returned = [*(layouts[name] for name in spec.mutated), *(value.layout for value in spec.outputs)]
    outputs = [
        together([results[rank][index] for rank in ranks], layout, mesh) for index, layout in enumerate(returned)
    ]
    saved = [[results[rank][index] for rank in ranks] for index in range(count, len(results[0]))]
    tangents = [
        lockstep.shard(step.values[name], spec.outputs[captured.tangents[name]].layout, mesh)
        for name in step.annotated.tangents
    ]
    assert compiled.step.backward is not None
    gradients = lockstep.run(compiled.step.backward, mesh, [*saved, *tangents])
    trainable = [parameter for parameter in spec.parameters if parameter.trainable]
    return outputs, [
        together([gradients[rank][index] for rank in ranks], parameter.layout, mesh)
        for index, parameter in enumerate(trainable)
    ]


def check_step(step: Joint, strategies: dict[str, Strategy], mesh: Mesh, options: Options) -> Compiled:
    compiled = lower(step.annotated, strategies, mesh, options)
    outputs, gradients = run_step(step, compiled)
    expected, expected_gradients = step.results()
    names = [*compiled.step.spec.mutated, *(value.name for value in compiled.step.spec.outputs)]
    for name, output, whole in zip(names, outputs, expected, strict=True):
        close(output, whole, f"{name} of {step.name}", step.tolerance)
    for name, gradient, whole in zip(step.captured.gradients, gradients, expected_gradients, strict=True):
        close(gradient, whole, f"the gradient of {name} of {step.name} under {strategies}", step.tolerance)
    return compiled


@pytest.mark.parametrize("name", CASES)
@examples(3, shrink=False)
@given(seed=SEEDS)
def test_random_strategies(name: str, seed: int) -> None:
    """Any legal strategy for each op: the scheduled forward and backward are the step of one device."""
    rng = random.Random(seed)
    mesh = mesh_of(*rng.choice(MESHES[name.removesuffix("-tied")]))
    step = joint(name, 12 if mesh.world_size % 3 == 0 else 8)
    strategies = {op.name: rng.choice(legal(op, mesh)) for op in step.annotated.ops}
    check_step(step, strategies, mesh, Options(max_prefetch=rng.choice([0, 1, 3])))


@pytest.mark.parametrize("outputs", ["sharded", "part", "whole"])
@examples(4, shrink=False)
@given(seed=SEEDS)
def test_loss_outside(outputs: str, seed: int) -> None:
    """A model that returns its prediction: the backward starts from any tangent, at the prediction's layout."""
    rng = random.Random(seed)
    mesh = mesh_of(*rng.choice([(6,), (2, 3), (2,)]))
    step = joint("mlp", 12, targets=False)
    strategies = {op.name: rng.choice(legal(op, mesh)) for op in step.annotated.ops}
    compiled = check_step(step, strategies, mesh, Options(outputs=outputs))  # type: ignore[arg-type]
    (prediction,) = compiled.step.spec.outputs
    assert prediction.differentiable
    if outputs == "whole":
        assert prediction.layout.is_replicated


def test_every_candidate() -> None:
    """Every strategy that is offered can be lowered, for all ops of the model that have it."""
    mesh = mesh_of(4)
    step = joint("gpt")
    offered = {op.name: legal(op, mesh) for op in step.annotated.ops}
    for index in range(max(map(len, offered.values()))):
        strategies = {op: options[min(index, len(options) - 1)] for op, options in offered.items()}
        lower(step.annotated, strategies, mesh, Options())
