"""The kernels of a generated graph's compute: Inductor compiles them, or one kernel of torch computes several ops.

The order of collectives stands. With Inductor, a bound graph is cut at everything that has to stay in its place: starts
and waits of collectives, random ops under their seeds, the package's own ops. What lies between two cuts is a region: a
run of aten ops. Each region becomes one call, and nothing else moves.

A region is compiled at its first call, for the memory order that its inputs really have: at some ops it differs from
that of fake tensors. Equal regions, such as those of equal layers, are compiled once.

Without Inductor, products add their biases, neighbouring gradients of a convolution are computed together, and ops are
called by torch's Python functions (`combine_ops`).

This module alone touches Inductor, and its interfaces are private.
"""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from shardweave.ir import META, ParallelError
from shardweave.runtime.execute import boxed
from shardweave.runtime.grad_accumulation import Boxed

aten = torch.ops.aten

InductorMode = Literal["auto"] | bool
"""The values of `Options.inductor`."""


@dataclass
class RegionCompiler:
    """Replaces the regions of graphs by calls that Inductor compiles.

    Parameters
    ----------
    mode : "auto" or bool
        Whether it does. ``"auto"`` does on GPUs, and leaves a region as it is, after one warning, if Inductor fails.
    device_type : str
        The device of the graphs.
    """

    mode: InductorMode
    device_type: str
    compiled: dict[Hashable, Boxed] = field(default_factory=dict, init=False)
    """What was compiled: one entry for all equal regions."""
    _has_warned: bool = field(default=False, init=False)

    @property
    def is_on(self) -> bool:
        """Whether graphs are compiled. On CPUs compiled steps take as long as plain ones, so ``"auto"`` is off."""
        return self.device_type != "cpu" if self.mode == "auto" else self.mode

    def __call__(self, constants: fx.GraphModule, graph: fx.Graph) -> fx.Graph:
        """Replace the regions of `graph`, or combine its ops. It is changed and returned.

        Parameters
        ----------
        constants : GraphModule
            Holds the tensors of `graph`.
        graph : Graph
            Bound to process groups.
        """
        if self.is_on:
            _move_items(graph)
            for number, nodes in enumerate([*_regions(graph)]):
                _replace(constants, graph, nodes, f"region{number}", self)
            graph.lint()
            return graph
        return combine_ops(graph)

    def compile(self, region: _Region, arguments: Sequence[Any]) -> Boxed:
        """The compiled code of a region, for arguments like these."""
        key = region.code, tuple(map(_described, arguments))
        if key not in self.compiled:
            try:
                self.compiled[key] = _compiled(region.plain, arguments)
            except Exception as error:  # Inductor fails in many ways: no compiler, an op without a lowering
                message = f"Inductor cannot compile {region.in_words(error)}: {_first_line(error)}"
                if self.mode != "auto":
                    raise ParallelError(
                        f"{message}. Compile with Options(inductor=False), or with 'auto', which runs such ops as they "
                        "are on GPUs"
                    ) from error
                if not self._has_warned:
                    warnings.warn(
                        f"{message}. These ops run as they are, and others that fail likewise; "
                        "Options(inductor=False) compiles none",
                        stacklevel=2,
                    )
                    self._has_warned = True
                self.compiled[key] = region.plain
        return self.compiled[key]


@dataclass(eq=False)
class _Region:
    """A callable in the place of the ops of a region. It takes its arguments in one list, and empties it."""

    name: str
    plain: Boxed
    """The ops as they are."""
    code: str
    """Their Python code; equal for equal regions."""
    ops: Sequence[tuple[str, str]]
    """Each op, and the user's module that it is of."""
    compiler: RegionCompiler
    _run: Boxed | None = None
    _seen: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.__name__ = self.name  # by which generated code calls it

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        seen = tuple([x.stride() if isinstance(x, torch.Tensor) else x for x in arguments])
        if self._run is None or seen != self._seen:  # shapes and dtypes are those of the step
            self._run, self._seen = self.compiler.compile(self, arguments), seen
        return self._run(arguments)

    def in_words(self, error: Exception) -> str:
        """The op that Inductor's `error` names, or all kinds of ops; with their modules."""
        text = str(error)
        named = [each for each in self.ops if f"{each[0]} " in f"{text} ".replace("\n", " ")]
        found = named[:1] or self.ops
        kinds, modules = ({*column} - {""} for column in zip(*found, strict=True))
        where = f" of {_list(modules)}" if modules else ""
        return f"{'' if named else 'a region of '}{_list(kinds)}{where}"


