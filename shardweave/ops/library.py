"""The library of custom operators, ``torch.ops.shardweave``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("shardweave", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator with its kernel for all devices, and the function that computes its fake results."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardweave::{name}", fake, lib=LIBRARY)
