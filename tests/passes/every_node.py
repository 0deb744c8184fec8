"""The law of whole graphs: under random strategies of its ops, every node of a step has its value on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardweave.ir import Layout, Mesh
from shardweave.passes.base import verify
from shardweave.passes.partition import Shard, Sharder
from shardweave.passes.sharded_values import StateSharding
from shardweave.sharding.graphs import info
from tests import lockstep
from tests.passes.harness import mesh_of, output_nodes, placeholders, random_assignments, random_layout, together
from tests.passes.joint import Joint

Run = Callable[[fx.GraphModule, Mesh, Sequence[Sequence[Any]]], list[Any]]
HUGE = 1e30  # what masks hold in place of an infinity


def close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Equal to this part of the largest element; what stands for an infinity exactly."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    if not expected.is_floating_point():
        assert torch.equal(got, expected), what
        return
    finite = expected.abs() < HUGE
    assert torch.equal(got[~finite], expected[~finite]), what
    scale = float(expected[finite].abs().max()) if finite.any() else 0.0
    error = float((got - expected)[finite].abs().max()) if finite.any() else 0.0
    assert error <= tolerance * max(scale, 1e-3), f"{what} differs by {error:.1e}, it is up to {scale:.1e}"


def random_mesh(sizes: Sequence[tuple[int, ...]], rng: random.Random) -> Mesh:
    """A mesh of one of these, its axes in any layout order."""
    axes = mesh_of(*rng.choice(sizes)).axes
    return Mesh(tuple(rng.sample(axes, len(axes))))


def random_sharder(step: Joint, mesh: Mesh, rng: random.Random) -> Sharder:
    """Each op, forward or backward, on factors of its own or following; inputs anywhere, parameters rest anywhere."""
    module = step.copy()
    assignments = random_assignments(module, mesh, rng, share=rng.choice([0.0, 0.3, 1.0]))
    resting = {name for name in step.captured.parameters if rng.random() < 0.7}
    sources = {node.name: random_layout(node, mesh, rng) for node in placeholders(module) if node.name not in resting}
    wanted = [None] * len(output_nodes(module))
    captured = step.captured
    rests = {}
    for name in captured.parameters.values():
        axes = rng.sample(mesh.axes, rng.randint(0, len(mesh.axes)))
        cut = rng.randint(0, len(axes))
        rests[name] = StateSharding(tuple(axes[:cut]), tuple(axes[cut:]))
    options = Shard(
        mesh, assignments, sources, wanted, captured.parameters, gradients=captured.gradients, state_sharding=rests
    )
    return Sharder(options, module)


def check_random_assignments(step: Joint, mesh: Mesh, rng: random.Random, run: Run = lockstep.run) -> None:
    """A random strategy for each op: every node has its value on ranks that `run` simulates."""
    sharder = random_sharder(step, mesh, rng)
    local = sharder.run()
    verify(local, "shard")
    check_every_node(step, sharder, local, mesh, run)


def check_every_node(step: Joint, sharder: Sharder, local: fx.GraphModule, mesh: Mesh, run: Run = lockstep.run) -> None:
    """Let the local graph return every value that it holds, and compare these with one device's."""
    held = set(local.graph.nodes)
    known = [
        (node.name, written, layout)
        for node, (written, layout) in sharder.values.canonical.items()
        if written in held and isinstance(step.values.get(node.name), Tensor)
    ]
    results = output_nodes(sharder.module)
    output = local.graph.output_node()
    parts = output.args[0]
    assert isinstance(parts, tuple)
    output.args = ((*parts, *(written for _, written, _ in known)),)
    local.recompile()
    inputs = [
        lockstep.shard(value, info(node).layouts[0], mesh)
        for node, value in zip([node for node in placeholders(local) if info(node).layouts], step.inputs(), strict=True)
    ]
    ranked = run(local, mesh, inputs)
    assert len(known) > 20

    def check(index: int, layout: Layout, name: str, what: str) -> None:
        whole = together([values[index] for values in ranked], layout, mesh)
        close(whole, step.values[name], f"{what} of {step.name}", step.tolerance)

    for index, (name, _, layout) in enumerate(known, len(parts)):
        check(index, layout, name, name)
    gradients = sharder.options.gradients
    # A decomposition replaces the node of an output by another of the same value.
    for index, (node, original) in enumerate(zip(results, output_nodes(step.captured.graph), strict=True)):
        if isinstance(node, fx.Node):
            assert isinstance(original, fx.Node)
            layout = sharder.values.layout(node).without_partial()
            if (position := index - len(results) + len(gradients)) >= 0:
                layout = sharder.values.state_layouts.get(gradients[position]) or Layout.replicated(
                    node.meta["val"].shape
                )
            check(index, layout, original.name, f"output {index}")
