"""The variables of a problem as it is built, and the rows and edges of the `Problem` that are made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from shardweave.ir import Assignment, Layout, RecomputeMode, Strategy
from shardweave.planner.problem.op_costs import OpPrices
from shardweave.planner.problem.overlap_model import OPTIMIZER, Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge, Problem
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links
from shardweave.sharding import Op

PortLayouts = list[tuple[Layout, ...]]
"""For each port of a variable the layouts of an op's inputs, or of a value's parts."""


@dataclass
class Variable:
    """A row of the problem: an op with its strategies, or a join with its layouts; a port is a layout of its output.

    `prices` are those of its strategies; `costs`, `saved` and `working` what follows it costs, keeps and holds for a
    while, by port; `product` is `working` where its own products run, `lasting` what is held until the step ends.
    """

    name: str
    signature: int
    op: Op | None = None
    node: fx.Node | None = None
    strategies: list[Strategy] = field(default_factory=list)
    kept_slices: list[int] = field(default_factory=list)
    """How many slices of the parameter each of the strategies keeps gathered from the forward to the backward."""
    prices: OpPrices | None = None
    ports: list[dict[str, Assignment]] = field(default_factory=list)
    port_of: list[int] = field(default_factory=list)
    costs: Costs = field(default_factory=lambda: np.zeros(0))
    saved: Floats = field(default_factory=lambda: np.zeros(0))
    working: Floats = field(default_factory=lambda: np.zeros(0))
    product: Floats = field(default_factory=lambda: np.zeros(0))
    lasting: Floats = field(default_factory=lambda: np.zeros(0))
    modes: tuple[RecomputeMode, ...] = ()
    """Of a layer's recomputation, in which case it has none of the others."""
    degrees: tuple[int, ...] = ()
    """Of the outputs (`step_choices.with_outputs`), in which case it has none of the others."""
    origins: tuple[int, ...] = ()
    """The port of the same variable without a choice of recomputation that each port comes from, if there are more."""


@dataclass
class Costed:
    """The problem, and what its variables stand for."""

    problem: Problem
    variables: list[Variable]

    def limited(self, memory_limit: int) -> Costed:
        """The same under another memory limit, in bytes."""
        return replace(self, problem=replace(self.problem, memory_limit=memory_limit))


class RowBuilder:
    """Makes the rows and edges of a problem of variables.

    Parameters
    ----------
    windows : Windows
    micro_batch_count : int
        How often a step does what costs are of: its micro-batches.
    """

    def __init__(self, windows: Windows, micro_batch_count: int) -> None:
        self.windows, self.micro_batch_count = windows, micro_batch_count
        self._candidates: dict[object, tuple[Candidate, ...]] = {}
        self._tables: dict[tuple[int, bool, int], Floats] = {}

    def row(self, variable: Variable) -> Row:
        """A variable's row."""
        figures = variable.costs, variable.saved, variable.working, variable.product, variable.lasting
        key = variable.signature, *(column.tobytes() for column in figures)
        if key not in self._candidates:
            self._candidates[key] = tuple(self._written(variable))
        return Row(variable.name, self._candidates[key], re.sub(r"\d+", "*", variable.name))

    def edge(self, producer: int, consumer: int, links: Links, whole_batch: bool, beside: Floats | None) -> Edge:
        """What changes of layout take; where all sub-batches are taken at once, none computes meanwhile.

        Gradients of the consumer's inputs move `beside` so many seconds of its own products, by its port.
        """
        key = id(links), whole_batch, id(beside)
        if key not in self._tables:
            activations = self.windows.activations(links, whole_batch, 0.0 if beside is None else beside)
            self._tables[key] = self.windows.loads(self.micro_batch_count * activations)
        loads = self._tables[key]
        return Edge(producer, consumer, np.zeros(loads.shape[1:]), loads)

    def _written(self, variable: Variable) -> list[Candidate]:
        prices, ports = variable.prices, np.array(variable.port_of)
        costs = self.micro_batch_count * variable.costs[:, :, ports]
        saved, transient = variable.saved[ports].astype(int), variable.working[ports].astype(int)
        states, left = variable.lasting[ports].astype(int), np.zeros_like(saved)
        if prices is not None:
            costs = costs + prices.costs
            states, left = states + prices.state_bytes, prices.gradient_bytes
            saved = saved + prices.kept_bytes
            # At its own products gradients besides: what follows, such as a loss, may have larger values then
            own = variable.product[ports].astype(int)
            transient = np.maximum(transient + prices.gathered_bytes, own + prices.transient_bytes)
            transient = np.maximum(transient, prices.scratch_bytes)
        loads = self.windows.loads(costs)
        if prices is not None:
            loads[-len(OPTIMIZER) :] = prices.optimizer
        strategies: Sequence[Strategy | None] = variable.strategies or [None] * len(ports)
        columns = zip(
            strategies, variable.kept_slices or [0] * len(ports), states.tolist(), saved.tolist(), left.tolist(),
            transient.tolist(), variable.port_of, loads.T.tolist(),
        )  # fmt: skip
        return [
            Candidate(f"{strategy or next(iter(variable.ports[port].values()))}{f', {kept} kept' if kept else ''}", 0.0,
                      state, keeps, holds, port, port, (strategy, kept) if kept else strategy, tuple(load), leaves)
            for strategy, kept, state, keeps, leaves, holds, port, load in columns
        ]  # fmt: skip
