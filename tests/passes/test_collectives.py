"""Generated graphs hold exactly the collectives, and move exactly the bytes, that their algorithms call for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardweave.compiler.capture import capture
from shardweave.cost_model.options import Options
from shardweave.ir import Collective, Grid, Mesh, Strategy
from shardweave.passes.pipeline import Compiled, lower
from shardweave.passes.step_boundary import annotate
from tests.passes.harness import collectives, mesh_of
from tests.passes.joint import EVEN, Joint, joint

WORD = 8  # bytes of a float64
COLUMNS = ("qkv", "up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "head")


def lowered(step: Joint, mesh: Mesh, choose: Callable[[str], Strategy]) -> Compiled:
    return lower(step.annotated, {op.name: choose(op.name) for op in step.annotated.ops}, mesh, Options())


def forward(compiled: Compiled) -> list[Collective]:
    return collectives(compiled.step.forward)


def backward(compiled: Compiled) -> list[Collective]:
    assert compiled.step.backward is not None
    return collectives(compiled.step.backward)


def whole_bytes(compiled: Compiled) -> dict[str, int]:
    """The size of every parameter."""
    result = {}
    for parameter in compiled.step.spec.parameters:
        result[parameter.name] = WORD
        for size in parameter.layout.global_shape:
            result[parameter.name] *= size
    return result


def counted(found: list[Collective]) -> Counter[tuple[str, str, str, int]]:
    """How often each collective occurs: its kind, the names of its axes, whose it is, its bytes."""
    return Counter((what.kind, " ".join(axis.name for axis in what.axes), what.owner, what.bytes) for what in found)


@pytest.mark.parametrize("name", ["chain", "mlp", "gpt-tied", "llama", "llama-tied"])
def test_data_parallel(name: str) -> None:
    """One all-reduce of each parameter's gradient, and of the loss' scalar sums."""
    compiled = lowered(joint(name), mesh_of(2, 2), lambda _: Strategy(Grid(data=4)))
    gradients = {(what.owner, what.kind, what.bytes) for what in backward(compiled) if what.cause == "gradient"}
    expected = {(parameter, "all_reduce", size) for parameter, size in whole_bytes(compiled).items()}
    assert len(backward(compiled)) == len(expected)
    if name != "gpt-tied":
        assert gradients == expected
    for what in forward(compiled):
        assert (what.kind, what.cause) == ("all_reduce", "activation") and what.bytes <= WORD
    assert 1 <= len(forward(compiled)) <= 2
    assert {what.axes for what in (*forward(compiled), *backward(compiled))} == {tuple(reversed(mesh_of(2, 2).axes))}


def test_what_is_gathered_arrives_in_order_beside_an_op_that_is_spread_otherwise() -> None:
    """Tensor parallelism of one op, whose states rest whole, leaves where all others rest: nothing is put in order."""

    def layouts(first: Strategy) -> dict[str, str]:
        compiled = lowered(joint("mlp"), mesh_of(2, 2), lambda name: first if name == "first" else rests)
        return {p.name: str(p.layout) for p in compiled.step.spec.parameters if not p.name.startswith("first")}

    rests = Strategy(Grid(data=4), 4)
    assert layouts(Strategy(Grid(x=2, data=2))) == layouts(Strategy(Grid(data=4)))
    assert "b0 a0" in layouts(rests)["norm.weight"]  # outermost first: the order of ranks


def test_data_parallel_embeddings() -> None:
    """The positions' gradient is summed over the batch before it is put at its rows: it is reduced there, as small."""
    compiled = lowered(joint("gpt"), mesh_of(4), lambda _: Strategy(Grid(data=4)))
    assert {what.kind for what in backward(compiled)} == {"all_reduce"}
    assert sum(what.bytes for what in backward(compiled)) == sum(whole_bytes(compiled).values())
    assert len(backward(compiled)) == len(compiled.step.spec.parameters)


