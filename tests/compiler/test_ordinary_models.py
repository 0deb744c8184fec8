"""Small models that use tensors in the ways users do: each trains on four ranks to the numbers of one device."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as higher_order_map
from torch.ao import quantization
from torch.nn.utils import parametrizations

import shardweave as sw
from shardweave.runtime.launch import WorkerPool
from tests.compiler.packing import Packed
from tests.compiler.training import Way, compile_ways
from tests.models import Case
from tests.runtime.loop import DTYPE, same_in_both_worlds, whole


class Coupling(nn.Module):
    """An affine coupling of a normalizing flow: the backward reads parts of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        return (b * scale.exp() + shift).pow(2).mean() - scale.sum(1).mean()


class Constants(nn.Module):
    """Parts of a constant, read by the backward; ops with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        low, high = torch.arange(16, dtype=x.dtype).chunk(2)
        left, right = torch.unsafe_chunk(self.net(x) * low + high, 2, 1)
        first, *_ = x.unbind(1)
        return (left * right).mean() + (torch.frexp(x).mantissa * self.net(x) * first[:, None]).pow(2).mean()


class Empty(nn.Module):
    """Parameters, layers and values without elements, in every place where such values come up."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.prompt = nn.Parameter(torch.zeros(0, 8))
        self.narrow, self.widen = nn.Linear(8, 0), nn.Linear(0, 8)
        self.table = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.cat([self.prompt.expand(x.shape[0], 0, 8), x[:, None]], 1).flatten(0, 1)
        y = torch.cat([self.norm(self.prompt), self.norm(y)]) + self.widen(self.narrow(x))
        loss = self.net(y).pow(2).mean() + self.narrow(x).sum() + self.prompt.sum()
        return loss + self.table(torch.empty(0, dtype=torch.long)).sum(), self.narrow(x), self.prompt


