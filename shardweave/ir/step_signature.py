"""Generated steps: the notes on each node, and the calling convention of the forward and the backward graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from shardweave.ir.layout import Layout
from shardweave.ir.mesh import Axis, Mesh, axes_size
from shardweave.ir.op_rule import BoundRule

META = "shardweave"
"""The key of the `NodeInfo` in ``node.meta``. It is the only key that shardweave uses."""
SEED = "step_seed"
"""The name of the placeholder that takes the seed of the step."""


Traffic = Literal["gather", "scatter", "reduce", "broadcast", "activation"]
"""The kinds of traffic.

``gather`` gathers parameters for a use. ``scatter`` reduces gradients into the shards in which they are accumulated.
``reduce`` brings these sums to the layout of the optimizer's states. ``broadcast`` gathers parameters from there, once
a step. ``activation`` moves activations and their gradients.
"""


@dataclass(frozen=True)
class Collective:
    """The note on a collective in a generated graph: what it does, its owner, and its reason.

    Parameters
    ----------
    kind : str
        ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
    axes : tuple of Axis
        The group: all ranks that differ only along these axes.
    bytes : int
        Size of the whole (gathered, or not yet scattered) buffer on one rank.
    owner : str
        The parameter or the op whose value it moves.
    reason : str
        A reason for the reader of the generated code, such as ``"sum over k"``.
    cause : {"parameter", "gradient", "activation"}
        What it moves: a parameter, a gradient, or an activation.
    scales : bool
        It moves the scales of quantized blocks. Another collective moves the blocks.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    axes: tuple[Axis, ...]
    bytes: int
    owner: str
    reason: str
    cause: Literal["parameter", "gradient", "activation"]
    scales: bool = False


@dataclass(frozen=True)
class NodeInfo:
    """The notes of shardweave on one fx node, stored under ``node.meta[META]``.

    Parameters
    ----------
    rule : BoundRule or None
        Set by `annotate` on every op that has one.
    layouts : tuple of Layout
        The layouts of the node's outputs, set by `Shard`. One entry for a plain tensor.
    op : str
        The name of the node in plans, tables and comments: that of its parameter or its module.
    backward : bool
        The node runs in the backward graph.
    collective : Collective or None
        Set on the node that starts a collective.
    checkpoint : str
        The user's activation checkpoint that the node is inside; "" outside of all.
    recomputed : bool
        The node belongs to the backward and recomputes a node of the forward.
    steps : tuple of (str, int)
        The sub-batch or slice that the node computes: the names of unrolled time axes, and the index on each. Set by
        `UnrollSubBatches`.
    """

    rule: BoundRule | None = None
    layouts: tuple[Layout, ...] = ()
    op: str = ""
    backward: bool = False
    collective: Collective | None = None
    checkpoint: str = ""
    recomputed: bool = False
    steps: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or buffer of the model.

    `layout` is its layout between steps, which is that of its optimizer states. The forward graph takes the parameter
    in this layout, and the backward returns its gradient in it. `aliases` are the other names of a tied parameter. A
    call begins with the `change` of the parameter, element by element, if there is one.
    """

    name: str
    layout: Layout
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    change: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class ValueSpec:
    """A tensor that a user passes in or gets back: its name, global layout and dtype (``"float32"``).

    A backward starts at the outputs that are `differentiable`, and gives the gradients of inputs that are. An output
    that is `left_out` has a gradient in the model but not in the step, whose backward starts at the model's own loss.
    `rows` is the number of rows of the first dimension for each sample of the batch: 1 for ``[batch, ...]``, the
    sequence length for ``[batch * sequence, ...]``, and 0 if the first dimension is not the batch.
    """

    name: str
    layout: Layout
    dtype: str
    differentiable: bool = False
    left_out: bool = False
    rows: int = 0


@dataclass(frozen=True)
class StepSpec:
    """The calling convention of a generated step: all that the runtime needs besides the two graphs.

    The forward graph takes, in this order:

    1. The coordinates of the rank, one int for each axis of `mesh`.
    2. The seed, if the step draws random numbers: an int that differs from call to call and is equal on all ranks.
    3. The local tensors of `parameters`, `buffers` and `inputs`.

    It returns the new values of `mutated` buffers and parameters, in their layouts, then `outputs`, then the values
    saved for the backward. These include the seed if the backward draws random numbers too.

    The backward graph takes the coordinates, the saved values, and one tangent for each differentiable output (of its
    local part, unless it is a scalar). It returns one gradient for each differentiable input, at the input's layout,
    then one for each trainable parameter, at the parameter's layout.
    """

    mesh: Mesh
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    mutated: tuple[str, ...] = ()
    data_axes: tuple[Axis, ...] = ()
    """The axes that the batch of the inputs is sharded over, outermost first."""
    graph_hash: str = ""
    draws: bool = False
    """Whether the forward graph takes a seed."""
    micro_batch_layouts: tuple[Layout, ...] = ()
    """In a step of several micro-batches, the layout of each input, then each output, then each gradient of an input,
    with the time axis of `mesh` that cuts it into micro-batches."""
    sub_batches: int = 1
    """The number of sub-batches that the graphs cut each micro-batch into. Each is sharded over the devices."""

    @property
    def differentiable_inputs(self) -> tuple[int, ...]:
        """The indices of the inputs whose gradients the backward returns."""
        return tuple(index for index, value in enumerate(self.inputs) if value.differentiable)

    @property
    def trains(self) -> bool:
        """Whether the step has gradients of parameters or of inputs."""
        return bool(self.differentiable_inputs) or any(parameter.trainable for parameter in self.parameters)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a call."""
        return axes_size(self.mesh.micro_batch_axes)
