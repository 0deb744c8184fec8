"""Guards: the Python values that a capture has read of a model, what follows from its `effects`, checks of indices.

This is the only module that reads Dynamo's guards.

An index that is computed from integer inputs only is checked on each rank before the step, and all ranks raise the
error. Otherwise a rank that computes other rows would not see an index that is out of range, and would wait for others.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import types
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardweave.compiler.capture_errors import BUFFER_WAY_OUT, INSTALLED, NO_BUFFER, capture_error, module_and_line
from shardweave.compiler.constants import DRAWN, storage_of
from shardweave.compiler.dynamo_workarounds import DRAW_WAY_OUT, HINTS
from shardweave.compiler.effects import Content, Effects, Write, chain_of
from shardweave.ir import PLAIN_TYPES, Captured, CaptureError, Read, Reads
from shardweave.ops import IndexChecks, IndexRange
from shardweave.sharding import argument, describe, info, shape

_TORCH_ATTRIBUTES = re.compile(
    r"(?:_parameters|_buffers|_modules|__dict__)(?:'\])?$|_(?:parameters|buffers)(?:'\])?\[|_hooks|__mro__"
)
"""Guards on torch's own attributes, which are no constants of a step."""
_TENSORS = re.compile(r"\._(?:parameters|buffers)\['\w+'\]$")
"""A parameter or buffer of a module. If it is None, that is a constant of a step."""
_ATTRIBUTE_OF_TENSOR = re.compile(r"\._(?:parameters|buffers)\['\w+'\]\.(\w+)")
"""An attribute of a parameter or buffer."""
_KEY_GUARDS = {"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"}
_LENGTH_GUARDS = {"SEQUENCE_LENGTH", "LIST_LENGTH", "TUPLE_LENGTH", "DICT_LENGTH"}
_MAX_NUMBERS = 64
"""Of a buffer of more elements each call compares a hash, taken where torch counts a new version, not all of them."""


@dataclass(frozen=True)
class Change:
    """A constant that a forward reads and writes, its value after a call, and the error to raise for it."""

    owner: Any
    key: Any
    is_attribute: bool
    value: Any
    shown: str
    error: CaptureError


@dataclass(frozen=True)
class ContainerChange:
    """A container that a forward changes in place, its contents after a call, and the error if the forward reads it.

    Dynamo guards the length of each container that is changed, so that guards do not tell whether it is read.
    """

    container: Any
    contents: Any
    error: CaptureError

    def put(self, calls: int) -> None:
        """Fill the container as after so many calls. Those after the first append what the first one did."""
        found = self.contents
        if not isinstance(found, dict | set):
            found = [*found, *found[len(self.container) :] * (calls - 1)]
        _refill(self.container, found)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    container.extend(contents) if hasattr(container, "extend") else container.update(contents)


