"""Workarounds for model code that Dynamo cannot trace; `traceable` has them all.

This is the only module that knows internals of model libraries. It imports none of them: a library that is not imported
has no model here.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributions import kl
from torch.nn.modules import transformer

from shardweave.compiler.branches import branches_selected, raises_as_asserts
from shardweave.compiler.constants import DRAWN
from shardweave.compiler.traceable_forms import Patch, together, traceable_forms
from shardweave.ir import with_objects_opened

DRAW_WAY_OUT = (
    "Draw with torch (torch.rand, torch.randn; torch.where in the place of a branch), or pass what you have drawn to "
    "the call, as a tensor."
)
CLOCK_WAY_OUT = "Take the time before and after the call, outside of the forward."
HINTS = {
    "layerdrop": "Which layers run is drawn anew in each step: set layerdrop to 0 in the model's config.",
    "skip_the_layer": "Which layers run is drawn anew in each step: set layerdrop to 0 in the model's config.",
    "num_masked_span": "SpecAugment is drawn on the host: set apply_spec_augment=False in the model's config.",
    "autograd.grad(": "Use torch.func.grad, which is captured: torch.func.grad(f)(x) is the gradient of a number f(x).",
    ".backward(": "Call backward outside of the model. In a forward, torch.autograd.grad is captured.",
    ".requires_grad_(": "Make a leaf of your own, x = x.detach().requires_grad_(), or pass an input that requires one.",
    "PackedSequence(": "Give the padded batch and its lengths to the model, and pack them in its forward. Compute on "
    "the padded batch, before it is packed or after pad_packed_sequence, or on packed.data for a loss.",
    "retain_grad(": "Pass a tensor of zeros that requires a gradient, and add it to that value: its gradient is the "
    "value's.",
    "unique(": "Count by counts = torch.bincount(x, minlength=n), where n is the number of experts, say, and loop over "
    "counts.nonzero().flatten().tolist().",
    "bincount(": "Give bincount a minlength, such as the number of experts: its result has so many numbers then.",
    "np.random.": DRAW_WAY_OUT,
    "print(": "Take the print out (what a logger or warnings.warn says is left out by itself).",
}
"""The way out for a source line that stops a capture, by a word in that line."""
CLOCK = "is another time in each call, and a step would repeat one time"
USED_GRADIENT = "the forward uses the grad of a parameter or an input, which a captured step does not know"


def traceable(model: nn.Module) -> Patch:
    """While this runs, Dynamo skips logging, and traces recurrent layers and the models of `transformers`.

    The model is restored afterwards.
    """
    # Dynamo lists torch's functions at their first use, and again when its caches were cleared: list the real ones.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    return together(
        torch._dynamo.config.patch(ignore_logging_functions=_logging_functions(), allow_rnn=True),
        _builtins_known(),
        _as_compiled(),
        traceable_forms(),
        _kl_divergences(),
        _without_checks(),
        branches_selected(model),
        raises_as_asserts(),
        _output_hooks(model),
        _no_input_gradients(model),
        _only_captured_hooks(model),
        _inner_gradients(),
        _gradients_unread(),
        _tensor_attributes_set(),
        _numpy_numbers(),
        _names_of_torch(),
        _quantization_aware_layers(),
        _functions_of_one_tensor(),
        _attention_kernels(),
        _draws_and_clocks(),
        # ``self.count += 1`` registers an `nn.Buffer` again, which Dynamo does not trace; other buffers are put back.
        mock.patch.object(nn.modules.module, "Buffer", type("_NoBuffer", (), {})),
    )


def _logging_functions() -> set[Callable[..., Any]]:
    """All methods of loggers that log, also those that libraries add (`warning_once`), and `warnings.warn`."""
    kept: set[Callable[..., Any]] = set(torch._dynamo.config.ignore_logging_functions)
    loggers = [value for value in logging.Logger.manager.loggerDict.values() if isinstance(value, logging.Logger)]
    for kind in {base for logger in [logging.getLogger(), *loggers] for base in type(logger).__mro__} - {object}:
        kept |= {value for name, value in vars(kind).items() if callable(value) and not name.startswith(("_", "get"))}
    return kept | {warnings.warn}


def _kl_divergences() -> Patch:
    """Look up the functions of `kl_divergence` for all pairs of distributions: Dynamo does not trace the search."""
    kinds: list[type[torch.distributions.Distribution]] = [torch.distributions.Distribution]
    for kind in kinds:  # which grows
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pairs that are ambiguous
        found = {(p, q): kl._dispatch_kl(p, q) for p in kinds for q in kinds}  # type: ignore[no-untyped-call]
    return mock.patch.dict(kl._KL_MEMOIZE, found)


def _builtins_known() -> Patch:
    """Let Dynamo's code refer to builtins such as `type`, which torch 2.11 and 2.12 miss among its globals."""
    environment: Any = torch._dynamo.convert_frame.GraphRuntimeEnv
    check = environment._check_external_refs

    def checked(self: Any, known: dict[str, Any]) -> None:
        check(self, vars(builtins) | known)

    return mock.patch.object(environment, "_check_external_refs", checked)


