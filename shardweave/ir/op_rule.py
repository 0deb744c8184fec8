"""Sharding rules bound to ops: the factors (loops) of an op, and the assignment of mesh axes to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardweave.ir.errors import LayoutError
from shardweave.ir.mesh import Axis

Dims = tuple[tuple[str, ...], ...]
"""For each dimension of a value, the factors that it is the product of, outermost first; ``()`` for size 1."""


@dataclass(frozen=True)
class Factor:
    """A loop of an op, as a dimension of an einsum is.

    Parameters
    ----------
    name : str
        The name in the rule's pattern. The parts of a split factor are ``"m.0"``, ``"m.1"``, outermost first.
    size : int
        The number of iterations of the loop.
    blocked : bool
        The op cannot be split along this loop.
    reduce : str
        How partial outputs are reduced if no output has this factor (as in `Layout.partial`).
    """

    name: str
    size: int
    blocked: bool = False
    reduce: str = "sum"


@dataclass(frozen=True)
class BoundRule:
    """A sharding rule bound to one op: its factors, and the factors of each dimension of its inputs and outputs.

    `inputs` are the op's tensor arguments in the order of its schema, without absent optional ones. `never_partial` has
    the indices of outputs that are not reduced: each rank keeps its own, for another op on the same rank.
    """

    factors: tuple[Factor, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    never_partial: frozenset[int] = frozenset()

    @cached_property
    def _hash(self) -> int:  # depends on numbers alone, so it is equal in a process that reads a pickled rule
        return hash((tuple(factor.size for factor in self.factors), len(self.inputs), len(self.outputs)))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _by_name(self) -> Mapping[str, Factor]:
        return {factor.name: factor for factor in self.factors}

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return {factor.name: factor.size for factor in self.factors}

    def factor(self, name: str) -> Factor:
        if name not in self._by_name:
            raise LayoutError(f"no factor is called {name!r}; the op has {[f.name for f in self.factors]}")
        return self._by_name[name]

    def sizes(self) -> dict[str, int]:
        """The size of each factor, by name."""
        return dict(self._sizes)

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
    """The factor that each mesh axis splits, for one op. The op is replicated over axes that are not named.

    >>> Assignment.of({Axis("gpu0", 2): "n"}).as_dict()[Axis("gpu0", 2)]
    'n'
    """

    items: tuple[tuple[Axis, str], ...] = ()

    @classmethod
    def of(cls, mapping: Mapping[Axis, str]) -> Assignment:
        return cls(tuple(sorted(mapping.items(), key=lambda item: item[0].stride)))

    def as_dict(self) -> dict[Axis, str]:
        return dict(self.items)

    @property
    def in_space(self) -> Assignment:
        """The assignment without time axes, which depend on the number of micro-batches and sub-batches."""
        return Assignment(tuple((axis, factor) for axis, factor in self.items if axis.kind == "space"))

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}→{factor}" for axis, factor in self.items) or "replicated"
