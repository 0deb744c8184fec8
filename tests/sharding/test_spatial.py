"""What the rules of convolutional networks promise beyond equal numbers: what is split, what moves, what is counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from shardweave.ir import Axis, Layout
from shardweave.ir.errors import RuleError
from shardweave.sharding.annotate import bind_rules
from tests.passes.harness import Run, assert_equal, bound, graph_of, mesh_of, placeholders, run_sharded

aten = torch.ops.aten
custom_ops = torch.ops.shardweave
MESH = mesh_of(2)
(AXIS,) = MESH.axes


def targets(run: Run) -> list[object]:
    return [node.target for node in run.graph.graph.nodes if node.op == "call_function"]


def node_of(module: fx.GraphModule, target: object) -> fx.Node:
    (node,) = (node for node in module.graph.nodes if node.target is target)
    return node


def conv_args(groups: int = 1, transposed: bool = False, bias: Tensor | None = None) -> tuple[object, ...]:
    x, weight = torch.randn(4, 8, 5, 5), torch.randn(8, 8 // groups, 3, 3)
    return x, weight, bias, [2, 2], [1, 1], [1, 1], transposed, [0, 0], groups


@pytest.mark.parametrize(
    ("groups", "transposed", "shown"),
    [
        (1, False, "n c [x0] [x1], o c [w0] [w1] -> n o [y0] [y1]"),
        (1, True, "n c [x0] [x1], c o [w0] [w1] -> n o [y0] [y1]"),
        (4, False, "n (g c) [x0] [x1], (g o) c [w0] [w1] -> n (g o) [y0] [y1]"),
        (8, False, "n g [x0] [x1], g 1 [w0] [w1] -> n g [y0] [y1]"),
    ],
)
def test_convolution_reads_as(groups: int, transposed: bool, shown: str) -> None:
    """Grouped and depthwise convolutions have a free loop over their groups."""
    module, _ = graph_of(aten.convolution.default, conv_args(groups, transposed), {})
    assert str(bound(node_of(module, aten.convolution.default))) == shown


def test_gradients_take_what_they_depend_on() -> None:
    """The gradient of the input is partial over out-channels, that of the weight over the batch, and neither both."""
    x, weight, _, *options = conv_args()
    grad = torch.randn(4, 8, 3, 3)
    args = (grad, x, weight, [8], *options, [True, True, True])
    module, _ = graph_of(aten.convolution_backward.default, args, {})
    assert str(bound(node_of(module, custom_ops.conv_input_grad.default))) == (
        "n o [y0] [y1], o c [w0] [w1] -> n c [x0] [x1]"
    )
    assert str(bound(node_of(module, custom_ops.conv_weight_grad.default))) == (
        "n o [y0] [y1], n c [x0] [x1] -> o c [w0] [w1]"
    )


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (4, False), (1, True), (2, True)])
def test_flops_of_gradients(groups: int, transposed: bool) -> None:
    """Each gradient takes as many FLOPs as the convolution itself."""
    x, weight, _, *options = conv_args(groups, transposed)
    with FlopCounterMode(display=False) as forward:
        out = aten.convolution.default(x, weight, None, *options)
    assert forward.get_total_flops() > 0
    for call in (
        lambda: custom_ops.conv_input_grad.default(out, weight, [4, 8, 5, 5], *options),
        lambda: custom_ops.conv_weight_grad.default(out, x, list(weight.shape), *options),  # type: ignore[attr-defined]
    ):
        with FlopCounterMode(display=False) as backward:
            call()
        assert backward.get_total_flops() == forward.get_total_flops()


def batch_norm_args() -> tuple[object, ...]:
    x = torch.randn(6, 4, 3, 3, dtype=torch.float64) * 3 + 100
    channel = torch.rand(4, dtype=torch.float64) + 0.5
    return x, channel, channel, channel, channel, True, 0.1, 1e-5


def test_batch_norm_is_synchronised() -> None:
    """Over a split batch the statistics are the whole batch's: two small sums, and no gathered activation."""
    target = aten._native_batch_norm_legit_functional.default
    module, values = graph_of(target, batch_norm_args(), {})
    expected = module(*values)
    run = run_sharded(module, values, MESH, {}, {"p0": Layout(((AXIS, 3), (4,), (3,), (3,)))})
    assert target not in targets(run)
    assert [what.kind for what in run.collectives] == ["all_reduce"] * 2
    assert all(what.bytes == 4 * 8 for what in run.collectives)
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value)


