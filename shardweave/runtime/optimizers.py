"""Optimizers of parallel tensors: their steps run on this rank's parts.

A parallel tensor runs each op of an optimizer through Python. Torch's elementwise optimizers have a dozen ops for each
parameter, so that their steps would take several times as long as their arithmetic. From its second step on, such an
optimizer runs on the parts themselves: plain tensors, for which torch also chooses its fast implementations. The result
is the same, as each element of a state depends on that element of its parameter alone.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from shardweave.ir import ParallelError
from shardweave.runtime.parameters import local_tensor
from shardweave.runtime.tensor import ParallelTensor, check_rank

ELEMENTWISE = {
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
}  # fmt: skip
"""Optimizers whose states are elementwise; not classes derived from them, whose steps may be anything."""


_replaced: Any = WeakTensorKeyDictionary()
"""The parameters of models that were compiled: their parallel modules train others."""


@functools.cache
def register_hook() -> None:
    """Let each optimizer, right before its steps, be prepared for parallel tensors."""
    register_optimizer_step_pre_hook(_prepare)


def note_replaced(parameters: Iterable[torch.Tensor]) -> None:
    """Note the parameters of a model that was compiled. An optimizer of these alone trains nothing."""
    _replaced.update((parameter, True) for parameter in parameters)


def _prepare(optimizer: torch.optim.Optimizer, *_: object) -> None:
    _refuse_replaced(optimizer)
    _make_states_parallel(optimizer)
    if any(isinstance(parameter, ParallelTensor) for group in optimizer.param_groups for parameter in group["params"]):
        speed_up(optimizer)


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise ParallelError if the step would train nothing, as its parameters are those before compiling."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(each.grad is None for each in parameters) and any(each in _replaced for each in parameters):
        raise ParallelError(
            f"this {type(optimizer).__name__} has the parameters of the model before it was compiled, which get no "
            "gradients: make the optimizer from the parameters of the parallel module (parallel.parameters(), or a "
            "method of the model called on the parallel module). Compiled with example_inputs, it has them at once; "
            "without, after its first call"
        )


def _make_states_parallel(optimizer: torch.optim.Optimizer) -> None:
    """Make states that ``torch.load`` returned, which are plain DTensors, parallel tensors.

    For an op on plain states alone DTensor would search for placements on all axes of the mesh: docs/checkpoints.md has
    the times.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(parameter, ParallelTensor)
                and type(value) is DTensor
                and value.shape == parameter.shape
                and value.placements == parameter.placements
            ):
                check_rank(value, parameter.sharding)
                state[key] = ParallelTensor.of(value._local_tensor, parameter.sharding, parameter._spec)


def speed_up(optimizer: torch.optim.Optimizer) -> None:
    """Let the next steps of an optimizer run on this rank's parts, if it is one of `ELEMENTWISE`; and its `zero_grad`.

    Examples
    --------
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    >>> speed_up(optimizer)
    >>> optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    >>> optimizer.step(), optimizer.param_groups[0]["params"][0].tolist()
    (None, [0.8999999761581421, 0.8999999761581421])
    """
    if type(optimizer) not in ELEMENTWISE or hasattr(optimizer.step, "runs_on_parts"):
        return
    original: Callable[..., Any] = optimizer.step

    @functools.wraps(original)  # a learning rate scheduler has marked it
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a closure computes gradients of the parameters themselves
            return original(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # of all that is read of parameters here
            if can_run_on_parts(self):
                with on_parts(self):
                    return original()
        return original()

    step.runs_on_parts = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_grad_quickly(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            zero_grad(*args, **kwargs)

    # On this instance alone, as `step` above: other optimizers of its class may have no parallel tensors.
    optimizer.zero_grad = types.MethodType(zero_grad_quickly, optimizer)  # type: ignore[method-assign]


def can_run_on_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody would notice: no hooks that look on, and gradients and states that lie as their parameters do."""
    hooks = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
    if hooks > 1 or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False  # the one global hook is that of this module
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    parts: set[int] = set()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if isinstance(parameter, ParallelTensor):
            state = optimizer.state.get(parameter, {})
            part = id(parameter._local_tensor)
            # Of a number, a new state could not be told from what counts steps
            if parameter.view_of or part in parts or not (parameter.dim() or state):
                return False
            for value in (parameter.grad, *state.values()):
                if isinstance(value, torch.Tensor) and value.dim() and not _lies_as(value, parameter):
                    return False
            parts.add(part)
    return True


def _lies_as(value: torch.Tensor, parameter: ParallelTensor) -> bool:
    return (
        type(value) is ParallelTensor
        and value.view_of is None
        and (value.sharding is parameter.sharding or value.sharding.layout == parameter.sharding.layout)
    )


@contextmanager
def on_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """This rank's parts in the place of an optimizer's parameters, gradients and states; put back at the end."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    lists = [group["params"] for group in optimizer.param_groups]
    states = optimizer.state
    # 1. The parts of the parameters, with gradients
    local_states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for group in optimizer.param_groups:
        local_parameters = []
        for parameter in group["params"]:
            part = parameter
            if isinstance(parameter, ParallelTensor):
                part, gradient = parameter._local_tensor, parameter.grad
                part.grad = None if gradient is None else local_tensor(gradient)
            if (state := states.get(parameter)) is not None:
                local_states[part] = {key: local_tensor(value) for key, value in state.items()}
            local_parameters.append(part)
            pairs.append((parameter, part))
        group["params"] = local_parameters
    optimizer.state = local_states
    try:
        yield
    finally:
        # 2. The parameters again, and what has become of their states
        optimizer.state = states
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        for parameter, part in pairs:
            if (local := local_states.get(part)) is not None:
                before = states.get(parameter, {})
                if before.keys() != local.keys() or any(local_tensor(before[key]) is not local[key] for key in local):
                    states[parameter] = _whole_state(local, before, parameter)
            if part is not parameter and part.grad is not None:
                torch.autograd.graph.increment_version(parameter)
                part.grad = None


def _whole_state(local: dict[str, Any], before: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """A state of parts as one of parallel tensors: those that there were, where their parts are the same tensors."""
    found = {}
    for key, value in local.items():
        known = before.get(key)
        if known is not None and local_tensor(known) is value:
            found[key] = known
        elif (
            isinstance(parameter, ParallelTensor)
            and isinstance(value, torch.Tensor)
            and value.dim()
            and value.shape == parameter._local_tensor.shape
        ):
            spec = parameter._spec if value.dtype == parameter.dtype else None
            found[key] = ParallelTensor.of(value, parameter.sharding, spec)
        else:
            found[key] = value
    return found
