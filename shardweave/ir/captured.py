"""The captured training step: its graph, the structure of a call, and the Python values that became constants.

`Captured` is one graph of forward and backward, with the names of its inputs and outputs. `CallTree` maps the arguments
of a call to inputs of the graph, and outputs of the graph to the return value. `Reads` are the numbers in attributes,
configs and globals that capture turned into constants: the step does not follow a later change of them, so
`ConstantsCheck` raises an error in this case.
"""

from __future__ import annotations

import copy
import copyreg
import enum
import inspect
import re
import types
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.ir.errors import InputError, ParallelError
from shardweave.ir.layout import Layout
from shardweave.ir.precision import Dtypes

TENSOR_OUTPUT = "<a tensor output>"
"""Stands for a tensor among the constants of a return value."""
MISSING = "<missing>"
"""The value of a read that cannot be read any more."""
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, types.EllipsisType)
"""The types of values that are compared by value."""


@dataclass(frozen=True)
class Captured:
    """A training step as one aten graph, with the names of its inputs and outputs.

    Parameters
    ----------
    graph : GraphModule
        Placeholders: parameters, buffers, inputs, tangents. Outputs: new values of `mutated`, then `outputs`, then the
        gradients of `input_gradients`, then those of `gradients`.
    parameters, buffers, inputs : dict from placeholder name to the model's name
    tangents : dict from placeholder name to the index of its output
    outputs : tuple of str
        Names of the model's tensor outputs.
    gradients : tuple of str
        Names of the trainable parameters, in the order of `parameters`.
    mutated : tuple of str
        Names of the buffers, and of the parameters, whose new values the forward returns.
    aliases : dict from a parameter's name to its other names
        Tied parameters are one placeholder.
    call : CallTree, optional
        The structure of a call. None if the caller flattens its arguments itself.
    training : bool
        The mode of the model at capture.
    whole : bool
        Parameters, their gradients and the outputs are whole on every rank, as under torch.compile.
    dtypes : mapping of str to Dtypes
        The dtypes of the master weight and of the gradient reduction, for each parameter in mixed precision.
    at_rest : mapping of str to Layout
        The layouts of parameters between steps, where the first step of the model has chosen them.
    reads : Reads, optional
        The Python values that became constants of the graph.
    input_gradients : tuple of str
        Names of the inputs that require a gradient, in the order of `inputs`.
    changes : mapping of str to GraphModule
        The changes, element by element, of parameters that a call begins with. The graph reads the changed ones.
    known : dict
        A cache of fake results and decompositions of ops, shared by all lowerings: see `LocalGraph` and `decompose`.
    """

    graph: fx.GraphModule
    parameters: dict[str, str]
    buffers: dict[str, str]
    inputs: dict[str, str]
    tangents: dict[str, int]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    mutated: tuple[str, ...]
    aliases: dict[str, tuple[str, ...]]
    call: CallTree | None
    training: bool
    whole: bool = False
    dtypes: Mapping[str, Dtypes] = field(default_factory=dict)
    at_rest: Mapping[str, Layout] = field(default_factory=dict)
    reads: Reads | None = field(default=None, repr=False, compare=False)
    input_gradients: tuple[str, ...] = ()
    changes: Mapping[str, fx.GraphModule] = field(default_factory=dict, repr=False, compare=False)
    known: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class CallTree:
    """The structure of a call: how its arguments become the graph's inputs, and its outputs the model's return value.

    `names` are the names of the leaves of a call in order (``"tokens"``, ``"batch.labels"``). `constants` has the
    values at capture of the leaves that are not tensors. `made_leaves` are those of which the forward calls
    `requires_grad_()`. `asked` are the attributes that the forward asks tensors for, each with the position of the
    tensor: the step is for tensors without them.
    """

    signature: inspect.Signature
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    tensor_positions: tuple[int, ...]
    constants: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    output_constants: tuple[Any, ...]
    made_leaves: tuple[int, ...] = ()
    asked: tuple[tuple[int, str], ...] = ()

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the graph's inputs; `InputError` if its structure is another one."""
        leaves, spec = pytree.tree_flatten(canonical_arguments(self.signature, args, kwargs))
        if spec != self.spec:
            given = ", ".join(leaf_names(self.signature, args, kwargs)) or "nothing"
            raise InputError(
                f"the step was compiled for the arguments {', '.join(self.names)}; this call has {given}: "
                "call it as it was captured, or compile again with these inputs"
            )
        for position, (leaf, constant) in enumerate(zip(leaves, self.constants)):
            name = self.names[position]
            if position in self.tensor_positions:
                if not isinstance(leaf, Tensor):
                    raise InputError(f"the argument {name} must be a tensor, got {type(leaf).__name__}")
                refuse_layout(name, leaf)
            elif isinstance(leaf, Tensor) or leaf != constant:
                got = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                raise InputError(
                    f"the argument {name} was {constant!r} at capture and is part of the compiled step; it is now "
                    f"{got}: compile again with it"
                )
        for position, attribute in self.asked:
            if hasattr(leaves[position], attribute):
                reason, way_out = attribute_of_input(self.names[position], attribute)
                raise InputError(f"the model's {reason}. {way_out}")
        for position in self.made_leaves:
            if not leaves[position].is_inference():
                leaves[position].requires_grad_()
        return [leaves[position] for position in self.tensor_positions]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's return value, from the graph's tensor outputs."""
        tensors = iter(outputs)
        values = [next(tensors) if constant is TENSOR_OUTPUT else constant for constant in self.output_constants]
        return pytree.tree_unflatten(values, self.output_spec)


def refuse_layout(name: str, tensor: Tensor) -> None:
    """Raise InputError for an argument that is a sparse or a nested tensor.

    >>> refuse_layout("graph", torch.eye(2).to_sparse())
    Traceback (most recent call last):
    ...
    shardweave.ir.errors.InputError: the argument 'graph' is a tensor of the layout torch.sparse_coo, and a step ...
    """
    if tensor.is_nested:
        raise InputError(
            f"the argument {name!r} is a nested tensor, and a step takes dense ones: pass its values() and offsets(), "
            "and make it in the forward, by torch.nested.nested_tensor_from_jagged(values, offsets)"
        )
    if tensor.layout is not torch.strided:
        raise InputError(
            f"the argument {name!r} is a tensor of the layout {tensor.layout}, and a step takes dense ones: pass "
            f"{name}.to_dense(); or its indices and values, and compute with index_select and index_add"
        )


def attribute_of_input(name: str, attribute: str) -> tuple[str, str]:
    """Why a call is refused whose forward asks a tensor for an attribute that the user gave it, and the way out."""
    reason = f"forward asks for {name}.{attribute}, an attribute that this tensor was given"
    return reason, f"A step takes the numbers of a tensor alone: pass {attribute} as an argument of its own."


class OpenObject:
    """An object that pytrees do not know, such as a cache of keys and values, opened for a capture.

    As a pytree, it has its attributes that hold tensors, and its items that do if its class is derived from dict, list
    or tuple. Put together again, it is an object of its own class, with these and the others as they were. No class is
    registered for the whole process.

    Parameters
    ----------
    value : object
    opened : callable
        Opens the objects in an attribute or item.
    whole : bool
        The pytree has all attributes and items: of an argument, whose other values are constants of a step.
    """

    def __init__(self, value: Any, opened: Callable[[Any], Any], whole: bool = False) -> None:
        attributes, slots = getattr(value, "__dict__", {}), copyreg._slotnames(type(value))  # type: ignore[attr-defined]
        is_own_dict = attributes is value  # its attributes are its items
        parts: dict[tuple[str, Any], Any] = {}
        parts |= {("attribute", name): each for name, each in attributes.items() if not is_own_dict}
        parts |= {("slot", name): getattr(value, name) for name in slots if hasattr(value, name)}
        if isinstance(value, dict):
            parts |= {("item", key): each for key, each in value.items()}
        elif isinstance(value, (list, tuple)):
            parts |= {("item", index): each for index, each in enumerate(value)}
        parts = {key: pytree.tree_map(opened, each) for key, each in parts.items()}
        holds = {key: any(isinstance(x, Tensor) for x in pytree.tree_leaves(each)) for key, each in parts.items()}
        self.holds_tensors = any(holds.values())
        holds = dict.fromkeys(holds, True) if whole else holds
        self.values = [each for key, each in parts.items() if holds[key]]
        known = tuple((key, None if holds[key] else each, holds[key]) for key, each in parts.items())
        self.context = type(value), is_own_dict, known


def _close(values: Iterable[Any], context: Any) -> Any:
    kind, is_own_dict, known = context
    tensors = iter(values)
    parts = {key: next(tensors) if holds else copy.copy(value) for key, value, holds in known}
    items = {key: value for (part, key), value in parts.items() if part == "item"}
    result = tuple.__new__(kind, items.values()) if issubclass(kind, tuple) else kind.__new__(kind)
    for (part, name), value in parts.items():
        if part == "attribute":
            vars(result)[name] = value
        elif part == "slot":
            object.__setattr__(result, name, value)
    if issubclass(kind, list):
        list.extend(result, items.values())
    elif issubclass(kind, dict):
        for key, value in items.items():  # by the base class, as that of its own may do anything
            (OrderedDict if issubclass(kind, OrderedDict) else dict).__setitem__(result, key, value)
        if is_own_dict:
            result.__dict__ = result
    return result


def _with_keys(opened: OpenObject) -> tuple[list[tuple[Any, Any]], Any]:
    names = [name for (_, name), _, holds in opened.context[-1] if holds]
    return [*zip(map(pytree.MappingKey, names), opened.values, strict=True)], opened.context


pytree.register_pytree_node(
    OpenObject, lambda opened: (opened.values, opened.context), _close, flatten_with_keys_fn=_with_keys
)


def arguments_opened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the objects opened that hold tensors, such as a dataclass with a batch."""
    if all(isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in pytree.tree_leaves((args, kwargs))):
        return args, kwargs
    opened: tuple[tuple[Any, ...], dict[str, Any]] = with_objects_opened((args, kwargs), whole=True)
    return opened


