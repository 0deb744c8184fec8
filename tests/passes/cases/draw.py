"""What the cases of ops draw from, and the table that they are entered in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[Any, Callable[[Draw], Call]] = {}


@dataclass(frozen=True)
class Made:
    """An argument that the graph makes itself, from no input."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


SIZES = [1, 2, 3, 4, 5, 6, 8, 12]


class Draw:
    """What a case draws from: hypothesis chooses sizes and flags, a generator seeded by it the numbers."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.seed = data.draw(st.integers(0, 10**6), label="seed")
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.dtype = self.choice([torch.float32, torch.float64])

    def choice(self, options: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))

    def flag(self) -> bool:
        return bool(self.choice([False, True]))

    def size(self, *, among: list[int] = SIZES) -> int:
        return int(self.choice(among))

    def sizes(self, least: int, most: int | None = None) -> list[int]:
        count = self.data.draw(st.integers(least, most if most is not None else least))
        return [self.size() for _ in range(count)]

    def tensor(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, dtype=self.dtype)

    def complex(self, *size: int) -> Tensor:
        return torch.complex(self.tensor(*size), self.tensor(*size))

    def positive(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, dtype=self.dtype) + 0.5

    def integers(self, below: int, *size: int) -> Tensor:
        return torch.randint(0, below, size, generator=self.generator)

    def zeros(self, *size: int) -> Made:
        return Made(aten.full.default, (list(size), 0), {"dtype": self.dtype})

    def counting(self, size: int, *shape: int) -> Made:
        """``0, 1, ..., size - 1``, in a shape if one is given."""
        count = Made(aten.arange.default, (size,), {})
        return Made(aten.view.default, (count, list(shape)), {}) if shape else count

    def mask(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator) < 0.4

    def dim(self, rank: int) -> int:
        """A dimension, counted from the front or the back."""
        return int(self.choice(list(range(-rank, rank))))

    def broadcast(self, size: list[int]) -> list[int]:
        """A shape that broadcasts to `size`: some dimensions 1, some leading ones left out."""
        return [1 if self.flag() else length for length in size][self.choice(list(range(len(size) + 1))) :]


def case(*targets: Any) -> Callable[[Callable[[Draw], Call]], Callable[[Draw], Call]]:
    """Enter a function that draws a call for these ops, which must have no case yet."""

    def register(function: Callable[[Draw], Call]) -> Callable[[Draw], Call]:
        for target in targets:
            assert target not in CASES
            CASES[target] = function
        return function

    return register
