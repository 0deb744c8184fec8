"""Plans as tables: one plan op by op, and the difference of two.

Equal layers are folded into one row, ``blocks.*.qkv ×12``. A `Report` prints itself in a terminal (by rich, if given to
a rich console), in a notebook, and as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from shardweave.compiler.op_choice import OpChoice, RunnerUp
from shardweave.compiler.plan import Plan, Saving
from shardweave.ir import Strategy
from shardweave.report.report import Report
from shardweave.units import readable_bytes, readable_ranges, readable_seconds


def explain(plan: Plan) -> Report:
    """`plan` op by op: its strategy, time, communication, memory, and why not the runner-up.

    Time, communication and memory of a folded row are those of all its layers together.
    """
    folded = fold(plan.choices, lambda name: _choice_key(plan.choices[name]))
    rows = []
    for label, names in folded:
        own = [plan.choices[name] for name in names]
        strategy = own[0].strategy
        rows.append(
            (
                label,
                _grid(strategy),
                _rest(strategy),
                readable_seconds(sum(choice.seconds for choice in own)),
                readable_seconds(sum(choice.communication_seconds for choice in own)),
                readable_bytes(sum(choice.state_bytes for choice in own)),
                readable_bytes(sum(choice.saved_bytes for choice in own)),
                _why_not(strategy, own[0].runner_up),
            )
        )
    choices = list(plan.choices.values())
    total = (
        f"{len(choices)} ops",
        "",
        "",
        readable_seconds(sum(choice.seconds for choice in choices)),
        readable_seconds(sum(choice.communication_seconds for choice in choices)),
        readable_bytes(sum(choice.state_bytes for choice in choices)),
        readable_bytes(sum(choice.saved_bytes for choice in choices)),
        "",
    )
    columns = ("op", "x, y, z, data", "at rest", "time ", "comm. ", "states ", "saved ", "runner-up")
    return Report(_summary(plan), columns, tuple(rows), total)


def diff(plan: Plan, other: Plan) -> Report:
    """Where `plan` and `other` take different strategies, and what `plan` costs more (or, negative, less)."""
    names = [*plan.choices, *(name for name in other.choices if name not in plan.choices)]

    def strategies(name: str) -> tuple[str, str]:
        here, there = plan.choices.get(name), other.choices.get(name)
        return (str(here.strategy) if here else "no such op"), (str(there.strategy) if there else "no such op")

    differing = [name for name in names if strategies(name)[0] != strategies(name)[1]]
    rows = []
    for label, own in fold(differing, lambda name: (strategies(name), _figures(plan, name), _figures(other, name))):
        here, there = strategies(own[0])
        time, memory = (sum(_figures(plan, name)[i] - _figures(other, name)[i] for name in own) for i in (0, 1))
        rows.append((label, here, there, _signed(time, readable_seconds), _signed(memory, readable_bytes)))
    lines = [
        f"{len(differing)} of {len(names)} ops differ" if differing else f"all {len(names)} ops have the same strategy",
        "step time " + _both(plan.step_time, other.step_time, readable_seconds),
        "peak memory " + _both(plan.peak_memory, other.peak_memory, readable_bytes),
        "exposed communication " + _both(plan.exposed_communication, other.exposed_communication, readable_seconds),
    ]
    here, there = (str(key.precision or "the model's") for key in (plan.model_key, other.model_key))
    if here != there:
        lines.append(f"precision {here}; the other {there}")
    if plan.cluster != other.cluster:
        lines.append(f"made for {_cluster(plan)}, the other for {_cluster(other)}")
    return Report(tuple(lines), ("op", "this plan", "the other", "time ", "memory "), tuple(rows))


def fold(names: Iterable[str], key: Callable[[str], object]) -> list[tuple[str, list[str]]]:
    """Names that differ in one layer number only and have equal keys, as one label with all of them.

    >>> fold(["emb", "blocks.0.qkv", "blocks.1.qkv", "blocks.2.qkv"], key=lambda name: name != "blocks.2.qkv")
    [('emb', ['emb']), ('blocks.0-1.qkv ×2', ['blocks.0.qkv', 'blocks.1.qkv']), ('blocks.2.qkv', ['blocks.2.qkv'])]
    >>> [label for label, _ in fold(["h.0.up", "h.0.down", "h.1.up", "h.1.down"], key=lambda name: "")]
    ['h.*.up ×2', 'h.*.down ×2']
    """
    groups: dict[tuple[str, object], list[str]] = {}
    sizes: dict[str, int] = {}
    for name in names:
        pattern = _NUMBER.sub("*", name)
        groups.setdefault((pattern, key(name)), []).append(name)
        sizes[pattern] = sizes.get(pattern, 0) + 1
    folded = []
    for (pattern, _), own in groups.items():
        if len(own) == 1:
            folded.append((own[0], own))
        elif len(own) == sizes[pattern] or pattern.count("*") > 1:
            folded.append((f"{pattern} ×{len(own)}", own))
        else:
            numbers = [int(match.group()) for name in own if (match := _NUMBER.search(name))]
            folded.append((f"{pattern.replace('*', readable_ranges(numbers))} ×{len(own)}", own))
    return folded


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _choice_key(choice: OpChoice) -> tuple[object, ...]:
    """Equal where two ops' rows would read the same."""
    return (
        str(choice.strategy),
        readable_seconds(choice.seconds),
        readable_seconds(choice.communication_seconds),
        choice.state_bytes,
        choice.saved_bytes,
        choice.transient_bytes,
        _why_not(choice.strategy, choice.runner_up),
    )


