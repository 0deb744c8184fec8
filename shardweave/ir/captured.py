"""The captured training step: one graph of forward and backward, with the names of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardweave.ir.precision import Dtypes
from shardweave.ir.pytree_signature import CallTree
from shardweave.ir.reads import Reads


@dataclass(frozen=True)
class Captured:
    """A training step as one aten graph, with the names of its inputs and outputs.

    Parameters
    ----------
    graph : GraphModule
        Placeholders: parameters, buffers, inputs, tangents. Outputs: new values of `mutated_buffers`, then of
        `outputs`, then the gradients of `gradients`.
    parameters, buffers, inputs : dict from placeholder name to the model's name
    tangents : dict from placeholder name to the index of its output
    outputs : tuple of str
        Names of the model's tensor outputs.
    gradients : tuple of str
        Names of the trainable parameters, in the order of `parameters`.
    aliases : dict from a parameter's name to its other names
        Tied parameters are one placeholder.
    call : CallTree, optional
        The structure of a call. None if the caller flattens its arguments itself.
    training : bool
        The mode of the model at capture.
    whole : bool
        Parameters, their gradients and the outputs are whole on every rank, as under torch.compile.
    dtypes : mapping of str to Dtypes
        The dtypes of the master weight and of the gradient reduction, for each parameter in mixed precision.
    reads : Reads, optional
        The Python values that became constants of the graph.
    known : dict
        A cache of fake results and decompositions of ops, shared by all lowerings: see `LocalGraph` and `decompose`.
    """

    graph: fx.GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    inputs: dict[str, str]
    tangents: dict[str, int]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    mutated_buffers: tuple[str, ...]
    aliases: dict[str, tuple[str, ...]]
    call: CallTree | None
    training: bool
    whole: bool = False
    dtypes: Mapping[str, Dtypes] = field(default_factory=dict)
    reads: Reads | None = field(default=None, repr=False, compare=False)
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
