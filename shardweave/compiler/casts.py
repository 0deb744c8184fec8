"""A model as a capture sees it under mixed precision: parameters in their working dtype, casts at both ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from shardweave.precision import Precision


@contextlib.contextmanager
def working_copies(model: nn.Module, precision: Precision | None, fake: Any) -> Iterator[None]:
    """While this runs, `model` has fake parameters of its working dtype, and casts its inputs and outputs.

    The model is afterwards as it was. Buffers stay as they are.

    Parameters
    ----------
    fake : FakeTensorMode
        The mode of the parameters.
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
                setattr(module, name, copies[master])  # so, as recurrent layers keep a list of theirs
        param, output = precision.param_dtype, precision.output_dtype
        if param is not None and precision.cast_forward_inputs:
            hooks.append(
                model.register_forward_pre_hook(lambda _, *call: cast(call, param), prepend=True, with_kwargs=True)
            )
        if output is not None:
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
