"""The model zoo: small models that every stage is tried on, each with how to build it, feed it and read its loss.

>>> case = ZOO["mlp"]
>>> model = case.model(torch.float64)
>>> case.loss(model(**case.batch(step=0, dtype=torch.float64))).dtype
torch.float64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import gpt, hub, llama, mlp, vision


def _is_loss(output: Tensor) -> Tensor:
    return output


def _has_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Case:
    """A model of the zoo; picklable, so that it can be sent to a worker.

    Parameters
    ----------
    name : str
        Its key in `ZOO`.
    build : callable
        Makes the module; called with torch's random state seeded.
    draw : callable
        Makes a batch (keyword arguments of the model) from a generator and a batch size.
    loss : callable
        Finds the loss in what the model returns.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[..., dict[str, Tensor]]
    loss: Callable[[Any], Tensor] = _is_loss

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """The module in `dtype`, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(dtype)

    def batch(self, step: int, size: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The global batch of a step, the same on every rank; floating inputs in `dtype`."""
        batch = self.draw(torch.Generator().manual_seed(1000 + step), size)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


ZOO = {
    case.name: case
    for case in (
        Case("gpt", gpt.build, gpt.batch),
        Case("gpt-tied", partial(gpt.build, gpt.TIED), partial(gpt.batch, config=gpt.TIED)),
        Case("mlp", mlp.build, mlp.batch),
        Case("llama", llama.build, llama.batch, _has_loss),
        Case("llama-tied", partial(llama.build, tied=True), llama.batch, _has_loss),
    )
}
"""By name: gpt, gpt-tied, mlp, llama, llama-tied."""

TODAY = {
    case.name: case
    for case in (
        Case("gpt2", hub.gpt2, hub.tokens, _has_loss),
        Case("llama", llama.build, llama.batch, _has_loss),
        Case("qwen3", hub.qwen3, hub.tokens, _has_loss),
        Case("bert", hub.bert, hub.masked, _has_loss),
        Case("t5", hub.t5, hub.tokens, _has_loss),
        Case("vit", hub.vit, hub.images, _has_loss),
        Case("mixtral", hub.mixtral, hub.tokens, _has_loss),
        Case("unet", hub.unet, hub.noisy),
        Case("cnn", vision.cnn, vision.images),
        Case("classic", vision.classic, vision.vectors),
    )
}
"""Models as people train them: those of `transformers` and `diffusers`, and hand-written ones with batch norm."""