@contextlib.contextmanager
def after_a_call(changes: Sequence[Change | ContainerChange], calls: int = 1) -> Iterator[None]:
    """While this runs, what a forward changes is as after a call; containers are as after so many `calls`."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            if isinstance(change, ContainerChange):
                stack.callback(_refill, change.container, copy.copy(change.container))
                change.put(calls)
            elif change.is_attribute:
                is_new = not hasattr(change.owner, change.key)
                stack.enter_context(mock.patch.object(change.owner, change.key, change.value, create=is_new))
            else:
                stack.callback(change.owner.__setitem__, change.key, change.owner[change.key])
                change.owner[change.key] = change.value
        yield


def _example(node: fx.Node) -> Any:
    """The tensor that Dynamo has traced as an input of the graph; None for others."""
    given = node.meta.get("grapharg")
    return None if given is None else given.example


@contextlib.contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[None]:
    """While this runs, Dynamo traces ``self.mean = value``, where the mean is a buffer, as a write into it at the end.

    The value has the shape and dtype of the buffer, needs no gradient, and gets no other name. What read the buffer
    before has the old values.

    Raises
    ------
    CaptureError
        The forward returns the old values.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import ConstDictVariable, TensorVariable, VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy

    inner = OutputGraph.compile_subgraph
    buffers = [*model.named_buffers(remove_duplicate=False)]
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def compiled(graph: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        # 1. What is assigned
        found: list[tuple[Any, Any]] = []
        places: list[tuple[dict[Any, Any], Any]] = []
        copies: dict[fx.Node, fx.Node] = {}
        for container in graph.side_effects._get_modified_vars():
            names = [getattr(container.source, each, "") for each in ("member", "index")]
            is_kept = isinstance(container, ConstDictVariable) and "_buffers" in names
            items = container.items if is_kept else {}
            for key, value in items.items():
                before = container.original_items.get(key.vt)
                before = before and before.realize()
                if not (isinstance(before, TensorVariable) and isinstance(value, TensorVariable)) or before is value:
                    continue
                nodes = before.as_proxy().node, value.as_proxy().node
                old, new = (node.meta["example_value"] for node in nodes)
                is_like = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
                times = sum(_example(nodes[0]) is each for _, each in buffers)
                is_new = new is not old and nodes[1] in {*graph.graph.nodes}
                if is_like and is_new and not new.requires_grad and times == 1:
                    found.append((before, value))
                    places.append((items, key))
        olds, values = ({pair[index].as_proxy().node: None for pair in found} for index in (0, 1))
        others = [node for node in graph.placeholders if node not in olds and id(_example(node)) in state]
        storages = [storage_of(node.meta["example_value"]) for node in (*values, *others)]
        times_used = Counter(storages)
        if len(values) < len(found) or any(times_used[each] > 1 for each in storages[: len(values)]):
            found.clear()  # it would be one tensor of two names
        for (items, key), (before, _) in zip(places, found):
            items[key] = before

        # 2. Write it at the end. What was read before is a copy of the old values.
        def call(name: str, *arguments: Any) -> fx.Node:
            node: fx.Node = wrap_fx_proxy(tx, graph.create_proxy("call_method", name, arguments, {})).as_proxy().node
            return node

        for before, _ in found:
            node = before.as_proxy().node
            readers = [each for each in graph.graph.nodes if each in node.users]
            copied = call("clone", before.as_proxy())
            for reader in readers:
                reader.replace_input_with(node, copied)
            for reader in readers[:1]:
                reader.prepend(copied)
            copies[node] = copied
        for before, value in found:
            source = value.as_proxy()
            call("copy_", before.as_proxy(), fx.Proxy(copies.get(source.node, source.node), source.tracer))
        # 3. Refuse a buffer itself among the results.
        returned: list[Any] = []
        VariableTracker.visit(lambda value: returned.append(getattr(value, "proxy", None)), tx.stack)
        if any(proxy is not None and proxy.node in copies for proxy in returned):
            reason, way_out = "it returns a buffer in whose place it puts another", "Return a copy of it (.clone())."
            raise capture_error(model, reason, way_out=way_out)
        return inner(graph, tx, *args, **kwargs)

    with mock.patch.object(OutputGraph, "compile_subgraph", compiled):
        yield


class _Numbers:
    """The numbers in a tensor, or a `digest` of them.

    On devices, and for a digest, they are read again only when torch counts a new version of the tensor.
    """

    def __init__(self, digest: bool = False) -> None:
        self._digest = digest
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):  # an array or a number of numpy
            return _digest(torch.as_tensor(tensor))
        version, numbers = self._known.get(tensor, (None, ()))
        if version != tensor._version or (tensor.device.type == "cpu" and not self._digest):
            numbers = _digest(tensor) if self._digest else tuple(tensor.detach().flatten().tolist())
            self._known[tensor] = tensor._version, numbers
        return numbers


def _digest(tensor: Tensor) -> str:
    """A tensor in a few words: its dtype, its shape and a hash of its values, which a meta tensor has not."""
    told = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return told
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{told} {blake2b(data.numpy().data, digest_size=6).hexdigest()}"


