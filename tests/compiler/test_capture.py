"""Capture: any call of any module becomes one graph whose inputs and outputs have the model's names."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers.modeling_outputs import CausalLMOutputWithPast

from shardweave.compiler.capture import capture
from shardweave.ir.captured import Captured
from shardweave.ir.errors import CaptureError, InputError
from tests.models import ZOO


def run(captured: Captured, model: nn.Module, inputs: list[Tensor], tangents: list[Tensor]) -> list[Any]:
    """What the captured graph computes for the model's own parameters."""
    values = [model.get_parameter(name).detach() for name in captured.parameters.values()]
    values += [model.get_buffer(name) for name in captured.buffers.values()]
    outputs = captured.graph(*values, *inputs, *tangents)
    return list(outputs)


def assert_computes(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The graph gives the model's outputs, and its gradients for tangents of ones."""
    inputs = captured.call.flatten(args, kwargs)
    expected = model(*args, **kwargs)
    leaves = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, Tensor)]
    tangents = [torch.ones_like(leaves[index]) for index in captured.tangents.values()]
    results = run(captured, model, inputs, tangents)
    first = len(captured.mutated)
    outputs, gradients = results[first : first + len(leaves)], results[first + len(leaves) :]
    made, structure = pytree.tree_flatten(captured.call.unflatten(outputs))
    wanted, wanted_structure = pytree.tree_flatten(expected)
    assert structure == wanted_structure
    for one, other in zip(made, wanted, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other.detach())
        else:
            assert one == other
    model.zero_grad()
    sum(leaves[index].sum() for index in captured.tangents.values()).backward()
    for name, gradient in zip(captured.gradients, gradients, strict=True):
        torch.testing.assert_close(
            gradient, model.get_parameter(name).grad, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", list(ZOO))
def test_the_graph_of_a_zoo_model_has_its_names_and_computes_what_it_does(name: str) -> None:
    case = ZOO[name]
    model, batch = case.model(), case.batch(0)
    captured = capture(model, batch)
    assert list(captured.parameters.values()) == [name for name, _ in model.named_parameters()]
    assert captured.gradients == tuple(captured.parameters.values())
    assert set(captured.buffers.values()) <= {name for name, _ in model.named_buffers()}
    assert set(captured.inputs.values()) == set(batch)
    placeholders = [node.name for node in captured.graph.graph.nodes if node.op == "placeholder"]
    assert placeholders == [*captured.parameters, *captured.buffers, *captured.inputs, *captured.tangents]
    assert_computes(captured, model, (), batch)


def test_tied_parameters_are_one_input_with_both_names_and_the_sum_of_gradients() -> None:
    captured = capture(ZOO["gpt-tied"].model(), ZOO["gpt-tied"].batch(0))
    assert captured.aliases == {"tokens.weight": ("head.weight",)}
    assert "head.weight" not in captured.parameters.values()
    llama = capture(ZOO["llama-tied"].model(), ZOO["llama-tied"].batch(0))
    assert llama.aliases == {"model.embed_tokens.weight": ("lm_head.weight",)}


@pytest.mark.parametrize("name", ["gpt-tied", "llama", "mlp"])
def test_a_module_on_the_meta_device_gives_the_same_graph(name: str) -> None:
    case = ZOO[name]
    with torch.device("meta"):
        model = case.build()
    on_meta = capture(model, {key: value.to("meta") for key, value in case.batch(0).items()})
    mixed = capture(model, case.batch(0))
    plain = capture(case.model(), case.batch(0))
    assert str(on_meta.graph.graph) == str(mixed.graph.graph) == str(plain.graph.graph)
    assert (on_meta.parameters, on_meta.aliases) == (plain.parameters, plain.aliases)
    assert all(parameter.is_meta for parameter in model.parameters())


class Buffers(nn.Module):
    """A constant buffer, one that is not saved, and one that each step changes."""

    mask: Tensor
    scale: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(self.mask)
        result: Tensor = (self.linear(x) * self.mask * self.scale).sum()
        return result


def test_buffers_are_inputs_and_changed_ones_are_outputs() -> None:
    model = Buffers()
    captured = capture(model, torch.randn(8, 4))
    assert set(captured.buffers.values()) == {"mask", "scale", "calls"}
    assert captured.mutated == ("calls",)
    before = model.calls.clone()
    results = run(captured, model, [torch.randn(8, 4)], [torch.ones(())])
    torch.testing.assert_close(results[0], before + model.mask)
    assert torch.equal(model.calls, before)  # a capture and a graph leave the model as it was
    assert_computes(captured, copy.deepcopy(model), (torch.randn(8, 4),), {})


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.trained(self.frozen(x)).sum()
            return result

    captured = capture(Odd(), torch.randn(2, 4))
    assert set(captured.parameters.values()) >= {"frozen.weight", "frozen.bias", "trained.weight", "trained.bias"}
    assert not any(name.startswith("frozen") for name in captured.gradients)
    values = captured.graph.graph.output_node().args[0]
    assert isinstance(values, (list, tuple))
    gradients = dict(zip(captured.gradients, values[len(values) - len(captured.gradients) :]))
    assert all((gradients[name] is None) == name.startswith("unused") for name in gradients)


def test_the_loss_may_be_outside() -> None:
    model = ZOO["mlp"].model()
    x = torch.randn(8, 6)
    captured = capture(model, x)
    assert list(captured.inputs.values()) == ["x"]
    assert list(captured.tangents.values()) == [0]
    assert_computes(captured, model, (x,), {})


class Containers(nn.Module):
    """Takes and returns nested containers, constants among them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, Tensor], pair: tuple[Tensor, Tensor], *rest: Tensor, scale: float = 2.0, **more: Tensor
    ) -> dict[str, Any]:
        y = self.linear(batch["x"]) * scale + pair[0] - pair[1]
        for other in (*rest, *more.values()):
            y = y + other
        return {"loss": F.mse_loss(y, batch["y"]), "all": [y, (y.detach().argmax(-1), None)], "note": "fine"}


def test_calls_and_results_are_nested_as_the_model_has_them() -> None:
    model = Containers()
    a, b = torch.randn(8, 3), torch.randn(8, 3)
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 3)}
    args, kwargs = (batch, (a, b), a), {"scale": 3.0, "extra": b}
    captured = capture(model, (args, kwargs))
    assert set(captured.inputs.values()) == {"batch.x", "batch.y", "pair.0", "pair.1", "rest", "extra"}
    assert_computes(captured, model, args, kwargs)
    returned = model(*args, **kwargs)
    assert pytree.tree_structure(returned) == captured.call.output_spec
    with pytest.raises(InputError, match=r"scale was 3\.0 at capture .* now 4\.0: compile again"):
        captured.call.flatten(args, {**kwargs, "scale": 4.0})
    with pytest.raises(InputError, match="call it as it was captured"):
        captured.call.flatten((batch, (a, b)), kwargs)


def test_the_same_call_is_recognised_however_its_arguments_are_given() -> None:
    model = ZOO["mlp"].model()
    x, targets = torch.randn(8, 6), torch.randn(8, 7)
    captured = capture(model, {"targets": targets, "x": x})
    for args, kwargs in (((x, targets), {}), ((x,), {"targets": targets}), ((), {"targets": targets, "x": x})):
        flat = captured.call.flatten(args, kwargs)
        order = list(captured.inputs.values())
        assert flat[order.index("x")] is x and flat[order.index("targets")] is targets
    with pytest.raises(InputError, match=r"does not fit the model's forward\(x.*unexpected keyword argument 'y'"):
        captured.call.flatten((x,), {"y": targets})


def test_a_transformers_output_comes_back_as_one() -> None:
    case = ZOO["llama"]
    captured = capture(case.model(), case.batch(0))
    made = captured.call.unflatten([torch.zeros(()), torch.zeros(8, 16, 64)])
    assert isinstance(made, CausalLMOutputWithPast)
    assert made.loss is not None and made.logits is not None and made["loss"] is made.loss


def test_a_registered_class_may_be_returned() -> None:
    @dataclass
    class Output:
        loss: Tensor
        prediction: Tensor

    pytree.register_dataclass(Output)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Output:
            y = self.linear(x)
            return Output(y.square().mean(), y)

    model = Model()
    captured = capture(model, torch.randn(8, 4))
    made = captured.call.unflatten([torch.zeros(()), torch.zeros(8, 3)])
    assert isinstance(made, Output) and made.prediction.shape == (8, 3)


class Checkpointed(nn.Module):
    """The middle layer is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(lambda value: torch.tanh(self.middle(value)), x, use_reentrant=False)
        result: Tensor = self.last(x).square().sum()
        return result


def test_the_tags_of_activation_checkpoints_are_kept() -> None:
    model = Checkpointed()
    captured = capture(model, torch.randn(8, 4))
    tagged = [node for node in captured.graph.graph.nodes if "recompute" in node.meta]
    forward = [node for node in tagged if node.meta.get("partitioner_tag") != "is_backward"]
    targets = {str(node.target) for node in forward}
    assert any("tanh" in target for target in targets), targets
    assert any("mm" in target for target in targets), targets
    untagged = [node for node in captured.graph.graph.nodes if "tanh" in str(node.target) and node not in tagged]
    assert len(untagged) >= 1
    assert_computes(captured, model, (torch.randn(8, 4),), {})


class SequentiallyCheckpointed(nn.Module):
    """Parts of two, two and three modules; all but the last part are recomputed in the backward."""

    def __init__(self, as_list: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
        self.as_list = as_list

    def forward(self, x: Tensor) -> Tensor:
        functions = [torch.tanh, *self.parts] if self.as_list else self.parts
        result: Tensor = checkpoint_sequential(functions, 3, x, use_reentrant=False)
        return result.square().sum()


@pytest.mark.parametrize(("as_list", "recomputed"), [(False, 4), (True, 3)])
def test_checkpoint_sequential_is_captured_as_checkpoints_of_its_parts(as_list: bool, recomputed: int) -> None:
    model = SequentiallyCheckpointed(as_list)
    captured = capture(model, torch.randn(8, 4))
    tagged = [node for node in captured.graph.graph.nodes if "recompute" in node.meta]
    forward = [node for node in tagged if node.meta.get("partitioner_tag") != "is_backward"]
    assert sum("mm" in str(node.target) for node in forward) == recomputed
    assert_computes(captured, model, (torch.randn(8, 4),), {})


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:  # a branch on data
            x = x[:1]
        return x.sum()


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)  # an output beside the graph
        result: Tensor = self.linear(x).sum()
        return result


UNFIT = {
    "a branch on data": Branching(),
    "an output beside the graph": Printing(),
}


@pytest.mark.parametrize(("line", "model"), list(UNFIT.items()), ids=list(UNFIT))
def test_what_cannot_be_captured_is_told_with_the_line(line: str, model: nn.Module) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(model, torch.randn(8, 4))
    text = str(caught.value)
    number = next(i for i, code in enumerate(Path(__file__).read_text().splitlines(), 1) if f"# {line}" in code)
    assert f"{type(model).__name__} cannot be captured" in text
    assert f"{Path(__file__).name}:{number} in forward" in text, text
    assert ("Take the print out" if isinstance(model, Printing) else "torch.where") in text


class Converting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.head.to(x.dtype)
        return self.head(x).sum()


class ReturningNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None, bool]:
        return self.layer(x).sum(), None, True


