"""The registry of rules, which maps an op to its rule, and the grammar of rules: ``"m k, k n -> m n"``.

Left of the arrow stand the op's tensor arguments, right of it its outputs. A value is its dimensions, outermost first:

- ``m``: the dimension is this factor (a loop of the op); the same name is the same loop,
- ``[d]``: a factor that may not be split,
- ``(h d)``: the dimension is the product of two factors, the outer one first,
- ``b?``: the dimension is the factor, or of size one where it is broadcast,
- ``1``: a dimension of size one, which has no factor,
- ``...``: any number of dimensions, the same ones in all values; ``[...]``: which may not be split.

A factor that no output has makes the output a partial result. Its parts combine by a sum unless the rule says
otherwise.

A rule is registered by the op's overload: `rule` takes a pattern, `family` a *binder*, which makes the rule of a call
from its shapes and arguments. `bind_broadcast` and `along` are the binders of most families. A *lowering* writes the
local form of an op where that is not the same call on local tensors.

An op that cannot be split as it is may be decomposed: always (`register_decomposition`), depending on its arguments
(`register_conditional`), or where an axis arrives on a blocked factor (``decompose=``). Some decompositions are torch's
own. This is the only module that reads torch's table of decompositions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import fx
from torch._decomp import get_decompositions

from shardweave.ir import Axis, BoundRule, Dims, Factor, Layout, RuleError

Shape = tuple[int, ...]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: the dimensions of each value as tuples of factor names, with ``("...",)`` for the ellipsis."""

    text: str
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    blocked: frozenset[str]


@cache
def parse(text: str) -> Pattern:
    """The `Pattern` of `text`.

    >>> parse("m k, k n -> m n").outputs
    ((('m',), ('n',)),)

    Raises
    ------
    RuleError
        If the text does not follow the grammar.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"the pattern {text!r} needs one '->' between its inputs and its outputs")
    blocked: set[str] = set()

    def value(part: str) -> Dims:
        dims: list[tuple[str, ...]] = []
        for token in re.findall(r"\([^)]*\)|\[[^\]]*\]\??|\S+", part):
            words = token.strip("()").split() if token.startswith("(") else [token]
            names = []
            for word in words:
                name = word.strip("[]?")
                if word.startswith("["):
                    blocked.add(name)
                if not (name == "..." or name == "1" or name.isidentifier()):
                    raise RuleError(f"{word!r} in the pattern {text!r} is not a factor, '...', '1', '[d]' or '(h d)'")
                if name != "1":
                    names.append(name + "?" * word.endswith("?"))
            dims.append(tuple(names))
        return tuple(dims)

    inputs = tuple(value(part) for part in sides[0].split(",")) if sides[0].strip() else ()
    outputs = tuple(value(part) for part in sides[1].split(","))
    return Pattern(text, inputs, outputs, frozenset(blocked))


def bind(
    pattern: Pattern,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    reduce: Mapping[str, str],
    known: Mapping[str, int] | None = None,
) -> BoundRule:
    """Bind `pattern` to the shapes of a call.

    Parameters
    ----------
    inputs, outputs : sequence of shapes
        One for each value of the pattern, in its order.
    reduce : mapping from factor to str
        How the parts of a factor that no output has combine, if not by a sum.
    known : mapping from factor to int
        Sizes that do not follow from shapes, such as the groups of a convolution.

    Raises
    ------
    RuleError
        If the number of values or dimensions, or the sizes of a factor, do not fit.
    """
    # 1. The number of values.
    if len(inputs) != len(pattern.inputs) or len(outputs) != len(pattern.outputs):
        raise RuleError(
            f"the pattern {pattern.text!r} has {len(pattern.inputs)} inputs and {len(pattern.outputs)} outputs, "
            f"the op has {len(inputs)} and {len(outputs)}"
        )
    sizes: dict[str, int] = dict(known or {})
    blocked = set(pattern.blocked)

    # 2. The factors of each dimension of a value, and their sizes.
    def value(dims: Dims, shape: Shape) -> Dims:
        spread = len(shape) - sum(names != ("...",) for names in dims)
        expanded: list[tuple[str, ...]] = []
        for names in dims:
            expanded += [(f"i{index}",) for index in range(spread)] if names == ("...",) else [names]
        if "..." in blocked:
            blocked.update(f"i{index}" for index in range(spread))
        if len(expanded) != len(shape) or spread < 0:
            raise RuleError(f"the pattern {pattern.text!r} does not have the rank of {shape}")
        result: list[tuple[str, ...]] = []
        for marked, size in zip(expanded, shape):
            if size == 1 and any(name.endswith("?") for name in marked):
                result.append(())
                continue
            names = tuple(name.rstrip("?") for name in marked)
            unknown = [name for name in names if name not in sizes]
            settled = math.prod(sizes[name] for name in names if name in sizes)
            if size == 1 and settled == 1:
                result.append(())
                for name in unknown:
                    sizes[name] = 1
                continue
            if len(unknown) > 1:
                raise RuleError(f"the sizes of {unknown} in {pattern.text!r} cannot be told apart in {shape}")
            if size % settled or (not unknown and size != settled):
                raise RuleError(
                    f"the pattern {pattern.text!r} needs {' * '.join(names)} = {settled}, the op has {size}"
                )
            if unknown:
                sizes[unknown[0]] = size // settled
            result.append(tuple(name for name in names if sizes[name] > 1))
        return tuple(result)

    # 3. Bind values with single factors first: they determine the sizes of factors in products.
    order = sorted(
        [(dims, shape, "in", index) for index, (dims, shape) in enumerate(zip(pattern.inputs, inputs))]
        + [(dims, shape, "out", index) for index, (dims, shape) in enumerate(zip(pattern.outputs, outputs))],
        key=lambda item: max((len(names) for names in item[0]), default=0),
    )
    bound = {(side, index): value(dims, shape) for dims, shape, side, index in order}
    factors = tuple(
        Factor(name, size, name in blocked, reduce.get(name, "sum")) for name, size in sizes.items() if size > 1
    )
    return BoundRule(
        factors,
        tuple(bound["in", index] for index in range(len(inputs))),
        tuple(bound["out", index] for index in range(len(outputs))),
    )


class Emitter(Protocol):
    """The interface by which a lowering writes the local form of an op."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    assignment: Mapping[Axis, str]
    rule: BoundRule

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call to the local graph."""
        ...

    def offset(self, axes: Sequence[Axis], step: int) -> Any:
        """`step` times this rank's position along `axes` (outermost first): an int input of the graph, or 0."""
        ...


