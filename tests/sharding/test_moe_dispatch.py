"""Dispatch to experts, written without its sort: the same numbers, what is refused, and what then moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from transformers.integrations.moe import _grouped_mm

from shardweave.compiler.capture import capture
from shardweave.ir import Assignment, Layout
from shardweave.ir.captured import Captured
from shardweave.ir.errors import RuleError
from shardweave.passes.partition import Shard
from shardweave.sharding.graphs import info
from shardweave.sharding.moe_dispatch import undo_dispatch
from tests.models import hub
from tests.passes.every_node import close
from tests.passes.harness import examples, mesh_of, output_nodes, placeholders
from tests.passes.joint import joint

custom_ops = torch.ops.shardweave
ROUTED = {**hub.SIZES, "vocab_size": hub.VOCABULARY, "max_position_embeddings": 32, "use_cache": False}
GROUPED_HEADS = {**ROUTED, "num_key_value_heads": 2, "head_dim": 8}


def qwen3_moe() -> nn.Module:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**GROUPED_HEADS, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3)
    )


def gpt_oss() -> nn.Module:
    """Experts with biases, and a gate and a projection in alternate columns."""
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **GROUPED_HEADS, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"]
        )
    )


def deepseek_v3() -> nn.Module:
    """Experts chosen in groups, and one that every token goes to."""
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    routed = {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**ROUTED, **heads, **routed, first_k_dense_replace=0)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": hub.mixtral,
    "qwen3-moe": qwen3_moe,
    "gpt-oss": gpt_oss,
    "deepseek-v3": deepseek_v3,
}


def given_values(captured: Captured, model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The values of the placeholders of a captured step; every tangent is one."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    names = {**captured.parameters, **captured.buffers, **captured.inputs}
    return [
        tensors[names[node.name]].detach()
        if node.name in names
        else torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for node in placeholders(captured.graph)
    ]


def ops(module: fx.GraphModule) -> Counter[str]:
    """How often each op occurs, by its name."""
    schemas = [getattr(node.target, "_schema", None) for node in module.graph.nodes]
    return Counter(schema.name for schema in schemas if schema is not None)


def check_undone(model: nn.Module, batch: dict[str, Tensor], tolerance: float) -> Counter[str]:
    """Every output of the step with and without the sort, gradients included; the ops that are left."""
    captured = capture(model, batch)
    values = given_values(captured, model, batch)
    # A parameter that the model only casts enters the graph cast.
    values = [value.to(node.meta["val"].dtype) for node, value in zip(placeholders(captured.graph), values)]
    before = captured.graph(*values)
    assert any("grouped_mm" in op for op in ops(captured.graph))
    undo_dispatch(captured.graph.graph)
    captured.graph.graph.lint()
    captured.graph.recompile()
    for index, (expected, got) in enumerate(zip(before, captured.graph(*values), strict=True)):
        if isinstance(expected, Tensor):
            close(got, expected, f"output {index}", tolerance)
    left = ops(captured.graph)
    assert not any("grouped_mm" in op or "sort" in op for op in left)
    return left


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_the_same(name: str) -> None:
    """A forward of two products, and a backward of two for the rows and two for the weights."""
    torch.manual_seed(0)
    left = check_undone(MODELS[name]().double(), hub.tokens(torch.Generator().manual_seed(0), 2), 1e-5)
    assert left["shardweave::expert_mm"] == 4 and left["shardweave::expert_outer"] == 2


def test_gradients_of_transposed_weights_have_the_memory_order_of_the_parameters() -> None:
    model = MODELS["mixtral"]()
    captured = capture(model, hub.tokens(torch.Generator().manual_seed(0), 2))
    undo_dispatch(captured.graph.graph)
    weights = {name: value.shape for name, value in model.named_parameters() if "experts" in name}
    outers = captured.graph.graph.find_nodes(op="call_function", target=torch.ops.shardweave.expert_outer.default)
    assert weights and {node.meta["val"].shape for node in outers} == {*weights.values()}
    assert not any("transpose" in str(user.target) for node in outers for user in node.users)


# -- written by hand


class Routed(nn.Module):
    """One product with an expert a row, as frameworks write it: rows sorted, multiplied group by group, put back.

    `between` is done to the rows in sorted order; `how` says how they are put back.
    """

    def __init__(self, how: str, top: int = 2, between: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.how, self.top, self.between = how, top, between

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        keys = chosen.reshape(-1)
        sorted_keys, order = torch.sort(keys)
        ends = torch.histc(sorted_keys.float(), bins=4, min=0, max=3).cumsum(0).to(torch.int32)
        rows = self.between(_grouped_mm(x[order // self.top], self.weight, ends))
        if self.how == "added up":
            return torch.zeros_like(x).index_add(0, order // self.top, rows).square().sum()
        inverse = torch.argsort(order) if self.how == "sorted again" else torch.empty_like(order)
        if self.how == "counted":
            inverse[order] = torch.arange(len(order))
        return rows[inverse].view(len(x), self.top, 8).sum(1).square().sum()


def routed_batch(tokens: int = 6, top: int = 2, seed: int = 0, experts: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 8, generator=generator)
    return {"x": x, "chosen": torch.randint(0, experts, (tokens, top), generator=generator)}


@pytest.mark.parametrize("how", ["added up", "counted"])
@examples(5)
@given(tokens=st.integers(2, 9), top=st.integers(1, 3), experts=st.integers(1, 4), seed=st.integers(0, 1000))
def test_any_routing_computes_the_same(how: str, tokens: int, top: int, experts: int, seed: int) -> None:
    """Experts that no row goes to among them, and ones that a token goes to twice."""
    left = check_undone(Routed(how, top), routed_batch(tokens, top, seed, experts), 1e-5)
    assert left["shardweave::expert_mm"] == left["shardweave::expert_outer"] == 1


BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "root mean square": lambda rows: rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5),
    "layer norm": lambda rows: F.layer_norm(rows, (8,)),
    "standardised": lambda rows: (rows - rows.mean(-1, keepdim=True)) / (rows.std(-1, keepdim=True) + 0.1),
    "softmax": lambda rows: rows.softmax(-1),
    "largest": lambda rows: rows * rows.amax(-1, keepdim=True),
}


@pytest.mark.parametrize("name", BY_ROW)
def test_ops_between_that_work_by_row(name: str) -> None:
    """Also those that have a decomposition instead of a rule."""
    left = check_undone(Routed("counted", between=BY_ROW[name]), routed_batch(), 1e-5)
    assert left["shardweave::expert_mm"] == left["shardweave::expert_outer"] == 1


UNREADABLE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "running sum": ("counted", lambda rows: rows.cumsum(0)),
    "reversed": ("counted", lambda rows: rows.flip(0)),
    "repeated": ("counted", lambda rows: rows[:2].repeat(6, 1)),
    "softmax": ("added up", lambda rows: rows.softmax(0)),
    "times its place": ("added up", lambda rows: rows * torch.arange(12.0)[:, None]),
    "the order sorted": ("sorted again", F.silu),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_reads_the_order_is_refused(name: str) -> None:
    """With the line, and with what to write instead."""
    how, between = UNREADABLE[name]
    captured = capture(Routed(how, between=between), routed_batch())
    with pytest.raises(RuleError, match=r"test_moe_dispatch.py:\d+: .* no form without the sort. Route tokens as"):
        undo_dispatch(captured.graph.graph)


def test_a_sort_that_feeds_no_experts_stays() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sort(x, dim=0).values @ self.weight).sum()

    captured = capture(Sorted(), {"x": torch.randn(6, 4)})
    before = str(captured.graph.graph)
    undo_dispatch(captured.graph.graph)
    assert str(captured.graph.graph) == before
    assert ops(captured.graph)["aten::sort"] == 1


# -- what moves under expert parallelism


def moved(sharded_batch: bool, backward: bool) -> list[tuple[str, int]]:
    """The collectives of the mixture's layer, where its experts are spread over two ranks: kinds, and elements."""
    step = joint("mixtral", 4)
    mesh = mesh_of(2)
    (axis,) = mesh.axes
    module = step.copy()
    products = [
        node
        for node in module.graph.nodes
        if node.target in (custom_ops.expert_mm.default, custom_ops.expert_outer.default)
    ]
    assert len(products) == 6
    assignments = {node.name: Assignment.of({axis: "e"}) for node in products}
    sources = {}
    if sharded_batch:
        for node in placeholders(module):
            if node.name in step.captured.inputs:
                size, *rest = node.meta["val"].shape
                sources[node.name] = Layout(((axis, size // 2), *((length,) for length in rest)))
    captured = step.captured
    wanted = [None] * len(output_nodes(module))
    local = Shard(mesh, assignments, sources, wanted, captured.parameters, gradients=captured.gradients)(module)
    return [
        (what.kind, what.bytes)
        for node in local.graph.nodes
        if (what := info(node).collective) is not None
        and info(node).backward == backward
        and what.owner.startswith(("model.layers.0.mlp", "model.layers.0.post_attention", "model.norm"))
        and what.cause == "activation"
    ]


ROWS, WIDTH, TOP = 4 * hub.LENGTH, hub.SIZES["hidden_size"], 2
FLOAT64, FLOAT32, INT64 = 8, 4, 8


def test_experts_over_ranks_that_have_all_tokens() -> None:
    """Each rank computes the rows of its experts, with all between the two products; one sum brings them together."""
    assert moved(False, False) == [("all_reduce", ROWS * WIDTH * FLOAT64)]
    weights, tokens = ("all_reduce", ROWS * TOP * FLOAT64), ("all_reduce", ROWS * WIDTH * FLOAT64)
    assert moved(False, True) == [weights, tokens]


def test_experts_over_the_ranks_of_the_batch() -> None:
    """Tokens are gathered with their experts and weights, and results scattered; the backward does the opposite.

    The tokens go once, not once an expert that they go to.
    """
    tokens, scattered = ("all_gather", ROWS * WIDTH * FLOAT64), ("reduce_scatter", ROWS * WIDTH * FLOAT64)
    experts, weights = ("all_gather", ROWS * TOP * INT64), ("all_gather", ROWS * TOP * FLOAT32)
    assert Counter(moved(True, False)) == Counter([tokens, experts, weights, scattered])
    # Backward: the gradient of the tokens' results is gathered for that of the weights, a sum over the experts, and
    # again, times the weights, for that of the rows, which is scattered to the tokens.
    rows, sums = ("all_gather", ROWS * TOP * WIDTH * FLOAT64), ("all_reduce", ROWS * TOP * FLOAT64)
    assert Counter(moved(True, True)) == Counter([tokens, sums, rows, scattered])
