"""Strategies: how a plan parallelises one op, and the strategies of data parallel systems by name.

A preset (DP, ZeRO, FSDP, MiCS, ZeRO++) is given by the three shard degrees of AMSP (arXiv 2311.00257, section IV-B): of
the parameter during a step (s_p), of its accumulated gradient (s_g), and of its optimizer states (s_os). N is the
number of devices, n that of a node:

=========  ===  ===  ====  ================================================================
name       s_p  s_g  s_os  source
=========  ===  ===  ====  ================================================================
``dp``     1    1    1     DistributedDataParallel
``zero1``  1    1    N     ZeRO (arXiv 1910.02054), P_os
``zero2``  1    N    N     the same, P_os+g
``zero3``  N    N    N     the same, P_os+g+p, and FSDP; ``zdp``
``hsdp``   n    n    n     FSDP's hybrid sharding; ``mics`` (arXiv 2205.00119)
``hpz``    n    N    N     ZeRO++'s secondary partition (arXiv 2306.10209)
=========  ===  ===  ====  ================================================================

Without gradient accumulation a gradient is reduced to the shard of its states as soon as it is computed. ZeRO-1 and
ZeRO-2 are then the same generated step, that of ZeRO-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardweave.ir.errors import LayoutError, PlanError
from shardweave.ir.formatting import brief
from shardweave.ir.mesh import Axis, Mesh, axes_size

PRESETS = ("zero1", "zero2", "zero3", "hsdp", "mics", "hpz", "dp", "zdp")
_PRESETS_WITH_DEGREE = ("hsdp", "mics", "hpz")


@dataclass(frozen=True)
class Grid:
    """The sizes ``(x, y, z, data)`` that one op uses, innermost first (AxoNN, section V-A).

    For a matmul ``m k, k n -> m n``, x splits n, y splits k, and z and data split m. The weight is sharded over z as
    well. A product with experts has one more loop: `experts` devices hold some experts each. Their axes are between y
    and z.

    >>> Grid(x=2, data=4).size
    8
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1
    experts: int = 1

    @property
    def size(self) -> int:
        return self.x * self.y * self.z * self.data * self.experts

    def __repr__(self) -> str:
        return brief(self)

    def __str__(self) -> str:
        experts = f", experts {self.experts}" if self.experts > 1 else ""
        return f"({self.x}, {self.y}, {self.z}, {self.data}{experts})"


