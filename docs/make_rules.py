"""Write docs/rules.md, the list of all sharding rules, from the code: ``make rules``.

python -m docs.make_rules [--print]

It loads the files of rules again, one by one, to see which ops each registers: no work for a process that goes on.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardweave.sharding.rules as package
from docs.rules_text import EXAMPLES, EXPERTS, FORMS, INTRODUCTION, RANDOM, REFUSED, WORDS
from shardweave.ops.seeded_random import __doc__ as DRAWING
from shardweave.sharding.moe_dispatch import __doc__ as DISPATCH
from shardweave.sharding.rules import RULES, Rule, find_rule
from shardweave.sharding.rules.pointwise import POINTWISE
from shardweave.sharding.rules.registry import CONDITIONAL, DECOMPOSITIONS, parse
from shardweave.sharding.rules.registry import __doc__ as GRAMMAR

PAGE = Path(__file__).with_name("rules.md")
REGISTRY = "registry"  # this file registers no op of its own


def op_name(target: Any) -> str:
    """As a user writes it: ``aten.mm``, ``aten.sum.dim_IntList``, ``shardweave.expert_mm``.

    >>> op_name(torch.ops.aten.mm.default), op_name(torch.ops.aten.add.Tensor)
    ('aten.mm', 'aten.add.Tensor')
    """
    return str(target).removesuffix(".default")


def by_file() -> dict[str, list[Any]]:
    """The ops that each file of `rules/` registers."""
    known = dict(RULES)
    found: dict[str, list[Any]] = {}
    for file in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        if file.name != REGISTRY:
            RULES.clear()
            importlib.reload(module)
            found[file.name] = list(RULES)
    RULES.clear()
    RULES.update(known)
    listed = {target for targets in found.values() for target in targets}
    found["pointwise"] += [target for target in RULES if target not in listed]
    return {name: targets for name, targets in found.items() if targets}


def blocked(rule: Rule) -> str:
    """What a rule may not split: as its source says, or the factors in brackets."""
    _, marked, words = rule.source.partition("; blocked: ")
    if marked:
        return words
    names = sorted(parse(rule.source).blocked - {"..."})
    listed = [f"`{name}`" for name in names] + ["all other dimensions"] * ("..." in parse(rule.source).blocked)
    return ", ".join(listed) or "nothing"


def shown(rule: Rule) -> str:
    """The pattern as code, a family in words."""
    text, marked, _ = rule.source.partition("; blocked: ")
    return text if marked else f"`{text.strip()}`"


def more(target: Any, rule: Rule) -> list[str]:
    """The words of `WORDS` that hold for an op."""
    tags = getattr(target, "tags", ())
    return [
        word
        for word, holds in (
            ("view", rule.kind == "view"),
            ("sums", rule.kind == "sum"),
            ("parts", rule.decompose is not None),
            ("local", rule.lower is not None),
            ("zeros", bool(rule.zeros)),
            ("owner", bool(rule.owned)),
            ("draws", torch.Tag.nondeterministic_seeded in tags),
            ("pair", rule.partner is not None),
        )
        if holds
    ]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; what would end a cell is escaped.

    >>> table(("a",), [("x | y",)]).splitlines()[-1]
    '| x \\\\| y |'
    """
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rule_table(targets: list[Any]) -> str:
    """The rules of one file; ops that have the same one in a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for target in targets:
        rule = RULES[target]
        rows.setdefault((shown(rule), blocked(rule), ", ".join(more(target, rule))), []).append(f"`{op_name(target)}`")
    return table(("ops", "pattern or family", "blocked", "more"), [(", ".join(ops), *row) for row, ops in rows.items()])


def first_line(form: Callable[..., Any]) -> str:
    """What a form says of itself; torch's own say nothing."""
    if form.__module__.startswith("torch."):
        return "As in torch's own table of decompositions."
    return (inspect.getdoc(form) or "").split("\n")[0].replace("``", "`")


def form_tables() -> Iterator[str]:
    """The ops that are always written in others, by file."""
    files: dict[str, dict[str, list[str]]] = {}
    for target, form in DECOMPOSITIONS.items():
        file = form.__module__.rpartition(".")[2] if form.__module__.startswith(package.__name__) else "registry"
        files.setdefault(file, {}).setdefault(first_line(form), []).append(f"`{op_name(target)}`")
    for file, forms in sorted(files.items()):
        rows = [(", ".join(ops), form) for form, ops in forms.items()]
        yield f"`sharding/rules/{file}.py`\n\n" + table(("ops", "form"), rows)


