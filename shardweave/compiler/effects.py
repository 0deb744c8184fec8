"""Effects: what a forward does beside computing its results, and what it asks, recorded while Dynamo traces it.

These are writes to attributes, globals and containers, hooks, draws of Python's random numbers, and reads on which
Dynamo has no guards. `guards` refuses them, or follows them in later calls.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from shardweave.compiler.capture_errors import INSTALLED, capture_error
from shardweave.compiler.constants import storage_of
from shardweave.ir import attribute_of_input

_STATES = (
    "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled",
    "get_deterministic_debug_mode", "get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision",
    "is_autocast_cache_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "is_warn_always_enabled",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.math_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
)  # fmt: skip
"""Functions of torch that tell its state. What modes of a step hold already (`CallSignature`) is not among them."""


@dataclass(frozen=True)
class Write:
    """A write of a forward to an attribute, an item or a global, with the value if that is a constant."""

    source: str
    """The expression that is written, in the form of a guard."""
    read_as: tuple[str, ...]
    """Patterns of the expressions that read it."""
    is_constant: bool
    value: Any
    depends: bool
    """Whether the value depends on inputs of the graph."""
    owner: Any
    """Dynamo's source of the object that is written; None for the globals of the user's module."""
    key: Any
    """The name of the attribute, or the key of the item."""
    is_attribute: bool


@dataclass(frozen=True)
class Content:
    """What is in a container after a call: what is at a source now, a constant, or a tensor like an example."""

    source: Any = None
    value: Any = None
    example: Tensor | None = None


@dataclass(frozen=True)
class Effects:
    """The side effects of a forward."""

    written: list[Write] = field(default_factory=list)
    contents: list[tuple[Any, list[tuple[Any, Content | None]]]] = field(default_factory=list)
    """Dynamo's sources of containers that are changed in place, with the keys and values after a call."""
    advanced: list[str] = field(default_factory=list)
    """The expressions of iterators, such as of a counter, from which values are taken."""
    hooks: list[tuple[str, str]] = field(default_factory=list)
    """The expressions of parameters and inputs that hooks are registered on, with the methods that register them."""
    draws: list[fx.Node] = field(default_factory=list)
    """The nodes of the graph that use a number which Python's random numbers drew, and which would be a constant."""
    environment: set[str | None] = field(default_factory=set)
    """The names of environment variables that are read; None if the forward lists all of them."""
    storages: set[int] = field(default_factory=set)
    """The storages of parameters, buffers and inputs that are written in place."""
    grad_modes: set[bool] = field(default_factory=set)
    """What the forward finds where it asks whether gradients are recorded."""
    states: set[str] = field(default_factory=set)
    """The calls of functions of `_STATES`, as text."""
    looked: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Dynamo's sources of objects that the user's own code asks for an attribute, by the source's and its name."""
    asked: list[tuple[Any, str]] = field(default_factory=list)
    """The tensors that are asked for an attribute which is not torch's, with its name."""

    def asked_of(self, leaves: Sequence[Any]) -> tuple[tuple[int, str], ...]:
        """The attributes that tensors among the leaves of a call are asked for, each with the index of the leaf."""
        places = {id(leaf): index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        found = ((places[id(value)], name) for value, name in self.asked if id(value) in places)
        return (*dict.fromkeys(found),)


@contextlib.contextmanager
def attributes_refused(
    model: nn.Module, effects: Effects, names: Sequence[str], leaves: Sequence[Any], given: Sequence[Any]
) -> Iterator[None]:
    """Refuse a forward that asks for an attribute which the tensor that was `given` has; `leaves` have none.

    Raises
    ------
    CaptureError
        With the name of the attribute.
    """
    try:
        yield
    finally:  # also where the forward cannot go on without the attribute
        for index, attribute in effects.asked_of(leaves):
            if hasattr(given[index], attribute):
                reason, way_out = attribute_of_input(names[index], attribute)
                raise capture_error(model, f"its {reason}", way_out=way_out) from None


@contextlib.contextmanager
def recorded_effects() -> Iterator[Effects]:
    """While this runs, record what a forward that Dynamo traces does beside its results, and what it reads."""
    effects = Effects()
    with _changes_recorded(effects), _states_recorded(effects), _lookups_recorded(effects):
        yield effects


@contextlib.contextmanager
def _changes_recorded(effects: Effects) -> Iterator[None]:
    """Record the writes to attributes, containers and tensors, hooks, and draws."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.iter import IteratorVariable

    name = "cleanup"  # after a trace, while its side effects are still there
    inner = getattr(OutputGraph, name)

    @functools.wraps(inner)
    def noted(graph: Any, *args: Any, **kwargs: Any) -> Any:
        effects.written.clear()  # Dynamo may have restarted
        effects.contents.clear()
        effects.advanced.clear()
        hooks = graph.side_effects.tensor_hooks.values()
        effects.hooks[:] = [(tensor.source.name, method) for tensor, _, _, method in hooks]
        effects.draws[:] = [user for node in graph.placeholders if "drawn" in node.meta for user in node.users]
        given = [node for node in graph.placeholders if isinstance(node.meta.get("example_value"), Tensor)]
        written = [node.meta["grapharg"].example for node in given if node.meta["example_value"]._version]
        effects.storages.update(map(storage_of, written))
        for item, attributes in graph.side_effects.store_attr_mutations.items():
            if _is_from_outside(item):
                effects.written.extend(_attribute_write(item.source, name, each) for name, each in attributes.items())
        tensors = {each.source.name: each.fake for each in graph.tracked_fakes}
        for container in graph.side_effects._get_modified_vars():
            if _is_from_outside(container):
                if isinstance(container, IteratorVariable) and container.source is not None:
                    effects.advanced.append(container.source.name)
                _note_items(effects, container, tensors)
        return inner(graph, *args, **kwargs)

    with mock.patch.object(OutputGraph, name, noted):
        yield


@contextlib.contextmanager
def _states_recorded(effects: Effects) -> Iterator[None]:
    """Record reads of environment variables, of the grad mode, and of torch's other states.

    A forward reads the mode by `torch.is_grad_enabled`, or by ``requires_grad`` of what it computes. Torch's own code
    reads it too, but computes the same in both modes.
    """
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator
    from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable, VariableTracker

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    is_enabled, of_tensor = handlers[torch.is_grad_enabled], TensorVariable.method_attr_requires_grad
    translator: Any = InliningInstructionTranslator
    inlined = translator.build_inline_tracer

    def build_inline_tracer(parent: Any, function: Any, args: Any, *others: Any, **kwargs: Any) -> Any:
        code = function.get_code()
        if code is os._Environ.__getitem__.__code__:
            effects.environment.add(args[1].as_python_constant())
        elif code in (os._Environ.__iter__.__code__, os._Environ.__len__.__code__):
            effects.environment.add(None)
        return inlined(parent, function, args, *others, **kwargs)

    def note_grad_mode(tx: Any) -> None:
        if str(tx.f_globals.get("__name__", "")).split(".")[0] != "torch":
            effects.grad_modes.add(torch.is_grad_enabled())

    def is_grad_enabled(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        note_grad_mode(tx)
        return is_enabled(self, tx, *args, **kwargs)

    def requires_grad(self: Any, tx: Any) -> Any:
        if self.source is None:
            note_grad_mode(tx)
        return of_tensor(self, tx)

    def state_of(state: str, function: Any) -> Any:
        known = handlers.get(function)

        def told(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = [each.as_python_constant() for each in args]
            named = {key: each.as_python_constant() for key, each in kwargs.items()}
            texts = *map(repr, given), *(f"{key}={value!r}" for key, value in named.items())
            effects.states.add(f"{state}({', '.join(texts)})")
            return known(self, tx, *args) if known else VariableTracker.build(tx, function(*given, **named))

        return told

    functions: dict[str, Any] = {}
    for state in _STATES:
        with contextlib.suppress(AttributeError):  # of another version of torch
            functions[state] = operator.attrgetter(state)(torch)
    states = {function: state_of(state, function) for state, function in functions.items()}
    folding: Any = torch._dynamo.variables.torch
    folded = {key: value for key, value in folding.constant_fold_functions.items() if key not in states}
    with (
        mock.patch.object(translator, "build_inline_tracer", staticmethod(build_inline_tracer)),
        mock.patch.object(folding, "constant_fold_functions", folded),  # before it asks for handlers
        mock.patch.dict(handlers, {**states, torch.is_grad_enabled: is_grad_enabled}),
        mock.patch.object(TensorVariable, "method_attr_requires_grad", requires_grad),
    ):
        yield


@contextlib.contextmanager
def _lookups_recorded(effects: Effects) -> Iterator[None]:
    """Record what the user's own code asks objects and tensors for, where Dynamo has no guards.

    Attributes and keys that are missing, as in a ``try``, get guards, which Dynamo leaves out.
    """
    from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstDictVariable, TensorVariable

    of_real = TensorVariable.dynamic_getattr
    # Before torch 2.13 Dynamo has no such kinds, and its own guards are all that is known of attributes.
    builtin: Any = torch._dynamo.variables.builtin
    getting, testing = (getattr(builtin, f"{kind}BuiltinVariable", None) for kind in ("GetAttr", "HasAttr"))
    got: Any = getattr(getting, "_call_getattr", None)
    has_attribute: Any = getattr(testing, "call_function", None)
    of_table = ConstDictVariable.getitem_const_raise_exception_if_absent

    def dynamic_getattr(self: Any, tx: Any, name: str) -> Any:
        if self.source is not None and not hasattr(nn.Parameter, name):
            with contextlib.suppress(Exception):  # as Dynamo does, of a source that it cannot look up
                scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
                effects.asked.append((eval(self.source.name, scope), name))
        return of_real(self, tx, name)

    def note_look(tx: Any, value: Any, name: Any) -> None:
        is_of_library = tx.f_code.co_filename.startswith((*INSTALLED, "<frozen "))  # as that of os
        if value.source is not None and name.is_python_constant() and not is_of_library:
            effects.looked.setdefault((value.source.name, name.as_python_constant()), value.source)

    def call_hasattr(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 2:
            note_look(tx, args[0], args[1])
        return has_attribute(self, tx, args, kwargs)

    def call_getattr(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        note_look(tx, args[0], args[1])
        try:
            return got(self, tx, args, kwargs)
        except ObservedAttributeError:
            if args[0].source is not None:
                has = functools.partial(GuardBuilder.HASATTR, attr=args[1].as_python_constant())
                install_guard(args[0].source.make_guard(has))
            raise

    def getitem(self: Any, tx: Any, key: Any) -> Any:
        try:
            return of_table(self, tx, key)
        except ObservedKeyError:
            self.install_dict_contains_guard(tx, [key])
            raise

    with (
        mock.patch.object(TensorVariable, "dynamic_getattr", dynamic_getattr),
        mock.patch.object(ConstDictVariable, "getitem_const_raise_exception_if_absent", getitem),
        contextlib.ExitStack() as stack,
    ):
        if got and has_attribute:
            stack.enter_context(mock.patch.object(getting, "_call_getattr", call_getattr))
            stack.enter_context(mock.patch.object(testing, "call_function", call_hasattr))
        yield


def _is_from_outside(variable: Any) -> bool:
    """Whether a variable of Dynamo is an object that existed before the forward."""
    if variable.source is None:
        return False
    return type(list(chain_of(variable.source))[-1]).__name__ in ("LocalSource", "GlobalSource")


def _attribute_write(owner: Any, name: str, value: Any) -> Write:
    source = owner.name
    if source == f"G[{name!r}]":  # a global
        return _write_of(source, (re.escape(source),), value, None, name, False)
    own, item = re.escape(source), re.escape(f"[{name!r}]")
    reads = rf"{own}\.{name}", rf"{own}\.__dict__{item}", rf"dict\(type\({own}\)(\.__mro__\[\d+\])?\.__dict__\){item}"
    return _write_of(f"{source}.{name}", reads, value, owner, name, True)


def _note_items(effects: Effects, container: Any, tensors: Mapping[str, Any]) -> None:
    """Record the items of a container that is changed in place; `tensors` are the graph's inputs by source."""
    items, source = getattr(getattr(container, "_base_vt", None) or container, "items", None), container.source.name
    if isinstance(items, dict):
        named: list[tuple[Any, Any]] = [(getattr(key, "vt", key), value) for key, value in items.items()]
        pairs = [(key.as_python_constant(), value) for key, value in named if key.is_python_constant()]
    elif isinstance(items, list | tuple):
        pairs = list(enumerate(items))
    else:
        return
    effects.contents.append((container.source, [(key, _content_of(value)) for key, value in pairs]))
    for key, value in pairs:
        place = f"{source}[{key!r}]"
        if not _is_unchanged(value, place, tensors):
            effects.written.append(_write_of(place, (re.escape(place),), value, container.source, key, False))


def _content_of(value: Any) -> Content | None:
    """What a variable of Dynamo has; None for others, such as a table that is computed once."""
    if getattr(value, "source", None) is not None:
        return Content(source=value.source)
    if value.is_python_constant():
        return Content(value=value.as_python_constant())
    node = getattr(getattr(value, "proxy", None), "node", None)
    if node is None or not _depends(node):
        return None
    example = node.meta.get("example_value")
    return Content(example=example) if isinstance(example, Tensor) else None


def _is_unchanged(value: Any, place: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a variable of Dynamo is the object that was at `place` before, possibly a tensor written in place."""
    if getattr(getattr(value, "source", None), "name", None) == place:
        return True
    if getattr(value, "proxy", None) is None or place not in tensors:
        return False
    return value.proxy.node.meta.get("example_value") is tensors[place]


def _write_of(
    source: str, read_as: tuple[str, ...], value: Any, owner: Any, key: Any, is_attribute: bool
) -> Write:
    if value.is_python_constant():
        return Write(source, read_as, True, value.as_python_constant(), False, owner, key, is_attribute)
    proxy = getattr(value, "proxy", None)
    depends = proxy is None or _depends(proxy.node)
    return Write(source, read_as, False, None, depends, owner, key, is_attribute)


def _depends(node: fx.Node) -> bool:
    """Whether a value depends on an input, a parameter or a buffer."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return True
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def chain_of(source: Any) -> Iterator[Any]:
    """A source and its bases, the innermost first."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)