def with_objects_opened(value: Any, whole: bool = False) -> Any:
    """`value` with an `OpenObject` in the place of each object in it whose attributes or items hold tensors.

    `whole` is that of `OpenObject`. ``tree_map`` puts the objects together again.

    >>> class Cache:
    ...     def __init__(self):
    ...         self.keys, self.size = [torch.ones(2), torch.ones(3)], 2
    >>> leaves, spec = pytree.tree_flatten(with_objects_opened({"cache": Cache()}))
    >>> len(leaves), vars(pytree.tree_unflatten([1, 2], spec)["cache"])
    (2, {'keys': [1, 2], 'size': 2})
    """
    inside: set[int] = set()  # the objects that are being opened

    def opened(leaf: Any) -> Any:
        plain = isinstance(leaf, (Tensor, nn.Module, *PLAIN_TYPES)) or callable(leaf)
        if plain or id(leaf) in inside:
            return leaf
        inside.add(id(leaf))
        result = OpenObject(leaf, opened, whole)
        inside.discard(id(leaf))
        return result if result.holds_tensors else leaf

    return pytree.tree_map(opened, value)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments.

    >>> as_call({"tokens": 1}), as_call((1, 2)), as_call(((1,), {"y": 2}))
    (((), {'tokens': 1}), ((1, 2), {}), ((1,), {'y': 2}))
    """
    if isinstance(example_inputs, Mapping):
        return arguments_opened((), dict(example_inputs))
    if isinstance(example_inputs, (tuple, list)):
        values = tuple(example_inputs)
        if len(values) == 2 and isinstance(values[0], (tuple, list)) and isinstance(values[1], Mapping):
            return arguments_opened(tuple(values[0]), dict(values[1]))
        return arguments_opened(values, {})
    return arguments_opened((example_inputs,), {})


def canonical_arguments(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call in canonical form: arguments are positional where possible, and defaults are left out."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the call does not fit the model's forward{signature}: {error}") from None
    for name, value in list(bound.arguments.items()):
        parameter = signature.parameters[name]
        if parameter.kind is not parameter.VAR_POSITIONAL and value is parameter.default:
            del bound.arguments[name]
    return bound.args, bound.kwargs


def leaf_names(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """A name for each leaf of the canonical call, such as ``"tokens"`` or ``"batch.labels"``."""
    args, kwargs = canonical_arguments(signature, args, kwargs)
    bound = signature.bind(*args, **kwargs)
    positional = [name for name in bound.arguments if name not in bound.kwargs]
    names = []
    for path, _ in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        if keys[0] == "0":
            index = int(keys[1])
            keys[1] = (
                positional[index] if index < len(positional) else f"{positional[-1]}.{index - len(positional) + 1}"
            )
        names.append(".".join(keys[1:]))
    return tuple(names)


@dataclass(frozen=True)
class Read:
    """One Python value that capture read.

    Parameters
    ----------
    code : tuple of str
        Its expression in Python, as statements: each but the last is ``name = expression``, and shared with others.
    shown : str
        The expression as a user writes it, such as ``"model.config.beta"``.
    """

    code: tuple[str, ...]
    shown: str

def plain(value: Any) -> Any:
    """The part of a value that is kept for comparison: a constant itself, else its code or type.

    Nothing that is kept can keep a model alive.
    """
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():  # a number, some of which are floats
        return type(value).__name__, value.item()
    if isinstance(value, (*PLAIN_TYPES, enum.Enum, type, types.ModuleType, types.BuiltinFunctionType)):
        return value
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(plain, value))
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return value.__code__
    return type(value)


def _kinds(value: Any) -> Any:
    """The type of a value that `plain` kept, or the types of what it contains."""
    kind = type(value)
    return kind(map(_kinds, value)) if kind is tuple or kind is frozenset else kind


class Reads:
    """The values that capture read. They can be read again from the model and from the parallel module.

    Parameters
    ----------
    reads : sequence of Read
    names : mapping of str to object
        The names in the expressions besides ``model``: globals of the model's Python module, and its imports.
    """

    def __init__(self, reads: Sequence[Read], names: Mapping[str, object]) -> None:
        self.reads, self._names = tuple(reads), dict(names)
        self._all = self._looks([f"keep({read.code[-1]})" for read in self.reads])

    def _looks(self, expressions: Sequence[str]) -> Callable[[nn.Module], list[Any]]:
        """A function that returns the values of these expressions, one for each read."""
        statements = dict.fromkeys(line for read in self.reads for line in read.code[:-1])
        return self._function([*statements, f"return [{', '.join(expressions)}]"])

    def _function(self, lines: Sequence[str]) -> Callable[[nn.Module], Any]:
        space: dict[str, Any] = {**self._names, "keep": plain}
        exec("def look(model):\n" + "\n".join(f"    {line}" for line in lines), space)  # of our own expressions alone
        found: Callable[[nn.Module], Any] = space["look"]
        return found

    def values(self, model: nn.Module) -> list[Any]:
        """The present value of each read; `MISSING` if it cannot be read."""
        try:
            return self._all(model)
        except Exception:  # an attribute that is gone, or whatever a property raises: each for itself
            return [self._one(read, model) for read in self.reads]

    def unchanged_test(self, model: nn.Module) -> Callable[[nn.Module], bool]:
        """A fast test of whether a module has the values that `model` has now. If it fails, compare `values`.

        It compares constants and types as they are read, without a call of `plain` for each.
        """
        expressions = [read.code[-1] for read in self.reads]
        try:
            given = self._looks(expressions)(model)
            pairs = zip(expressions, given, map(plain, given), strict=True)
            forms = [
                text if kept is value else f"type({text})" if kept is type(value) else f"keep({text})"
                for text, value, kept in pairs
            ]
            look = self._looks(forms)
            before = look(model)
        except Exception:  # one of them cannot be read: see `values`
            return lambda _: False

        def is_unchanged(module: nn.Module) -> bool:
            try:
                other = [pair for pair in zip(look(module), before, strict=True) if pair[0] is not pair[1]]
                # What is kept is immutable. 2 and 2.0 are equal, and make tensors of other dtypes.
                return all(now == was and _kinds(now) == _kinds(was) for now, was in other)
            except Exception:  # as above; or tensors that cannot be compared
                return False

        return is_unchanged

    def _one(self, read: Read, model: nn.Module) -> Any:
        try:
            return self._function([*read.code[:-1], f"return keep({read.code[-1]})"])(model)
        except Exception:  # as above
            return MISSING

    def without(self, shown: Collection[str]) -> Reads:
        """The reads without those in `shown`, and without reads of whether these are set."""
        return Reads([read for read in self.reads if read.shown.removesuffix(" being set") not in shown], self._names)

    def found_in(self, model: nn.Module) -> Reads:
        """The reads that `model` has a value for."""
        pairs = zip(self.reads, self.values(model), strict=True)
        return Reads([read for read, value in pairs if value != MISSING], self._names)


@dataclass(frozen=True)
class ChangedConstant:
    """A Python value that a step has as a constant and that is another one now."""

    shown: str
    """Its name in the user's terms."""
    before: Any
    now: Any


