"""What each method of the solver is worth, on the problems that planning poses: the table of docs/solver.md.

python -m benchmarks.measure_solver                                    # the solver as it is, model by model
python -m benchmarks.measure_solver --without                          # and without each of its methods
python -m benchmarks.measure_solver --models llama-80 --recorded FILE  # problems from a file; made if there is none

The problems are recorded while the models are planned. Each row has the CPU seconds of all solves, how much slower the
choices are than those of the whole solver (on average, and at most), and how many solves end without the gap or the
ceiling that was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import shardweave as sw
from benchmarks.measure_planning import gpt3, llama, unet
from shardweave.demo.model import GPT, GPTConfig
from shardweave.ir.errors import PlanError
from shardweave.planner.search import solver_cache
from shardweave.planner.solver import branch_and_bound, elimination
from shardweave.planner.solver.branch_and_bound import Search
from shardweave.planner.solver.ilp import Answer
from shardweave.planner.solver.solver import Solution, solve

GIB = 2**30
Planned = tuple[nn.Module, Any, sw.Cluster, dict[str, Any]]


def gpt(layers: int, batch: int, cluster: sw.Cluster) -> Planned:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers))
        tokens = torch.zeros(batch, model.config.context, dtype=torch.long)
    return model, (tokens, tokens), cluster, {}


def language(build: Callable[[], nn.Module], shape: tuple[int, int], cluster: sw.Cluster, **options: Any) -> Planned:
    with torch.device("meta"):
        model, tokens = build(), torch.zeros(shape, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}, cluster, options


def small_llama() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 1024, "num_hidden_layers": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))
    return model


def small_mixtral() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    model: nn.Module = MixtralForCausalLM(MixtralConfig(use_cache=False, **sizes)).to(torch.bfloat16)
    return model


def llama_8b() -> nn.Module:
    return llama(32).to(torch.bfloat16)


PRESET = sw.Cluster.preset
MODELS: dict[str, Callable[[], Planned]] = {
    "gpt-cpu": lambda: gpt(2, 32, sw.Cluster.local(4)),
    "llama-cpu": lambda: language(small_llama, (16, 128), sw.Cluster.local(4)),
    "gpt-pcie": lambda: gpt(6, 64, PRESET("rtx3090-pcie", nodes=2)),
    "mixtral": lambda: language(small_mixtral, (16, 1024), PRESET("dgx-a100", nodes=2)),
    "unet": lambda: (*unet(), PRESET("dgx-h100", nodes=2), {}),
    "unet-tight": lambda: (*unet(), PRESET("dgx-h100", nodes=2),
                           {"memory_limit": int(0.157 * GIB), "micro_batches": 1}),
    "llama-80": lambda: language(llama_8b, (64, 8192), PRESET("dgx-h100", nodes=8)),
    "llama-16": lambda: language(llama_8b, (64, 8192), PRESET("dgx-h100", nodes=8), memory_limit=16 * GIB),
    "gpt3": lambda: language(lambda: gpt3(96).to(torch.bfloat16), (1024, 2048), PRESET("dgx-h100", nodes=128),
                             micro_batches=1),
}  # fmt: skip
"""By name: what is planned, on which cluster, with which options."""


Asked = tuple[str, dict[str, Any]]
"""A model's name, and the arguments of one call of `solve`."""


def recorded(model: str) -> list[Asked]:
    """The problems that planning poses for a model."""
    found: list[Asked] = []

    def recording(problem: Any, time_limit: float, told: Any, hint: Any, *ends: Any) -> Solution:
        arguments = dict(zip(("problem", "hint", "gap", "ceiling", "rough"), (problem, hint, *ends), strict=True))
        found.append((model, arguments))
        return solve(problem, time_limit, told, hint, *ends)

    module, inputs, cluster, options = MODELS[model]()
    with mock.patch.object(solver_cache, "solve", recording), contextlib.suppress(PlanError):
        sw.plan(module, cluster, inputs, options=sw.Options(**options), progress=False)
    return found


