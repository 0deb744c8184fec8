"""What a user changes of the Python state after compiling is followed by another step, or is an error."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import gc
import itertools
import os
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from os import environ
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardweave as sw
from shardweave.ir.errors import CaptureError, InputError, ParallelError
from shardweave.runtime.launch import WorkerPool

SCALE = 3.0
TABLE = {"gain": 2.0}
BATCH = torch.ones(4, 8)


class Config:
    alpha = 1.0


CONFIG = Config()


def closing_over() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    power = 2.0

    def raised(x: Tensor) -> Tensor:
        return x.abs() ** power

    def change(value: float) -> None:
        nonlocal power
        power = value

    return raised, change


RAISED, CHANGE_POWER = closing_over()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8)
        self.beta, self.flag, self.option = 0.5, True, None
        self.config, self.settings = Config(), {"k": 1, "list": [1, 2.0]}
        self.unread = 0
        self.noted: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.linear(x))) * self.beta * self.config.alpha * self.settings["k"] * SCALE
        x = x * self.settings["list"][1] * TABLE["gain"] * CONFIG.alpha
        if self.flag and self.option is None:
            x = RAISED(x)
        if hasattr(self, "later"):
            x = x * 2
        self.noted.append(1)
        self.last = x
        return x.mean()


@pytest.fixture(scope="module")
def compiled() -> tuple[Model, Any]:
    model = Model()
    return model, sw.compile_parallel(model, sw.Cluster.local(1), BATCH, options=sw.Options(recompile_limit=12))


@contextlib.contextmanager
def changed(target: Any, name: Any, value: Any) -> Iterator[None]:
    """While this runs, an attribute, an item or a global has another value."""
    is_item = isinstance(target, (dict, list))
    before = target[name] if is_item else vars(target).get(name, "none")
    put = target.__setitem__ if is_item else lambda key, new: setattr(target, key, new)
    put(name, value)
    try:
        yield
    finally:
        if isinstance(before, str) and before == "none":
            delattr(target, name)
        else:
            put(name, before)


Changes = dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[None]]]
OF_THE_MODEL: Changes = {
    "model.beta": lambda model: changed(model, "beta", 1.0),
    "model.flag": lambda model: changed(model, "flag", False),
    "model.option": lambda model: changed(model, "option", 0),
    "model.later": lambda model: changed(model, "later", 1),
    "model.drop.p": lambda model: changed(model.drop, "p", 0.5),
    "model.drop.training": lambda model: changed(model.drop, "training", False),
    "model.norm.momentum": lambda model: changed(model.norm, "momentum", 0.5),
    "model.drop": lambda model: changed(model._modules, "drop", nn.Identity()),
    "model.linear.forward": lambda model: changed(model.linear, "forward", lambda x: x),
}
SHARED: Changes = {
    "config.alpha": lambda model: changed(model.config, "alpha", 2.0),
    "settings['k']": lambda model: changed(model.settings, "k", 2),
    "settings['list'][1]": lambda model: changed(model.settings["list"], 1, 3.0),
    "SCALE": lambda _: changed(globals(), "SCALE", 1.0),
    "TABLE['gain']": lambda _: changed(TABLE, "gain", 1.0),
    "CONFIG.alpha": lambda _: changed(CONFIG, "alpha", 3.0),
    "alpha": lambda _: changed(Config, "alpha", 3.0),
    "cell_contents": lambda _: power_changed(),
}
"""What the model and the parallel module share: what holds no tensors."""


@contextlib.contextmanager
def power_changed() -> Iterator[None]:
    CHANGE_POWER(3.0)
    try:
        yield
    finally:
        CHANGE_POWER(2.0)


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_a_change_in_the_model_is_an_error_that_names_it(name: str, compiled: tuple[Model, Any]) -> None:
    model, parallel = compiled
    parallel(BATCH).backward()
    with (
        pytest.raises(ParallelError, match=f"{re.escape(name)}.* was .* when the step was compiled"),
        OF_THE_MODEL[name](model),
    ):
        parallel(BATCH)
    parallel(BATCH).backward()


def test_a_change_in_the_model_is_an_error_in_later_steps_too() -> None:
    model = Tempered()
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    with pytest.warns(UserWarning, match="compiled again, as parallel.temperature is"):
        model.temperature = parallel.temperature = 2.0
        torch.testing.assert_close(parallel(BATCH), model(BATCH))
    model.power = 2
    with pytest.raises(ParallelError, match="model.power was 1 when the step was compiled"):
        parallel(BATCH)


def test_hooks_that_the_model_gets_later_are_named_in_a_warning() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def doubled(gradient: Tensor) -> Tensor:
        return gradient * 2

    model[0].weight.register_hook(doubled)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    for module in (model, parallel):
        module(BATCH).sum().backward()
        module[0].bias.register_hook(doubled)
    torch.testing.assert_close(parallel[0].weight.grad, model[0].weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(BATCH)
    model[1].weight.register_hook(doubled)
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.warns(UserWarning, match=r"hooks were registered on model\.1, model\.1\.weight after .*parallel\.1"):
        for _ in range(2):
            parallel(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            parallel(BATCH)


@pytest.mark.parametrize("name", SHARED)
def test_a_change_of_what_both_share_takes_another_step(name: str, compiled: tuple[Model, Any]) -> None:
    model, parallel = compiled
    for module in (model, parallel):
        module.drop.p = 0.0
    before = parallel(BATCH)
    with SHARED[name](model):
        after = parallel(BATCH)
        torch.testing.assert_close(after, copy.deepcopy(model)(BATCH))
    assert after != before
    num_steps = len(parallel._steps)
    torch.testing.assert_close(parallel(BATCH), before)
    assert len(parallel._steps) == num_steps, "the first step is still there"
    for module in (model, parallel):
        module.drop.p = 0.1


class Kind(enum.Enum):
    DOUBLED = 2
    TRIPLED = 3


class Plain:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


VALUES: dict[str, tuple[Any, Any, Callable[[Tensor, Any], Tensor]]] = {
    "int, then float": (2, 2.0, lambda x, v: x * (1.0 if (x.long() * v).is_floating_point() else 3.0)),
    "bool, then int": (True, 1, lambda x, v: x * (2.0 if v is True else 3.0)),
    "enum": (Kind.DOUBLED, Kind.TRIPLED, lambda x, v: x * (2.0 if v is Kind.DOUBLED else 3.0)),
    "nested tuple": ((1, (2.0,)), (1, (3.0,)), lambda x, v: x * v[1][0]),
    "set": ({"a"}, {"a", "b"}, lambda x, v: x * len(v)),
    "list": ([1.0, 2.0], [1.0, 2.0, 3.0], lambda x, v: x * sum(v)),
    "items of a dict": ({"a": 1.0}, {"a": 1.0, "b": 5.0}, lambda x, v: x * sum(v.values())),
    "order of a dict": ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, lambda x, v: x * next(iter(v.values()))),
    "closure": (times(1.0), times(2.0), lambda x, v: v(x)),
    "partial": (functools.partial(torch.mul, other=2.0), functools.partial(torch.mul, other=3.0), lambda x, v: v(x)),
    "method": (Plain(1.0).times, Plain(2.0).times, lambda x, v: v(x)),
    "function": (torch.sin, torch.cos, lambda x, v: v(x)),
    "class": (Plain, Config, lambda x, v: x * (2.0 if v is Plain else 3.0)),
    "bool in a tuple": ((1,), (True,), lambda x, v: x * (2.0 if isinstance(v[0], bool) else 3.0)),
    "integer of numpy": (numpy.int64(2), numpy.int64(3), lambda x, v: x * float(v) + sum(1.0 for _ in range(v))),
    "number of numpy": (numpy.float32(2), numpy.float64(2), lambda x, v: x * v if type(v) is float else x * float(v)),
    "array": (numpy.ones(2), numpy.ones(2) * 2, lambda x, v: x * torch.from_numpy(v).sum()),
    "tensor": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), lambda x, v: x * v.sum()),
}


class Reading(nn.Module):
    def __init__(self, value: Any, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.config, self.use = nn.Linear(8, 8), Config(), use
        self.config.value = value  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), self.config.value).sum()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore:the model is compiled again")
def test_a_value_of_each_kind_is_followed(name: str) -> None:
    before, after, use = VALUES[name]
    model = Reading(before, use)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    for value, num_steps in ((before, 1), (after, 2), (before, 2), (copy.deepcopy(after), 2)):
        model.config.value = value  # type: ignore[attr-defined]
        torch.testing.assert_close(parallel(BATCH), model(BATCH))
        assert len(parallel._steps) == num_steps


GAINS: dict[str, float] = {}


def attribute_in_a_try(model: Any, x: Tensor) -> Tensor:
    try:
        return x * model.config.gain
    except AttributeError:
        return x


def attribute_of_a_parameter_in_a_try(model: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(AttributeError):
        x = x * model.linear.weight.gain
    return x


def key_in_a_try(model: Any, x: Tensor) -> Tensor:
    try:
        return x * GAINS["gain"]
    except KeyError:
        return x


@pytest.mark.parametrize("use", [attribute_in_a_try, attribute_of_a_parameter_in_a_try, key_in_a_try])
def test_what_a_forward_tries_and_does_not_find_is_followed(
    use: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Containing(use, [])
    model.config = Config()  # type: ignore[assignment]
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    torch.testing.assert_close(parallel(BATCH), model(BATCH))
    for module in (model, parallel):
        module.config.gain = module.linear.weight.gain = 3.0
    monkeypatch.setitem(GAINS, "gain", 3.0)
    with pytest.warns(UserWarning, match="compiled again, as .*gain.* is True and was"):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


def with_a_default(x: Any) -> float:
    gain: float = getattr(x, "gain", 2.0)
    return gain


def with_a_test(x: Any) -> float:
    return 3.0 if hasattr(x, "gain") else 2.0


def in_a_try(x: Any) -> float:
    with contextlib.suppress(AttributeError):
        return float(x.gain)
    return 2.0


def without_a_default(x: Any) -> float:
    return float(x.gain)


class Gains(nn.Module):
    """Multiplies by an attribute of one of its inputs."""

    def __init__(self, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.linear(batch["x"]) * self.use(batch["y"])).sum()


@pytest.mark.parametrize("use", [with_a_default, with_a_test, in_a_try, without_a_default])
def test_attributes_of_input_tensors_are_refused(use: Callable[[Any], float]) -> None:
    model, told = Gains(use), r"forward asks for batch\.y\.gain, an attribute(.|\n)*pass gain as an argument"
    marked = BATCH.clone()
    marked.gain = 5.0  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match=told):
        sw.compile_parallel(model, sw.Cluster.local(1), ({"x": BATCH, "y": marked},), progress=False)
    if use is without_a_default:
        return
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), ({"x": BATCH, "y": BATCH},), progress=False)
    for y, size in ((marked, 4), (marked[:2], 2)):
        y.gain = 5.0  # type: ignore[attr-defined]
        with pytest.raises(InputError, match=told), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel({"x": BATCH[:size], "y": y})
    batch = {"x": marked, "y": BATCH}
    torch.testing.assert_close(parallel(batch), model(batch))


def test_a_tensor_in_a_closure_is_followed() -> None:
    table = torch.ones(8)

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * table).sum()

    model = Closed()
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    table = torch.full((8,), 2.0)
    with pytest.warns(UserWarning, match="compiled again, as table is"):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


def test_what_numpy_computes_from_constants_is_a_constant() -> None:
    def use(x: Tensor, value: Any) -> Tensor:
        size = float(numpy.sqrt(x.shape[-1])) * int(numpy.prod(x.shape)) * numpy.float64(value)
        steps = 2 * numpy.ceil(numpy.log(x.shape[-1])).astype("int").item()
        return x * size * numpy.clip(3, 0, 2) * numpy.log(2.0) * sum(1.0 for _ in range(steps))

    model = Reading(0.5, use)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    torch.testing.assert_close(parallel(BATCH), model(BATCH))
    with pytest.raises(CaptureError, match=r"(?s)takes a number out of an array.*array.tolist"):
        sw.compile_parallel(Reading(numpy.ones(2), lambda x, v: x * float(v[0])), sw.Cluster.local(1), BATCH)
    with pytest.raises(CaptureError, match=r"Draw with torch"):
        import numpy as np

        sw.compile_parallel(Reading(1, lambda x, v: x * float(np.random.rand())), sw.Cluster.local(1), BATCH)


def test_a_tensor_that_is_no_buffer_is_followed_when_it_is_written_in_place() -> None:
    table = torch.ones(8)
    model = Reading(table, torch.mul)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    table.fill_(2.0)
    with pytest.warns(UserWarning, match=r"compiled again, as .*config\.value is 'torch\.float32 \(8,\) \w+' and was"):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


def adds_a_number(model: Any, x: Tensor) -> None:
    model.kept.add_(1)


def augments(model: Any, x: Tensor) -> None:
    model.kept += 1


def copies_an_average(model: Any, x: Tensor) -> None:
    model.kept.lerp_(x.detach().mean(0), 0.1)


def assigns_an_item(model: Any, x: Tensor) -> None:
    model.kept[2] = x.sum()


def writes_in_a_list(model: Any, x: Tensor) -> None:
    model.config[0].copy_(x.mean(0))


def writes_a_global(model: Any, x: Tensor) -> None:
    WRITTEN.mul_(2)


def writes_data(model: Any, x: Tensor) -> None:
    model.kept.data.add_(1)


WRITTEN = torch.zeros(8)
WRITES: dict[Callable[[Any, Tensor], None], str] = {
    adds_a_number: r"model\.kept", augments: r"model\.kept", copies_an_average: r"model\.kept",
    assigns_an_item: r"model\.kept", writes_in_a_list: r"model\.config\[0\]", writes_a_global: "WRITTEN",
    writes_data: "",
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_that_is_no_buffer_must_not_be_written_by_the_forward(write: Callable[[Any, Tensor], None]) -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        write(model, x)
        return x * model.kept

    model = Containing(use, torch.zeros(8))
    model.config = [torch.zeros(8)]  # type: ignore[assignment]
    told = rf"writes into {WRITES[write]}.*neither a buffer nor a parameter(.|\n)*self\.register_buffer"
    with pytest.raises(CaptureError, match=told):
        sw.compile_parallel(model, sw.Cluster.local(1), BATCH)


def states_of_torch(is_on: bool) -> None:
    torch.use_deterministic_algorithms(is_on, warn_only=is_on)
    torch.set_num_threads(2 if is_on else 1)
    torch.set_autocast_cache_enabled(not is_on)
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    torch.autograd.set_detect_anomaly(is_on)


STATES: dict[str, Callable[[], float]] = {
    "are_deterministic_algorithms_enabled": lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
    "get_deterministic_debug_mode": lambda: 1.0 + torch.get_deterministic_debug_mode(),
    "get_num_threads": lambda: float(torch.get_num_threads()),
    "is_autocast_cache_enabled": lambda: 1.0 + torch.is_autocast_cache_enabled(),
    "get_float32_matmul_precision": lambda: float(len(torch.get_float32_matmul_precision())),
    "is_anomaly_enabled": lambda: 1.0 + torch.is_anomaly_enabled(),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_of_torch_is_followed(name: str) -> None:
    threads, model = torch.get_num_threads(), Reading(None, lambda x, _: x * STATES[name]())
    states_of_torch(False)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    torch.testing.assert_close(parallel(BATCH), model(BATCH))
    try:
        states_of_torch(True)
        with pytest.warns(UserWarning, match=rf"compiled again, as torch\.{name}\(\) is .* and was"):
            torch.testing.assert_close(parallel(BATCH), model(BATCH))
    finally:
        states_of_torch(False)
    try:
        torch.testing.assert_close(parallel(BATCH), model(BATCH))
        assert len(parallel._steps) == 2
    finally:
        torch.set_num_threads(threads)


SETTINGS = types.ModuleType("settings")
SETTINGS.gain = 2.0  # type: ignore[attr-defined]

OF_PYTHON_MODULES: dict[str, tuple[Any, str, Any, Callable[[], float]]] = {
    "of the user": (SETTINGS, "gain", 3.0, lambda: SETTINGS.gain),
    "of the user, not set at first": (SETTINGS, "other", 3.0, lambda: getattr(SETTINGS, "other", 1.0)),
    "of Python": (sys, "dont_write_bytecode", not sys.dont_write_bytecode, lambda: 1.0 + sys.dont_write_bytecode),
    "of Python, not set at first": (sys, "gain", 3.0, lambda: 2.0 if hasattr(sys, "gain") else 1.0),
    "of Python, a list": (sys, "argv", ["a", "b", "c", "d"], lambda: float(len(sys.argv))),
    "of torch": (torch.backends.cudnn, "benchmark", True, lambda: 1.0 + torch.backends.cudnn.benchmark),
}


@pytest.mark.parametrize("name", OF_PYTHON_MODULES)
def test_attributes_of_python_modules_are_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, value, use = OF_PYTHON_MODULES[name]
    monkeypatch.setattr(sys, "argv", ["a"])
    model = Reading(None, lambda x, _: x * use())
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    torch.testing.assert_close(parallel(BATCH), model(BATCH))
    monkeypatch.setattr(module, attribute, value, raising=False)
    with pytest.warns(UserWarning, match=rf"compiled again, as .*{attribute}.* is .* and was"):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


def as_item(x: Tensor) -> Tensor:
    return x * float(os.environ["GAIN"])


def as_method(x: Tensor) -> Tensor:
    return x * float(os.environ.get("GAIN", "3"))


def as_function(x: Tensor) -> Tensor:
    return x * float(os.getenv("GAIN", "3"))


def as_test(x: Tensor) -> Tensor:
    return x * (2 if "GAIN" in environ else 3)


def as_list(x: Tensor) -> Tensor:
    return x * sum(1 for name in os.environ if name.startswith("GAIN"))


@pytest.mark.parametrize("use", [as_item, as_method, as_function, as_test, as_list])
@pytest.mark.filterwarnings("ignore:the model is compiled again")
def test_an_environment_variable_is_followed(
    use: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAIN", "1")
    model = Reading(None, lambda x, _: use(x))
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    for value in ("1", "2", None, "1"):
        if value is not None:
            monkeypatch.setenv("GAIN", value)
        elif use is as_item:
            continue
        else:
            monkeypatch.delenv("GAIN")
        torch.testing.assert_close(parallel(BATCH), model(BATCH))
    if use is not as_list:  # which other variables may change
        assert len(parallel._steps) == (2 if use is as_item else 3)


def environment_differs() -> str:
    os.environ["GAIN"] = "1"
    model = Reading(None, lambda x, _: as_method(x))
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), BATCH, progress=False)
    os.environ["GAIN"] = "2"
    torch.testing.assert_close(parallel(BATCH), model(BATCH))
    os.environ["GAIN"] = str(dist.get_rank())
    with pytest.raises(InputError) as caught:
        parallel(BATCH)
    return str(caught.value)


def test_an_environment_variable_that_differs_between_ranks_is_refused(pool: WorkerPool) -> None:
    for told in pool.run(environment_differs, nprocs=2):
        assert "rank 0 with x (4, 8) in training mode and os.environ['GAIN'] = '0'" in told


class Tempered(nn.Module):
    """Reads values of each kind; `head` is there only if it is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("share", torch.ones(()))
        self.temperature, self.has_head, self.power = 1.0, True, 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) / self.temperature
        if self.has_head:
            x = self.head(x).tanh()
        if self.share < 1:
            x = x * self.share
        return (x**self.power).square().mean()


