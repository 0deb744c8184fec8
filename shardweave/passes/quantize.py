"""The pass `Quantize` moves parameters and gradients in blocks of few bits (ZeRO++, arXiv 2306.10209, section 1.2).

An all-gather of a parameter (qwZ) becomes an all-gather of its quantized blocks and one of their scales. Each rank
dequantizes the whole parameter from these, its own part included, so that all ranks have the same values. A
reduce-scatter of a gradient (qgZ) becomes all-to-alls, one stage for each level of the machine that the group crosses,
the innermost first: after the stage inside a node, little is left to move between nodes. Each stage quantizes, moves,
dequantizes to full precision, and then adds up. Quantized values are never summed.

All-reduces stay as they are: those of replicated gradients, and those between the shards of hybrid sharding. So do
activations, and values that are not floating point.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from torch import fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import META, Axis, Collective, Quantized, axes_size, group_name
from shardweave.passes.base import Pass, Property
from shardweave.passes.spmd_builder import finished, short_name
from shardweave.sharding import fake_result, info, is_wait, tensor_bytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
custom_ops = torch.ops.shardweave

QUANTIZATION_BLOCK = 256
"""Elements in a block. A float32 scale adds 1.6 % to a block of int8, and 3.1 % to one of int4."""


@dataclass(frozen=True)
class Quantize(Pass):
    """Move parameters and gradients in few bits.

    Requires a local graph in which every start is followed by its wait. Ensures that each value differs from the
    original by at most half a quantization step of its block for each stage, that all ranks of an all-gather have the
    same values, and that the node that replaces a wait has its name.

    Parameters
    ----------
    bits : mapping of {"parameters", "gradients"} to int
        The bits of an element during its transfer, 8 or 4. A kind that is not named moves as it is.
    block : int
        The number of elements that share a scale.
    """

    name = "quantize"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    bits: Mapping[Quantized, int] = field(default_factory=dict)
    block: int = QUANTIZATION_BLOCK

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph, known = graph_module.graph, dict[object, Any]()
        for wait in [node for node in graph.nodes if is_wait(node)]:
            (start,) = wait.all_input_nodes
            collective = info(start).collective
            if collective is None or not start.meta["val"].is_floating_point() or not start.meta["val"].numel():
                continue
            kind = collective.kind, collective.cause
            if kind == ("all_gather", "parameter") and "parameters" in self.bits:
                _Rewrite(graph, start, collective, self.bits["parameters"], self.block, known).gather(wait)
            elif kind == ("reduce_scatter", "gradient") and start.args[1] == "sum" and "gradients" in self.bits:
                _Rewrite(graph, start, collective, self.bits["gradients"], self.block, known).reduce(wait)
        return finished(graph_module)


def quantization_stages(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """The axes of a process group by level of the machine, the innermost level first; in a level, outermost first.

    >>> axes = Axis("node0", 2, 4), Axis("gpu1", 2, 2), Axis("gpu0", 2, 1)
    >>> [" ".join(axis.name for axis in stage) for stage in quantization_stages(axes)]
    ['gpu1 gpu0', 'node0']
    """
    inside_out = sorted(axes, key=lambda axis: axis.stride)
    return [tuple(reversed([*stage])) for _, stage in groupby(inside_out, key=lambda axis: axis.level)]


def sizes_of_parts(source: fx.Node, rows: int) -> list[int]:
    """The sizes, in elements, of the parts that a row of a buffer consists of: for a bucket, those of its members."""
    size, node = source.meta["val"].numel() // rows, source
    while node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    if node.target is aten.cat.default:
        parts = [part.meta["val"] for part in node.args[0]]  # type: ignore[union-attr]  # nodes: the parts of a cat
        if rows == 1 and all(part.dim() == 1 for part in parts):
            return [part.numel() for part in parts]
        if node.args[1:] == (1,) and all(part.dim() == 2 and part.shape[0] == rows for part in parts):
            return [part.shape[1] for part in parts if part.numel()]
    return [size]


@dataclass
class _Rewrite:
    """One collective in its quantized form."""

    graph: fx.Graph
    start: fx.Node
    collective: Collective
    bits: int
    block: int
    known: dict[object, Any]
    """A cache of fake results by op and the shapes, dtypes and strides of arguments: equal layers share them."""

    def gather(self, wait: fx.Node) -> None:
        """Replace an all-gather: gather the blocks and scales of each rank, and dequantize."""
        source = self.start.all_input_nodes[0]
        sizes, dtype = sizes_of_parts(source, 1), wait.meta["val"].dtype
        with self.graph.inserting_before(wait):
            both = self._quantized(source, sizes)
            moved = [self._moved("all_gather", each, self.collective.axes) for each in both]
            self._replace(wait, self._call(custom_ops.dequantize_blocks.default, *moved, sizes, self.block, dtype))

    def reduce(self, wait: fx.Node) -> None:
        """Replace a reduce-scatter: send each rank its parts from all others and add them up, stage by stage.

        A rank has one row for each rank of the group, ordered by their coordinates, the outermost axis first. A stage
        sends rows along the innermost axes that are left. It leaves one row for each coordinate of the other axes.
        """
        source, rows = self.start.all_input_nodes[0], axes_size(self.collective.axes)
        sizes = sizes_of_parts(source, rows)
        with self.graph.inserting_before(wait):
            for axes in quantization_stages(self.collective.axes):
                both, ranks = self._quantized(source, sizes), axes_size(axes)
                rows //= ranks
                moved = [self._moved("all_to_all", self._by_rank(each, rows, ranks), axes) for each in both]
                of = both[1] if rows > 1 else wait  # sums stay in full precision
                source = self._call(custom_ops.sum_dequantized.default, *moved, sizes, self.block, of.meta["val"].dtype)
            self._replace(wait, source)

    def _quantized(self, source: fx.Node, sizes: list[int]) -> tuple[fx.Node, fx.Node]:
        """The blocks of a value, and their scales."""
        both = self._call(custom_ops.quantize_blocks.default, source, sizes, self.bits, self.block)
        return self._call(operator.getitem, both, 0), self._call(operator.getitem, both, 1)

    def _by_rank(self, part: fx.Node, rows: int, ranks: int) -> fx.Node:
        """`part` reordered so that the rows for one of the `ranks` (the innermost axes) are contiguous."""
        if rows == 1:
            return self._call(aten.reshape.default, part, [ranks, 1, -1])
        part = self._call(aten.permute.default, self._call(aten.reshape.default, part, [rows, ranks, -1]), [1, 0, 2])
        return self._call(aten.clone.default, part, memory_format=torch.contiguous_format)

    def _moved(self, kind: Literal["all_gather", "all_to_all"], part: fx.Node, axes: Sequence[Axis]) -> fx.Node:
        """Start a collective of blocks or scales, and wait for its result."""
        ranks, scales, gathers = axes_size(axes), part.meta["val"].is_floating_point(), kind == "all_gather"
        target = c10d.all_gather_into_tensor.default if gathers else c10d.all_to_all_single.default
        start = self._call(target, part, *([ranks] if gathers else [[1] * ranks] * 2), group_name(axes))
        size = tensor_bytes((start if gathers else part).meta["val"])
        form = f"{'scales of ' if scales else ''}int{self.bits} blocks, ZeRO++ {'qwZ' if gathers else 'qgZ'}"
        reason = f"{self.collective.reason}, {form}" if self.collective.reason else form
        collective = replace(self.collective, kind=kind, axes=tuple(axes), bytes=size, reason=reason, scales=scales)
        start.meta[META] = replace(info(start), collective=collective)
        return self._call(c10d.wait_tensor.default, start)

    def _replace(self, wait: fx.Node, found: fx.Node) -> None:
        """Let the users of `wait` read `found` instead. It takes over the name of `wait`."""
        found = self._call(aten.reshape.default, found, list(wait.meta["val"].shape))
        found.meta[META] = info(wait)
        wait.replace_all_uses_with(found)
        name = wait.name
        self.graph.erase_node(wait)
        self.graph.erase_node(self.start)
        found.name = name

    def _call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, short_name(target))
        node.meta[META] = replace(info(self.start), layouts=(), collective=None)
        node.meta["val"] = fake_result(target, args, kwargs, self.start.meta["val"].fake_mode, self.known)
        return node
