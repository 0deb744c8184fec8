"""Files of clusters and measurements: whatever a value in them is changed to, they are refused by its key, or load."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardweave.cost_model import measured_tables
from shardweave.cost_model.cluster import Cluster
from shardweave.cost_model.device_profile import _cached
from shardweave.cost_model.measured_tables import CollectiveTable, Curve, Measured, OpTable, OpTime
from shardweave.cost_model.op_work import Product, Work
from shardweave.ir.errors import ClusterError
from tests.mutations import WRONG, mutated, paths

MEASURED = Measured(
    CollectiveTable((Curve("all_reduce", (4, 1), (1e3, 1e6), (1e-4, 1e-3)),)),
    OpTable.of(
        [
            OpTime(2e-5, Work(2 * 64**3, 3 * 4 * 64**2, "float32", Product(64, 64, 64), "aten.mm.default(f32[64,64])")),
            OpTime(1e-5, Work(100, 400, "float32", None, "aten.add.Tensor(float32[100])")),
        ]
    ),
    key="here",
)  # fmt: skip


def whole() -> Cluster:
    """A cluster in which nearly every field has something."""
    local = Cluster.local(4)
    device = replace(local.device, memory_times=((1e3, 1e-6), (1e6, 1e-4)))
    return replace(local, device=device, measured=MEASURED, sources={"device.memory": "a guess"})


DATA: Any = json.loads(json.dumps(whole().to_dict()))


def test_every_change_of_one_value_is_refused_by_its_key_or_loads() -> None:
    refused = loaded = 0
    for at in paths(DATA):
        for value in WRONG:
            try:
                found = Cluster.from_dict(mutated(DATA, at, value))
            except ClusterError as error:
                refused += 1
                text = str(error)
                assert str(at[0]) in text and "expected" in text or "there are" in text, (at, value, text)
                assert len(text) < 500, text
                continue
            loaded += 1
            assert found.mesh().world_size == found.world_size
            assert Cluster.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert refused > 1500 and loaded > 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(draw=st.data())
def test_any_changes_load_or_are_refused(draw: st.DataObject) -> None:
    changed = DATA
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.sampled_from(list(paths(changed))))
        changed = mutated(changed, at, draw.draw(JSON | st.sampled_from(WRONG)))
    try:
        assert Cluster.from_dict(changed).world_size > 0
    except ClusterError as error:
        assert "expected" in str(error) or "there are" in str(error)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("levels", 0, "size"), 2**24 + 1, "levels.cpu.size: expected a whole number above 0 and at most 16,777,216"),
        (("levels", 1, "size"), 2**24, "levels: expected at most 16,777,216 devices, got 67,108,864"),
        (("device", "memory"), 2**63, "device.memory: expected a whole number above 0 and at most 9,223,372,036,854,7"),
        (("device", "memory_bandwidth"), 10**400, "expected a number between 1e-30 and 1e+30, got one of 1329 bits"),
        (("device", "memory_bandwidth"), 1e-300, "expected a number between 1e-30 and 1e+30, got 1e-300"),
        (("device", "launch_latency"), math.inf, "device.launch_latency: expected a number of at least 0, got inf"),
        (("sources",), [1], "sources: expected a mapping of keys to texts, got [1]"),
    ],
)  # fmt: skip
def test_absurd_values_are_named(at: tuple[Any, ...], value: Any, message: str) -> None:
    data = {key: entry for key, entry in DATA.items() if key != "measured"}
    with pytest.raises(ClusterError) as told:
        Cluster.from_dict(mutated(data, at, value))
    assert message in str(told.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "expected YAML"),
        ("9" * 6000, "expected YAML"),
        ("!!python/object/apply:os.system [ls]", "expected YAML"),
        ("2020-01-01: 3", "2020-01-01: expected one of name"),
        ("{name: a, name: b}", "the key 'name' comes twice"),
    ],
)
def test_files_of_something_else(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ClusterError, match=rf"mine\.yaml: (?s:.*){message}"):
        Cluster.load(tmp_path / "mine.yaml")


def test_merged_keys_are_not_twice(tmp_path: Path) -> None:
    data = {**whole().to_dict(), "measured": None, "levels": []}
    text = yaml.safe_dump(data).replace("levels: []", "levels: [&one {name: gpu, size: 2, bandwidth: 1.0e+9, latency: "
                                        "1.0e-6}, {<<: *one, name: node}]")  # fmt: skip
    (tmp_path / "mine.yaml").write_text(text)
    assert [level.size for level in Cluster.load(tmp_path / "mine.yaml").levels] == [2, 2]


def test_damaged_measurements_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path))
    path = measured_tables.write(MEASURED)
    assert path is not None and measured_tables.read("here") == MEASURED
    data = json.loads(path.read_text())
    for at in paths(data):
        for value in WRONG:
            path.write_text(json.dumps(mutated(data, at, value)))
            found = measured_tables.read("here")
            assert found is None or found.key == "here"
    for text in ("", "[" * 10_000, "9" * 6000, "\x00", "null"):
        path.write_text(text)
        assert measured_tables.read("here") is None
        path.with_name("ops-here.json").write_text(text)
        assert _cached("ops-here", OpTable.from_dict, None) is None
