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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch.distributions import kl
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from shardweave.compiler.branches import branches_selected, raises_as_asserts
from shardweave.ir import with_objects_opened

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
    "np.random.": "Draw with torch (torch.rand, torch.randn), or pass what you have drawn to the call.",
    "print(": "Take the print out (what a logger or warnings.warn says is left out by itself).",
}
"""The way out for a source line that stops a capture, by a word in that line."""


@contextlib.contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """While this runs, Dynamo skips logging, and traces recurrent layers and the models of `transformers`.

    The model is restored afterwards.
    """
    # Dynamo lists torch's functions at their first use, and again when its caches were cleared: list the real ones.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    contexts = (
        torch._dynamo.config.patch(ignore_logging_functions=_logging_functions(), allow_rnn=True),
        _builtins_known(),
        _as_compiled(),
        recurrent_layers(),
        _packed_sequences(),
        _ctc_losses(),
        _bincounts(),
        _sequential_checkpoints(),
        _covariances(),
        _kl_divergences(),
        _batch_norms(),
        _without_checks(),
        branches_selected(model),
        raises_as_asserts(),
        _output_hooks(model),
        _no_input_gradients(model),
        _only_captured_hooks(model),
        _inner_gradients(),
        _data_written_in_place(),
        _numpy_numbers(),
        mock.patch.object(sys.modules["torch._higher_order_ops.cond"], "cond_op", _cond),
        mock.patch.object(sys.modules["torch._higher_order_ops.scan"], "scan_op", _scan),
        mock.patch.object(sys.modules["torch._higher_order_ops.map"], "map_impl", _map),
        mock.patch.object(sys.modules["torch._higher_order_ops.while_loop"], "while_loop_op", _while),
        # ``self.count += 1`` registers an `nn.Buffer` again, which Dynamo does not trace; other buffers are put back.
        mock.patch.object(nn.modules.module, "Buffer", type("_NoBuffer", (), {})),
    )
    with contextlib.ExitStack() as stack:
        for each in contexts:  # more than Python nests in one `with`
            stack.enter_context(each)
        yield


def _logging_functions() -> set[Callable[..., Any]]:
    """All methods of loggers that log, also those that libraries add (`warning_once`), and `warnings.warn`."""
    kept: set[Callable[..., Any]] = set(torch._dynamo.config.ignore_logging_functions)
    loggers = [value for value in logging.Logger.manager.loggerDict.values() if isinstance(value, logging.Logger)]
    for kind in {base for logger in [logging.getLogger(), *loggers] for base in type(logger).__mro__} - {object}:
        kept |= {value for name, value in vars(kind).items() if callable(value) and not name.startswith(("_", "get"))}
    return kept | {warnings.warn}