@dataclass(frozen=True)
class GridAxes:
    """The mesh axes of each dimension of a strategy's grid, innermost first."""

    x: tuple[Axis, ...]
    y: tuple[Axis, ...]
    experts: tuple[Axis, ...]
    z: tuple[Axis, ...]
    data: tuple[Axis, ...]
    rest: tuple[Axis, ...]
    """The axes that shard the parameter between its uses in a step; a part of `gradients`."""
    gradients: tuple[Axis, ...]
    """The axes that shard accumulated gradients; a part of `states`."""
    states: tuple[Axis, ...]
    """The axes that shard the optimizer's states and the master weight."""

    @property
    def stages(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes of `rest`, the further axes of `gradients`, and the further axes of `states`."""
        return self.rest, self.gradients[len(self.rest) :], self.states[len(self.gradients) :]


@dataclass(frozen=True)
class Strategy:
    """The parallelisation of one op with a parameter: its device grid, and the shard degrees of parameter and states.

    Between steps a parameter is sharded as its optimizer states are, so that the optimizer's step moves nothing. A step
    gathers it once to the degree `rest`, and from there for each of its uses. The gradient of each micro-batch is
    reduced to the degree `gradients` and accumulated there. Once a step the sums are reduced to the layout of the
    states (AMSP, arXiv 2311.00257, section IV-B and IV-C).

    The shard degrees count devices among those that compute with the same part of the parameter, the z and data ones.

    Parameters
    ----------
    grid : Grid
        The device grid. Its size is the number of devices.
    rest : int
        The shard degree of the parameter during a step, innermost devices first: 1 is DP, ``z * data`` is ZDP, ``z`` is
        AxoNN's. AMSP's s_p.
    y_inside : bool
        The y axes are the innermost ones, then the x axes. A layer needs this if its input was sharded over the x axes
        of the layer before (AxoNN swaps x and y in every second layer; in Megatron a row-parallel layer follows a
        column-parallel one).
    states : int
        The shard degree of the optimizer's states, and of the master weight; 0 stands for `rest`. AMSP's s_os, a
        multiple of `gradients`.
    gradients : int
        The shard degree of accumulated gradients; 0 stands for `states`. AMSP's s_g, a multiple of `rest`. It makes no
        difference to a step of one micro-batch that is not under ``no_sync``.
    slices : int
        The number of slices that the op is computed in, one after another, so that only one slice of the parameter is
        gathered at a time (OSDP, arXiv 2209.13258, section 3.3).

    Raises
    ------
    LayoutError
        If `states` is no multiple of `gradients`, `gradients` no multiple of `rest`, or `slices` less than 1.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> axes = Strategy(Grid(x=2, data=4), rest=4).axes(mesh)
    >>> [axis.name for axis in axes.x], [axis.name for axis in axes.rest]
    (['gpu0'], ['gpu1', 'node0'])

    ZeRO-2 and ZeRO-1, whose parameters are whole in a step:

    >>> str(Strategy(Grid(data=8), states=8)), str(Strategy(Grid(data=8), states=8, gradients=1))
    ('(1, 1, 1, 8) ZeRO-2', '(1, 1, 1, 8) ZeRO-1')
    >>> str(Strategy(Grid(data=8), rest=2, states=8))
    '(1, 1, 1, 8) rest/2, gradients/8, states/8'
    """

    grid: Grid
    rest: int = 1
    y_inside: bool = False
    states: int = 0
    gradients: int = 0
    slices: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", self.states or self.rest)
        object.__setattr__(self, "gradients", self.gradients or self.states)
        if self.gradients % self.rest or self.states % self.gradients:
            raise LayoutError(
                f"the parameter rests over {self.rest} devices, its gradient over {self.gradients} and the states over "
                f"{self.states}: expected each to be a multiple of the one before, as each is a part of it"
            )
        if self.slices < 1:
            raise LayoutError(f"an op is computed in {self.slices} slices: expected 1, where it is whole, or more")

    @property
    def degree(self) -> int:
        """The tensor and expert parallel degree of the op: the number of devices that split it, data parallelism aside.

        >>> Strategy(Grid(x=2, y=2, data=4)).degree
        4
        """
        return self.grid.x * self.grid.y * self.grid.experts

    @property
    def is_preset(self) -> bool:
        """Whether it is one that `force` has a word for: columns, rows, experts or none, and states as in a preset.

        >>> Strategy(Grid(data=8), rest=2).is_preset, Strategy(Grid(data=8), rest=2, states=4).is_preset
        (True, False)
        """
        free, degrees = self.grid.z * self.grid.data, (self.rest, self.gradients, self.states)
        is_plain = self.grid.z == 1 and min(self.grid.x, self.grid.y) == 1 and self.slices == 1
        is_zero = self.states == free and self.gradients in ({1, free} if self.rest == 1 else {free})
        return is_plain and (is_zero or len({*degrees}) == 1)

    def axes(self, mesh: Mesh) -> GridAxes:
        """The axes of `mesh` for each dimension of the grid.

        Raises
        ------
        LayoutError
            If the sizes of the grid do not fit the axes.
        """
        remaining = list(mesh.innermost_first)
        if self.grid.size != mesh.world_size:
            raise LayoutError(f"the grid {self.grid} has {self.grid.size} devices, the cluster {mesh.world_size}")

        def take(size: int, source: list[Axis], what: str) -> tuple[Axis, ...]:
            count, product = 0, 1
            while product < size and count < len(source):
                product *= source[count].size
                count += 1
            if product != size:
                raise LayoutError(
                    f"{what} = {size} of the grid {self.grid} does not fit the axes {', '.join(map(str, mesh.axes))}: "
                    "each dimension of a grid takes whole axes, innermost first"
                )
            taken = tuple(source[:count])
            del source[:count]
            return taken

        runs: dict[str, tuple[Axis, ...]] = {}
        for name in ("y", "x") if self.y_inside else ("x", "y"):
            runs[name] = take(getattr(self.grid, name), remaining, name)
        experts = take(self.grid.experts, remaining, "experts")
        z = take(self.grid.z, remaining, "z")
        free = [*z, *remaining]
        rest = take(self.rest, free, "rest")
        gradients = (*rest, *take(self.gradients // self.rest, free, "gradients / rest"))
        states = (*gradients, *take(self.states // self.gradients, free, "states / gradients"))
        return GridAxes(runs["x"], runs["y"], experts, z, tuple(remaining), rest, gradients, states)

    def to_dict(self) -> dict[str, Any]:
        """As plain types; `from_dict` is its inverse.

        >>> Strategy.from_dict(Strategy(Grid(data=8), states=8).to_dict())
        Strategy(grid=Grid(data=8), states=8, gradients=8)
        """
        grid = self.grid
        sizes = [grid.x, grid.y, grid.z, grid.data, *([grid.experts] if grid.experts > 1 else [])]
        slices = {"slices": self.slices} if self.slices > 1 else {}
        return {"grid": sizes, "rest": self.rest, "y_inside": self.y_inside, "states": self.states,
                "gradients": self.gradients, **slices}  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Strategy:
        sizes = Grid(*data["grid"])
        stages = data.get("states", 0), data.get("gradients", 0)
        return cls(sizes, data["rest"], data["y_inside"], *stages, data.get("slices", 1))

    def __repr__(self) -> str:
        return brief(self)

    def __str__(self) -> str:
        free = self.grid.z * self.grid.data
        rest = "" if free == 1 else " DP" if self.rest == 1 else " ZDP" if self.rest == free else f" rest/{self.rest}"
        if self.states != self.rest:
            zero = {1: " ZeRO-1", free: " ZeRO-2"} if self.rest == 1 and self.states == free else {}
            parts = f" rest/{self.rest}, gradients/{self.gradients}, states/{self.states}"
            rest = zero.get(self.gradients, parts)
        order = " y inside" if self.y_inside and self.grid.x > 1 and self.grid.y > 1 else ""
        return f"{self.grid}{order}{rest}{f' in {self.slices} slices' if self.slices > 1 else ''}"


def preset(word: str, degree: int, mesh: Mesh) -> Strategy:
    """The strategy that a preset stands for on all devices of `mesh`.

    Parameters
    ----------
    word : str
        One of `PRESETS`.
    degree : int
        The n of presets that have one; 0 for the number of devices in a node.

    Raises
    ------
    PlanError
        If the preset takes no degree, or if all devices are in one node and it needs one.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> for word in ("dp", "zero1", "zero2", "zero3", "hsdp", "hpz"):
    ...     found = preset(word, 0, mesh)
    ...     print(word, found.rest, found.gradients, found.states)
    dp 1 1 1
    zero1 1 1 8
    zero2 1 8 8
    zero3 8 8 8
    hsdp 4 4 4
    hpz 4 8 8
    """
    world = mesh.world_size
    if degree and word not in _PRESETS_WITH_DEGREE:
        raise PlanError(f"{word!r} is about all {world} devices and takes no degree, got {degree}: try 'hsdp:{degree}'")
    inner = degree or axes_size(axis for axis in mesh.axes if axis.level == mesh.innermost_first[0].level)
    if word in _PRESETS_WITH_DEGREE and inner == world > 1 and not degree:
        raise PlanError(f"{word!r} shards inside a node, and all {world} devices are in one: give a degree, {word}:2")
    if world % inner:
        raise PlanError(f"{word}:{degree} does not divide the {world} devices")
    rest, gradients, states = preset_degrees(word, world, inner)
    return Strategy(Grid(data=world), rest, states=states, gradients=gradients)


def preset_degrees(word: str, free: int, inner: int = 1) -> tuple[int, int, int]:
    """The shard degrees s_p, s_g and s_os of a preset.

    `free` is the number of devices that compute with the same part of a parameter, `inner` the preset's n.
    """
    return {
        "dp": (1, 1, 1),
        "zero1": (1, 1, free),
        "zero2": (1, free, free),
        "hsdp": (inner, inner, inner),
        "mics": (inner, inner, inner),
        "hpz": (inner, free, free),
    }.get(word, (free, free, free))


