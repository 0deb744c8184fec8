"""Planning and compiling leave the user's model and the process as they were, at whatever stage they fail."""

from __future__ import annotations

import gc
import importlib
import os
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import preserved
from shardweave.ir.errors import ParallelError
from shardweave.report.progress import Event


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(torch.tanh(self.linear(x)))
        return result


class Model(nn.Module):
    """Has what a capture could leave changed: shared modules, hooks, a forward of its own, attributes, gradients."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([Layer(norm), Layer(norm)])
        self.norm = norm
        self.head = nn.Linear(8, 8)
        self.head.weight.requires_grad_(False)
        self.table = torch.arange(8.0)
        self.seen: list[int] = []
        self.settings = {"scale": 2.0}
        self.layers[1].forward = types.MethodType(lambda layer, x: Layer.forward(layer, x) * 2, self.layers[1])
        self.head.register_forward_hook(lambda module, args, result: result * self.settings["scale"])
        self.register_forward_pre_hook(lambda module, args: None)
        self.layers[0].eval()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = (self.head(torch.dropout(x, 0.1, self.training)) * self.table).pow(2).mean()
        return result


def build() -> Model:
    torch.manual_seed(0)
    model = Model()
    model(torch.ones(4, 8)).backward()
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a user could see of a model and of the process."""
    found: dict[str, Any] = {
        "globals": sorted(globals()),
        "torch's globals": sorted(vars(torch.nn.modules.module)),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "modes": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch._C._len_torch_dispatch_stack(),
            torch._guards.TracingContext.try_get(),
            gc.isenabled(),
        ),
        "config": (torch._dynamo.config.get_config_copy(), torch._functorch.config.get_config_copy()),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "checks": torch.distributions.Distribution._validate_args,
    }
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"class of {path}"] = type(module)
        for name, value in vars(module).items():
            content = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
            found[f"{path}.{name}"] = (id(value), [id(each) for each in content], repr(value))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        found[name] = (type(tensor), tensor.data_ptr(), tensor._version, tensor.requires_grad, tensor.tolist(), grad)
    return found


def assert_preserved(act: Callable[[nn.Module], object]) -> None:
    """`act` fails, and all is as before."""
    model = build()
    before = snapshot(model)
    with pytest.raises(BaseException, match="stopped here"):
        act(model)
    after = snapshot(model)
    assert list(after) == list(before)
    assert [name for name in before if after[name] != before[name]] == []


class Stopped(ParallelError):
    """What the tests raise in the middle of a stage."""


def stop(*_: object, **__: object) -> None:
    raise Stopped("stopped here")


def compiled(model: nn.Module, progress: Callable[[Event], None] | None = None) -> nn.Module:
    options = sw.Options(precision=PRECISION, micro_batches=1)
    return sw.compile_parallel(model, sw.Cluster.local(1), torch.ones(4, 8), options=options, progress=progress)


PRECISION = sw.Precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)

STEPS = [
    "shardweave.compiler.capture.traceable",
    "shardweave.compiler.capture.working_copies",
    "shardweave.compiler.capture._fake_like",
    "shardweave.compiler.joint_graph.cast",
    "torch._dynamo.functional_export.dynamo_graph_capture_for_export",
    "torch._dynamo.functional_export.create_fx_graph_from_captured_output",
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors",
    "torch._functorch.aot_autograd.aot_stage1_graph_capture",
    "torch._functorch._aot_autograd.graph_capture_wrappers.PropagateUnbackedSymInts.run",
    "torch._functorch._aot_autograd.graph_compile.aot_dispatch_autograd_graph",
    "shardweave.compiler.capture._captured_step",
    "shardweave.compiler.capture.take_cast_parameters",
    "shardweave.planner.search.layer_problem.Steps.__init__",
    "shardweave.planner.search.setting_planner.ProblemBuilder",
    "shardweave.planner.search.setting_planner.plan_of",
    "shardweave.planner.search.evaluation.lower",
    "shardweave.passes.pipeline.split",
    "shardweave.compiler.compiler.ParallelModule.__init__",
    "shardweave.runtime.module.compare_graphs",
    "shardweave.runtime.module.RuntimeMesh",
    "shardweave.runtime.module.copy_module_tree",
    "shardweave.runtime.bound_step.Executor",
]
"""What is made to fail, one after another: each is called on the way to a parallel module."""


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_leaves_all_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = name.split(".")
    while True:  # the longest part of the name that is a module
        try:
            target: Any = importlib.import_module(".".join(path))
            break
        except ModuleNotFoundError:
            path.pop()
    *owners, leaf = name.split(".")[len(path) :]
    for owner in owners:
        target = getattr(target, owner)
    monkeypatch.setattr(target, leaf, stop)
    assert_preserved(lambda model: compiled(model))


