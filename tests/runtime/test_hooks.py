"""Hooks: they run as on one device, or are refused with a way out; none is ignored without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.ir import CaptureError

X = torch.linspace(-1, 1, 24).view(4, 6)
Hooked = Callable[[Any], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return result


class HooksOnItsParameter(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.register_hook(lambda gradient: 2 * gradient)
        return super().forward(x)


class Retains(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.retain_grad()
        result: Tensor = self.down(hidden).square().mean()
        return result


def compiled(model: nn.Module) -> Any:
    return sw.compile_parallel(model, sw.Cluster.local(1), X, progress=False)


def doubled(_: object, gradients: tuple[Tensor | None, ...], *others: object) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else 2 * gradient for gradient in gradients)


def on_a_parameter(model: Any) -> None:
    model.up.weight.register_hook(lambda gradient: 3 * gradient)


def on_an_output(model: Any) -> None:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: 2 * gradient)

    model.up.register_forward_hook(hook)


def on_the_forward(model: Any) -> None:
    model.up.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model.down.register_forward_hook(lambda module, inputs, output: output + 1)


def with_another_layer(model: Any) -> None:
    """Hooks that close over the model, and have it as a default."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * model.down.bias.sum()

    model.up.register_forward_hook(hook)
    model.down.register_forward_pre_hook(lambda module, inputs, own=model: inputs[0] + own.up.weight.mean())
    model.down.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * (1 + model.up.bias.sum()),))


def before_the_backward(model: Any) -> None:
    model.register_full_backward_pre_hook(doubled)


def on_the_backward(model: Any) -> None:
    model.register_full_backward_hook(doubled)


ALL = [on_a_parameter, on_an_output, on_the_forward, with_another_layer, before_the_backward, on_the_backward]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("register", ALL)
def test_hooks_run_as_on_one_device(register: Hooked, late: bool) -> None:
    """Registered before the model is compiled, or on the parallel module."""
    alone, model = Net(), Net()
    register(alone)
    parallel = compiled(model) if late else None
    register(model if parallel is None else parallel)
    parallel = parallel or compiled(model)
    for _ in range(3):
        with torch.no_grad():
            for parameter in (*alone.parameters(), *parallel.parameters()):
                parameter.mul_(0.9)  # no step has its values as constants
        x, mine = X.clone().requires_grad_(), X.clone().requires_grad_()
        alone(x).backward()
        parallel(mine).backward()
        torch.testing.assert_close(mine.grad, x.grad)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad, msg=name)


class Two(nn.Module):
    """Takes something besides a tensor, and returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, power: int) -> tuple[Tensor, Tensor]:
        return self.inner(hidden), hidden**power


class Deep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.two(torch.relu(self.up(x)), 2)
        result: Tensor = self.down(first * second).square().mean() + first.mean()
        return result


def with_its_output(_: object, gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return 0.5 * gradients[0] + outputs[0].sum(-1, keepdim=True), *(None for _ in gradients[1:])


def with_both_outputs(_: object, gradients: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return gradients[0] + outputs[0] * outputs[1], None


def only_seen(_: object, gradients: object, outputs: object = None) -> None:
    pass


BACKWARD_HOOKS: dict[str, list[tuple[str, str, Any]]] = {
    "one": [("down", "register_full_backward_hook", doubled)],
    "with the output": [("down", "register_full_backward_hook", with_its_output)],
    "before": [("up", "register_full_backward_pre_hook", doubled)],
    "without an input that needs a gradient": [("up", "register_full_backward_hook", only_seen)],
    "several": [
        ("down", "register_full_backward_hook", with_its_output),
        ("down", "register_full_backward_hook", only_seen),
        ("down", "register_full_backward_hook", doubled),
        ("down", "register_full_backward_pre_hook", doubled),
    ],
    "two outputs": [("two", "register_full_backward_hook", with_both_outputs)],
    "nested": [
        ("two", "register_full_backward_hook", with_both_outputs),
        ("two.inner", "register_full_backward_hook", doubled),
        ("two.inner", "register_full_backward_pre_hook", doubled),
    ],
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(("name", "late"), [*((each, False) for each in BACKWARD_HOOKS), ("nested", True)])
def test_backward_hooks_of_submodules_run_as_on_one_device(name: str, late: bool) -> None:
    hooks, alone, model = BACKWARD_HOOKS[name], Deep(), Deep()
    parallel = compiled(model) if late else None
    for each in (alone, model if parallel is None else parallel):
        for path, register, hook in hooks:
            getattr(each.get_submodule(path), register)(hook)
    parallel = parallel or compiled(model)
    alone(X).backward()
    parallel(X).backward()
    for parameter_name, parameter in alone.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(parameter_name).grad, parameter.grad, msg=parameter_name)
    for path, register, hook in [] if late else hooks:  # the model keeps them
        kept = "_backward_pre_hooks" if "pre" in register else "_backward_hooks"
        assert hook in getattr(model.get_submodule(path), kept).values()
        assert not model.get_submodule(path)._forward_hooks


def test_what_a_backward_hook_sees_is_not_copied() -> None:
    model = Deep()
    model.down.register_full_backward_hook(with_its_output)
    targets = {node.target for node in capture(model, X).graph.graph.nodes}
    assert torch.ops.aten.mul.Tensor in targets
    assert targets.isdisjoint({torch.ops.aten.copy.default, torch.ops.aten.zeros_like.default})


def test_backward_hooks_that_cannot_be_captured_are_refused() -> None:
    seen: list[Any] = []
    model = Deep()
    model.down.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs))
    with pytest.raises(CaptureError, match=r"in down \(Linear\), a hook on a gradient, or another function"):
        compiled(model)
    model = Deep()
    model.two.register_full_backward_pre_hook(doubled)
    with pytest.raises(CaptureError, match=r"in two \(Two\), its hooks on the backward take several gradients at once"):
        compiled(model)
    model = Deep()
    model.down.register_backward_hook(only_seen)
    with pytest.raises(CaptureError, match=r"hooks of register_backward_hook \(only_seen\)[^$]*by register_full_b"):
        compiled(model)
    assert not seen


def test_hooks_that_a_forward_registers_on_a_parameter_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"calls register_hook of model.up.weight[^$]*Register the hook once"):
        compiled(HooksOnItsParameter())


def test_retain_grad_has_a_way_out() -> None:
    with pytest.raises(CaptureError, match="Pass a tensor of zeros that requires a gradient"):
        compiled(Retains())


def test_hooks_for_all_modules_run_for_the_parallel_module_after_a_warning() -> None:
    called: list[str] = []

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        called.append(type(module).__name__)
        return 2 * output

    expected = Net()(X)
    handle = register_module_forward_hook(hook)
    try:
        parallel = compiled(Net())
        called.clear()
        with pytest.warns(UserWarning, match="for all modules.*runs for the parallel module alone"):
            torch.testing.assert_close(parallel(X), 2 * expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallel(X)
    finally:
        handle.remove()
    assert called == ["ParallelNet", "ParallelNet"]