def _list(names: Collection[str]) -> str:
    few = sorted(names)[:5]
    return ", ".join(few) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _described(value: Any) -> Hashable:
    """What compiled code depends on."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value), value


def _is_compute(node: fx.Node) -> bool:
    """Whether a node calls an op of torch that changes nothing but its result."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return bool(target._schema.returns) and not target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether a node computes nothing: it takes another view of a tensor, or one of several results."""
    target: Any = node.target
    return target is operator.getitem or any(value.alias_info is not None for value in target._schema.returns)


def _move_items(graph: fx.Graph) -> None:
    """Take the results of ops with several results right behind these ops, so that they are of one region."""
    last: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is operator.getitem and _is_compute(node.args[0]):
            last.get(node.args[0], node.args[0]).append(node)
            last[node.args[0]] = node


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The regions of a graph, in order. One op alone is none: it has nothing to be fused with."""
    region: list[fx.Node] = []
    for node in graph.nodes:
        is_item = node.target is operator.getitem
        if _is_compute(node.args[0] if is_item else node):
            region.append(node)
        elif node.op in ("placeholder", "get_attr") or is_item or _is_number(node):
            continue  # it may stay where it is, before the region
        else:
            if sum(not _is_view(each) for each in region) > 1:
                yield region
            region = []


def _is_number(node: fx.Node) -> bool:
    """Whether a node does arithmetic on this rank's coordinates."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == operator.add.__module__


def _arguments(*values: Any) -> list[Any]:
    """The arguments of a region in one list, which holds them alone once the graph has let them go."""
    return list(values)


def _replace(
    constants: fx.GraphModule, graph: fx.Graph, nodes: Sequence[fx.Node], name: str, compiler: RegionCompiler
) -> None:
    """Replace the `nodes` of a region by one call."""
    # 1. Copy the region. Its nodes get names of their own, so that equal regions have equal code.
    inside = set(nodes)
    inputs = list(dict.fromkeys(leaf for node in nodes for leaf in node.all_input_nodes if leaf not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    copy = fx.Graph()
    copies = {node: copy.placeholder(f"x{index}") for index, node in enumerate(inputs)}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda leaf: copies[leaf])
        copies[node] = copy.create_node("call_function", node.target, args, kwargs)
    copy.output([copies[node] for node in outputs])
    code = str(copy.python_code("self").src)
    known = [(node.meta.get(META), str(node.target)) for node in nodes if not _is_view(node)]
    ops = [(target, "" if info is None else info.op) for info, target in known]
    region = _Region(name, boxed(constants, copy), code, ops, compiler)
    # 2. Call it where its last op was.
    with graph.inserting_after(nodes[-1]):
        packed = graph.call_function(_arguments, tuple(inputs))
    with graph.inserting_after(packed):
        call = last = graph.call_function(region, (packed,))
    for index, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, index))
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _compiled(plain: Boxed, arguments: Sequence[Any]) -> Boxed:
    """Inductor's code of a region. Arguments that are no tensors become constants."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    # 1. Trace the region in the ops that Inductor lowers. Tensors of the step are traced as fake ones.
    is_tensor = [isinstance(value, torch.Tensor) for value in arguments]

    def flat(*tensors: torch.Tensor) -> Sequence[Any]:
        given = iter(tensors)
        return plain([next(given) if known else value for known, value in zip(is_tensor, arguments, strict=True)])

    given = [value.detach() for value in arguments if isinstance(value, torch.Tensor)]
    with _disable_current_modes(), torch.no_grad():
        traced = make_fx(flat, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
        # 2. Compile it. Its results keep the memory order that the ops give them.
        output = traced.graph.output_node()
        results: Any = output.args[0]
        tensors = tuple(value for value in results if isinstance(value, fx.Node))
        output.args = (tensors,)
        output.meta["user_visible_output_idxs"] = list(range(len(tensors)))
        traced.recompile()
        fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
        code: Callable[[list[Any]], Sequence[Any]] = compile_fx_inner(traced, fakes)
    # 3. Put numbers among the results back to their places.
    constants = [None if isinstance(value, fx.Node) else (value,) for value in results]

    def run(arguments: list[Any]) -> Sequence[Any]:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        arguments.clear()
        found = code(tensors)
        if len(found) == len(constants):
            return found
        rest = iter(found)
        return [next(rest) if constant is None else constant[0] for constant in constants]

    return run


# -- without Inductor

_ADD, _MM, _CONVOLUTION = aten.add.Tensor, aten.mm.default, aten.convolution.default
_INPUT_GRADIENT, _WEIGHT_GRADIENT = (
    torch.ops.shardweave.conv_input_grad.default,
    torch.ops.shardweave.conv_weight_grad.default,
)


def combine_ops(graph: fx.Graph) -> fx.Graph:
    """Compute neighbouring ops of `graph` by one kernel of torch, as eager mode does. It is changed and returned.

    Capture splits these ops, as each part has choices of its own in a plan. Combined, they read the same memory once
    and are called once. No op moves across a collective.
    """
    _add_biases(graph)
    _join_convolution_gradients(graph)
    _call_python_functions(graph)
    graph.lint()
    return graph


def _add_biases(graph: fx.Graph) -> None:
    """Let products add their biases, where these are there when the product is computed."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    for add in graph.find_nodes(op="call_function", target=_ADD):
        summands = [node for node in add.args if isinstance(node, fx.Node)]
        if len(summands) != 2 or add.kwargs:
            continue
        for summand, bias in (summands, reversed(summands)):
            product = _product(summand)
            vector = None if product is None else _vector(bias, product)
            if product is None or vector is None or position[vector] > position[product]:
                continue
            with graph.inserting_before(product):
                if product.target is _MM:
                    sum_node = graph.call_function(aten.addmm.default, (vector, *product.args))
                else:
                    sum_node = graph.call_function(_CONVOLUTION, (*product.args[:2], vector, *product.args[3:]))
            sum_node.meta, position[sum_node] = dict(product.meta), position[product]
            product.replace_all_uses_with(sum_node)
            add.replace_all_uses_with(sum_node if summand is product else summand)
            graph.erase_node(add)
            graph.erase_node(product)
            if not bias.users and bias is not vector:
                graph.erase_node(bias)
            break


