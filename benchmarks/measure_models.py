"""Measure every model of the zoo and write docs/models.md: ``make models``.

python -m benchmarks.measure_models                         all of them, into docs/models.md
python -m benchmarks.measure_models gpt2 t5 --replicated    these ones, printed, with the ops that devices do alike
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model import flops_by_op
from shardweave.ir import Mesh, Strategy
from shardweave.passes.step_boundary import Annotated
from shardweave.planner.problem.space import legal
from tests.models import TODAY
from tests.models.large import LARGE, LAYERS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SLOWER = 10_000


@dataclass(frozen=True)
class Setting:
    """A machine to plan for; `tensor`: as tensor-parallel as it can be."""

    name: str
    cluster: sw.Cluster
    tensor: bool = False


def local(devices: int, slower: int = 1) -> sw.Cluster:
    """CPU ranks, with as much arithmetic a second, or so many times less: then FLOPs are all that counts."""
    cluster = sw.Cluster.local(devices)
    flops = {dtype: peak / slower for dtype, peak in cluster.device.flops.items()}
    return replace(cluster, device=replace(cluster.device, flops=flops))


def dgx(devices: int) -> sw.Cluster:
    """So many GPUs of one node."""
    return sw.Cluster.preset("dgx-a100", nodes=1).resized(gpu=devices)


SMALL = (
    *(Setting(f"plan, {n}", local(n)) for n in (4, 8)),
    *(Setting(f"slow devices, {n}", local(n, SLOWER)) for n in (4, 8)),
    *(Setting(f"tensor, {n}", local(n, SLOWER), tensor=True) for n in (4, 8)),
)
GPUS = (
    *(Setting(f"plan, {n}", dgx(n)) for n in (4, 8)),
    *(Setting(f"tensor, {n}", dgx(n), tensor=True) for n in (4, 8)),
)


def sharded_share(whole: Counter[tuple[str, bool]], local: Counter[tuple[str, bool]], devices: int) -> float:
    """FLOPs of the step on one device, divided by those of all devices: 1 if no FLOP is repeated.

    It is not capped. A value above 1 means that the sharded step does less than the whole one, so one of the counts is
    wrong.

    Examples
    --------
    >>> sharded_share(Counter({("up", False): 100}), Counter({("up", False): 50}), devices=4)
    0.5
    """
    together = devices * local.total()
    return whole.total() / together if together else 1.0


def replicated_ops(
    whole: Counter[tuple[str, bool]], local: Counter[tuple[str, bool]], devices: int
) -> list[tuple[tuple[str, bool], float]]:
    """The ops that several devices repeat, largest first, each with the repeated part of all devices' FLOPs.

    Examples
    --------
    >>> whole = Counter({("up", False): 100, ("down", False): 100})
    >>> replicated_ops(whole, Counter({("up", False): 25, ("down", False): 50}), devices=4)
    [(('down', False), 0.3333333333333333)]
    """
    together = devices * local.total()
    excess = {op: (devices * count - whole[op]) / together for op, count in local.items()}
    return sorted(((op, part) for op, part in excess.items() if part > 0), key=lambda item: -item[1])


class Measured(Compiler):
    """A model captured once and planned for several machines, by the planner or as tensor-parallel as it can be."""

    tensor = False

    @classmethod
    def of(cls, model: nn.Module, inputs: dict[str, Tensor], cluster: sw.Cluster) -> Measured:
        return cls(model, cluster, inputs, None, None)

    def _forced(self, annotated: Annotated, mesh: Mesh) -> dict[str, list[Strategy]]:
        return {op.name: most_tensor(legal(op, mesh)) for op in annotated.ops} if self.tensor else {}

    def shared(self, plan: sw.Plan) -> Share:
        """What is sharded under a plan."""
        step, devices = self.lower(plan).step, self.cluster.world_size
        whole = flops_by_op(self.annotated.captured.graph.graph)
        assert step.backward is not None  # measured models have a loss
        local = flops_by_op((step.forward.graph, step.backward.graph))
        alike: dict[str, float] = defaultdict(float)
        for (name, _), part in replicated_ops(whole, local, devices):
            alike[name] += part
        return Share(plan, sharded_share(whole, local, devices), dict(sorted(alike.items(), key=lambda each: -each[1])))


@dataclass(frozen=True)
class Share:
    """A plan, its share of FLOPs that is sharded, and by module the part of all FLOPs that devices do alike."""

    plan: sw.Plan
    share: float
    alike: dict[str, float]


@dataclass
class Row:
    """What is known of one model; the planning seconds and the grids are those of the setting ``"plan, 8"``."""

    name: str
    parameters: int
    ops: int
    distinct: int
    capture: float
    planning: float = 0.0
    shares: dict[str, Share] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def most_tensor(options: list[Strategy]) -> list[Strategy]:
    """The strategies with the most devices on the op's own loops; the planner is left to choose among them.

    >>> from shardweave import Grid, Strategy
    >>> [str(found.grid) for found in most_tensor([Strategy(Grid(1, 1, 1, 4)), Strategy(Grid(2, 2, 1, 1))])]
    ['(2, 2, 1, 1)']
    """
    most = max((option.degree for option in options), default=0)
    return [option for option in options if option.degree == most]


def measure(name: str, build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], settings: tuple[Setting, ...]) -> Row:
    """Capture, plan in each setting, and count."""
    model, inputs = build()
    begun = time.process_time()
    compiler = Measured.of(model, inputs, settings[0].cluster)
    seconds = time.process_time() - begun
    ops = [node for node in compiler.captured.graph.graph.nodes if node.op == "call_function"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    row = Row(name, parameters, len(ops), len({node.target for node in ops}), seconds)
    for setting in settings:
        compiler.cluster, compiler.tensor = setting.cluster, setting.tensor
        begun = time.process_time()
        try:
            plan = compiler.plan()
        except sw.ParallelError as error:
            row.errors[setting.name] = f"{type(error).__name__}: {error}"
            continue
        if setting.name == "plan, 8":
            row.planning = time.process_time() - begun
        row.shares[setting.name] = compiler.shared(plan)
    return row


def mix(plan: sw.Plan) -> str:
    """The grids of a plan, the most frequent first."""
    counts = Counter(choice.strategy.grid for choice in plan.choices.values())
    return ", ".join(f"{count} × {grid}" for grid, count in counts.most_common())


def percent(share: float) -> str:
    """Rounded down, so that nothing less than all is called 100 %.

    >>> percent(0.99996), percent(1.0), percent(1 / 3)
    ('99.9 %', '100 %', '33.3 %')
    """
    return "100 %" if share == 1 else f"{int(share * 1000) / 10:.1f} %"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(rows: list[Row]) -> str:
    """The models, what they cost to capture and to plan, and the planner's choice."""
    head = ("model", "parameters", "ops", "kinds", "capture, s", "plan, s", "grids on 8 devices: (x, y, z, data)")
    cells = []
    for row in rows:
        chosen = row.shares.get("plan, 8")
        planned = (f"{row.planning:.1f}", mix(chosen.plan)) if chosen else ("", "no plan")
        cells.append((row.name, f"{row.parameters:,}", str(row.ops), str(row.distinct), f"{row.capture:.1f}", *planned))
    return table(head, cells)


