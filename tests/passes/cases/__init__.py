"""Random calls of every op that has a rule: one entry an op, drawn by hypothesis."""

from tests.passes.cases import compute, indexing, moments, pointwise, scans, views  # noqa: F401
from tests.passes.cases.draw import CASES, Draw

__all__ = ["CASES", "Draw"]
