"""Operator slices as a choice: the strategies of ops that gather much, in slices as well.

An op in slices gathers one part of its parameter after another and holds no more of it at a time; its products are
smaller, and each part's collectives wait for links anew (OSDP, arXiv 2209.13258, section 3.3). That is worth while
where what is gathered at once is what a step holds most of at a time: for a table of words, say. Which ops these are
does not depend on the memory limit, so that under more memory nothing is missing that fits into less.
"""

from __future__ import annotations

from dataclasses import replace

from shardweave.ir import LayoutError, Strategy
from shardweave.planner.problem.build_problem import Costing
from shardweave.planner.problem.variables import Costed, Rows, Variable
from shardweave.sharding import Op

SLICES = 4
"""As many as OSDP takes."""

MUCH = 1 / 8
"""The part of the largest transient of any op that a strategy's own makes out for it to be offered in slices, too."""


def with_slices(costing: Costing, costed: Costed) -> Costed:
    """The problem with the strategies in slices, too, that gather much at a time; itself where none does."""
    priced = [variable.prices for variable in costed.variables if variable.prices is not None]
    much = MUCH * max((float(prices.transient_bytes.max()) for prices in priced), default=0.0)
    more = {index: sliced for index, variable in enumerate(costed.variables)
            if (sliced := _sliced(costing, variable, much))}  # fmt: skip
    if not more:
        return costed
    rows = Rows(costing.windows, costing.options.turns)
    ops, variables = list(costed.problem.ops), list(costed.variables)
    for index, sliced in more.items():
        variables[index] = costing.spread(variables[index], [*variables[index].strategies, *sliced])
        ops[index] = rows.row(variables[index])
    return replace(costed, problem=replace(costed.problem, ops=tuple(ops)), variables=variables)


def _sliced(costing: Costing, variable: Variable, much: float) -> list[Strategy]:
    """What an op may have in slices."""
    op, prices = variable.op, variable.prices
    if op is None or prices is None or op.name in costing.forced or costing.options.operator_slices:
        return []
    large = [s for s, held in zip(variable.strategies, prices.transient_bytes.tolist()) if held > much]
    return [replace(strategy, slices=SLICES) for strategy in large if _fits(costing, op, strategy)]


def _fits(costing: Costing, op: Op, strategy: Strategy) -> bool:
    try:
        op.slice_atom(strategy, costing.mesh, SLICES)
    except LayoutError:
        return False
    return True