def test_a_stage_that_is_interrupted_leaves_all_as_it_was() -> None:
    events: list[Event] = []
    compiled(build(), events.append)
    stages = {event.stage for event in events}
    assert {"capture", "annotate", "solve", "shard", "schedule"} <= stages
    for stage in stages:

        def interrupt(reached: Event, stage: str = stage) -> None:
            if reached.stage == stage:
                raise KeyboardInterrupt("stopped here")

        assert_preserved(lambda model, interrupt=interrupt: compiled(model, interrupt))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_op_that_fails_while_it_is_traced_leaves_all_as_it_was(error: type[BaseException]) -> None:
    calls = {"left": 0}

    @torch.library.custom_op("shardweave_tests::stops", mutates_args=())
    def stops(x: Tensor) -> Tensor:
        return x.clone()

    @stops.register_fake
    def _(x: Tensor) -> Tensor:
        calls["left"] -= 1
        if not calls["left"]:
            raise error("stopped here")
        return torch.empty_like(x)

    stops.register_autograd(lambda _, gradient: gradient)

    def act(model: nn.Module, count: int) -> None:
        calls["left"] = count
        model.get_submodule("head").register_forward_hook(lambda module, args, result: stops(result))
        before = snapshot(model)
        try:
            sw.plan(model, sw.Cluster.local(1), torch.ones(4, 8))
        finally:
            assert snapshot(model) == before
            model.get_submodule("head")._forward_hooks.popitem()

    for count in (1, 2, 3):  # Dynamo's trace, AOTAutograd's first look, its trace of forward and backward
        with pytest.raises(BaseException, match="stopped here"):
            act(build(), count)
        assert calls["left"] == 0


def test_a_forward_that_is_refused_or_that_is_captured_leaves_all_as_it_was() -> None:
    class Branches(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(len(self.seen))
            self.settings["scale"] += 1
            self.added = x
            if x.sum() > 0:
                raise ValueError
            return super().forward(x)

    torch.manual_seed(0)
    for model, raises in ((Branches(), True), (build(), False)):
        before = snapshot(model)
        if raises:
            with pytest.raises(sw.CaptureError):
                sw.plan(model, sw.Cluster.local(2), torch.ones(4, 8))
        else:
            sw.plan(model, sw.Cluster.local(2), torch.ones(4, 8))
            compiled(model)
        assert snapshot(model) == before


def test_what_is_written_to_a_model_is_taken_back() -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(KeyError), preserved(model):
        model.__class__ = type("Other", (Model,), {})
        model.settings["scale"] = 3.0
        model.seen.append(2)
        model.head.weight = nn.Parameter(torch.ones(8, 8))
        model.norm._buffers["running_mean"] = torch.ones(8)
        model.layers[0].linear.weight.requires_grad_(False)
        model.layers[0].linear.weight.grad = None
        model.layers[0].train()
        model.head.register_forward_hook(lambda *_: None)
        model.extra, model.forward = nn.Linear(1, 1), lambda x: x
        torch.set_default_dtype(torch.float64)
        torch.rand(1)
        raise KeyError
    assert snapshot(model) == before
