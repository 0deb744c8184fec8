"""Clusters: a machine from a file, from the name of a preset, or detected from the running world and measured."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml

from shardweave.cost_model import measured_tables
from shardweave.cost_model.cluster_description import build, short_repr
from shardweave.cost_model.collective_profile import (
    BRIEF,
    FULL,
    PROFILE_TIMEOUT,
    ProfileEffort,
    fit_links,
    neighbour_seconds,
    node_groups,
    profile_collectives,
)
from shardweave.cost_model.device_profile import (
    broadcast_object,
    current_device,
    gather_objects,
    is_rank_zero,
    profile_device,
)
from shardweave.cost_model.machine import NODE_GROUP_NAMES, Device, Level, M, Machine
from shardweave.cost_model.measured_tables import Measured, hardware
from shardweave.distributed import collective, control, forget_failure, run_on_each_rank
from shardweave.ir import ClusterError, LostRankError, readable_bytes, readable_seconds

_LOGGER = logging.getLogger("shardweave")

_MIN_NODES_OF_LEAVES = 4
"""Fewer nodes are on one switch, or on two without a pair of nodes on one."""
_DEVICE_SECONDS = 4
"""What measuring the device takes, about: the time of collectives comes on top."""

_PRESETS_OF_GPUS = (  # words of torch's name of the GPU, and the preset; the first match counts
    ("A100 40GB", "perlmutter"),
    ("A100", "dgx-a100"),
    ("A800", "dgx-a100"),
    ("H100", "dgx-h100"),
    ("H200", "dgx-h100"),
    ("3090", "rtx3090-pcie"),
    ("MI250X", "frontier"),
)


def _devices_and_nodes() -> tuple[int, int]:
    """The devices of a node, and the nodes, of the running world, or of the ranks that a launcher has started."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if not dist.is_initialized() and world > 1:
        raise ClusterError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before Cluster.detect()"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if dist.is_initialized() else world
    if local < 1 or world % local:
        raise ClusterError(
            f"{world} ranks do not divide over nodes of LOCAL_WORLD_SIZE={local}; "
            "start the same number of ranks on every node, or describe the machine in a YAML file"
        )
    return local, world // local


def profile_cluster(cluster: M, effort: ProfileEffort = FULL, cache: bool = True) -> M:
    """`cluster`, the running world, with measurements: new ones, or cached ones of the same hardware and versions.

    All ranks get the measurements of rank 0, which are saved in `measured_tables.cache_directory`.

    Parameters
    ----------
    cluster : Machine
        The machine that runs.
    effort : ProfileEffort
        How much is measured. What a full profile has measured before serves a brief one, too.
    cache : bool
        Take cached measurements where there are some; new ones are saved in any case.

    Raises
    ------
    ClusterError
        On all ranks, with the rank and the cause, if a rank fails or takes no part for a minute.
    """
    if not dist.is_initialized():
        covered = "one rank: there are no collectives to measure"
        alone = Measured(key=_key(cluster, [hardware()], effort), covered=covered)
        return _with_coverage(replace(cluster, measured=alone, device=profile_device(cluster.device, reads=cache)))
    try:
        groups = control(PROFILE_TIMEOUT)
        found = run_on_each_rank(groups, "profiling the cluster", lambda: _measured(cluster, effort, cache))
    except (RuntimeError, LostRankError) as error:
        forget_failure()  # the groups serve the profile only: the world can still be used
        raise ClusterError(
            f"profiling the cluster failed on rank {dist.get_rank()} of {dist.get_world_size()}: expected every rank "
            f"to call Cluster.detect() and to take part within {PROFILE_TIMEOUT.seconds} s a step, got: {error}"
        ) from error
    return _with_coverage(fit_links(found))


