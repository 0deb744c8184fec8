"""The structure of a call: how its arguments become inputs of the graph, and outputs become the return value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from shardweave.ir.errors import InputError


@dataclass(frozen=True)
class CallTree:
    """The structure of a call: how its arguments become the graph's inputs, and its outputs the model's return value.

    `names` are the names of the leaves of a call in order (``"tokens"``, ``"batch.labels"``). `constants` has the
    values at capture of the leaves that are not tensors.
    """

    signature: inspect.Signature
    spec: pytree.TreeSpec
    names: tuple[str, ...]
    tensor_positions: tuple[int, ...]
    constants: tuple[Any, ...]
    output_spec: pytree.TreeSpec
    output_constants: tuple[Any, ...]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call in the order of the graph's inputs; `InputError` if its structure is another one."""
        leaves, spec = pytree.tree_flatten(canonical(self.signature, args, kwargs))
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
            elif isinstance(leaf, Tensor) or leaf != constant:
                got = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
                raise InputError(
                    f"the argument {name} was {constant!r} at capture and is part of the compiled step; it is now "
                    f"{got}: compile again with it"
                )
        return [leaves[position] for position in self.tensor_positions]

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's return value, from the graph's tensor outputs."""
        tensors = iter(outputs)
        values = [next(tensors) if constant is TENSOR else constant for constant in self.output_constants]
        return pytree.tree_unflatten(values, self.output_spec)


TENSOR = "<a tensor output>"


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments.

    >>> as_call({"tokens": 1}), as_call((1, 2)), as_call(((1,), {"y": 2}))
    (((), {'tokens': 1}), ((1, 2), {}), ((1,), {'y': 2}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        values = tuple(example_inputs)
        if len(values) == 2 and isinstance(values[0], (tuple, list)) and isinstance(values[1], Mapping):
            return tuple(values[0]), dict(values[1])
        return values, {}
    return (example_inputs,), {}


def canonical(
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
    args, kwargs = canonical(signature, args, kwargs)
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
