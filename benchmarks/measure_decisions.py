"""What the planner decides beside what the papers decided: ``python -m benchmarks.measure_decisions FOLDER amsp``.

Prints the Markdown tables of docs/validation.md, section Decisions: AMSP's factors, AxoNN's ranking of grids, Oases'
degrees of each layer. Half an hour for AMSP, ten minutes for AxoNN, five for Oases.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

from shardweave.cost_model import Cluster
from shardweave.demo.model import GPTConfig
from shardweave.ir import Grid, Strategy
from shardweave.ir.errors import InfeasibleError, PlanError
from shardweave.planner.search.plan import Plan
from shardweave.validation import Setting, amsp, axonn, load, oases
from shardweave.validation.axonn import Bandwidths, ranking
from shardweave.validation.rows import Paper, table
from shardweave.validation.setting import captured

SHOWN = 5
"""Of a ranking the first ones."""


@dataclass(frozen=True)
class Ranked:
    """Forced plans of one model, the fastest first.

    Parameters
    ----------
    plans : sequence of (name, Plan)
        By step time, simulated.
    missing : sequence of str
        The names of those that do not fit or cannot be built.
    """

    plans: Sequence[tuple[str, Plan]]
    missing: Sequence[str]

    @classmethod
    def of(cls, names: Sequence[str], planned: Callable[[str], Plan]) -> Ranked:
        plans, missing = [], []
        for name in names:
            try:
                plans.append((name, planned(name)))
            except (InfeasibleError, PlanError):
                missing.append(name)
        return cls(sorted(plans, key=lambda each: each[1].step_time), missing)

    def place(self, name: str) -> int | None:
        """From 1 on; None of one without a plan."""
        return next((place for place, (other, _) in enumerate(self.plans, 1) if other == name), None)

    def slower(self, name: str) -> float:
        """How much longer a step takes than that of the fastest."""
        return dict(self.plans)[name].step_time / self.plans[0][1].step_time - 1


# -- AMSP


def factors(gpus: int, micro_batches: int) -> dict[str, Strategy]:
    """AMSP's space: parameters, gradients and states over one device, a node, 2, 4, ... nodes, of rising size.

    Of one micro-batch gradients are summed where parameters rest.

    >>> list(factors(16, micro_batches=1))
    ['1, 1, 1', '1, 1, 8', '1, 1, 16', '8, 8, 8', '8, 8, 16', '16, 16, 16']
    >>> len(factors(16, micro_batches=2))
    10
    """
    node = amsp.GPUS_PER_NODE
    sizes = [1, *(node * 2**exponent for exponent in range((gpus // node).bit_length()))]
    found = {}
    for rest, gradients, states in combinations_with_replacement(sizes, 3):
        if micro_batches > 1 or gradients == rest:
            strategy = Strategy(Grid(data=gpus), rest, states=states, gradients=gradients)
            found[f"{rest}, {gradients}, {states}"] = strategy
    return found


def ranked_factors(setting: Setting, model: str, gpus: int, **asked: Any) -> Ranked:
    """Every one of AMSP's factors as the forced plan of a whole model, in the paper's batch."""
    count = amsp.BATCH_SEQUENCES // gpus
    space = factors(gpus, count)
    return Ranked.of(list(space), lambda name: amsp.plan(setting, model, gpus, space[name], count, **asked))


def free_factors(setting: Setting, model: str, gpus: int, **asked: Any) -> Plan:
    """The planner's own choice among AMSP's factors, for each op by itself."""
    count = amsp.BATCH_SEQUENCES // gpus
    compiler = captured(amsp.MODELS[model], amsp.BATCH_SEQUENCES, amsp.SEQUENCE, amsp.PRECISION)
    cluster = setting.cluster("amsp").fitted(amsp.GPUS_PER_NODE, gpus // amsp.GPUS_PER_NODE)
    every = tuple(factors(gpus, count).values())
    return setting.plan(compiler, cluster, force={"*": every}, micro_batches=count, sub_batches=1, **asked)


def amsp_tables(paper: Paper) -> Iterator[str]:
    """For each model and number of GPUs the first factors, the published ones, and what the planner mixes.

    Sums are those of AMSP's engine, and a tenth of the memory is left alone, as by default.
    """
    stated = {(row["model"], row["approach"]): row for row in table(paper, "amsp", "strategies_table4")}
    yield "| model, GPUs | not overlapped | place | factors p, g, os | a step | longer | memory |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for model, recompute in (("LLaMA-7B", "none"), ("LLaMA-30B", "full")):
        for gpus in (64, 1024):
            published = amsp.strategy(stated, model, "AMSP", gpus)
            for level in ("L3", "L2"):
                asked = {"recompute": recompute, "ablation": amsp.ABLATIONS[level], "memory_limit": None}
                said = f"{model}, {gpus} | {level}"
                ranked = ranked_factors(Setting(), model, gpus, **asked)
                for place, (name, plan) in enumerate(ranked.plans, 1):
                    mine = factors(gpus, amsp.BATCH_SEQUENCES // gpus)[name] == published
                    if place <= SHOWN or mine:
                        marked = f"**{name}**" if mine else name
                        longer = f"{100 * ranked.slower(name):.1f} %"
                        yield f"| {said} | {place} | {marked} | {plan.step_time:.3f} s | {longer} | {_gb(plan)} |"
                free = free_factors(Setting(), model, gpus, **asked)
                kinds = Counter(f"{each.rest}, {each.gradients}, {each.states}" for each in _strategies(free))
                mixed = f"by op, most often {kinds.most_common(1)[0][0]}"
                longer = f"{100 * (free.step_time / ranked.plans[0][1].step_time - 1):.1f} %"
                yield f"| {said} | planner | {mixed} | {free.step_time:.3f} s | {longer} | {_gb(free)} |"


def _strategies(plan: Plan) -> list[Strategy]:
    return [choice.strategy for choice in plan.choices.values()]


def _gb(plan: Plan) -> str:
    return f"{plan.peak_memory / 1e9:.1f} GB"


# -- AxoNN


def flat(cluster: Cluster) -> Cluster:
    """The same machine without placement: inside a node all links are as those between nodes."""
    node = cluster.levels[-1]
    return replace(cluster, levels=tuple(replace(node, name=each.name, size=each.size) for each in cluster.levels))


MODEL, GPUS, DEGREE = GPTConfig(axonn.VOCABULARY, axonn.SEQUENCE, 32, 56, 7168, bias=True), 32, 16
"""GPT-20B, whose layers the authors' program spreads over at least 16 GPUs."""