@pytest.mark.parametrize("name", ["chain", "mlp-even", "gpt", "llama"])
def test_zero_data_parallel(name: str) -> None:
    """Each parameter is gathered once in the forward, at most once in the backward, its gradient reduce-scattered."""
    compiled = lowered(joint(name), mesh_of(4), lambda _: Strategy(Grid(data=4), rest=4))
    parameters, sizes = compiled.step.spec.parameters, whole_bytes(compiled)
    assert all(parameter.layout.shard_axes for parameter in parameters)
    gathers = [what for what in forward(compiled) if what.cause == "parameter"]
    assert {(what.owner, what.kind, what.bytes) for what in gathers} == {(p, "all_gather", n) for p, n in sizes.items()}
    assert len(gathers) == len(parameters)
    again = Counter(what.owner for what in backward(compiled) if what.cause == "parameter")
    assert set(again.values()) == {1}
    needed = {p.name for p in parameters if len(p.layout.dims) == 2} - {"tokens.weight", "positions.weight"}
    needed -= {"model.embed_tokens.weight", "layers.0.weight", "first.weight"}  # no gradient of the input is asked for
    assert needed <= set(again)
    assert not any(owner in again for owner in ("layers.0.weight", "tokens.weight", "positions.weight"))
    gradients = [what for what in backward(compiled) if what.cause == "gradient"]
    scattered = {(what.owner, what.kind, what.bytes) for what in gradients}
    expected = {(p, "reduce_scatter", n) for p, n in sizes.items()}
    assert scattered == expected and len(gradients) == len(expected)


def test_megatron_gpt() -> None:
    """Column then row: one all-reduce of the activation for each half block, forward and backward, and none inside."""
    step, mesh = joint("gpt"), mesh_of(4)
    compiled = lowered(step, mesh, lambda op: Strategy(Grid(x=4) if op.endswith(COLUMNS) else Grid(y=4)))
    activation = 8 * 4 * 16 * WORD
    inside = [what for what in forward(compiled) if what.owner.startswith("blocks.")]
    assert counted(inside) == Counter(
        {("all_reduce", "a1 a0", f"blocks.0.{op}", activation): 1 for op in ("attention.out", "down")}
    )
    inside = [what for what in backward(compiled) if what.owner.startswith("blocks.")]
    assert counted(inside) == Counter(
        {("all_reduce", "a1 a0", f"blocks.0.{op}", activation): 1 for op in ("up", "attention.qkv")}
    )
    # Beside the blocks: the embeddings' lookup, the vocabulary's max, sum and pick, and the head's input gradient.
    rows = 8 * 4 * WORD
    assert sorted(what.bytes for what in forward(compiled)) == [rows] * 3 + [activation] * 3
    assert sorted(what.bytes for what in backward(compiled)) == [rows] + [activation] * 3
    assert not any(what.cause != "activation" for what in (*forward(compiled), *backward(compiled)))