def _measured(cluster: M, effort: ProfileEffort, cache: bool) -> M:
    """`cluster` with measurements. Collective."""
    world = dist.new_group(timeout=PROFILE_TIMEOUT)
    try:
        with collective("a step of profiling the cluster", world, dedicated=True):
            ranks = gather_objects(hardware(), world)
            cluster = _with_node_groups(cluster, ranks, world, cache)
            measured = broadcast_object(_cached(cluster, ranks, effort) if cache else None, world)
            if measured is None:
                if is_rank_zero(world):
                    _LOGGER.info(
                        "measuring the collectives and the device of this world, %s, in about %.0f s: once, as the "
                        "result is cached (Cluster.detect(profile=False) does without)",
                        cluster, effort.seconds + _DEVICE_SECONDS,
                    )  # fmt: skip
                table, coverage = profile_collectives(cluster, world, effort)
                key = _key(cluster, ranks, effort)
                measured = broadcast_object(Measured(table, key=key, covered=coverage.text(cluster)), world)
                if is_rank_zero(world) and table.curves:
                    measured_tables.write(measured)
            device = profile_device(cluster.device, group=world, reads=cache)
            return replace(cluster, measured=measured, device=device)
    finally:
        dist.destroy_process_group(world)  # if this rank has failed, the others notice at once


def _with_node_groups(cluster: M, ranks: list[Any], world: dist.ProcessGroup, cache: bool) -> M:
    """`cluster` with the leaf switches that its nodes are seen to be on. Collective."""
    if cluster.levels[-1].size < _MIN_NODES_OF_LEAVES:
        return cluster
    name, count = f"leaves-{_key(cluster, ranks, FULL)}", cluster.levels[-1].size
    known = measured_tables.load_cached(name) if cache and is_rank_zero(world) else None
    saved = known.get("seconds") if isinstance(known, dict) else None
    is_whole = isinstance(saved, list) and len(saved) == count and all(isinstance(each, float) for each in saved)
    seconds = broadcast_object(saved if is_whole else None, world)
    if seconds is None:
        seconds = neighbour_seconds(cluster, world)
        if is_rank_zero(world):
            measured_tables.store_cached(name, {"seconds": seconds})
    groups = node_groups(seconds)
    is_flat = len(groups) == 1 or len(groups) > 1 + len(NODE_GROUP_NAMES)
    return cluster if is_flat else cluster.with_node_groups([(group.size, group.slowdown) for group in groups])


def _cached(cluster: Machine, ranks: list[Any], effort: ProfileEffort) -> Measured | None:
    """The cached measurements of a profile as this one, or of a full one; None on ranks but 0."""
    if not is_rank_zero():
        return None
    keys = [_key(cluster, ranks, each) for each in dict.fromkeys((FULL, effort))]
    return next((found for found in map(measured_tables.read, keys) if found is not None), None)


def _with_coverage(cluster: M) -> M:
    """With what is known of the device, and what is assumed, in what the measurements are said to cover."""
    assert cluster.measured is not None
    device = cluster.device
    rates = ", ".join(f"{rate * device.matmul_efficiency:.3g} FLOP/s in {name}" for name, rate in device.flops.items())
    beside = (
        f"; compute beside collectives takes {device.overlap_slowdown:.2f} times as long, and they take "
        f"{device.collective_slowdown:.2f} times as long beside compute"
    )
    lines = [
        cluster.measured.covered,
        f"device measured: {rates}; memory {readable_bytes(device.memory_bandwidth * device.memory_efficiency)}/s; a "
        f"launch {readable_seconds(device.launch_latency)}{beside if cluster.world_size > 1 else ''}",
        f"assumed, as {cluster.name!r} says: {readable_bytes(device.memory)} of memory a device, and all that is "
        "listed above as by formula",
    ]
    return replace(cluster, measured=replace(cluster.measured, covered="\n".join(lines)))


def measured_on(cluster: Machine, ranks: list[Any]) -> bool:
    """Whether `cluster` was measured on ranks of this `measured_tables.hardware`."""
    keys = [_key(cluster, ranks, effort) for effort in (FULL, BRIEF)]
    return cluster.measured is not None and cluster.measured.key in keys