def reads_of(
    module: Any, model: nn.Module, effects: Effects, buffers: Mapping[Any, Tensor]
) -> tuple[Reads, list[Change], list[ContainerChange]]:
    """The Python values that the capture of `module` read of `model` and its globals, and those that a call changes.

    A forward that changes a value which it reads, such as a default that its first call sets, may do the same in all
    later calls. A capture `after_a_call` shows whether it does. `buffers` are those whose values became constants.

    Raises
    ------
    CaptureError
        The model's forward reads a value that it computes from tensors, such as a state; or it registers hooks on
        parameters or inputs.
    """
    # 1. Turn Dynamo's guards into expressions.
    from torch._dynamo.convert_frame import get_traced_fn
    from torch._dynamo.source import AttrSource

    graph = module._dynamo_bytecode_flatten.out.graph_capture_output.output_graph
    function, _ = get_traced_fn(model)
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    of_model = {*map(storage_of, (*model.parameters(), *model.buffers()))}
    registered = effects.storages | of_model
    self_name, imports = function.__code__.co_varnames[0], graph.import_sources
    expressions = _SourceExpressions(self_name, function.__globals__, imports, free, registered)
    for (_, attribute), source in effects.looked.items():
        expressions.add_of_library(AttrSource(source, attribute))
    touched: dict[str, Any] = {}
    for guard in graph.guards:
        source = guard.originating_source
        if guard.create_fn_name() == "HASATTR":
            given = getattr(guard.create_fn, "keywords", {}).get("attr") or getattr(guard.create_fn, "args", ("",))[0]
            touched.setdefault(f"{source.name}.{given}", AttrSource(source, given))
        expressions.add(source, guard)
        if guard.create_fn_name() == "TENSOR_MATCH" and expressions.is_of_user(list(chain_of(source))):
            is_array = type(source).__name__ == "NumpyTensorSource"
            value = expressions.value_of(source, model)
            _refuse_written_constant(model, value, expressions.shown(source.name), effects.storages - of_model)
            _refuse_gradient_of_constant(model, value, expressions.shown(source.name), registered)
            if is_array or _is_free(value, registered):
                expressions.add_numbers(source.base if is_array else source, digest=True)
        touched.setdefault(source.name, source)
    for source, value in buffers.items():
        expressions.add_numbers(source, digest=value.numel() > _MAX_NUMBERS)
    for variable in effects.environment:
        expressions.add_environment(variable)
    for call in sorted(effects.states):
        expressions.add_state(call)
    if effects.grad_modes:
        expressions.add_state("is_grad_enabled()")
    reads = Reads(list(expressions.reads.values()), expressions.names)
    for name, method in effects.hooks:
        raise capture_error(
            model,
            f"its forward calls {method} of {expressions.shown(name)}, and hooks on parameters and inputs are no part "
            "of a captured step",
            way_out="Register the hook once, outside of the forward. Hooks on what the forward computes are captured.",
        )
    for node in effects.draws:
        drawn = next(each.meta["drawn"] for each in node.all_input_nodes if "drawn" in each.meta)
        raise capture_error(model, f"{drawn} {DRAWN}", *module_and_line(model, node), DRAW_WAY_OUT)
    for name in effects.advanced:
        raise capture_error(
            model,
            f"its forward takes a value of {expressions.shown(name)}, an iterator, which a captured step does not do "
            "again",
            way_out="Count in a buffer (register_buffer with a tensor, written in place), or pass the value to the "
            "call.",
        )
    # 2. Compare the writes with them. A write that nothing reads is lost, with a warning.
    lost, containers = [], list[ContainerChange]()
    for source, pairs in effects.contents:
        container = expressions.value_of(source, model)
        if not isinstance(container, Sized) or len(container) != len(pairs):
            lost.append(source.name)
        containers += _changed_container(model, expressions, source, container, pairs)
    changes: list[Change] = []
    for written in effects.written:
        read = [name for name in touched if any(re.fullmatch(pattern, name) for pattern in written.read_as)]
        for name in read:
            changes += _changed(model, expressions, written, touched[name])
        if not read and written.depends:
            lost.append(written.source)
    if lost:
        names = ", ".join(sorted({expressions.shown(source) for source in lost}))
        warnings.warn(
            f"the forward of {type(model).__name__} writes {names}, which a captured step does not do: return what you "
            "need of it as an output. Where the forward's result depends on what earlier calls wrote there, keep that "
            "in a buffer",
            stacklevel=2,
        )
    return reads, changes, containers


