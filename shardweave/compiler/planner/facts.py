"""Facts: what the planner asks of a captured step's graph, whatever is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from torch import fx

from shardweave.compiler.pipeline import Annotated, join_names
from shardweave.compiler.planner.ops import Op, batch_classes
from shardweave.compiler.planner.prices import tensor_outputs
from shardweave.compiler.planner.pricing import Ends
from shardweave.cost_model.compute import node_work
from shardweave.ir import BoundRule
from shardweave.passes.annotate import depends_on_inputs, graph_outputs, info
from shardweave.passes.rules import is_view
from shardweave.passes.rules.registry import tensor_args


class Facts:
    """Of one annotated step.

    Parameters
    ----------
    annotated : Annotated
    """

    def __init__(self, annotated: Annotated) -> None:
        self.annotated = annotated
        self.graph = annotated.captured.graph.graph
        self.roles: dict[fx.Node, Op] = {role.node: op for op in annotated.ops for role in op.roles}
        """The op whose product a node computes."""
        parameters = annotated.captured.parameters
        self.shapes = {parameters[node.name]: node.meta["val"] for node in self.graph.nodes if node.name in parameters}
        self.names = join_names(self.graph)
        self.dependent = depends_on_inputs(self.graph)
        self.returned = {root_of(value) for value in graph_outputs(self.graph) if isinstance(value, fx.Node)}

    @cached_property
    def readers(self) -> Counter[fx.Node]:
        """How many ops read each activation."""
        forward = (node for node in self.roles if not info(node).backward)
        return Counter(root_of(argument) for node in forward for argument in tensor_args(node))

    @cached_property
    def backward_ratio(self) -> float:
        """Bytes that following ops move in the backward, for each byte in the forward."""
        moved = [0, 0]
        for node in self.graph.nodes:
            if node not in self.roles and node.op == "call_function" and (work := node_work(node)) is not None:
                moved[info(node).backward] += work.num_bytes
        return moved[1] / moved[0] if moved[0] else 0.0

    @property
    def inputs(self) -> list[fx.Node]:
        """What the step is given that is no parameter."""
        parameters = self.annotated.captured.parameters
        return [node for node in self.graph.nodes if node.op == "placeholder" and node.name not in parameters]

    def batch_factor(self, node: fx.Node) -> str:
        """The factor of a node that is the batch; "" where it has none."""
        of = self.annotated.classes.of
        names = (factor.name for factor in bound_of(node).factors)
        return next((name for name in names if of.get((node, name)) in self._batch_classes), "")

    @cached_property
    def _batch_classes(self) -> frozenset[int]:
        return batch_classes(self.annotated.captured, self.annotated.classes)[0]

    def needed_by_backward(self, node: fx.Node) -> bool:
        """Whether a backward op other than an op's own product reads a forward value."""
        for user in node.users:
            if info(user).backward and user not in self.roles and not is_view(user):
                return True
            if is_view(user) and self.needed_by_backward(user):
                return True
        return False

    def ends(self, op: Op) -> Ends:
        """Whether no op comes before it, and whether none comes after it."""
        own = [role.node for role in op.roles if not info(role.node).backward]
        return Ends(any(node not in self._behind for node in own), any(node not in self._before for node in own))

    @cached_property
    def _behind(self) -> set[fx.Node]:
        """The nodes of the forward that an op comes before."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if any(source in found or source in self.roles for source in node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def _before(self) -> set[fx.Node]:
        """The nodes of the forward that an op of it comes after."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(user in found or user in self.roles for user in node.users if not info(user).backward):
                found.add(node)
        return found


def bound_of(node: fx.Node) -> BoundRule:
    """The rule of a node, bound to its sizes."""
    bound = info(node).rule
    assert bound is not None
    return bound


def root_of(value: fx.Node) -> fx.Node:
    """What a view is one of, or the value itself."""
    while is_view(value):
        value = tensor_args(value)[0]
    return value


def num_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the values of these, whole."""
    return sum(value.numel() * value.element_size() for node in nodes for value in tensor_outputs(node))
