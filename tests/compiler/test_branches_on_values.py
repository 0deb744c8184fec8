"""Branches on tensors: those on buffers are constants of a step, the others select what both sides assign."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.ir import CaptureError
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_capture import assert_computes
from tests.compiler.training import Way, compile_ways
from tests.models import Case
from tests.runtime.loop import DTYPE, same_in_both_worlds, whole


class Padded(nn.Module):
    """Pads by numbers in buffers, as the convolutions of audio codecs do, and branches on others."""

    def __init__(self) -> None:
        super().__init__()
        self.stride = nn.Buffer(torch.tensor(3), persistent=False)
        self.share, self.scale = nn.Buffer(torch.ones(2)), nn.Buffer(torch.tensor(2.0))
        self.half = self.stride // 2  # neither a buffer nor a parameter
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        length = hidden.shape[-1]
        extra = torch.ceil((length - self.stride) / self.stride).to(torch.int64) * self.stride + self.stride - length
        if length <= max(extra, self.half):
            raise ValueError("the input is too short")
        hidden = F.pad(hidden, (self.half, extra - self.half))
        if self.share[1] < 1:
            hidden = hidden + torch.rand_like(hidden)
        kept = hidden[..., 1 : hidden.shape[-1] - self.half.item()]
        return (self.down(F.pad(kept, (0, 16 - kept.shape[-1]))) * self.scale * int(self.stride)).square().mean()


def draw(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator)}


def test_numbers_of_buffers_are_constants() -> None:
    case = Case("padded", Padded, draw)
    batch = case.batch(0, dtype=DTYPE)
    captured = capture(case.model(DTYPE), batch)
    assert_computes(captured, case.model(DTYPE), (), batch)
    (pad, *_) = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert pad.args[1] == [1, 1]


CHANGES: dict[str, Any] = {
    "stride": lambda module: module.stride.fill_(2), "share": lambda module: module.share[1].fill_(0.5),
    "half": lambda module: module.half.data.fill_(2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_buffer_takes_another_step(name: str) -> None:
    case = Case("padded", Padded, draw)
    batch, model = case.batch(0, dtype=DTYPE), case.model(DTYPE)
    parallel: Any = sw.compile_parallel(model, sw.Cluster.local(1), batch, progress=False)
    parallel(**batch).backward()
    with torch.no_grad():
        parallel.scale.fill_(3.0)  # only computed with
        parallel(**batch)
        parallel.eval()
        parallel(case.batch(0, size=6, dtype=DTYPE)["x"])  # a step of its own
        parallel.train()
        CHANGES[name](parallel), CHANGES[name](model)
        model.scale.fill_(3.0)
    with pytest.warns(UserWarning, match=rf"compiled again, as parallel\.{name} is \(.*\) and was"):
        loss = parallel(**batch)
    if name != "share":  # it draws random numbers, as many ranks would
        torch.testing.assert_close(loss, model(**batch))


class Written(nn.Module):
    """Branches on a number of calls that it counts itself, and writes a queue where a pointer says, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.pointer = nn.Buffer(torch.zeros((), dtype=torch.long)), nn.Buffer(torch.zeros(1).long())
        self.queue, self.up = nn.Buffer(torch.linspace(-1, 1, 16 * 16).view(16, 16)), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.count.item() < 1:
            hidden = hidden * 2
        self.count.add_(1)
        start = int(self.pointer)
        with torch.no_grad():
            self.queue[:, start : start + len(x)] = hidden.T
            self.pointer[0] = (start + len(x)) % 16
        return F.mse_loss(hidden @ self.queue.clone(), hidden)


