"""Rows: what the variables and edges of a step are in the planner's `Problem`. What is equal shares its tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from shardweave.ir import Assignment, Mode, Strategy
from shardweave.planner.problem.op_costs import OpPrices
from shardweave.planner.problem.overlap_model import OPTIMIZER, Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge, Problem
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links
from shardweave.sharding import Op


@dataclass
class Variable:
    """A row of the problem: an op with its strategies, or a join with its layouts; ports are where its output lies.

    `prices` are those of its strategies; `costs`, `saved` and `working` what follows it costs, keeps and holds for a
    while, by port; `product` is `working` where its own products run, `lasting` what is held until the step ends.
    """

    name: str
    signature: int
    op: Op | None = None
    node: fx.Node | None = None
    strategies: list[Strategy] = field(default_factory=list)
    prices: OpPrices | None = None
    ports: list[dict[str, Assignment]] = field(default_factory=list)
    port_of: list[int] = field(default_factory=list)
    costs: Costs = field(default_factory=lambda: np.zeros(0))
    saved: Floats = field(default_factory=lambda: np.zeros(0))
    working: Floats = field(default_factory=lambda: np.zeros(0))
    product: Floats = field(default_factory=lambda: np.zeros(0))
    lasting: Floats = field(default_factory=lambda: np.zeros(0))
    modes: tuple[Mode, ...] = ()
    """Of a layer's recomputation, in which case it has none of the others."""
    degrees: tuple[int, ...] = ()
    """Of the border (`planner.returned`), in which case it has none of the others."""


@dataclass
class Costed:
    """The problem, and what its variables stand for."""

    problem: Problem
    variables: list[Variable]


class Rows:
    """Writes rows and edges down.

    Parameters
    ----------
    windows : Windows
    turns : int
        How often a step does what costs are of: its micro-batches.
    """

    def __init__(self, windows: Windows, turns: int) -> None:
        self.windows, self.turns = windows, turns
        self._candidates: dict[object, tuple[Candidate, ...]] = {}
        self._tables: dict[tuple[int, bool], Floats] = {}

    def row(self, variable: Variable) -> Row:
        """A variable's row."""
        figures = variable.costs, variable.saved, variable.working, variable.product, variable.lasting
        key = variable.signature, *(column.tobytes() for column in figures)
        if key not in self._candidates:
            self._candidates[key] = tuple(self._written(variable))
        return Row(variable.name, self._candidates[key], re.sub(r"\d+", "*", variable.name))

    def edge(self, producer: int, consumer: int, links: Links, whole_batch: bool = False) -> Edge:
        """What changes of layout take; where all sub-batches are taken at once, none computes meanwhile."""
        key = id(links), whole_batch
        if key not in self._tables:
            self._tables[key] = self.windows.loads(self.turns * self.windows.activations(links, whole_batch))
        loads = self._tables[key]
        return Edge(producer, consumer, np.zeros(loads.shape[1:]), loads)

    def _written(self, variable: Variable) -> list[Candidate]:
        prices, ports = variable.prices, np.array(variable.port_of)
        costs = self.turns * variable.costs[:, :, ports]
        saved, transient = variable.saved[ports].astype(int), variable.working[ports].astype(int)
        states, left = variable.lasting[ports].astype(int), np.zeros_like(saved)
        if prices is not None:
            costs = costs + prices.costs
            states, left = states + prices.state_bytes, prices.gradient_bytes
            # At its own products gradients besides: what follows, such as a loss, may have larger values then
            own = variable.product[ports].astype(int)
            transient = np.maximum(transient + prices.gathered_bytes, own + prices.transient_bytes)
            transient = np.maximum(transient, prices.scratch_bytes)
        loads = self.windows.loads(costs)
        if prices is not None:
            loads[-len(OPTIMIZER) :] = prices.optimizer
        strategies: Sequence[Strategy | None] = variable.strategies or [None] * len(ports)
        columns = zip(
            strategies, states.tolist(), saved.tolist(), left.tolist(), transient.tolist(), variable.port_of,
            loads.T.tolist(),
        )  # fmt: skip
        return [
            Candidate(str(strategy or next(iter(variable.ports[port].values()))), 0.0, state, keeps, holds, port, port,
                      strategy, tuple(load), leaves)
            for strategy, state, keeps, leaves, holds, port, load in columns
        ]  # fmt: skip
