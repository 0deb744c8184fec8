"""Try every architecture of other libraries that can be built small, and write docs/zoo.md: ``make zoo``.

python -m benchmarks.zoo                                              all of them, for hours; cut it and start it again
python -m benchmarks.zoo --library transformers --only bert,llama     these ones
python -m benchmarks.zoo --page-only                                  the page from the results that are there

Each architecture runs in a process of its own with a time and a memory limit. Its result is a JSON line in the folder
of results; what has one is not tried again, unless ``--again``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardweave as sw
from benchmarks.measure_models import Measured, dgx, percent
from benchmarks.zoo_models import LIBRARIES, Entry, Inputs, PositionalInputs, WithLoss, build, entries
from benchmarks.zoo_page import LEARNING_RATE, RANKS, SLOWER, STEPS, TOLERANCES, Result, page
from benchmarks.zoo_sizes import BATCH, HIDDEN
from shardweave.ir import Captured
from shardweave.passes import Compiled
from shardweave.sharding import unruled_ops
from tests import lockstep
from tests.passes.harness import together

PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"
RESULTS = Path(__file__).parents[1] / "out" / "zoo"
OPTIONS = sw.Options(micro_batches=1, sub_batches=1, recompute="none", buckets=False, time_limit=5.0)
NOISE = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Gradients below this part of the largest one of the model are compared with it: some are zero but for rounding."""
STAGES = ("captured", "equal")
"""What ``--until`` takes."""
WALL_PER_CPU_SECOND = 4
"""Other programs may run beside, but what waits for ever is ended."""


# -- one architecture


class Stages:
    """Runs the stages of one architecture up to `until`, and sends what is known after each."""

    def __init__(self, entry: Entry, reports: Connection, until: str = STAGES[-1]) -> None:
        self.until = until
        self.result = Result(
            **asdict(entry), date=datetime.now(UTC).date().isoformat(), versions=versions(("torch", entry.library))
        )
        self.reports, self.entry = reports, entry

    def run(self) -> None:
        """All stages, up to the first that fails."""
        stage = "built"
        try:
            model, tried = self._timed(stage, lambda: build(self.entry))
            stage = "runs"
            step, inputs = self._timed(stage, lambda: self._alone(model, tried))
            stage = "captured"
            compiler = self._timed(stage, lambda: self._captured(step, inputs))
            if self.until == stage:
                return self.reports.send(self.result)
            stage = "planned"
            plan = self._timed(stage, lambda: self._planned(compiler))
            stage = "equal"
            self._timed(stage, lambda: self._equal(compiler, plan, step, inputs))
        except BaseException as error:  # the memory limit, and what libraries raise
            self.result.stages[stage] = False
            self.result.cause = cause_of(error)
        self.reports.send(self.result)

    def _timed(self, stage: str, work: Any) -> Any:
        self.result.stages[stage] = False
        self.result.cause = "the time limit"  # of whoever reads this report after the process has been ended
        self.reports.send(self.result)
        begun = time.perf_counter()
        found = work()
        self.result.seconds[stage] = round(time.perf_counter() - begun, 2)
        self.result.stages[stage], self.result.cause = True, ""
        return found

    def _alone(self, model: nn.Module, tried: Sequence[Inputs]) -> tuple[nn.Module, Inputs]:
        """The step and the first inputs with which it runs forward and backward, in float64 if it can."""
        errors = []
        for dtype in (torch.float64, torch.float32):
            step = WithLoss(model.to(dtype)).train()
            for inputs in tried:
                inputs = converted(inputs, dtype)
                try:
                    first = float(trained(step, inputs, 0))
                except Exception as error:  # whatever a library raises of inputs that do not suit it
                    errors.append(f"{', '.join(inputs)}: {cause_of(error)}")
                    continue
                if first != float(trained(step, inputs, 1)):  # it draws random numbers in training
                    step.eval()
                self.result.inputs, self.result.dtype = ", ".join(inputs), str(dtype).removeprefix("torch.")
                return step, inputs
        raise RuntimeError("; ".join(dict.fromkeys(errors)) or "no inputs are known for it")

    def _captured(self, step: nn.Module, inputs: Inputs) -> Measured:
        compiler = Measured(step, slow_gpus(), ((), inputs), OPTIONS, None)
        self.result.unruled = list(unruled_ops(compiler.annotated.captured.graph.graph))
        self.result.ops = sum(node.op == "call_function" for node in compiler.captured.graph.graph.nodes)
        return compiler

    def _planned(self, compiler: Measured) -> sw.Plan:
        plan = compiler.plan()
        self.result.share = compiler.shared(plan).share
        return plan

    def _equal(self, compiler: Measured, plan: sw.Plan, step: nn.Module, inputs: Inputs) -> None:
        first = float(trained(step, inputs, 0))
        if first != float(trained(step, inputs, 1)):
            raise RuntimeError("not compared: the model draws random numbers by itself")
        lowered = compiler.lower(plan)
        self.result.difference = difference = largest_difference(compiler, lowered, step, inputs)
        tolerance = TOLERANCES[least_precise(compiler.captured)]
        if not difference <= tolerance:
            eager = cast(nn.Module, torch.compile(step, backend="eager"))
            if float(trained(eager, inputs, 0)) != first:
                self.result.difference = None
                raise RuntimeError('not compared: it computes another loss under torch.compile(backend="eager") too')
            raise AssertionError(f"differs from one device by {difference:.1e} of the largest element")


