"""Random numbers on many ranks: replicas agree, shards draw independently, a fixed seed repeats.

A random op runs under a seed of its own, hashed from the seed of the step, the number of the op in the step, and the
shard of the value that this rank holds. So ranks with the same shard draw the same numbers, ranks with other shards
draw other numbers, without communication, and a recomputed op draws the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MASK_64_BITS = (1 << 64) - 1


def hash_seeds(*numbers: int) -> int:
    """A hash of 63 bits of all `numbers` in their order.

    Each number is added by a round of splitmix64 (Steele, Lea and Flood 2014), so that close seeds are unrelated.

    >>> hash_seeds(1, 2) != hash_seeds(2, 1), hash_seeds(1, 2) == hash_seeds(1, 2), hash_seeds(-1) < 2**63
    (True, True, True)
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64_BITS
        state ^= state >> 31
    return state >> 1


def seeded(op: Callable[..., Any], seed: int | None, index: int, position: int, *args: Any, **kwargs: Any) -> Any:
    """Run a random `op` under the seed of this step, op and shard. The state of the caller's generator is kept.

    Parameters
    ----------
    op : callable
        The random op; `args` and `kwargs` are its arguments.
    seed : int, optional
        The seed of the step. None when only shapes are computed: the op then runs unseeded.
    index : int
        The number of the op among the random ops of the step.
    position : int
        The index of this rank's shard of the value, counted over the axes that shard it.

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
    generator.manual_seed(hash_seeds(seed, index, position))
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
        return hash_seeds(self._first, self._calls)
