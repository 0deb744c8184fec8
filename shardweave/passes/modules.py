"""Modules of graphs that the passes write: their code comes when it is read or run, which for most of them is never.

The only module that touches torch's private lazy GraphModule.
"""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def module_of(constants: fx.GraphModule, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """`graph` as a module with the tensors and the meta of `constants`.

    >>> double = fx.symbolic_trace(lambda x: x + x)
    >>> module_of(double, double.graph)(2)
    4
    """
    module = _LazyGraphModule(constants, graph, name)
    module.meta.update(constants.meta)
    return module


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """`module` with a graph of its own; tensors and the nodes' values are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return module_of(module, graph)