def _as_compiled() -> Patch:
    """Let a forward find what it finds under `torch.compile`, where Dynamo's capture says that it exports.

    Models of transformers, for one, build attention masks for an exported graph that a step does not need. Settings of
    cuDNN choose among kernels of the same results.
    """
    functional_export: Any = torch._dynamo.functional_export
    state = functional_export._compiling_state_context

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        with state(), mock.patch.object(torch.compiler, "_is_exporting_flag", False):
            yield

    return together(
        mock.patch.object(functional_export, "_compiling_state_context", compiling),
        mock.patch.object(torch.backends.cudnn, "flags", _no_flags),
    )


def _no_flags(*_: Any, **__: Any) -> Patch:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Switch off the checks of values in torch's distributions, in transformers and in `nn.Transformer`.

    The last looks at a mask for whether it is causal, to say so to attention, which takes the mask all the same.
    """
    distributions = torch.distributions.Distribution
    validates = distributions._validate_args
    distributions.set_default_validate_args(False)
    try:
        with (
            mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"),
            mock.patch.object(transformer, "_detect_is_causal_mask", _said_to_be_causal),
        ):
            yield
    finally:
        distributions.set_default_validate_args(validates)


def _said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


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
    marked = {module for module in before if _INSTALLED in vars(module)}  # `hasattr` may ask a wrapped model
    try:
        with mock.patch.object(library, "_active_collector", _Collector()):
            for module in before:  # an outer model comes first, and installs the hooks of its inner models again
                installed = any(_INSTALLED in vars(inner) for inner in module.modules())
                if isinstance(module, PreTrainedModel) and not installed:
                    library.maybe_install_capturing_hooks(module)
            yield
    finally:
        for module, hooks in before.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)
            if module not in marked and _INSTALLED in vars(module):
                delattr(module, _INSTALLED)


def _no_input_gradients(model: nn.Module) -> Patch:
    """Switch off the input gradients of transformers' audio encoders, which only old checkpointing needed."""
    of_library = [each for each in model.modules() if type(each).__module__.startswith("transformers.")]
    asking = [each for each in of_library if getattr(each, "_requires_grad", None) is True]
    return together(*(mock.patch.object(module, "_requires_grad", False) for module in asking))


def _inner_gradients() -> Patch:
    """Let Dynamo trace `torch.autograd.grad` in a forward, also of tensors that the forward makes leaves.

    It refuses outputs that are computed from such a leaf, as they would not lead back to it; nothing outside can ask
    for that. Torch before 2.13 may lack the setting or the check.
    """
    known = hasattr(torch._dynamo.config, "trace_autograd_ops")
    graph: Any = torch._dynamo.output_graph.OutputGraph
    check = "_check_requires_grad_intermediate_outputs"
    return together(
        torch._dynamo.config.patch(trace_autograd_ops=True) if known else contextlib.nullcontext(),
        mock.patch.object(graph, check, lambda *_: None, create=True),
    )