def test_megatron_llama() -> None:
    """q, k and v (gate and up) share one all-reduce in the backward: partial sums are summed before their reduction."""
    step, mesh = joint("llama"), mesh_of(2)
    column, row = Strategy(Grid(x=2)), Strategy(Grid(y=2))
    compiled = lowered(step, mesh, lambda op: column if op.endswith(COLUMNS) else row)
    activation = 8 * 16 * 16 * WORD
    large = [what for what in forward(compiled) if what.bytes == activation]
    owners = ["model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
    assert [(what.kind, what.owner) for what in large] == [("all_reduce", owner) for owner in owners]
    assert len(forward(compiled)) == 3 + 3  # and the vocabulary's max, sum and pick
    large = [what for what in backward(compiled) if what.bytes == activation]
    assert [what.kind for what in large] == ["all_reduce"] * 3  # of lm_head, of gate and up, of q, k and v
    assert len(backward(compiled)) == 3 + 1


class PositionBias(nn.Module):
    """Scores with a bias of positions, which is masked before it is added to all samples, as T5's decoder has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.distances = nn.Embedding(4, 1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        places = torch.arange(4)
        masked = places[:, None] < places[None, :]
        bias = self.distances((places[:, None] - places[None, :]).abs()).permute(2, 0, 1)
        bias = torch.where(masked, torch.tensor(-1e4), bias)
        return F.mse_loss((scores + bias).softmax(-1), targets)


def test_a_share_of_a_gradient_passes_a_mask() -> None:
    """The gradient of a bias that is masked is summed once, where it is its parameter's, not before the mask, too."""
    x, targets = torch.randn(8, 4, 8), torch.randn(8, 4, 4)
    annotated = annotate(capture(PositionBias().double(), {"x": x.double(), "targets": targets.double()}), Options())
    strategies = {op.name: Strategy(Grid(data=4)) for op in annotated.ops}
    compiled = lower(annotated, strategies, mesh_of(4), Options())
    assert sorted(what.bytes for what in backward(compiled)) == sorted(whole_bytes(compiled).values())


def test_tensor_and_data_parallel() -> None:
    """Gradients of a column's weight are reduced over the data axes only, and only its part of them."""
    step, mesh = joint("chain"), mesh_of(2, 2)
    a, b = mesh.axes
    strategies = iter([Strategy(Grid(x=2, data=2)), Strategy(Grid(y=2, data=2)), Strategy(Grid(x=2, data=2))])
    compiled = lowered(step, mesh, lambda _: next(strategies))
    gradients = [what for what in backward(compiled) if what.cause == "gradient"]
    assert counted(gradients) == Counter(
        {("all_reduce", b.name, name, size // 2): 1 for name, size in whole_bytes(compiled).items()}
    )
    batch = 8 // 2
    others = [what for what in backward(compiled) if what.cause != "gradient"]
    assert counted(others) == Counter({("all_reduce", a.name, "layers.2", batch * EVEN[2] * WORD): 1})
    assert counted(forward(compiled)) == Counter(
        {
            ("all_reduce", a.name, "layers.1", batch * EVEN[2] * WORD): 1,
            ("all_reduce", f"{b.name} {a.name}", "div", WORD): 1,
        }
    )


def test_agarwal_3d() -> None:
    """AxoNN's Algorithm 1 on 2 x 2 x 2, x and y swapped in every second layer: nothing moves between the layers.

    Forward: gather the weight over z, multiply, reduce over y. Backward: gather the weight over z, reduce the input's
    gradient over x, reduce-scatter the weight's over z.
    """
    step, mesh = joint("chain"), mesh_of(2, 2, 2)
    inner, middle, z = (axis.name for axis in mesh.axes)
    swapped = iter([False, True, False])
    compiled = lowered(step, mesh, lambda _: Strategy(Grid(2, 2, 2), rest=2, y_inside=next(swapped)))
    rows = 8 // 2
    weights = {f"layers.{index}.weight": EVEN[index] * EVEN[index + 1] * WORD // 4 for index in range(3)}
    xs, ys = (inner, middle, inner), (middle, inner, middle)
    gathers = Counter({("all_gather", z, name, size): 1 for name, size in weights.items()})
    outputs = Counter({("all_reduce", ys[i], f"layers.{i}", rows * EVEN[i + 1] // 2 * WORD): 1 for i in range(3)})
    loss = Counter({("all_reduce", f"{z} {inner}", "div", WORD): 1})
    assert counted(forward(compiled)) == gathers + outputs + loss
    del gathers["all_gather", z, "layers.0.weight", weights["layers.0.weight"]]  # no gradient of the input is asked for
    inputs = Counter({("all_reduce", xs[i], f"layers.{i}", rows * EVEN[i] // 2 * WORD): 1 for i in (1, 2)})
    scatters = Counter({("reduce_scatter", z, name, size): 1 for name, size in weights.items()})
    assert counted(backward(compiled)) == gathers + inputs + scatters


def test_one_device_needs_none() -> None:
    compiled = lowered(joint("gpt"), mesh_of(1), lambda _: Strategy(Grid()))
    assert not forward(compiled) and not backward(compiled)
