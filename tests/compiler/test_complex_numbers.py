"""Models that compute with complex numbers: each trains on four ranks to the numbers of one device."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.compiler.capture import capture
from shardweave.cost_model import node_work
from shardweave.ir import Precision
from shardweave.runtime.launch import WorkerPool
from tests.compiler.test_capture import assert_computes
from tests.compiler.test_models import any_of
from tests.compiler.test_ordinary_models import rows, two_steps
from tests.compiler.training import Way, compile_ways
from tests.models import Case
from tests.runtime.loop import DTYPE, same_in_both_worlds

LENGTH, WIDTH, HEADS, VOCABULARY = 8, 16, 4, 32


class Attention(nn.Module):
    """As in Meta's Llama: queries and keys are rotated by a product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        query, key, value = (w(x).view(*x.shape[:2], HEADS, -1) for w in (self.wq, self.wk, self.wv))
        pairs = (torch.view_as_complex(each.reshape(*each.shape[:-1], -1, 2)) for each in (query, key))
        query, key = (torch.view_as_real(each * freqs_cis[:, None]).flatten(3) for each in pairs)
        heads = (each.transpose(1, 2) for each in (query, key, value))
        out: Tensor = self.wo(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return out


class Rotary(nn.Module):
    """A Llama of one layer; the table of rotations is an attribute, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        angles = torch.outer(torch.arange(LENGTH), 0.1 ** torch.arange(WIDTH // HEADS // 2)).double()
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (10 * x).long().remainder(VOCABULARY)
        h = self.embed(tokens)
        h = h + self.attention(h, self.freqs_cis)
        h = h + self.down(F.silu(self.up(h)))
        return F.cross_entropy(self.head(h[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Spectral(nn.Module):
    """A Fourier neural operator, a state-space kernel as in S4, and a loss on a short-time Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(1, 8), nn.Linear(8, 1)
        self.modes = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.cdouble) / 8)
        self.poles = nn.Parameter(torch.randn(8, 4, 2) / 8)
        self.weights = nn.Parameter(torch.randn(8, 4, dtype=torch.cdouble))
        self.window: Tensor
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x.unsqueeze(-1)).transpose(1, 2)
        spectrum = torch.fft.rfft(h)
        low = torch.zeros_like(spectrum)
        low[..., :3] = torch.einsum("bik,iok->bok", spectrum[..., :3], self.modes)
        h = F.gelu(torch.fft.irfft(low, n=h.shape[-1]) + h)
        steps = torch.arange(h.shape[-1], dtype=h.dtype)
        powers = torch.exp(torch.view_as_complex(self.poles)[..., None] * steps)
        kernel = torch.einsum("hn,hnl->hl", self.weights, powers)
        size = 2 * h.shape[-1]
        h = torch.fft.irfft(torch.fft.rfft(h, n=size) * torch.fft.rfft(kernel.real, n=size), n=size)[..., : x.shape[1]]
        y = self.drop(h.transpose(1, 2)).squeeze(-1)
        heard = torch.stft(y, 8, 4, window=self.window, return_complex=True)
        again = torch.istft(heard * heard.abs().sigmoid(), 8, 4, window=self.window, length=x.shape[1])
        flat = torch.fft.ifft2(torch.fft.fft2(again.view(-1, 4, x.shape[1] // 4))).real
        return (heard.abs() + 0.1).log().pow(2).mean() + flat.pow(2).mean()


class Layers(nn.Module):
    """Linear layers of complex numbers, beside a parameter of an odd number of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, dtype=torch.cdouble), nn.Linear(24, 8, dtype=torch.cdouble)
        self.mix, self.head = nn.Parameter(torch.randn(24, dtype=torch.cdouble)), nn.Linear(8, 7)
        self.odd = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(torch.polar(x.abs() + 1, x))
        h = h * (2 * self.mix).conj() + h.conj() / 2
        z = self.down(torch.complex(h.real.tanh(), h.imag.sigmoid()))
        y = self.head(z.imag) * self.odd + (z.angle() * z.abs()).sum(-1, keepdim=True)
        return y.square().mean() + (z * z.conj()).real.mean()


class ComplexCase(Case):
    """A case whose complex parameters stay complex."""

    def model(self, dtype: torch.dtype = DTYPE, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().double()  # to() would make complex numbers real


MODELS = {model.__name__: model for model in (Rotary, Spectral, Layers)}

WAYS = [
    Way("zdp", {"*": "zdp"}),
    Way("micro-batches", {"*": "dp"}, micro_batches=2),
    Way("drawn 0", any_of(0)),
    Way("drawn 1", any_of(1)),
]


@pytest.mark.parametrize("name", list(MODELS))
def test_complex_numbers_train_as_on_one_device(name: str, pool: WorkerPool) -> None:
    case = ComplexCase(name, MODELS[name], rows)
    ways = [Way("planner"), *WAYS] if name == "Layers" else WAYS  # the slowest way, so for the smallest model
    steps = compile_ways(case.model(DTYPE), case, DTYPE, 4, ways)
    run = partial(same_in_both_worlds, two_steps, steps, [way.name for way in ways], case)
    assert pool.run(run, nprocs=4) == [[]] * 4


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    graph = torch.fx.Graph()
    work = []
    for dtype in (torch.float32, torch.complex64):
        x, y = graph.placeholder("x"), graph.placeholder("y")
        product = graph.call_function(torch.ops.aten.mm.default, (x, y))
        for node in (x, y, product):
            node.meta["val"] = torch.empty(8, 8, dtype=dtype, device="meta")
        work.append(node_work(product))
    real, both = work
    assert real is not None and both is not None
    assert both.flops == 4 * real.flops and both.dtype == real.dtype == "float32"


def test_gradients_of_complex_parameters_are_reduced_whole() -> None:
    """In ``reduce_dtype`` a complex gradient would lose its imaginary part."""
    assert Precision.of("bf16").dtypes(torch.complex64).reduced == torch.complex64  # type: ignore[union-attr]


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * (1 + 2j)).imag.square().mean()


def test_a_product_with_a_complex_number_is_captured() -> None:
    """Its derivative conjugates the number, by an op on tensors."""
    batch = {"x": torch.randn(4, 8, dtype=DTYPE)}
    captured = capture(Turned(8, 8).to(DTYPE), batch)
    assert not captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten._conj.default)
    assert_computes(captured, Turned(8, 8).to(DTYPE), (), batch)
