"""Generated steps: what is known of each node, and how the two graphs are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardweave.ir.layout import Layout
from shardweave.ir.mesh import Axis, Mesh, axes_size
from shardweave.ir.op_rule import BoundRule

META = "shardweave"
"""The one key that shardweave uses in ``node.meta``; its value is a `NodeInfo`."""
SEED = "step_seed"
"""The placeholder of a generated graph that takes the seed of the step."""


Traffic = Literal["gather", "scatter", "reduce", "broadcast", "activation"]
"""What moves: parameters for a use; gradients into the shards in which they are added up; these sums to the states;
parameters from there, once a step; activations and their gradients."""


@dataclass(frozen=True)
class Collective:
    """What a collective in a generated graph does, whose it is and why.

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
        For the reader of the generated code, such as ``"sum over k"``.
    cause : {"parameter", "gradient", "activation"}
        Which of the three kinds of traffic it is.
    scales : bool
        It moves the scales of quantized blocks, which another collective moves.
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
    """What shardweave knows of one fx node; it lies under ``node.meta[META]``.

    Parameters
    ----------
    rule : BoundRule or None
        Set by `annotate` on every op that has one.
    layouts : tuple of Layout
        Where the node's outputs lie; set by `shard`. One entry for a plain tensor.
    op : str
        The name by which plans, tables and comments call the node: its parameter's or its module's.
    backward : bool
        The node runs in the backward graph.
    collective : Collective or None
        Set on the node that starts a collective.
    checkpoint : str
        Which activation checkpoint of the user's the node lies inside of.
    recomputed : bool
        The node of the backward is the copy of one of the forward.
    steps : tuple of (str, int)
        The woven time axes of which the node computes one step, and which one; set by `split`.
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
    """A parameter or buffer of the model and where its states rest.

    `layout` is what the forward graph takes and what its gradient is returned in; `aliases` are the other names
    of a tied parameter.
    """

    name: str
    layout: Layout
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ValueSpec:
    """A tensor that a user passes in or gets back: its name, global layout and dtype (``"float32"``).

    A backward starts at outputs that are `differentiable`. One that is `left_out` has a gradient in the model, but not
    in the step, whose backward starts at the model's own loss. `rows` is how many steps of the first dimension belong
    to one sample of the batch: 1 for ``[batch, ...]``, the sequence's length for ``[batch * sequence, ...]``, 0 where
    the first dimension is not the batch.
    """

    name: str
    layout: Layout
    dtype: str
    differentiable: bool = False
    left_out: bool = False
    rows: int = 0


@dataclass(frozen=True)
class StepSpec:
    """The calling convention of a generated step, all that the runtime has to know beside the two graphs.

    The forward graph takes the coordinates (one int an axis of `mesh`, in its order), then, where the step draws
    random numbers, its seed (an int, another one for each call, the same on all ranks), then the local tensors of
    `parameters`, `buffers` and `inputs`; it returns the new values of `mutated_buffers`, then `outputs`, then
    what is saved (where the backward draws, too, the seed is a part of it). The backward graph takes the coordinates,
    what was saved, and one tangent for each differentiable output (for one that is not a scalar: of its local part);
    it returns one gradient for each trainable parameter, in order, at the parameter's layout.
    """

    mesh: Mesh
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[ParameterSpec, ...]
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    mutated_buffers: tuple[str, ...] = ()
    data_axes: tuple[Axis, ...] = ()
    """The axes over which the inputs' batch is spread, outermost first."""
    graph_hash: str = ""
    draws: bool = False
    """Whether the forward graph takes a seed."""
    pieces: tuple[Layout, ...] = ()
    """In a step of several micro-batches, where each input and then each output of one of them lies: on the time axis
    of `mesh`, too."""
    sub_batches: int = 1
    """How many parts of each micro-batch the graphs compute; each is spread over the devices for itself."""

    @property
    def micro_batches(self) -> int:
        """How many parts of the batch are computed one after another in a call."""
        return axes_size(self.mesh.times)
