"""What `make zoo` builds, tries and writes."""

from __future__ import annotations

import json
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path

import pytest

from benchmarks.zoo import Runner, Stages, results_of
from benchmarks.zoo_models import BATCH, LENGTH, Entry, build, entries, small_settings
from benchmarks.zoo_page import Result, kind_of, page

GPT2 = Entry("transformers", "causal lm", "gpt2", "GPT2LMHeadModel")
ENCODEC = "CaptureError: WithLoss cannot be captured as one graph: in a.0 (Conv), a branch depends on the values of x"


def test_sizes_become_small_by_their_names() -> None:
    kinds = ["linear", "linear", "full", "linear"]
    sizes = {"hidden_size": 4096, "num_hidden_layers": 4, "dropout": 0.1, "pad_token_id": 50256}
    small = {"hidden_size": 64, "num_hidden_layers": 2, "dropout": 0.0, "pad_token_id": 255}
    assert small_settings({**sizes, "layer_types": kinds}) == {**small, "layer_types": ["linear", "full"]}


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_every_architecture_is_listed_once(library: str) -> None:
    found = entries(library)
    assert len(found) > 100 and len({entry.key for entry in found}) == len(found)


def test_a_model_is_tried_to_the_end() -> None:
    """In one process: captured, planned, and two steps on 4 ranks equal to one device's."""
    reports, sending = Pipe()
    Stages(GPT2, sending).run()
    result: Result = reports.recv()
    while reports.poll():
        result = reports.recv()
    assert result.cause == "" and all(result.stages.values()) and list(result.stages)[-1] == "equal"
    assert result.share == 1.0 and result.difference is not None and result.difference < 1e-5
    assert result.inputs == "input_ids, attention_mask, labels"


def test_inputs_are_of_the_batch() -> None:
    _, tried = build(GPT2)
    assert tried[0]["input_ids"].shape == (BATCH, LENGTH)


def test_results_are_kept_and_taken_up(tmp_path: Path) -> None:
    """A process that fails is a line of its own; the last line of an architecture holds."""
    file = tmp_path / "results.jsonl"
    Runner(file, 1, 60, 2**40, "captured").run([Entry("transformers", "causal lm", "none", "NoSuchModel")])
    (result,) = results_of(file).values()
    assert result.stages == {"built": False} and "none" in result.cause and result.is_done("equal")
    later = Result("transformers", "causal lm", "none", "NoSuchModel", {"built": True, "runs": True, "captured": True})
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(later)) + "\n")
    assert results_of(file) == {later.key: later}
    assert later.is_done("captured") and not later.is_done("equal")


def test_the_page_counts_and_lists() -> None:
    good = dict.fromkeys(("built", "runs", "captured", "planned", "equal"), True)
    alone = {"built": True, "runs": True}
    some = [
        Result("transformers", "masked lm", "bert", "Bert", good, share=1.0, difference=1e-9, date="2026-01-02"),
        Result("transformers", "base model", "encodec", "Encodec", {**alone, "captured": False}, cause=ENCODEC),
        Result("transformers", "base model", "odd", "Odd", {"built": False}, cause="KeyError: 'x'"),
    ]
    text = page(some, 9, 120)
    assert "| transformers | 3 | 2 | 1 of 2 (50.0 %) | 1 of 2 (50.0 %) | 1 of 1 (100 %) |" in text
    assert "| bert | Bert | yes | yes | 100 % | yes |  |" in text
    assert f"| {kind_of(ENCODEC)} | 1 | encodec |" in text
    assert "transformers: odd." in text and "3 of the 9 architectures" in text