class Recurrent(nn.Module):
    """Recurrent layers of all kinds, with initial states and without, and a cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(8, 8, bias=False), nn.RNN(8, 8, nonlinearity="relu", bidirectional=True)
        self.projected, self.cell = nn.LSTM(16, 8, proj_size=4), nn.LSTMCell(4, 8)
        self.gru_cell, self.head = nn.GRUCell(4, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        steps, (hidden, cells) = self.lstm(x.view(-1, 2, 4))
        steps, last = self.gru(steps.transpose(0, 1), hidden[:2].transpose(0, 1).reshape(1, -1, 8) + x)
        steps, _ = self.projected(self.rnn(steps)[0])
        state = last[0], x
        for step in steps:
            state = self.cell(step, state)
        rows_as_steps, _ = self.rnn(x[:, None])
        state = self.gru_cell(steps[0], state[0]), state[1]
        return self.head(state[0]).pow(2).mean() + (cells[-1] * steps[0]).mean() + rows_as_steps.square().mean()


class Computed(nn.Module):
    """Weights that are computed from parameters: masked as by pruning, and standardised."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mask", torch.ones(16, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.down.weight
        weight = (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)
        x = F.linear(x, self.up.weight * self.mask, self.up.bias).relu()  # type: ignore[operator]
        return F.linear(x, weight.clamp(-2, 2), self.down.bias).pow(2).mean()


class Variational(nn.Module):
    """The loss of a variational autoencoder, by torch's distributions and their divergences."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, (variance / 2).exp())
        code = posterior.mean + x[:, :4] * posterior.stddev  # the noise is part of the batch
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
        likelihood = torch.distributions.Bernoulli(logits=self.decoder(code)).log_prob(x.sigmoid().round())
        gamma = torch.distributions.Gamma(posterior.stddev, posterior.stddev)
        of_gammas = torch.distributions.kl_divergence(gamma, torch.distributions.Exponential(torch.ones_like(mean)))
        return (divergence + of_gammas).sum(-1).mean() - likelihood.sum(-1).mean()


class Statistics(nn.Module):
    """Covariances and correlations of features, as losses of self-supervised learning have them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        counts, weights = torch.arange(1, 9), x[:, 0].sigmoid()
        weighted = torch.cov(y.T, fweights=counts, aweights=weights) + torch.cov(y.T, aweights=weights, correction=0)
        plain = torch.cov(y.T).square().mean() + torch.cov(y[:, 0])
        return plain + torch.corrcoef(y.T).square().mean() + weighted.sum()


class Elementwise(nn.Module):
    """Parameters of which none is contracted."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(8)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale).sin().pow(2).mean()


class Stacked(nn.Module):
    """Experts whose weights meet the batch as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = (torch.stack([getattr(each, name) for each in self.experts]) for name in ("weight", "bias"))
        return (torch.einsum("bi,eoi->beo", x, weights) + biases).tanh().square().mean()


class Concatenated(nn.Module):
    """Two products computed as one, as of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        both = self.query, self.key
        weight, bias = (torch.cat([getattr(each, name) for each in both]) for name in ("weight", "bias"))
        return F.linear(x, weight, bias).tanh().square().mean()


class Loops(nn.Module):
    """Torch's ops of control flow that loop: over samples, over features backwards, and by a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        mapped = higher_order_map(lambda row: self.down(self.up(row).sin()), x[:2])
        state = {"sum": torch.zeros(8, dtype=x.dtype)}
        last, seen = scan(self.step, state, (self.down(self.up(x))[:, :3], x[:, :3]), dim=1, reverse=True)
        start = torch.tensor(0), mapped
        _, looped = while_loop(lambda count, _: count < 3, lambda count, y: (count + 1, (y * 1.1).sin()), start)
        return looped.mean() + seen["before"].mean() + (seen["x"] * last["sum"][:, None]).square().mean()

    def step(self, state: dict[str, Tensor], both: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
        return {"sum": (state["sum"] + both[0]).tanh()}, {"before": state["sum"] * 2, "x": both[1].sin()}


def rows(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=generator)}


class Attending(torch.autograd.Function):
    """A product of queries, keys and values with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        return (query * key).sum(-1, keepdim=True) * value * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        weight, of_weight = (query * key).sum(-1, keepdim=True), (gradient * value).sum(-1, keepdim=True) * ctx.scale
        return of_weight * key, of_weight * query, gradient * weight * ctx.scale, None


class OneTensor(nn.Module):
    """A function that gets one tensor several times."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.up(x)
        return self.down(Attending.apply(hidden, hidden, hidden, 2.0) + Attending.apply(hidden, x, x, 1.0)).mean()


MODELS = {
    model.__name__: model
    for model in (
        Coupling, Constants, Empty, Recurrent, Computed, Elementwise, Statistics, Variational, Stacked, Concatenated,
        Loops, OneTensor,
    )  # fmt: skip
}


TENSOR: dict[str, Any] = {
    "Recurrent": {"*": "tensor:4"},
    "Stacked": {"experts.0.weight": (2, 2, 1, 1)},
    "Loops": {"up": (2, 1, 1, 2), "down": (1, 2, 1, 2)},
    "Concatenated": {"query.weight": (2, 2, 1, 1)},
}


def two_steps(model: nn.Module, draw: Any = rows) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(2):
        found = model(**Case("", type(model), draw).batch(step, dtype=DTYPE))
        loss = found[0] if isinstance(found, tuple) else found
        loss.backward()
        seen += [loss.detach(), {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_trains_alike(pool: WorkerPool, case: Case, ways: list[Way], draw: Any = rows) -> None:
    """Two steps on four ranks, in each of these ways, are those of one device."""
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, partial(two_steps, draw=draw), steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", list(MODELS))
def test_an_ordinary_model_trains_as_on_one_device(name: str, pool: WorkerPool) -> None:
    case = Case(name, MODELS[name], rows)
    planned = Way("tensor", TENSOR[name]) if name in TENSOR else Way("planner")
    ways = [planned, Way("zdp", {"*": "zdp"})]
    assert_trains_alike(pool, case, ways)


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(sw.CaptureError, match=r"the batch has no rows \(x \(0, 8\)\)"):
        sw.plan(Coupling(), sw.Cluster.local(2), torch.zeros(0, 8))


# -- losses whose denominator is zero on a rank, in a micro-batch, or everywhere

VOCABULARY, IGNORED = 16, -100


class Masked(nn.Module):
    """A language model with one of the losses that users mask."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.up = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.weights: Tensor
        self.register_buffer("weights", torch.arange(VOCABULARY) / VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(self.up(self.embed(tokens)).tanh())
        loss: Tensor = getattr(self, self.kind)(logits, targets, mask)
        return loss

    def mean(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def weighted_image(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        probabilities = logits.transpose(1, 2).unsqueeze(-1).log_softmax(1)
        return F.nll_loss(probabilities, targets.unsqueeze(-1), self.weights)

    def rows_guarded(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        losses, count = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none"), mask.sum(1)
        return torch.where(count > 0, (losses * mask).sum(1) / count, 0.0).mean()

    def divided(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=0.1)
        return (losses * mask.flatten()).sum() / mask.sum()

    def pooled(self, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        pooled = (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-9)
        binary = F.binary_cross_entropy_with_logits(logits.mean(-1), mask, weight=mask, reduction="sum") / mask.sum()
        return pooled.pow(2).mean() + binary.nan_to_num()


LOSSES = {"mean": True, "weighted_image": False, "rows_guarded": True, "divided": True, "pooled": False}
"""By name, whether it can be computed in micro-batches."""


def masked_batch(generator: torch.Generator, size: int = 8, share: float = 0.5) -> dict[str, Tensor]:
    tokens, targets = torch.randint(0, VOCABULARY, (2, size, 4), generator=generator)
    mask = torch.rand(size, 4, generator=generator) < share
    return {"tokens": tokens, "targets": torch.where(mask, targets, IGNORED), "mask": mask.float()}


def drawn_masks() -> list[dict[str, Tensor]]:
    """Batches of which nothing is kept on the first rank, on the last, in some rows, in all but one place, anywhere."""
    found = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gone = [slice(0, 4), slice(4, 8), slice(0, 8, 2), slice(0, 2), slice(0, 7), slice(0, 8)]
        for rows_gone in gone:
            batch = masked_batch(generator, share=0.7)
            batch["targets"][rows_gone] = IGNORED
            batch["mask"][rows_gone] = 0
            found.append(batch)
        free = masked_batch(generator, share=0.1)
        free["targets"] = free["targets"].clamp(max=0)  # of the class whose weight is zero
        found.append(free)
    return [{**batch, "mask": batch["mask"].to(DTYPE)} for batch in found]


def losses_and_gradients(model: nn.Module) -> Any:
    seen = []
    for batch in drawn_masks():
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        # Where one device has no number, so have the ranks; nan is not equal to itself.
        seen += [(value.isnan(), value.nan_to_num()) for value in (loss.detach(), *gradients.values())]
    model.zero_grad()
    return seen


@pytest.mark.parametrize("kind", list(LOSSES))
def test_a_masked_loss_is_as_on_one_device_wherever_nothing_is_kept(kind: str, pool: WorkerPool) -> None:
    case = Case(kind, partial(Masked, kind), masked_batch)
    ways = [Way("data", {"*": "zdp"}), Way("vocabulary", {"*": "dp", "embed": "row:2", "head": "column:2"})]
    if LOSSES[kind]:
        ways += [Way("micro", {"*": "zdp"}, micro_batches=2), Way("sub", {"*": "zdp"}, options={"sub_batches": 2})]
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 2, ways)
    run = partial(same_in_both_worlds, losses_and_gradients, steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=2) == [[]] * 2


# -- batch norm under mixed precision


class Normed(nn.Module):
    """Batch norms over places and over rows: parameters are cast, running statistics stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.places = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)
        self.up, self.rows, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.places(self.conv(x[..., None].expand(-1, -1, 3))).mean(-1)
        loss: Tensor = self.head(self.rows(self.up(x)).relu()).float().pow(2).mean()
        return loss


def trains_with_batch_norm(steps: list[Packed]) -> list[str]:
    case, failures = Case("normed", Normed, rows), []
    for packed in steps:
        parallel, model = packed.module(case.model()), case.model()
        for step in range(2):
            for module in (parallel, model):
                module.zero_grad()
                module(**case.batch(step)).backward()
        for name, value in parallel.full_state_dict().items():
            expected = model.state_dict()[name]
            if value.dtype != expected.dtype or not torch.allclose(value, expected, rtol=0.03, atol=0.03):
                failures.append(f"{name} is {value}, on one device {expected}")
        grads = dict(model.named_parameters())
        for name, parameter in parallel.named_parameters():
            if not torch.allclose(whole(parameter.grad), grads[name].grad, rtol=0.1, atol=0.03):
                failures.append(f"the gradient of {name} is {whole(parameter.grad)}, on one device {grads[name].grad}")
    return failures


def test_batch_norm_in_mixed_precision_keeps_statistics_in_float32(pool: WorkerPool) -> None:
    case = Case("normed", Normed, rows)
    ways = [Way("dp", {"*": "dp"}), Way("whole batch", {"up": "column:2", "head": "row:2", "conv": "column:2"})]
    precision = sw.Precision(param_dtype=torch.bfloat16)
    steps = compile_ways(case.model(), case, torch.float32, 2, ways, precision)
    assert pool.run(trains_with_batch_norm, steps, nprocs=2) == [[], []]


# -- ops without a rule


class Unruled(nn.Module):
    """Ops without a rule, of which some contract parameters of their own, and one leaves a result without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.recurrent = nn.EmbeddingBag(32, 8), nn.LSTM(8, 8, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        bags = self.bag((x.abs() * 10).long().clamp(max=31))
        steps, _ = self.recurrent(torch.stack([x, bags], 1))
        loss: Tensor = self.head(self.normed(steps)).pow(2).mean()
        return loss


def trains_unruled(dtype: torch.dtype) -> list[str]:
    case, failures = Case("unruled", Unruled, rows), []
    tolerance = {"rtol": 1e-8, "atol": 1e-9} if dtype == DTYPE else {"rtol": 1e-3, "atol": 1e-4}
    for force in ({}, {"*": "zdp"}):
        options = sw.Options(force=force)
        model = case.model(dtype)
        parallel = sw.compile_parallel(
            case.model(dtype), sw.Cluster.local(2), case.batch(0, dtype=dtype), options=options
        )
        for step in range(2):
            for module in (model, parallel):
                module.zero_grad()
                module(**case.batch(step, dtype=dtype)).backward()
        grads = dict(parallel.named_parameters())
        for name, parameter in model.named_parameters():
            if not torch.allclose(whole(grads[name].grad), parameter.grad, **tolerance):
                failures.append(f"{force}: the gradient of {name}")
    return failures


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
def test_ops_without_a_rule_train_as_on_one_device(dtype: torch.dtype, pool: WorkerPool) -> None:
    case = Case("unruled", Unruled, rows)
    with pytest.warns(UserWarning, match=r"whole on every device(?s:.)*_embedding_bag"):
        plan = sw.plan(case.model(dtype), sw.Cluster.local(2), case.batch(0, dtype=dtype))
    assert "aten._embedding_bag.default in bag" in plan.whole_ops
    assert "without a sharding rule: " in str(plan.explain()) and sw.Plan.from_dict(plan.to_dict()) == plan
    assert pool.run(trains_unruled, dtype, nprocs=2) == [[], []]


# -- reparametrized weights


class Reparametrized(nn.Module):
    """Spectral and weight norms beside a plain layer, and an activation that torch does not tag as pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Conv1d(1, 8, 3, padding=1))
        self.second = parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=2, dilation=2))
        self.third = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(F.hardswish(self.first(x[:, None]))).transpose(1, 2)
        loss: Tensor = self.last(F.leaky_relu(self.third(h), 0.2)).square().mean()
        return loss