def slow_gpus() -> sw.Cluster:
    """4 GPUs of a node with 10,000 times less arithmetic a second: FLOPs count more than latencies in small models."""
    cluster = dgx(RANKS)
    flops = {dtype: peak / SLOWER for dtype, peak in cluster.device.flops.items()}
    return replace(cluster, device=replace(cluster.device, flops=flops))


def converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return cast(Inputs, tree_map(one, inputs))


def trained(step: nn.Module, inputs: Inputs, seed: int) -> Tensor:
    """The loss, after its backward: the parameters have their gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        step.zero_grad()
        loss = step(**inputs)
        loss.backward()
    if not loss.isfinite():
        raise ValueError("its loss is not finite")
    found: Tensor = loss.detach()
    return found


def least_precise(captured: Captured) -> torch.dtype:
    """float32 if some op of the graph computes in less than float64."""
    dtypes = {
        value.dtype
        for node in captured.graph.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor) and value.is_floating_point()
    }
    return torch.float64 if dtypes <= {torch.float64} else torch.float32


def largest_difference(compiler: Measured, lowered: Compiled, step: nn.Module, inputs: Inputs) -> float:
    """The largest relative difference of losses and gradients between one device and all ranks, in `STEPS` steps.

    The optimizer is SGD. All ranks run in this process, node by node.
    """
    # 1. Cut the state into the parts of the ranks.
    spec, captured = lowered.step.spec, compiler.captured
    mesh, backward = spec.mesh, lowered.step.backward
    assert captured.call is not None and backward is not None
    state = {**dict(step.named_parameters(remove_duplicate=False)), **dict(step.named_buffers(remove_duplicate=False))}
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    flat = dict(zip(captured.inputs.values(), captured.call.flatten((), inputs), strict=True))
    parts = {
        value.name: lockstep.shard(state[value.name], value.layout, mesh) for value in (*spec.parameters, *spec.buffers)
    }
    batch = [lockstep.shard(flat[value.name], value.layout, mesh) for value in spec.inputs]
    floor = NOISE[least_precise(captured)]
    trainable = [parameter for parameter in spec.parameters if parameter.trainable]
    worst = 0.0
    changes = {value.name: value.change for value in spec.parameters if value.change is not None}
    for _ in range(STEPS):
        # 2. Forward on all ranks, and on one device.
        parts |= {name: [change(part) for part in parts[name]] for name, change in changes.items()}
        given = [parts[value.name] for value in (*spec.parameters, *spec.buffers)] + batch
        results = list(zip(*lockstep.run(lowered.step.forward, mesh, given)))
        written, (loss_parts, *saved) = results[: len(spec.mutated)], results[len(spec.mutated) :]
        parts |= {name: list(ranked) for name, ranked in zip(spec.mutated, written, strict=True)}
        loss = trained(step, inputs, 0)
        worst = max(worst, difference(together(list(loss_parts), spec.outputs[0].layout, mesh), loss, 0.0))
        # 3. Backward.
        tangents = [
            lockstep.shard(torch.ones_like(loss), spec.outputs[0].layout, mesh) for _tangent in captured.tangents
        ]
        gradients = list(zip(*lockstep.run(backward, mesh, [*map(list, saved), *tangents])))
        expected = {name: parameter.grad for name, parameter in step.named_parameters(remove_duplicate=False)}
        largest = max(
            (float(each.abs().max()) for each in expected.values() if each is not None and each.numel()), default=0.0
        )
        least = floor * largest
        for parameter, ranked in zip(trainable, gradients, strict=False):
            wanted = expected[parameter.name]
            if ranked[0] is None:  # the loss does not depend on it
                worst = max(worst, 0.0 if wanted is None else difference(torch.zeros_like(wanted), wanted, least))
                continue
            whole = together(list(ranked), parameter.layout, mesh)
            worst = max(worst, difference(whole, torch.zeros_like(whole) if wanted is None else wanted, least))
        # 4. One step of SGD, of the parts and of the whole.
        for parameter, ranked in zip(trainable, gradients, strict=False):
            parts[parameter.name] = [
                part if gradient is None else part - LEARNING_RATE * gradient
                for part, gradient in zip(parts[parameter.name], ranked, strict=True)
            ]
        with torch.no_grad():
            for weight in step.parameters():
                if weight.grad is not None:
                    weight.sub_(LEARNING_RATE * weight.grad)
    return worst


def difference(got: Tensor, expected: Tensor, least: float) -> float:
    """The largest difference, as a part of the largest element, or of `least` where that is larger.

    >>> difference(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]), 0.0)
    0.25
    """
    if not expected.numel():
        return 0.0
    found = float((got - expected).abs().max()) / max(float(expected.abs().max()), least, 1e-30)
    return found if found == found else float("inf")


# -- causes


def cause_of(error: BaseException) -> str:
    """The type of an error and the first sentence of its message."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "the memory limit"
    text = re.sub(r"\S*/site-packages/", "", re.sub(r"\s+", " ", str(error))).strip()
    named = sorted(set(re.findall(r"\b(?:aten|prims|torchvision|quantized)\.\w+(?:\.\w+)?", text)))
    if isinstance(error, sw.RuleError) and named:
        return f"RuleError: no rule for {', '.join(named[:4])}"
    if isinstance(error, RuntimeError) and text.startswith("not compared"):
        return text
    return f"{type(error).__name__}: {text[:600]}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