class Branching(nn.Module):
    """Two layers, and between them a branch of some kind on what the first returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count = kind, 0
        self.up, self.down, self.side = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        is_large = x.amax() > 10
        hidden: Tensor = getattr(self, self.kind)(self.up(x), is_large)
        return (self.down(hidden) + self.side(hidden).mean()).square().mean()

    def clamped(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if not (hidden.abs() < 4).all():
            limit = 3.0
            hidden = torch.clamp(hidden, -limit, limit)
        return hidden

    def checkpointed(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.clamped, hidden, is_large, use_reentrant=False)
        return result

    def infinite(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        hidden = hidden - hidden.detach().amin() + is_large
        if is_large:
            root = hidden.sqrt()  # whose gradient is infinite at zero
        else:
            root = hidden * 2
            root = root.sin()
        return root

    def numbered(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        largest = hidden.amax().item()
        if largest > 10:
            hidden = hidden / 10
        return hidden * int(largest * 10)

    def of_parameter(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        hidden = hidden + is_large
        if self.down.bias.sum() > 0 or self.down.bias.amax() > is_large.double():
            hidden = hidden.sin()
        return hidden

    def nested(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        for power in range(1, 3):
            if hidden.sum():
                hidden = hidden * 0.5 if is_large else hidden.tanh()
                if hidden[:, :1].amax() > 0.1:
                    hidden = hidden + power
                elif is_large:
                    hidden = hidden.exp()
        return hidden

    def drawn(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if is_large:
            hidden = F.dropout(hidden, 0.5)
        return hidden

    def counted(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if is_large:
            self.count += 1
            hidden = hidden * 2
        return hidden

    def listed(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        values = [hidden]
        if is_large:
            values.append(hidden * 2)
        return values[-1]

    def in_place(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if is_large:
            hidden.mul_(2)
        return hidden

    def in_place_of_others(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        result = hidden.detach() * self.up.bias
        if is_large:
            result += self.side(hidden)
        return result

    def aliased(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        other = hidden
        if is_large:
            other = hidden * 2
        other += 1
        return hidden

    def returned(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        return self.pair(hidden, is_large)[1]["hidden"] * self.pair(hidden, ~is_large)[0]

    def pair(self, hidden: Tensor, is_large: Tensor) -> tuple[Tensor | int, dict[str, Tensor]]:
        with torch.no_grad():
            hidden = hidden + 0
        if is_large.item():
            return 2, {"hidden": self.up.bias * hidden}
        hidden = hidden * 2
        if hidden.amax() < -1 or is_large:
            return 2, {"hidden": (self.up.bias * 3).expand_as(hidden)}
        return 2, {"hidden": self.up.bias * hidden.sin()}

    def conditional(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        result: Tensor = torch.cond(is_large, lambda x: x.sin(), lambda x: x * 2, (hidden,))
        return result

    def returned_in_loop(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        for _ in range(2):
            if is_large:
                return hidden
            hidden = hidden * 2
        return hidden

    def cut(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if is_large:
            hidden = hidden[:1]
        return hidden

    def looped(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        while is_large:
            hidden = hidden * 0.5
            is_large = hidden.amax() > 10
        return hidden

    def of_other_parameters(self, hidden: Tensor, is_large: Tensor) -> Tensor:
        if is_large:  # on one device, the layer has no gradient otherwise
            hidden = self.side(hidden)
        return hidden


DOING_MORE = [
    "counted", "listed", "in_place_of_others", "returned_in_loop", "cut", "looped", "of_other_parameters",
]  # fmt: skip


SELECTED = [
    "clamped", "checkpointed", "infinite", "nested", "numbered", "of_parameter", "returned", "conditional", "in_place",
]  # fmt: skip


@pytest.mark.parametrize("kind", DOING_MORE)
def test_a_branch_that_does_more_than_to_assign_is_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"a branch depends on the values of tensors\n.*(if|while) is_large:"):
        capture(Branching(kind), torch.ones(4, 8))


def test_a_side_that_draws_random_numbers_may_be_selected() -> None:
    model = Branching("drawn")
    captured = capture(model, torch.ones(4, 8))
    assert_computes(captured, model, (torch.zeros(4, 8),), {})  # the other side
    assert any("philox" in str(node.target) or "dropout" in str(node.target) for node in captured.graph.graph.nodes)


def test_what_a_branch_assigns_must_not_be_written_in_place_later() -> None:
    with pytest.raises(CaptureError, match=r"a branch on a tensor assigns is written in place later\n.*hidden \* 2"):
        capture(Branching("aliased"), torch.ones(4, 8))


@pytest.mark.parametrize("kind", SELECTED)
def test_a_branch_that_assigns_trains_as_on_one_device(kind: str, pool: WorkerPool) -> None:
    trains_as_on_one_device(Case(kind, partial(Branching, kind), draw), pool)


def losses_and_gradients(case: Case, model: nn.Module) -> Any:
    """Of two batches, the second of which has large values."""
    seen = []
    for step in range(2):
        model.zero_grad()
        loss = model(case.batch(step, dtype=DTYPE)["x"] * (1 + 99 * step))
        loss.backward()
        seen += [loss.detach(), *(whole(p.grad).clone() for p in model.parameters() if p.grad is not None)]
    return seen


WAYS = [Way("zdp", {"*": "zdp"}), Way("tensor and data", {"up": (2, 1, 1, 2), "down": (1, 2, 1, 2)})]


def trains_as_on_one_device(case: Case, pool: WorkerPool, ways: list[Way] = WAYS) -> None:
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, partial(losses_and_gradients, case), steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


class Initialised(nn.Module):
    """Has a codebook that the first call initialises, a mean that warms up, and a count of large batches."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.steps = nn.Buffer(torch.tensor(False)), nn.Buffer(torch.tensor(0))
        self.codes, self.mean, self.large = (nn.Buffer(torch.zeros(size)) for size in ((4, 8), (8,), (1,)))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.initialise(x)
        with torch.no_grad():
            if self.steps < 1:
                self.mean.copy_(x.mean(0))
            else:
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                if self.codes.amax() > 10 or x.amax() > 10:
                    self.large += 1
                    self.mean[1:4] = 0
            self.steps += 1
        nearest = torch.cdist(x, self.codes).argmin(1)
        return (self.down(self.up(x - self.mean + self.codes[nearest])) * (1 + self.large)).square().mean()

    @torch.no_grad()
    def initialise(self, x: Tensor) -> None:
        if self.is_ready:
            return
        self.codes.data.copy_(x[:4] * 2)
        self.is_ready.fill_(True)


