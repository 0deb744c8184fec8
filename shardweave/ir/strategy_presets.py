"""Strategies of data parallel systems by name: DP, ZeRO, FSDP, MiCS, ZeRO++.

Each is given by the three shard degrees of AMSP (arXiv 2311.00257, section IV-B): of the parameter during a step (s_p),
of its accumulated gradient (s_g), and of its optimizer states (s_os). N is the number of devices, n that of a node:

=========  ===  ===  ====  ================================================================
name       s_p  s_g  s_os  source
=========  ===  ===  ====  ================================================================
``dp``     1    1    1     DistributedDataParallel
``zero1``  1    1    N     ZeRO (arXiv 1910.02054), P_os
``zero2``  1    N    N     the same, P_os+g
``zero3``  N    N    N     the same, P_os+g+p, and FSDP; ``zdp``
``hsdp``   n    n    n     FSDP's hybrid sharding; ``mics`` (arXiv 2205.00119)
``hpz``    n    N    N     ZeRO++'s secondary partition (arXiv 2306.10209)
=========  ===  ===  ====  ================================================================

Without gradient accumulation a gradient is reduced to the shard of its states as soon as it is computed. ZeRO-1 and
ZeRO-2 are then the same generated step, that of ZeRO-2.
"""

from __future__ import annotations

from shardweave.ir.errors import PlanError
from shardweave.ir.mesh import Mesh, axes_size
from shardweave.ir.strategy import Grid, Strategy

PRESETS = ("zero1", "zero2", "zero3", "hsdp", "mics", "hpz", "dp", "zdp")
_OF_A_NODE = ("hsdp", "mics", "hpz")


def preset(word: str, degree: int, mesh: Mesh) -> Strategy:
    """The strategy that a preset stands for on all devices of `mesh`.

    Parameters
    ----------
    word : str
        One of `PRESETS`.
    degree : int
        The n of presets that have one; 0 for the number of devices in a node.

    Raises
    ------
    PlanError
        If the preset takes no degree, or if all devices are in one node and it needs one.

    Examples
    --------
    >>> mesh = Mesh.of_levels([("gpu", 4), ("node", 2)])
    >>> for word in ("dp", "zero1", "zero2", "zero3", "hsdp", "hpz"):
    ...     found = preset(word, 0, mesh)
    ...     print(word, found.rest, found.gradients, found.states)
    dp 1 1 1
    zero1 1 1 8
    zero2 1 8 8
    zero3 8 8 8
    hsdp 4 4 4
    hpz 4 8 8
    """
    world = mesh.world_size
    if degree and word not in _OF_A_NODE:
        raise PlanError(f"{word!r} is about all {world} devices and takes no degree, got {degree}: try 'hsdp:{degree}'")
    inner = degree or _devices_of_a_node(mesh)
    if word in _OF_A_NODE and inner == world > 1 and not degree:
        raise PlanError(f"{word!r} shards inside a node, and all {world} devices are in one: give a degree, {word}:2")
    if world % inner:
        raise PlanError(f"{word}:{degree} does not divide the {world} devices")
    rest, gradients, states = preset_degrees(word, world, inner)
    return Strategy(Grid(data=world), rest, states=states, gradients=gradients)


def preset_degrees(word: str, free: int, inner: int = 1) -> tuple[int, int, int]:
    """The shard degrees s_p, s_g and s_os of a preset.

    `free` is the number of devices that compute with the same part of a parameter, `inner` the preset's n.
    """
    return {
        "dp": (1, 1, 1),
        "zero1": (1, 1, free),
        "zero2": (1, free, free),
        "hsdp": (inner, inner, inner),
        "mics": (inner, inner, inner),
        "hpz": (inner, free, free),
    }.get(word, (free, free, free))


def _devices_of_a_node(mesh: Mesh) -> int:
    axes = sorted(mesh.axes, key=lambda axis: axis.stride)
    return axes_size(axis for axis in axes if axis.level == axes[0].level)