def example_table() -> str:
    """The rules that the calls of `EXAMPLES` have."""
    rows = []
    for code, shapes in EXAMPLES:
        names = list(shapes)

        def call(*values: Any, code: str = code, names: list[str] = names) -> Any:
            return eval(code, {"torch": torch, **dict(zip(names, values))})  # the code of a row of this page

        with FakeTensorMode():
            values = [torch.zeros(s, dtype=torch.long if n == "numbers" else None) for n, s in shapes.items()]
            graph: fx.Graph = make_fx(call)(*values).graph
        nodes = [node for node in graph.nodes if node.op == "call_function" and find_rule(node) is not None]
        node = max(nodes, key=lambda node: len(node.all_input_nodes))
        rule = find_rule(node)
        assert rule is not None
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        rows.append((f"`{code}`", given, f"`{rule.bind(node)}`"))
    return table(("call", "shapes", "rule"), rows)


def aten_ops() -> Iterator[Any]:
    """All of torch's own ops, by name."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and hasattr(torch.ops.aten, base):
            packet = getattr(torch.ops.aten, base)
            if (overload or "default") in packet.overloads():
                yield getattr(packet, overload or "default")


def pointwise_by_tag(target: Any) -> bool:
    """Whether an op has the pointwise rule because torch says that it is pointwise."""
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def has_rule(target: Any) -> bool:
    """Whether an op has a rule, or is written in ops that have one."""
    return target in RULES or target in DECOMPOSITIONS or target in CONDITIONAL or pointwise_by_tag(target)


def unruled_core() -> str:
    """The core ops that have no rule: those that take a tensor and give one."""

    def computes(target: Any) -> bool:
        kinds = [str(value.type) for value in target._schema.arguments], [str(v.type) for v in target._schema.returns]
        return all(any("Tensor" in kind for kind in side) for side in kinds)

    core = [target for target in aten_ops() if torch.Tag.core in target.tags and computes(target)]
    return ", ".join(f"`{op_name(target)}`" for target in core if not has_rule(target))


def tagged() -> str:
    """The ops that have the pointwise rule by torch's tag; those that write into an argument are not captured."""
    names = {str(target.overloadpacket) for target in aten_ops() if pointwise_by_tag(target) and target not in RULES}
    kept = sorted(name for name in names if not name.endswith("_"))
    return ", ".join(f"`{name}`" for name in kept)


def page() -> str:
    """The whole of docs/rules.md."""
    for name, *_ in REFUSED:
        packet = getattr(torch.ops.aten, name)
        assert not any(has_rule(getattr(packet, overload)) for overload in packet.overloads()), f"{name} has a rule"
    refused = table(("op", "what it is", "instead"), [(f"`aten.{name}`", *rest) for name, *rest in REFUSED])
    words = table(("word", "meaning"), list(WORDS.items()))
    parts = [
        INTRODUCTION.format(
            grammar=paragraphs(GRAMMAR), examples=example_table(), words=words, core=unruled_core(), refused=refused
        ),
        "## Rules, by the file that has them",
    ]
    for name, targets in by_file().items():
        module = importlib.import_module(f"{package.__name__}.{name}")
        parts += [f"### {name}.py", paragraphs(module.__doc__, first=True), rule_table(targets)]
        if name == "pointwise":
            parts.append(f"The same rule ({shown(POINTWISE)}) has every op that torch tags as pointwise: {tagged()}.")
    parts += [
        "## Ops that are written in others",
        FORMS,
        *form_tables(),
        "Depending on their arguments, so are these:",
        table(("op", "form"), [(f"`{op_name(op)}`", first_line(form)) for op, form in CONDITIONAL.items()]),
        "## Mixtures of experts",
        paragraphs(DISPATCH, first=True),
        EXPERTS,
        "## Random ops",
        paragraphs(DRAWING, first=True),
        RANDOM,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def paragraphs(text: str | None, first: bool = False) -> str:
    """A docstring as Markdown, without its first line unless that is wanted."""
    lines = inspect.cleandoc(text or "").split("\n")
    return "\n".join(lines if first else lines[1:]).strip().replace("``", "`")


def main() -> None:
    if "--print" in sys.argv[1:]:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
