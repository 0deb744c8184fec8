"""Models that take or return objects, such as a cache of keys and values, train to the numbers of one device."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, nn

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_models import any_of
from tests.compiler.training import Way, _double_loss, compile_ways, model_of
from tests.models import Case, hub
from tests.runtime.loop import DTYPE, same_in_both_worlds

TOKENS = {"vocab_size": hub.VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}


def llama() -> nn.Module:
    """As it comes: `use_cache` is at its default."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**hub.DECODER, **TOKENS}))


def gpt2() -> nn.Module:
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TOKENS, **sizes, **dropout))


BUILDS = {"llama": llama, "gpt2": gpt2}


class InDouble(Case):
    """A case whose model computes in float64 throughout."""

    def model(self, dtype: torch.dtype = DTYPE, seed: int = 0) -> nn.Module:
        model = model_of(Case(self.name, self.build, self.draw, self.loss), dtype)
        model.loss_function = _double_loss
        return model


def two_steps(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(2):
        output = model(**hub.tokens(torch.Generator().manual_seed(step), 8))
        cache = output.past_key_values
        assert isinstance(cache, transformers.DynamicCache) and cache.get_seq_length() == hub.LENGTH
        output.loss.backward()
        seen += [output.loss.detach(), [(layer.keys.detach(), layer.values.detach()) for layer in cache.layers]]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("name", list(BUILDS))
def test_a_model_that_returns_its_cache_trains_as_on_one_device(name: str, pool: WorkerPool) -> None:
    case = InDouble(name, BUILDS[name], hub.tokens)
    whole = {"outputs": "whole"}
    ways = [Way("zdp", {"*": "zdp"}, options=whole), Way("drawn", any_of(0), options=whole)]
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, two_steps, steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


def losses(name: str, options: dict[str, Any] | None) -> list[float]:
    case = InDouble(name, BUILDS[name], hub.tokens)
    model: Any = case.model(DTYPE)
    if options is not None:
        model = torch.compile(model, backend="shardweave", options=options)
    return [float(value) for value in two_steps(model)[::2]]


@pytest.mark.parametrize("name", list(BUILDS))
def test_it_does_so_under_torch_compile(name: str, pool: WorkerPool) -> None:
    (alone,) = pool.run(losses, name, None, nprocs=1)
    options = {"cluster": sw.Cluster.local(2), "force": {"*": "tensor:2"}}
    for found in pool.run(losses, name, options, nprocs=2, timeout=120):
        assert found == pytest.approx(alone, rel=1e-8)


class OwnDict(dict[str, Any]):
    """Its attributes are its items, as those of EasyDict are."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Ordered(OrderedDict[str, Tensor]):
    """Has each item as an attribute, too, as outputs of transformers do."""

    def __init__(self, **items: Tensor) -> None:
        super().__init__(**items)
        vars(self).update(items)


class Plain(dict[str, Tensor]):
    """Has no attributes."""


class Rows(list[Tensor]):
    """A list of its own class."""


class Pair(tuple[Tensor, ...]):
    """A tuple of its own class."""


@dataclasses.dataclass(slots=True)
class Slotted:
    loss: Tensor
    hidden: Tensor
    name: str = "slotted"


RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "own dict": lambda loss, hidden: OwnDict(loss=loss, hidden=hidden),
    "ordered": lambda loss, hidden: Ordered(hidden=hidden, loss=loss),
    "plain": lambda loss, hidden: Plain(loss=loss, hidden=hidden),
    "list": lambda loss, hidden: Rows([loss, hidden]),
    "tuple": lambda loss, hidden: Pair((loss, hidden)),
    "slots": Slotted,
    "nested": lambda loss, hidden: {"found": [Slotted(loss, hidden), OwnDict(hidden=hidden)]},
}


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return RETURNED[self.kind](hidden.pow(2).mean(), hidden)


def contents(value: Any) -> Any:
    """An object as its class, its attributes and its items."""
    if isinstance(value, Tensor):
        return value.detach()
    names = [*getattr(value, "__dict__", {}), *getattr(value, "__slots__", ())]
    items = [*value.items()] if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    found = [(name, contents(getattr(value, name))) for name in names] + [contents(item) for item in items]
    return (type(value).__name__, found) if found else value


@pytest.mark.parametrize("kind", list(RETURNED))
def test_objects_are_returned_with_their_items_and_slots(kind: str) -> None:
    model, x = Returns(kind), torch.randn(4, 8)
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), x, progress=False)
    found, expected = ([*pytree.tree_leaves(contents(each(x)))] for each in (parallel, model))
    assert len(found) == len(expected)
    for value, other in zip(found, expected):
        assert torch.allclose(value, other) if isinstance(other, Tensor) else value == other
    if kind == "own dict":
        returned = parallel(x)
        returned.more = torch.ones(1)
        assert returned["more"] is returned.more


class Answer:
    """A user's own class."""

    def __init__(self, loss: Tensor, hidden: Tensor) -> None:
        self.kind, self.loss, self.parts, self.history = "answer", loss, {"hidden": [hidden]}, [1]


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Answer, torch.distributions.Normal]:
        hidden = self.up(x)
        return Answer(hidden.pow(2).mean(), hidden), torch.distributions.Normal(hidden, 1.0)


