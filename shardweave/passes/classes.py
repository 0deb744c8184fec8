"""Factor classes: the loops that the graph forces to be the same.

One union-find over the whole joint graph: a factor of an op and a factor of the op that made its input are the same
loop where they are the same atom of the value between them. Classes give names ("batch") and tell which loops some
op cannot split; the strategy of an op names the op's own loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardweave.passes.annotate import info, source_of
from shardweave.passes.rules import find_rule
from shardweave.passes.rules.registry import tensor_args

Loop = tuple[fx.Node, str]


@dataclass(frozen=True)
class Classes:
    """For every loop (node, factor) the number of its class, and the classes that some op cannot split."""

    of: Mapping[Loop, int]
    blocked: frozenset[int]


def find_classes(graph: fx.Graph) -> Classes:
    """The classes of an annotated graph.

    A softmax that can be decomposed does not block its loop.
    """
    parent: dict[Loop, Loop] = {}

    def root(loop: Loop) -> Loop:
        while parent.setdefault(loop, loop) != loop:
            parent[loop] = parent[parent[loop]]
            loop = parent[loop]
        return loop

    for node in graph.nodes:
        bound = info(node).rule
        if bound is None:
            continue
        for factor in bound.factors:
            root((node, factor.name))
        for argument, dims in zip(tensor_args(node) if node.op == "call_function" else (), bound.inputs):
            source, index = source_of(argument)
            made = info(source).rule
            if made is None or index >= len(made.outputs):
                continue
            sizes, made_sizes = bound.sizes(), made.sizes()
            for names, other in zip(dims, made.outputs[index]):
                if [sizes[name] for name in names] == [made_sizes[name] for name in other]:
                    for mine, theirs in zip(names, other):
                        parent[root((node, mine))] = root((source, theirs))
    numbers: dict[Loop, int] = {}
    of = {loop: numbers.setdefault(root(loop), len(numbers)) for loop in list(parent)}
    blocked = set()
    for node in graph.nodes:
        bound, rule = info(node).rule, find_rule(node) if node.op == "call_function" else None
        if bound is not None and not (rule is not None and rule.decompose is not None):
            blocked |= {of[node, factor.name] for factor in bound.factors if factor.blocked}
    return Classes(of, frozenset(blocked))
