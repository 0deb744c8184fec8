"""Annotate: the joint graph keeps its values, and every node gets its rule in atoms and its name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, fx, nn

from shardweave.compiler.capture import capture
from shardweave.cost_model.options import Options
from shardweave.ir import BoundRule
from shardweave.ir.captured import Captured
from shardweave.ir.errors import RuleError
from shardweave.passes.step_boundary import annotate
from shardweave.sharding.annotate import Annotate, depends_on_inputs
from shardweave.sharding.graphs import info
from shardweave.sharding.rules import find_rule
from shardweave.sharding.rules.registry import DECOMPOSITIONS
from tests.passes.harness import assert_equal, bound, mesh_of, placeholders, run_sharded
from tests.passes.joint import CASES, joint

aten = torch.ops.aten


def sizes_of(rule: BoundRule, names: tuple[tuple[str, ...], ...]) -> list[list[int]]:
    return [[rule.factor(name).size for name in dim] for dim in names]


def parameter(captured: Captured, name: str) -> fx.Node:
    (node,) = (node for node in placeholders(captured.graph) if captured.parameters.get(node.name) == name)
    return node


WRITTEN_IN_THEMSELVES = {
    aten.convolution.default,  # without its bias
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default,
}


@pytest.mark.parametrize("name", CASES)
def test_decompositions_keep_the_step(name: str) -> None:
    """The annotated graph computes the model's own loss and gradients, and no decomposed op is left."""
    step = joint(name)
    model, case = step.model, CASES[name]
    loss = case.loss(model(**step.batch))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    outputs, found = step.results()
    assert_equal(outputs[len(step.captured.mutated)], loss.detach(), "loss")
    for parameter_name, got, expected in zip(step.captured.gradients, found, gradients, strict=True):
        tolerance = 1e-5 if "llama" in name else 1e-11  # Llama's norms are in float32
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=parameter_name)
    left = {node.target for node in step.captured.graph.graph.nodes} & set(DECOMPOSITIONS)
    assert left <= WRITTEN_IN_THEMSELVES


@pytest.mark.parametrize("name", CASES)
def test_every_node_has_its_rule(name: str) -> None:
    """Whatever depends on an input has a rule of its shapes; constants have one without inputs; all have a name."""
    graph = joint(name).captured.graph.graph
    dependent = depends_on_inputs(graph)
    for node in graph.nodes:
        rule, value = info(node).rule, node.meta.get("val")
        if node.op == "output" or not isinstance(value, Tensor) or "getitem" in node.name:
            continue
        assert rule is not None and info(node).op
        assert [[*map(_product, sizes_of(rule, names))] for names in rule.outputs] == [list(value.shape)]
        assert bool(rule.inputs) == (node in dependent and node.op == "call_function")
        assert node not in dependent or node.op != "call_function" or find_rule(node) is not None


def _product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def test_atoms_of_a_fused_projection() -> None:
    """The rows of a fused qkv weight are ``(3 h d)``, and those of its bias; the columns of ``out`` are ``(h d)``."""
    captured = joint("gpt").captured
    weight = bound(parameter(captured, "blocks.0.attention.qkv.weight"))
    assert sizes_of(weight, weight.outputs[0]) == [[3, 4, 4], [16]]
    bias = bound(parameter(captured, "blocks.0.attention.qkv.bias"))
    assert sizes_of(bias, bias.outputs[0]) == [[3, 4, 4]]
    out = bound(parameter(captured, "blocks.0.attention.out.weight"))
    assert sizes_of(out, out.outputs[0]) == [[16], [4, 4]]
    products = [node for node in captured.graph.graph.nodes if node.target is aten.mm.default]
    (qkv,) = (n for n in products if info(n).op == "blocks.0.attention.qkv" and not info(n).backward)
    rule = bound(qkv)
    assert sizes_of(rule, rule.outputs[0]) == [[8, 4], [3, 4, 4]]  # (b s), (3 h d)
    assert str(rule) == "(m.0 m.1) k, k (n.0 n.1 n.2) -> (m.0 m.1) (n.0 n.1 n.2)"


def test_atoms_of_grouped_query_attention() -> None:
    """Keys have 2 heads of which each serves 2 queries: the queries' heads are cut by the groups."""
    captured = joint("llama").captured
    key = bound(parameter(captured, "model.layers.0.self_attn.k_proj.weight"))
    assert sizes_of(key, key.outputs[0])[0][0] == 2
    query = bound(parameter(captured, "model.layers.0.self_attn.q_proj.weight"))
    assert _product(sizes_of(query, query.outputs[0])[0]) == 16 and sizes_of(query, query.outputs[0])[0][0] in (2, 4)


