"""What the program counts, of memory and of computing again, against the generated steps on the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.cost_model.node_cost import node_seconds
from shardweave.ir import RECOMPUTE_MODES, Grid, Strategy
from shardweave.planner.problem.build_problem import ProblemBuilder
from shardweave.planner.problem.space import Space
from shardweave.planner.problem.step_choices import with_modes
from shardweave.planner.problem.variables import Costed
from shardweave.planner.search.setting_search import Evaluated, SettingSearch
from shardweave.planner.search.solver_cache import UNLIMITED
from shardweave.planner.solver.solver import Solution
from shardweave.sharding.annotate import layer_of
from shardweave.sharding.graphs import info
from tests.compiler.training import ALL_CASES
from tests.models.large import LARGE
from tests.planner.planners import MetaGPT
from tests.planner.test_brute_force import PLAIN, Small

PCIE = sw.Cluster.preset("rtx3090-pcie", nodes=2)
MODELS = [*LARGE] if ALL_CASES else ["bert (large)", "llama (3-8B)"]


def figures_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the program counts and what the simulator finds, of each plan that is simulated under a limit from now on.

    Without one the order of a step is chosen for its time alone, whatever that holds.
    """
    figures: list[tuple[int, int]] = []
    simulated = SettingSearch._simulated

    def seen(self: SettingSearch, costed: Costed, solution: Solution, limit: int) -> Evaluated:
        found = simulated(self, costed, solution, limit)
        if limit < UNLIMITED:
            figures.append((costed.problem.memory(solution.choice), found.evaluation.peak_memory))
        return found

    monkeypatch.setattr(SettingSearch, "_simulated", seen)
    return figures


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["dp", "zero3"])
def test_the_memory_that_is_counted_is_about_what_is_simulated(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any number of micro-batches: what is returned is of all of them, what is saved is not.

    Of ops that gather, the program thinks that the largest does so while most is held.
    """
    figures = figures_of(monkeypatch)
    model, inputs = LARGE[name]()
    inputs = {key: torch.zeros(64, *value.shape[1:], dtype=value.dtype, device="meta") for key, value in inputs.items()}
    compiler = Compiler(model, PCIE, inputs, None, None)
    plain = {"force": {"*": form}, "recompute": "none", "sub_batches": 1, "buckets": False, "memory_limit": 10**13}
    for count in (1, 2, 4):
        compiler.with_(PCIE, sw.Options(micro_batches=count, **plain)).plan()
    assert len(figures) >= 3
    for counted, simulated in figures:
        assert 0.97 <= counted / simulated <= (1.05 if form == "dp" else 1.3), figures


@pytest.mark.parametrize("count", [1, 2])
def test_layers_that_are_computed_again_are_counted_where_products_are_tensor_parallel(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs that are gathered for a layer are among what it keeps, in any number of micro-batches.

    They were not counted in several; of a vocabulary in parts the loss was counted twice.
    """
    figures = figures_of(monkeypatch)
    model, inputs = LARGE["llama (3-8B)"]()
    inputs = {key: torch.zeros(64, *value.shape[1:], dtype=value.dtype, device="meta") for key, value in inputs.items()}
    compiler = Compiler(model, sw.Cluster.preset("dgx-h100", nodes=2), inputs, None, None)
    forms = {"*_proj": "tensor:4", "lm_head": "tensor:4"}
    options = sw.Options(force=forms, micro_batches=count, sub_batches=1, buckets=False, memory_limit=10**13)
    whole = compiler.with_(options=options).plan()
    figures.clear()
    limit = int(0.9 * whole.peak_memory)
    plan = compiler.with_(options=replace(options, memory_limit=limit)).plan()
    assert plan.overlap.recompute and len(figures) > 1
    for counted, simulated in figures:
        assert 0.97 <= counted / simulated <= 1.1, figures


def test_what_runs_again_is_what_the_backward_needs() -> None:
    """A layer's last product is not among it: nobody reads its result but by the sum that is kept."""
    model, inputs = MetaGPT(sw.demo.model.GPTConfig(layers=3, width=256, heads=4, context=128), 16).build()
    cluster = sw.Cluster.preset("dgx-a100", nodes=1)
    options = sw.Options(
        force={"*": "zero3"}, recompute="full", micro_batches=1, sub_batches=1, buckets=False, memory_limit=10**12
    )
    compiler = Compiler(model, cluster, inputs, options, None)
    step = compiler.lower(compiler.plan()).step
    layer = "blocks.1"
    again = [node for node in step.backward.graph.nodes if node.op == "call_function" and info(node).recomputed]
    products = {info(node).op for node in again if "mm" in str(node.target) and layer_of(info(node).op) == layer}
    seconds = sum(node_seconds(node, cluster) for node in again if layer_of(info(node).op) == layer)
    builder = ProblemBuilder(Space(compiler.annotated, cluster, replace(options, recompute=None)))
    problem = with_modes(builder, builder.build()).problem
    mode = next(index for index, op in enumerate(problem.ops) if op.name == f"{layer}:recompute")
    # Of ops that are data parallel: in the port that the plan has
    known = {name: choice.strategy for name, choice in compiler.plan().choices.items()}
    picked = [next((at for at, each in enumerate(op.candidates) if each.data == known.get(op.name)), 0)
              for op in problem.ops]  # fmt: skip
    loads = []
    for port in (RECOMPUTE_MODES.index("none"), RECOMPUTE_MODES.index("full")):
        choice = [port if index == mode else own for index, own in enumerate(picked)]
        loads.append(problem.load_ticks(choice)[len(problem.windows[0])] / 2**40)
    assert loads[1] - loads[0] == pytest.approx(seconds, rel=0.05)
    assert products == {f"{layer}.{name}" for name in ("attention.qkv", "attention.out", "up")}


TENSOR = {"0": Strategy(Grid(x=4)), "2": Strategy(Grid(y=4))}
SMALL = [Small("rtx3090-nvlink", 512, 4096, 2048, 128), Small("rtx3090-pcie", 2048, 4096, 8192, 2048)]


@pytest.mark.parametrize("small", SMALL, ids=str)
def test_where_the_optimizer_steps_there_are_inputs_outputs_gradients_and_what_it_takes(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ops that save little the peak is there: it was counted as if inputs were gone, and every parameter at once."""
    figures = figures_of(monkeypatch)
    small.compiler(**PLAIN, force=TENSOR, micro_batches=1, memory_limit=10**12).plan()
    assert figures
    for counted, simulated in figures:
        assert counted == pytest.approx(simulated, rel=0.005)