def test_reparametrized_weights_train_as_on_one_device(pool: WorkerPool) -> None:
    case = Case("reparametrized", Reparametrized, rows)
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor", {"*": "tensor:4"})]
    assert_trains_alike(pool, case, ways)


# -- quantization-aware training


class Quantized(nn.Module):
    """A convolution with a batch norm and a layer, which `torch.ao` trains for integers of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.quantized, self.whole = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.act = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.head = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.conv(self.quantized(images))))
        loss: Tensor = self.whole(self.head(hidden.mean((2, 3)))).square().mean()
        return loss


def images(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {"images": torch.randn(size, 1, 16, 16, generator=generator)}


def prepared(calls: int = 1) -> Any:
    torch.manual_seed(0)
    model: Any = Quantized().train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    model = quantization.fuse_modules_qat(model, [["conv", "norm", "act"]])
    quantization.prepare_qat(model, inplace=True)
    for _ in range(calls):
        model(**Case("", Quantized, images).batch(7))
    return model


def trains_quantized() -> list[str]:
    failures = []
    for force, observes in itertools.product(("zdp", "column"), (True, False)):
        model = prepared()
        if not observes:
            model.apply(quantization.disable_observer)
        batches = [Case("", Quantized, images).batch(step) for step in range(3)]
        options = sw.Options(force={"*": force})
        parallel: Any = sw.compile_parallel(model, sw.Cluster.local(2), batches[0], options=options, progress=False)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, parallel)]
        for batch in batches:
            for each, optimizer in zip((model, parallel), optimizers, strict=True):
                each(**batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, found in parallel.full_state_dict().items():
            if not torch.allclose(found.double(), model.state_dict()[name].double(), rtol=1e-4, atol=1e-6):
                failures.append(f"{force}, observes {observes}: {name}")
    return failures


@pytest.mark.filterwarnings("ignore:Please use quant_min", "ignore::DeprecationWarning")
def test_quantization_aware_training_is_that_of_one_device(pool: WorkerPool) -> None:
    assert pool.run(trains_quantized, nprocs=2) == [[], []]
    told = "an observer for quantization has seen nothing(?s:.)*Call the model once"
    with pytest.raises(sw.CaptureError, match=told):
        sw.compile_parallel(prepared(0), sw.Cluster.local(1), Case("", Quantized, images).batch(0), progress=False)


# -- strides that fake kernels do not know


class ChannelNorms(nn.Module):
    """Norms over channels that are not last in memory, as ConvNeXt has: their backward on CPU returns other strides
    than its fake kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(1, 8, 4, 4), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale, self.last, self.head = nn.Parameter(torch.full((8, 1, 1), 0.1)), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        hidden = self.norm(self.depth(x).permute(0, 2, 3, 1))
        x = x + self.down(F.gelu(self.up(hidden))).permute(0, 3, 1, 2) * self.scale
        x = self.last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        loss: Tensor = self.head(x.mean((2, 3))).square().mean()
        return loss


