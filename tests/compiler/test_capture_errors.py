"""A model that is not captured is refused with the module, the source line and the way out."""

from __future__ import annotations

import datetime
import importlib
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence as packed

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.ir.errors import CaptureError


class Layer(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x))


class Model(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(torch.tanh), Layer(inner)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.sum().item()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.size


class Saying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        print("backward")  # prints in a backward
        return gradient


def branches(x: Tensor) -> Tensor:
    return -x[:1] if x.sum() > 0 else x


def selects(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def drops(x: Tensor) -> Tensor:
    return nn.functional.dropout(x[x[:, 0] > 0], 0.5)


def packs(x: Tensor) -> Tensor:
    return packed(x[:, :, None], [4] * 8, batch_first=True).batch_sizes


def loops(x: Tensor) -> Tensor:
    return torch.stack([x[i] for i in torch.nonzero(x[:, 0]).flatten().tolist()])


def prints(x: Tensor) -> Tensor:
    print(x.shape)  # prints
    return x


def stops(x: Tensor) -> Tensor:
    raise ValueError(f"bad shape {tuple(x.shape)}")


def misfits(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)


def asserts(x: Tensor) -> Tensor:
    assert x.shape[0] == 5, "five rows"
    return x


def tries(x: Tensor) -> Tensor:
    try:
        return stops(x)
    finally:
        torch.numel(x)


def reads(x: Tensor) -> Tensor:
    return Reading.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def times(x: Tensor) -> Tensor:
    return x * time.perf_counter()


def dates(x: Tensor) -> Tensor:
    return x * datetime.datetime.now().second


def scales(x: Tensor) -> Tensor:
    return x * random.uniform(0, 1)


def slices(x: Tensor) -> Tensor:
    return x[:, : random.randint(2, 4)]


def decides(x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else x * 2


def chooses(x: Tensor) -> Tensor:
    return x * random.choice((1, 2))


def of_its_own(x: Tensor) -> Tensor:
    return x * GENERATOR.random()


def of_numpy(x: Tensor) -> Tensor:
    return x * float(NUMBERS.normal())


GENERATOR, NUMBERS = random.Random(0), numpy.random.default_rng(0)


def overwrites(x: Tensor) -> Tensor:
    hidden = x.exp()
    return hidden.mul_(2).sum() * hidden.add_(x).sum()  # exp needs its result in the backward


def says(x: Tensor) -> Tensor:
    return Saying.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def sparse(x: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDICES, VALUES, (8, 8)) @ x


def collates(x: Tensor) -> Tensor:
    both: Tensor = torch.utils.data.default_collate([x, x])
    return both


def disabled(x: Tensor) -> Tensor:
    return x * 2


def calls_disabled(x: Tensor) -> Tensor:
    result: Tensor = KEPT_OUT(x)
    return result


KEPT_OUT: Any = torch.compiler.disable(disabled)
INDICES, VALUES = torch.eye(8).to_sparse().indices(), torch.ones(8)
WAY, STOPS, PRINT = "torch.where", "mend the call or the config", "Take the print out"
DRAW = "Draw with torch"
REFUSED = [
    (branches, "a branch depends on the values", "return -x[:1] if", WAY),
    (drops, "runs on a number of elements that depends", "dropout(x[x[:, 0] > 0]", "before some of them are selected"),
    (packs, "a `PackedSequence` has its data alone", "packed(x[:, :, None]", "Give the padded batch and its lengths"),
    (loops, "a number depends on the values", ".flatten().tolist()", WAY),
    (prints, "builtin operator `print`", "print(x.shape)", PRINT),
    (stops, "it raises ValueError: 'bad shape (8, 4)'", "raise ValueError", STOPS),
    (misfits, "it raises RuntimeError: 'a and b must have same reduction dim", "x @ torch.ones", STOPS),
    (asserts, "it raises AssertionError", 'assert x.shape[0] == 5, "five', STOPS),
    (tries, "it raises ValueError: 'bad shape (8, 4)'", "raise ValueError", STOPS),
    (reads, "a number depends on the values", "Reading.apply", WAY),
    (times, "time.perf_counter is another time in each call", "time.perf_counter()", "outside of the forward"),
    (dates, "datetime.now is another time in each call", "datetime.now()", "outside of the forward"),
    (scales, "random.uniform draws another number in each call", "random.uniform(0, 1)", DRAW),
    (slices, "draws another number in each call", "random.randint(2, 4)]", DRAW),
    (decides, "random.random draws another number", "random.random() <", DRAW),
    (chooses, "random.choice draws another number", "random.choice(", DRAW),
    (of_its_own, "random.random draws another number", "GENERATOR.random()", DRAW),
    (of_numpy, "numpy.random.normal draws another number", "NUMBERS.normal()", DRAW),
    (sparse, "it computes with a sparse tensor", "torch.sparse_coo_tensor(INDICES", "make it dense"),
    (collates, "it calls default_collate, which torch does not trace", "default_collate([x", "outside of the forward"),
    (calls_disabled, "it calls disabled, which torch.compiler.disable keeps", "Tensor = KEPT_OUT(x)", "one graph"),
    (says, "builtin operator `print`", "# prints in a backward", PRINT),
]


def line_of(code: str) -> int:
    return next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if code in line)


@pytest.mark.parametrize(
    ("inner", "reason", "code", "way_out"), REFUSED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_refusal_names_the_module_and_the_line(
    inner: Callable[[Tensor], Tensor], reason: str, code: str, way_out: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Model(inner), torch.randn(8, 4))
    text = str(caught.value)
    assert text.startswith("Model cannot be captured as one graph: in layers.1 (Layer), ")
    assert reason in text.splitlines()[0]
    assert re.search(rf"\n  .*{Path(__file__).name}:{line_of(code)} in ", text), text
    assert way_out in text.splitlines()[-1]


def test_draws_that_are_the_same_in_each_call_or_not_used_are_captured() -> None:
    def draws(x: Tensor) -> Tensor:
        unused = random.uniform(0, 1)
        if x.shape[0] == 9 and unused < 0.5:  # such as of layers that are left out in training only
            return x
        return x * random.Random(3).random()

    torch.manual_seed(0)
    model, x = Model(draws), torch.randn(8, 4)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), x, progress=False)
    torch.testing.assert_close(parallel(x), model(x))


@pytest.mark.filterwarnings("ignore:Error detected in ExpBackward0")
def test_what_autograd_refuses_is_the_models_own_error() -> None:
    with pytest.raises(CaptureError, match=r"modified by an inplace operation(?s:.)*Its backward fails without"):
        capture(Model(overwrites), torch.randn(8, 4))


def test_a_trained_parameter_that_is_read_before_it_is_changed_is_refused() -> None:
    class Dividing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            with torch.no_grad():
                self.weight.div_(2)
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"in 0 \(Dividing\), it changes its parameter 0\.weight in place\n.*div_"):
        capture(nn.Sequential(Dividing(4, 4)), torch.randn(2, 4))


