"""The few frozen types that every floor of shardweave speaks.

The one idea: a machine offers *axes*, an op has *factors* (its loops), and parallelising an op is assigning
each axis to one of its factors, or to none. Where a value lies is then derived:

- a factor that is in the output and has an axis: the output is sharded over that axis,
- a factor that is only in the inputs and has an axis: the output is a partial result over it,
- an axis on none of the factors: the output is replicated over it.

A dimension is a mixed-radix number whose digits, outermost first, are either an `Axis` (that digit differs from
device to device) or an ``int`` (that many steps lie on the device itself). ``(x, 32)`` is a plain shard of a
dimension of ``32 * x.size``; ``(3, x, 16)`` is the strided shard of a fused ``(3 h d)`` projection on its heads.
Axes have prime sizes, so a view never has to cut one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardweave.errors import LayoutError

META = "shardweave"
"""The one key that shardweave uses in ``node.meta``; its value is a `NodeInfo`."""


@dataclass(frozen=True)
class Axis:
    """A dimension of the machine whose steps an op's factor can be spread over.

    Parameters
    ----------
    name : str
        Unique within a `Mesh`, such as ``"gpu0"``.
    size : int
        Number of steps; prime for the axes of a mesh.
    stride : int
        Distance in global ranks between two neighbours along the axis (1 for the innermost).
    kind : {"space", "time"}
        Steps on different devices at once, or one after another on the same device.

    Examples
    --------
    >>> Axis("node0", 2, stride=4).coordinate(rank=6)
    1
    """

    name: str
    size: int
    stride: int = 1
    kind: Literal["space", "time"] = "space"

    def coordinate(self, rank: int) -> int:
        """Where `rank` stands along this axis, in ``[0, size)``."""
        return rank // self.stride % self.size

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


Digit = int | Axis


def axes_size(axes: Iterable[Axis]) -> int:
    """Number of devices in one group over `axes` (1 for none)."""
    return math.prod(axis.size for axis in axes)


def prime_factors(number: int) -> list[int]:
    """The prime factors of `number`, smallest first.

    >>> prime_factors(12)
    [2, 2, 3]
    """
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


@dataclass(frozen=True)
class Mesh:
    """The axes of the machine, in *layout order*: of two axes on one dimension, the earlier one is outermost.

    The order is free (it is not the order of ranks, which each axis carries as its stride). A plan puts the axes
    that tensor parallelism uses first and those that parameters rest on after them, so that every layout is a plain
    DTensor placement.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> [str(axis) for axis in mesh.axes], mesh.world_size
    (['gpu0:2', 'gpu1:2', 'node0:2'], 8)
    >>> mesh.group_ranks(mesh.axes[:2], rank=6)
    (4, 5, 6, 7)
    """

    axes: tuple[Axis, ...]

    @classmethod
    def of_levels(cls, levels: Sequence[tuple[str, int]]) -> Mesh:
        """A mesh with one axis a prime factor of each level's size, innermost level first."""
        axes, stride = [], 1
        for name, size in levels:
            for index, prime in enumerate(prime_factors(size)):
                axes.append(Axis(f"{name}{index}", prime, stride))
                stride *= prime
        return cls(tuple(axes))

    @property
    def world_size(self) -> int:
        return axes_size(self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every axis, by the axis' name."""
        return {axis.name: axis.coordinate(rank) for axis in self.axes}

    def ordered(self, axes: Iterable[Axis]) -> tuple[Axis, ...]:
        """`axes` in layout order."""
        wanted = set(axes)
        return tuple(axis for axis in self.axes if axis in wanted)

    def axis(self, name: str) -> Axis:
        """The axis called `name`; `LayoutError` if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"no axis is called {name!r}; this mesh has {', '.join(map(str, self.axes)) or 'none'}")

    def group_ranks(self, axes: Iterable[Axis], rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` at most along `axes`."""
        ranks = [rank - sum(axis.coordinate(rank) * axis.stride for axis in axes)]
        for axis in axes:
            ranks = [base + step * axis.stride for base in ranks for step in range(axis.size)]
        return tuple(sorted(ranks))


def group_name(axes: Iterable[Axis]) -> str:
    """The symbolic name of the groups over `axes`, equal on all ranks: the runtime puts a process group in its place.

    >>> group_name([Axis("gpu1", 2, 2), Axis("gpu0", 2)])
    'gpu0.gpu1'
    """
    return ".".join(axis.name for axis in sorted(axes, key=lambda axis: axis.stride))


def normalise(digits: Iterable[Digit]) -> tuple[Digit, ...]:
    """`digits` with neighbouring local digits merged and local ones dropped.

    >>> normalise([4, 1, 8]), normalise([1])
    ((32,), ())
    """
    merged: list[Digit] = []
    for digit in digits:
        if isinstance(digit, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= digit
        elif digit != 1:
            merged.append(digit)
    return tuple(merged)


@dataclass(frozen=True)
class Layout:
    """Where a value lies: the digits of each dimension, and the axes over which it is a partial result.

    Parameters
    ----------
    dims : tuple of tuple of Digit
        A dimension's digits, outermost first, normalised. A dimension of size 1 is ``()``.
    partial : tuple of (Axis, str)
        Axes over which the value still has to be combined, and how (``"sum"``, ``"max"``, ``"min"``).

    Examples
    --------
    >>> x = Axis("gpu0", 2)
    >>> layout = Layout(((x, 4), (16,)))
    >>> layout.global_shape, layout.local_shape, str(layout)
    ((8, 16), (4, 16), '[gpu0 4, 16]')
    """

    dims: tuple[tuple[Digit, ...], ...]
    partial: tuple[tuple[Axis, str], ...] = ()

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        """The layout of a value of `shape` that is whole on every device."""
        return cls(tuple(normalise([int(size)]) for size in shape))

    @property
    def global_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(d if isinstance(d, int) else d.size for d in dim) for dim in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(d for d in dim if isinstance(d, int)) for dim in self.dims)

    @property
    def shard_axes(self) -> tuple[Axis, ...]:
        """The axes that some dimension is sharded over, in the order of the dimensions."""
        return tuple(d for dim in self.dims for d in dim if isinstance(d, Axis))

    @property
    def partial_axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not self.shard_axes

    def without_partial(self) -> Layout:
        return Layout(self.dims)

    def __str__(self) -> str:
        dims = [" ".join(d.name if isinstance(d, Axis) else str(d) for d in dim) or "1" for dim in self.dims]
        partial = "".join(f" +{axis.name}" if op == "sum" else f" {op}({axis.name})" for axis, op in self.partial)
        return f"[{', '.join(dims)}]{partial}"


Dims = tuple[tuple[str, ...], ...]
"""For each dimension of a value the factors whose product it is, outermost first; ``()`` for size 1."""


@dataclass(frozen=True)
class Factor:
    """A loop of an op.

    Parameters
    ----------
    name : str
        As in the rule's pattern; atoms of a cut factor are ``"m.0"``, ``"m.1"``, outermost first.
    size : int
        Number of steps of the loop.
    blocked : bool
        The op cannot be computed in parts along this loop.
    reduce : str
        How the parts of the output combine where no output has this factor (``"sum"``, ``"max"``, ``"min"``).
    """

    name: str
    size: int
    blocked: bool = False
    reduce: str = "sum"


@dataclass(frozen=True)
class BoundRule:
    """A rule bound to one op: its factors, and of which factors each dimension of each value is made.

    `inputs` are the op's tensor arguments in the order of its schema (absent optional ones left out).
    """

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]

    def factor(self, name: str) -> Factor:
        for factor in self.factors:
            if factor.name == name:
                return factor
        raise LayoutError(f"no factor is called {name!r}; the op has {[f.name for f in self.factors]}")

    def sizes(self) -> dict[str, int]:
        return {factor.name: factor.size for factor in self.factors}

    def __str__(self) -> str:
        def dims(value: Dims) -> str:
            return " ".join(
                names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in value
            )

        def blocked(text: str) -> str:
            for factor in self.factors:
                if factor.blocked:
                    text = " ".join(
                        word.replace(factor.name, f"[{factor.name}]") if word.strip("()") == factor.name else word
                        for word in text.split(" ")
                    )
            return text

        sides = [", ".join(blocked(dims(value)) for value in side) for side in (self.inputs, self.outputs)]
        return " -> ".join(sides)


