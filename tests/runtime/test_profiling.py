"""Profiles of the running world: what they cover, where they are kept, and ranks that fail."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import shardweave as sw
from shardweave.cost_model import Cluster, Curve, Measured, collective_profile, collective_seconds, measured_tables
from shardweave.cost_model import cluster as cluster_module
from shardweave.cost_model.cluster import profile_cluster
from shardweave.cost_model.collective_profile import placements
from shardweave.cost_model.collectives import collective_algorithm, group_extents
from shardweave.cost_model.measured_tables import COLLECTIVE_KINDS
from shardweave.distributed.process_groups import RuntimeMesh
from shardweave.ir.errors import ClusterError, LaunchError
from shardweave.runtime.launch import WorkerPool

SIZES = (4096, 65536, 2**20)


def prepare_rank(cache: str) -> None:
    """A short profile, with all the time it wants on a busy machine."""
    for name in ("BRIEF", "FULL"):
        setattr(cluster_module, name, replace(getattr(collective_profile, name), seconds=1e4))
    os.environ["SHARDWEAVE_CACHE"] = cache
    collective_profile._BUFFER_BYTES["cpu"] = SIZES
    collective_profile._SAMPLE_SECONDS = 0.002
    collective_profile._MAX_ROUNDS = 2


def profile(cache: str, local: int) -> tuple[Cluster, bool]:
    """The profile of this rank, and whether a second one is read back, equal."""
    prepare_rank(cache)
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    first = Cluster.detect(profile="full")
    collective_profile._BUFFER_BYTES["cpu"] = ()  # a second measurement would have no points
    return first, Cluster.detect(profile="full") == first


@pytest.mark.parametrize(("local", "places"), [(4, {(4, 1), (2, 1)}), (2, {(2, 1), (1, 2), (2, 2)})])
def test_a_profile_covers_the_groups_of_the_world_on_all_ranks_alike(
    pool: WorkerPool, tmp_path: Path, local: int, places: set[tuple[int, ...]]
) -> None:
    results = pool.run(profile, str(tmp_path), local, nprocs=4)
    clusters = [cluster for cluster, _ in results]
    assert all(cluster == clusters[0] for cluster in clusters) and all(again for _, again in results)
    cluster, measured = clusters[0], clusters[0].measured
    assert measured is not None and len({cluster.measured.covered for cluster in clusters if cluster.measured}) == 1
    curves = {(curve.kind, curve.members): curve for curve in measured.collectives.curves}
    assert set(curves) == {(kind, members) for kind in COLLECTIVE_KINDS for members in places}
    for curve in curves.values():
        assert curve.bytes == SIZES and list(curve.seconds) == sorted(curve.seconds)
    assert all(f"groups of {text}: all_reduce 4 KiB to 1 MiB" in measured.covered for text in _texts(places))
    assert "not measured" not in measured.covered

    for axes in placements(cluster):
        assert collective_algorithm("all_reduce", 1e5, axes, cluster) == "measured"
        curve = curves["all_reduce", group_extents(axes, cluster)]
        assert collective_seconds("all_reduce", 65536, axes, cluster) == curve.seconds[1]
    assert cluster.levels[0] != Cluster.detect(profile=False).levels[0], "the links are fitted to what was measured"
    assert [file.name for file in tmp_path.glob("cluster-*")] == [f"cluster-{measured.key}.json"]
    saved = Measured.from_dict(json.loads((tmp_path / f"cluster-{measured.key}.json").read_text()))
    assert saved == measured and measured.covered.startswith(saved.covered)
    assert "device measured: " in measured.covered and "assumed, as 'local-cpu' says: 3.7 GiB" in measured.covered


def profile_briefly(cache: str) -> list[Cluster]:
    """By default; again from the cache; measured again; after a full profile; and with new figures after that."""
    prepare_rank(cache)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    brief = Cluster.detect()
    cached = Cluster.detect()
    again = Cluster.detect(cache=False)
    full = Cluster.detect(profile="full")
    return [brief, cached, again, full, Cluster.detect()]


def test_a_profile_is_brief_by_default_and_takes_what_is_known(pool: WorkerPool, tmp_path: Path) -> None:
    brief, cached, again, full, last = pool.run(profile_briefly, str(tmp_path), nprocs=4)[0]
    assert cached == brief and last == full and again != brief
    curves = {(curve.kind, curve.members): curve.bytes for curve in _curves(brief)}
    assert curves == {(kind, members): SIZES[::2] for kind in COLLECTIVE_KINDS for members in ((2, 1), (1, 2))}
    assert {curve.members for curve in _curves(full)} == {(2, 1), (1, 2), (2, 2)}
    preset = Cluster.local(2).resized(node=2)
    # Groups over both levels are priced by the figures of these, which are fitted
    assert all(one != other for one, other in zip(brief.levels, preset.levels, strict=True))
    assert "cpu x" not in (brief.measured or Measured()).covered
    assert len(list(tmp_path.glob("cluster-*"))) == 2


def _curves(cluster: Cluster) -> tuple[Curve, ...]:
    return (cluster.measured or Measured()).collectives.curves


def test_what_detect_is_asked_for_is_checked() -> None:
    with pytest.raises(ClusterError, match="profile: expected True, False or 'full', got 'brief'"):
        Cluster.detect(profile="brief")  # type: ignore[arg-type]


def _texts(places: set[tuple[int, ...]]) -> list[str]:
    return [" x ".join(f"{n} {name}" for n, name in zip(m, ("cpu", "node"), strict=True) if n > 1) for m in places]


def profile_in_no_time(cache: str) -> Cluster:
    prepare_rank(cache)
    return profile_cluster(Cluster.detect(profile=False), replace(collective_profile.FULL, seconds=0.0))


def test_what_there_was_no_time_for_is_said_and_priced_by_formula(pool: WorkerPool, tmp_path: Path) -> None:
    cluster = pool.run(profile_in_no_time, str(tmp_path), nprocs=2)[0]
    assert cluster.measured is not None and not cluster.measured.collectives.curves
    for kind in COLLECTIVE_KINDS:
        assert f"not measured: {kind} in groups of 2 cpu: the 0 s were over" in cluster.measured.covered
    assert collective_algorithm("all_reduce", 1e5, cluster.mesh().axes, cluster) == "ring"
    assert cluster.levels == Cluster.local(2).levels
    assert not list(tmp_path.glob("cluster-*")), "or it would be read back when there is time"


def profile_twice() -> list[float]:
    """Into a cache that keeps nothing; then groups over the same ranks still work."""
    prepare_rank("/dev/null")
    for _ in range(2):
        with pytest.warns(UserWarning) if dist.get_rank() == 0 else nullcontext():
            cluster = Cluster.detect(profile="full")
    value = torch.ones(1)
    for axis in cluster.mesh().axes:
        dist.all_reduce(value, group=RuntimeMesh(cluster.mesh()).group_over([axis]))
    return [value.item(), float(len(cluster.measured.collectives.curves)) if cluster.measured else 0.0]


def test_a_profile_leaves_nothing_behind_that_the_next_groups_trip_over(pool: WorkerPool) -> None:
    assert pool.run(profile_twice, nprocs=4) == [[4.0, 10.0]] * 4


def lose_a_rank(how: str, cache: str) -> None:
    prepare_rank(cache)
    if dist.get_rank() == 1:
        if how == "memory":

            def prepare(*_: Any) -> Any:
                raise MemoryError("too much")

            collective_profile._prepared_call = prepare
        elif how == "killed":
            os.kill(os.getpid(), 9)
        else:
            raise ValueError("this rank has other things to do")
    Cluster.detect(profile="full")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("memory", "profiling all_reduce of 4 KiB: expected all ranks to succeed, but some failed"),
        ("killed", "rank 1 of 3 ended by signal SIGKILL"),
        ("raises", "this rank has other things to do"),
    ],
)
def test_a_rank_that_fails_ends_the_profile_of_all(pool: WorkerPool, tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        pool.run(lose_a_rank, how, str(tmp_path), nprocs=3)
    assert not list(tmp_path.iterdir())


def come_alone(cache: str) -> str:
    prepare_rank(cache)
    cluster_module.PROFILE_TIMEOUT = timedelta(seconds=1)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(ClusterError) as caught:
        Cluster.detect(profile="full")
    return str(caught.value)


def test_ranks_do_not_wait_for_ever_for_one_that_does_not_profile(pool: WorkerPool, tmp_path: Path) -> None:
    messages = pool.run(come_alone, str(tmp_path), nprocs=2, timeout=60)
    assert "failed on rank 0 of 2: expected every rank to call Cluster.detect()" in messages[0]


def without_a_collective(cache: str) -> Cluster:
    """A backend that lacks one kind: it fails on all ranks alike."""
    prepare_rank(cache)
    real = collective_profile._prepared_call

    def prepare(kind: str, *rest: Any) -> Any:
        if kind == "all_to_all":
            raise RuntimeError("no such collective\nhere")
        return real(kind, *rest)

    collective_profile._prepared_call = prepare
    return Cluster.detect(profile="full")


def test_a_kind_that_the_backend_lacks_is_left_to_the_formula(pool: WorkerPool, tmp_path: Path) -> None:
    measured = pool.run(without_a_collective, str(tmp_path), nprocs=2)[0].measured
    assert measured is not None
    assert {curve.kind for curve in measured.collectives.curves} == set(COLLECTIVE_KINDS) - {"all_to_all"}
    assert "not measured: all_to_all in groups of 2 cpu: 4 KiB and more: no such collective\n" in measured.covered


def test_one_rank_has_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    measured = Cluster.detect(profile="full").measured
    assert measured is not None and not measured.collectives.curves and "one rank" in measured.covered


def test_placements_are_each_count_of_members_once() -> None:
    for cluster in (Cluster.preset("frontier", nodes=6), Cluster.preset("dgx-a100", nodes=16), Cluster.local(12)):
        found = [group_extents(axes, cluster) for axes in placements(cluster)]
        axes = cluster.mesh().axes
        every = {
            group_extents(tuple(axis for i, axis in enumerate(axes) if chosen >> i & 1), cluster)
            for chosen in range(1, 2 ** len(axes))
        }
        assert len(found) == len(every) and set(found) == every


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert measured_tables.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("SHARDWEAVE_CACHE")
    assert measured_tables.cache_directory() == tmp_path / "xdg" / "shardweave"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert measured_tables.cache_directory() == tmp_path / ".cache" / "shardweave"


def test_a_damaged_file_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path))
    kept = Measured(key="abc", covered="all")
    path = measured_tables.write(kept)
    assert path is not None and measured_tables.read("abc") == kept
    assert measured_tables.read("abd") is None
    whole = path.read_text()
    for text in (whole[:-5], "[]", "{}", "\x00", whole.replace("abc", "abd"), whole.replace("{", '{"colour": 1,', 1)):
        path.write_text(text)
        assert measured_tables.read("abc") is None


def test_a_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be kept in .*SHARDWEAVE_CACHE"):
        assert measured_tables.write(Measured(key="abc")) is None


def measured_ops(
    cache: str, rows: int, profile: bool = True, measure_ops: Literal["auto"] | bool = True, devices: str = ""
) -> tuple[set[str], float]:
    """The ops that a compiled step has times of, and its predicted time. The cluster has the `devices`, if given."""
    prepare_rank(cache)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    cluster, options = Cluster.detect(profile=profile), sw.Options(measure_ops=measure_ops)
    if devices:  # as a file says that was made elsewhere
        assert cluster.measured is not None
        cluster = replace(cluster, measured=replace(cluster.measured, key=devices))
    plan = sw.compile_parallel(model, cluster, torch.ones(rows, 16), options=options, progress=False).plan
    measured = plan.cluster.measured or Measured()
    return {name.partition("(")[0] for name in measured.ops.times}, plan.step_time


def test_the_ops_of_a_step_are_measured_where_that_is_asked_for(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(measured_ops, str(tmp_path), 8, nprocs=2)
    assert first == second and {"aten.mm.default", "aten.gelu.default", "aten.gelu_backward.default"} <= first[0]
    assert pool.run(measured_ops, str(tmp_path), 8, nprocs=2) == [first, first]  # from the cache
    assert pool.run(measured_ops, str(tmp_path), 8, True, "auto", nprocs=2) == [first, first]  # they run on CPUs
    (of_step,) = tmp_path.glob("ops-of-step-*")
    of_step.write_text("{")  # damaged: the times of the single ops serve
    assert pool.run(measured_ops, str(tmp_path), 8, nprocs=2) == [first, first] and of_step.stat().st_size > 1
    for measure_ops, profile, devices in ((False, True, ""), ("auto", False, ""), ("auto", True, "elsewhere")):
        (without, _), *_ = pool.run(measured_ops, str(tmp_path), 8, profile, measure_ops, devices, nprocs=2)
        assert not without
    with pytest.raises(LaunchError, match=r"expected a cluster that was measured .* Compile for Cluster\.detect"):
        pool.run(measured_ops, str(tmp_path), 8, False, True, nprocs=2)
    one, same = pool.run(measured_ops, str(tmp_path), 1, nprocs=2)  # one sample is on both ranks
    assert one == same


def test_a_backend_of_torch_compile_measures_no_ops() -> None:
    backend: Any = "shardweave"
    with pytest.raises(Exception, match="measure_ops is for compile_parallel"):
        torch.compile(torch.nn.Linear(2, 2), backend=backend, options={"measure_ops": True})(torch.ones(2, 2))
