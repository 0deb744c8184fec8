"""Measured peak memory of generated steps on local gloo ranks, to compare with the simulator's."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import Timeline
from shardweave.cost_model.options import Options
from shardweave.runtime.inputs import check_inputs, local_input
from tests.models import TODAY, ZOO, Case
from tests.peak_memory import held_bytes, measured_peak

CASES = {**ZOO, **TODAY}
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"*": "dp"},
    "zdp": {"*": "zdp"},
    "zero1": {"*": "zero1"},
    "zero2": {"*": "zero2"},
    "column": {"*": "column"},
    "row": {"*": "row"},
    "planned": {},
}
PATIENCE = (0.01, 0.02, 0.04, 0.08)
"""Seconds before each wait for a collective, and before the record of a step ends: of each measurement in turn.

The least measured counts, once every rank has met its least twice: what is seen too late to be free, on a busy machine,
is all that can go wrong.
"""
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Patient(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets gloo's threads finish before each wait.

    Who lets go of a buffer last frees it, and the allocator's record has what the rank's own thread does only.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then DTensor's turn, and its local ops come here
        if function is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(self.seconds)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Figures:
    """Of one rank, in bytes: the peak of a step, and what lies in memory between steps."""

    peak: int
    rest: int


def measure(case: Case, parallel: Any) -> Figures:
    """Train for three steps on this rank, and measure the last: by then the optimizer has its states."""
    optimizer = ADAMW(parallel.parameters())
    batch = case.batch(0)
    specs = parallel.spec.inputs
    values = check_inputs(parallel._step.compiled.flatten((), batch), specs)
    parts = [local_input(value, spec, parallel._coordinates) for value, spec in zip(values, specs, strict=True)]
    named = dict(zip(batch, parts, strict=True)) if len(batch) == len(parts) else batch
    inputs = {name: value.clone() for name, value in named.items()}  # a part would keep the memory of the whole
    del parts, named

    def step() -> None:
        loss = case.loss(parallel(**inputs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
        time.sleep(PATIENCE[0])
    gc.collect()
    held = [*parallel.parameters(), *parallel.buffers(), *inputs.values(), *constants(parallel)]
    held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return Figures(settled_peak(step, held), held_bytes(held))


def settled_peak(step: Callable[[], object], held: Sequence[torch.Tensor]) -> int:
    """The peak of a step of which all ranks take part, in bytes, by the best of a few measurements."""
    peaks: list[int] = []
    for seconds in PATIENCE:

        def patient(seconds: float = seconds) -> None:
            step()
            time.sleep(seconds)

        with Patient(seconds):
            peaks.append(measured_peak(patient, held))
        if _everywhere(peaks.count(min(peaks)) > 1):
            break
    return min(peaks)


def _everywhere(settled: bool) -> bool:
    """Whether it is so on every rank: all measure equally often, as a step needs all of them."""
    flag = torch.tensor(int(settled))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def constants(parallel: Any) -> list[torch.Tensor]:
    """Tensors that the graphs hold themselves, on this device."""
    graphs = (parallel.graphs["forward"], parallel.graphs["backward"])
    found = {str(node.target): module for module in graphs for node in module.graph.nodes if node.op == "get_attr"}
    return [getattr(module, name) for name, module in found.items()]


def measure_all(case: Case, ranks: int, plans: list[dict[str, Any]]) -> list[Figures]:
    """In one rank: the step of each plan in turn, compiled as `compile_parallel` does."""
    model = case.model()
    compiler = Compiler(model, sw.Cluster.local(ranks), case.batch(0), None, None)
    return [measure(case, compiler.compile(model, sw.Plan.from_dict(plan))) for plan in plans]


def prepare(case: Case, ranks: int, ways: Mapping[str, Options]) -> list[tuple[str, sw.Plan, Timeline]]:
    """A plan in each of these ways, and what the simulator says of its step."""
    compiler = Compiler(case.model(), sw.Cluster.local(ranks), case.batch(0), None, None)
    found = []
    for way, options in ways.items():
        compiler = copy.copy(compiler)
        compiler.options = options
        try:
            plan = compiler.plan()
        except sw.ParallelError as error:
            print(f"{case.name}, {way}: {type(error).__name__}: {str(error)[:90]}", flush=True)
            continue
        found.append((way, plan, plan.timeline()))
    return found


def ways_of(words: Iterable[str]) -> dict[str, Options]:
    """What each of `WAYS` asks for, or in several micro-batches: 'zero1 x2'."""
    found = {}
    for word in words:
        force, _, count = word.partition(" x")
        found[word] = Options(force=WAYS[force], micro_batches=int(count or 1))
    return found
