"""Clusters: presets and their sources, files, and the errors of files that are wrong."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.cost_model import Cluster, Device, Level
from shardweave.cost_model.cluster import preset_of_gpu
from shardweave.ir.errors import ClusterError, ParallelError

PRESETS = {"dgx-a100", "dgx-h100", "perlmutter", "frontier", "rtx3090-nvlink", "rtx3090-pcie", "local-cpu"}

positive = st.floats(1e-9, 1e18)
names = st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), min_size=1, max_size=4, unique=True)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    levels = tuple(
        Level(
            name,
            draw(st.integers(1, 12)),
            draw(positive),
            draw(st.just(0.0) | positive),
            draw(st.none() | positive),
            draw(st.floats(0.01, 1)),
            draw(st.sampled_from(["switch", "mesh"])),
        )
        for name in draw(names)
    )
    flops = {"float32": draw(positive)} | draw(st.dictionaries(st.sampled_from(["bfloat16", "float64"]), positive))
    return Cluster("any", levels, Device("some", flops, draw(st.integers(1, 2**40)), draw(positive)))


def test_presets_are_those_of_the_manual() -> None:
    assert set(Cluster.presets()) == PRESETS


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    cluster = Cluster.preset(name)
    figures = {f"device.{key}" for key in cluster.device.__dataclass_fields__}
    figures -= {"device.name", "device.flops", "device.memory_times"}
    figures |= {f"device.flops.{dtype}" for dtype in cluster.device.flops}
    for level, raw in zip(cluster.levels, cluster.to_dict()["levels"], strict=True):
        figures |= {f"levels.{level.name}.{key}" for key in raw if key not in ("name", "size", "links")}
    assert figures == set(cluster.sources)
    assert all(cluster.sources.values())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_nodes_set_the_outermost_level(name: str) -> None:
    one, many = Cluster.preset(name), Cluster.preset(name, nodes=6)
    assert many.levels[:-1] == one.levels[:-1]
    assert many.levels[-1].size == 6
    assert many.world_size == 6 * one.world_size == many.mesh().world_size


@settings(deadline=None)
@given(clusters())
def test_a_cluster_survives_plain_types_and_pickle(cluster: Cluster) -> None:
    for twin in (Cluster.from_dict(cluster.to_dict()), pickle.loads(pickle.dumps(cluster))):
        assert twin == cluster
        assert hash(twin) == hash(cluster)
        assert twin.fingerprint == cluster.fingerprint


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_file_gives_back_the_cluster_with_its_sources(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name, nodes=3)
    cluster.save(tmp_path / "cluster.yaml")
    again = Cluster.load(tmp_path / "cluster.yaml")
    assert again == cluster
    assert again.sources == cluster.sources


def test_the_fingerprint_is_that_of_the_figures() -> None:
    cluster = Cluster.preset("frontier", nodes=2)
    renamed = Cluster("other", cluster.levels, cluster.device)
    assert renamed.fingerprint == cluster.fingerprint
    assert cluster.resized(node=4).fingerprint != cluster.fingerprint


def test_exponents_without_a_sign_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "{name: a, levels: [{name: gpu, size: 2, bandwidth: 1e9, latency: 1e-6}],"
        " device: {name: b, flops: {float32: 1e12}, memory: 8e9, memory_bandwidth: 1e11}}"
    )
    cluster = Cluster.load(path)
    assert (cluster.levels[0].bandwidth, cluster.device.memory) == (1e9, 8_000_000_000)
    assert isinstance(cluster.device.memory, int)


DELETE = object()


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("device", "memory"), -1, "device.memory: expected a whole number above 0, got -1"),
        (("device", "memory"), DELETE, "device.memory: expected a value, got nothing: the key is missing"),
        (("device", "memory"), 1.5, "device.memory: expected a whole number above 0, got 1.5"),
        (("device", "memory"), "much", "device.memory: expected a number, got 'much'"),
        (("device", "memory_bandwidth"), True, "device.memory_bandwidth: expected a number above 0, got True"),
        (("device", "matmul_efficiency"), 1.2, "device.matmul_efficiency: expected a number above 0 and at most 1"),
        (("device", "overlap_slowdown"), 0.9, "device.overlap_slowdown: expected a number of at least 1, got 0.9"),
        (("device", "memory_half"), -1, "device.memory_half: expected a number of at least 0, got -1"),
        (("device", "matmul_half"), 64, "device.matmul_half: expected a mapping of dtype to a size, got 64"),
        (("device", "matmul_half", "float32"), "x", "device.matmul_half.float32: expected a number, got 'x'"),
        (("device", "flops"), {"bfloat16": 1.0}, "at least 'float32'"),
        (("device", "flops"), 3.0, "device.flops: expected a mapping of dtype to FLOP/s, got 3.0"),
        (("device", "flops", "float32"), 0, "device.flops.float32: expected a number above 0, got 0.0"),
        (("device", "flops", "float32"), float("nan"), "device.flops.float32: expected a number above 0, got nan"),
        (("device", "colour"), "red", "device.colour: expected one of name, flops"),
        (("device",), None, "device: expected a mapping with name, flops"),
        (("levels",), {}, "levels: expected a list of levels, innermost first, got {}"),
        (("levels",), [], "levels: expected at least one level"),
        (("levels", 0), 8, "levels[0]: expected a mapping with name, size"),
        (("levels", 0, "size"), 0, "levels.gpu.size: expected a whole number above 0, got 0"),
        (("levels", 0, "bandwidth"), DELETE, "levels[0].bandwidth: expected a value, got nothing"),
        (("levels", 0, "latency"), -1e-6, "levels.gpu.latency: expected a number of at least 0, got -1e-06"),
        (("levels", 0, "name"), "gpu7", "expected letters"),
        (("levels", 0, "links"), "ring", "levels.gpu.links: expected 'switch' or 'mesh', got 'ring'"),
        (("levels", 1, "name"), "gpu", "each with a name of its own, got ['gpu', 'gpu']"),
        (("name",), DELETE, "name: expected a value, got nothing"),
    ],
)
def test_a_wrong_file_names_file_key_expectation_and_value(
    tmp_path: Path, keys: tuple[Any, ...], value: object, message: str
) -> None:
    data: Any = copy.deepcopy(Cluster.preset("dgx-a100").to_dict())
    where = data
    for key in keys[:-1]:
        where = where[key]
    if value is DELETE:
        del where[keys[-1]]
    else:
        where[keys[-1]] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "just text", "{a: ", "\x00"])
def test_a_file_that_is_no_cluster_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ClusterError, match=r"mine\.yaml: .*expected"):
        Cluster.load(tmp_path / "mine.yaml")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ParallelError, match=r"none\.yaml: expected a readable cluster file"):
        Cluster.load(tmp_path / "none.yaml")


def test_an_unknown_preset_or_node_count_names_the_way_out() -> None:
    with pytest.raises(ClusterError, match="dgx-a100, dgx-h100"):
        Cluster.preset("dgx-b200")
    with pytest.raises(ClusterError, match=r"levels\.node\.size: expected a whole number above 0, got 0"):
        Cluster.preset("dgx-a100", nodes=0)
    with pytest.raises(ClusterError, match="has no level"):
        Cluster.preset("dgx-a100").resized(rack=2)


def test_local_ranks() -> None:
    assert Cluster.local(4).world_size == 4
    assert Cluster.local(6).mesh().world_size == 6
    assert Cluster.local(1).mesh().axes == ()


def test_detection_without_a_world_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Cluster.detect(profile=False).world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ClusterError, match="init_process_group"):
        Cluster.detect(profile=False)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", ["dgx-a100", "frontier", "rtx3090-nvlink", "perlmutter"])
def test_a_preset_fits_any_number_of_devices_a_node(name: str, devices: int) -> None:
    assert Cluster.preset(name).fitted(devices, 5).world_size == 5 * devices


def test_gpus_are_known_by_torchs_names() -> None:
    assert preset_of_gpu("NVIDIA A100-SXM4-80GB") == "dgx-a100"
    assert preset_of_gpu("NVIDIA GeForce RTX 3090") == "rtx3090-pcie"
    with pytest.raises(ClusterError, match=r"Tesla K80.*Cluster\.load"):
        preset_of_gpu("Tesla K80")


def test_the_page_on_clusters_holds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    example = page.split("```yaml file=cluster.yaml\n")[1].split("```")[0]
    assert Cluster.from_dict(yaml.safe_load(example)).world_size == 128
    assert all(f"| `{name}` |" in page for name in PRESETS)
    for kind, prefix in ((Level, "levels[]"), (Device, "device")):
        assert all(f"| `{prefix}.{key}` |" in page for key in kind.__dataclass_fields__)


def test_detection_reads_the_running_world(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert [level.size for level in Cluster.detect(profile=False).levels] == [8, 1]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert [level.size for level in Cluster.detect(profile=False).levels] == [4, 2]
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ClusterError, match="8 ranks do not divide over nodes of LOCAL_WORLD_SIZE=3"):
            Cluster.detect(profile=False)
    finally:
        dist.destroy_process_group()