def test_a_part_that_has_gradients_may_be_converted_in_the_forward() -> None:
    model = Converting()
    captured = capture(model, torch.ones(2, 4))
    model(torch.ones(2, 4)).backward()
    assert str(capture(model, torch.ones(2, 4)).graph.graph) == str(captured.graph.graph)
    # Dynamo's None for the gradients that were not read is no other None of later captures.
    later = capture(ReturningNone(), torch.ones(2, 4))
    assert later.call.output_constants[1:] == (None, True)


def test_what_has_nothing_to_train_has_no_backward() -> None:
    captured = capture(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4))
    assert not captured.gradients and not captured.tangents
    assert [len(node.meta["val"].shape) for node in captured.graph.graph.find_nodes(op="placeholder")] == [2, 1, 2]


def test_gradients_of_inputs_come_before_those_of_parameters() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    captured = capture(nn.Linear(4, 3), x)
    assert captured.input_gradients == ("input",) and captured.gradients == ("weight", "bias")
    (returned,) = captured.graph.graph.output_node().args
    assert [tuple(node.meta["val"].shape) for node in returned] == [(2, 3), (2, 4), (3, 4), (3,)]  # type: ignore
    assert x.grad is None and capture(nn.Linear(4, 3), x.detach()).input_gradients == ()
    with torch.no_grad():
        assert capture(nn.Linear(4, 3), x).input_gradients == ()


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not fit the model's forward"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(2, 4)))


