"""Tables and listings, made of plain data. May import `ir`, `sharding` and `cost_model`.
"""

from shardweave.report.listing import source
from shardweave.report.report import Report

__all__ = [
    "Report",
    "source",
]
