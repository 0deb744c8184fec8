"""The grammar of sharding rules: ``"m k, k n -> m n"``.

Left of the arrow stand the op's tensor arguments, right of it its outputs. A value is its dimensions, outermost first:

- ``m``: the dimension is this factor (a loop of the op); the same name is the same loop,
- ``[d]``: a factor that may not be split,
- ``(h d)``: the dimension is the product of two factors, the outer one first,
- ``b?``: the dimension is the factor, or of size one where it is broadcast,
- ``1``: a dimension of size one, which has no factor,
- ``...``: any number of dimensions, the same ones in all values; ``[...]``: which may not be split.

A factor that no output has makes the output a partial result, combined by a sum unless the rule says otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from shardweave.ir import BoundRule, Dims, Factor, RuleError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: for each value its dimensions, each a tuple of factor names; ``("...",)`` for the ellipsis."""

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
        Where the text does not follow the grammar.
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
    """The rule that `pattern` is for an op with these shapes.

    Parameters
    ----------
    inputs, outputs : sequence of shapes
        One for each value of the pattern, in its order.
    reduce : mapping from factor to str
        How the parts of a factor combine that no output has, where that is not a sum.
    known : mapping from factor to int
        Sizes that no shape tells, such as the groups of a convolution.

    Raises
    ------
    RuleError
        Where the number of values, of dimensions, or the sizes of a factor do not fit.
    """
    if len(inputs) != len(pattern.inputs) or len(outputs) != len(pattern.outputs):
        raise RuleError(
            f"the pattern {pattern.text!r} has {len(pattern.inputs)} inputs and {len(pattern.outputs)} outputs, "
            f"the op has {len(inputs)} and {len(outputs)}"
        )
    sizes: dict[str, int] = dict(known or {})
    blocked = set(pattern.blocked)

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

    # Single factors first: they settle the sizes that products are made of.
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