def _product(summand: fx.Node) -> fx.Node | None:
    """The product without a bias that `summand` is, perhaps with other rows, and that nothing else uses."""
    product = summand
    while product.target is aten.reshape.default and len(product.users) == 1:
        source = product.args[0]
        before, after = _shape(source), _shape(product)
        if not before or not after or before[-1] != after[-1]:
            return None
        product = source  # type: ignore[assignment]  # the first argument of an op
    is_convolution = product is summand and product.target is _CONVOLUTION and product.args[2] is None
    return product if len(product.users) == 1 and (product.target is _MM or is_convolution) else None


def _vector(bias: fx.Node, product: fx.Node) -> fx.Node | None:
    """The vector that `bias` adds to the columns of a matmul, or to the channels of a convolution; None if none."""
    vector: Any = bias
    if product.target is _CONVOLUTION:
        vector = bias.args[0] if bias.target is aten.reshape.default else None
    added, result = _value(vector), _value(product)
    if added is None or result is None or added.dtype != result.dtype or added.shape != result.shape[1:2]:
        return None
    is_spread = product.target is _MM or _shape(bias) == (1, *added.shape, *(1 for _ in result.shape[2:]))
    return vector if is_spread else None


def _value(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, if it is known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: Any) -> tuple[int, ...] | None:
    value = _value(node)
    return None if value is None else tuple(value.shape)


def _join_convolution_gradients(graph: fx.Graph) -> None:
    """Compute the gradients of a convolution's input, weight and bias together where they follow each other."""
    for first in graph.find_nodes(op="call_function", target=_INPUT_GRADIENT):
        grad, weight, _, *options = first.args
        second, third, shape = first.next, first.next.next, _shape(grad)
        if shape is None or second.target is not _WEIGHT_GRADIENT:
            continue
        same_grad, given, _, *same_options = second.args
        if same_grad is not grad or same_options != options:
            continue
        channels: list[int] | None = None
        dims = [0, *range(2, len(shape))]
        if third.target is aten.sum.dim_IntList and third.args[0] is grad and [*third.args[1:]] == [dims]:
            channels = [shape[1]]
        joined = [first, second] if channels is None else [first, second, third]
        with graph.inserting_before(first):
            arguments = grad, given, weight, channels, *options, [True, True, channels is not None]
            all_gradients = graph.call_function(aten.convolution_backward.default, arguments)
            for index, node in enumerate(joined):
                gradient = graph.call_function(operator.getitem, (all_gradients, index))
                gradient.meta = dict(node.meta)
                node.replace_all_uses_with(gradient)
        for node in joined:
            graph.erase_node(node)


def _call_python_functions(graph: fx.Graph) -> None:
    """Call aten ops by torch's functions where these are C++, which takes less time than calling an `OpOverload`."""
    for node in graph.nodes:
        if not _is_compute(node) or node.kwargs:
            continue
        schema = node.target._schema
        function = getattr(torch, schema.name.removeprefix("aten::"), None)
        takes_tensor = bool(schema.arguments) and isinstance(schema.arguments[0].type, torch.TensorType)
        has_gaps = any(isinstance(value, list | tuple) and None in value for value in node.args)  # among indices
        gives_numbers = any(isinstance(value.type, torch.IntType) for value in schema.returns)  # as tensors
        if isinstance(function, types.BuiltinFunctionType) and takes_tensor and not has_gaps and not gives_numbers:
            node.target = function
