"""Models that pack padded sequences for their recurrent layers train to the numbers of one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import shardweave as sw
from shardweave.compiler.capture import capture
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_capture import assert_computes
from tests.compiler.test_ordinary_models import two_steps
from tests.compiler.training import Way, compile_ways
from tests.models import Case
from tests.runtime.loop import DTYPE, same_in_both_worlds

STEPS = 5


class Packs(nn.Module):
    """Packed sequences through layers of all kinds, with lengths from the loader and from the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 4), nn.Linear(8, 12)
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, dropout=0.0)
        self.gru, self.rnn = nn.GRU(8, 8), nn.RNN(8, 4, nonlinearity="relu", bidirectional=True, bias=False)
        self.projected = nn.LSTM(8, 4, 2, bidirectional=True, proj_size=3)
        self.first = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.table(tokens)
        # 1. Lengths from the loader, layers on one another, a state of the model's own
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        packed, (hidden, cells) = self.lstm(packed)
        steps, last = self.gru(packed, self.first.expand(-1, len(x), -1).contiguous())
        padded, counts = pad_packed_sequence(steps, padding_value=0.5)
        loss: Tensor = padded.sin().mean() + hidden.square().mean() + (cells[1] * last[0, :, :4]).mean()
        outputs, (hidden, cells) = self.projected(packed)
        outputs = pad_packed_sequence(outputs)[0]
        loss = loss + outputs.sin().mean() + (hidden * cells[:, :, :3]).mean()
        # 2. Lengths from the tokens, more room than is needed
        packed = pack_padded_sequence(padded, (tokens != 0).sum(1), enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=STEPS + 2)
        loss = loss + self.head(padded).square().mean()
        # 3. A loss of what is packed
        logits = self.head(self.gru(packed)[0].data)
        targets = pack_padded_sequence(tokens, lengths, batch_first=True, enforce_sorted=False)[0]
        return loss + F.cross_entropy(logits, targets) + (padded[:, -3] * counts[:, None]).mean()


def sequences(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    lengths = torch.randint(1, STEPS + 1, (size,), generator=generator)
    lengths[int(torch.randint(size, (1,), generator=generator))] = STEPS
    tokens = torch.randint(1, 12, (size, STEPS), generator=generator)
    return {"tokens": tokens * (torch.arange(STEPS) < lengths[:, None]), "lengths": lengths}


def test_packed_sequences_train_as_on_one_device(pool: WorkerPool) -> None:
    case = Case("packs", Packs, sequences)
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor and data", {"*": "tensor:2"})]
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, partial(two_steps, draw=sequences), steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


class PacksNumbers(nn.Module):
    """Lengths as numbers: in the longest sequence's size nothing depends on the values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, bidirectional=True)
        self.projected = nn.LSTM(4, 4, bidirectional=True, proj_size=2)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed, _ = self.cell(pack_padded_sequence(x, [4, 3], batch_first=True))
        of_list = pack_sequence([x[0, :2], x[1]], enforce_sorted=False)
        of_values = pack_padded_sequence(x, lengths.tolist(), batch_first=True)
        padded, _ = pad_packed_sequence(self.cell(of_values)[0], total_length=4)
        infinite = torch.where(torch.arange(5)[:, None] < 4, x, torch.inf)
        return (
            pad_packed_sequence(packed), self.cell(of_list)[1], padded,
            self.cell(pack_padded_sequence(infinite, [4, 2], batch_first=True))[1],
            self.projected(pack_padded_sequence(infinite, [4, 2], batch_first=True))[1],
        )  # fmt: skip


def test_lengths_are_numbers_too() -> None:
    arguments = torch.randn(2, 5, 4), torch.tensor([4, 1])
    model = PacksNumbers()
    captured = capture(model, arguments)
    assert_computes(captured, model, arguments, {})
    assert not any("region" in str(node.target) for node in captured.graph.graph.nodes if "pad" in node.name)


class PackedSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell: nn.RNNBase = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0].sum()


def test_lengths_that_a_step_is_not_compiled_for_are_errors() -> None:
    model, x = PackedSteps(), torch.randn(2, 3, 4)
    parallel = sw.compile_parallel(model, sw.Cluster.local(1), (x, torch.tensor([3, 2])), progress=False)
    torch.testing.assert_close(parallel(x, torch.tensor([1, 3])), model(x, torch.tensor([1, 3])))
    x, lengths, options = torch.randn(4, 3, 4), torch.tensor([3, 2, 1, 2]), sw.Options(micro_batches=2)
    split = sw.compile_parallel(model, sw.Cluster.local(1), (x, lengths), options=options, progress=False)
    torch.testing.assert_close(split(x, lengths), model(x, lengths))  # one of two micro-batches has the longest
    x = x[:2]
    with pytest.raises(AssertionError, match="a longest sequence of 3 steps.*: pass total_length"):
        parallel(x, torch.tensor([2, 2]))
    for wrong in (0, 4):
        with pytest.raises(AssertionError, match="a length is not between 1 and 3"):
            parallel(x, torch.tensor([3, wrong]))


class Unpacked(PackedSteps):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        data, sizes, *_ = pack_padded_sequence(x, lengths, batch_first=True)
        result: Tensor = self.cell(PackedSequence(data * 2, sizes))[1]
        return result


class TakesPacked(PackedSteps):
    def forward(self, packed: PackedSequence) -> Tensor:  # type: ignore[override]
        result: Tensor = self.cell(packed)[1]
        return result


@pytest.mark.parametrize(
    ("model", "line", "way_out"),
    [
        (Unpacked, "data, sizes, [*]_ = pack_padded", "Give the padded batch and its lengths to the model"),
        (TakesPacked, "= self.cell.packed", "Give the padded batch and its lengths to the model"),
    ],
)
def test_what_is_refused_has_a_way_out(model: Any, line: str, way_out: str) -> None:
    x, lengths = torch.randn(2, 3, 4), torch.tensor([3, 2])
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    with pytest.raises(sw.CaptureError, match=f"(?s)test_packed_sequences.py:.*{line}.*\n{way_out}"):
        capture(model(), (packed,) if model is TakesPacked else (x, lengths))
