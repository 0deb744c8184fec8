"""The batch of a step: which inputs and outputs have a batch dimension, and the global batch of all ranks.

The batch dimension of an input is found in the graph, by the factor class of its first dimension. Its size alone does
not tell: a mask or a table of positions may happen to have as many rows as the batch has samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.ir import Captured, PlanError, as_call, canonical_arguments, leaf_names
from shardweave.sharding.annotate import Classes, source_of
from shardweave.sharding.graphs import info


@dataclass(frozen=True)
class Samples:
    """The batch of an annotated step.

    Parameters
    ----------
    count : int
        Samples in a batch; 0 where no input has a batch dimension.
    batch : frozenset of int
        The factor classes of the batch.
    shared : frozenset of int
        The classes of all other dimensions of inputs, parameters and buffers.
    classes : Classes
        Of the step.
    inputs : mapping of str to int
        The rows of one sample, by the name of each input that has a batch dimension.
    grouped_rows : mapping of str to int
        The rows of each such input that the model takes together: more than one if it splits the first dimension.
    """

    count: int
    batch: frozenset[int]
    shared: frozenset[int]
    classes: Classes
    inputs: Mapping[str, int]
    grouped_rows: Mapping[str, int]

    @classmethod
    def of(cls, captured: Captured, classes: Classes) -> Samples:
        """Find the batch: the first dimension of the first input whose class no other dimension has.

        An input has a batch dimension if its first dimension is of the same class. If no op links the two, it has one
        if it has as many rows and no other dimension of an input, parameter or buffer is of its class.
        """
        nodes = {node.name: node for node in captured.graph.graph.nodes if node.op == "placeholder"}
        shared: set[int] = set()
        for name in (*captured.parameters, *captured.buffers, *captured.inputs):
            dims = _dims(nodes[name])
            rest = [*dims[1:], dims[0][1:]] if name in captured.inputs and dims else dims
            shared |= {classes.of[nodes[name], factor] for factors in rest for factor in factors}
        first = {name: lead for name in captured.inputs if (lead := _lead(nodes[name], classes)) is not None}
        own = {name: lead for name, lead in first.items() if lead not in shared}
        size = next((_size(nodes[name]) for name in own), 0)
        batch = frozenset(lead for name, lead in own.items() if _size(nodes[name]) == size)
        having = [name for name, lead in first.items() if lead in batch]
        count = min((_size(nodes[name]) for name in having), default=0)
        having = [name for name in having if _size(nodes[name]) % count == 0]
        inputs = {captured.inputs[name]: _size(nodes[name]) // count for name in having}
        grouped_rows = {captured.inputs[name]: _size(nodes[name]) // _leading_size(nodes[name]) for name in having}
        return cls(count, batch, frozenset(shared), classes, inputs, grouped_rows)

    def rows(self, value: Any) -> int:
        """The rows of one sample in the first dimension of a node; 0 if that is not the batch."""
        if not isinstance(value, fx.Node) or not self.count:
            return 0
        source, index = source_of(value)
        lead = _lead(source, self.classes, index)
        size = value.meta["val"].shape[0] if value.meta["val"].dim() else 0
        if lead is None or size % self.count:
            return 0
        if lead not in self.batch and (size != self.count or lead in self.shared):
            return 0
        return int(size) // self.count


def inputs_with_first_size(model: nn.Module, example_inputs: Any) -> tuple[frozenset[str], bool]:
    """The inputs that have as many rows as the first one, and whether their rows are certain to be the batch.

    They are if no input has another dimension of this size, such as the length of a sequence.
    """
    names, leaves, _ = _leaves(model, example_inputs)
    shapes = {name: leaf.shape for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    size = next((shape[0] for shape in shapes.values()), 0)
    clear = size > 1 and all(size not in shape[1:] for shape in shapes.values())
    return frozenset(name for name, shape in shapes.items() if shape[0] == size), clear


def global_example(
    model: nn.Module, example_inputs: Any, ranks: int, batch: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs of the global batch, with the shapes of `ranks` times one rank's part; values do not matter.

    Examples
    --------
    >>> import torch
    >>> (x,), _ = global_example(nn.Linear(4, 4), torch.ones(3, 4), 2, {"input"})
    >>> x.shape
    torch.Size([6, 4])
    """
    names, leaves, spec = _leaves(model, example_inputs)
    grown = [
        leaf.new_empty((1, *leaf.shape[1:]), requires_grad=leaf.requires_grad).expand(
            ranks * leaf.shape[0], *leaf.shape[1:]
        )
        if name in batch and isinstance(leaf, Tensor)
        else leaf
        for name, leaf in zip(names, leaves)
    ]
    args, kwargs = pytree.tree_unflatten(grown, spec)
    return args, kwargs


def check_local_batch(samples: Samples, ranks: int) -> None:
    """Raise `PlanError` if ranks cannot each pass a part of the batch: there is none, or it cuts grouped rows."""
    if not samples.count:
        raise PlanError(
            'batch="local" is for inputs with a batch dimension, their first one, but the step has none: leave it out, '
            "and pass the same inputs on all ranks"
        )
    for name, together in samples.grouped_rows.items():
        mine = samples.count * samples.inputs[name] // ranks
        if mine % together:
            raise PlanError(
                f"the model takes {together} rows of the first dimension of {name} together, but each of {ranks} ranks "
                f"passes {mine}, so that rows of several ranks would be taken together. Pass a multiple of {together} "
                'rows on each rank, or compile with batch="global"'
            )


def _leaves(model: nn.Module, example_inputs: Any) -> tuple[tuple[str, ...], list[Any], pytree.TreeSpec]:
    args, kwargs = as_call(example_inputs)
    signature = inspect.signature(model.forward)
    call = canonical_arguments(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten(call)
    return leaf_names(signature, *call), leaves, spec


def _dims(node: fx.Node, index: int = 0) -> tuple[tuple[str, ...], ...]:
    rule = info(node).rule
    return rule.outputs[index] if rule is not None and index < len(rule.outputs) else ()


def _lead(node: fx.Node, classes: Classes, index: int = 0) -> int | None:
    """The class of the outermost factor of the first dimension; None if its size is one."""
    dims = _dims(node, index)
    return classes.of[node, dims[0][0]] if dims and dims[0] else None


def _leading_size(node: fx.Node) -> int:
    rule = info(node).rule
    assert rule is not None
    return rule.factor(rule.outputs[0][0][0]).size


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].shape[0])