Binder = Callable[[fx.Node], BoundRule]
Lowering = Callable[[Emitter], fx.Node]


@dataclass(frozen=True)
class Rule:
    """How an op may be sharded.

    Parameters
    ----------
    bind : callable
        From an fx node, with global shapes in ``meta["val"]``, to its `BoundRule`.
    lower : callable, optional
        Writes the local form if it is not the same call on local tensors (shapes in arguments, offsets).
    kind : str
        ``"op"``; ``"view"`` for an op that moves no data and loses none, through which layouts pass;
        ``"sum"`` for an op that is linear in all its tensor arguments together, through which partial sums pass.
    decompose : callable, optional
        The same op in simpler ones, used if an axis arrives on a factor that the op itself cannot split.
    source : str
        The text in `docs/rules.md`: the pattern, or the family and its blocked dimensions (``"a diagonal; blocked: its
        dimensions"``).
    owned : mapping from factor to tuple of int
        For a factor whose shards own rows (experts), the inputs of which a rank reads only the rows that it owns. They
        may arrive as an ``"own"`` partial result over the factor's axes.
    zeros : tuple of int
        The tensor arguments of which a single zero makes the output zero; ``EVERY`` if all of them must be zero.
    ignores : tuple of int
        The tensor arguments whose value does not matter where one of `zeros` is zero.
    partner : callable, optional
        From an fx node to the node whose assignment it has to share, or None. It draws the same random numbers again.
    """

    bind: Binder
    lower: Lowering | None = None
    kind: str = "op"
    decompose: Callable[..., Any] | None = None
    source: str = ""
    owned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    zeros: tuple[int, ...] = ()
    ignores: tuple[int, ...] = ()
    partner: Callable[[fx.Node], fx.Node | None] | None = None


EVERY = (-1,)

RULES: dict[Any, Rule] = {}


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of `node` in the order of its schema; lists are flattened, absent ones left out."""
    found = []
    for value in ordered_args(node):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor):
                found.append(item)
    return found


def ordered_args(node: fx.Node) -> list[Any]:
    """The arguments of `node`, positional or by keyword, in the order of its schema."""
    if isinstance(node.target, torch._ops.OpOverload):
        return [*node.args, *(node.kwargs.get(name) for name in argument_names(node)[len(node.args) :])]
    return [*node.args, *node.kwargs.values()]


def argument_names(node: fx.Node) -> Sequence[str]:
    """The names of the arguments in the schema of the op of `node`; none if it calls no op."""
    return _argument_names(node.target)


@cache
def _argument_names(target: Any) -> Sequence[str]:
    schema = getattr(target, "_schema", None)
    return () if schema is None else tuple(declared.name for declared in schema.arguments)


def argument(node: fx.Node, name: str) -> Any:
    """The argument of `node` that its schema calls `name`, or the default."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            if index < len(node.args):
                return node.args[index]
            return node.kwargs.get(name, declared.default_value)
    raise RuleError(f"{node.target} has no argument {name!r}")