def _key(cluster: Machine, ranks: list[Any], effort: ProfileEffort) -> str:
    levels = [[level.name, level.size] for level in cluster.levels]
    key = {"format": 4, "levels": levels, "library": cluster.library, "ranks": ranks}
    return measured_tables.key_of(key if effort == FULL else key | {"effort": effort.name})


def preset_of_gpu(name: str) -> str:
    """The preset for the GPU that torch calls `name`.

    Raises
    ------
    ClusterError
        If there is none.

    Examples
    --------
    >>> preset_of_gpu("NVIDIA A100-SXM4-40GB"), preset_of_gpu("NVIDIA H100 80GB HBM3")
    ('perlmutter', 'dgx-h100')
    """
    for words, preset in _PRESETS_OF_GPUS:
        if all(word in name for word in words.split()):
            return preset
    raise ClusterError(
        f"no preset knows the GPU {name!r}; write its figures to a YAML file (docs/cluster.md) "
        "and use Cluster.load(path) in place of Cluster.detect()"
    )


class _NoDuplicates(yaml.SafeLoader):
    """Refuses YAML mappings with a repeated key, of which PyYAML takes the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1 and key != "<<"]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice[0]!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


class Cluster(Machine):
    """A machine to plan for.

    Parameters
    ----------
    name : str
        The name in reports.
    levels : tuple of Level
        Innermost first. Ranks are numbered along the innermost level first, as torchrun does.
    device : Device
        The device of each rank: all are equal.
    sources : mapping of str to str
        The source of each figure, by its key in the file (``"device.memory"``); no part of a comparison.
    measured : Measured, optional
        Measurements of the machine itself, which replace the formulas.
    library : {"nccl", "gloo"}
        The library of the collectives, since each has its own algorithms; RCCL counts as NCCL.

    Raises
    ------
    ClusterError
        If there is no level, or two levels have the same name.

    Examples
    --------
    >>> cluster = Cluster.preset("dgx-a100", nodes=16)
    >>> cluster.world_size, [str(axis) for axis in cluster.mesh().axes][-2:]
    (128, ['node2:2', 'node3:2'])
    >>> Cluster.local(3).mesh().axes
    (Axis(name='cpu0', size=3, stride=1, kind='space'),)
    """

    @classmethod
    def from_dict(cls, data: object) -> Cluster:
        """The cluster that plain types describe, as they come from a YAML or JSON file.

        Raises
        ------
        ClusterError
            If a value is wrong; names the key, the expected and the given value.
        """
        raw = build(cls, data, "", keep=("levels", "device", "sources", "measured"))
        if not isinstance(raw["levels"], list | tuple):
            raise ClusterError(f"levels: expected a list of levels, innermost first, got {short_repr(raw['levels'])}")
        levels = tuple(Level(**build(Level, level, f"levels[{i}]")) for i, level in enumerate(raw["levels"]))
        device = Device(**build(Device, raw["device"], "device", keep=("flops",)))
        measured = None if raw.get("measured") is None else Measured.from_dict(raw["measured"])
        sources = raw.get("sources") or {}
        texts = isinstance(sources, Mapping) and all(isinstance(each, str) for pair in sources.items() for each in pair)
        if not texts:
            raise ClusterError(f"sources: expected a mapping of keys to texts, got {short_repr(sources)}")
        return cls(raw["name"], levels, device, dict(sources), measured, raw.get("library", "nccl"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster that a YAML or JSON file describes; `ClusterError` names the file and the wrong key."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_dict(yaml.load(text, Loader=_NoDuplicates))
        except OSError as error:
            raise ClusterError(f"{path}: expected a readable cluster file, got: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ClusterError(f"{path}: expected a text file in UTF-8, got: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: too many digits
            raise ClusterError(f"{path}: expected YAML, got: {error}") from error
        except ClusterError as error:
            raise ClusterError(f"{path}: {error} (docs/cluster.md lists every key)") from error

    @classmethod
    def of(cls, given: ClusterLike) -> Cluster:
        """The cluster of a value: a cluster, the name of a preset, or the path of a file that `load` reads.

        A text is a path if it ends in ``.yaml``, ``.yml`` or ``.json``, or contains a ``/``.

        Raises
        ------
        ClusterError
            If it is none of these; names similar presets.

        Examples
        --------
        >>> Cluster.of("dgx-a100").world_size
        8
        """
        if isinstance(given, Cluster):
            return given
        if isinstance(given, os.PathLike) or (
            isinstance(given, str) and (given.endswith((".yaml", ".yml", ".json")) or os.sep in given)
        ):
            return cls.load(given)
        if not isinstance(given, str):
            raise ClusterError(
                f"expected a Cluster, a preset's name or the path of a cluster file, got {type(given).__name__}: "
                "for example Cluster.preset('dgx-a100', nodes=2)"
            )
        return cls.preset(given)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this cluster as YAML that `load` reads."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, width=110), encoding="utf-8")

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names that `preset` knows.

        >>> "dgx-h100" in Cluster.presets()
        True
        """
        files = resources.files("shardweave.cost_model").joinpath("presets").iterdir()
        return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))

    @classmethod
    def preset(cls, name: str, nodes: int | None = None) -> Cluster:
        """A machine that ships with shardweave, with `nodes` nodes (1 if not given).

        Raises
        ------
        ClusterError
            If no preset has that name, or `nodes` is no whole number above 0.
        """
        if name not in cls.presets():
            close = difflib.get_close_matches(str(name).lower(), cls.presets(), n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(map(repr, close))}? Or another: " if close else ""
            raise ClusterError(
                f"no preset is called {name!r}: {meant}there are {', '.join(cls.presets())}. "
                "A file of your own is named by its path, as 'cluster.yaml' (docs/cluster.md)"
            )
        with resources.as_file(resources.files("shardweave.cost_model") / "presets" / f"{name}.yaml") as path:
            cluster = cls.load(path)
        return cluster if nodes is None else cluster.resized(**{cluster.levels[-1].name: nodes})

    @classmethod
    def local(cls, n: int) -> Cluster:
        """`n` ranks on this machine's CPU."""
        return cls.preset("local-cpu").resized(cpu=n)

    @classmethod
    def detect(cls, profile: bool | Literal["full"] = True, *, cache: bool = True) -> Cluster:
        """The running torch.distributed world: its size, ``LOCAL_WORLD_SIZE`` ranks a node, the kind of its GPUs.

        Its links and its devices are measured in a few seconds, once for this hardware and these versions: the result
        is saved in the cache directory (``SHARDWEAVE_CACHE``). All ranks must call it. `measured.covered` says what was
        measured, and what is assumed.

        Parameters
        ----------
        profile : bool or "full"
            ``"full"`` measures more groups, kinds and sizes of collectives, in about half a minute; later calls take
            what it has measured. False measures nothing: the figures are those of the preset.
        cache : bool
            False measures again: after a change of the network, or if the machine was busy.

        Raises
        ------
        ClusterError
            If several ranks were started but torch.distributed is not initialised, the ranks do not divide over the
            nodes, no preset knows this kind of GPU, or a rank fails during the profile.
        """
        if profile not in (True, False, "full"):
            raise ClusterError(f"profile: expected True, False or 'full', got {short_repr(profile)}")
        devices, nodes = _devices_and_nodes()
        if current_device().type == "cpu":
            cluster = cls.preset("local-cpu").resized(cpu=devices, node=nodes)
        else:
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            cluster = cls.preset(preset_of_gpu(gpu.name)).fitted(devices, nodes)
            cluster = replace(cluster, device=replace(cluster.device, name=gpu.name, memory=int(gpu.total_memory)))
        return profile_cluster(cluster, FULL if profile == "full" else BRIEF, cache) if profile else cluster


ClusterLike = Cluster | str | os.PathLike[str]
"""A cluster, or a value that `Cluster.of` converts to one."""