SCHEDULE = [
    ("temperature", 1.0), ("temperature", 0.5), ("has_head", False), ("temperature", 1.0), ("temperature", 0.5),
    ("has_head", True), ("share", 0.5), ("power", 2), ("share", 0.25),
]  # fmt: skip
DOUBLES = torch.arange(64, dtype=torch.float64).view(8, 8).sin()


@pytest.mark.filterwarnings("ignore:the model is compiled again")
def schedule(force: Any) -> None:
    """Train while attributes change, as by ``model.temperature = 0.5`` in a training loop."""
    torch.manual_seed(0)
    model = Tempered().double()
    world = dist.get_world_size() if dist.is_initialized() else 1
    options = sw.Options(force=force, recompile_limit=9)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(world), DOUBLES, options=options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, parallel)]
    for name, value in SCHEDULE:
        losses = []
        for module, optimizer in zip((model, parallel), optimizers, strict=True):
            module.share.fill_(value) if name == "share" else setattr(module, name, value)
            optimizer.zero_grad()
            losses.append(module(DOUBLES))
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[1], losses[0])
    for name, value in parallel.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], msg=name)


@pytest.mark.parametrize("force", [{"*": "zdp"}, {"linear": "column", "head": "row"}], ids=str)
def test_steps_of_changed_values_train_as_on_one_device(force: Any, pool: WorkerPool) -> None:
    pool.run(schedule, force, nprocs=2, timeout=300)


