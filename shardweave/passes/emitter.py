"""What a rule's lowering sees of one op: its local arguments, its layouts, and the local graph to write to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardweave.ir import Axis, BoundRule, Layout
from shardweave.passes.layouts import outermost_first
from shardweave.passes.local import LocalGraph, Origin
from shardweave.passes.rules.random import draws
from shardweave.passes.rules.registry import Rule


class OpEmitter:
    """The `registry.Emitter` of one op. `values` are its tensor arguments, at the layouts of `inputs`."""

    def __init__(
        self,
        local: LocalGraph,
        written: Mapping[fx.Node, tuple[fx.Node, Layout]],
        node: fx.Node,
        values: Iterator[fx.Node],
        inputs: Sequence[Layout],
        outputs: Sequence[Layout],
        assignment: Mapping[Axis, str],
        rule: BoundRule,
        origin: Origin,
    ) -> None:
        self._local, self._origin = local, origin
        self.node, self.rule = node, rule
        self.input_layouts, self.output_layouts = tuple(inputs), tuple(outputs)
        self.assignment: Mapping[Axis, str] = {axis: assignment[axis] for axis in outermost_first(assignment)}

        def argument(leaf: fx.Node) -> Any:
            return next(values) if isinstance(leaf.meta.get("val"), torch.Tensor) else written[leaf][0]

        self.args: tuple[Any, ...] = fx.node.map_arg(node.args, argument)
        names = [declared.name for declared in getattr(getattr(node.target, "_schema", None), "arguments", [])]
        ordered = sorted(node.kwargs, key=lambda name: names.index(name) if name in names else len(names))
        self.kwargs: dict[str, Any] = {name: fx.node.map_arg(node.kwargs[name], argument) for name in ordered}

    def emit(self, rule: Rule | None) -> fx.Node:
        """Write the op in its local form."""
        if rule is not None and rule.lower is not None:
            return rule.lower(self)
        return self.call(self.node.target, *self.args, **self.kwargs)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        drawn = target is self.node.target and draws(self.node)
        if drawn:
            return self._local.draw(self._origin, list(self.assignment), target, *args, **kwargs)
        return self._local.call(self._origin, target, *args, **kwargs)

    def offset(self, axes: Sequence[Axis], step: int) -> Any:
        return self._local.offset(self._origin, axes, step)