@contextlib.contextmanager
def recurrent_layers() -> Iterator[None]:
    """While this runs, AOTAutograd traces a layer of an LSTM, GRU or RNN as one op over all steps, a cell as one step.

    Torch's decomposition has ops of their own for each step, and loses the dropout between layers. An LSTM with
    projections has such ops here too. Torch's cells are fused ops on CUDA.
    """
    helper: Callable[..., Any] = decompositions._rnn_helper

    def layers(
        x: Tensor, hidden: Any, params: Any, biases: bool, count: int, dropout: float, train: bool, both: bool,
        batch_first: bool, layer: Callable[..., Any],
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
        """Torch's own helper, a layer at a time."""
        finals: list[Any] = []
        ways = 2 if both else 1
        for first in range(0, ways * count, ways):
            if first and train and dropout:
                x = torch.dropout(x, dropout, True)
            mine = hidden[first : first + ways], params[first : first + ways]
            x, final = helper(x, *mine, biases, 1, 0.0, train, both, batch_first, layer)
            finals += final
        return x, finals

    # Of a packed sequence (`_Packed`), the padded batch and the rows' lengths come as the data and the batch sizes.

    def one_layer(
        x: Tensor, hidden: Tensor, params: Any, has_biases: bool, hidden_fn: str, reverse: bool = False,
        batch_sizes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        states = steps(x, hidden.unsqueeze(0), params, has_biases, hidden_fn, reverse, batch_sizes)
        return states[0], states[0, 0 if reverse else -1]

    def one_layer_lstm(
        x: Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False, batch_sizes: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if len(params) in (3, 5):
            return projected(x, hidden, params, has_biases, reverse, batch_sizes)
        states = steps(x, torch.stack([*hidden]), params, has_biases, "lstm", reverse, batch_sizes)
        last = 0 if reverse else -1
        return states[0], (states[0, last], states[1, last])

    def projected(
        x: Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool, lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """With a projection, the last parameter: step by step."""
        bias, state_bias = params[2:4] if has_biases else (None, None)
        if lengths is not None:  # what is behind a row's end may be infinite
            x = torch.where((torch.arange(len(x), device=x.device)[:, None] < lengths)[..., None], x, 0)
        igates, (output, state), found = nn.functional.linear(x, params[0], bias), hidden, list[Tensor]()
        for step in reversed(range(len(x))) if reverse else range(len(x)):
            gates = igates[step] + nn.functional.linear(output, params[1], state_bias)
            take, keep, new, show = gates.chunk(4, 1)
            after = keep.sigmoid() * state + take.sigmoid() * new.tanh()
            shown = nn.functional.linear(show.sigmoid() * after.tanh(), params[-1])
            if lengths is not None:  # a row that has ended stays as it is
                longer = (lengths > step)[:, None]
                shown, after = torch.where(longer, shown, output), torch.where(longer, after, state)
            output, state = shown, after
            found.append(output)
        return torch.stack(found[::-1] if reverse else found), (output, state)

    def steps(
        x: Tensor, initial: Tensor, params: Any, has_biases: bool, cell: str, reverse: bool,
        lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        bias, state_bias = params[2:4] if has_biases else (None, None)
        igates = nn.functional.linear(x, params[0], bias)
        given = (None if value is None else value.to(igates.dtype) for value in (params[1], state_bias, initial))
        states: Tensor = torch.ops.shardweave.recurrence(igates, *given, lengths, cell, reverse)
        return states

    def lstm_cell(x: Tensor, hidden: Any, *params: Any) -> tuple[Tensor, Tensor]:
        states = steps(x[None], torch.stack([*hidden]), [*params, None, None], True, "lstm", False)
        return states[0, 0], states[1, 0]

    def gru_cell(x: Tensor, hidden: Tensor, *params: Any) -> Tensor:
        return steps(x[None], hidden[None], [*params, None, None], True, "gru", False)[0, 0]

    patched = mock.patch.multiple(
        decompositions,
        _rnn_helper=layers,
        one_layer_rnn=one_layer,
        one_layer_lstm=one_layer_lstm,
        one_layer_rnn_data=one_layer,
        one_layer_lstm_data=one_layer_lstm,
        select_one_layer_lstm_function=lambda *_: one_layer_lstm,  # oneDNN's needs a workspace that a graph lacks
        rnn_cell=lambda nonlinearity: nonlinearity.__name__,
        rnn_cell_data=lambda nonlinearity: nonlinearity.__name__,
        gru_cell="gru",
        gru_cell_data="gru",
    )
    forms = {torch.ops.aten.lstm_cell.default: lstm_cell, torch.ops.aten.gru_cell.default: gru_cell}
    with patched, _traced_as(forms):
        yield


class _Packed(rnn.PackedSequence):
    """Stands for a `PackedSequence` in a capture: the padded batch, steps first, and the length of each row.

    `longest` is the greatest length where that is known. `order` is that of the rows in a packed sequence.
    """

    def __new__(cls, *_: Any) -> _Packed:
        return tuple.__new__(cls, ())

    def __init__(self, padded: Tensor, lengths: Tensor, longest: int | None, order: Tensor | None) -> None:
        self.padded, self.lengths, self.longest, self.order = padded, lengths, longest, order

    def padding(self) -> Tensor:
        """Where the padded batch has no elements of a row."""
        steps = torch.arange(len(self.padded), device=self.padded.device)[:, None]
        return steps >= self.lengths.to(self.padded.device)

    def to(self, *args: Any, **kwargs: Any) -> _Packed:
        return _Packed(self.padded.to(*args, **kwargs), self.lengths, self.longest, self.order)

    @property
    def data(self) -> Tensor:
        padded, inside = self.padded, ~self.padding()
        if self.order is not None:
            order = self.order.to(padded.device)
            padded, inside = padded[:, order], inside[:, order]
        return padded[inside]

    @property
    def batch_sizes(self) -> Tensor:
        raise ValueError(_NO_PARTS)

    sorted_indices = unsorted_indices = batch_sizes

    def __getitem__(self, index: Any) -> Any:
        return self.data if index == 0 else self.batch_sizes

    def __iter__(self) -> Iterator[Any]:
        raise ValueError(_NO_PARTS)


_NO_PARTS = (
    "a `PackedSequence` has its data alone where it is captured, no batch sizes or indices, and is made by "
    "pack_padded_sequence, pack_sequence and recurrent layers only"
)


def _filled(padded: Tensor, where: Tensor, value: float) -> Tensor:
    return padded.masked_fill(where.reshape(where.shape + (1,) * (padded.dim() - 2)), value)


def _pack_padded_sequence(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> _Packed:
    padded, longest = input.transpose(0, 1) if batch_first else input, None
    steps, rows = padded.shape[:2]
    if not isinstance(lengths, Tensor):
        if all(statically_known_true(each > 0) and statically_known_true(each <= steps) for each in lengths):
            longest = max(lengths)
        lengths = torch.tensor(lengths)
    lengths = lengths.long()
    if lengths.shape != (rows,):
        raise ValueError(f"pack_padded_sequence: {rows} rows have no lengths of shape {tuple(lengths.shape)}")
    if longest is None:
        is_possible = (lengths > 0) & (lengths <= steps)
        torch._assert_async(is_possible.all(), f"pack_padded_sequence: a length is not between 1 and {steps}")
    order = None if enforce_sorted else torch.sort(lengths, descending=True)[1]
    packed = _Packed(padded, lengths, longest, order)
    packed.padded = _filled(padded, packed.padding(), 0)  # so that no infinite padding reaches a gradient
    return packed


def _pad_packed_sequence(
    sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Tensor, Tensor]:
    if not isinstance(sequence, _Packed):
        raise ValueError(_NO_PARTS)
    steps, longest = len(sequence.padded), sequence.longest
    size = total_length or longest or steps
    if longest is not None and size < longest:
        raise ValueError(f"total_length={size} is less than the longest length, {longest}")
    if total_length is None and longest is None:
        lengths = sequence.lengths
        fills = (lengths == steps).sum() > 0  # a sum: micro-batches know those of inputs over the whole batch
        torch._assert_async(
            (fills | (lengths < 0)).all(),  # a flag for each row, which belongs to the lengths
            f"pad_packed_sequence: the step is compiled for a longest sequence of {steps} steps, as many as the padded "
            "batch has, and this batch has shorter ones only: pass total_length, or cut it to its longest sequence",
        )
    elif size < steps and longest is None:
        torch._assert_async(
            (sequence.lengths <= size).all(), f"pad_packed_sequence: a sequence has more steps than total_length={size}"
        )
    padded = _filled(sequence.padded, sequence.padding(), padding_value)[:size]
    if size > steps:
        padded = torch.cat([padded, padded.new_full((size - steps, *padded.shape[1:]), padding_value)])
    return padded.transpose(0, 1) if batch_first else padded, sequence.lengths


@contextlib.contextmanager
def _packed_sequences() -> Iterator[None]:
    """While this runs, Dynamo traces packed sequences as padded batches and lengths (`_Packed`).

    The number of rows of a packed sequence, and the rows of each step, depend on the lengths.
    """
    dynamo: Any = torch._dynamo
    function: Any = dynamo.variables.UserFunctionVariable
    forms = {rnn.pack_padded_sequence: _pack_padded_sequence, rnn.pad_packed_sequence: _pad_packed_sequence}

    class Form(function):  # type: ignore[misc]
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return function(forms[value])

    def forward_of(kind: type[nn.RNNBase], layers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
        original = kind.forward

        def forward(self: Any, input: Any, hx: Any = None) -> Any:
            if not isinstance(input, rnn.PackedSequence):
                return original(self, input, hx)
            if not isinstance(input, _Packed):
                raise ValueError(_NO_PARTS)
            self._update_flat_weights()
            padded = input.padded
            if hx is None:
                count = self.num_layers * (2 if self.bidirectional else 1)
                hx = padded.new_zeros(count, padded.shape[1], self.hidden_size)
                shown = padded.new_zeros(count, padded.shape[1], self.proj_size) if self.proj_size else hx
                hx = (shown, hx) if self.mode == "LSTM" else hx
            self.check_forward_args(padded.transpose(0, 1) if self.batch_first else padded, hx, None)
            options = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional
            found = layers[self.mode](padded, input.lengths.to(padded.device), hx, self._flat_weights, *options)
            last = (found[1], found[2]) if self.mode == "LSTM" else found[1]
            return _Packed(found[0], input.lengths, input.longest, input.order), last

        return forward

    vf: Any = torch._VF
    layers = {"LSTM": vf.lstm, "GRU": vf.gru, "RNN_TANH": vf.rnn_tanh, "RNN_RELU": vf.rnn_relu}
    with contextlib.ExitStack() as stack:
        rules = dynamo.trace_rules.get_torch_obj_rule_map()
        stack.enter_context(mock.patch.dict(rules, dict.fromkeys(forms, Form)))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(mock.patch.object(kind, "forward", forward_of(kind, layers)))
        yield


@contextlib.contextmanager
def _traced_as(forms: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """While this runs, composite ops are traced as these forms of them."""
    keys = DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd
    with contextlib.ExitStack() as stack:
        for op, form in forms.items():
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, dict.fromkeys(keys, form)))
        yield


@contextlib.contextmanager
def _bincounts() -> Iterator[None]:
    """While this runs, Dynamo traces ``torch.bincount(x, minlength=n)`` as n sums, and asserts that no value is larger.

    Torch's own result has as many numbers as the largest value says, so that a ``tolist()`` of it has no known length.
    """
    variables: Any = torch._dynamo.variables

    def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength:
            return x.bincount(weights)
        torch._assert_async((x < minlength).all(), f"bincount: a value is not less than minlength={minlength}")
        if weights is None:
            weights = torch.ones_like(x, dtype=torch.long)
        elif weights.dtype != torch.float32:
            weights = weights.double()
        return weights.new_zeros(minlength).index_add(0, x, weights)

    class Form(variables.UserFunctionVariable):  # type: ignore[misc]
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return variables.UserFunctionVariable(bincount)

    def method_bincount(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(each.is_python_constant() and isinstance(each.as_python_constant(), int) for each in given):
            return variables.UserFunctionVariable(bincount).call_function(tx, [self, *args], kwargs)
        return None  # as Dynamo does

    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()
    with (
        mock.patch.dict(rules, {torch.bincount: Form}),
        mock.patch.object(variables.TensorVariable, "method_bincount", method_bincount, create=True),
    ):
        yield


@contextlib.contextmanager
def _sequential_checkpoints() -> Iterator[None]:
    """While this runs, Dynamo traces `checkpoint_sequential`, which it refuses, as checkpoints of its parts."""

    def part(modules: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def forward(value: Any) -> Any:
            for module in modules:
                value = module(value)
            return value

        return forward

    def sequential(
        functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True
    ) -> Any:
        modules = [*functions]
        size = len(modules) // segments
        for start in range(0, size * (segments - 1), size):
            input = checkpoint(
                part(modules[start : start + size]),
                input,
                use_reentrant=use_reentrant is not False,
                preserve_rng_state=preserve_rng_state,
            )
        return part(modules[size * (segments - 1) :])(input)

    variables: Any = torch._dynamo.variables

    class Form(variables.UserFunctionVariable):  # type: ignore[misc]
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return variables.UserFunctionVariable(sequential)

    with mock.patch.dict(torch._dynamo.trace_rules.get_torch_obj_rule_map(), {checkpoint_sequential: Form}):
        yield


def _ctc_losses() -> contextlib.AbstractContextManager[None]:
    """While this runs, a CTC loss is traced as one op whose results have the same sizes for any lengths."""

    def ctc_loss(
        log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, blank: int = 0, reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        if log_probs.dim() == 2:  # one sequence
            row = ctc_loss(log_probs[:, None], targets[None], inputs, lengths, blank, reduction, zero_infinity)
            return row.squeeze()
        if targets.dim() == 1 and not isinstance(lengths, Tensor):
            rows = [nn.functional.pad(row, (0, max(lengths) - len(row))) for row in torch.split(targets, [*lengths])]
            targets = torch.stack(rows)
        inputs, lengths = (_numbers(value, targets) for value in (inputs, lengths))
        counted = lengths
        if targets.dim() == 1:
            targets, counted = _target_rows(targets, lengths, len(log_probs) + 1)
        op = torch.ops.shardweave.ctc_loss.default
        loss: Tensor = op(log_probs, targets, inputs, counted, blank, zero_infinity)[0]
        if zero_infinity:
            loss = torch.where(loss == torch.inf, torch.zeros_like(loss), loss)
        if reduction == 1:
            loss = (loss / lengths.clamp_min(1).to(loss.dtype)).mean()
        return loss.sum() if reduction == 2 else loss

    aten = torch.ops.aten.ctc_loss
    return _traced_as({aten.Tensor: ctc_loss, aten.IntList: ctc_loss})


def _numbers(values: Any, like: Tensor) -> Tensor:
    """Lengths as a tensor."""
    if isinstance(values, Tensor):
        return values.reshape(-1).long()
    return torch.cat([like.new_full((1,), value, dtype=torch.long) for value in values])


def _target_rows(targets: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Concatenated targets as rows, and the lengths of these: of `longest` labels, if a target has so many or more.

    A target that is longer than its input has no alignment, however long it is.
    """
    columns = torch.arange(min(longest, len(targets)), device=targets.device)
    places = (lengths.cumsum(0) - lengths)[:, None] + columns
    return targets[places.clamp(max=len(targets) - 1)], lengths.clamp(max=longest)


def _covariances() -> contextlib.AbstractContextManager[None]:
    """While this runs, torch.cov and torch.corrcoef are traced without the checks of their weights' values."""

    def cov(
        x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
    ) -> Tensor:
        x = x.reshape(1, -1) if x.dim() < 2 else x
        if fweights is None and aweights is None:
            centered = x - x.mean(1, keepdim=True)
            return (centered @ centered.mH / max(x.shape[1] - correction, 0)).squeeze()
        given = [each.to(x.dtype) for each in (fweights, aweights) if each is not None]
        weights = given[0] if len(given) == 1 else given[0] * given[1]
        total = weights.sum()
        centered = x - (x * weights).sum(1, keepdim=True) / total
        ratio = 1 if aweights is None else (weights * aweights.to(x.dtype)).sum() / total
        count = total - correction * ratio
        return ((centered * weights) @ centered.mH / count.clamp_min(0)).squeeze()

    def corrcoef(x: Tensor) -> Tensor:
        found = cov(x)
        if not found.dim():
            return found / found
        variances = found.diagonal()
        deviations = (variances.real if found.is_complex() else variances).sqrt()
        found = found / deviations[:, None] / deviations
        return found if found.is_complex() else found.clamp(-1, 1)

    aten = torch.ops.aten
    return _traced_as({aten.cov.default: cov, aten.corrcoef.default: corrcoef})


@contextlib.contextmanager
def _kl_divergences() -> Iterator[None]:
    """Look up the functions of `kl_divergence` for all pairs of distributions: Dynamo does not trace the search."""
    kinds: list[type[torch.distributions.Distribution]] = [torch.distributions.Distribution]
    for kind in kinds:  # which grows
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pairs that are ambiguous
        found = {(p, q): kl._dispatch_kl(p, q) for p in kinds for q in kinds}  # type: ignore[no-untyped-call]
    with mock.patch.dict(kl._KL_MEMOIZE, found):
        yield


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
def _as_compiled() -> Iterator[None]:
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

    with (
        mock.patch.object(functional_export, "_compiling_state_context", compiling),
        mock.patch.object(torch.backends.cudnn, "flags", _no_flags),
    ):
        yield


def _no_flags(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
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


@contextlib.contextmanager
def _batch_norms() -> Iterator[None]:
    """Let batch norms with ``momentum=None``, whose momentum is one over the number of batches, compute it as a tensor.

    Their own forward makes a Python number of it. A `SyncBatchNorm` is traced as a batch norm, as the step is that of
    the global batch.
    """
    original = _BatchNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or not self.track_running_stats:
            return original(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        result = nn.functional.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            for tracked, found in ((self.running_mean, mean), (self.running_var, variance)):
                tracked.add_((found - tracked) / self.num_batches_tracked)
        return result

    with (
        mock.patch.object(_BatchNorm, "forward", forward),
        mock.patch.object(nn.SyncBatchNorm, "forward", forward),
    ):
        yield


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
def _inner_gradients() -> Iterator[None]:
    """Let Dynamo trace `torch.autograd.grad` in a forward, also of tensors that the forward makes leaves.

    It refuses outputs that are computed from such a leaf, as they would not lead back to it; nothing outside can ask
    for that. Torch before 2.13 may lack the setting or the check.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):
            stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        graph: Any = torch._dynamo.output_graph.OutputGraph
        check = "_check_requires_grad_intermediate_outputs"
        stack.enter_context(mock.patch.object(graph, check, lambda *_: None, create=True))
        yield


@contextlib.contextmanager
def _data_written_in_place() -> Iterator[None]:
    """Let Dynamo trace ``x.data = value`` as a write into x, where the value has its shape, dtype and device.

    AOTAutograd refuses the ``set_`` that Dynamo makes of it.
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
        return original(self, tx, owner, name, value)

    with mock.patch.object(kind, place, call_setattr):
        yield


def _cond(condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """`torch.cond` as a branch, of which `branches_selected` makes ops."""
    if condition:
        return true(*operands)
    return false(*operands)


def _scan(combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional_inputs: Any) -> Any:
    """`scan` of torch's control flow as a loop."""
    carry, found, rows = init, None, []
    for index in range(xs[0].shape[0]):
        found, row = combine(*carry, *[x[index] for x in xs], *additional_inputs)
        carry = pytree.tree_leaves(found)
        rows.append(row)
    return found, pytree.tree_map(lambda *each: torch.stack(each), *rows)


def _map(function: Callable[..., Any], xs: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    """`map` of torch's control flow as a loop."""
    rows = [function(*[x[index] for x in xs], *arguments) for index in range(xs[0].shape[0])]
    return pytree.tree_map(lambda *each: torch.stack(each), *rows)


def _while(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, additional_inputs: Any) -> Any:
    """`while_loop` of torch's control flow as a loop: its condition must be known while tracing, as of a counter."""
    while condition(*carried, *additional_inputs):
        carried = body(*carried, *additional_inputs)
    return carried


@contextlib.contextmanager
def _numpy_numbers() -> Iterator[None]:
    """Let Dynamo take numbers of numpy as Python's: those of the model, and those that numpy computes from constants.

    It makes tensors of them, which are no numbers for ``float(...)`` or ``range(...)``.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    variables: Any = torch._dynamo.variables
    builder, function = variables.builder.VariableBuilder, variables.NumpyVariable
    wrap, call = builder._wrap, function.call_function

    def wrapped(self: Any, value: Any) -> Any:
        return wrap(self, value.item() if isinstance(value, (numpy.number, numpy.bool_)) else value)

    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        of_numpy = getattr(self.value, "__module__", "") in ("numpy", "numpy.linalg")  # numpy.random draws
        given = [each.realize() for each in (*args, *kwargs.values())]
        if (of_numpy or isinstance(self.value, numpy.ufunc)) and all(each.is_python_constant() for each in given):
            named = {name: each.as_python_constant() for name, each in kwargs.items()}
            found = self.value(*(each.as_python_constant() for each in args), **named)
            if isinstance(found, (numpy.number, numpy.bool_, int, float)):
                return variables.ConstantVariable.create(found.item() if isinstance(found, numpy.generic) else found)
        return call(self, tx, args, kwargs)

    with mock.patch.object(builder, "_wrap", wrapped), mock.patch.object(function, "call_function", called):
        yield


def objects_as_arguments() -> contextlib.AbstractContextManager[Any]:
    """Dynamo traces objects that hold tensors, but then refuses them as arguments: let it see their tensors."""
    from torch._dynamo import eval_frame

    checked = eval_frame.check_user_input_output

    def check(values: list[Any], kind: Any) -> None:
        checked(pytree.tree_leaves(with_objects_opened(values, whole=True)), kind)

    return mock.patch.object(eval_frame, "check_user_input_output", check)


@contextlib.contextmanager
def inputs_made_leaves(inputs: Sequence[Tensor]) -> Iterator[None]:
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

    with mock.patch.object(variable, "method_requires_grad_", requires_grad_):
        yield


@contextlib.contextmanager
def _only_captured_hooks(model: nn.Module) -> Iterator[None]:
    """Take away the hooks that the parallel module runs: backward hooks of the whole model, hooks for all modules.

    The former are restored with the model.
    """
    model._backward_hooks.clear()
    model._backward_pre_hooks.clear()
    with contextlib.ExitStack() as stack:
        for name, hooks in vars(nn.modules.module).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                stack.enter_context(mock.patch.dict(hooks, clear=True))
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
