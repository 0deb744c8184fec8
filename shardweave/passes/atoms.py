"""Atoms: cut every factor where some view of its values cuts it.

A linear layer multiplies ``(b s) k`` by a weight and its result is viewed as ``b s (3 h d)``: the loops ``m`` and
``n`` of the product are themselves products of atoms. `refine` finds them: cuts spread from the views over all ops,
along the values' dimensions, until nothing changes; then every rule is written in atoms, ``m`` as ``m.0 m.1``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from shardweave.ir import BoundRule, Dims, Factor

Value = tuple[fx.Node, int]  # a node and the index of its output


def refine(rules: Mapping[fx.Node, BoundRule], inputs: Mapping[fx.Node, tuple[Value, ...]]) -> dict[fx.Node, BoundRule]:
    """The rules in atoms.

    Parameters
    ----------
    rules : mapping from node to BoundRule
        Sources (placeholders, constants) have a rule without inputs.
    inputs : mapping from node to values
        Where each input of a node's rule comes from.
    """
    users: dict[Value, list[fx.Node]] = {}
    for node, values in inputs.items():
        for value in values:
            users.setdefault(value, []).append(node)
    value_cuts: dict[tuple[fx.Node, int, int], set[int]] = {}
    factor_cuts: dict[tuple[fx.Node, str], set[int]] = {}
    queue = deque(rules)
    waiting = set(rules)
    while queue:
        node = queue.popleft()
        waiting.discard(node)
        rule = rules[node]
        sizes = rule.sizes()
        sides = [(value, dims) for value, dims in zip(inputs.get(node, ()), rule.inputs)]
        sides += [((node, index), dims) for index, dims in enumerate(rule.outputs)]
        for (source, index), dims in sides:
            for dim, names in enumerate(dims):
                for cut in value_cuts.get((source, index, dim), ()):
                    low = 1
                    for name in reversed(names):
                        high = low * sizes[name]
                        if low < cut < high and cut % low == 0:
                            _add(factor_cuts.setdefault((node, name), set()), cut // low, sizes[name])
                        low = high
        for (source, index), dims in sides:
            for dim, names in enumerate(dims):
                low, total = 1, _product(sizes[name] for name in names)
                changed = False
                cuts = value_cuts.setdefault((source, index, dim), set())
                for name in reversed(names):
                    changed |= low > 1 and _add(cuts, low, total)
                    for cut in sorted(factor_cuts.get((node, name), ())):
                        changed |= _add(cuts, low * cut, total)
                    low *= sizes[name]
                if changed:
                    for other in (source, *users.get((source, index), ())):
                        if other in rules and other not in waiting:
                            waiting.add(other)
                            queue.append(other)
    return {node: _cut(rule, {f.name: factor_cuts.get((node, f.name), set()) for f in rule.factors})
            for node, rule in rules.items()}  # fmt: skip


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _add(cuts: set[int], cut: int, size: int) -> bool:
    """Add a cut if the cuts still form a chain of divisors of `size`; whether they changed."""
    if cut in cuts or not 1 < cut < size or size % cut:
        return False
    if any(cut % other and other % cut for other in cuts):
        return False  # two views cut this loop incompatibly: the first one is kept, the other stays whole
    cuts.add(cut)
    return True


def _cut(rule: BoundRule, cuts: Mapping[str, set[int]]) -> BoundRule:
    if not any(cuts.values()):
        return rule
    atoms: dict[str, tuple[str, ...]] = {}
    factors: list[Factor] = []
    for factor in rule.factors:
        bounds = [factor.size, *sorted(cuts[factor.name], reverse=True), 1]
        steps = [high // low for high, low in zip(bounds, bounds[1:])]
        names = [f"{factor.name}.{index}" for index in range(len(steps))] if len(steps) > 1 else [factor.name]
        atoms[factor.name] = tuple(names)
        factors += [Factor(name, size, factor.blocked, factor.reduce) for name, size in zip(names, steps)]

    def dims(value: Dims) -> Dims:
        return tuple(tuple(atom for name in names for atom in atoms[name]) for names in value)

    return replace(
        rule, factors=tuple(factors), inputs=tuple(map(dims, rule.inputs)), outputs=tuple(map(dims, rule.outputs))
    )
