"""The errors of shardweave: one root, so that a user can catch them all.

Every message names the parameter, op, axis or rank, says what was expected and what was found, and how to fix it.
"""

from __future__ import annotations


class ParallelError(Exception):
    """The root of every error that shardweave raises."""


class CaptureError(ParallelError):
    """The model, or its call, cannot be captured as one graph."""


class RuleError(ParallelError):
    """An op has no sharding rule, or a rule does not fit the op it was bound to."""


class LayoutError(ParallelError):
    """A value cannot have the layout that was asked for."""


class ClusterError(ParallelError):
    """A cluster description is incomplete, contradictory, or does not fit the running world."""


class PlanError(ParallelError):
    """A plan cannot be made, or does not fit the model, the inputs or the cluster."""


class InfeasibleError(PlanError):
    """No plan fits into the memory limit. The message says how much memory would be enough."""

    needed_bytes: int | None = None
    """The smallest memory limit that is known to be enough, in bytes per device."""

    @classmethod
    def needing(cls, needed_bytes: int, message: str) -> InfeasibleError:
        """The error with the memory limit that is known to be enough."""
        error = cls(message)
        error.needed_bytes = needed_bytes
        return error


class InputError(ParallelError):
    """A call's inputs differ from those that the step was compiled for."""


class IndexRangeError(InputError, IndexError):
    """An index is out of the range of its table, such as a token without a row in an embedding."""


class VerifyError(ParallelError):
    """A pass left the graph in a state that it must not be in: a bug in shardweave."""


class CheckpointNotFound(ParallelError):
    """There is no checkpoint in the folder to load from."""


class LostRankError(ParallelError):
    """A collective cannot be finished: a rank has ended, does not answer, or cannot be reached.

    The world cannot be used any more: end this process, and start the job again from its last checkpoint.
    """


class InternalError(ParallelError):
    """Compiling ended in an error that shardweave does not expect: a defect of it. The cause is `__cause__`."""


class LaunchError(ParallelError):
    """A local rank failed; the message carries the rank and its traceback."""