def test_names_are_module_paths() -> None:
    """Forward and backward nodes are called as the model calls their module."""
    for name, expected in (
        ("gpt", {"blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.up", "blocks.0.down", "head"}),
        ("llama", {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"}),
    ):
        products = [node for node in joint(name).captured.graph.graph.nodes if node.target is aten.mm.default]
        assert expected <= {info(node).op for node in products if not info(node).backward}
        assert {info(node).op for node in products if info(node).backward} == {
            info(node).op for node in products if not info(node).backward
        }


class Signs(nn.Linear):
    """The gradient of its weight is a constant, and it takes the mean of a number along its only dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).sgn().sum() + self.bias.sum()).mean(0)


def test_parameters_with_constant_gradients_are_sharded_by_their_products() -> None:
    captured = capture(Signs(4, 4), torch.randn(8, 4))
    assert annotate(captured, Options()).ops[0].parameter == "weight"


class Unruled(nn.Module):
    """Its matrix exponential of activations has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"power": Power()})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner["power"](self.first(x))
        return result.sum()


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matrix_exp(x)  # the line that the error shows


def test_unruled_op_is_refused() -> None:
    """The error names the op, the module, the user's line, and the ways out."""
    with pytest.raises(RuleError) as error:
        annotate(capture(Unruled(), torch.randn(4, 4)), Options(replicate_unknown_ops=False))
    message = str(error.value)
    line = f"{__file__}:{Power.forward.__code__.co_firstlineno + 1}: return torch.matrix_exp(x)"
    told = "aten.linalg_matrix_exp.default", "inner.power", line, "replicate_unknown_ops=True", "shardweave.rule("
    for part in told:
        assert part in message, f"{part!r} is not in: {message}"


def test_unruled_op_may_be_allowed() -> None:
    """Then it is computed whole on every device, with a warning, and the rest as it was."""
    x = torch.randn(4, 4, dtype=torch.float64)
    model = Unruled().double()
    captured = capture(model, x)
    with pytest.warns(UserWarning, match=r"whole on every device(?s:.)*aten.linalg_matrix_exp.default in inner"):
        annotate(captured, Options())
    mesh = mesh_of(2)
    values = [*(value.detach() for value in model.parameters()), x, torch.ones((), dtype=torch.float64)]
    expected = captured.graph(*values)
    run = run_sharded(captured.graph, values, mesh, {}, {})
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value)


class Counted(nn.Module):
    """An op without a rule that no activation passes: it counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(tokens).sum(), tokens.put(tokens[:1], tokens[1:2])


def test_op_without_a_rule_off_the_path_of_activations_warns() -> None:
    captured = capture(Counted(), torch.randint(0, 8, (4,)))
    with pytest.warns(UserWarning, match="aten.put.default"):
        annotate(captured, Options())


def test_annotate_twice_is_annotate() -> None:
    """Rules depend on the graph alone: binding them again changes nothing, and warns of nothing."""
    step = joint("gpt")
    before = [(node.name, info(node)) for node in step.captured.graph.graph.nodes]
    module = step.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Annotate()(module)
    assert [(node.name, info(node)) for node in module.graph.nodes] == before


class Masks(nn.Module):
    """Every layer makes the same mask, and draws no randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            mask = torch.ones(4, 4, dtype=x.dtype).tril(index // 2)
            x = layer(x) @ mask
        return x.sum()


def test_constants_are_computed_once() -> None:
    """Equal constants are one node, and the step keeps its values."""
    x = torch.randn(4, 4, dtype=torch.float64)
    model = Masks().double()
    captured = capture(model, x)
    values = [*(value.detach() for value in model.parameters()), x, torch.ones((), dtype=torch.float64)]
    expected = captured.graph(*values)
    annotate(captured, Options())
    nodes = captured.graph.graph.nodes
    assert [node.target for node in nodes].count(aten.tril.default) == 2
    for got, wanted in zip(captured.graph(*values), expected, strict=True):
        assert_equal(got, wanted)


def test_a_program_inside_the_model_is_refused() -> None:
    """flex_attention is an op whose score is a graph of its own: the message says what to write instead."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(1, 2, 16, 8)
    out = graph.call_function(torch.ops.higher_order.flex_attention, (x, x, x, None, None, 1.0, {}))
    out.meta["val"] = (x.meta["val"],)
    graph.output(out)
    with pytest.raises(RuleError, match="flex_attention.*scaled_dot_product_attention"):
        Annotate()(fx.GraphModule({}, graph))


class Delegating(nn.Module):
    """A model that looks attributes up in its own way, as those of `diffusers` do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_ops_have_the_names_of_modules_in_a_model_that_looks_them_up_itself() -> None:
    captured = capture(Delegating(), torch.randn(2, 4))
    annotate(captured, Options())
    products = {info(node).op for node in captured.graph.graph.nodes if node.target is aten.mm.default}
    assert products == {"layers.0", "layers.1"}


class Spectrum(nn.Module):
    """Its only unruled op gives complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        values = torch.complex(product, product)
        return values.put(torch.zeros(1, dtype=torch.long), values[0, :1]).abs().sum()


def test_an_unruled_op_of_complex_numbers_is_refused() -> None:
    with pytest.raises(RuleError, match="aten.put.default"):
        Annotate()(capture(Spectrum(), torch.randn(8, 4)).graph)
