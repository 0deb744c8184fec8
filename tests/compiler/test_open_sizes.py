"""Models in which sizes and numbers depend on the values of tensors train to the numbers of one device."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.ir import CaptureError
from shardweave.runtime.launch import WorkerPool
from tests.compiler.training import Way, compile_ways
from tests.models import Case
from tests.runtime.loop import DTYPE, same_in_both_worlds, whole

EXPERTS = 4
SKIPPING = ("skips", "any_of", "counted")
"""Ways to leave experts out that get no rows"""


class Selects(nn.Module):
    """Two layers, and between or after them one of the ways in which users make sizes of values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if kind == "fixed":
            self.rows = nn.Buffer(torch.arange(16) % 3 == 1)
            self.counts = nn.Buffer(torch.arange(16) % 4)
        if kind in ("mixture", "hits", *SKIPPING):
            self.rows = nn.Buffer(torch.zeros(EXPERTS))
            self.gate = nn.Linear(8, EXPERTS)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(EXPERTS)
            )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.down(self.up(x).relu()).flatten(0, 1)
        loss: Tensor = getattr(self, self.kind)(hidden, labels.flatten())
        return loss

    def fixed(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sizes that follow from buffers."""
        chosen, repeated = hidden[self.rows], hidden.repeat_interleave(self.counts, 0)
        filled = torch.zeros_like(hidden)
        filled[self.rows] = chosen.sin()
        return F.cross_entropy(chosen, labels[self.rows]) + (filled * hidden).sum() + repeated.pow(2).mean()

    def mixture_of(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(hidden)
        for index in range(EXPERTS):
            top, rows = torch.where(mask[index])
            result.index_add_(0, rows, self.experts[index](hidden[rows]) * weights[rows, top, None])
        return result

    def mixture(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return (hidden + self.mixture_of(hidden)).pow(2).mean()

    def hits(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(1)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        result = torch.zeros_like(hidden)
        for index in mask.sum(dim=(-1, -2)).gt(0).nonzero():
            top, rows = torch.where(mask[index].squeeze(0))
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, self.experts[int(index)](hidden[rows]) * weights[rows, top, None])
        for number in mask.sum(dim=(-1, -2)).nonzero().flatten().tolist():
            rows = torch.where(mask[number])[1]
            result[rows] += self.experts[number](hidden[rows]).sin() * (number + 1)
        for index in chosen[:, 0].unique():
            rows = chosen[:, 0] == index
            result[rows] += self.experts[index](hidden[rows]).cos() * weights[rows] * (index + 1)
        for number in torch.unique(self.gate(hidden).argmax(-1), sorted=True).tolist():
            rows, top = torch.where(chosen == number)
            result.index_add_(0, rows, self.experts[number](hidden[rows]) * weights[rows, top, None] * number)
        return (hidden + result).pow(2).mean() + self.unused()

    def skips(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Experts that no row is sent to are left out: by the size of what is selected."""
        mask, result, lists = F.one_hot(labels // 2, EXPERTS), torch.zeros_like(hidden), ([], [])
        for index, expert in enumerate(self.experts):
            rows = torch.where(mask[:, index])[0]
            if rows.numel() == 0:
                continue
            values = expert(hidden[rows])
            result.index_add_(0, rows, values)
            numbers = rows.tolist()  # as an index
            result[numbers] *= hidden[None, numbers, 0].reshape(-1, 1) / len(numbers)
            lists[0].append(rows)
            lists[1].append(values.sin())
        for index, expert in enumerate(self.experts):
            rows = (labels % EXPERTS == index).nonzero().squeeze(1)[:5]
            result = result.index_add(0, rows, self.of_rows(expert, hidden, rows))
        listed = torch.zeros_like(hidden).index_copy(0, torch.cat(lists[0]), torch.cat(lists[1], dim=0))
        return (hidden + result * listed).pow(2).mean() + self.unused()

    def of_rows(self, expert: nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
        if len(rows) > 0:
            result: Tensor = expert(hidden[rows]) * hidden.mul(2)[rows].sigmoid()
            return result
        return hidden.new_zeros(0, 8)

    def unused(self) -> Tensor:
        """On one device, parameters that are skipped get no gradient but for this."""
        return torch.stack([p.sum() for p in self.experts.parameters()]).sum() * 0

    def any_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """By whether a mask has a true element, where a loss begins with a number and has means over the rows."""
        result, scores, extra = torch.zeros_like(hidden), self.gate(hidden).sigmoid(), 0.0
        for index, expert in enumerate(self.experts):
            mask = labels // 2 == index
            if mask.any():
                result[mask] += expert(hidden[mask]) * scores[mask, index, None]
            both = torch.stack([mask, labels % EXPERTS == index], 1)
            if not both.any():
                continue
            chosen = both.any(-1)
            result[chosen] = result[chosen] + expert(hidden[chosen]).sin()
            extra = extra + result[mask].mean() if mask.sum().item() > 0 else extra
        return (hidden + result).pow(2).mean() + extra + self.unused()

    def counted(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """By counts of rows that are sorted, as DeepSeek's mixtures do."""
        chosen, outputs, start, result = labels // 2, [], 0, torch.zeros_like(hidden)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        ends = chosen.bincount(minlength=EXPERTS).cumsum(0).tolist()
        for index, count in enumerate(counts.tolist()):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[index](hidden[order][start:end]))
            start = end
        for index, end in enumerate(ends):
            start = 0 if index == 0 else ends[index - 1]
            if start == end:
                continue
            rows = order[start:end]
            result.index_add_(0, rows, self.experts[index](hidden[rows]).sin())
        for index, count in enumerate(counts.tolist()):
            if count:
                rows = torch.where(chosen == index)[0]
                self.rows[index] += count
                result[rows] *= self.experts[index](hidden[rows])
        sorted_back = torch.empty_like(hidden).index_copy(0, order, torch.cat(outputs))
        return (hidden + result * sorted_back).pow(2).mean() + self.unused() + self.rows.sum()

    def classes(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss, scales = hidden.new_zeros(()), {f"{index}": index + 1 for index in range(8)}
        for label in F.one_hot(labels, 8).sum(0).nonzero().flatten():
            if label == 7:
                continue
            loss = loss + hidden[labels == label].pow(2).mean() * scales[f"{label}"]  # not a number of no rows
        return loss

    def kept(self, hidden: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(hidden, labels, reduction="none")
        return losses[labels > 2].mean()

    def kept_rows(self, hidden: Tensor, labels: Tensor) -> Tensor:
        keep = labels > 2
        return F.cross_entropy(hidden[keep], labels[keep])

    def centred(self, hidden: Tensor, labels: Tensor) -> Tensor:
        rows = hidden[labels > 2]
        return (rows - rows.mean(0).tanh()).pow(2).sum() / len(rows)  # a fixed size between two open ones

    def written(self, hidden: Tensor, labels: Tensor) -> Tensor:
        keep, changed = labels > 2, hidden.clone()
        changed[keep] = hidden[keep].tanh() * 2
        return changed.pow(2).mean()

    def filled(self, hidden: Tensor, labels: Tensor) -> Tensor:
        changed = hidden * 2
        changed[labels > 2] = 0.5
        changed[:, torch.arange(8) > 5] = hidden.mean()
        return changed.pow(2).mean()

    def placed(self, hidden: Tensor, labels: Tensor) -> Tensor:
        changed, keep = hidden * 2, torch.arange(len(hidden)) + labels * 0 < 4
        changed[keep] = hidden[4:8].tanh()  # so many rows as are selected
        return changed.pow(2).mean()

    def masked(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return torch.masked_select(hidden, labels[:, None] > 2).sin().sum()

    def loops(self, hidden: Tensor, labels: Tensor) -> Tensor:
        edges = torch.stack([labels, labels.roll(1)])
        edges = edges[:, edges[0] != edges[1]]
        edges = torch.cat([edges, torch.arange(len(hidden)).expand(2, -1)], 1)
        return torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]).pow(2).mean()

    def cut(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden[: int(labels.max())].pow(2).mean()

    def scaled(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return (hidden * hidden.detach().abs().max().item()).pow(2).mean()

    def repeated(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return hidden.repeat_interleave(labels, 0).pow(2).mean()

    def shared(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.down(self.up(hidden[labels > 2]).relu()).pow(2).sum() + hidden.pow(2).mean()

    def distinct(self, hidden: Tensor, labels: Tensor) -> Tensor:
        values, places = labels.unique(return_inverse=True)
        return torch.zeros(len(values), 8, dtype=hidden.dtype).index_add(0, places, hidden).pow(2).sum()


KINDS = (
    "kept", "kept_rows", "centred", "written", "filled", "placed", "masked", "loops", "cut", "scaled", "repeated",
    "shared", "distinct", "mixture", "hits", "classes", "fixed", *SKIPPING,
)  # fmt: skip


def draw(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    x = torch.randn(size, 2, 8, generator=generator)
    return {"x": x, "labels": torch.randint(0, 8, (size, 2), generator=generator)}


def batches() -> list[dict[str, Tensor]]:
    """Two drawn batches; one from which a rank selects all and another nothing; one of which all is selected."""
    found = [draw(torch.Generator().manual_seed(seed)) for seed in range(4)]
    found[2]["labels"] = torch.tensor([[1, 2]] * 4 + [[5, 7]] * 4)
    found[3]["labels"].fill_(4)
    return [{"x": batch["x"].to(DTYPE), "labels": batch["labels"]} for batch in found]


def losses_and_gradients(model: nn.Module) -> Any:
    seen = []
    for batch in batches():
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        seen += [loss.detach(), *(whole(p.grad).clone() for _, p in model.named_parameters() if p.grad is not None)]
    model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str, pool: WorkerPool) -> None:
    case = Case(kind, partial(Selects, kind), draw)
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor and data", {"up": (2, 1, 1, 2), "down": (1, 2, 1, 2)})]
    if kind in ("kept", "shared", "mixture"):
        ways += [Way("dp", {"*": "dp"}), Way("3d", {"up": (2, 1, 2, 1), "down": (1, 2, 2, 1)}), Way("planner")]
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, losses_and_gradients, steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


def leaves(x: Tensor) -> Tensor:
    for place in x[:, 0].nonzero():
        x = x * 2
        if place == 2:
            break
    return x


def returns(x: Tensor) -> Tensor:
    for place in x[:, 0].nonzero():
        return x[place]
    return x


def lists(x: Tensor) -> Tensor:
    for place in x[:, 0].nonzero().tolist():
        x = x + x[place]
    return x


def distinct(x: Tensor) -> Tensor:
    for label in x[:, 0].long().unique().tolist():
        x = x + label
    return x


def changed(x: Tensor) -> Tensor:
    indices = x.argmax(-1)
    indices[0] = 100
    for index in indices.unique().tolist():
        x = x + index
    return x


def changed_data(x: Tensor) -> Tensor:
    indices = x.argmax(-1)
    indices.data[0] = 100
    for index in indices.unique().tolist():
        x = x + index
    return x


def shifted(x: Tensor) -> Tensor:
    indices = x.argmax(-1)
    indices <<= 3
    for index in indices.unique().tolist():
        x = x + index
    return x


def changed_later(x: Tensor) -> Tensor:
    indices = x.topk(2)[1].flatten().unique()
    same = indices.view(-1)
    same[0] = 100
    for index in indices.tolist():
        x = x + index
    return x


def of_many(x: Tensor) -> Tensor:
    for index in x.repeat(1, 1000).argmax(-1).unique().tolist():
        x = x + index
    return x


def counts(x: Tensor) -> Tensor:
    for count in x[:, 0].long().bincount().tolist():
        x = x + count
    return x


def appends(x: Tensor) -> Tensor:
    rows = []
    for place in x[:, 0].nonzero():
        rows.append(x[place])
    return torch.cat(rows)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Unused(Selects):
    """Its experts may get no gradients on one device."""

    def unused(self) -> Any:
        return 0


@pytest.mark.parametrize("kind", [*SKIPPING, "hits", "classes"])
def test_gradients_that_one_device_does_not_give_are_told(kind: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (Unused(kind), Selects(kind)):
            capture(module, tuple(draw(torch.Generator().manual_seed(0)).values()))
    told = [str(each.message) for each in caught if "gradients of zero" in str(each.message)]
    assert len(told) == (kind != "classes")
    assert not told or f"{4 * EXPERTS} parameters (experts.0.0.weight, " in told[0]


OF_UNIQUE_VALUES = distinct, changed, changed_data, shifted, of_many


@pytest.mark.parametrize(
    ("function", "way_out"),
    [
        (lists, "without branching"),
        *[(function, "Count by counts = torch.bincount") for function in OF_UNIQUE_VALUES],
        (changed_later, "without branching"),
        (counts, "a minlength, such as"),
    ],
)
def test_a_loop_over_a_list_of_unknown_length_is_refused_with_a_way_out(function: Any, way_out: str) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)a number depends on the values of tensors.*tolist.*{way_out}"):
        capture(Calls(function), torch.ones(4, 8))


class Mixture(nn.Module):
    """Experts whose rows a function selects, of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.experts, self.other = kind, nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.abs().argmax(-1) % 3
        result: Tensor = getattr(self, self.kind)(x, chosen)
        return result.pow(2).mean()

    def all_rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            result.index_add_(0, rows, expert(x[rows]))
        return result

    def some_rows(self, x: Tensor, chosen: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if not len(rows):
                continue
            result.index_add_(0, rows, expert(x[rows]))
        return result

    def negative(self, x: Tensor, chosen: Tensor) -> Tensor:
        """A number that is not above zero may select rows."""
        result, counts = torch.zeros_like(x), chosen.bincount(minlength=3).sub(2).tolist()
        for count, expert in zip(counts, self.experts, strict=True):
            if count > 0:
                rows = torch.arange(len(x))[:count]
                result.index_add_(0, rows, expert(x[rows]))
        return result

    def beside(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What is computed beside the rows, and reads what they are added to, is gated; the rest is not."""
        hidden = self.other(x)
        result, other = hidden * 2, hidden * 3
        for index, expert in enumerate(self.experts):
            mask = chosen == index
            if mask.sum().item() > 0:
                result = result.index_add(0, mask.nonzero().squeeze(-1), hidden.sin()[mask] * expert(x[mask]))
                other[mask] += expert(x[mask]) * hidden.cos()[mask]
            if mask.any():
                result = result.index_add(0, mask.nonzero().squeeze(-1), result.cos()[mask])
        return result * other

    def changed(self, x: Tensor, chosen: Tensor) -> Tensor:
        """A mask that is written after it was found to have no true element selects rows."""
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = chosen == index + 1
            is_hit = mask.any()
            mask[0] = True
            if is_hit:
                result[mask] += expert(x[mask])
        return result + self.other(x)

    def bounded(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Bounds that are equal are not zero."""
        result, ends = torch.zeros_like(x), chosen.bincount(minlength=3).cumsum(0).tolist()
        for index in (1, 2):
            if ends[index] - ends[index - 1] != 0:
                rows = torch.arange(len(x))[: ends[index]]
                result.index_add_(0, rows, self.experts[index](x[rows]))
            if ends[index] != ends[index - 1]:
                rows = torch.arange(len(x))[ends[index - 1] :]
                result.index_add_(0, rows, self.experts[index](x[rows]))
        return result + self.other(x)

    def infinite(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What is computed beside the rows has an infinite derivative."""
        result, zeros = torch.zeros_like(x), x * 0
        for index, expert in enumerate(self.experts):
            mask = chosen == index + 1
            if mask.sum() > 0:
                result[mask] += expert(x[mask]) * (zeros.sum() + 1 + self.other.bias * 0 + index * zeros.sqrt()[mask])
        return result + self.other(x)

    def listed(self, x: Tensor, chosen: Tensor, use: Any = len) -> Any:
        found: list[Tensor] = []
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows) > 0:
                found.append(expert(x[rows]))
        return x * use(found)

    def summed(self, x: Tensor, chosen: Tensor) -> Any:
        return self.listed(x, chosen, lambda found: sum(each.mean() for each in found))

    def stacked(self, x: Tensor, chosen: Tensor) -> Any:
        return self.listed(x, chosen, lambda found: torch.stack([each.mean() for each in found]).sum())

    def first(self, x: Tensor, chosen: Tensor) -> Any:
        return self.listed(x, chosen, lambda found: found[0].sum())

    def numbers(self, x: Tensor, chosen: Tensor, use: Any = lambda x, numbers: x * (2 if numbers else 1)) -> Any:
        return use(x, torch.where(chosen == 0)[0].tolist())

    def added(self, x: Tensor, chosen: Tensor) -> Any:
        return self.numbers(x, chosen, lambda x, numbers: x[numbers + [1]])

    def contained(self, x: Tensor, chosen: Tensor) -> Any:
        return self.numbers(x, chosen, lambda x, numbers: x * (2 if 1 in numbers else 1))

    def equal(self, x: Tensor, chosen: Tensor) -> Any:
        return self.numbers(x, chosen, lambda x, numbers: x * (2 if numbers == [] else 1))

    def iterated(self, x: Tensor, chosen: Tensor) -> Any:
        return self.numbers(x, chosen, lambda x, numbers: x * sum(numbers))

    def largest(self, x: Tensor, chosen: Tensor) -> Tensor:
        if chosen[0] == 0:  # no count
            x = self.other(x)
        return x

    def many(self, x: Tensor, chosen: Tensor) -> Tensor:
        if (chosen == 0).sum() > 1:
            x = self.other(x)
        return x


def test_a_selection_without_rows_needs_no_branch() -> None:
    x = torch.randn(6, 8)
    codes = [capture(Mixture(kind), x).graph.code for kind in ("all_rows", "some_rows")]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("kind", ["some_rows", "negative", "infinite", "beside", "changed", "bounded"])
def test_rows_that_are_skipped_change_nothing(kind: str) -> None:
    model = Mixture(kind).to(DTYPE)
    x = torch.randn(6, 8, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 9  # one expert gets all rows
    parallel: Any = sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), x, progress=False)
    for module in (model, parallel):
        module(x).backward()
    given = dict(parallel.named_parameters())
    for name, expected in model.named_parameters():
        if given[name].grad is not None or expected.grad is not None:
            gradient = torch.zeros_like(expected) if expected.grad is None else expected.grad
            torch.testing.assert_close(whole(given[name].grad), gradient)


@pytest.mark.parametrize("kind", ["listed", "summed", "stacked", "first"])
def test_a_list_with_selections_without_rows_is_refused_but_by_cat(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)a list of selections.*is used other than by torch\.cat.*found"):
        capture(Mixture(kind), torch.randn(6, 8))


@pytest.mark.parametrize("kind", ["numbers", "added", "contained", "equal", "iterated"])
def test_a_list_of_unknown_length_is_an_index_only(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"lambda x, numbers"):
        capture(Mixture(kind), torch.randn(6, 8))


@pytest.mark.parametrize("kind", ["largest", "many"])
def test_a_branch_on_another_number_has_the_same_parameters_in_its_sides(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)a branch depends on the values of tensors.*if .*chosen"):
        capture(Mixture(kind), torch.randn(6, 8))


def test_a_bincount_with_a_least_length_has_no_more_numbers() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            first, second = x[:, 0].long(), x[:, 1].int()
            weights = torch.bincount(first, x[:, 2], minlength=4) + second.bincount(minlength=4)
            return (super().forward(x) * weights).mean()

    model, x = Counts(8, 4), torch.arange(32.0).view(4, 8) % 4
    parallel: Any = sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), x, progress=False)
    torch.testing.assert_close(parallel(x), model(x).float())
    with pytest.raises(AssertionError, match=r"bincount: a value is not less than minlength=4"):
        parallel(x + 3)


@pytest.mark.parametrize("function", [leaves, returns, appends])
def test_a_loop_over_what_is_nonzero_that_does_more_than_to_assign_is_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"a loop over what is nonzero leaves early.*\n.*place"):
        capture(Calls(function), torch.ones(4, 8))


class OfConstants(nn.Linear):
    """The sizes of results follow from what is in buffers, or in the code."""

    def __init__(self, function: Any) -> None:
        super().__init__(8, 8)
        self.function = function
        self.rows = nn.Buffer(torch.tensor([True, False, True, True]))
        self.counts = nn.Buffer(torch.tensor([1, 0, 2, 1]))
        self.mask = nn.Buffer(torch.arange(32).view(4, 8) % 3 == 1)
        self.large = nn.Buffer(torch.arange(128).view(16, 8) % 5 == 1)  # its values are compared by a hash

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self, super().forward(x))
        return result


def upper_pairs(model: OfConstants, y: Tensor) -> Tensor:
    one, other = torch.ones(4, 4).triu(1).nonzero(as_tuple=True)
    return y[one] * y[other]


def parts(model: OfConstants, y: Tensor) -> Tensor:
    return torch.cat([part * index for index, part in enumerate(y.split(model.counts.tolist()))])


def looped(model: OfConstants, y: Tensor) -> Tensor:
    found = []
    for row in model.rows.nonzero().flatten():
        found.append(y[row] * int(row))  # which a loop over other rows may not do
    return torch.stack(found)


def assigned(model: OfConstants, y: Tensor) -> Tensor:
    result = torch.zeros_like(y)
    result[model.mask] = y[model.mask].sin()
    return result


OF_CONSTANTS: dict[str, Any] = {
    "mask": lambda model, y: y[model.rows],
    "mask in a tuple": lambda model, y: y[None, :, model.mask[0]],
    "mask of two dims": lambda model, y: y[model.mask],
    "large mask": lambda model, y: y.repeat(4, 1)[model.large],
    "mask in the code": lambda model, y: y[torch.ones(4, 8, dtype=torch.bool).tril()],
    "nonzero": lambda model, y: y[model.rows.nonzero().flatten()],
    "argwhere": lambda model, y: y[torch.argwhere(model.counts)[:, 0]],
    "where": lambda model, y: y[torch.where(model.rows)[0]],
    "masked_select": lambda model, y: y.masked_select(model.mask[:1]),
    "repeated": lambda model, y: y.repeat_interleave(model.counts, 0),
    "repeated by the code": lambda model, y: torch.repeat_interleave(y, repeats=torch.tensor([1, 2, 0, 3]), dim=0),
    "upper pairs": upper_pairs,
    "parts": parts,
    "looped": looped,
    "assigned": assigned,
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_a_size_that_follows_from_constants_is_known(name: str) -> None:
    model, x = OfConstants(OF_CONSTANTS[name]).to(DTYPE), torch.randn(4, 8, dtype=DTYPE)
    parallel: Any = sw.compile_parallel(copy.deepcopy(model), sw.Cluster.local(1), x, progress=False)
    assert not any("region" in str(node.target) for node in capture(model, x).graph.graph.nodes)
    for change in (False, True):
        for path, buffer in model.named_buffers() if change else ():  # their values are compared in each call
            buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer.flip(0))
            parallel.get_buffer(path).copy_(buffer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is compiled again
            results = [module(x) for module in (model, parallel)]
        torch.testing.assert_close(results[1], results[0])
        results[0].sum().backward()
        results[1].sum().backward()
        for (parameter, given) in zip(model.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(whole(given.grad), parameter.grad)


@pytest.mark.parametrize("kind", ["kept", "mixture", "cut"])
def test_the_torch_compile_door_takes_them_too(kind: str) -> None:
    torch._dynamo.reset()
    case = Case(kind, partial(Selects, kind), draw)
    model = case.model(DTYPE)
    compiled = torch.compile(
        case.model(DTYPE), backend="shardweave", fullgraph=True, dynamic=False, options={"cluster": sw.Cluster.local(1)}
    )
    torch.testing.assert_close(losses_and_gradients(compiled), losses_and_gradients(model))
