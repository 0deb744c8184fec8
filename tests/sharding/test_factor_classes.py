"""Factor classes: the loops that the graph forces to be one have one class, the others do not."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.sharding.graphs import info
from tests.passes.harness import bound, placeholders
from tests.passes.joint import Joint, joint

aten = torch.ops.aten


def classes_of(step: Joint, node: fx.Node, output: int = 0) -> list[list[int]]:
    """The class of each atom of each dimension of a value."""
    return [[step.annotated.classes.of[node, name] for name in names] for names in bound(node).outputs[output]]


def named(step: Joint, name: str) -> fx.Node:
    """The placeholder of a parameter or an input."""
    captured = step.captured
    names = {**captured.parameters, **captured.inputs}
    (node,) = (node for node in placeholders(captured.graph) if names.get(node.name) == name)
    return node


def test_gpt() -> None:
    step = joint("gpt")
    blocked = step.annotated.classes.blocked
    ((batch,), (sequence,)) = classes_of(step, named(step, "tokens"))
    assert classes_of(step, named(step, "targets")) == [[batch], [sequence]]
    assert batch not in blocked and sequence in blocked
    (qkv, hidden) = classes_of(step, named(step, "blocks.0.attention.qkv.weight"))
    (out, heads) = classes_of(step, named(step, "blocks.0.attention.out.weight"))
    assert qkv[1:] == heads and qkv[1] not in blocked and qkv[2] in blocked
    assert out == hidden and hidden[0] in blocked  # a layer norm sums over it
    assert classes_of(step, named(step, "norm.weight")) == [hidden]
    (wide, _), (_, again) = (classes_of(step, named(step, f"blocks.0.{op}.weight")) for op in ("up", "down"))
    assert wide == again and wide[0] not in blocked
    ((vocabulary,), _) = classes_of(step, named(step, "head.weight"))
    assert vocabulary not in blocked  # the softmax over it falls apart where it has to
    assert classes_of(step, named(step, "tokens.weight"))[0] != [vocabulary]
    assert len({batch, sequence, *qkv, *hidden, *wide, vocabulary}) == 2 + len(qkv) + 3


def test_tied_tables_share_their_loops() -> None:
    step = joint("gpt-tied")
    ((vocabulary,), _) = classes_of(step, named(step, "tokens.weight"))
    gathers = [node for node in step.captured.graph.graph.nodes if node.target is aten.gather.default]
    assert {step.annotated.classes.of[node, "v"] for node in gathers} == {vocabulary}


def test_gradients_have_their_parameters_classes() -> None:
    """Nothing but the graph says so: the saved values carry the classes into the backward."""
    for name in ("mlp", "gpt", "llama"):
        step = joint(name)
        captured = step.captured
        values = captured.graph.graph.output_node().args[0]
        assert isinstance(values, (list, tuple))
        for parameter, gradient in zip(captured.gradients, values[-len(captured.gradients) :], strict=True):
            assert isinstance(gradient, fx.Node)
            if info(gradient).rule is None or parameter.endswith(("tokens.weight", "positions.weight")):
                continue  # an output of a norm's backward; a table's gradient is made from its size alone
            assert classes_of(step, gradient) == classes_of(step, named(step, parameter)), parameter


def test_linear_loops_are_apart() -> None:
    """An MLP's sizes have a class each, and the residual ties the two ends of its block."""
    step = joint("mlp")
    weights = {name: classes_of(step, named(step, f"{name}.weight")) for name in ("first", "second", "back", "last")}
    assert weights["first"][0] == weights["second"][1] == weights["back"][0] == weights["last"][1]
    assert weights["second"][0] == weights["back"][1]
    assert len({cls for dims in weights.values() for dim in dims for cls in dim}) == 4
