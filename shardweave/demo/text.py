"""Real text that every machine with Python has: the sources of its own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardweave.ir import InputError


@dataclass(frozen=True)
class Text:
    """A text as byte tokens, and the batches that are drawn from it.

    Parameters
    ----------
    tokens : Tensor
        The text's bytes, one dimension of ``torch.long``.
    batch : int
        Sequences in a batch.
    context : int
        Tokens in a sequence.

    Examples
    --------
    >>> text = Text(torch.arange(100), batch=2, context=8)
    >>> tokens, targets = text.draw(step=0)
    >>> bool((targets == tokens + 1).all())
    True
    """

    tokens: Tensor
    batch: int
    context: int

    @classmethod
    def of_standard_library(cls, batch: int, context: int, max_bytes: int = 4_000_000) -> Text:
        """The top-level modules of the running Python's standard library, in the order of their names.

        Raises
        ------
        InputError
            If this Python comes without the sources of its library.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:max_bytes]
        if len(text) <= context + 1:
            raise InputError(
                f"the standard library at {folder} has {len(text)} bytes of Python source, the demo needs more than "
                f"{context + 1}: run it with a Python that is installed with its sources"
            )
        return cls(torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), batch, context)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (batch, context), of step number `step`: the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - self.context, (self.batch,), generator=generator).tolist()
        rows = torch.stack([self.tokens[start : start + self.context + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