def of_parameter(model: nn.Linear, x: Tensor) -> bool:
    return model.weight.grad is None


def of_input(model: nn.Linear, x: Tensor) -> bool:
    return x.grad is None


def of_module(model: nn.Linear, x: Tensor) -> bool:
    model.zero_grad()
    return True


@pytest.mark.parametrize("asks", [of_parameter, of_input, of_module])
def test_a_forward_that_uses_accumulated_gradients_is_refused(asks: Callable[[nn.Linear, Tensor], bool]) -> None:
    """There are none in the capture, but in later steps."""

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 if asks(self, x) else 2)

    with pytest.raises(CaptureError, match=r"the forward uses the grad of a parameter or an input(?s:.)*between steps"):
        capture(nn.Sequential(Asking(4, 4)), torch.randn(2, 4))


def test_a_result_of_an_open_size_is_refused() -> None:
    told = r"the size of a result depends on the values of tensors\n  .* in selects: return x\[.*\n.*select outside"
    with pytest.raises(CaptureError, match=told):
        capture(Layer(selects), torch.randn(8, 4))
    torch._dynamo.reset()
    options = {"cluster": sw.Cluster.local(1)}
    compiled = torch.compile(Layer(selects), backend="shardweave", fullgraph=True, options=options)
    with pytest.raises(CaptureError, match=told):
        compiled(torch.randn(8, 4))


def test_a_line_of_a_library_is_not_the_users_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "layers.py").write_text("def chosen(x):\n    return x if x.sum() > 0 else -x[:1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shardweave.compiler.capture_errors.INSTALLED", (str(tmp_path),))
    chosen = importlib.import_module("library.layers").chosen
    with pytest.raises(CaptureError, match=r"an installed library, library\. .* in the place of chosen, in which"):
        capture(Model(chosen), torch.randn(8, 4))
