"""Python's garbage collection while graphs are written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect no garbage inside: a quarter of planning would be looking through graphs that are all still in use.

    Examples
    --------
    >>> with collected_later():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