# -- all of them


def in_process(entry: Entry, reports: Connection, seconds: int, memory: int, until: str) -> None:
    """What the process of one architecture does."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process lives)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    Stages(entry, reports, until).run()
    reports.close()
    os._exit(0)


@dataclass
class Running:
    """An architecture that is tried now."""

    entry: Entry
    process: ForkProcess
    reports: Connection
    until: float
    last: Result | None = None


class Runner:
    """Tries architectures, several at a time, and appends their results to a file."""

    def __init__(self, file: Path, jobs: int, seconds: int, memory: int, until: str, command: str = "") -> None:
        self.file, self.jobs, self.seconds, self.memory, self.until = file, jobs, seconds, memory, until
        self.command = command
        self.context = multiprocessing.get_context("fork")

    def run(self, waiting: list[Entry]) -> None:
        warm_up()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        running: list[Running] = []
        with (
            Progress(*columns, console=Console(stderr=True, soft_wrap=True)) as progress,
            self.file.open("a", encoding="utf-8") as lines,
        ):
            task = progress.add_task("architectures", total=len(waiting))
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(self._start(waiting.pop(0)))
                names = ", ".join(each.entry.name for each in running)
                progress.update(task, description=names[:60])
                for each in self._ended(running):
                    running.remove(each)
                    result = each.last or Result(**asdict(each.entry), cause="the process ended without a result")
                    result.command = self.command
                    lines.write(json.dumps(asdict(result)) + "\n")
                    lines.flush()
                    progress.console.print(f"{result.key}: {told(result)}", highlight=False, markup=False, emoji=False)
                    progress.advance(task)

    def _start(self, entry: Entry) -> Running:
        reports, sending = self.context.Pipe(duplex=False)
        process = self.context.Process(target=in_process, args=(entry, sending, self.seconds, self.memory, self.until))
        process.start()
        sending.close()
        return Running(entry, process, reports, time.monotonic() + WALL_PER_CPU_SECOND * self.seconds)

    def _ended(self, running: list[Running]) -> list[Running]:
        """Wait for the next report; the architectures that are done, or whose time is up."""
        ended = []
        wait([each.reports for each in running], timeout=1.0)
        for each in running:
            try:
                while each.reports.poll():
                    each.last = each.reports.recv()
            except EOFError:
                each.process.join()
                if each.process.exitcode and each.last:
                    each.last.cause = ended_by(each.process.exitcode, self.seconds)
                ended.append(each)
                continue
            if time.monotonic() > each.until:
                each.process.kill()
                each.process.join()
                if each.last:
                    each.last.cause = ended_by(-signal.SIGXCPU, self.seconds)
                ended.append(each)
        return ended


def warm_up() -> None:
    """Capture a small model, so that what torch imports and builds for that is there before the processes fork."""
    inputs = {"x": torch.randn(BATCH, HIDDEN)}
    step = WithLoss(PositionalInputs(nn.Linear(HIDDEN, HIDDEN)))
    unruled_ops(Measured(step, slow_gpus(), ((), inputs), OPTIONS, None).annotated.captured.graph.graph)


def ended_by(code: int, seconds: int) -> str:
    """The cause where a process ended before it could name one."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"the time limit of {seconds} s"
    return f"the process ended with code {code}"


