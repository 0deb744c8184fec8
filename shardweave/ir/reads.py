"""The Python values that capture turned into constants of the step, and the check that they have not changed.

A number in an attribute, a config or a global becomes a constant of the generated graphs. If a user changes it later,
the step does not follow. `ConstantsCheck` raises an error in this case.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardweave.ir.errors import ParallelError

MISSING = "<missing>"
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, types.EllipsisType)


@dataclass(frozen=True)
class Read:
    """One Python value that capture read.

    Parameters
    ----------
    code : tuple of str
        Its expression in Python, as statements: each but the last is ``name = expression``, and shared with others.
    shown : str
        The expression as a user writes it, such as ``"model.config.beta"``.
    """

    code: tuple[str, ...]
    shown: str

    @property
    def of_mode(self) -> bool:
        """Whether the value is a module's training mode."""
        return self.shown.endswith(".training")


def plain(value: Any) -> Any:
    """The part of a value that is kept for comparison: a constant itself, else its code or type.

    Nothing that is kept can keep a model alive.
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (tuple, frozenset)) and all(isinstance(item, PLAIN) for item in value):
        return value
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        return value
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return value.__code__
    return type(value)


class Reads:
    """The values that capture read. They can be read again from the model and from the parallel module.

    Parameters
    ----------
    reads : sequence of Read
    names : mapping of str to object
        The names in the expressions besides ``model``: globals of the model's Python module, and its imports.
    """

    def __init__(self, reads: Sequence[Read], names: Mapping[str, object]) -> None:
        self.reads, self._names = tuple(reads), dict(names)
        statements = dict.fromkeys(line for read in self.reads for line in read.code[:-1])
        values = ", ".join(f"keep({read.code[-1]})" for read in self.reads)
        lines = [*statements, f"return [{values}]"]
        self._all = self._function(lines)

    def _function(self, lines: Sequence[str]) -> Callable[[nn.Module], Any]:
        space: dict[str, Any] = {**self._names, "keep": plain}
        exec("def look(model):\n" + "\n".join(f"    {line}" for line in lines), space)  # of our own expressions alone
        found: Callable[[nn.Module], Any] = space["look"]
        return found

    def values(self, model: nn.Module) -> list[Any]:
        """The present value of each read; `MISSING` if it cannot be read."""
        try:
            found: list[Any] = self._all(model)
            return found
        except Exception:  # an attribute that is gone, or whatever a property raises: each for itself
            return [self._one(read, model) for read in self.reads]

    def _one(self, read: Read, model: nn.Module) -> Any:
        try:
            return self._function([*read.code[:-1], f"return keep({read.code[-1]})"])(model)
        except Exception:  # as above
            return MISSING

    def without(self, shown: Collection[str]) -> Reads:
        """The reads without those in `shown`, and without reads of whether these are set."""
        return Reads([read for read in self.reads if read.shown.removesuffix(" being set") not in shown], self._names)

    def found_in(self, model: nn.Module) -> Reads:
        """The reads that `model` has a value for."""
        pairs = zip(self.reads, self.values(model), strict=True)
        return Reads([read for read, value in pairs if value != MISSING], self._names)


class ConstantsCheck:
    """Checks that constants of the step are unchanged in the user's model, while it lives, and the parallel module."""

    def __init__(self, reads: Reads, model: nn.Module, parallel: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._mode = model.training
        self._of_model, self._of_parallel = reads.found_in(model), reads.found_in(parallel)
        self._before_in_model, self._before = self._of_model.values(model), self._of_parallel.values(parallel)

    def check(self, parallel: nn.Module) -> None:
        """Raise `ParallelError` if a value has changed. The error names it."""
        now = self._of_parallel.values(parallel)
        if now != self._before:
            self._compare(self._of_parallel, self._before, now, "parallel", True)
        model = self._model()
        if model is None:
            return
        now = self._of_model.values(model)
        if now != self._before_in_model:  # a model that is in the other mode as a whole is used on its own
            self._compare(self._of_model, self._before_in_model, now, "model", model.training == self._mode)

    def _compare(self, reads: Reads, before: Sequence[Any], now: Sequence[Any], root: str, modes: bool) -> None:
        for read, was, is_now in zip(reads.reads, before, now, strict=True):
            if was != is_now and (modes or not read.of_mode):
                shown = re.sub(r"\bmodel\b", root, read.shown, count=1)
                raise ParallelError(
                    f"{shown} was {_word(was)} when the step was compiled and is a constant of it; it is now "
                    f"{_word(is_now)}, and the step would go on with the former. Set it back; or compile the model "
                    "again with the new value (compile_parallel(..., plan=parallel.plan) takes the same "
                    "plan, load_state_dict the weights). What changes from step to step belongs into a tensor that is "
                    "passed to the call, or into a buffer"
                )


def _word(value: Any) -> str:
    if isinstance(value, type):
        return f"a {value.__name__}"
    if isinstance(value, types.CodeType):
        return f"the function {value.co_name} ({value.co_filename}:{value.co_firstlineno})"
    return value if value == MISSING else repr(value)
