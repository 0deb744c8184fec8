"""What a call's batch means: the global one, or each rank's own samples; on real ranks, against one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardweave as sw
from shardweave.compiler.compiler import Compiler
from shardweave.runtime.launch import WorkerPool

DOUBLE = torch.float64
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
BATCH, LENGTH, WORDS = 12, 6, 12


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16, dtype=DOUBLE), nn.Linear(16, 4, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)))
        return y


class WithLoss(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), y)


class Flattened(Regression):
    """Takes targets, and returns predictions, with the samples and their steps in one dimension."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        flat = super().forward(x).flatten(0, 1)
        return F.cross_entropy(flat, y), flat


class Attention(nn.Module):
    """Called and returning as models of `transformers` do, with a mask that has no batch dimension besides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(WORDS, 8, dtype=DOUBLE), nn.Linear(8, 24, dtype=DOUBLE)
        self.head = nn.Linear(8, WORDS, dtype=DOUBLE)

    def forward(
        self, input_ids: Tensor, causal: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        q, k, v = self.qkv(self.embed(input_ids)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + causal
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        logits = self.head(scores.softmax(-1) @ v)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def mine(tensor: Tensor) -> Tensor:
    """This rank's samples of a global batch, as a sampler of contiguous parts gives them."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def numbers(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return tuple(torch.randn(BATCH, size, dtype=DOUBLE, generator=random) for size in (8, 4))  # type: ignore[return-value]


def words(step: int, length: int = LENGTH) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(WORDS, (BATCH, length), generator=random) for _ in range(2))
    mask = torch.ones_like(ids).masked_fill(torch.arange(length) >= torch.arange(BATCH)[:, None] % 3 + length - 2, 0)
    causal = torch.full((length, length), -1e9, dtype=DOUBLE).triu(1)
    return {"input_ids": ids, "causal": causal, "attention_mask": mask, "labels": labels}


def my_words(step: int, length: int = LENGTH) -> dict[str, Tensor]:
    return {name: value if name == "causal" else mine(value) for name, value in words(step, length).items()}


def compiled(model: nn.Module, example: Any, force: Any, batch: str = "local", **options: Any) -> Any:
    cluster = sw.Cluster.local(dist.get_world_size())
    return sw.compile_parallel(model, cluster, example, options=sw.Options(force=force, **options), batch=batch)  # type: ignore[arg-type]


def assert_same_gradients(parallel: nn.Module, model: nn.Module) -> None:
    for ours, (name, theirs) in zip(parallel.parameters(), model.named_parameters(), strict=True):
        grad: Any = ours.grad
        off = (grad.full_tensor() - theirs.grad).abs().max()
        assert off < 1e-11, f"the gradient of {name} is off by {off}"
    parallel.zero_grad()
    model.zero_grad()


# Each of these runs on every rank, with what is forced, and asserts there.


def a_loss_in_the_model(force: Any, **options: Any) -> None:
    model, parallel = WithLoss(), compiled(WithLoss(), tuple(map(mine, numbers(0))), force, **options)
    for step in range(4):  # the inputs of the last one are not compared any more
        loss, expected = parallel(*map(mine, numbers(step))), model(*numbers(step))
        torch.testing.assert_close(loss, expected, **CLOSE)
        loss.backward()
        expected.backward()
        assert_same_gradients(parallel, model)
    with parallel.no_sync():
        parallel(*map(mine, numbers(0))).backward()
    for module, batches in ((parallel, [map(mine, numbers(1))]), (model, [numbers(0), numbers(1)])):
        for batch in batches:
            module(*batch).backward()
    assert_same_gradients(parallel, model)


def a_loss_in_micro_batches(force: Any) -> None:
    a_loss_in_the_model(force, micro_batches=2)


