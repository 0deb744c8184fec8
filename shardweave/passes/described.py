"""What the results of an op follow from: the key by which equal layers ask for the same only once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx


def described(value: Any) -> Hashable:
    """The shapes, strides and dtypes of an argument or several, and constants as they are.

    >>> described([torch.ones(2), 3]) == described([torch.zeros(2), 3]), described(1) == described(1.0)
    (True, False)
    """
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, list | tuple):
        return tuple([described(item) for item in value])
    if isinstance(value, dict):
        return tuple((name, described(item)) for name, item in value.items())
    if isinstance(value, bool | int | float):
        return type(value), value  # 1, 1.0 and True are equal, and not the same to an op
    return value if isinstance(value, Hashable) else repr(value)