def _changed_container(
    model: nn.Module,
    expressions: _SourceExpressions,
    source: Any,
    container: Any,
    pairs: Sequence[tuple[Any, Content | None]],
) -> list[ContainerChange]:
    """The change of a container; empty if its contents after a call are not known.

    Buffers that a forward assigns are inputs and outputs of the step, not values that it reads from a module's tables.
    """
    if not isinstance(container, list | deque | dict | set):
        return []
    tables = (table for part in model.modules() for table in (part._buffers, part._parameters, part._modules))
    if any(container is table for table in tables):
        return []
    if not isinstance(container, set) and any(content is None for _, content in pairs):
        return []
    values = [key if content is None else _after_a_call(content, expressions, model) for key, content in pairs]
    contents: Any = dict(zip((key for key, _ in pairs), values)) if isinstance(container, dict) else values
    shown = expressions.shown(source.name)
    error = capture_error(
        model,
        f"its forward changes {shown}, and what it computes depends on {shown}: a captured step does not change it",
        way_out=f"Keep what is needed of {shown} in a buffer (register_buffer with a tensor, written in place), or "
        "pass it to the call as a tensor.",
    )
    return [ContainerChange(container, set(contents) if isinstance(container, set) else contents, error)]


def _after_a_call(content: Content, expressions: _SourceExpressions, model: nn.Module) -> Any:
    """A value that stands for what is in a container after a call; the numbers of a tensor are zeros."""
    if content.source is not None:
        return expressions.value_of(content.source, model)
    if content.example is not None:
        return torch.zeros([int(size) for size in content.example.shape], dtype=content.example.dtype)
    return content.value


def _changed(model: nn.Module, expressions: _SourceExpressions, written: Write, source: Any) -> list[Change]:
    """The change of the value at `source`; empty if a call does not change it."""
    read = expressions.value_of(source, model)
    if (written.is_constant and _same(read, written.value)) or not (written.is_constant or written.depends):
        return []  # unchanged, or a constant that is computed once
    shown = expressions.shown(source.name)
    comparable = written.is_constant and isinstance(read, PLAIN_TYPES)
    if written.is_attribute and written.key == "grad":
        raise capture_error(model, f"its forward changes {shown}", way_out=HINTS[".backward("])
    was = f" ({read!r} now, {written.value!r} after a call)" if comparable else ""
    is_buffer = any(read is buffer for buffer in model.buffers())
    error = capture_error(
        model,
        f"its forward reads {shown} and changes it{was}, which a captured step does not do again",
        way_out=f"Write {shown} in place, as {shown}.copy_(...)."
        if is_buffer
        else f"Make {shown} a buffer (register_buffer with a tensor, written in place), and what depends on it "
        "tensor operations such as torch.where; or pass it to the call as a tensor.",
    )
    owner = expressions.globals if written.owner is None else expressions.value_of(written.owner, model)
    if not written.is_constant or owner is None:
        raise error
    return [Change(owner, written.key, written.is_attribute, written.value, shown, error)]


def _refuse_written_constant(model: nn.Module, value: Any, shown: str, written: set[int]) -> None:
    """Raise `CaptureError` for a tensor of the user's that the forward writes in place and that is no buffer."""
    if isinstance(value, Tensor) and storage_of(value) in written:
        raise capture_error(model, f"its forward writes into {shown}, {NO_BUFFER}", way_out=BUFFER_WAY_OUT)


def _refuse_gradient_of_constant(model: nn.Module, value: Any, shown: str, registered: set[int]) -> None:
    """Raise `CaptureError` for a tensor that needs a gradient and is no parameter or buffer: it would get none."""
    if type(value) is not Tensor or not value.requires_grad or not torch.is_grad_enabled():
        return
    if storage_of(value) not in registered:
        raise capture_error(
            model,
            f"its forward uses {shown}, a tensor that needs a gradient and is no parameter: it would get none",
            way_out="Make it a parameter (nn.Parameter) of the module, or pass it to the call; or detach() it, if it "
            "is not trained.",
        )