def told(result: Result) -> str:
    """One line about a result."""
    reached = " ".join(f"{name}:{'yes' if good else 'no'}" for name, good in result.stages.items())
    return f"{reached} {'' if result.share is None else percent(result.share)} {result.cause}"


def results_of(file: Path) -> dict[str, Result]:
    """The last result of each architecture."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    return {result.key: result for result in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="of these, by commas: " + ", ".join(LIBRARIES), default=",".join(LIBRARIES))
    parser.add_argument("--only", help="these architectures, by commas")
    parser.add_argument("--first", type=int, help="this many of each library, spread over its groups")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--time-limit", type=int, default=120, help="CPU seconds for each")
    parser.add_argument("--memory-limit", type=float, default=12.0, help="GiB of address space for each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of results")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage")
    parser.add_argument("--again", action="store_true", help="try again those that failed")
    parser.add_argument("--page-only", action="store_true", help="try nothing")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    given = parser.parse_args()
    torch.set_num_threads(1)
    listed = {name: entries(name) for name in given.library.split(",")}
    file = given.results / "results.jsonl"
    given.results.mkdir(parents=True, exist_ok=True)
    if not given.page_only:
        done = results_of(file)
        only = given.only.split(",") if given.only else None
        wanted = [
            entry
            for each in listed.values()
            for entry in each[: given.first]
            if (only is None or entry.name in only)
            and (
                entry.key not in done
                or not done[entry.key].is_done(given.until)
                or given.again
                and done[entry.key].cause
            )
        ]
        command = f"python -m benchmarks.zoo --library {given.library}"
        command += f" --until {given.until}" if given.until != STAGES[-1] else ""
        command += "".join(f" --{name} ..." for name in ("only", "first") if getattr(given, name))
        Runner(file, given.jobs, given.time_limit, int(given.memory_limit * 2**30), given.until, command).run(wanted)
    found = list(results_of(file).values())
    given.out.write_text(page(found, sum(map(len, listed.values())), given.time_limit), encoding="utf-8")


if __name__ == "__main__":
    main()