def axonn_tables(paper: Paper) -> Iterator[str]:
    """Of the fastest grids their places in each ranking, among those that can be built."""
    bandwidths = paper["code_comm_model"]["perlmutter_bw_GiBps"]
    machine = Setting().cluster("axonn").fitted(axonn.GPUS_PER_NODE, GPUS // axonn.GPUS_PER_NODE)
    yield "| sequences | grid (x, y, z, data) | a step | exposed | with placement | authors' table | without |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for batch in (32, 64):
        ranked, rankings = ranked_grids(Setting(), machine, MODEL, batch, DEGREE, bandwidths)
        for name, plan in ranked.plans[:SHOWN]:
            places = " | ".join(str(each.index(name) + 1) for each in rankings)
            yield f"| {batch} | {name} | {plan.step_time:.3f} s | {plan.exposed_communication:.3f} s | {places} |"
        found = " | ".join(str(in_first(ranked, each)) for each in rankings)
        yield f"| {batch} | of these {SHOWN} among the first {SHOWN} | | | {found} |"


def ranked_grids(
    setting: Setting, machine: Cluster, model: GPTConfig, batch: int, degree: int, bandwidths: Bandwidths
) -> tuple[Ranked, list[list[str]]]:
    """All grids as simulated; and those that can be built by what they move: with placement, by a table, without."""
    grids = {str(grid): grid for grid in ranking(machine, model, batch, degree)}
    without = [str(grid) for grid in ranking(flat(machine), model, batch, degree)]
    theirs = [str(grid) for grid in ranking(machine, model, batch, degree, bandwidths)]
    ranked = Ranked.of(list(grids), lambda name: grid_plan(setting, model, machine.world_size, batch, grids[name]))
    return ranked, [[name for name in each if ranked.place(name)] for each in (list(grids), theirs, without)]


def grid_plan(setting: Setting, model: GPTConfig, gpus: int, batch: int, grid: Grid) -> Plan:
    """All layers on one grid, columns and rows in turn."""
    force = {"*": f"tensor:{grid.x}x{grid.y}x{grid.z}"}
    return axonn.plan(setting, model, gpus, batch, force=force, micro_batches=1)


def in_first(ranked: Ranked, names: Sequence[str], count: int = SHOWN) -> int:
    """How many of the fastest are among the first of another ranking."""
    return len({name for name, _ in ranked.plans[:count]} & set(names[:count]))


# -- Oases

MIXED = ((2, 8), (4, 16))
"""What Oases' planner chose for hidden 2048 on both clusters (Table 6)."""


def oases_tables(paper: Paper) -> Iterator[str]:
    """Uniform degrees, the published mixed ones, and the planner's own, with and without data parallelism's sums."""
    model = next(row for row in table(paper, "oases", "models_table4") if row["hidden"] == 2048)
    yield "| cluster | data parallelism | degrees | k tokens/s | memory |\n| --- | --- | --- | --- | --- |"
    for cluster in ("oases-nvlink", "oases-pcie"):
        for every in (False, True):
            for name, plan in degrees(Setting(), cluster, model, every).plans:
                kts = model["global_batch"] * oases.SEQUENCE / plan.timeline(sums=every).step_time / 1e3
                yield f"| {cluster} | {'timed' if every else 'not'} | {name} | {kts:.1f} | {_gb(plan)} |"


def degrees(setting: Setting, cluster: str, model: Mapping[str, Any], data_parallel: bool) -> Ranked:
    """One degree in all layers, the published ones, and the planner's choice among 2, 4 (and 8, of all 32 GPUs)."""
    layers, overlap = model["layers"], oases.COLUMNS["planner"]
    among = [degree for degree in (2, 4, 8) if data_parallel or degree <= model["tmp"]]
    asked: dict[str, oases.Degrees] = {f"all {degree}": [(degree, layers)] for degree in among}
    asked |= {"published": MIXED, "planner": [(model["tmp"], layers)]}

    def planned(name: str) -> Plan:
        force = {"force": {"*": [f"tensor:{degree}" for degree in among]}} if name == "planner" else {}
        return oases.plan(setting, cluster, model, asked[name], {**overlap, **force}, data_parallel=data_parallel)

    return Ranked.of(list(asked), planned)


TABLES: Mapping[str, Callable[[Paper], Iterator[str]]] = {
    "amsp": amsp_tables,
    "axonn": axonn_tables,
    "oases": oases_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("paper", choices=sorted(TABLES))
    arguments = parser.parse_args()
    for line in TABLES[arguments.paper](load(arguments.folder)[arguments.paper]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
