"""Which of many labels can go because another is as good, whatever follows.

Label b dominates label a of the same key where it keeps no more, has no larger transient and takes no more time however
the streams fill up: `Tables.time` of the difference of their figures is at most 0.
"""

from __future__ import annotations

import numpy as np

from shardweave.compiler.planner.tables import KEPT, TICKS, Ints, Tables

LARGE = 2**56
"""What combined keys must stay below."""

_BLOCK = 32
"""Labels that are compared with each other at once."""


def undominated(tables: Tables, figures: Ints, peak: Ints, key: Ints) -> Ints:
    """The indices of labels (columns of `figures`) that none with the same key dominates; of equal ones one stays.

    With streams, where only a comparison of all pairs finds all, some dominated ones may stay among many labels.
    """
    if not tables.windows:
        return _by_sorting(figures[TICKS], figures[KEPT], peak, key)
    order = np.lexsort((peak, figures[KEPT], tables.time(figures), key))
    block = len(order)
    while True:
        stay = order[_in_blocks(tables, figures[:, order], peak[order], key[order])]
        if len(stay) == len(order) or block <= _BLOCK:
            return np.sort(stay)
        order, block = stay, len(stay)


def _in_blocks(tables: Tables, figures: Ints, peak: Ints, key: Ints) -> Ints:
    """Which labels no other one of its block, of `_BLOCK` in a row, dominates."""
    count = len(key)
    rows = -(-count // _BLOCK)
    blocks = np.minimum(np.arange(rows * _BLOCK), count - 1).reshape(rows, _BLOCK)
    stays, least = np.ones(count, dtype=np.bool_), tables.time(figures)
    for begin in range(0, rows, _BLOCK):
        of_block = blocks[begin : begin + _BLOCK]
        same = key[of_block]
        as_good = (same[:, None, :] == same[:, :, None]) & (of_block[:, None, :] != of_block[:, :, None])
        for figure in (least[of_block], figures[KEPT, of_block], peak[of_block]):
            as_good &= figure[:, None, :] <= figure[:, :, None]
        block, own, other = np.nonzero(as_good)  # few of all pairs: of these alone differences are looked at
        found = np.ascontiguousarray(figures[:, of_block].reshape(len(figures), -1).T)
        more = found[block * _BLOCK + other] - found[block * _BLOCK + own]
        as_good[block, own, other] = tables.time(more.T) <= 0
        better = as_good & (~as_good.transpose(0, 2, 1) | (of_block[:, None, :] < of_block[:, :, None]))
        stays[of_block[better.any(axis=2)]] = False
    return np.flatnonzero(stays)


def _by_sorting(ticks: Ints, kept: Ints, peak: Ints, key: Ints) -> Ints:
    """The same for three figures, in one pass along their order."""
    order = np.lexsort((peak, kept, ticks, key))
    key, peak = key[order], peak[order]
    rank = np.cumsum(np.append(False, key[1:] != key[:-1]))
    kept = kept[order]
    if (int(rank[-1]) + 1) * (int(kept.max()) + 1) > LARGE:
        kept = np.unique(kept, return_inverse=True)[1]  # only their order matters, and no sum must overflow
    # One running minimum serves all keys: the later keys' figures lie below all those of the earlier ones.
    kept = kept + (rank[-1] - rank) * (int(kept.max()) + 1)
    stays = np.zeros(len(order), dtype=bool)
    for level in np.unique(peak):
        below = np.flatnonzero(peak <= level)
        figures = kept[below]
        better = np.append(True, figures[1:] < np.minimum.accumulate(figures)[:-1])
        stays[below[better & (peak[below] == level)]] = True
    return np.asarray(order[stays])
