"""The variables of a problem as it is built, and the rows and edges of the `Problem` that are made of them.

`ActivationMemory` adds up what the forward saves for the backward, inputs and outputs of the step, and the values that
live while an op runs. Each value belongs to the variable that it follows, and has a size for each of its ports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from shardweave.ir import Assignment, Layout, RecomputeMode, Strategy
from shardweave.passes import Annotated
from shardweave.planner.problem.graph_analysis import Facts, is_alias, num_bytes, root_of
from shardweave.planner.problem.op_costs import OpPrices
from shardweave.planner.problem.overlap_model import OPTIMIZER, Costs, Floats, Windows
from shardweave.planner.problem.problem import Candidate, Edge, Problem
from shardweave.planner.problem.problem import Op as Row
from shardweave.planner.problem.resharding_costs import Links, local_numel
from shardweave.sharding import Op, info, tensor_args

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


class ActivationMemory:
    """Adds the bytes of values to the variables that they follow.

    Parameters
    ----------
    annotated : Annotated
    facts : Facts
    micro_batch_count : int
        Micro-batches of a step.
    world_size : int
    follows : mapping of fx.Node to int
        Which of the variables each value follows.
    layouts : mapping of fx.Node to PortLayouts
        Its layouts in each of that one's ports.
    """

    def __init__(
        self,
        annotated: Annotated,
        facts: Facts,
        micro_batch_count: int,
        world_size: int,
        follows: Mapping[fx.Node, int],
        layouts: Mapping[fx.Node, PortLayouts],
    ) -> None:
        self.annotated, self.facts = annotated, facts
        self.micro_batch_count, self.world_size = micro_batch_count, world_size
        self.follows, self.layouts = follows, layouts
        self._unread = set(facts.inputs)
        self._input_layouts: dict[fx.Node, PortLayouts] = {}
        self._numels: dict[int, Floats] = {}

    def add_op(self, node: fx.Node, variable: Variable, inputs: PortLayouts) -> None:
        """Add what a product keeps of its inputs, in the layouts that it reads them in."""
        self._input_layouts[node] = inputs
        variable.saved += self.read_bytes(node)
        variable.lasting += self._inputs_read(node, variable)

    def add(self, node: fx.Node, variable: Variable) -> None:
        """Add what the backward needs of a value, and what lives while it is computed."""
        if is_alias(node) or not hasattr(node.meta["val"], "numel"):
            return
        itemsize = node.meta["val"].element_size()
        layouts = self.layouts[node]
        if id(layouts) not in self._numels:
            self._numels[id(layouts)] = np.array([local_numel(port[0]) for port in layouts], dtype=float)
        sizes = self._numels[id(layouts)] * itemsize
        whole = node.meta["val"].numel() * itemsize
        held = sizes * self.facts.held(whole) / max(1, whole)
        variable.working = np.maximum(variable.working, held)
        if node in self.facts.roles:
            variable.product = np.maximum(variable.product, held)
        if node in self.facts.returned:
            variable.lasting += sizes * self.micro_batch_count  # of all micro-batches
            variable.saved += sizes * (self.micro_batch_count if node in self.facts.differentiated else 0)
        elif self.facts.is_kept(node):
            variable.saved += sizes

    def read_bytes(
        self, node: fx.Node, of: Callable[[fx.Node], bool] = lambda argument: True, gathered: bool = False
    ) -> Floats:
        """What a product keeps of its inputs, as it reads them, for its weight's gradient: by its port.

        Of those that several devices read the same part of alone, if `gathered`, or if they are kept anyway.
        """
        inputs = self._input_layouts[node]
        total = np.zeros(len(inputs))
        for position, argument in enumerate(tensor_args(node)):
            if argument in self.follows and of(argument):
                copies = np.array([local_numel(port[position]) for port in inputs], dtype=float)
                if gathered or self.facts.is_kept(root_of(argument)):
                    copies *= copies * self.micro_batch_count * self.world_size > argument.meta["val"].numel()
                total += copies * argument.meta["val"].element_size() / max(1, self.facts.readers[root_of(argument)])
        return total

    @property
    def fixed_bytes(self) -> int:
        """What every choice holds."""
        return self._unread_bytes() + self._saved_of_inputs()

    def _inputs_read(self, node: fx.Node, variable: Variable) -> Floats:
        """Inputs of the step that this op is the first to read: each device has its part of the batch, all the time."""
        inputs = self._unread.intersection(tensor_args(node))
        found = np.zeros(len(variable.ports))
        if inputs:
            self._unread -= inputs
            size = num_bytes(inputs)
            for port, strategy in zip(variable.port_of, variable.strategies):
                found[port] = max(found[port], size / (strategy.grid.z * strategy.grid.data))
        return found

    def _unread_bytes(self) -> int:
        """Inputs that no op reads, such as labels: each device has its part."""
        batch, parts = (self.annotated.batch,), self.world_size
        return sum(
            num_bytes([node]) // (parts if node.meta["val"].shape[:1] == batch else 1)
            for node in self._unread
            if hasattr(node.meta["val"], "shape") and node.name not in self.annotated.tangents
        )  # fmt: skip

    def _saved_of_inputs(self) -> int:
        """What the backward needs of what depends on inputs alone, such as a mask: what has no batch is whole."""
        nodes = (node for node in self.facts.graph.nodes if node.op == "call_function" and not info(node).backward)
        kept = [node for node in nodes if node not in self.follows and not is_alias(node) and self.facts.is_kept(node)]
        parts = self.world_size * self.micro_batch_count
        return sum(num_bytes([node]) // (parts if self.facts.batch_factor(node) else 1) for node in kept)
