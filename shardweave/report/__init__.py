"""What users see: tables and listings, made of plain data, and the progress of planning. May import `ir` and `ops`."""

from shardweave.report.progress import LOGGER, Event, Progress, Reporter
from shardweave.report.report import Report, listing, source

__all__ = [
    "LOGGER",
    "Event",
    "Progress",
    "Report",
    "Reporter",
    "listing",
    "source",
]
