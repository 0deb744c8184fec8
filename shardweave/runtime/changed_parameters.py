"""What a user does to a parallel module's tree after compiling, that the generated step would not hear of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardweave.ir import ParallelError

_AGAIN = "Make the change on the model and compile it again"


@dataclass(frozen=True)
class _Seen:
    path: str
    parent: nn.Module
    name: str
    module: nn.Module
    training: bool
    hooks: tuple[int, ...]


class Watch:
    """The submodules of `root` as they were when the step was compiled.

    >>> root = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> watch = Watch(root)
    >>> root[1] = nn.GELU()
    >>> watch.check()
    Traceback (most recent call last):
    shardweave.ir.errors.ParallelError: '1' was a ReLU when the step was compiled, and is a GELU now: the step goes on \
computing the former. Make the change on the model and compile it again
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen = [
            _Seen(f"{path}.{name}".lstrip("."), parent, name, module, module.training, _hooks(module))
            for path, parent in root.named_modules()
            for name, module in parent._modules.items()
            if module is not None
        ]

    def check(self) -> None:
        """ParallelError where a submodule is another one, in another mode, or has other hooks."""
        for seen in self._seen:
            module = seen.parent._modules.get(seen.name)
            if module is not seen.module:
                was, now = (type(each).__name__ for each in (seen.module, module))
                other = "another one" if was == now else f"a {now}"
                is_now = "is gone" if module is None else f"is {other} now"
                raise ParallelError(
                    f"{seen.path!r} was a {was} when the step was compiled, and {is_now}: the step goes on computing "
                    f"the former. {_AGAIN}"
                )
            if module.training is not seen.training:
                modes = ("evaluation", "training")
                raise ParallelError(
                    f"{seen.path!r} was in {modes[seen.training]} mode when the step was compiled, and is in "
                    f"{modes[module.training]} mode now, which the step does not hear of. {_AGAIN}"
                )
            if (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or seen.hooks) and _hooks(
                module
            ) != seen.hooks:
                raise ParallelError(
                    f"hooks of {seen.path!r} were added or removed after the step was compiled: the step does not call "
                    "submodules, so that they would never run. Register them on the model before it is compiled, or "
                    "on the parallel module itself"
                )


def _hooks(module: nn.Module) -> tuple[int, ...]:
    kinds = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return tuple(key for hooks in kinds for key in hooks)
