"""The memory of a step besides the states of its parameters, for each layout of a variable.

`ActivationMemory` adds up what the forward saves for the backward, inputs and outputs of the step, and the values that
live while an op runs. Each value belongs to the variable that it follows, and has a size for each of its ports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import fx

from shardweave.passes import Annotated
from shardweave.planner.problem.graph_analysis import Facts, is_alias, num_bytes, root_of
from shardweave.planner.problem.overlap_model import Floats
from shardweave.planner.problem.resharding_costs import local_numel
from shardweave.planner.problem.variables import PortLayouts, Variable
from shardweave.sharding import info, tensor_args


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
