"""Which losses a gradient comes from: a parameter that no loss of a step needs gets none, as on one device."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardweave.ir import StepSpec


def tangents_of_gradients(backward: fx.GraphModule, spec: StepSpec) -> list[frozenset[int]]:
    """For each gradient that `backward` returns, the outputs of the step (by index) whose tangents it is made of.

    A gradient that is the same whatever the tangents are (zeros, of an embedding that looks up nothing) comes from any.

    Examples
    --------
    >>> from shardweave.ir import Layout, Mesh, ParameterSpec, ValueSpec
    >>> whole = Layout.replicated(())
    >>> parameters = tuple(ParameterSpec(name, whole, "float32") for name in ("weight", "aside", "unused"))
    >>> outputs = tuple(ValueSpec(name, whole, "float32", True) for name in ("loss", "other"))
    >>> spec = StepSpec(Mesh(()), parameters, (), (), outputs)
    >>> backward = fx.symbolic_trace(lambda saved, loss, other: (loss * saved + other, -other, None))
    >>> [sorted(found) for found in tangents_of_gradients(backward, spec)]
    [[0, 1], [1], []]
    """
    differentiable = [index for index, output in enumerate(spec.outputs) if output.differentiable]
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    tangents = placeholders[len(placeholders) - len(differentiable) :]
    found = {node: frozenset({index}) for node, index in zip(tangents, differentiable, strict=True)}
    for node in backward.graph.nodes:
        if node not in found:
            found[node] = frozenset(index for argument in node.all_input_nodes for index in found[argument])
    every = frozenset(differentiable)
    return [found[value] or every if isinstance(value, fx.Node) else frozenset() for value in _results(backward)]


def _results(module: fx.GraphModule) -> Iterator[object]:
    (returned,) = module.graph.output_node().args
    yield from returned if isinstance(returned, (list, tuple)) else (returned,)