@dataclass(frozen=True)
class Assignment:
    """An op's axis-to-factor assignment: which factor each axis is on; axes not named are on none.

    >>> Assignment.of({Axis("gpu0", 2): "n"}).as_dict()[Axis("gpu0", 2)]
    'n'
    """

    items: tuple[tuple[Axis, str], ...] = ()

    @classmethod
    def of(cls, mapping: Mapping[Axis, str]) -> Assignment:
        return cls(tuple(sorted(mapping.items(), key=lambda item: item[0].stride)))

    def as_dict(self) -> dict[Axis, str]:
        return dict(self.items)

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}→{factor}" for axis, factor in self.items) or "replicated"


@dataclass(frozen=True)
class Grid:
    """The sizes ``(x, y, z, data)`` that one op uses, innermost first (AxoNN, section V-A).

    For a matmul ``m k, k n -> m n``: x is on n, y on k, z and data on m; a weight rests sharded over z too.

    >>> Grid(x=2, data=4).size
    8
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z * self.data

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z}, {self.data})"


@dataclass(frozen=True)
class GridAxes:
    """The axes of a mesh that a strategy puts on each dimension of its grid, innermost first."""

    x: tuple[Axis, ...]
    y: tuple[Axis, ...]
    z: tuple[Axis, ...]
    data: tuple[Axis, ...]
    rest: tuple[Axis, ...]


@dataclass(frozen=True)
class Strategy:
    """How one op with a parameter is spread: its grid, and over how many devices its states rest.

    Parameters
    ----------
    grid : Grid
        Its size is the number of devices.
    rest : int
        Over how many of the devices that hold the same part of the parameter (the z and data ones) its states rest
        sharded, innermost first: 1 is DP, ``z * data`` is ZDP, ``z`` is AxoNN's.
    y_inside : bool
        The y axes are the innermost ones, then the x axes: what a layer needs whose input was spread over the x
        axes of the layer before (AxoNN swaps x and y in every second layer; Megatron's row follows its column).

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> axes = Strategy(Grid(x=2, data=4), rest=4).axes(mesh)
    >>> [axis.name for axis in axes.x], [axis.name for axis in axes.rest]
    (['gpu0'], ['gpu1', 'node0'])
    """

    grid: Grid
    rest: int = 1
    y_inside: bool = False

    def axes(self, mesh: Mesh) -> GridAxes:
        """The axes of `mesh` for each dimension of the grid; `LayoutError` where the sizes do not fit its axes."""
        remaining = sorted(mesh.axes, key=lambda axis: axis.stride)
        if self.grid.size != mesh.world_size:
            raise LayoutError(f"the grid {self.grid} has {self.grid.size} devices, the cluster {mesh.world_size}")

        def take(size: int, source: list[Axis], what: str) -> tuple[Axis, ...]:
            taken: list[Axis] = []
            while axes_size(taken) < size and source:
                taken.append(source.pop(0))
            if axes_size(taken) != size:
                raise LayoutError(
                    f"{what} = {size} of the grid {self.grid} does not fit the axes {', '.join(map(str, mesh.axes))}: "
                    "each dimension of a grid takes whole axes, innermost first"
                )
            return tuple(taken)

        runs: dict[str, tuple[Axis, ...]] = {}
        for name in ("y", "x") if self.y_inside else ("x", "y"):
            runs[name] = take(getattr(self.grid, name), remaining, name)
        z = take(self.grid.z, remaining, "z")
        free = [*z, *remaining]
        return GridAxes(runs["x"], runs["y"], z, tuple(remaining), take(self.rest, free, "rest"))

    def __str__(self) -> str:
        free = self.grid.z * self.grid.data
        rest = "" if free == 1 else " DP" if self.rest == 1 else " ZDP" if self.rest == free else f" rest/{self.rest}"
        order = " y inside" if self.y_inside and self.grid.x > 1 and self.grid.y > 1 else ""
        return f"{self.grid}{order}{rest}"


@dataclass(frozen=True)
class Collective:
    """What a collective in a generated graph does, whose it is and why.

    Parameters
    ----------
    kind : str
        ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
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
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    axes: tuple[Axis, ...]
    bytes: int
    owner: str
    reason: str
    cause: Literal["parameter", "gradient", "activation"]


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
    """

    rule: BoundRule | None = None
    layouts: tuple[Layout, ...] = ()
    op: str = ""
    backward: bool = False
    collective: Collective | None = None


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
    """A tensor that a user passes in or gets back: its name, global layout and dtype (``"float32"``)."""

    name: str
    layout: Layout
    dtype: str
    differentiable: bool = False


@dataclass(frozen=True)
class StepSpec:
    """The calling convention of a generated step, all that the runtime has to know beside the two graphs.

    The forward graph takes the coordinates (one int an axis of `mesh`, in its order), then the local tensors of
    `parameters`, `buffers` and `inputs`; it returns the new values of `mutated_buffers`, then `outputs`, then
    what is saved. The backward graph takes the coordinates, what was saved, and one tangent for each differentiable
    output (for one that is not a scalar: of its local part); it returns one gradient for each trainable parameter,
    in order, at the parameter's layout.
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
    extra: Mapping[str, str] = field(default_factory=dict)