def test_buffers_that_a_branch_writes_train_as_on_one_device(pool: WorkerPool) -> None:
    trains_as_on_one_device(Case("initialised", Initialised, draw), pool, [Way("tensor", {"up": (2, 1, 1, 2)})])


class Assigned(nn.Module):
    """Assigns buffers, and puts tensors into dicts and lists, in sides of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.count = nn.Buffer(torch.zeros(8)), nn.Buffer(torch.tensor(0))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        before, is_large = self.mean, x.amax() > 10
        if is_large:
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.mean = self.mean + 1
            if x.amin() < -5:
                self.count = self.count + 1
        else:
            self.mean = x.amin(0)
        hidden = {"up": self.up(x + before * 2), "mean": self.mean}
        found = [hidden["up"]]
        if is_large:
            hidden["up"] = hidden["up"].sin()
            found.append(hidden["up"] * 2)
        else:
            found.append(hidden["up"].cos())
        total = self.down(hidden["up"] + found[1]).square().mean()
        return total * (1 + self.count) + self.mean.sum() * self.down.bias.sum()


def test_buffers_that_a_branch_assigns_train_as_on_one_device(pool: WorkerPool) -> None:
    trains_as_on_one_device(Case("assigned", Assigned, draw), pool)


class Ranged(nn.Module):
    """Follows the range of its inputs, as I-BERT's activations do, in buffers that branches assign."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Buffer(torch.full((1,), -1e-5)), nn.Buffer(torch.full((1,), 1e-5))
        self.calls, self.norm = nn.Buffer(torch.tensor(0)), nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        low, high = x.data.amin(), x.data.amax()
        before = self.high
        if self.low.min() > -1.1e-5 and self.high.max() < 1.1e-5:
            self.low = self.low + low
            self.high = self.high + high
            self.calls = self.calls + 1
        elif self.training:
            self.low = self.low * 0.9 + low * 0.1
            self.high = self.high * 0.9 + (high - self.low) * 0.1  # the new one
            if high > 10:
                self.norm.running_mean = self.norm.running_mean * 0.5
                self.high = self.high * 0.5
        self.calls = self.calls + 1
        hidden = self.up(self.norm(x)) * (self.high - self.low + before)
        return self.down(hidden).square().mean() * self.calls


def test_ranges_that_a_branch_assigns_train_as_on_one_device(pool: WorkerPool) -> None:
    trains_as_on_one_device(Case("ranged", Ranged, draw), pool, [Way("tensor", {"up": (2, 1, 1, 2)})])
    model, inputs = Ranged(), [scale * torch.randn(8, 8) for scale in (1, 1, 20)]
    parallel: Any = sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), inputs[0], progress=False)
    for x in inputs:
        torch.testing.assert_close(parallel(x), model(x))
        torch.testing.assert_close(dict(parallel.named_buffers()), dict(model.named_buffers()))


class Swapped(Ranged):
    def forward(self, x: Tensor) -> Tensor:
        if x.amax() > 10:
            self.low, self.high = self.high, self.low
        return self.up(x * self.low + self.high).square().mean()


class GivenOneSize(Ranged):
    def forward(self, x: Tensor) -> Tensor:
        if x.amax() > 10:
            self.low = x.data.amin(0)
        return self.up(x * self.low).square().mean()


@pytest.mark.parametrize("kind", [Swapped, GivenOneSize])
def test_buffers_that_a_branch_may_not_assign_so_are_refused(kind: Any) -> None:
    with pytest.raises(CaptureError, match="a branch (on a tensor assigns|depends)"):
        capture(kind(), torch.ones(4, 8))


