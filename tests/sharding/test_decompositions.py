"""What an op is written in computes what the op computes: the other tests compare the written form with itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from shardweave.sharding.graphs import decompose
from shardweave.sharding.rules import RULES
from shardweave.sharding.rules.registry import CONDITIONAL, DECOMPOSITIONS
from tests.passes.cases import CASES, Draw
from tests.passes.cases.draw import Made
from tests.passes.harness import assert_equal, examples, graph_of

ALWAYS = [target for target in {**DECOMPOSITIONS, **CONDITIONAL} if "empty" not in str(target)]
WHERE_BLOCKED = [target for target, rule in RULES.items() if rule.decompose is not None]


def _call(target: Any, args: Any, kwargs: Any) -> list[Tensor]:
    def make(what: Made) -> Tensor:
        result: Tensor = what.target(*pytree.tree_map_only(Made, make, what.args), **what.kwargs)
        return result

    args, kwargs = pytree.tree_map_only(Made, make, (args, kwargs))
    result = target(*args, **kwargs)
    results = [result] if isinstance(result, Tensor) else result
    return [value for value in results if isinstance(value, Tensor) and value.numel()]  # as graph_of gives them


@pytest.mark.parametrize("target", sorted(ALWAYS, key=str), ids=str)
@examples(10)
@given(data=st.data())
def test_a_form_is_its_op(target: Any, data: st.DataObject) -> None:
    args, kwargs = CASES[target](Draw(data))
    module, values = graph_of(target, args, kwargs)
    for got, expected in zip(module(*values), _call(target, args, kwargs), strict=True):
        assert_equal(got, expected, str(target))


@pytest.mark.parametrize("target", sorted(WHERE_BLOCKED, key=str), ids=str)
@examples(10)
@given(data=st.data())
def test_a_form_for_split_loops_is_its_op(target: Any, data: st.DataObject) -> None:
    args, kwargs = CASES[target](Draw(data))
    module, _ = graph_of(target, args, kwargs)
    assume(any(node.target is target for node in module.graph.nodes))  # not always written otherwise
    form = RULES[target].decompose
    for got, expected in zip(_call(form, args, kwargs), _call(target, args, kwargs), strict=True):
        assert_equal(got, expected, str(target))


def test_a_form_is_known_of_equal_arguments_alone() -> None:
    """A value's place among the arguments is no number: x * 0 is not x * x, nor is x * y."""
    fake, graph = FakeTensorMode(), fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = fake.from_tensor(torch.ones(3)), fake.from_tensor(torch.ones(3))
    known: dict[object, Any] = {}
    product = torch.ops.aten.mul.Tensor
    for args in [(x, x), (x, 0), (x, y), (y, y), (x, 0.0)]:
        node = graph.call_function(product, args)
        node.meta["val"] = x.meta["val"]
        (form,) = decompose(node, multiplied, known)
        assert [*map(str, form.args)] == [*map(str, args)]
    assert len(known) == 4  # y * y has the form of x * x


def test_arguments_that_share_a_fake_value_are_told_apart() -> None:
    """Equal nodes of a saved graph, and of equal layers, have one fake value."""
    fake, graph = FakeTensorMode(), fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = fake.from_tensor(torch.ones(3))
    node = graph.call_function(torch.ops.aten.mul.Tensor, (x, y))
    node.meta["val"] = x.meta["val"]
    (form,) = decompose(node, multiplied, {})
    assert form.args == (x, y)


def multiplied(first: Any, second: Any) -> Any:
    return torch.ops.aten.mul.Tensor(first, second)
