"""The ops that torch tags as pointwise, and those that it can decompose, need no rules of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardweave.sharding.rules import RULES
from shardweave.sharding.rules.registry import CONDITIONAL, DECOMPOSITIONS
from tests.passes.harness import (
    assert_equal,
    graph_of,
    mesh_of,
    output_nodes,
    placeholders,
    random_assignments,
    random_layout,
    run_sharded,
)

aten = torch.ops.aten


def tagged() -> Iterator[Any]:
    """The functional ops with torch's tag, whose arguments are tensors and numbers."""
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            wanted = [argument for argument in op._schema.arguments if not argument.has_default_value()]
            plain = all(str(argument.type) in ("Tensor", "number", "int", "float") for argument in wanted)
            seeded = torch.Tag.nondeterministic_seeded in op.tags
            if torch.Tag.pointwise in op.tags and plain and not op._schema.is_mutable and not seeded:
                yield op


def call_of(op: Any) -> tuple[Any, ...] | None:
    """Arguments that the op takes: floating point, or else integers, in sizes that broadcast; None if it takes none."""
    generator = torch.Generator().manual_seed(0)
    for make in (lambda size: torch.rand(size, generator=generator) / 2 + 0.25, lambda size: torch.ones(size).int()):
        tensors: Iterator[Tensor] = iter([make((4, 6)), make((6,)), make((4, 1))])
        wanted = [argument for argument in op._schema.arguments if not argument.has_default_value()]
        args = tuple(next(tensors) if str(argument.type) == "Tensor" else 2 for argument in wanted)
        try:
            op(*args)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        return args
    return None


def sharded_equals_whole(op: Any, args: tuple[Any, ...], seed: int = 0) -> None:
    """Inputs lie anyhow, and the ops that `op` becomes are split anyhow."""
    rng = random.Random(seed)
    module, values = graph_of(op, args, {})
    mesh = mesh_of(2, 2)
    sources = {node.name: random_layout(node, mesh, rng, chance=0.7) for node in placeholders(module)}
    wanted = [random_layout(value, mesh, rng) for value in output_nodes(module)]
    run = run_sharded(module, values, mesh, random_assignments(module, mesh, rng, 0.5), sources, wanted)
    for index, value in enumerate(module(*values)):
        assert_equal(run.whole(index), value, str(op))


def test_every_op_that_torch_tags_as_pointwise_is_split_freely() -> None:
    tried = 0
    for op in tagged():
        args = call_of(op)
        if args is None or op is aten.equal.default:  # which is one flag of all elements, against its tag
            continue
        tried += 1
        sharded_equals_whole(op, args)
    assert tried > 150


def floats(*size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(sum(size))) + 0.25


DECOMPOSED: dict[Any, Callable[[], tuple[Any, ...]]] = {
    aten.affine_grid_generator.default: lambda: (floats(4, 2, 3), [4, 3, 4, 6], False),
    aten.count_nonzero.dim_IntList: lambda: (floats(4, 6), [1]),
    aten.diagonal_copy.default: lambda: (floats(4, 6),),
    aten.dist.default: lambda: (floats(4, 6), floats(4, 6)),
    aten.isin.Tensor_Tensor: lambda: (torch.arange(24).view(4, 6), torch.tensor([3, 4])),
    aten.linalg_cross.default: lambda: (floats(4, 3), floats(4, 3)),
    aten.multi_margin_loss.default: lambda: (floats(4, 6), torch.tensor([0, 3, 5, 1])),
    aten.nansum.default: lambda: (floats(4, 6),),
    aten.narrow_copy.default: lambda: (floats(4, 6), 1, 2, 3),
    aten.renorm.default: lambda: (floats(4, 6), 2.0, 0, 0.5),
    aten.rot90.default: lambda: (floats(4, 6),),
    aten.special_ndtr.default: lambda: (floats(4, 6),),
    aten.trace.default: lambda: (floats(4, 6),),
    aten.vdot.default: lambda: (floats(6), floats(6)),
    aten._euclidean_dist.default: lambda: (floats(4, 3), floats(6, 3)),
}


@pytest.mark.parametrize("op", list(DECOMPOSED), ids=str)
def test_an_op_that_torch_can_decompose_needs_no_rule(op: Any) -> None:
    assert op not in {*RULES, *DECOMPOSITIONS, *CONDITIONAL}
    for seed in range(3):
        sharded_equals_whole(op, DECOMPOSED[op](), seed)
    module, values = graph_of(op, DECOMPOSED[op](), {})
    expected = op(*DECOMPOSED[op]())
    assert_equal(module(*values)[0], expected, str(op))
