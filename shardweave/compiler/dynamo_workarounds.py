"""Workarounds for model code that Dynamo cannot trace, and a pause of garbage collection while graphs are written.

This is the only module that knows internals of model libraries. It imports none of them: a library that is not imported
has no model here.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardweave.ir import CaptureError

HINTS = {
    "layerdrop": "Which layers run is drawn anew in each step: set layerdrop to 0 in the model's config.",
    "skip_the_layer": "Which layers run is drawn anew in each step: set layerdrop to 0 in the model's config.",
    "num_masked_span": "SpecAugment is drawn on the host: set apply_spec_augment=False in the model's config.",
    "autograd.grad(": "Use torch.func.grad, which is captured: torch.func.grad(f)(x) is the gradient of a number f(x).",
    ".backward(": "Call backward outside of the model; where a forward needs gradients, torch.func.grad is captured.",
    "print(": "Take the print out (what a logger or warnings.warn says is left out by itself).",
}
"""The way out for a source line that stops a capture, by a word in that line."""


@contextlib.contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """While this runs, Dynamo skips logging, and traces recurrent layers and the models of `transformers`.

    The model is restored afterwards.
    """
    _refuse_lost_dropout(model)
    with (
        torch._dynamo.config.patch(ignore_logging_functions=_logging_functions(), allow_rnn=True),
        _builtins_known(),
        _without_checks(),
        _output_hooks(model),
        _no_input_gradients(model),
    ):
        yield


def _logging_functions() -> set[Callable[..., Any]]:
    """All methods of loggers that log, also those that libraries add (`warning_once`), and `warnings.warn`."""
    kept: set[Callable[..., Any]] = set(torch._dynamo.config.ignore_logging_functions)
    loggers = [value for value in logging.Logger.manager.loggerDict.values() if isinstance(value, logging.Logger)]
    for kind in {base for logger in [logging.getLogger(), *loggers] for base in type(logger).__mro__} - {object}:
        kept |= {value for name, value in vars(kind).items() if callable(value) and not name.startswith(("_", "get"))}
    return kept | {warnings.warn}


def _refuse_lost_dropout(model: nn.Module) -> None:
    """`CaptureError` for dropout between recurrent layers, which torch's decomposition of them leaves out."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            kind = type(module).__name__
            raise CaptureError(
                f"the dropout of {module.dropout} between the {module.num_layers} layers of {name or 'the model'} "
                f"({kind}) would be lost by a capture: set its dropout to 0, or write it as {module.num_layers} {kind} "
                "of one layer with nn.Dropout between them"
            )


@contextlib.contextmanager
def _builtins_known() -> Iterator[None]:
    """Let Dynamo's code refer to builtins such as `type`, which torch 2.11 and 2.12 miss among its globals."""
    environment: Any = torch._dynamo.convert_frame.GraphRuntimeEnv
    check = environment._check_external_refs

    def checked(self: Any, known: dict[str, Any]) -> None:
        check(self, vars(builtins) | known)

    with mock.patch.object(environment, "_check_external_refs", checked):
        yield


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Switch off the checks of values in torch's distributions and in transformers."""
    distributions = torch.distributions.Distribution
    validates = distributions._validate_args
    distributions.set_default_validate_args(False)
    try:
        with mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"):
            yield
    finally:
        distributions.set_default_validate_args(validates)


class _Collector:
    """Stands for transformers' ContextVar of the current collection.

    Under Dynamo, that one forgets the outer model's collection when an inner one ends.
    """

    def __init__(self) -> None:
        self.current: Any = None

    def get(self) -> Any:
        return self.current

    def set(self, value: Any) -> tuple[Any]:
        before = self.current
        self.current = value
        return (before,)

    def reset(self, token: tuple[Any]) -> None:
        (self.current,) = token


_INSTALLED = "_output_capturing_hooks_installed"


@contextlib.contextmanager
def _output_hooks(model: nn.Module) -> Iterator[None]:
    """Install the hooks by which transformers 5 collects hidden states and attentions, and remove them afterwards.

    A model installs them in its first call that collects, under a lock that Dynamo cannot trace.
    """
    library: Any = sys.modules.get("transformers.utils.output_capturing")
    if library is None:
        yield
        return
    from transformers import PreTrainedModel

    before = {module: dict(module._forward_hooks) for module in model.modules()}
    marked = {module for module in before if hasattr(module, _INSTALLED)}
    try:
        with mock.patch.object(library, "_active_collector", _Collector()):
            for module in before:  # an outer model comes first, and installs the hooks of its inner models again
                installed = any(hasattr(inner, _INSTALLED) for inner in module.modules())
                if isinstance(module, PreTrainedModel) and not installed:
                    library.maybe_install_capturing_hooks(module)
            yield
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)
            if module not in marked and hasattr(module, _INSTALLED):
                delattr(module, _INSTALLED)


@contextlib.contextmanager
def _no_input_gradients(model: nn.Module) -> Iterator[None]:
    """Switch off the input gradients of transformers' audio encoders, which only old checkpointing needed."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            of_library = type(module).__module__.startswith("transformers.")
            if of_library and getattr(module, "_requires_grad", None) is True:
                stack.enter_context(mock.patch.object(module, "_requires_grad", False))
        yield


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: it took a quarter of planning, for graphs that are all still in use.

    Examples
    --------
    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
