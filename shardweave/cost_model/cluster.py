"""Clusters: a machine from a file, by the name of a preset, or the one that the program runs on."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from shardweave.cost_model.cluster_description import build, shown
from shardweave.cost_model.detection import preset_of_gpu, profiled, running_machine
from shardweave.cost_model.machine import Device, Level, Machine
from shardweave.cost_model.measured_tables import Measured
from shardweave.ir import ClusterError


class _NoDuplicates(yaml.SafeLoader):
    """Reads YAML in which no mapping has a key twice; PyYAML itself takes the last one."""

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
        For the reader.
    levels : tuple of Level
        Innermost first. Ranks are numbered along the innermost level first, as torchrun does.
    device : Device
        All devices are equal.
    sources : mapping of str to str
        Where each figure is from, by its key in the file (``"device.memory"``); no part of a comparison.
    measured : Measured, optional
        What was measured on the machine itself; it goes before the formulas.
    library : {"nccl", "gloo"}
        Which library runs the collectives, as each has algorithms of its own; RCCL counts as NCCL.

    Raises
    ------
    ClusterError
        Where there is no level, or two have one name.

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
        """A cluster of plain types, as a YAML or JSON file gives them.

        Raises
        ------
        ClusterError
            Names the key, what was expected and what came.
        """
        raw = build(cls, data, "", keep=("levels", "device", "sources", "measured"))
        if not isinstance(raw["levels"], list | tuple):
            raise ClusterError(f"levels: expected a list of levels, innermost first, got {shown(raw['levels'])}")
        levels = tuple(Level(**build(Level, level, f"levels[{i}]")) for i, level in enumerate(raw["levels"]))
        device = Device(**build(Device, raw["device"], "device", keep=("flops",)))
        measured = None if raw.get("measured") is None else Measured.from_dict(raw["measured"])
        sources = raw.get("sources") or {}
        texts = isinstance(sources, Mapping) and all(isinstance(each, str) for pair in sources.items() for each in pair)
        if not texts:
            raise ClusterError(f"sources: expected a mapping of keys to texts, got {shown(sources)}")
        return cls(raw["name"], levels, device, dict(sources), measured, raw.get("library", "nccl"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster described in a YAML (or JSON) file; `ClusterError` names the file and the key that is wrong."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_dict(yaml.load(text, Loader=_NoDuplicates))
        except OSError as error:
            raise ClusterError(f"{path}: expected a readable cluster file, got: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ClusterError(f"{path}: expected a text file in UTF-8, got: {error}") from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # also too many digits, nested too deeply
            raise ClusterError(f"{path}: expected YAML, got: {error}") from error
        except ClusterError as error:
            raise ClusterError(f"{path}: {error} (docs/cluster.md lists every key)") from error

    @classmethod
    def of(cls, given: ClusterLike) -> Cluster:
        """What a user calls a cluster: itself, a preset's name, or the path of a file that `load` reads.

        A text is a path where it ends in ``.yaml``, ``.yml`` or ``.json``, or has a ``/``.

        Raises
        ------
        ClusterError
            It is none of these; with the presets' names, those alone that are much like it where there are any.

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
            Where no preset has that name, or `nodes` is no whole number above 0.
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
    def detect(cls, profile: bool = False) -> Cluster:
        """The running torch.distributed world: its size, ``LOCAL_WORLD_SIZE`` ranks a node, the kind of its GPUs.

        Parameters
        ----------
        profile : bool
            Also measure its collectives, in less than a minute, once for this hardware and these versions: the result
            is kept in the cache directory (``SHARDWEAVE_CACHE``). All ranks must call it. `measured.covered` says what
            was measured and what was not.

        Raises
        ------
        ClusterError
            Where several ranks were started but torch.distributed is not initialised, where the ranks do not divide
            over the nodes, where no preset knows this kind of GPU, or where a rank fails during the profile.
        """
        found = running_machine()
        if found.gpu is None:
            cluster = cls.preset("local-cpu").resized(cpu=found.devices, node=found.nodes)
        else:
            cluster = cls.preset(preset_of_gpu(found.gpu)).fitted(found.devices, found.nodes)
            cluster = replace(cluster, device=replace(cluster.device, name=found.gpu, memory=found.memory))
        return profiled(cluster) if profile else cluster


ClusterLike = Cluster | str | os.PathLike[str]
"""What a user calls a cluster: see `Cluster.of`."""
