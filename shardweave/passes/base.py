"""Passes and their manager: a pass takes a graph and returns a graph; the manager runs several, and checks each.

A pass states in `requires` and `ensures` which properties of a graph it needs and gives:

============  ==========================================================================================
``joint``     one graph of forward and backward, whose nodes have their rules
``local``     every node has its value on one device and its layout; each collective is waited for
``unrolled``  the sub-batches and the slices of ops are written out: no coordinate of such an axis is left
``ordered``   the nodes stand in the order in which they run
============  ==========================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import fx

from shardweave.ir import VerifyError
from shardweave.passes.verify import verify
from shardweave.sharding import copied

Property = Literal["joint", "local", "unrolled", "ordered"]


@dataclass(frozen=True)
class Pass(ABC):
    """A transformation of a graph. Its fields are its options.

    Examples
    --------
    >>> class Nothing(Pass):
    ...     name = "nothing"
    ...     def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
    ...         return graph_module
    >>> Nothing().requires
    frozenset()
    """

    name: ClassVar[str]
    """What stages, progress and errors call it."""
    requires: ClassVar[frozenset[Property]] = frozenset()
    ensures: ClassVar[frozenset[Property]] = frozenset()

    @abstractmethod
    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """The transformed graph. The one that is given may be changed."""

    def check(self, graph_module: fx.GraphModule) -> None:  # noqa: B027  (most promise nothing of their own)
        """`VerifyError` where the result breaks what this pass alone promises."""


@dataclass
class PassManager:
    """Runs passes in their order, verifies the graph after each, and keeps it.

    Parameters
    ----------
    verifies : bool
        Graphs are checked and kept. A draft, which is simulated and not run, is neither.
    on_pass : callable, optional
        Told the name and the graph after each pass.
    properties : frozenset of Property
        Of the graph so far.
    names : list of str
        The passes that have run.
    history : dict from str to GraphModule
        The graph after each of them, by its name.
    """

    verifies: bool = True
    on_pass: Callable[[str, fx.GraphModule], None] | None = None
    properties: frozenset[Property] = frozenset()
    names: list[str] = field(default_factory=list)
    history: dict[str, fx.GraphModule] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """The name of the pass that ran last."""
        return self.names[-1]

    def resume(self, done: type[Pass], graph_module: fx.GraphModule) -> None:
        """Begin with the result of a pass that has run before."""
        self._finished(done.name, done.ensures, graph_module)

    def run(self, graph_module: fx.GraphModule, passes: Iterable[Pass]) -> fx.GraphModule:
        """The graph after all `passes`, each given the result of the one before.

        Raises
        ------
        VerifyError
            Naming the pass, where a graph lacks a property that it requires, or its result breaks a law of graphs.
        """
        for each in passes:
            if missing := each.requires - self.properties:
                raise VerifyError(
                    f"the pass {each.name} requires a graph that is {', '.join(sorted(missing))}, got one that is "
                    f"{', '.join(sorted(self.properties)) or 'nothing of these'}: run the passes that ensure it first"
                )
            graph_module = each(graph_module)
            if self.verifies:
                each.check(graph_module)
            self._finished(each.name, each.ensures, graph_module)
        return graph_module

    def _finished(self, name: str, ensures: frozenset[Property], graph_module: fx.GraphModule) -> None:
        self.names.append(name)
        self.properties |= ensures
        if self.verifies:
            verify(graph_module, name)
            self.history[name] = copied(graph_module)
        if self.on_pass is not None:
            self.on_pass(name, graph_module)
