"""Predictions: the same plan under other constants, and what is said of a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardweave as sw
from benchmarks.predict import Case, constants, evaluation, in_words
from shardweave.compiler.compiler import Compiler


def small() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, use_cache=False, **sizes))


@cache
def planned() -> tuple[Compiler, sw.Plan]:
    compiler = Case("", "", small, 64, 256, 2, ()).compiler()
    return compiler, compiler.plan()


def test_a_plan_under_its_own_constants_takes_what_it_says() -> None:
    """And under slower ones longer: each is a constant that the step depends on, or none of its links are used."""
    compiler, plan = planned()
    as_it_is = evaluation(compiler, plan, compiler.cluster).step_time
    assert as_it_is == pytest.approx(plan.step_time, rel=0.02)
    changed = constants(compiler.cluster)
    times = {what: evaluation(compiler, plan, cluster).step_time for what, cluster in changed.items()}
    assert times["matmul efficiency +10 %"] < as_it_is < times["matmul efficiency -10 %"]
    slower = ("network between nodes -30 %", "NVLink -30 %", "hops between nodes twice as slow")
    assert all(times[what] >= as_it_is for what in slower)


def test_one_constant_is_changed_at_a_time() -> None:
    cluster = planned()[0].cluster
    for changed in constants(cluster).values():
        data, before = changed.to_dict(), cluster.to_dict()
        pairs = [(data["device"], before["device"]), *zip(data["levels"], before["levels"], strict=True)]
        assert sum(one.get(key) != other.get(key) for one, other in pairs for key in {*one, *other}) == 1


def test_words_count_what_is_spread_how() -> None:
    _, plan = planned()
    grid = sw.Strategy(sw.Grid(x=2, data=8), 1, states=8)
    first, *others = plan.choices
    choices = {name: replace(plan.choices[name], strategy=sw.Strategy(sw.Grid(data=16), 16)) for name in others}
    said = in_words(replace(plan, choices={first: replace(plan.choices[first], strategy=grid), **choices}))
    assert f"{len(others)} are data parallel and 1 tensor parallel, over 2 devices" in said
    assert "sharded over 1 or 16 devices in a step, optimizer states over 8 or 16" in said