def a_loss_outside(force: Any, **options: Any) -> None:
    model, parallel = Regression(), compiled(Regression(), mine(numbers(0)[0]), force, **options)
    for step in range(2):
        x, y = numbers(step)
        prediction, expected = parallel(mine(x)), model(x)
        torch.testing.assert_close(prediction, mine(expected), **CLOSE)
        F.mse_loss(prediction, mine(y)).backward()  # averaged over the ranks, as DistributedDataParallel does
        F.mse_loss(expected, y).backward()
        assert_same_gradients(parallel, model)


def a_loss_outside_in_sub_batches(force: Any) -> None:
    a_loss_outside(force, sub_batches=2)


def whole_outputs(force: Any) -> None:
    """In the order of the ranks."""
    model, parallel = Regression(), compiled(Regression(), mine(numbers(0)[0]), force, outputs="whole")
    x, y = numbers(1)
    prediction, expected = parallel(mine(x)), model(x)
    torch.testing.assert_close(prediction, expected, **CLOSE)
    F.mse_loss(prediction, y).backward()
    F.mse_loss(expected, y).backward()
    assert_same_gradients(parallel, model)


def a_call_as_of_transformers(force: Any) -> None:
    model, parallel = Attention(), compiled(Attention(), my_words(0), force)
    for step in range(2):
        made, expected = parallel(**my_words(step)), model(**words(step))
        torch.testing.assert_close(made["loss"], expected["loss"], **CLOSE)
        torch.testing.assert_close(made["logits"], mine(expected["logits"]), **CLOSE)
        made["loss"].backward()
        expected["loss"].backward()
        assert_same_gradients(parallel, model)


