"""Mixed precision in a capture: parameters in their working dtype, and casts of inputs and outputs.

A model that casts its parameters itself, as under ``torch.autocast``, is brought to the same form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.ir import Precision

CAST = torch.ops.aten._to_copy.default


@contextlib.contextmanager
def working_copies(model: nn.Module, precision: Precision | None, fake: Any) -> Iterator[None]:
    """While this runs, `model` has fake parameters in the working dtype, and casts its outputs.

    The parameters are restored afterwards. Buffers are not changed. `fake` is the FakeTensorMode of the parameters.
    """
    if precision is None:
        yield
        return
    owned = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    copies: dict[Tensor, nn.Parameter] = {}
    for _, _, master in owned:  # a tied parameter remains one
        if master not in copies and precision.working(master.dtype) != master.dtype:
            with fake:
                value = torch.empty(master.size(), dtype=precision.working(master.dtype), device=master.device)
            copies[master] = nn.Parameter(value, master.requires_grad)
    hooks = []
    try:
        for module, name, master in owned:
            if master in copies:
                setattr(module, name, copies[master])  # setattr, as recurrent layers keep a list of theirs
        if (output := precision.output_dtype) is not None:
            hooks.append(model.register_forward_hook(lambda _, inputs, result: cast(result, output)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, master in owned:
            setattr(module, name, master)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """`values` with every floating-point tensor in `dtype`.

    >>> cast((torch.ones(1), torch.ones(1, dtype=torch.int32), None), torch.float16)
    (tensor([1.], dtype=torch.float16), tensor([1], dtype=torch.int32), None)
    """
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def cast_inputs_inside(graph: fx.Graph, given: Mapping[str, tuple[torch.dtype, int | None]]) -> None:
    """Let a captured graph take its inputs in the dtypes `given` by placeholder, and cast them itself.

    It casts their gradients back, whose places among the graph's outputs are given with the dtypes.
    """
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.name in given]:
        value, (dtype, place) = node.meta["val"], given[node.name]
        if value.dtype == dtype:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(CAST, (node,), {"dtype": value.dtype})
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        copy.meta["val"] = value
        node.meta["val"] = value.to(dtype)
        if place is not None and isinstance(results[place], fx.Node):
            with graph.inserting_before(output):
                back = graph.call_function(CAST, (results[place],), {"dtype": dtype})
            back.meta.update(val=results[place].meta["val"].to(dtype), partitioner_tag="is_backward")
            results[place] = back
    output.args = (results,)


def take_cast_parameters(graph: fx.Graph, parameters: Mapping[str, str], gradients: Sequence[str]) -> None:
    """Make a captured graph take parameters in the dtype that it casts them to, and return gradients in that dtype.

    With ``torch.autocast`` in a model, each rank then casts its shard before it is gathered. `parameters` has the names
    by placeholder, `gradients` the names of those whose gradients are the last outputs.
    """
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    places = {name: len(results) - len(gradients) + index for index, name in enumerate(gradients)}
    for node in [node for node in graph.nodes if node.name in parameters]:
        casts, place = list(node.users), places.get(parameters[node.name])
        gradient = None if place is None else results[place]
        if not casts or not all(_is_cast_of(user, node) for user in casts):
            continue
        if len({user.meta["val"].dtype for user in casts}) > 1 or (
            gradient is not None and gradient.target is not CAST
        ):
            continue
        node.meta["val"] = casts[0].meta["val"]
        for user in casts:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        if place is not None and gradient is not None:
            results[place] = gradient.args[0]
            output.args = (list(results),)
            if not gradient.users:
                graph.erase_node(gradient)


def _is_cast_of(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` is `node` in another dtype, on the same device with the same strides."""
    if user.target is not CAST:
        return False
    made, own = user.meta["val"], node.meta["val"]
    same_memory = (made.device, made.stride()) == (own.device, own.stride())
    return same_memory and made.dtype != own.dtype and own.is_floating_point() and made.is_floating_point()
