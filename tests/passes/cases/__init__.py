"""Random calls of every op that has a rule: one entry an op, drawn by hypothesis."""

from tests.passes.cases import (  # noqa: F401
    attention,
    compute,
    experts,
    images,
    indexing,
    moments,
    pointwise,
    random,
    scans,
    spatial,
    views,
)
from tests.passes.cases.draw import CASES, Draw
from tests.passes.cases.random import RANDOM

__all__ = ["CASES", "RANDOM", "Draw"]
