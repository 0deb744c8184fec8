"""Choices that are easier to read and to simulate: fewer kinds of layers, in fewer stretches.

An answer of the solver may mix strategies that are equally fast, or nearly, over equal layers. Few stretches of equally
sharded layers make a plan short, and its step quick to simulate (`evaluation`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardweave.planner.problem.problem import Problem
from shardweave.planner.search.layer_problem import inside, renamed

MAX_SLOWDOWN = 3e-4
"""The part by which the step may become slower, altogether."""

Choice = tuple[int, ...]


def simplified(problem: Problem, runs: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """A choice within the limit, at most `MAX_SLOWDOWN` slower, with fewer kinds of layers in fewer stretches.

    Parameters
    ----------
    problem : Problem
    runs : sequence of sequences of str
        The names of equal layers, in order.
    choice : tuple of int
        One within the limit.
    """
    most = problem.objective(choice) * (1 + MAX_SLOWDOWN)
    at = {op.name: index for index, op in enumerate(problem.ops)}
    for layers in runs:
        first = [name for name in at if inside(name, layers[0])]
        run = _Run([[at[renamed(name, layers[0], layer)] for name in first] for layer in layers])
        kinds = run.kinds(choice)

        def accepted(others: list[Choice], run: _Run = run, choice: Choice = choice) -> bool:
            return _is_as_good(problem, run.written(choice, others), most)

        for rare in sorted(set(kinds), key=lambda kind: (kinds.count(kind), kind)):
            for other in sorted(set(kinds) - {rare}, key=lambda kind: (-kinds.count(kind), kind)):
                fewer = [other if kind == rare else kind for kind in kinds]
                if accepted(fewer):
                    kinds = fewer
                    break
        order = list(dict.fromkeys(kinds))
        together = sorted(kinds, key=order.index)
        if together != kinds and accepted(together):
            kinds = together
        choice = run.written(choice, kinds)
    return _alike(problem, choice, most)


def _is_as_good(problem: Problem, choice: Choice, most: float) -> bool:
    """Whether a choice fits and takes at most so many seconds."""
    return problem.feasible(choice) and problem.objective(choice) <= most


def _alike(problem: Problem, choice: Choice, most: float) -> Choice:
    """A choice that takes at most so many seconds, with equal data for ops of one group where that does."""
    known = {id(op.candidates): [candidate.data for candidate in op.candidates] for op in problem.ops}
    data = [known[id(op.candidates)] for op in problem.ops]
    groups: dict[str, list[int]] = {}
    for index, op in enumerate(problem.ops):
        if data[index][0] is not None:
            groups.setdefault(op.group, []).append(index)
    for members in groups.values():
        chosen = Counter(data[index][choice[index]] for index in members)
        for wanted, _ in chosen.most_common() if len(chosen) > 1 else []:
            if all(wanted in data[index] for index in members):
                places = {index: data[index].index(wanted) for index in members}
                other = tuple(places.get(index, own) for index, own in enumerate(choice))
                if _is_as_good(problem, other, most):
                    choice = other
                    break
    return choice


@dataclass(frozen=True)
class _Run:
    """Equal layers: of each the ops, in the same order."""

    places: list[list[int]]

    def kinds(self, choice: Choice) -> list[Choice]:
        """What is chosen for each layer."""
        return [tuple(choice[index] for index in own) for own in self.places]

    def written(self, choice: Choice, kinds: Sequence[Choice]) -> Choice:
        """`choice` with these for the layers."""
        found = list(choice)
        for own, kind in zip(self.places, kinds, strict=True):
            for index, value in zip(own, kind, strict=True):
                found[index] = value
        return tuple(found)
