"""Random numbers on many ranks: replicas agree, shards draw independently, a fixed seed repeats.

An op that draws runs under a seed of its own, mixed from the seed of the step, the number of the op in the step, and
the part of the drawn value that this rank holds. So ranks that hold the same part draw the same numbers and the others
draw other ones, without communication, and an op that is computed again draws again what it drew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WORD = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """One number of 63 bits that depends on all of these and on their order, as if thrown by dice.

    Each is taken in by a round of splitmix64 (Steele, Lea and Flood 2014), so that neighbours become strangers.

    >>> mixed(1, 2) != mixed(2, 1), mixed(1, 2) == mixed(1, 2), mixed(-1) < 2**63
    (True, True, True)
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def seeded(op: Callable[..., Any], seed: int | None, index: int, position: int, *args: Any, **kwargs: Any) -> Any:
    """What `op` draws under the seed of this step, op and part; the caller's generator is left as it was.

    Parameters
    ----------
    op : callable
        The op that draws, and `args`, `kwargs` its own arguments.
    seed : int, optional
        The step's. None where only shapes are worked out: the op then runs as it is.
    index : int
        The number of the op among those of the step that draw.
    position : int
        Which part of the drawn value this rank holds, counted over the axes that it is sharded over.

    Examples
    --------
    >>> draw = lambda position: seeded(torch.rand, 7, 0, position, 4)
    >>> bool((draw(0) == draw(0)).all()), bool((draw(0) == draw(1)).any())
    (True, False)
    """
    if seed is None:
        return op(*args, **kwargs)
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    generator = _generator(devices[0] if devices else torch.device(kwargs.get("device") or "cpu"))
    state = generator.get_state()
    generator.manual_seed(mixed(seed, index, position))
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    """The generator that ops on `device` draw from."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found


class Seeds:
    """The seeds of a module's calls, one after another.

    >>> seeds, again = Seeds(5), Seeds(5)
    >>> first = seeds()
    >>> first == again(), first == seeds()
    (True, False)
    """

    def __init__(self, first: int, calls: int = 0) -> None:
        self._first, self._calls = first, calls

    @property
    def state(self) -> tuple[int, int]:
        """The first seed and the number of calls so far: ``Seeds(*state)`` goes on from here."""
        return self._first, self._calls

    def __call__(self) -> int:
        self._calls += 1
        return mixed(self._first, self._calls)
