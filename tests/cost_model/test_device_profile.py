"""The live device: what a profile gives, the curve that is fit_rate_and_half, and agreement of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardweave as sw
from shardweave.cost_model import Cluster, Device, Product, Work, device_profile
from shardweave.cost_model.device_profile import fit_rate_and_half, profile_contention, profile_device
from shardweave.cost_model.node_cost import bytes_seconds, formula_seconds
from shardweave.ir.errors import ClusterError
from tests.passes.harness import examples

BASE = Cluster.local(1).device
GPU = Cluster.preset("dgx-a100").device


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("SHARDWEAVE_CACHE", str(tmp_path))
    return tmp_path


@examples(50)
@given(st.floats(1e6, 1e15), st.floats(0, 100))
def test_a_fit_finds_the_curve_that_the_times_were_made_of(rate: float, half: float) -> None:
    shapes = [(512, 512, 512), (64, 64, 64), (16, 512, 512), (512, 16, 512), (512, 512, 64)]
    points = [(shape, (shape[0] + half) * (shape[1] + half) * (shape[2] + half) / rate) for shape in shapes]
    found_rate, found_half = fit_rate_and_half(points)
    for shape, seconds in points:
        again = (shape[0] + found_half) * (shape[1] + found_half) * (shape[2] + found_half) / found_rate
        assert again == pytest.approx(seconds, rel=0.2)
    assert found_half == pytest.approx(half, rel=0.1, abs=0.5)


def test_a_rate_beyond_the_data_sheet_is_fitted_only_if_it_was_measured() -> None:
    """Products that the device computes in 10 µs, whatever their size, look like halves of endless sizes."""
    points = [((size, size, size), 1e-5 + size**3 / 1e12) for size in (128, 512, 1024)]
    free, _ = fit_rate_and_half(points)
    rate, half = fit_rate_and_half(points, limit=1e12)
    assert free > 1e12 >= rate and half > 0
    fast, none = fit_rate_and_half(points, limit=1e9)
    assert fast > 1e9 and none == 0


def test_one_disturbed_measurement_does_not_spoil_a_fit() -> None:
    points = [((size, 512, 512), (size + 8) * 520 * 520 / 1e9) for size in (8, 16, 64, 128, 256, 512)]
    points[-1] = points[-1][0], 10 * points[-1][1]
    rate, half = fit_rate_and_half(points)
    assert rate == pytest.approx(1e9, rel=0.1)
    assert half == pytest.approx(8, rel=0.2)


def made(device: Device, where: str) -> dict[str, float]:
    """The times that a machine of these figures would give."""
    cluster = replace(Cluster.local(1), device=device)
    times = {"launch": device.launch_latency}
    for size in device_profile._TENSOR_BYTES[where]:
        times[f"memory:{3 * size}"] = device.launch_latency + bytes_seconds(3 * size, cluster)
    for dtype in device.flops:
        if dtype != "float8_e4m3fn":
            for m, n, k in device_profile._product_shapes(device_profile._LARGE_DIMENSION[where]):
                size = getattr(torch, dtype).itemsize
                work = 2 * m * n * k, size * (m * k + k * n + m * n)
                times[f"{dtype}:{m},{n},{k}"] = formula_seconds(Work(*work, dtype, Product(m, n, k)), cluster)
    return times


@pytest.mark.parametrize(("where", "truth"), [("cpu", BASE), ("cuda", GPU)])
def test_the_figures_of_a_machine_come_back_from_its_times(where: str, truth: Device) -> None:
    start = replace(truth, matmul_half={}, matmul_efficiency=0.5, memory_efficiency=0.5, launch_latency=1.0)
    found = device_profile._fit_device(start, torch.device(where), made(truth, where))
    assert found.launch_latency == truth.launch_latency
    for dtype in truth.flops:
        reached = truth.peak(dtype) * truth.matmul_efficiency
        assert found.peak(dtype) * found.matmul_efficiency == pytest.approx(reached, rel=0.05)
        assert found.half_dimension(dtype) == pytest.approx(truth.half_dimension(dtype), rel=0.25)
    reached = truth.memory_bandwidth * truth.memory_efficiency
    assert found.memory_bandwidth * found.memory_efficiency == pytest.approx(reached, rel=0.05)
    if where == "cuda":  # the datasheet's figures stay
        assert found.peak("bfloat16") == pytest.approx(truth.peak("bfloat16"))
        assert found.memory_bandwidth == pytest.approx(truth.memory_bandwidth)
        assert found.matmul_efficiency == pytest.approx(truth.matmul_efficiency, rel=0.05)
    else:
        assert found.matmul_efficiency == found.memory_efficiency == 1


def test_what_cannot_be_multiplied_keeps_its_figures() -> None:
    odd = replace(BASE, flops={"float32": 1e9, "no_such_dtype": 3e9})
    found = device_profile._fit_device(odd, torch.device("cpu"), {"launch": 1e-6, "memory:1000": 1e-5})
    assert found.flops == {"float32": 0.8e9, "no_such_dtype": pytest.approx(2.4e9)}


def test_the_live_device_is_measured_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(BASE, flops={"float32": 1e9, "float64": 1e9})
    found = profile_device(base, "cpu")
    assert found.launch_latency > 0 and found.memory == base.memory
    assert found.overlap_slowdown == base.overlap_slowdown  # one rank has nobody to talk to
    cluster = replace(Cluster.local(1), device=found)
    small, large = (
        formula_seconds(Work(2 * n**3, 12 * n**2, "float32", Product(n, n, n)), cluster) for n in (64, 1024)
    )
    assert 0 < small < large
    assert len(list(cache.glob("device-*.json"))) == 1
    monkeypatch.setattr(device_profile, "_time_kernels", lambda *_: pytest.fail("it is kept"))
    assert profile_device(base, "cpu") == found


def test_without_time_a_device_keeps_its_rates() -> None:
    found = profile_device(BASE, "cpu", seconds_budget=-1.0, cache=False)
    assert found.flops == {dtype: pytest.approx(peak * BASE.matmul_efficiency) for dtype, peak in BASE.flops.items()}
    assert found.matmul_half == BASE.matmul_half


def test_a_slowdown_needs_a_world() -> None:
    with pytest.raises(ClusterError, match="init_process_group"):
        profile_contention("cpu")


def _ranks() -> Device:
    return profile_device(replace(BASE, flops={"float32": 1e9}), seconds_budget=3.0, cache=False)


def test_all_ranks_get_the_same_device_with_a_slowdown() -> None:
    one, other = sw.launch(_ranks, nprocs=2)
    assert one == other
    assert one.overlap_slowdown >= 1