def test_strides_that_fake_kernels_do_not_know(pool: WorkerPool) -> None:
    case = Case("channels", ChannelNorms, images)
    ways = [Way("tensor", {"*": "tensor:4"}), Way("column", {"*": "column"})]
    assert_trains_alike(pool, case, ways, images)


# -- what torch computes with numbers and sizes that depend on values


class Aligned(nn.Module):
    """The CTC losses of speech recognition, whose saved values are as long as the longest target, a softmax over
    clusters of words, and a batch norm whose momentum is one over the number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=None)
        self.last, self.words = nn.Linear(8, 6), nn.AdaptiveLogSoftmaxWithLoss(8, 8, [3, 6], div_value=2)

    def forward(self, x: Tensor, lengths: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        frames = self.last(torch.relu(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)))
        log_probs = frames.log_softmax(-1).transpose(0, 1)
        mean = F.ctc_loss(log_probs, targets, lengths, counts)
        some = F.ctc_loss(log_probs, targets, lengths, counts, reduction="none", zero_infinity=True)
        ends = [10] * x.shape[0], [2] * x.shape[0]
        concatenated = F.ctc_loss(log_probs, targets[:, :2].flatten(), lengths, counts * 0 + 2, reduction="sum")
        # Every fourth target is longer than its input: it has no alignment
        longest = torch.tensor([1, 2, 1, 12] * (len(x) // 4))
        none = F.ctc_loss(log_probs, targets.flatten()[: 4 * len(x)], lengths, longest, zero_infinity=True)
        of_rows = F.ctc_loss(log_probs, targets[:, :2], *ends, blank=5, reduction="sum")
        words = self.words(x.mean(1), torch.arange(len(x)) % 8)
        return mean + some.square().mean() + of_rows + concatenated + none + words.loss + words.output[1]


def speech(generator: torch.Generator, size: int = 8) -> dict[str, Tensor]:
    return {
        "x": torch.randn(size, 10, 8, generator=generator),
        "lengths": torch.randint(7, 11, (size,), generator=generator),
        "targets": torch.randint(1, 5, (size, 4), generator=generator),
        "counts": torch.randint(1, 4, (size,), generator=generator),
    }


def test_losses_and_norms_with_sizes_of_their_own_train_as_on_one_device(pool: WorkerPool) -> None:
    case = Case("aligned", Aligned, speech)
    ways = [Way("zdp", {"*": "zdp"}), Way("tensor", {"*": "tensor:4"})]
    assert_trains_alike(pool, case, ways, speech)