def shares(rows: list[Row], settings: tuple[Setting, ...]) -> str:
    """How much of each model is sharded, and what is not in the last setting."""
    names = [setting.name for setting in settings]
    cells = [
        (
            row.name,
            *(percent(row.shares[name].share) if name in row.shares else "no plan" for name in names),
            ", ".join(f"{name} {100 * part:.1f} %" for name, part in _largest(row.shares[names[-1]])) or "nothing"
            if names[-1] in row.shares
            else "no plan",
        )
        for row in rows
    ]
    enough = [str(sum(name in row.shares and row.shares[name].share >= 0.99 for row in rows)) for name in names]
    cells.append((f"at least 99 %, of {len(rows)}", *enough, ""))
    found = table(("model", *names, f"replicated under “{names[-1]}”"), cells)
    errors = [f"{row.name}: {next(iter(row.errors.values()))}" for row in rows if row.errors]
    return "\n\n".join([found, *errors])


def _largest(share: Share, count: int = 3) -> list[tuple[str, float]]:
    return [(name, part) for name, part in share.alike.items() if part >= 0.001][:count]


TEXT = """# Models

See how long capture and planning take for a model like yours, and how much of its compute is sharded. `make models`
(`benchmarks/measure_models.py`) made this page on 2 CPU cores with torch {torch}. Seconds are CPU seconds of that
machine; no test checks them.

| column | meaning |
| --- | --- |
| ops | nodes of the captured joint graph, forward and backward, after `annotate` |
| kinds | different ops among them |
| plan, slow devices, tensor | sharded FLOPs, of a plan that the text above the table describes |
| replicated | the modules whose FLOPs are computed on several devices, and their part of the FLOPs |

*Sharded FLOPs* are the FLOPs of the step on one device, divided by the sum over all devices: 100 % if no two devices
compute the same. Matmuls, convolutions and attention count (`shardweave/cost_model/node_cost.py`).

## In the sizes that people train

{layers} layers of each (`tests/models/large.py`), in bfloat16, planned on the meta device for 4 and 8 GPUs of
`Cluster.preset("dgx-a100")`:

{large}

Sharded FLOPs of the planner's choice (*plan*), and of the fastest plan in which every op has as many devices on its own
loops as possible (*tensor*). In the second plan, no data parallelism hides the dimensions that rules block.

{large_shares}

## In the sizes that the tests train

The models are `TODAY` of `tests/models`, with their batch of 8. *Plan* is planning for 8 devices of `Cluster.local`.

{facts}

Sharded FLOPs on 4 and 8 devices:

- *plan* is the planner's choice for `Cluster.local`;
- *slow devices* is its choice for the same machine with {slower:,} times fewer FLOPs a second, so that FLOPs dominate;
- *tensor* is the fastest plan on slow devices in which every op has as many devices on its own loops as possible.

{shares}

*Plan* and *slow devices* differ only in the price of a FLOP. If it is high, the planner replicates nothing, so no rule
prevents sharding. These models are so small that kernel launches and latencies cost more than FLOPs. The planner then
lets devices compute the same instead of communicating: on 8 devices *plan* is far below 99 % for most of these models.

Where *tensor* is below 100 %, the cause is attention, which takes the layout of its inputs. They are replicated over
the devices that have no head left (4 heads on 8 devices, 25 on 4), and over those that the op before summed over (y).
"""


