"""Keys: in which order the tasks of a part are to come, as far as their data allow, and what is held back.

They follow the graph as it was written, but for two things, between one activation's collective and the next: what
leads to the collective comes first, and the sub-batches come one after the other. What is gathered or arrives counts as
being as late as its first use.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.passes.dependency_graph import Tasks
from shardweave.passes.list_scheduler import Key, Moment
from shardweave.sharding import info, layer_of

aten = torch.ops.aten
own = torch.ops.shardweave
WAIT = torch.ops._c10d_functional.wait_tensor.default
# What shard writes around a collective to bring its buffer into shape.
GLUE = {aten.reshape.default, aten.permute.default, aten.clone.default, aten.t.default, aten.transpose.int,
        aten.select.int, aten.narrow.default, own.pad.default, own.unpad.default, own.quantize_blocks.default,
         own.dequantize_blocks.default, own.sum_dequantized.default, own.ordered_bits.default,
        own.from_ordered_bits.default, operator.getitem, WAIT}  # fmt: skip
CAST = aten._to_copy.default

SHAPING = (GLUE - {WAIT}) | {CAST, aten.add.Tensor, aten.add_.Tensor, aten.cat.default}
"""What may lie between a value and the start of its collective."""


def barriers(tasks: Tasks) -> list[tuple[int, int]]:
    """What comes before what where a layer is recomputed as a whole before its gradients, and these before the next."""
    groups: dict[tuple[str, bool], list[int]] = {}
    feeds = [info(node).recomputed for node in tasks.nodes]
    for task in reversed(range(len(feeds))):
        feeds[task] |= any(feeds[user] for user in tasks.users[task])
    for task, node in enumerate(tasks.nodes):
        layer = layer_of(info(node).op)
        # what is gathered for both is of neither
        if layer and tasks.seconds[task] and feeds[task] == info(node).recomputed and node.target not in SHAPING:
            groups.setdefault((layer, info(node).recomputed), []).append(task)
    layers = list(dict.fromkeys(layer for layer, _ in groups))
    steps = [groups[layer, again] for layer in layers for again in (True, False) if (layer, again) in groups]
    found = []
    for before, after in zip(steps, steps[1:]):
        inside, then = set(before), set(after)
        last = [task for task in before if not inside.intersection(tasks.users[task])]
        first = [task for task in after if not then.intersection(tasks.needs[task])]
        found += [(one, other) for one in last for other in first if one < other]  # else another layer needs it
    return found


def cause_of(tasks: Tasks, task: int) -> str:
    """Why a task moves what it starts; "" where it starts nothing."""
    transfers = tasks.transfers[task]
    return transfers.what.cause if transfers is not None else ""


def orderings(tasks: Tasks) -> Iterator[list[Key]]:
    """The keys of each order that is tried; the last part of a key is the task's number."""
    if any(cause_of(tasks, task) == "activation" for task in range(len(tasks.nodes))):
        yield _early_starts(tasks, _by_segments(tasks))
    yield _early_starts(tasks, [(task,) for task in range(len(tasks.nodes))])


def _early_starts(tasks: Tasks, keys: list[Key]) -> list[Key]:
    """`keys` with what brings a value into shape for a start right behind that value: it is written late."""
    leads = [transfers is not None for transfers in tasks.transfers]
    for task in reversed(range(len(keys))):
        users = tasks.users[task]
        if users and tasks.nodes[task].target in SHAPING and all(leads[user] for user in users):
            leads[task] = True
    for task, leading in enumerate(leads):
        if leading and tasks.needs[task]:
            keys[task] = (*max(keys[need] for need in tasks.needs[task]), task)
    return keys


def _by_segments(tasks: Tasks) -> list[Key]:
    """Segment, what leads to the collectives at its end before what does not, sub-batch, place."""
    segments, segment = [], 0
    steps = [info(node).steps for node in tasks.nodes]
    for task, mine in enumerate(steps):
        segments.append(segment)
        following = steps[task + 1] if task + 1 < len(steps) else ()
        complete = not mine or not following or following[-1][1] <= mine[-1][1]  # the last step of a node
        segment += complete and cause_of(tasks, task) == "activation"
    leads = [False] * len(steps)
    ending = set()
    for task in reversed(range(len(steps))):
        leads[task] = cause_of(tasks, task) == "activation" or any(
            leads[user] and segments[user] == segments[task] for user in tasks.users[task]
        )
        if leads[task]:
            ending.add(segments[task])
    keys: list[Key] = []
    for task, mine in enumerate(steps):
        if segments[task] in ending:
            keys.append((segments[task], 0 if leads[task] else 1, *(step for _, step in mine[:1] or (("", 0),)), task))
        else:
            keys.append((segments[task], task))
    return keys


def moments_of(tasks: Tasks, keys: Sequence[Key]) -> list[Moment]:
    """The gathers of parameters, by the task that uses them first."""
    by_use: dict[int, list[int]] = {}
    uses: dict[int, set[int]] = {}
    for task in range(len(tasks.nodes)):
        if cause_of(tasks, task) == "parameter":
            found = _first_uses(tasks, task)
            if found:
                use = min(found, key=keys.__getitem__)
                by_use.setdefault(use, []).append(task)
                uses.setdefault(use, set()).update(found)
    return [Moment(tuple(by_use[use]), tuple(sorted(uses[use]))) for use in sorted(by_use, key=keys.__getitem__)]


def ahead_of_use(tasks: Tasks, most: int) -> list[tuple[int, int]]:
    """What comes before what where at most so many moments are gathered ahead of the one in use."""
    moments = moments_of(tasks, [(task,) for task in range(len(tasks.nodes))])
    return [(min(used.uses), start) for used, gathered in zip(moments, moments[most:]) for start in gathered.starts]


def _first_uses(tasks: Tasks, task: int) -> set[int]:
    """The tasks that compute with what a start brings, be it by way of another gather."""
    found: set[int] = set()
    for user in tasks.users[task]:
        on_its_way = tasks.nodes[user].target in GLUE or cause_of(tasks, user) == "parameter"
        found |= _first_uses(tasks, user) if on_its_way else {user}
    return found


def hold_back(tasks: Tasks, keys: Sequence[Key], moments: Sequence[Moment]) -> list[Key]:
    """`keys` with what is gathered, and what brings arrivals into shape, as late as its first use."""
    late = list(keys)
    arriving = [False] * len(late)
    for task, node in enumerate(tasks.nodes):
        start = tasks.started[task]
        arriving[task] = start >= 0 and cause_of(tasks, start) != "gradient"
        arriving[task] |= node.target in GLUE and any(arriving[need] for need in tasks.needs[task])
    for task in reversed(range(len(late))):
        if arriving[task] and tasks.users[task]:
            late[task] = min(late[user] for user in tasks.users[task])

    def hold(task: int, key: Key) -> None:
        late[task] = min(late[task], key) if len(tasks.users[task]) > 1 else key
        for need in tasks.needs[task]:
            if len(tasks.users[need]) == 1 and tasks.started[need] < 0:
                hold(need, key)

    for moment in moments:
        for start in moment.starts:
            hold(start, min(late[use] for use in moment.uses))
    return late
