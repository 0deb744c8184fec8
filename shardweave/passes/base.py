"""The base class of passes and the pass manager.

A pass takes a graph and returns a graph. It states in `requires` and `ensures` which properties of a graph it needs and
establishes:

============  ==========================================================================================
``joint``     one global graph has forward and backward, and each op has its sharding rule
``local``     each node has its value on one device and its layout; each collective is waited for
``unrolled``  the ops are copied for each sub-batch and slice: no coordinate of such an axis is left
``ordered``   the nodes are in the order in which they run
============  ==========================================================================================

`annotate` ensures ``joint``. A local graph is not ``joint`` any more: `Shard` invalidates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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
    """The name of the pass in stages, progress and errors."""
    requires: ClassVar[frozenset[Property]] = frozenset()
    ensures: ClassVar[frozenset[Property]] = frozenset()
    invalidates: ClassVar[frozenset[Property]] = frozenset()

    @abstractmethod
    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return the transformed graph. The pass may change `graph_module`."""

    def check(self, graph_module: fx.GraphModule) -> None:  # noqa: B027  (optional: most passes check nothing more)
        """Raise `VerifyError` if the result breaks a promise that only this pass makes."""


@dataclass
class PassManager:
    """Runs passes in order, verifies the graph after each, and keeps a copy of it.

    Parameters
    ----------
    verifies : bool
        Whether graphs are verified and kept. The graphs of a draft, which are simulated and not run, are not.
    on_pass : callable, optional
        Told the name and the graph after each pass.
    properties : frozenset of Property
        The properties of the graph so far.
    names : list of str
        The passes that have run.
    history : dict from str to GraphModule
        The graph after each pass, by the pass's name. The last one is the graph itself, all others are copies.
    """

    verifies: bool = True
    on_pass: Callable[[str, fx.GraphModule], None] | None = None
    properties: frozenset[Property] = frozenset()
    names: list[str] = field(default_factory=list)
    history: dict[str, fx.GraphModule] = field(default_factory=dict)

    def run(self, graph_module: fx.GraphModule, passes: Iterable[Pass]) -> fx.GraphModule:
        """Run `passes`, each on the result of the one before, and return the last graph.

        The passes may change `graph_module`.

        Raises
        ------
        VerifyError
            If a graph lacks a property that a pass requires, or a result breaks a law of local graphs. The error names
            the pass.
        """
        for each in passes:
            self._check_required(each)
            if self.names and self.verifies:
                self.history[self.names[-1]] = copied(graph_module)  # `each` may change the graph
            graph_module = each(graph_module)
            if self.verifies:
                each.check(graph_module)
            self._finish(each, graph_module)
        return graph_module

    def resume(self, done: Pass | type[Pass], graph_module: fx.GraphModule) -> None:
        """Take `graph_module` as the result of the pass `done`, which has run before.

        Raises
        ------
        VerifyError
            As `run`.
        """
        self._check_required(done)
        self._finish(done, graph_module)

    def fork(self) -> PassManager:
        """A copy of the manager, to run other passes from here."""
        return replace(self, names=[*self.names], history=dict(self.history))

    def _check_required(self, each: Pass | type[Pass]) -> None:
        if missing := each.requires - self.properties:
            raise VerifyError(
                f"the pass {each.name} requires a graph that is {', '.join(sorted(missing))}, got one that is "
                f"{', '.join(sorted(self.properties)) or 'nothing of these'}: run the passes that ensure it first"
            )

    def _finish(self, each: Pass | type[Pass], graph_module: fx.GraphModule) -> None:
        """Note, verify, keep and report the result of a pass."""
        self.names.append(each.name)
        self.properties = (self.properties - each.invalidates) | each.ensures
        if self.verifies:
            verify(graph_module, each.name)
            self.history[each.name] = graph_module
        if self.on_pass is not None:
            self.on_pass(each.name, graph_module)
