"""Forms of torch's functions and ops that a capture can trace, for those that it cannot trace, or traces badly.

Dynamo traces other Python code in place of a function (`_inlined_as`), or AOTAutograd other ops in place of an op
(`_traced_as`). The results are those of torch, whatever the numbers in the tensors are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._decomp import decompositions
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.modules.adaptive import _ASMoutput
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Patch = contextlib.AbstractContextManager[Any]
EMPTY_OBSERVER = "an observer for quantization has seen nothing, and a step does not give it a shape"


@contextlib.contextmanager
def together(*patches: Patch) -> Iterator[None]:
    """All patches as one: more than Python nests in one `with`."""
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def traceable_forms() -> Patch:
    """While this is entered, the functions and ops of this module are replaced."""
    return together(
        recurrent_layers(),
        _packed_sequences(),
        _ctc_losses(),
        mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive_log_softmax),
        _traced_as({torch.ops.aten.embedding_renorm_.default: _embedding_renorm}),
        _traced_as({torch.ops.aten.fused_moving_avg_obs_fake_quant.default: _fake_quantized}),
        _bincounts(),
        _inlined_as({checkpoint_sequential: _checkpoint_sequential}),
        _covariances(),
        _batch_norms(),
        _control_flow(),
    )


def _inlined_as(forms: Mapping[Callable[..., Any], Callable[..., Any]]) -> Patch:
    """Dynamo traces these functions as these forms of them."""
    function: Any = torch._dynamo.variables.UserFunctionVariable

    class Form(function):  # type: ignore[misc]
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return function(forms[value])

    return mock.patch.dict(torch._dynamo.trace_rules.get_torch_obj_rule_map(), dict.fromkeys(forms, Form))


@contextlib.contextmanager
def _traced_as(forms: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """AOTAutograd traces these composite ops as these forms of them."""
    keys = DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd
    with contextlib.ExitStack() as stack:
        for op, form in forms.items():
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
            stack.enter_context(mock.patch.dict(op.py_kernels, dict.fromkeys(keys, form)))
        yield


def recurrent_layers() -> Patch:
    """AOTAutograd traces a layer of an LSTM, GRU or RNN as one op over all steps, a cell as one step.

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
    return together(patched, _traced_as(forms))


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


def _packed_sequences() -> Patch:
    """Dynamo traces packed sequences as padded batches and lengths (`_Packed`).

    The number of rows of a packed sequence, and the rows of each step, depend on the lengths.
    """
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
    return together(
        _inlined_as({rnn.pack_padded_sequence: _pack_padded_sequence, rnn.pad_packed_sequence: _pad_packed_sequence}),
        *(mock.patch.object(kind, "forward", forward_of(kind, layers)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    )


def _bincounts() -> Patch:
    """Dynamo traces ``torch.bincount(x, minlength=n)`` as n sums, and asserts that no value is larger.

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

    def method_bincount(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if any(each.is_python_constant() and isinstance(each.as_python_constant(), int) for each in given):
            return variables.UserFunctionVariable(bincount).call_function(tx, [self, *args], kwargs)
        return None  # as Dynamo does

    return together(
        _inlined_as({torch.bincount: bincount}),
        mock.patch.object(variables.TensorVariable, "method_bincount", method_bincount, create=True),
    )


def _checkpoint_sequential(
    functions: Any, segments: int, input: Any, use_reentrant: bool | None = None, preserve_rng_state: bool = True
) -> Any:
    """Checkpoints of the parts, the last without one, as torch does it."""

    def part(modules: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def forward(value: Any) -> Any:
            for module in modules:
                value = module(value)
            return value

        return forward

    modules = [*functions]
    size = len(modules) // segments
    options: dict[str, Any] = {"use_reentrant": use_reentrant is not False, "preserve_rng_state": preserve_rng_state}
    for start in range(0, size * (segments - 1), size):
        input = checkpoint(part(modules[start : start + size]), input, **options)
    return part(modules[size * (segments - 1) :])(input)


def _adaptive_log_softmax(self: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
    """Each row's log probability out of those of all classes: torch's own gathers the rows of each cluster."""
    is_batch = target_.dim() > 0
    rows, targets = (input_, target_) if is_batch else (input_[None], target_[None])
    is_class = (targets >= 0) & (targets < self.n_classes)
    torch._assert_async(is_class.all(), f"Target values should be in [0, {self.n_classes - 1}]")
    output = self.log_prob(rows).gather(1, targets[:, None]).squeeze(1)
    return _ASMoutput(output if is_batch else output.squeeze(0), -output.mean())


def _embedding_renorm(table: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows of an embedding's table that a batch uses get at most this norm: row by row, in any layout of the table."""
    uses = table.new_zeros(len(table)).index_add(0, indices.flatten(), table.new_ones(indices.numel()))
    norms = torch.linalg.vector_norm(table, norm_type, 1, keepdim=True)
    is_long = (uses > 0)[:, None] & (norms > max_norm)
    return table.copy_(torch.where(is_long, table * (max_norm / (norms + 1e-7)), table))


def _fake_quantized(
    x: Tensor, observes: Tensor, quantizes: Tensor, running_min: Tensor, running_max: Tensor, scale: Tensor,
    zero_point: Tensor, averaging_const: float, quant_min: int, quant_max: int, ch_axis: int,
    per_row_fake_quant: bool = False, symmetric_quant: bool = False,
) -> Tensor:  # fmt: skip
    """The fake quantization of `torch.ao`: its op gets the smallest and the largest elements alone.

    All else is element by element. The gradient passes where the level is one of the quantized ones.
    """
    if not running_min.numel():
        raise RuntimeError(EMPTY_OBSERVER)
    others = [dim for dim in range(x.dim()) if not per_row_fake_quant or dim != ch_axis % x.dim()]
    ends = torch.stack([x.detach().amin(others), x.detach().amax(others)], -1)
    torch.ops.aten._fused_moving_avg_obs_fq_helper(
        ends, observes, quantizes, running_min, running_max, scale, zero_point, averaging_const, quant_min, quant_max,
        0, per_row_fake_quant, symmetric_quant,
    )  # fmt: skip
    shape = [1 if dim in others else -1 for dim in range(x.dim())]
    steps, zeros = scale.reshape(shape), zero_point.reshape(shape)
    level = torch.round(x.detach() * (1 / steps)) + zeros
    passed = torch.where((level >= quant_min) & (level <= quant_max), x, 0)
    quantized = (level.clamp(quant_min, quant_max) - zeros) * steps + (passed - passed.detach())
    return torch.where(quantizes.reshape([1] * x.dim()) == 1, quantized, x)


def _ctc_losses() -> Patch:
    """A CTC loss is traced as one op whose results have the same sizes for any lengths."""

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


def _covariances() -> Patch:
    """Torch.cov and torch.corrcoef are traced without the checks of their weights' values."""

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


def _batch_norms() -> Patch:
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

    return together(*(mock.patch.object(kind, "forward", forward) for kind in (_BatchNorm, nn.SyncBatchNorm)))


def _control_flow() -> Patch:
    """Branches and loops in place of the ops of torch's control flow."""
    forms = {"cond": ("cond_op", _cond), "scan": ("scan_op", _scan), "map": ("map_impl", _map)}
    forms["while_loop"] = "while_loop_op", _while
    modules = {name: sys.modules[f"torch._higher_order_ops.{name}"] for name in forms}  # hidden by functions
    return together(*(mock.patch.object(modules[name], *form) for name, form in forms.items()))


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