def shape(node: fx.Node) -> Shape:
    """The global shape of a node's value."""
    return tuple(int(size) for size in node.meta["val"].shape)


def output_shapes(node: fx.Node) -> list[Shape]:
    """The global shapes of a node's tensor outputs; other outputs (seeds, sizes) are left out."""
    value = node.meta["val"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(int(size) for size in item.shape) for item in values if isinstance(item, torch.Tensor)]


def rule(
    target: Any,
    pattern: str,
    *,
    reduce: Mapping[str, str] | None = None,
    lower: Lowering | None = None,
    decompose: Callable[..., Any] | None = None,
    owned: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Register the rule of `target` as one pattern.

    The inputs of the pattern are the tensor arguments of the op's schema in order, optional ones included. Arguments
    that a call leaves out are dropped.

    >>> rule(torch.ops.aten.mm.default, "m k, k n -> m n")
    """
    declared = sum("Tensor" in str(arg.type) for arg in target._schema.arguments)
    if len(parse(pattern).inputs) > declared:
        raise RuleError(f"{target}: the pattern {pattern!r} has more inputs than the op has tensor arguments")
    RULES[target] = Rule(
        lambda node: bind_pattern(node, pattern, reduce), lower, decompose=decompose, source=pattern, owned=owned or {}
    )


def bind_pattern(
    node: fx.Node, pattern: str, reduce: Mapping[str, str] | None = None, known: Mapping[str, int] | None = None
) -> BoundRule:
    """Bind a pattern to `node`; tensor arguments that the call leaves out and outputs that are None are dropped.

    `reduce` and `known` are those of `bind`.
    """
    parsed = parse(pattern)
    values = ordered_args(node)
    tensors = [index for index, arg in enumerate(node.target._schema.arguments) if "Tensor" in str(arg.type)]  # type: ignore[union-attr]
    present = [
        (dims, shape(values[index]))
        for dims, index in zip(parsed.inputs, tensors)
        if index < len(values) and isinstance(values[index], fx.Node)
    ]
    if len(present) != len(tensor_args(node)):
        raise RuleError(f"{node.target}: the pattern {pattern!r} does not name every tensor argument of {node}")
    outputs = parsed.outputs
    results = node.meta["val"]
    if isinstance(results, (list, tuple)) and len(results) == len(outputs):
        outputs = tuple(dims for dims, value in zip(outputs, results) if isinstance(value, torch.Tensor))
    used = Pattern(pattern, tuple(dims for dims, _ in present), outputs, parsed.blocked)
    return bind(used, [size for _, size in present], output_shapes(node), reduce or {}, known)


def family(
    targets: Iterable[Any],
    binder: Binder,
    source: str,
    *,
    lower: Lowering | None = None,
    decompose: Callable[..., Any] | None = None,
    kind: str = "op",
) -> None:
    """Register one rule for several ops: `binder` makes it from the shapes and arguments of a call."""
    for target in targets:
        RULES[target] = Rule(binder, lower, kind, decompose, source)


# -- binders and lowerings that families share


class Factors:
    """Collects the factors of a rule that is made from shapes."""

    def __init__(self) -> None:
        self.all: dict[str, Factor] = {}

    def new(self, size: int, blocked: bool = False, name: str = "", reduce: str = "sum") -> Names:
        """A factor as a dimension of its own, new unless the `name` is known; size 1 has none."""
        if size == 1:
            return ()
        name = name or f"i{len(self.all)}"
        self.all.setdefault(name, Factor(name, size, blocked, reduce))
        return (name,)

    def rule(self, inputs: Iterable[Iterable[Names]], outputs: Iterable[Iterable[Names]]) -> BoundRule:
        """The rule with these factors, for inputs and outputs that have these dimensions."""
        given, results = tuple(map(tuple, inputs)), tuple(map(tuple, outputs))
        return BoundRule(tuple(self.all.values()), given, results)


def bind_broadcast(node: fx.Node, blocked: Collection[int] = ()) -> BoundRule:
    """Values aligned as in broadcasting: one factor a dimension, none where a value has size 1.

    The dimensions in `blocked`, counted from the front, cannot be split.
    """
    given, results = [shape(arg) for arg in tensor_args(node)], output_shapes(node)
    whole = max([*results, *given], key=len)
    factors = Factors()
    names = [factors.new(size, index in blocked) for index, size in enumerate(whole)]

    def dims(size: Shape) -> list[Names]:
        first = len(whole) - len(size)
        if any(length not in (1, full) for length, full in zip(size, whole[first:])):
            raise RuleError(
                f"{node.target} has tensors of shapes {[*given, *results]}, which do not broadcast to one: "
                "it has no pointwise rule"
            )
        return [name if length > 1 else () for length, name in zip(size, names[first:])]

    return factors.rule(map(dims, given), map(dims, results))


def along(*dims: str | int, reduce: str = "") -> Binder:
    """The binder of ops that go along some dimensions and treat all others side by side.

    Each value has the dimensions of the one with the most, in order. Along the chosen ones, values may differ in size;
    a value with fewer dimensions lacks them.

    Parameters
    ----------
    dims : str or int
        The chosen dimensions: by number, or by the name of the argument that lists them. All if none are given, or if
        the argument is None or empty.
    reduce : str
        How the parts of a chosen dimension combine. Without it they are blocked.
    """

    def binder(node: fx.Node) -> BoundRule:
        given, results = [shape(arg) for arg in tensor_args(node)], output_shapes(node)
        whole = max([*given, *results], key=len)
        every = range(len(whole))
        chosen: set[int] = set() if dims else set(every)
        for dim in dims:
            value = argument(node, dim) if isinstance(dim, str) else dim
            listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
            chosen |= {index % max(len(whole), 1) for index in listed or every}
        factors = Factors()

        def names(size: Shape) -> Iterator[Names]:
            indices = every if len(size) == len(whole) else [index for index in every if index not in chosen]
            for index, length in zip(indices, size, strict=True):
                name = f"i{index}" if length == whole[index] else f"i{index}x{length}"
                how = reduce if index in chosen else "sum"
                yield factors.new(length, blocked=not how, name=name, reduce=how or "sum")

        return factors.rule(map(names, given), map(names, results))

    return binder


def call_with(emit: Emitter, **changed: Any) -> fx.Node:
    """The op itself on local tensors, with other values for these of its arguments; names that it lacks are ignored."""
    names = argument_names(emit.node)
    args = [changed.get(name, value) for name, value in zip(names, emit.args)]
    return emit.call(emit.node.target, *args, **emit.kwargs)


def with_local_shape(name: str) -> Lowering:
    """The lowering of an op whose argument `name` is the shape of its result: the shape of this rank's part."""
    return lambda emit: call_with(emit, **{name: list(emit.output_layouts[0].local_shape)})


# -- decompositions

Form = Callable[..., Any]
DECOMPOSITIONS: dict[Any, Form] = {}
"""Ops that `annotate` always decomposes, because their parts do not add up to the whole op."""
CONDITIONAL: dict[Any, Callable[[fx.Node], Form | None]] = {}
"""Ops that `annotate` decomposes depending on their arguments: from a node to its decomposition or None."""


def register_decomposition(*targets: Any) -> Callable[[Form], Form]:
    """Register a function as the decomposition of these ops, which always applies."""

    def register(form: Form) -> Form:
        DECOMPOSITIONS.update(dict.fromkeys(targets, form))
        return form

    return register


def register_conditional(target: Any) -> Callable[[Callable[[fx.Node], Form | None]], Callable[[fx.Node], Form | None]]:
    """Register a function from a node of `target` to its decomposition, None to leave the node as it is."""

    def register(choose: Callable[[fx.Node], Form | None]) -> Callable[[fx.Node], Form | None]:
        CONDITIONAL[target] = choose
        return choose

    return register


def form_of(node: fx.Node) -> Form | None:
    """The decomposition of a node, None if there is none."""
    if node.target in CONDITIONAL:
        return CONDITIONAL[node.target](node)
    return DECOMPOSITIONS.get(node.target) or _form_without_rule(node)


def _form_without_rule(node: fx.Node) -> Form | None:
    """Torch's own decomposition of an op that has no rule and is not pointwise; None if torch has none.

    What draws random numbers is left as it is, and so is what makes a tensor out of no other.
    """
    target = node.target
    if target in RULES or not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    kept = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
    return None if kept & {*target.tags} or not tensor_args(node) else torch_form(target)


@cache
def torch_form(target: Any) -> Form | None:
    """Torch's decomposition of an op, None if there is none."""
    found: Form | None = get_decompositions([target]).get(target)
    return found


aten = torch.ops.aten
DECOMPOSITIONS.update(
    get_decompositions(
        [
            aten.smooth_l1_loss.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss.default,
            aten.huber_loss_backward.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_backward.default,
            aten.soft_margin_loss.default,
            aten.soft_margin_loss_backward.default,
            aten.log_sigmoid_backward.default,
            aten.mse_loss.default,
            aten.binary_cross_entropy_with_logits.default,
            aten._prelu_kernel.default,
            aten._prelu_kernel_backward.default,
            aten.addmv.default,
            aten.index_select.default,
            aten.index_add.default,
            aten.index_copy.default,
            aten._unsafe_index.Tensor,
            aten._unsafe_index_put.default,
        ]
    )
)
