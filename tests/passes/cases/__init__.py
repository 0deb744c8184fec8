"""Random calls of every op that has a rule: one entry an op, drawn by hypothesis."""

from tests.passes.cases import (  # noqa: F401
    compute,
    experts,
    images,
    indexing,
    pointwise,
    scans,
    spatial,
    views,
)
from tests.passes.cases.draw import CASES, Draw

__all__ = ["CASES", "Draw"]
