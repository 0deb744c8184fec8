"""The grammar of rules: what patterns mean, what they refuse, and how a bound rule reads."""

from __future__ import annotations

import pytest
import torch

from shardweave.ir import BoundRule, Factor
from shardweave.ir.errors import LayoutError, RuleError
from shardweave.sharding.rules.registry import RULES, bind, parse, rule
from tests.passes.harness import bound, graph_of

aten = torch.ops.aten

PARSED = [
    ("m k, k n -> m n", ((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), ""),
    ("k, k ->", ((("k",),), (("k",),)), ((),), ""),
    ("b [s] -> b [s]", ((("b",), ("s",)),), ((("b",), ("s",)),), "s"),
    ("(h d) 1 -> h d", ((("h", "d"), ()),), ((("h",), ("d",)),), ""),
    ("... [d], [d] -> ... [d], ... 1", ((("...",), ("d",)), (("d",),)), ((("...",), ("d",)), (("...",), ())), "d"),
    ("b? [s]?, b s -> b s", ((("b?",), ("s?",)), (("b",), ("s",))), ((("b",), ("s",)),), "s"),
]


@pytest.mark.parametrize(("text", "inputs", "outputs", "blocked"), PARSED, ids=[case[0] for case in PARSED])
def test_parse(text: str, inputs: object, outputs: object, blocked: str) -> None:
    pattern = parse(text)
    assert pattern.text == text
    assert (pattern.inputs, pattern.outputs, pattern.blocked) == (inputs, outputs, frozenset(blocked))


@pytest.mark.parametrize("text", ["m k, k n", "a -> b -> c", "m-1 k -> m", "m k -> m (h %)", "2 -> 2"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    assert repr(text) in str(error.value)


def bind_text(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], **reduce: str) -> BoundRule:
    return bind(parse(text), inputs, outputs, reduce)


BOUND = [
    ("m k, k n -> m n", [(2, 3), (3, 4)], [(2, 4)], "m k, k n -> m n", {"m": 2, "k": 3, "n": 4}),
    ("m k, k n -> m n", [(2, 1), (1, 4)], [(2, 4)], "m 1, 1 n -> m n", {"m": 2, "n": 4}),
    ("... [d], [d] -> ... [d], ... 1", [(2, 3, 4), (4,)], [(2, 3, 4), (2, 3, 1)],
     "i0 i1 [d], [d] -> i0 i1 [d], i0 i1 1", {"i0": 2, "i1": 3, "d": 4}),
    ("... [d] -> ...", [(4,)], [()], "[d] -> ", {"d": 4}),
    ("(h d) -> h d", [(12,)], [(3, 4)], "(h d) -> h d", {"h": 3, "d": 4}),
    ("([h] d) -> d", [(12,)], [(4,)], "([h] d) -> d", {"h": 3, "d": 4}),
    ("b? s, b s -> b s", [(1, 3), (2, 3)], [(2, 3)], "1 s, b s -> b s", {"b": 2, "s": 3}),
    ("v d, ... -> ... d", [(10, 4), ()], [(4,)], "v d,  -> d", {"v": 10, "d": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "inputs", "outputs", "shown", "sizes"), BOUND)
def test_bind(
    text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], shown: str, sizes: dict[str, int]
) -> None:
    """Sizes come from the shapes, size 1 has no factor, and the printed form says what is blocked."""
    found = bind_text(text, inputs, outputs)
    assert found.sizes() == sizes
    assert str(found) == shown
    assert {factor.name for factor in found.factors if factor.blocked} == parse(text).blocked & set(sizes)


def test_reduce_is_a_sum_unless_said() -> None:
    found = bind_text("m k -> m", [(2, 3)], [(2,)], k="max")
    assert found.factors == (Factor("m", 2), Factor("k", 3, reduce="max"))
    assert bind_text("m k -> m", [(2, 3)], [(2,)]).factor("k").reduce == "sum"
    with pytest.raises(LayoutError, match="no factor is called 'n'.*'m', 'k'"):
        found.factor("n")


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "message"),
    [
        ("m k, k n -> m n", [(2, 3)], [(2, 4)], "2 inputs and 1 outputs, the op has 1 and 1"),
        ("m k, k n -> m n", [(2, 3), (3, 4)], [(2, 4), (2,)], "the op has 2 and 2"),
        ("m k, k n -> m n", [(2, 3, 1), (3, 4)], [(2, 4)], r"rank of \(2, 3, 1\)"),
        ("... d -> ... d", [()], [()], r"rank of \(\)"),
        ("m k, k n -> m n", [(2, 3), (5, 4)], [(2, 4)], "k = 3, the op has 5"),
        ("(h d) -> h d", [(12,)], [(5, 4)], "h [*] d = 20, the op has 12"),
        ("(h d) -> (d h)", [(12,)], [(12,)], "cannot be told apart"),
        ("m -> m", [(2,)], [(1,)], "m = 2, the op has 1"),
        ("m -> m", [(1,)], [(2,)], "m = 1, the op has 2"),
    ],
)  # fmt: skip
def test_bind_refuses(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...]], message: str) -> None:
    """Arity, rank and sizes are checked: a rule that is wrong for its op is not bound."""
    with pytest.raises(RuleError, match=message):
        bind_text(text, inputs, outputs)


def test_rule_checks_its_op() -> None:
    before = dict(RULES)
    with pytest.raises(RuleError, match="more inputs than the op has tensor arguments"):
        rule(aten.mv.default, "m k, k, k -> m")
    assert before == RULES


def test_rule_names_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional tensors that a call leaves out are dropped; one that is given and not named is an error."""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.zeros(2, 3, 4, 5)
    module, _ = graph_of(attention, (q, q, q), {})
    assert len(bound(next(n for n in module.graph.nodes if n.target is attention)).inputs) == 3
    monkeypatch.setitem(RULES, attention, RULES[attention])
    rule(attention, "b h [s] [d], b h [t] [d], b h [t] [e] -> b h [s] [e], b h [s]")
    graph_of(attention, (q, q, q), {})
    with pytest.raises(RuleError, match="does not name every tensor argument"):
        graph_of(attention, (q, q, q), {"attn_mask": torch.zeros(2, 3, 4, 4)})


def test_known_sizes() -> None:
    """Two factors of a product cannot be told apart by shapes alone, unless one is known from elsewhere."""
    with pytest.raises(RuleError, match="cannot be told apart"):
        bind_text("n (g c) -> n (c g)", [(2, 12)], [(2, 12)])
    rule = bind(parse("n (g c) -> n (c g)"), [(2, 12)], [(2, 12)], {}, {"g": 3})
    assert rule.sizes() == {"n": 2, "g": 3, "c": 4}
    with pytest.raises(RuleError, match=r"needs g \* c = 5"):
        bind(parse("n (g c) -> n (c g)"), [(2, 12)], [(2, 12)], {}, {"g": 5})


def test_blocked_ellipsis() -> None:
    rule = bind_text("n [...], n -> n [...]", [(2, 3, 4), (2,)], [(2, 3, 4)])
    assert str(rule) == "n [i0] [i1], n -> n [i0] [i1]"
    assert [factor.name for factor in rule.factors if factor.blocked] == ["i0", "i1"]