def test_objects_of_any_class_are_returned_anew_in_each_call() -> None:
    model, x = Answers(), torch.randn(4, 8)
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), x)
    (answer, normal), (again, _) = parallel(x), parallel(x)
    expected, spread = model(x)
    assert type(answer) is Answer and answer.kind == "answer"
    torch.testing.assert_close(answer.loss, expected.loss)
    torch.testing.assert_close(answer.parts, expected.parts)
    torch.testing.assert_close(normal.scale, spread.scale)
    answer.history.append(2)
    assert again.history == [1] == parallel(x)[0].history
    answer.loss.backward()
    assert all(parameter.grad is not None for parameter in itertools.islice(parallel.parameters(), 1))


@dataclasses.dataclass
class Batch:
    """A batch with a number that the forward reads."""

    x: Tensor
    y: Tensor
    scale: int = 2


class Attributes(dict[str, Any]):
    """Its items are read as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


TAKEN: dict[str, Callable[..., Any]] = {
    "dataclass": Batch,
    "dict": lambda x, y, scale=2: Attributes(x=x, y=y, scale=scale),
    "own dict": lambda x, y, scale=2: OwnDict(x=x, y=y, scale=scale),
    "namespace": lambda x, y, scale=2: types.SimpleNamespace(x=x, y=y, scale=scale),
}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, batch: Any, *, more: Any = None) -> Tensor:
        loss = (self.up(batch.x) - batch.y).square().mean() * batch.scale
        return loss if more is None else loss + more["encoding"]["x"].mean() * self.up.bias.sum()


def trained_on_objects(kind: str, force: Any, meaning: Any) -> None:
    """A smaller batch, another number, and an object in a dict; each rank may pass its part of the batch."""
    torch.manual_seed(0)
    model, generator = Takes().double(), torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, size, generator=generator).double() for size in (8, 4))
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    def taken(rows: int, *numbers: int, parts: int = ranks if meaning == "local" else 1) -> Any:
        at = rank if parts > 1 else 0
        return TAKEN[kind](x[:rows].chunk(parts)[at], y[:rows].chunk(parts)[at], *numbers)

    cluster, asked = sw.Cluster.local(ranks), sw.Options(force=force)
    parallel: Any = sw.compile_parallel(model, cluster, (taken(8),), options=asked, batch=meaning, progress=False)
    more = {"encoding": transformers.BatchEncoding({"x": x[:1]})}
    for rows, numbers, further in ((8, (), {}), (4, (), {}), (8, (3,), {}), (8, (), {"more": more}), (8, (), {})):
        loss, expected = (
            parallel(taken(rows, *numbers), **further), model(taken(rows, *numbers, parts=1), **further)
        )  # fmt: skip
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
    for name, parameter in parallel.named_parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("kind", list(TAKEN))
def test_objects_with_tensors_are_arguments(kind: str) -> None:
    trained_on_objects(kind, {}, "global")


@pytest.mark.parametrize("meaning", ["global", "local"])
def test_objects_with_tensors_are_arguments_on_ranks(meaning: str, pool: WorkerPool) -> None:
    pool.run(trained_on_objects, "dataclass", {"*": "zdp"}, meaning, nprocs=2, timeout=300)


def test_an_object_that_the_forward_changes_is_refused() -> None:
    class Changes(Takes):
        def forward(self, batch: Any, *, more: Any = None) -> Tensor:
            batch.x = batch.x * 2
            return super().forward(batch)

    with pytest.raises(sw.ParallelError):
        sw.compile_parallel(Changes(), sw.Cluster.local(1), (Batch(torch.ones(4, 8), torch.ones(4, 4)),))


class Aliases(nn.Module):
    """Returns parameters, inputs and outputs again, as they are and as views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        left, right = self.last(hidden).chunk(2, 1)
        return {
            "hidden": hidden, "again": hidden, "view": hidden[:, :2], "parts": (left, right),
            "parameter": self.last.weight, "transposed": self.first.weight.t(), "biases": self.last.bias[1:],
            "input": x, "flat": x.view(-1),
        }  # fmt: skip


@pytest.mark.parametrize("wants_input", [False, True])
def test_gradients_of_outputs_that_are_views_of_each_other(wants_input: bool) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(wants_input)
    model = Aliases()
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), (x,))
    gradients = []
    for module in (model, parallel):
        given = x.detach().clone().requires_grad_(wants_input)
        outputs = pytree.tree_leaves(module(given))
        sum(((index + 2) * each.square()).sum() for index, each in enumerate(outputs)).backward()
        gradients.append([given.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*gradients)
