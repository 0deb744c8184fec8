"""Quantize: parameters and gradients move in blocks of few bits (ZeRO++, arXiv 2306.10209, section 1.2).

An all-gather of a parameter (qwZ) becomes one of its blocks, and one of their scales; all ranks take the parameter out
of these, its own part included, so that all have the same. A reduce-scatter of a gradient (qgZ) becomes all-to-alls,
one stage for each level of the machine that the group crosses, the innermost first: inside of a node, so that what is
left for between nodes is small. Each stage quantizes, moves, takes the parts out of their blocks to full precision, and
then adds them up; a sum is never one of quantized values.

All-reduces stay as they are, those of replicated gradients and of the shards of hybrid sharding, and so do activations,
and whatever is not floating point.
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
from shardweave.passes.spmd_builder import remove_dead, short_name
from shardweave.sharding import described, info, is_wait, tensor_bytes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
own = torch.ops.shardweave

BLOCK = 256
"""Elements of a block: a float32 scale is 1.6 % of what it is for in int8, 3.1 % in int4."""


@dataclass(frozen=True)
class Quantize(Pass):
    """Move parameters and gradients in few bits.

    Requires a local graph in which every start is followed by its wait; ensures that each value is what it was to
    within half a step of its block for each stage that it moves through, that all ranks of a group that gathers have
    the same, and that what took the place of a wait has its name.

    Parameters
    ----------
    bits : mapping of {"parameters", "gradients"} to int
        Bits of an element on its way, 8 or 4; what is not named moves as it is.
    block : int
        Elements that share a scale.
    """

    name = "quantize"
    requires: ClassVar[frozenset[Property]] = frozenset({"local"})
    bits: Mapping[Quantized, int] = field(default_factory=dict)
    block: int = BLOCK

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph, known = graph_module.graph, dict[object, Any]()
        for wait in [node for node in graph.nodes if is_wait(node)]:
            (start,) = wait.all_input_nodes
            what = info(start).collective
            if what is None or not start.meta["val"].is_floating_point() or not start.meta["val"].numel():
                continue
            kind = what.kind, what.cause
            if kind == ("all_gather", "parameter") and "parameters" in self.bits:
                _Rewrite(graph, start, what, self.bits["parameters"], self.block, known).gather(wait)
            elif kind == ("reduce_scatter", "gradient") and start.args[1] == "sum" and "gradients" in self.bits:
                _Rewrite(graph, start, what, self.bits["gradients"], self.block, known).reduce(wait)
        remove_dead(graph)
        graph.lint()
        graph_module.recompile()
        return graph_module


def stages(axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
    """The axes of a group, outermost first, level by level from the innermost.

    >>> axes = Axis("node0", 2, 4), Axis("gpu1", 2, 2), Axis("gpu0", 2, 1)
    >>> [" ".join(axis.name for axis in stage) for stage in stages(axes)]
    ['gpu1 gpu0', 'node0']
    """
    inside_out = sorted(axes, key=lambda axis: axis.stride)
    return [tuple(reversed([*stage])) for _, stage in groupby(inside_out, key=lambda axis: axis.level)]


def sizes_of_parts(source: fx.Node, rows: int) -> list[int]:
    """The elements of the parts that a row of a buffer is made of: of a bucket, those of each of its members."""
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
    what: Collective
    bits: int
    block: int
    known: dict[object, Any]
    """Values of calls, by what is called with values of which shapes, dtypes and strides: equal layers ask again."""

    def gather(self, wait: fx.Node) -> None:
        """Gather the blocks of each rank, and make of them what the collective made of the ranks' parts."""
        source = self.start.all_input_nodes[0]
        sizes, dtype = sizes_of_parts(source, 1), wait.meta["val"].dtype
        with self.graph.inserting_before(wait):
            both = self._quantized(source, sizes)
            moved = [self._moved("all_gather", each, self.what.axes) for each in both]
            self._replace(wait, self._call(own.dequantize_blocks.default, *moved, sizes, self.block, dtype))

    def reduce(self, wait: fx.Node) -> None:
        """Bring each rank its part from all others and add it up, stage after stage.

        A rank has a row for each rank of the group, in the order of their places along the axes, the outermost first. A
        stage sends rows along the innermost axes that are left, and leaves one for each place along the others.
        """
        source, rows = self.start.all_input_nodes[0], axes_size(self.what.axes)
        sizes = sizes_of_parts(source, rows)
        with self.graph.inserting_before(wait):
            for axes in stages(self.what.axes):
                both, ranks = self._quantized(source, sizes), axes_size(axes)
                rows //= ranks
                moved = [self._moved("all_to_all", self._by_rank(each, rows, ranks), axes) for each in both]
                of = both[1] if rows > 1 else wait  # sums stay in full precision
                source = self._call(own.sum_dequantized.default, *moved, sizes, self.block, of.meta["val"].dtype)
            self._replace(wait, source)

    def _quantized(self, source: fx.Node, sizes: list[int]) -> tuple[fx.Node, fx.Node]:
        """The blocks of a value, and their scales."""
        both = self._call(own.quantize_blocks.default, source, sizes, self.bits, self.block)
        return self._call(operator.getitem, both, 0), self._call(operator.getitem, both, 1)

    def _by_rank(self, part: fx.Node, rows: int, ranks: int) -> fx.Node:
        """What goes to each of `ranks`, the innermost of the group: so many rows, one behind the other."""
        if rows == 1:
            return self._call(aten.reshape.default, part, [ranks, 1, -1])
        part = self._call(aten.permute.default, self._call(aten.reshape.default, part, [rows, ranks, -1]), [1, 0, 2])
        return self._call(aten.clone.default, part, memory_format=torch.contiguous_format)

    def _moved(self, kind: Literal["all_gather", "all_to_all"], part: fx.Node, axes: Sequence[Axis]) -> fx.Node:
        """What comes of blocks, or of their scales, in a collective."""
        ranks, scales, gathers = axes_size(axes), part.meta["val"].is_floating_point(), kind == "all_gather"
        target = c10d.all_gather_into_tensor.default if gathers else c10d.all_to_all_single.default
        start = self._call(target, part, *([ranks] if gathers else [[1] * ranks] * 2), group_name(axes))
        size = tensor_bytes((start if gathers else part).meta["val"])
        form = f"{'scales of ' if scales else ''}int{self.bits} blocks, ZeRO++ {'qwZ' if gathers else 'qgZ'}"
        reason = f"{self.what.reason}, {form}" if self.what.reason else form
        what = replace(self.what, kind=kind, axes=tuple(axes), bytes=size, reason=reason, scales=scales)
        start.meta[META] = replace(info(start), collective=what)
        return self._call(c10d.wait_tensor.default, start)

    def _replace(self, wait: fx.Node, found: fx.Node) -> None:
        """Let the users of `wait` read what was found instead, under its name."""
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
        key = target, described(args), described(kwargs)
        if key not in self.known:
            values = fx.node.map_arg((node.args, node.kwargs), lambda leaf: leaf.meta["val"])
            with self.start.meta["val"].fake_mode:
                self.known[key] = target(*values[0], **values[1])
        node.meta["val"] = self.known[key]
        return node