def _is_free(value: Any, registered: set[int]) -> bool:
    """Whether a value is a tensor that is neither a parameter nor a buffer: a constant of the step."""
    return type(value) is Tensor and not value.requires_grad and storage_of(value) not in registered


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, PLAIN_TYPES) and bool(one == other)


class _SourceExpressions:
    """Turns Dynamo's sources into expressions for `Reads`."""

    def __init__(
        self,
        self_name: str,
        names: dict[str, Any],
        imports: dict[str, str],
        free: dict[str, types.CellType],
        registered: set[int],
    ) -> None:
        self.registered = registered
        self.self_name, self.globals, self.imports, self.free = self_name, names, imports, free
        self.names: dict[str, object] = {"G": names}
        self.reads: dict[str, Read] = {}
        self._variables: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._short: dict[str, str] = {}
        self._followed: set[str] = set()
        """The sources of containers of libraries that the user's own code reads."""

    def add(self, source: Any, guard: Any) -> None:
        """Record the read that a guard stands for, if it is of a user's object."""
        kind, name = guard.create_fn_name(), source.name
        chain = list(chain_of(source))
        is_none = kind == "CONSTANT_MATCH" and _TENSORS.search(name)
        if not name or kind == "TENSOR_MATCH" or not self.is_of_user(chain):
            return
        given = getattr(guard.create_fn, "keywords", {})
        positional = getattr(guard.create_fn, "args", ())
        if _TORCH_ATTRIBUTES.search(name) and not is_none and not self._is_on_tensor(name, kind, given, positional):
            return
        expression, before = self._expression(source)
        shown = self.shown(name)
        if kind in _LENGTH_GUARDS:
            self._note(f"len({expression})", before, f"len({shown})")
        elif kind == "DICT_KEYS_MATCH":
            self._note(f"tuple({expression})", before, f"the keys of {shown}")
        elif kind in _KEY_GUARDS:
            key = given.get("key", positional[0] if positional else None)
            if isinstance(key, PLAIN_TYPES):
                self._note(f"({key!r} in {expression})", before, f"{key!r} in {shown}")
        elif kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"):
            attribute = given.get("attr", positional[0] if positional else None)
            if isinstance(attribute, str) and not attribute.startswith("__"):
                test = f"hasattr({expression}, {attribute!r})" if kind == "HASATTR" else None
                self._note(test or f"({attribute!r} in vars({expression}))", before, f"{shown}.{attribute} being set")
        elif len(chain) > 1 or kind != "TYPE_MATCH":
            self._note(expression, before, shown)

    @staticmethod
    def _is_on_tensor(name: str, kind: str, given: Mapping[str, Any], positional: Sequence[Any]) -> bool:
        """Whether a guard is on an attribute that a user gave a parameter or buffer, or may give it."""
        attribute: Any = None
        if (found := _ATTRIBUTE_OF_TENSOR.search(name)) is not None:
            attribute = found[1]
        elif kind == "HASATTR" and _TENSORS.search(name):
            attribute = given.get("attr", positional[0] if positional else None)
        return isinstance(attribute, str) and not hasattr(nn.Parameter, attribute)

    def add_numbers(self, source: Any, digest: bool = False) -> None:
        """Record that the values of a tensor became constants, as numbers in Python or (`digest`) as a tensor."""
        expression, before = self._expression(source)
        look = "digest" if digest else "numbers"
        self.names.setdefault(look, _Numbers(digest))
        self._note(f"{look}({expression})", before, self.shown(source.name))

    def add_of_library(self, source: Any) -> None:
        """Record that the user's own code reads an attribute of a library, if that is a plain value.

        Guards on libraries are left out otherwise, as most are of the libraries' own reads. An attribute that a Python
        module does not have, of a library or of the user's own, has no guard.
        """
        chain = [*chain_of(source)]
        if type(chain[-1]).__name__ != "GlobalSource":
            return
        owner, attribute = self.value_of(source.base, None), source.member
        if isinstance(owner, types.ModuleType) and not hasattr(owner, attribute):
            expression, before = self._expression(source.base)
            shown = f"{self.shown(source.base.name)}.{attribute} being set"
            self._note(f"hasattr({expression}, {attribute!r})", before, shown)
        if self.is_of_user(chain) or not hasattr(owner, attribute):
            return
        value = getattr(owner, attribute)
        if isinstance(value, (list, dict, set, deque)):
            self._followed.add(source.name)  # so are guards on what is in it
        elif isinstance(value, PLAIN_TYPES) and not isinstance(value, torch.dtype):
            expression, before = self._expression(source)
            self._note(expression, before, self.shown(source.name))

    def add_state(self, call: str) -> None:
        """Record that the step depends on what a call of a function of torch tells."""
        self.names["module_torch"] = torch
        self._note(f"module_torch.{call}", (), f"torch.{call}")

    def add_environment(self, variable: str | None) -> None:
        """Record that the step depends on an environment variable, or on all of them."""
        self.names["module_os"] = os
        if variable is None:
            self._note("tuple(module_os.environ.items())", (), "os.environ")
        else:
            self._note(f"module_os.environ.get({variable!r})", (), f"os.environ[{variable!r}]")

    def _note(self, expression: str, before: tuple[str, ...], shown: str) -> None:
        self.reads.setdefault(expression, Read((*before, expression), shown))

    def is_of_user(self, chain: list[Any]) -> bool:
        """Whether the root of a source is the model, or a global of the user's module that is not of a library."""
        root = chain[-1]
        kind = type(root).__name__
        if any(link.name in self._followed for link in chain):
            return True
        if kind == "LocalSource":
            return root.local_name == self.self_name or root.local_name in self.free
        if kind != "GlobalSource":
            return False
        name = root.global_name
        if name in self.imports:
            return not _is_library(sys.modules[self.imports[name]])
        if name.startswith("__") or _is_library(sys.modules.get(self.globals.get("__name__", ""))):
            return False
        values = [self.value_of(link, None) for link in chain]
        return not any(value is os.environ or _is_library(value) for value in values)  # see `add_environment`

    def _expression(self, source: Any) -> tuple[str, tuple[str, ...]]:
        """A source as an expression, with the statements before it that compute common subexpressions."""
        name = source.name
        base = getattr(source, "base", None)
        if base is None:
            return self._root(source), ()
        if name in self._variables:
            return self._variables[name]
        inner, before = self._expression(base)
        if not name.startswith(base.name):
            found = name.replace(base.name, inner), before
        elif name == base.name or inner.isidentifier():
            found = inner + name[len(base.name) :], before
        else:
            variable = self._short.setdefault(inner, f"v{len(self._short)}")
            found = variable + name[len(base.name) :], (*before, f"{variable} = {inner}")
        self._variables[name] = found
        return found

    def _root(self, source: Any) -> str:
        if type(source).__name__ == "LocalSource":
            if source.local_name == self.self_name:
                return "model"
            cell = self.free[source.local_name]
            value = cell.cell_contents
            of_model = isinstance(value, (nn.Module, Tensor)) and not _is_free(value, self.registered)
            if of_model:  # a step must not keep the model alive
                return f"closed_over_{source.local_name}"
            self.names[f"cell_{source.local_name}"] = cell
            return f"cell_{source.local_name}.cell_contents"
        if source.global_name in self.imports:
            name = self.imports[source.global_name].replace(".", "_dot_")
            self.names[f"module_{name}"] = sys.modules[self.imports[source.global_name]]
            return f"module_{name}"
        return f"G[{source.global_name!r}]"

    def value_of(self, source: Any, model: nn.Module | None) -> Any:
        """The current value of a source; None if it cannot be looked up."""
        expression, before = self._expression(source)
        space: dict[str, Any] = {**self.names, "model": model}
        try:
            for line in before:
                exec(line, space)  # an expression of Dynamo's own
            return eval(expression, space)
        except Exception:  # a property of a user that raises an error is no constant
            return None

    def shown(self, name: str) -> str:
        """A source's name in the user's terms."""
        text = name.replace(f"L['{self.self_name}']", "model")
        for alias, module in self.imports.items():
            text = text.replace(f"G['{alias}']", module)
        text = re.sub(r"[GL]\['(\w+)'\]", r"\1", text)
        found = 1
        while found:  # these are nested for attributes of a class's attribute
            text, found = re.subn(r"dict\(type\(([^()]*)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"\1.\2", text)
        kinds = "_(?:modules|buffers|parameters)"
        text = re.sub(rf"(?:\.__dict__\['{kinds}'\]|\.{kinds})\['(\w+)'\]", r".\1", text)
        return re.sub(r"\.__dict__\['(\w+)'\]", r".\1", text)


def _is_library(module: object) -> bool:
    """Whether a module is installed or Python's own. The state of libraries may change at any time."""
    if not isinstance(module, types.ModuleType):
        return False
    file = getattr(module, "__file__", None)
    return file is None and module.__name__ != "__main__" or str(file).startswith(INSTALLED)


aten = torch.ops.aten
ALONG_DIM = {
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce,
    aten.scatter_add.default, aten.scatter_reduce.two,
}  # fmt: skip


def index_checks(captured: Captured) -> IndexChecks | None:
    """The checks of an annotated step; None without any."""
    # 1. Find the lookups of the forward whose index depends on integer inputs only.
    given = _integers_of_inputs(captured)
    found: dict[tuple[fx.Node, int, int], str] = {}
    for node in captured.graph.graph.nodes:
        if node.op != "call_function" or info(node).backward:
            continue
        for index, low, high in _lookups(node):
            if index in given:
                found.setdefault((index, low, high), describe(node))
    if not found:
        return None
    # 2. Copy the part of the graph that computes these indices.
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = {index for index, _, _ in found}
    for node in reversed(list(captured.graph.graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in captured.graph.graph.nodes:
        if node.name in captured.inputs:
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            copies[node] = graph.node_copy(node, lambda leaf: copies[leaf])
    graph.output(tuple(copies[index] for index, _, _ in found))
    held = nn.Module()
    for node in graph.nodes:
        if node.op == "get_attr":
            setattr(held, str(node.target), getattr(captured.graph, str(node.target)))
    checks = tuple(IndexRange(what, low, high) for (_, low, high), what in found.items())
    return IndexChecks(fx.GraphModule(held, graph, "Indices"), checks)


def _integers_of_inputs(captured: Captured) -> set[fx.Node]:
    """The integer nodes that depend on integer inputs, and otherwise on constants only."""
    known: set[fx.Node] = set()
    of_inputs: set[fx.Node] = set()
    for node in captured.graph.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            continue
        if node.op == "placeholder":
            if node.name in captured.inputs:
                known.add(node)
                of_inputs.add(node)
        elif (node.op == "get_attr" or _is_deterministic(node)) and known.issuperset(node.all_input_nodes):
            known.add(node)
            if not of_inputs.isdisjoint(node.all_input_nodes):
                of_inputs.add(node)
    return of_inputs


def _is_deterministic(node: fx.Node) -> bool:
    """Whether an op gives equal results for equal inputs."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags


def _lookups(node: fx.Node) -> list[tuple[fx.Node, int, int]]:
    """The indices of a lookup, each with its lowest allowed value and its exclusive upper bound."""
    if node.target is aten.embedding.default:
        return [(argument(node, "indices"), 0, shape(argument(node, "weight"))[0])]
    if node.target in ALONG_DIM:
        size = shape(argument(node, "self"))
        return [(argument(node, "index"), 0, size[argument(node, "dim")])] if size else []
    if node.target in (aten.index.Tensor, aten.index_put.default):
        size, given = shape(argument(node, "self")), argument(node, "indices")
        flags = torch.bool, torch.uint8
        return [
            (index, -length, length)
            for index, length in zip(given, size)
            if index is not None and index.meta["val"].dtype not in flags
        ]
    return []