class ConstantsCheck:
    """Whether constants of a step are unchanged in the parallel module, and in the user's model while it lives."""

    def __init__(self, reads: Reads, model: nn.Module, parallel: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._mode = model.training
        self._of_model, self._of_parallel = reads.found_in(model), reads.found_in(parallel)
        self._before_in_model, self._before = self._of_model.values(model), self._of_parallel.values(parallel)
        self._model_is_unchanged = self._of_model.unchanged_test(model)
        self._is_unchanged = self._of_parallel.unchanged_test(parallel)
        self._hooks_before, self._num_calls = (_num_hooks(model), _num_hooks(parallel)), 0

    def changed(self, parallel: nn.Module) -> list[ChangedConstant]:
        """The constants that have changed in the parallel module, or in what it shares with others."""
        if self._is_unchanged(parallel):
            return []
        return self._changed(self._of_parallel, self._before, parallel, "parallel")

    def check_model(self, parallel: nn.Module) -> None:
        """Raise `ParallelError` if a value has changed in the user's model, whose own attributes no step follows."""
        model = self._model()
        if model is None:
            return
        self._num_calls += 1
        if not self._num_calls & (self._num_calls - 1):  # each power of two, as it takes longer than the other checks
            self._warn_of_hooks(model, parallel)
        if self._model_is_unchanged(model):
            return
        changed = self._changed(self._of_model, self._before_in_model, model, "model")
        if model.training != self._mode:  # a model that is in the other mode as a whole is used on its own
            changed = [each for each in changed if not each.shown.endswith(".training")]
        if changed:  # what both share, or what has changed in both, has another step
            followed = self._changed(self._of_parallel, self._before, parallel, "model")
            refuse_changed([each for each in changed if each not in followed])

    def _warn_of_hooks(self, model: nn.Module, parallel: nn.Module) -> None:
        """Warn once of hooks that the model got after it was compiled, and the parallel module did not."""
        found = _num_hooks(model), _num_hooks(parallel)
        new, own = (now - before for now, before in zip(found, self._hooks_before, strict=True))
        if missing := sorted((new - own).elements()):
            self._hooks_before = found
            names = ", ".join(f"model{name}" for name in dict.fromkeys(missing))
            warnings.warn(
                f"hooks were registered on {names} after the model was compiled. The parallel module has modules and "
                f"parameters of its own, and does not call them: register them on parallel{missing[0]}",
                stacklevel=9,
            )

    def _changed(self, reads: Reads, before: list[Any], module: nn.Module, root: str) -> list[ChangedConstant]:
        triples = zip(reads.reads, before, reads.values(module), strict=True)
        different = [(read, was, value) for read, was, value in triples if was != value or _kinds(was) != _kinds(value)]
        return [ChangedConstant(re.sub(r"\bmodel\b", root, read.shown, count=1), *pair) for read, *pair in different]


def _num_hooks(model: nn.Module) -> Counter[str]:
    """The number of hooks of each module and parameter, by names such as ``".linear.weight"``."""
    modules = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    tensors = "_backward_hooks", "_post_accumulate_grad_hooks"
    named: list[tuple[str, Any, tuple[str, ...]]] = [(name, each, modules) for name, each in model.named_modules()]
    named += [(name, each, tensors) for name, each in model.named_parameters()]
    found = Counter[str]()
    for name, each, kinds in named:
        found[f".{name}" if name else ""] = sum(len(getattr(each, kind) or ()) for kind in kinds)
    return found


def refuse_changed(changed: Sequence[ChangedConstant]) -> None:
    """Raise `ParallelError` that names the first of these constants, if there is one."""
    for each in changed:
        raise ParallelError(
            f"{each.shown} was {shown_value(each.before)} when the step was compiled and is a constant of it; it is "
            f"now {shown_value(each.now)}, and the step would go on with the former. Set it back; or change it in the "
            "parallel module, which compiles a step for the new value. What changes from step to step belongs into a "
            "tensor that is passed to the call, or into a buffer"
        )


def shown_value(value: Any) -> str:
    """A value that `plain` kept, in words that are the same on all ranks.

    >>> print(shown_value(plain(({"b", "a"}, torch.sin, 0.5))))
    ({'a', 'b'}, the function sin, 0.5)
    """
    if isinstance(value, tuple):
        return f"({', '.join(map(shown_value, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(shown_value, value)))}}}"
    if isinstance(value, types.BuiltinFunctionType):
        return f"the function {value.__name__}"
    if isinstance(value, type):
        return f"a {value.__name__}"
    if isinstance(value, types.CodeType):
        return f"the function {value.co_name} ({value.co_filename}:{value.co_firstlineno})"
    return value if value == MISSING else repr(value)