def page(rows: list[Row], large: list[Row]) -> str:
    """The whole of docs/models.md."""
    return TEXT.format(
        torch=torch.__version__.split("+")[0],
        facts=facts(rows),
        shares=shares(rows, SMALL),
        slower=SLOWER,
        layers=LAYERS,
        large=facts(large),
        large_shares=shares(large, GPUS),
    )


def small(name: str) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    """How a model of the zoo is made."""
    return lambda: (TODAY[name].model(), TODAY[name].batch(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="these ones only, printed: " + ", ".join((*TODAY, *LARGE)))
    parser.add_argument("--replicated", action="store_true", help="list the ops that devices do alike")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    measure("classic", small("classic"), SMALL[:1])  # imports and caches are no part of what is measured

    def measured(names: list[str]) -> list[Row]:
        found = []
        for name in names:
            large = name in LARGE
            row = measure(name, LARGE[name] if large else small(name), GPUS if large else SMALL)
            print(shares([row], GPUS if large else SMALL).splitlines()[2], flush=True)
            if given.replicated:
                _print_replicated(row)
            found.append(row)
        return found

    if given.models:
        print(facts(measured(given.models)))
    else:
        PAGE.write_text(page(measured(list(TODAY)), measured(list(LARGE))), encoding="utf-8")


def _print_replicated(row: Row) -> None:
    for setting, share in row.shares.items():
        print(f"  {setting}: {percent(share.share)}; {mix(share.plan)}")
        for name, part in list(share.alike.items())[:10]:
            print(f"    {100 * part:5.1f} % {name}")


if __name__ == "__main__":
    main()
