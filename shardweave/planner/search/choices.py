"""What a choice of candidates says of a step: from a choice to a `Decision`, and from a plan back to a choice."""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.ir import Assignment
from shardweave.planner.problem.step_choices import layer_named
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.evaluation import Decision
from shardweave.planner.search.plan import Plan
from shardweave.sharding import last_match


def decision(costed: Costed, choice: Sequence[int]) -> Decision:
    """The decision of a choice: strategies of ops, layouts of joins."""
    kept_slices: dict[str, int] = {}
    found = Decision({}, {}, {}, kept_slices)
    for variable, index in zip(costed.variables, choice, strict=True):
        if variable.op is not None:
            found.strategies[variable.name] = variable.strategies[index]
            if variable.strategies[index].rest > 1 and any(variable.kept_slices):  # or the backward does not read it
                parameters = variable.op.parameter, *variable.op.companions
                kept_slices.update(dict.fromkeys(parameters, variable.kept_slices[index]))
        elif variable.modes:
            found.modes[layer_named(variable.name)] = variable.modes[index]
        elif variable.ports:
            found.joins[variable.name] = next(iter(variable.ports[index].values())).in_space
    return found


def choice_of(costed: Costed, plan: Plan) -> tuple[int, ...] | None:
    """The choice that a plan stands for; None where it has another one for some op."""
    found: list[int] = []
    for variable in costed.variables:
        if variable.degrees:
            most = min(max(choice.strategy.degree for choice in plan.choices.values()), variable.degrees[-1])
            found.append(next(at for at, degree in enumerate(variable.degrees) if degree >= most))
            continue
        given = plan.choices.get(variable.name)
        if variable.modes:
            mode = last_match(plan.overlap.recompute, layer_named(variable.name), "none")
            found.append(variable.modes.index(mode))
            continue
        if variable.op is not None and given is not None and given.strategy in variable.strategies:
            kept = last_match(plan.overlap.keep_gathered, variable.op.parameter, 0)
            options = [*zip(variable.strategies, variable.kept_slices)]
            wanted = given.strategy, min(given.strategy.slices, kept)
            found.append(options.index(wanted) if wanted in options else variable.strategies.index(given.strategy))
        elif variable.op is None and variable.name in plan.joins:
            layouts = [named(next(iter(port.values())).in_space) for port in variable.ports]
            if dict(plan.joins[variable.name]) not in layouts:
                return None
            found.append(layouts.index(dict(plan.joins[variable.name])))
        else:
            return None
    return tuple(found)


def named(assignment: Assignment) -> dict[str, str]:
    """The factor that each axis is on, by its name."""
    return {axis.name: factor for axis, factor in assignment.items}