class Normalized(nn.Module):
    """Initialises trained parameters in its first call, as flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready, self.bias = nn.Buffer(torch.tensor(0)), nn.Parameter(torch.zeros(8))
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.bias.data.copy_(-x.mean(0))
            self.is_ready.fill_(1)
        return self.up(x + self.bias).square().mean()


class ReadAfterwards(Normalized):
    """Both sides of the branch compute with the parameter, one after it has written it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.bias.data.copy_(-x.mean(0))
            self.is_ready.fill_(1)
            hidden = self.up(x + self.bias)
        else:
            hidden = self.up(x + self.bias)
        return hidden.square().mean()


class ReadBefore(Normalized):
    """A side of the branch computes with the parameter before it writes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            x = x * self.bias.exp()
            self.bias.data.copy_(-x.mean(0))
            self.is_ready.fill_(1)
        return self.up(x + self.bias).square().mean()


def test_parameters_that_a_branch_writes() -> None:
    model, x = Normalized(), torch.randn(4, 8)
    assert_computes(capture(model, x), model, (x,), {})
    assert model.is_ready
    assert_computes(capture(model, x), model, (x,), {})


@pytest.mark.parametrize("kind", [ReadAfterwards, ReadBefore])
def test_parameters_that_a_branch_writes_and_trains_are_refused_with_a_way_out(kind: Any) -> None:
    with pytest.raises(CaptureError, match=r"(?s)changes (a|its) parameter.*forward.*call the model once"):
        capture(kind(), torch.randn(4, 8))


def test_numbers_of_buffers_train_as_on_one_device(pool: WorkerPool) -> None:
    trains_as_on_one_device(Case("padded", Padded, draw), pool)


def test_numbers_of_buffers_that_are_written_train_as_on_one_device(pool: WorkerPool) -> None:
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor and data", {"up": (2, 1, 1, 2)})]
    trains_as_on_one_device(Case("written", Written, draw), pool, ways)


class Indexed(nn.Module):
    """Looks rows and columns up by tensors of one integer, such as a step that the forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.two = nn.Buffer(torch.tensor(1)), nn.Buffer(torch.tensor(2))
        self.table, self.up = nn.Parameter(torch.linspace(-1, 1, 4 * 3 * 8).view(4, 3, 8)), nn.Linear(8, 16)
        self.means = nn.Buffer(torch.zeros(4, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        last = self.step % 3 - 3
        hidden = x * self.table[self.two, last] + self.table[..., last, :].sum(0)
        hidden = hidden + self.table[None, last, 0:2, last].sum()
        place = self.table.sum((0, 1)).argmax()
        before = torch.index_select(self.means, 1, (self.step % 2).reshape(1))
        self.means[:2, self.step % 2] = x.mean(0) + before[:2, 0] / 2
        self.means[..., self.step % 2 - 2, self.step] = x[:1, 0]
        self.means[last, None, self.step % 2, 4:6] = 1
        self.means[:, self.step % 2] *= 0.5
        hidden = hidden + self.means.mean((0, 1))
        hidden[:, place] += x[:, 0]
        number, other = int(self.step % 2), self.table[0].sum(0).argmin().item()
        self.means[:, number, 1:3] += 0.25
        self.means[number] /= 2
        hidden[:, other] -= x[:, 1]
        for row in range(2):
            hidden[:, self.table[row].sum(0).argmin(), None] /= 1 + x[:, row : row + 1].square()
        return (self.up(hidden + x[:, place][:, None]) * torch.linspace(1, 2, 5)[self.step]).square().mean()


def test_indices_that_are_tensors_train_as_on_one_device(pool: WorkerPool) -> None:
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor and data", {"up": (2, 1, 1, 2)})]
    trains_as_on_one_device(Case("indexed", Indexed, draw), pool, ways)


def through_the_result(hidden: Tensor, place: Tensor) -> Tensor:
    hidden[:, place].mul_(2)
    return hidden


def result_is_read(hidden: Tensor, place: Tensor) -> Tensor:
    part = hidden[:, place]
    part += 1
    hidden[:, place] = part
    hidden += 1
    return hidden * part[:, None]


def read_before_it_is_assigned(hidden: Tensor, place: Tensor) -> Tensor:
    part = hidden[:, place]
    part += 1
    total = hidden.sum()
    hidden[:, place] = part
    return hidden * total


def another_result_is_read(hidden: Tensor, place: Tensor) -> Tensor:
    part = hidden[:, place]
    hidden[:, place] += 1
    return hidden * part[:, None]


@pytest.mark.parametrize(
    "write", [through_the_result, result_is_read, read_before_it_is_assigned, another_result_is_read]
)
def test_what_a_tensor_indexes_must_not_be_written_in_place(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Writes(Indexed):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return write(hidden, hidden.sum(0).argmax())

    with pytest.raises(CaptureError, match=r"what is indexed by.*\n.*: .*hidden\[:, place.*\n.*index_sel"):
        capture(Writes(), torch.ones(4, 8))
