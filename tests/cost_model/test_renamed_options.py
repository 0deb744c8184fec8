"""Old names of options work, with a warning that says the new one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

import shardweave as sw
from shardweave.ir import PlanError

RENAMED: list[tuple[dict[str, Any], sw.Options, str]] = [
    ({"undivided": ["a"]}, sw.Options(exclude_from_sub_batches=["a"]), "exclude_from_sub_batches=..."),
    ({"lookahead": 2}, sw.Options(max_prefetch=2), "max_prefetch=..."),
    ({"allow_unruled": False}, sw.Options(replicate_unknown_ops=False), "replicate_unknown_ops=..."),
    ({"blocking": ["gather"]}, sw.Options(ablation=sw.Ablation(blocking=["gather"])), "Ablation(blocking=...)"),
    ({"whole_sums": True}, sw.Options(ablation=sw.Ablation(all_reduce_gradients=True)), "all_reduce_gradients=..."),
    ({"gather_again": True}, sw.Options(ablation=sw.Ablation(regather_in_recompute=True)), "regather_in_recompute=..."),
    ({"cross_pass": False}, sw.Options(ablation=sw.Ablation(cross_pass=False)), "Ablation(cross_pass=...)"),
    ({"buckets": "flat"}, sw.Options(ablation=sw.Ablation(flat_parameter=True)), "flat_parameter=True"),
]


@pytest.mark.parametrize(("old", "new", "said"), RENAMED, ids=[next(iter(old)) for old, *_ in RENAMED])
def test_an_old_name_works_and_warns_with_the_new_one(old: dict[str, Any], new: sw.Options, said: str) -> None:
    with pytest.warns(DeprecationWarning) as warned:
        found = sw.Options(**old)
    assert found == new and found.overlap == new.overlap
    (only,) = warned
    assert said in str(only.message) and only.filename == __file__


def test_old_and_new_names_add_up() -> None:
    with pytest.warns(DeprecationWarning):
        found = sw.Options(ablation=sw.Ablation(flat_parameter=True), blocking=["reduce"])  # type: ignore[call-arg]
    assert found.ablation == sw.Ablation(blocking=("reduce",), flat_parameter=True)
    with pytest.warns(DeprecationWarning):
        assert replace(found, gather_again=True).ablation.regather_in_recompute  # type: ignore[call-arg]


def test_new_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(sw.Options(max_prefetch=1), ablation=sw.Ablation(cross_pass=False))


@pytest.mark.parametrize("wrong", [{"blocking": "gather"}, {"blocking": ("gathers",)}, {"cross_pass": 1}])
def test_a_wrong_ablation_is_refused_with_its_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        sw.Ablation(**wrong)