@pytest.mark.parametrize("vectors", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_in_half_precision(vectors: torch.dtype, affine: bool) -> None:
    """Split or not, each result has the dtype that torch gives it."""
    x, (first, second) = torch.randn(6, 4, 3, 3, dtype=torch.bfloat16), torch.rand(2, 4).to(vectors)
    weight = first if affine else None
    target = aten._native_batch_norm_legit_functional.default
    module, values = graph_of(target, (x, weight, weight, first, second, True, 0.1, 1e-5), {})
    at = Layout(((AXIS, 3), (4,), (3,), (3,)))
    sources = {node.name: at for node in placeholders(module) if node.meta["val"].dim() == 4}
    run = run_sharded(module, values, MESH, {}, sources)
    assert target not in targets(run)
    for index, value in enumerate(module(*values)):
        torch.testing.assert_close(run.whole(index), value, rtol=0.02, atol=0.02)


def test_batch_norm_of_split_channels_is_one_kernel() -> None:
    target = aten._native_batch_norm_legit_functional.default
    module, values = graph_of(target, batch_norm_args(), {})
    run = run_sharded(module, values, MESH, {}, {"p0": Layout(((6,), (AXIS, 2), (3,), (3,)))})
    assert target in targets(run)
    assert not run.collectives


def test_batch_norm_backward_sums_twice() -> None:
    """What its input's gradient subtracts are the gradients of its bias and weight: they are summed once for both."""
    x, weight, bias, mean, variance, *rest = batch_norm_args()
    target = aten.native_batch_norm_backward.default
    _, *saved, _, _ = aten._native_batch_norm_legit_functional.default(x, weight, bias, mean, variance, *rest)
    args = (torch.randn(6, 4, 3, 3).double(), x, weight, mean, variance, *saved, True, 1e-5, [True, True, True])
    module, values = graph_of(target, args, {})
    expected = module(*values)
    split = Layout(((AXIS, 3), (4,), (3,), (3,)))
    run = run_sharded(module, values, MESH, {}, {"p0": split, "p1": split})
    assert [what.kind for what in run.collectives] == ["all_reduce"] * 2
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value)


def test_batch_norm_of_another_kind_is_refused() -> None:
    """cuDNN's op writes its running statistics behind the graph's back; captures do not hold it."""
    x, *channels = (torch.randn(4, 2, 3, 3), *torch.ones(4, 2))
    with pytest.raises(RuleError, match=r"no sharding rule.*\n.*aten.native_batch_norm"):
        graph_of(aten.native_batch_norm.default, (x, *channels, True, 0.1, 1e-5), {})


@pytest.mark.parametrize("partial", [(), ((AXIS, "sum"),)], ids=["whole", "partial"])
@pytest.mark.parametrize("name", ["avg_pool2d", "_adaptive_avg_pool2d", "reflection_pad2d"])
def test_inputs_taken_for_their_shape_do_not_move(name: str, partial: tuple[tuple[Axis, str], ...]) -> None:
    """The gradient lies in parts, the input whole or as a partial sum: nothing of the input is read."""
    x = torch.randn(4, 6, 8, 8)
    extra: dict[str, tuple[object, ...]] = {
        "avg_pool2d": ([2, 2], [2, 2], [0, 0], False, True, None),
        "_adaptive_avg_pool2d": (),
        "reflection_pad2d": ([1, 1, 1, 1],),
    }
    out = F.pad(x, (1, 1, 1, 1)) if "pad" in name else F.avg_pool2d(x, 2)
    target = getattr(aten, f"{name}_backward").default
    module, values = graph_of(target, (torch.randn(out.shape), x, *extra[name]), {})
    grad = Layout(((AXIS, 2), (6,), *((size,) for size in out.shape[2:])))
    run = run_sharded(module, values, MESH, {}, {"p0": grad, "p1": Layout(((4,), (6,), (8,), (8,)), partial)})
    assert not run.collectives
    (placeholder,) = (node for node in run.graph.graph.nodes if node.name == "p1")
    assert not placeholder.users
    assert_equal(run.whole(0), module(*values)[0])


def test_group_norm_backward_of_mixed_memory() -> None:
    """A channels-last input and a row-major gradient: torch's CPU kernel would read both as if they lay alike."""
    x, grad, weight = torch.randn(4, 6, 3, 3), torch.randn(4, 6, 3, 3), torch.rand(6)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, 4, 6, 9, 3, 1e-5)
    args = (grad, x, mean, rstd, weight, 4, 6, 9, 3, [True, True, False])
    module, values = graph_of(aten.native_group_norm_backward.default, args, {})
    expected = module(*values)
    node = node_of(module, aten.native_group_norm_backward.default)
    given = node.args[1]
    assert isinstance(given, fx.Node)
    with module.graph.inserting_before(node):
        clone = module.graph.call_function(aten.clone.default, (given,), {"memory_format": torch.channels_last})
    clone.meta["val"] = given.meta["val"].clone(memory_format=torch.channels_last)
    node.replace_input_with(given, clone)
    bind_rules(module.graph)
    run = run_sharded(module, values, MESH, {}, {"p0": Layout(((AXIS, 2), (6,), (3,), (3,)))})
    for index, value in enumerate(expected):
        assert_equal(run.whole(index), value)


def test_group_norm_backward_is_written_row_major() -> None:
    """The annotated graph itself does not rely on the gradient lying as the captured one did."""
    x, grad, weight = torch.randn(4, 6, 3, 3), torch.randn(4, 6, 3, 3), torch.rand(6)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, 4, 6, 9, 3, 1e-5)
    rest = (mean, rstd, weight, 4, 6, 9, 3, [True, True, True])
    expected = aten.native_group_norm_backward.default(grad, x, *rest)
    lies = x.contiguous(memory_format=torch.channels_last)
    module, values = graph_of(aten.native_group_norm_backward.default, (grad, lies, *rest), {})
    for got, value in zip(module(*values), expected, strict=True):
        assert_equal(got, value)