def _gradients_unread() -> Patch:
    """While this runs, Dynamo refuses to read ``x.grad`` of parameters and inputs: what it finds would be a constant.

    Conversions of a module in a forward, as by ``self.head.to(x.dtype)``, which read it too, find no gradients.
    """
    variables: Any = torch._dynamo.variables
    original = variables.TensorVariable.method_attr_grad

    def method_attr_grad(self: Any, tx: Any) -> Any:
        found = original(self, tx)  # what the forward itself has set
        if found is not None or self.source is None:
            return found
        if tx.f_code is not nn.Module._apply.__code__:
            raise RuntimeError(USED_GRADIENT)
        return variables.ConstantVariable(None)  # not `create`, which shares it, as Dynamo writes its source into it

    return mock.patch.object(variables.TensorVariable, "method_attr_grad", method_attr_grad)


def _tensor_attributes_set() -> Patch:
    """Let Dynamo trace assignments of ``x.data`` and ``x.requires_grad``.

    The first is a write into x, where the value has its shape, dtype and device: AOTAutograd refuses the ``set_`` that
    Dynamo makes of it. The second changes nothing where the forward has computed x, and x is as it is to be.
    """
    variables: Any = torch._dynamo.variables
    kind, place = getattr(variables.builtin, "SetAttrBuiltinVariable", None), "_call_setattr"
    if kind is None:  # before torch 2.13
        kind, place = variables.BuiltinVariable, "call_setattr"
    original = getattr(kind, place)

    def call_setattr(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        owner, value = owner.realize(), value.realize()
        given = [each for each in (owner, value) if isinstance(each, variables.TensorVariable)]
        if len(given) == 2 and name.is_python_constant() and name.as_python_constant() == "data":
            tensors = [each.as_proxy().node.meta["example_value"] for each in given]
            if len({(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors}) == 1:
                into, source = (each.var_getattr(tx, "data") for each in given)
                return into.call_method(tx, "copy_", [source], {})
        is_computed = isinstance(owner, variables.TensorVariable) and owner.source is None
        if is_computed and name.as_python_constant() == "requires_grad" and value.is_python_constant():
            tensor = owner.as_proxy().node.meta["example_value"]
            if tensor.requires_grad is value.as_python_constant():
                return variables.ConstantVariable.create(None)
        return original(self, tx, owner, name, value)

    return mock.patch.object(kind, place, call_setattr)


def _numpy_numbers() -> Patch:
    """Let Dynamo take numbers of numpy as Python's: those of the model, and those that numpy computes from constants.

    It makes tensors of them, which are no numbers for ``float(...)`` or ``range(...)``. A method that Python's numbers
    do not have, such as `astype`, is numpy's.
    """
    variables: Any = torch._dynamo.variables
    builder, function, constant = variables.builder.VariableBuilder, variables.NumpyVariable, variables.ConstantVariable
    wrap, call = builder._wrap, function.call_function
    attribute, method = constant.const_getattr, constant.call_method

    def is_of_numpy(value: Any, name: str) -> bool:
        is_number = type(value) in (bool, int, float) and not hasattr(value, name)
        return is_number and callable(getattr(np.generic, name, None))

    def const_getattr(self: Any, tx: Any, name: str) -> Any:
        if is_of_numpy(self.value, name):
            raise NotImplementedError  # as for methods of Python's numbers: Dynamo calls `call_method`
        return attribute(self, tx, name)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not is_of_numpy(self.value, name) or not all(each.is_python_constant() for each in args) or kwargs:
            return method(self, tx, name, args, kwargs)
        found = getattr(np.asarray(self.value)[()], name)(*(each.as_python_constant() for each in args))
        return variables.VariableTracker.build(tx, found.item() if isinstance(found, np.generic) else found)

    def wrapped(self: Any, value: Any) -> Any:
        return wrap(self, value.item() if isinstance(value, (np.number, np.bool_)) else value)

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        of_numpy = getattr(self.value, "__module__", "") in ("numpy", "numpy.linalg")  # numpy.random draws
        given = [each.realize() for each in (*args, *kwargs.values())]
        if (of_numpy or isinstance(self.value, np.ufunc)) and all(each.is_python_constant() for each in given):
            named = {name: each.as_python_constant() for name, each in kwargs.items()}
            found = self.value(*(each.as_python_constant() for each in args), **named)
            if isinstance(found, (np.number, np.bool_, int, float)):
                return variables.ConstantVariable.create(found.item() if isinstance(found, np.generic) else found)
        return call(self, tx, args, kwargs)

    return together(
        mock.patch.object(builder, "_wrap", wrapped),
        mock.patch.object(function, "call_function", called),
        mock.patch.multiple(constant, const_getattr=const_getattr, call_method=call_method),
    )


def _names_of_torch() -> Patch:
    """Let Dynamo trace methods of names of torch's classes, as in ``type(weight).__module__.startswith("torch")``."""
    variables: Any = torch._dynamo.variables
    attribute = variables.GetAttrVariable
    call = attribute.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if isinstance(self.obj, variables.TorchInGraphFunctionVariable):
            found = getattr(self.obj.value, self.name, None)
            if isinstance(found, str):
                return variables.ConstantVariable.create(found).call_method(tx, name, args, kwargs)
        return call(self, tx, name, args, kwargs)

    return mock.patch.object(attribute, "call_method", call_method)


def _quantization_aware_layers() -> Patch:
    """Let Dynamo trace the layers and fake quantization of `torch.ao`, which it skips."""
    rules: Any = torch._dynamo.trace_rules
    folder, known = Path(torch.__file__).parent / "ao", rules.get_mod_inlinelist()
    traced = {(folder / name).as_posix() for name in ("nn/intrinsic/qat", "nn/qat", "quantization")}
    inlined = known | traced
    return mock.patch.object(rules, "get_mod_inlinelist", lambda: inlined)


def _functions_of_one_tensor() -> Patch:
    """Let Dynamo trace an `autograd.Function` that gets one tensor twice, as keys and values: by a view of it."""
    function: Any = torch._dynamo.variables.AutogradFunctionVariable
    apply = function.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        seen, own = list[Any](), list[Any]()
        for arg in (each.realize() for each in args):
            value = arg.as_proxy().node.meta.get("example_value") if arg.is_tensor() else None
            is_known = value is not None and any(value is each for each in seen)
            own.append(arg.call_method(tx, "view_as", [arg], {}) if is_known else arg)
            seen.append(value)
        return apply(self, tx, own, kwargs)

    return mock.patch.object(function, "call_apply", call_apply)


@contextlib.contextmanager
def _attention_kernels() -> Iterator[None]:
    """Trace `torch.backends.cuda.sdp_kernel`, which is deprecated, as `torch.nn.attention.sdpa_kernel`."""
    variables: Any = torch._dynamo.variables
    function = variables.TorchInGraphFunctionVariable
    call = function.call_function

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is not torch.backends.cuda.sdp_kernel:
            return call(self, tx, args, kwargs)
        named = {name: each.as_python_constant() for name, each in kwargs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated
            chosen = torch.backends.cuda.sdp_kernel(*(each.as_python_constant() for each in args), **named)
        with chosen:
            backends = torch.nn.attention._cur_sdpa_kernel_backends()
        return variables.ctx_manager.SDPAKernelVariable.create(tx, backends)

    with mock.patch.object(function, "call_function", called):
        yield


def _draws_and_clocks() -> Patch:
    """Refuse calls of Python's and numpy's generators of random numbers, and of clocks, in words of our own.

    Dynamo traces some draws of Python's generators, and makes constants of them: their nodes are marked as `drawn`, as
    only those that are used matter. A generator that the forward itself makes from a seed draws the same in each call.
    """
    variables: Any = torch._dynamo.variables
    translator: Any = torch._dynamo.symbolic_convert.InstructionTranslatorBase
    call, call_method = translator.call_function, variables.RandomVariable.call_method
    draw = variables.user_defined.call_random_fn

    def called(self: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        fn = fn.realize()
        if isinstance(fn, variables.RandomClassVariable) and not (args or kwargs):
            raise RuntimeError(f"random.Random() {DRAWN}")
        if not isinstance(fn, variables.NumpyVariable):  # which draws as torch does
            is_traced = isinstance(fn, variables.UserDefinedObjectVariable) and fn.is_supported_random()
            known = vars(fn)
            function = None if is_traced else known.get("value")
            _refuse_changing(getattr(function, "__self__", None), getattr(function, "__name__", ""), function)
            if "obj" in known:  # a method
                name = known.get("name") or getattr(known.get("descriptor"), "__name__", "")
                _refuse_changing(vars(fn.obj.realize()).get("value"), name)
        return call(self, fn, args, kwargs)

    def drawn(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
        return marked(draw(tx, function, args, kwargs), function.__name__)

    def method_called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = call_method(self, tx, name, args, kwargs)
        return found if self.source is None else marked(found, name)

    def marked(found: Any, name: str) -> Any:
        if getattr(found, "proxy", None) is not None:
            found.proxy.node.meta["drawn"] = f"random.{name}"
        return found

    return together(
        mock.patch.object(translator, "call_function", called),
        mock.patch.object(variables.user_defined, "call_random_fn", drawn),
        mock.patch.object(variables.RandomVariable, "call_method", method_called),
    )


def _refuse_changing(owner: Any, name: str, function: Any = None) -> None:
    """Raise RuntimeError for a function that gives another value in each call: the method `name` of its owner."""
    if getattr(function, "__module__", None) == "time":
        raise RuntimeError(f"time.{name} {CLOCK}")
    if isinstance(owner, type) and issubclass(owner, datetime.date) and name in ("now", "today", "utcnow"):
        raise RuntimeError(f"{owner.__name__}.{name} {CLOCK}")
    if isinstance(owner, random.Random):
        raise RuntimeError(f"random.{name} {DRAWN}")
    if isinstance(owner, np.random.Generator | np.random.RandomState):
        raise RuntimeError(f"numpy.random.{name} {DRAWN}")


def objects_as_arguments() -> Patch:
    """Dynamo traces objects that hold tensors, but then refuses them as arguments: let it see their tensors."""
    from torch._dynamo import eval_frame

    checked = eval_frame.check_user_input_output

    def check(values: list[Any], kind: Any) -> None:
        checked(pytree.tree_leaves(with_objects_opened(values, whole=True)), kind)

    return mock.patch.object(eval_frame, "check_user_input_output", check)


def inputs_made_leaves(inputs: Sequence[Tensor]) -> Patch:
    """Let Dynamo trace `requires_grad_()` of these inputs in a forward, as if they had required gradients before.

    So they have from then on. What was computed from one before is refused: it would get a gradient.
    """
    variable: Any = torch._dynamo.variables.TensorVariable
    original = variable.method_requires_grad_

    def requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        node = self.as_proxy().node
        given, value = node.meta.get("grapharg"), node.meta["example_value"]
        is_wanted = requires_grad is True or requires_grad.as_python_constant()
        if given is None or not is_wanted or value.requires_grad or node.users:
            return original(self, tx, requires_grad)
        if not any(given.example is each for each in inputs):
            return original(self, tx, requires_grad)
        for each in (given.example, value):
            each.requires_grad_()
        self.requires_grad = True
        return self

    return mock.patch.object(variable, "method_requires_grad_", requires_grad_)


def _only_captured_hooks(model: nn.Module) -> Patch:
    """Take away the hooks that the parallel module runs: backward hooks of the whole model, hooks for all modules.

    The former are restored with the model.
    """
    model._backward_hooks.clear()
    model._backward_pre_hooks.clear()
    of_all = {name: hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")}
    return together(*(mock.patch.dict(each, clear=True) for each in of_all.values() if isinstance(each, dict)))