def test_values_that_change_in_each_call_meet_the_limit() -> None:
    parallel: Any = sw.compile_parallel(Tempered(), sw.Cluster.local(1), BATCH, options=sw.Options(recompile_limit=3))
    with pytest.warns(UserWarning, match=r"compiled again, as parallel\.temperature is 2\.0 and was 1\.0\. Each value"):
        parallel.temperature = 2.0
        parallel(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel.temperature = 3.0
        parallel(BATCH)
    parallel.temperature = 4.0
    with pytest.raises(
        InputError, match=r"parallel\.temperature = 4\.0 needs a step of its own.*as an input or a buffer"
    ):
        parallel(BATCH)
    parallel.temperature = 2.0
    parallel(BATCH)


def differ() -> str:
    """The error of ranks whose attributes differ: first where one compiles, then where both have a step."""
    parallel: Any = sw.compile_parallel(Tempered(), sw.Cluster.local(2), BATCH)
    told = []
    for temperatures in ((1.0, 2.0), (2.0, 2.0), (1.0, 2.0)):
        parallel.temperature = temperatures[dist.get_rank()]
        try:
            parallel(BATCH)
        except InputError as error:
            told.append(str(error))
    return "\n".join(told)


def test_ranks_whose_values_differ_raise_an_error(pool: WorkerPool) -> None:
    for told in pool.run(differ, nprocs=2):
        first, second = told.splitlines()
        for line in (first, second):
            assert "rank 1 with x (4, 8) in training mode and parallel.temperature = 2.0" in line
        assert "which is to be compiled" in first and "which is to be compiled" not in second


def test_what_was_not_read_may_change(compiled: tuple[Model, Any]) -> None:
    model, parallel = compiled
    with changed(model, "unread", 1), changed(model, "other", 1), changed(model.config, "other", 1):
        parallel(BATCH).backward()
    model.eval()  # the model as a whole, to be used for itself
    parallel(BATCH).backward()
    model.train()


def test_only_the_parallel_module_is_asked_when_the_model_is_gone() -> None:
    model = Model()
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None
    parallel(BATCH).backward()


class Counts(nn.Module):
    """Counts its calls in Python, and asks how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x).mean() * (2.0 if self.steps > 2 else 1.0)


class Recurs(nn.Module):
    """Keeps a state from call to call in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.state is not None:
            x = x + self.state
        self.state = x.detach()
        return x.mean()


class Kept(nn.Module):
    """Computes a table in its first call, and keeps it: what is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.ready = nn.Linear(8, 8), None, False

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8.0).cos()
        return (self.linear(x) * self.table).mean()


class Tally(nn.Module):
    """Keeps what its forward counts in places of each kind; `note` writes to one of them, and `ask` reads it."""

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counts, self.seen = nn.Linear(8, 8), {"calls": 0}, [0]

    def note(self) -> None:
        raise AssertionError("each kind has its own")

    def ask(self) -> float:
        return 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.linear(x).mean() * (2.0 if self.ask() > 1 else 1.0)


class InDict(Tally):
    def note(self) -> None:
        self.counts["calls"] += 1

    def ask(self) -> float:
        return self.counts["calls"]


class InList(Tally):
    def note(self) -> None:
        self.seen[0] += 1

    def ask(self) -> float:
        return self.seen[0]


class InGlobal(Tally):
    def note(self) -> None:
        global CALLS
        CALLS += 1

    def ask(self) -> float:
        return CALLS


class InClass(Tally):
    def note(self) -> None:
        self.config.alpha += 1.0

    def ask(self) -> float:
        return self.config.alpha


CALLS = 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, r"model\.steps"),
        (Recurs, r"model\.state"),
        (InDict, r"model\.counts\['calls'\]"),
        (InList, r"model\.seen\[0\]"),
        (InGlobal, "CALLS"),
        (InClass, r"model\.config\.alpha"),
    ],
)
def test_state_that_a_forward_counts_in_python_is_refused(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"reads {name} and changes it(.|\n)*register_buffer"):
        sw.compile_parallel(kind(), sw.Cluster.local(1), BATCH)


def default(model: Any, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x * model.calls


def first(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "calls"):
        model.calls = 0
    model.calls += 1
    return x * model.calls


def on_a_parameter(model: Any, x: Tensor) -> Tensor:
    model.linear.weight.calls = getattr(model.linear.weight, "calls", 0) + 1
    return x * model.linear.weight.calls


@pytest.mark.parametrize("use", [default, first, on_a_parameter])
def test_state_in_attributes_that_are_not_set_at_first_is_refused(use: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"reads model\.(linear\.weight\.)?calls and changes it"):
        sw.compile_parallel(Containing(use, []), sw.Cluster.local(1), BATCH)


class Containing(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor], kept: Any) -> None:
        super().__init__()
        self.linear, self.use, self.kept = nn.Linear(8, 8), use, kept

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.linear(x)).mean()


def appends(model: Any, x: Tensor) -> Tensor:
    model.kept.append(1)
    return x * len(model.kept)


def appends_later(model: Any, x: Tensor) -> Tensor:
    model.kept.append(1)
    return x * (2 if len(model.kept) > 20 else 1)


def averages(model: Any, x: Tensor) -> Tensor:
    model.kept.append(x.detach().mean())
    return x * torch.stack(list(model.kept)).mean()


def pops(model: Any, x: Tensor) -> Tensor:
    return x * model.kept.pop()


def adds(model: Any, x: Tensor) -> Tensor:
    model.kept.add(len(model.kept))
    return x * len(model.kept)


def numbers(model: Any, x: Tensor) -> Tensor:
    model.kept[len(model.kept)] = 1
    return x * len(model.kept)


def counts(model: Any, x: Tensor) -> Tensor:
    model.kept["a"] += 1
    return x * model.kept["a"]


CONTAINERS: list[tuple[Callable[[Any, Tensor], Tensor], Any]] = [
    (appends, []), (appends_later, []), (averages, collections.deque(maxlen=3)), (pops, [1.0, 2.0, 3.0]), (adds, set()),
    (numbers, {}), (counts, collections.Counter()), (counts, collections.defaultdict(int)),
    (counts, collections.OrderedDict(a=1)),
]  # fmt: skip


@pytest.mark.parametrize(("use", "kept"), CONTAINERS)
@pytest.mark.filterwarnings("ignore:the forward of Containing writes")
def test_containers_that_a_forward_changes_and_reads_are_refused(
    use: Callable[[Any, Tensor], Tensor], kept: Any
) -> None:
    model = Containing(use, copy.copy(kept))
    told = r"(reads model\.kept\['a'\] and changes it|changes model\.kept, and what it computes depends)(?s:.)* buffer"
    with pytest.raises(CaptureError, match=told):
        sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    assert model.kept == kept


def remembers(model: Any, x: Tensor) -> Tensor:
    size = x.shape[-1]
    if size not in model.kept:
        model.kept[size] = torch.arange(float(size)).cos()
    return x * model.kept[size]


def sets(model: Any, x: Tensor) -> Tensor:
    if "scale" not in model.kept:
        model.kept["scale"] = 2.0
    return x * model.kept["scale"]


def has_a_window(model: Any, x: Tensor) -> Tensor:
    model.kept.append(x.detach().mean())
    if len(model.kept) > 10:
        model.kept.pop(0)
    return x * 2


@pytest.mark.parametrize(("use", "kept"), [(remembers, {}), (sets, {}), (has_a_window, [])])
def test_containers_whose_changes_make_no_difference_are_only_named(
    use: Callable[[Any, Tensor], Tensor], kept: Any
) -> None:
    model = Containing(use, kept)
    with pytest.warns(UserWarning, match=r"writes model\.kept"):
        parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH, progress=False)
    for _ in range(2):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


class Buffered(nn.Module):
    """Counts in buffers, each written in another of torch's ways in place."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (self.linear(x + self.mean) * self.calls).mean()


class Reassigns(Buffered):
    """Assigns tensors to the names of buffers, twice to one, and reads old values afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.ones(8))
        self.register_buffer("unread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        old, view = self.mean, self.before[2:]
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.mean, self.before = self.before, self.mean
        self.before += 1
        self.mean = self.mean + self.before
        self.unread = x.detach().amax(0)
        return (x * old).square().mean() + (x * self.mean).mean() + (x[:, 2:] * view).square().mean()


@pytest.mark.parametrize("kind", [Buffered, Reassigns])
def test_state_in_buffers_goes_on(kind: type[nn.Module]) -> None:
    model = kind()
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    for _ in range(3):
        losses = [each(BATCH) for each in (parallel, model)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    torch.testing.assert_close(dict(parallel.named_buffers()), dict(model.named_buffers()))
    torch.testing.assert_close(parallel.linear.weight.grad, model.linear.weight.grad)


def returned(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    old = model.mean
    model.mean = old + 1
    return model.linear(x).mean(), old


def of_another_dtype(model: Any, x: Tensor) -> Tensor:
    model.mean = model.mean.double() + 1
    return model.linear(x).mean()


def with_a_gradient(model: Any, x: Tensor) -> Tensor:
    model.mean = model.mean + model.linear(x).mean(0)
    return model.mean.sum()


def of_two_modules(model: Any, x: Tensor) -> Tensor:
    model.mean = model.mean + 1
    return model.linear(x).mean() + model.linear.mean.sum()


def of_two_names(model: Any, x: Tensor) -> Tensor:
    model.mean = model.linear.mean = x.detach().mean(0)
    return model.linear(x).mean() + model.mean.sum()


def of_another_buffer(model: Any, x: Tensor) -> Tensor:
    model.mean = model.linear.mean
    return model.linear(x).mean() + model.mean.sum()


def decides(model: Any, x: Tensor) -> Tensor:
    shift = 1 if model.calls < 2 else 2
    model.calls = model.calls + 1
    return model.linear(x).mean() + shift


FORWARDS = [returned, of_another_dtype, with_a_gradient, of_two_modules, of_two_names, of_another_buffer, decides]


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_buffer_that_cannot_be_written_instead_is_refused(forward: Any) -> None:
    model = Buffered()
    model.linear.register_buffer("mean", model.mean if forward is of_two_modules else torch.zeros(8))
    model.forward = types.MethodType(forward, model)
    with pytest.raises(CaptureError, match=r"returns a buffer|reads model\.(linear\.)?mean and changes|depends on"):
        sw.compile_parallel(model, sw.Cluster.local(1), BATCH)


@pytest.mark.parametrize("values", [itertools.count(1), iter((1.0, 2.0)), iter(range(9))])
def test_a_forward_that_takes_values_of_an_iterator_is_refused(values: Iterator[float]) -> None:
    class Taking(nn.Linear):
        values: Iterator[float]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean() * next(self.values)

    model = Taking(8, 8)
    model.values = values
    with pytest.raises(CaptureError, match=r"takes a value of model\.values, an iterator(?s:.)*Count in a buffer"):
        sw.compile_parallel(model, sw.Cluster.local(1), BATCH)


class Appends(Tally):
    def note(self) -> None:
        self.seen.append(1)


class Sets(Tally):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.linear(x).mean()
        return self.loss * 2


@pytest.mark.parametrize(("kind", "name"), [(Appends, "model.seen"), (Sets, "model.loss")])
def test_what_a_forward_writes_for_others_to_read_is_named_in_a_warning(kind: type[nn.Module], name: str) -> None:
    with pytest.warns(UserWarning, match=f"the forward of {kind.__name__} writes {name}, which a captured"):
        sw.compile_parallel(kind(), sw.Cluster.local(1), BATCH)


def test_a_table_that_is_computed_once_is_no_such_state() -> None:
    model = Kept()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    expected = model.linear(BATCH) * torch.arange(8.0).cos()
    torch.testing.assert_close(parallel(BATCH), expected.mean())


class Settings:
    problem: str | None = None


class Settles(nn.Module):
    """Sets a default at its first call, as transformers' models do in their config: later steps are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config = nn.Linear(8, 8), Settings()

    def forward(self, x: Tensor) -> Tensor:
        if self.config.problem is None:
            self.config.problem = "regression"
        return self.linear(x).mean() * (2.0 if self.config.problem == "regression" else 1.0)


class Begins(Settles):
    """Is another one at its first call than ever after."""

    def forward(self, x: Tensor) -> Tensor:
        first, self.config.problem = self.config.problem is None, "regression"
        return self.linear(x).mean() * (2.0 if first else 1.0)


def test_a_default_that_is_set_at_the_first_call_is_no_such_state() -> None:
    model = Settles()
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    assert model.config.problem is None
    for _ in range(2):
        torch.testing.assert_close(parallel(BATCH), model(BATCH))


def test_a_first_call_that_is_another_one_is_refused() -> None:
    model = Begins()
    with pytest.raises(CaptureError, match=r"reads model\.config\.problem and changes it"):
        sw.compile_parallel(model, sw.Cluster.local(1), BATCH)
    assert model.config.problem is None


class AsksForGradients(Model):
    """Computes something else where no gradients are recorded."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return (hidden * 2 if hidden.requires_grad else hidden * 3).mean() + (5 if torch.is_grad_enabled() else 7)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_forward_may_ask_whether_gradients_are_recorded(is_frozen: bool) -> None:
    model = AsksForGradients().requires_grad_(not is_frozen)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), (BATCH,))
    for batch in (BATCH, BATCH[:2], BATCH):
        torch.testing.assert_close(parallel(batch), model(batch))
        with torch.no_grad():
            torch.testing.assert_close(parallel(batch), model(batch))


class TrainsNoParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.free = torch.ones(8, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.free).mean()


def test_a_tensor_with_a_gradient_that_is_no_parameter_is_refused() -> None:
    """Otherwise it would be a constant, which its optimizer would never change."""
    model = TrainsNoParameter()
    with pytest.raises(CaptureError, match=r"model\.free, a tensor that needs a gradient .*[\s\S]*nn\.Parameter"):
        sw.compile_parallel(model, sw.Cluster.local(1), (BATCH,))
    model.free = model.free.detach()
    sw.compile_parallel(model, sw.Cluster.local(1), (BATCH,))
