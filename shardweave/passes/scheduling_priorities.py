"""Scheduling priorities: the key of each task for the list scheduler, and dependences that delay tasks.

Keys follow the order of the graph, with two exceptions, each within a segment that ends with a collective of
activations. Tasks that the collective depends on come first, and the sub-batches come one after the other. The key of
an all-gather, and of a wait, is that of its first use.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.passes.dependency_graph import Tasks
from shardweave.passes.list_scheduler import GatherGroup, Key
from shardweave.sharding import info, layer_of

aten = torch.ops.aten
own = torch.ops.shardweave
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Ops that `Shard` emits around a collective to bring its buffer into shape.
GLUE = {aten.reshape.default, aten.permute.default, aten.clone.default, aten.t.default, aten.transpose.int,
        aten.select.int, aten.narrow.default, own.pad.default, own.unpad.default, own.quantize_blocks.default,
         own.dequantize_blocks.default, own.sum_dequantized.default, own.ordered_bits.default,
        own.from_ordered_bits.default, operator.getitem, WAIT}  # fmt: skip
CAST = aten._to_copy.default

SHAPING = (GLUE - {WAIT}) | {CAST, aten.add.Tensor, aten.add_.Tensor, aten.cat.default}
"""Ops that may stand between a value and the start of its collective."""


def recompute_barriers(tasks: Tasks) -> list[tuple[int, int]]:
    """Dependences that keep the recomputation of a layer apart from the gradients of others (no cross-pass overlap).

    Each layer is recomputed as a whole before its gradients, and these are computed before the next layer's
    recomputation. A pair is (task before, task after).
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    feeds = [info(node).recomputed for node in tasks.nodes]
    for task in reversed(range(len(feeds))):
        feeds[task] |= any(feeds[user] for user in tasks.users[task])
    for task, node in enumerate(tasks.nodes):
        layer = layer_of(info(node).op)
        # a task that serves both recomputation and gradients belongs to neither
        if layer and tasks.seconds[task] and feeds[task] == info(node).recomputed and node.target not in SHAPING:
            groups.setdefault((layer, info(node).recomputed), []).append(task)
    layers = list(dict.fromkeys(layer for layer, _ in groups))
    steps = [groups[layer, again] for layer in layers for again in (True, False) if (layer, again) in groups]
    found = []
    for before, after in zip(steps, steps[1:]):
        inside, then = set(before), set(after)
        last = [task for task in before if not inside.intersection(tasks.users[task])]
        first = [task for task in after if not then.intersection(tasks.needs[task])]
        found += [(one, other) for one in last for other in first if one < other]  # a later task is another layer's
    return found


def transfer_cause(tasks: Tasks, task: int) -> str:
    """The cause of the collective that a task starts: "parameter", "gradient" or "activation"; "" without one."""
    transfers = tasks.transfers[task]
    return transfers.what.cause if transfers is not None else ""


def candidate_keys(tasks: Tasks) -> Iterator[list[Key]]:
    """The sets of keys that `Schedule` tries. The last part of a key is the task's number."""
    if any(transfer_cause(tasks, task) == "activation" for task in range(len(tasks.nodes))):
        yield _early_starts(tasks, _by_segments(tasks))
    yield _early_starts(tasks, [(task,) for task in range(len(tasks.nodes))])


def _early_starts(tasks: Tasks, keys: list[Key]) -> list[Key]:
    """`keys` in which ops that prepare a collective's buffer come right behind the value. The graph has them late."""
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
    """Keys by segment, then tasks that the collective at its end depends on before others, sub-batch, and number."""
    # 1. Segments: each ends with a collective of activations, the last step of an op that runs in several.
    segments, segment = [], 0
    steps = [info(node).steps for node in tasks.nodes]
    for task, mine in enumerate(steps):
        segments.append(segment)
        following = steps[task + 1] if task + 1 < len(steps) else ()
        complete = not mine or not following or following[-1][1] <= mine[-1][1]  # the last step of a node
        segment += complete and transfer_cause(tasks, task) == "activation"
    # 2. The tasks that the collective at the end of their segment depends on.
    leads = [False] * len(steps)
    ending = set()
    for task in reversed(range(len(steps))):
        leads[task] = transfer_cause(tasks, task) == "activation" or any(
            leads[user] and segments[user] == segments[task] for user in tasks.users[task]
        )
        if leads[task]:
            ending.add(segments[task])
    # 3. Keys. A segment without such a collective keeps its order.
    keys: list[Key] = []
    for task, mine in enumerate(steps):
        if segments[task] in ending:
            keys.append((segments[task], 0 if leads[task] else 1, *(step for _, step in mine[:1] or (("", 0),)), task))
        else:
            keys.append((segments[task], task))
    return keys


def gather_groups_of(tasks: Tasks, keys: Sequence[Key]) -> list[GatherGroup]:
    """The all-gathers of parameters, grouped by their first use by `keys`, in the order of these uses."""
    by_use: dict[int, list[int]] = {}
    uses: dict[int, set[int]] = {}
    for task in range(len(tasks.nodes)):
        if transfer_cause(tasks, task) == "parameter":
            found = _first_uses(tasks, task)
            if found:
                use = min(found, key=keys.__getitem__)
                by_use.setdefault(use, []).append(task)
                uses.setdefault(use, set()).update(found)
    return [GatherGroup(tuple(by_use[use]), tuple(sorted(uses[use]))) for use in sorted(by_use, key=keys.__getitem__)]


def gather_ahead_edges(tasks: Tasks, most: int) -> list[tuple[int, int]]:
    """Dependences under which at most `most` groups are gathered ahead of the group in use."""
    groups = gather_groups_of(tasks, [(task,) for task in range(len(tasks.nodes))])
    return [(min(used.uses), start) for used, gathered in zip(groups, groups[most:]) for start in gathered.starts]


def _first_uses(tasks: Tasks, task: int) -> set[int]:
    """The tasks that compute with the result of a collective, which another gather may pass on to them."""
    found: set[int] = set()
    for user in tasks.users[task]:
        on_its_way = tasks.nodes[user].target in GLUE or transfer_cause(tasks, user) == "parameter"
        found |= _first_uses(tasks, user) if on_its_way else {user}
    return found


def keys_by_first_use(tasks: Tasks, keys: Sequence[Key], groups: Sequence[GatherGroup]) -> list[Key]:
    """`keys` in which gathers, and ops that bring received values into shape, have the key of their first use."""
    late = list(keys)
    arriving = [False] * len(late)
    for task, node in enumerate(tasks.nodes):
        start = tasks.started[task]
        arriving[task] = start >= 0 and transfer_cause(tasks, start) != "gradient"
        arriving[task] |= node.target in GLUE and any(arriving[need] for need in tasks.needs[task])
    for task in reversed(range(len(late))):
        if arriving[task] and tasks.users[task]:
            late[task] = min(late[user] for user in tasks.users[task])

    def hold(task: int, key: Key) -> None:
        late[task] = min(late[task], key) if len(tasks.users[task]) > 1 else key
        for need in tasks.needs[task]:
            if len(tasks.users[need]) == 1 and tasks.started[need] < 0:
                hold(need, key)

    for group in groups:
        for start in group.starts:
            hold(start, min(late[use] for use in group.uses))
    return late