def test_an_input_changed_in_place_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            result: Tensor = self.linear(x).sum()
            return result

    with pytest.raises(CaptureError, match=r"changes its input x in place\n.*x.mul_\(2\)\nCopy that input first"):
        capture(InPlace(), torch.randn(2, 4))


@pytest.mark.parametrize(
    "x", [torch.randn(9, 4)[1:], torch.randn(4, 8).T, torch.randn(32).view(8, 4), torch.randn(8, 1).expand(8, 4)]
)
def test_inputs_may_be_views(x: Tensor) -> None:
    model = nn.Linear(4, 3)
    captured = capture(model, x)
    assert_computes(captured, model, (x.contiguous(),), {})
    assert str(captured.graph.graph) == str(capture(model, x.contiguous()).graph.graph)


def test_a_synchronized_batch_norm_is_that_of_the_global_batch() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    assert isinstance(synchronized[1], nn.SyncBatchNorm)
    expected = capture(model, torch.ones(4, 8))
    found = capture(synchronized, torch.ones(4, 8))
    assert found.graph.code == expected.graph.code
    assert found.mutated == expected.mutated != ()


class Asking(nn.Module):
    """Asks what traces it, as libraries do, and switches kernels of cuDNN off."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.layer, self.asks = nn.Linear(8, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        if not self.asks:
            return torch.relu(self.layer(x))
        with torch.backends.cudnn.flags(enabled=False):
            y = self.layer(x)
        return y if torch.compiler.is_exporting() or not torch.compiler.is_compiling() else torch.relu(y)


def test_a_forward_finds_what_it_finds_under_torch_compile() -> None:
    torch._dynamo.trace_rules.clear_lru_cache()  # as some calls of torch.compile do
    asked, plain = (capture(Asking(asks), torch.ones(4, 8)).graph.code for asks in (True, False))
    assert asked == plain
    assert not torch.compiler.is_exporting()
