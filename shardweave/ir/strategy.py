"""Strategies: what a plan says of one op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardweave.ir.errors import LayoutError
from shardweave.ir.mesh import Axis, Mesh
from shardweave.ir.units import brief


@dataclass(frozen=True)
class Grid:
    """The sizes ``(x, y, z, data)`` that one op uses, innermost first (AxoNN, section V-A).

    For a matmul ``m k, k n -> m n``: x is on n, y on k, z and data on m; a weight rests sharded over z too. A product
    with experts has one loop more, and `experts` devices hold some of them each; these lie between y and z.

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
    """The axes of a mesh that a strategy puts on each dimension of its grid, innermost first."""

    x: tuple[Axis, ...]
    y: tuple[Axis, ...]
    experts: tuple[Axis, ...]
    z: tuple[Axis, ...]
    data: tuple[Axis, ...]
    rest: tuple[Axis, ...]
    """What the parameter rests on between its uses; all of it is in `gradients`."""
    gradients: tuple[Axis, ...]
    """What gradients are added up on; all of it is in `states`."""
    states: tuple[Axis, ...]
    """What the optimizer's states and the master copy rest on."""

    @property
    def stages(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]:
        """`rest`, what `gradients` have besides, and what `states` have besides these."""
        return self.rest, self.gradients[len(self.rest) :], self.states[len(self.gradients) :]


@dataclass(frozen=True)
class Strategy:
    """How one op with a parameter is spread: its grid, and over how many devices its states rest.

    Between steps a parameter rests as its optimizer states do: the optimizer's step moves nothing. In a step it is
    gathered once up to `rest`, and from there for each of its uses. The gradient of each micro-batch is summed over the
    devices of `gradients` and added up there; once a step the sums are brought to the states (AMSP, arXiv 2311.00257,
    section IV-B and IV-C).

    Parameters
    ----------
    grid : Grid
        Its size is the number of devices.
    rest : int
        Over how many of the devices that hold the same part of the parameter (the z and data ones) it rests sharded
        in a step, innermost first: 1 is DP, ``z * data`` is ZDP, ``z`` is AxoNN's. AMSP's s_p.
    y_inside : bool
        The y axes are the innermost ones, then the x axes: what a layer needs whose input was spread over the x
        axes of the layer before (AxoNN swaps x and y in every second layer; Megatron's row follows its column).
    states : int
        Over how many of these devices the optimizer's states rest sharded, and the master copy of the parameter with
        them; 0 stands for as many as `rest`. AMSP's s_os, a multiple of `gradients`.
    gradients : int
        Over how many of these devices the gradient is added up sharded; 0 stands for as many as `states`. AMSP's s_g,
        a multiple of `rest`. It makes no difference to a step of one micro-batch that is not under ``no_sync``.
    slices : int
        Into how many parts the op is cut, computed one after another, so that only a part of the parameter is gathered
        at a time (OSDP, arXiv 2209.13258, section 3.3).

    Raises
    ------
    LayoutError
        Where `states` is no multiple of `gradients`, or these none of `rest`; or there is less than one slice.

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
        """Over how many devices the op's product is spread, its batch aside.

        >>> Strategy(Grid(x=2, y=2, data=4)).degree
        4
        """
        return self.grid.x * self.grid.y * self.grid.experts

    def axes(self, mesh: Mesh) -> GridAxes:
        """The axes of `mesh` for each dimension of the grid; `LayoutError` where the sizes do not fit its axes."""
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