def _figures(plan: Plan, name: str) -> tuple[float, int]:
    choice = plan.choices.get(name)
    return (choice.seconds, choice.memory) if choice else (0.0, 0)


def _grid(strategy: Strategy) -> str:
    both = strategy.grid.x > 1 and strategy.grid.y > 1
    slices = f" in {strategy.slices} slices" if strategy.slices > 1 else ""
    return f"{strategy.grid}{' y inside' if strategy.y_inside and both else ''}{slices}"


def _rest(strategy: Strategy) -> str:
    """How the states rest over the devices that hold the same part of the parameter: whole, sharded, or between."""
    free = strategy.grid.z * strategy.grid.data
    if free == 1:
        return "-"
    if strategy.states != strategy.rest:
        zero = {1: "ZeRO-1", free: "ZeRO-2"} if (strategy.rest, strategy.states) == (1, free) else {}
        apart = f", gradients {strategy.gradients}" if strategy.gradients != strategy.states else ""
        return zero.get(strategy.gradients, f"over {strategy.rest}{apart}, states {strategy.states} of {free}")
    return {1: "DP", free: "ZDP"}.get(strategy.rest, f"over {strategy.rest} of {free}")


def _why_not(chosen: Strategy, runner_up: RunnerUp | None) -> str:
    """What another strategy would change, named by what differs: ``DP: −0.30 ms, but 1.2 GiB too large``."""
    if runner_up is None:
        return "-"
    other = runner_up.strategy
    same = (other.grid, other.y_inside, other.slices) == (chosen.grid, chosen.y_inside, chosen.slices)
    size = f", but {readable_bytes(runner_up.missing_bytes)} too large" if runner_up.missing_bytes else ""
    return f"{_rest(other) if same else other}: {_signed(runner_up.seconds, readable_seconds)}{size}"


def _signed(value: float, readable: Callable[[float], str]) -> str:
    """The value with its sign, where it has one that can be seen."""
    return "±0" if not value else f"{'+' if value > 0 else '−'}{readable(abs(value))}"


def _effect(saving: Saving) -> str:
    """What a choice does to the step: ``2 sub-batches −12 ms, +30 MiB``."""
    time, memory = _signed(-saving.seconds, readable_seconds), _signed(-saving.bytes, readable_bytes)
    return f"{saving.choice} {time} a step, {memory}"


def _both(here: float, there: float, readable: Callable[[float], str]) -> str:
    relative = f", {100 * (here / there - 1):+.1f} %" if there else ""
    return f"{readable(here)}, the other {readable(there)} ({_signed(here - there, readable)}{relative})"


def _cluster(plan: Plan) -> str:
    devices = plan.cluster.world_size
    return f"{plan.cluster.name} ({devices} device{'s' * (devices != 1)})"


def _answer(plan: Plan) -> str:
    """What is proven of the program's own answer, where it is another plan."""
    nearer = plan.proven_gap < plan.gap - 5e-6
    return f" (its own answer, slower when simulated, is within {100 * plan.proven_gap:.2g} %)" if nearer else ""


def _summary(plan: Plan) -> tuple[str, ...]:
    rate = f", {plan.tokens_per_second:,.0f} tokens/s" if plan.tokens else ""
    mfu = f", MFU {100 * plan.mfu:.1f} %" if plan.model_flops else ""
    limit = f" of {readable_bytes(plan.memory_limit)}" if plan.memory_limit else ""
    proof = "optimal" if plan.status == "optimal" else f"feasible, at most {100 * plan.gap:.2g} % from the optimum"
    program = f" in the program, which says {readable_seconds(plan.program_time)} a step" if plan.program_time else ""
    lines = [
        f"{_cluster(plan)}: {readable_seconds(plan.step_time)} a step{rate}{mfu}",
        f"compute {readable_seconds(plan.compute_time)}, exposed communication "
        f"{readable_seconds(plan.exposed_communication)}; memory {readable_bytes(plan.peak_memory)}{limit} a device",
        f"{proof}{program}{_answer(plan)}; planned in {readable_seconds(plan.planning_seconds)}",
    ]
    if plan.micro_batches > 1:
        lines.append(f"{plan.micro_batches} micro-batches a call")
    if text := str(plan.weaving):
        lines.append(text)
    if plan.savings:
        lines.append(f"what each is predicted to change: {'; '.join(map(_effect, plan.savings))}")
    if plan.model_key.precision is not None:
        lines.append(f"precision: {plan.model_key.precision}")
    if plan.forced:
        lines.append(f"forced: {', '.join(plan.forced)}")
    others = [choice.runner_up for choice in plan.choices.values() if choice.runner_up is not None]
    if any(other.seconds < 0 and not other.missing_bytes for other in others):
        lines.append("runner-ups that save time do so in the program; the simulator took this plan for the fastest")
    return tuple(lines)