def _no_heuristic(search: Search, *arguments: Any, heuristic: bool = False) -> Answer:
    return Answer(None, 0.0, "UNKNOWN") if heuristic else SOLVE(search, *arguments)


SOLVE, CLOSE = Search._solve, Search._close
WITHOUT: dict[str, list[tuple[Any, str, Any]]] = {
    "groups of states": [(elimination, "_MAX_FULL_TABLE_ENTRIES", 2**62)],
    "splitting by transients": [(Search, "_split", lambda *_: None)],
    "programs of columns": [(Search, "_solve", _no_heuristic)],
    "the closing program": [(Search, "_close", lambda search, found, rough: CLOSE(search, found, True))],
    "CP-SAT for few columns": [(branch_and_bound, "_MAX_EXACT_COLUMNS", 0)],
    "elimination: HiGHS alone": [(elimination, "_MAX_TABLE_ENTRIES", 0)],
    "elimination and HiGHS: CP-SAT alone": [(elimination, "_MAX_TABLE_ENTRIES", 0),
                                            (branch_and_bound, "_MAX_EXACT_COLUMNS", 2**62)],
}  # fmt: skip
"""What is replaced to leave out a method."""


def solved(asked: list[Asked], time_limit: float) -> Iterator[tuple[float, Solution | None]]:
    """CPU seconds and answer of each; None where there is none."""
    for _, arguments in asked:
        begin, found = time.process_time(), None
        with contextlib.suppress(PlanError):
            found = solve(time_limit=time_limit, **arguments)
        yield time.process_time() - begin, found


def is_done(arguments: dict[str, Any], found: Solution | None) -> bool:
    """Whether the answer is as good as was asked for."""
    if found is None:
        return False
    enough: float = min(arguments["ceiling"], found.objective * (1 - arguments["gap"]))
    return found.bound >= enough * (1 - 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--without", nargs="*", choices=WITHOUT, help="also without these methods, or without each")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--recorded", type=Path, help="a file of problems")
    args = parser.parse_args()
    if args.recorded and args.recorded.exists():
        asked: list[Asked] = [each for each in pickle.loads(args.recorded.read_bytes()) if each[0] in args.models]
    else:
        asked = [each for model in args.models for each in recorded(model)]
        if args.recorded:
            args.recorded.write_bytes(pickle.dumps(asked))
    whole = list(solved(asked, args.time_limit))
    # Problems without an answer need no comparison, and those above their ceiling are not of interest
    of_use = [number for number, (_, found) in enumerate(whole) if found and found.bound < asked[number][1]["ceiling"]]

    def row(name: str, answers: list[tuple[float, Solution | None]], numbers: list[int]) -> None:
        worse = [found.objective / first.objective - 1
                 for number in numbers if number in of_use
                 if (found := answers[number][1]) and (first := whole[number][1])]  # fmt: skip
        open_ = sum(not is_done(asked[number][1], answers[number][1]) for number in numbers if whole[number][1])
        print(f"{name:36} {len(numbers):4} {sum(answers[number][0] for number in numbers):8.2f} "
              f"{100 * sum(worse) / max(1, len(worse)):8.3f} {100 * max(worse, default=0):8.3f} {open_:5}",
              flush=True)  # fmt: skip

    print(f"{'':36} runs    CPU-s  mean, % worst, %  open")
    for model in args.models:
        row(model, whole, [number for number, each in enumerate(asked) if each[0] == model])
    every = list(range(len(asked)))
    row("all", whole, every)
    for name in (args.without or WITHOUT) if args.without is not None else ():
        with contextlib.ExitStack() as stack:
            for owner, attribute, value in WITHOUT[name]:
                stack.enter_context(mock.patch.object(owner, attribute, value))
            row(f"without {name}", list(solved(asked, args.time_limit)), every)


if __name__ == "__main__":
    main()