def a_mask_with_as_many_rows_as_samples(force: Any) -> None:
    """Which dimension is the batch is no matter of sizes; and a loss of each token, outside."""
    length = BATCH // dist.get_world_size()
    given, whole = my_words(0, length), words(0, length)
    labels, all_labels = given.pop("labels"), whole.pop("labels")
    model, parallel = Attention(), compiled(Attention(), given, force)
    made, expected = parallel(**given)["logits"], model(**whole)["logits"]
    torch.testing.assert_close(made, mine(expected), **CLOSE)
    F.cross_entropy(made.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(expected.flatten(0, 1), all_labels.flatten()).backward()
    assert_same_gradients(parallel, model)


def samples_and_steps_in_one_dimension(force: Any) -> None:
    x = torch.randn(BATCH, 5, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    y = torch.arange(BATCH * 5) % 4
    model, parallel = Flattened(), compiled(Flattened(), (mine(x), mine(y)), force)
    (loss, flat), (expected, all_flat) = parallel(mine(x), mine(y)), model(x, y)
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(flat, mine(all_flat), **CLOSE)
    loss.backward()
    expected.backward()
    assert_same_gradients(parallel, model)


def the_first_call_is_the_example(force: Any) -> None:
    parallel, model = compiled(WithLoss(), None, force), WithLoss()
    for step in range(2):
        torch.testing.assert_close(parallel(*map(mine, numbers(step))), model(*numbers(step)), **CLOSE)


def a_plain_sampler_serves_any_plan(force: Any) -> None:
    data, rank, world = TensorDataset(*numbers(5)), dist.get_rank(), dist.get_world_size()
    parallel, model = compiled(WithLoss(), tuple(map(mine, numbers(0))), force), WithLoss()
    for sampler in (DistributedSampler(data, world, rank, shuffle=False), parallel.sampler(data, shuffle=False)):
        ((x, y),) = DataLoader(data, BATCH // world, sampler=sampler)
        torch.testing.assert_close(parallel(x, y), model(*numbers(5)), **CLOSE)
    assert (parallel.data_rank, parallel.data_world_size) == (rank, world)
    torch.testing.assert_close(parallel.local(numbers(5)[0]), mine(numbers(5)[0]))


LOCAL: dict[str, Sequence[Callable[[Any], None]]] = {
    "loss inside": [a_loss_in_the_model, a_loss_in_micro_batches, the_first_call_is_the_example],
    "loss outside": [a_loss_outside, a_loss_outside_in_sub_batches, whole_outputs],
    "kinds of inputs": [
        a_call_as_of_transformers,
        a_mask_with_as_many_rows_as_samples,
        samples_and_steps_in_one_dimension,
        a_plain_sampler_serves_any_plan,
    ],
}
PLANS: list[tuple[int, Any]] = [(2, {}), (3, {"*": "zdp"}), (4, {"*": "tensor:4"}), (4, {"*": (2, 1, 1, 2)})]


def in_turn(checks: Sequence[Callable[[Any], None]], force: Any) -> None:
    for check in checks:
        check(force)


@pytest.mark.parametrize("checks", LOCAL.values(), ids=LOCAL)
@pytest.mark.parametrize(("world", "force"), PLANS, ids=str)
def test_local_batches(world: int, force: Any, checks: Sequence[Callable[[Any], None]], pool: WorkerPool) -> None:
    pool.run(in_turn, checks, force, nprocs=world, timeout=300)


def on_all_ranks(call: Callable[[], Any]) -> list[str]:
    """What each rank's call says as it is refused; "" where it is not."""
    told = ""
    try:
        call()
    except sw.ParallelError as error:
        told = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def batches_of_other_ranks_are_no_global_batch(force: Any) -> None:
    parallel = compiled(WithLoss(), tuple(map(mine, numbers(0))), force, "global")
    for _ in range(3):
        for told in on_all_ranks(lambda: parallel(*map(mine, numbers(0)))):
            assert "'x' is not the same global batch" in told and "rank 0 and rank 1" in told
            for way in ('batch="local"', "parallel.sampler", "data_rank", "data_world_size"):
                assert way in told
    unchecked = compiled(WithLoss(), tuple(map(mine, numbers(0))), force, "global", check_inputs=0)
    assert not any(on_all_ranks(lambda: unchecked(*map(mine, numbers(0)))))


def parts_are_those_of_the_data_rank(force: Any) -> None:
    """Ranks that compute the same part have to pass the same."""
    parallel = compiled(WithLoss(), numbers(0), force, "global")
    assert not any(on_all_ranks(lambda: parallel(*map(parallel.local, numbers(0)))))
    assert not any(on_all_ranks(lambda: parallel(numbers(0)[0], parallel.local(numbers(0)[1]))))
    other = numbers(dist.get_rank())
    for told in on_all_ranks(lambda: parallel(*map(parallel.local, other))):
        assert "'x' is not the same" in told and "have the same part of the batch" in told


def what_has_no_batch_is_the_same_everywhere(force: Any) -> None:
    parallel = compiled(Attention(), my_words(0), force)
    given = my_words(0)
    given["causal"] = given["causal"] + dist.get_rank()
    for told in on_all_ranks(lambda: parallel(**given)):
        assert "'causal' has no batch dimension" in told and "input_ids, attention_mask, labels" in told


def an_index_of_one_rank_is_refused_on_all(force: Any) -> None:
    for batch, part in (("local", my_words(0)), ("global", {**words(0), **my_words(0)})):
        parallel = compiled(Attention(), part if batch == "local" else words(0), force, batch)
        wrong = {**part, "input_ids": part["input_ids"] + WORDS * dist.get_rank()}
        for told in on_all_ranks(lambda parallel=parallel, wrong=wrong: parallel(**wrong)):  # type: ignore[misc]
            assert "it fails on rank 1: the index" in told and "embedding" in told
        parallel(**part)["loss"].backward()


def one_batch_on_all_ranks_is_warned_of(force: Any) -> None:
    same = tuple(value[: BATCH // dist.get_world_size()] for value in numbers(0))
    parallel = compiled(WithLoss(), same, force)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            parallel(*same)
    assert ["parallel.sampler" in str(each.message) for each in heard] == [True]


def an_error_of_one_rank_is_raised_on_all(force: Any) -> None:
    """Also after the first calls; and then all go on."""
    refuses_on_all_ranks("local", tuple(map(mine, numbers(0))), force)
    refuses_on_all_ranks("global", numbers(0), force)


def refuses_on_all_ranks(batch: str, given: tuple[Tensor, ...], force: Any) -> None:
    parallel, rank, (x, y) = compiled(WithLoss(), given, force, batch), dist.get_rank(), given
    wrong = {"shape": (x[:1], y), "float32": (x.float(), y), "missing": (x,), "too many": (x, y, x), "y=1": (x, 1)}
    for said, values in [*wrong.items()] * 2:
        for told in on_all_ranks(lambda values=values: parallel(*(values if rank == 1 else given))):  # type: ignore[misc]
            assert "rank 1" in told and said in told, told
        parallel(x, y).backward()
    narrow = on_all_ranks(lambda: parallel(x[:, :1], y))
    assert all("rank 1" not in told and "WithLoss cannot be captured" in told for told in narrow), narrow
    with torch.set_grad_enabled(rank != 1):
        for told in on_all_ranks(lambda: parallel(x, y)):
            assert "rank 0 call the step with gradients, and rank 1 do not" in told


def batches_of_other_ranks_under_torch_compile(force: Any) -> None:
    torch._dynamo.reset()
    options = {"cluster": sw.Cluster.local(dist.get_world_size()), "force": force}
    parallel = torch.compile(WithLoss(), backend="shardweave", options=options, fullgraph=True)
    assert not any(on_all_ranks(lambda: parallel(*numbers(0))))
    for told in on_all_ranks(lambda: parallel(*numbers(dist.get_rank()))):
        assert "'x' is not the same global batch" in told and 'compile_parallel(..., batch="local")' in told


def test_other_batches_are_refused(pool: WorkerPool) -> None:
    checks = [
        batches_of_other_ranks_are_no_global_batch,
        what_has_no_batch_is_the_same_everywhere,
        an_index_of_one_rank_is_refused_on_all,
        one_batch_on_all_ranks_is_warned_of,
        an_error_of_one_rank_is_raised_on_all,
    ]
    pool.run(in_turn, checks, {"*": "zdp"}, nprocs=2, timeout=300)


def test_other_batches_under_torch_compile(pool: WorkerPool) -> None:
    pool.run(batches_of_other_ranks_under_torch_compile, {"*": "dp"}, nprocs=2)


def test_parts_of_other_ranks_are_refused(pool: WorkerPool) -> None:
    pool.run(in_turn, [parts_are_those_of_the_data_rank], {"*": (2, 1, 1, 2)}, nprocs=4)


def test_unknown_meanings_are_refused() -> None:
    with pytest.raises(sw.ParallelError, match="'global' or 'local', got 'own'"):
        sw.compile_parallel(Regression(), None, numbers(0)[0], batch="own")  # type: ignore[arg-type]
    for wrong in (-1, True, "sometimes", 1.5):
        with pytest.raises(sw.PlanError, match="check_inputs"):
            sw.Options(check_inputs=wrong)  # type: ignore[arg-type]


class Pairs(Regression):
    """Takes two rows together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(0, (-1, 2)).diff(dim=1).square().mean()


class NoBatch(Regression):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.first.weight.square().mean() + (self.second.weight @ self.first.weight).mean()


@pytest.mark.parametrize(
    ("model", "example", "options", "told"),
    [
        (Pairs(), torch.ones(3, 8, dtype=DOUBLE), {}, "takes 2 rows of the first dimension of x together, but each"),
        (NoBatch(), (), {}, "the step has none"),
        (WithLoss(), tuple(value[:3] for value in numbers(0)), {"micro_batches": 8}, "batch of 12"),
    ],
)  # fmt: skip
def test_batches_that_do_not_divide(model: nn.Module, example: Any, options: Any, told: str) -> None:
    with pytest.raises(sw.PlanError, match=told):
        Compiler(model, sw.Cluster.local(4), example, sw.Options(**options), None, "local").plan()


def test_one_device_has_the_global_batch() -> None:
    parallel = sw.compile_parallel(WithLoss(), None, numbers(0), batch="local")
    torch.testing.assert_close(parallel(*numbers(1)), WithLoss()(*numbers(1)), **CLOSE)
