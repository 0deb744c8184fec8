"""Choices for the whole step that the user leaves open: kept gathers, sub-batches and buckets.

They hide communication, so they are tried where some is exposed, one after another, each on top of those that were
worth it; the simulator is the judge. What a choice does not go with (sub-batches of a batch norm, say) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shardweave.compiler.judge import Judged
from shardweave.errors import ParallelError
from shardweave.ir import ALL, Weaving
from shardweave.options import Options

EXPOSED = 0.02
"""The part of a step's time that communication adds to it, from which on it is worth while to hide it."""

WORTH = 0.002
"""The part of a step's time that a choice has to save."""

SUB_BATCHES = 2
"""One computes while the other communicates (Oases, arXiv 2305.16121, section 3.1); more make smaller kernels."""


def choices_for_the_whole(
    options: Options,
    made: Weaving,
    judged: Judged,
    judge: Callable[[Weaving], Judged],
    limit: int,
    keeps: bool = False,
) -> tuple[Weaving, Judged]:
    """What is chosen for the whole step, and what it then takes.

    Parameters
    ----------
    options : Options
        What they leave at None is open.
    made : Weaving
        What has been chosen so far.
    judged : Judged
        What the step takes with that.
    judge : callable
        From other choices to what the step takes.
    limit : int
        Bytes a device.
    keeps : bool
        Whether anything may be kept gathered.
    """
    for tried in _open(options, keeps):
        if judged.exposed_communication <= EXPOSED * judged.step_time:
            break
        other = tried(made)
        try:
            found = judge(other)
        except ParallelError:  # this step cannot be woven so
            continue
        if found.peak_memory <= limit and found.step_time <= judged.step_time * (1 - WORTH):
            made, judged = other, found
    return made, judged


def _open(options: Options, keeps: bool) -> Iterator[Callable[[Weaving], Weaving]]:
    if options.keep_gathered is None and keeps:
        yield lambda made: replace(made, keep_gathered={"*": ALL})
    if options.sub_batches is None:
        yield lambda made: replace(made, sub_batches=SUB_BATCHES)
    if options.buckets is None:
        yield lambda made: replace(made, buckets=True)
