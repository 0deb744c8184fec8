"""Errors of models that cannot be captured: the reason, the module, the source line and the way out.

`refuse_wrapped` refuses models that are compiled, wrapped or sharded already, and says what to pass instead.
"""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardweave.compiler.branch_selection import CHANGED_PARAMETER, LISTED
from shardweave.compiler.branches import LOOP
from shardweave.compiler.constants import DRAWN, INDEXED
from shardweave.compiler.dynamo_workarounds import CLOCK, CLOCK_WAY_OUT, DRAW_WAY_OUT, HINTS, USED_GRADIENT
from shardweave.compiler.traceable_forms import EMPTY_OBSERVER
from shardweave.ir import CaptureError, InternalError, ParallelError
from shardweave.runtime import ParallelModule

_PARALLEL = (
    "compile the original model again, the one that was given to compile_parallel; to go on from the weights of this "
    "one, save_checkpoint it and load_checkpoint into the new one"
)
_INSIDE = "pass the module that it wraps, its `.module`: data parallelism is one of the strategies that a plan chooses"
_SHARDED = "build the model anew and pass it before it is sharded; a plan shards it"

SEVERAL_GRADIENTS = "its hooks on the backward take several gradients at once, which is not captured"
"""Why backward hooks are refused of a module that takes, or returns, several tensors with gradients."""
NO_BUFFER = "a tensor that is neither a buffer nor a parameter, and in which a step would not keep what is written"
BUFFER_WAY_OUT = (
    'Make it a buffer of a module: self.register_buffer("name", tensor). Or write into a copy of it (.clone()).'
)
_HOOK_WAY_OUT = (
    "In a forward hook of the module, call register_hook of each tensor whose gradient is to be changed: that is "
    "captured."
)
_KEPT_WAY_OUT = (
    "Only what is computed there is captured. Return from the forward what is to be kept. To see the gradient of a "
    "value, pass a tensor of zeros that requires a gradient, and add it to that value: its gradient is the value's."
)


def refuse_wrapped(model: object, lazy: type[nn.Module]) -> None:
    """Raise CaptureError if `model` is not a plain module, or has a part that is compiled, wrapped or sharded already.

    Submodules under `torch.compile` are captured as the modules that they wrap; only a whole model is refused. `lazy`
    is the class of parallel modules that are not compiled yet.
    """
    if isinstance(model, type):
        raise CaptureError(f"the model must be an nn.Module, got the class {model.__name__}: pass an instance of it")
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"the model must be an nn.Module, got an object of {type(model).__name__}: pass the module itself, or one "
            "whose forward calls it"
        )
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise _error(model, "", "what torch.compile made", "pass the module that was given to torch.compile")
    for name, module in _modules(model, ""):
        if isinstance(module, (ParallelModule, lazy)):
            raise _error(module, name, "a parallel module already", _PARALLEL)
        if isinstance(module, FSDPModule):
            raise _error(module, name, "sharded by fully_shard", _SHARDED)
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel, DataParallel)):
            raise _error(module, name, f"wrapped in {type(module).__name__}", _INSIDE)
        if isinstance(module, torch.jit.ScriptModule):
            raise _error(module, name, "what torch.jit made", "pass the module that was scripted or traced")
        for own, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if isinstance(tensor, DTensor):
                whole = f"{name}.{own}" if name else own
                raise _error(module, name, f"sharded: {whole} is a DTensor, {tensor.placements}", _SHARDED)


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, which a parallel module that is not compiled yet refuses."""
    yield name, module
    for own, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{name}.{own}" if name else own)


def _error(module: nn.Module, name: str, what: str, way_out: str) -> CaptureError:
    which = f"the model's part {name} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    return CaptureError(f"{which} is {what}: {way_out}")


_WAY_OUT = (
    "Write that line without branching on the values of tensors and without leaving the graph (torch.where, no "
    ".tolist(), no printing), then compile again. A branch may stay that only raises an error, or whose sides only "
    "assign local variables, return, or write into buffers, with tensors of the same shape that depend on the same "
    "parameters."
)
PARAMETER_WAY_OUT = (
    "Compute with a changed copy of it, or change it between steps, under torch.no_grad(). If the first call "
    "initialises it, call the model once before it is compiled, with the same batch on all ranks."
)
_LOOP_WAY_OUT = (
    "Loop over all places, such as all experts, select the rows of each (rows = torch.where(mask[index])[0]), and go "
    "on where there are none (if rows.numel() == 0: continue). Such a body may append its rows to lists for torch.cat."
)
_LIST_WAY_OUT = (
    "Concatenate the list (torch.cat(values), also where it is empty) and compute with that, or sum up in a tensor, "
    "such as a count, in the loop."
)
_GRADIENT_WAY_OUT = (
    "Read it between steps, of the parallel module's parameters, and pass what you need of it to the call as a tensor. "
    "A gradient within the forward is that of torch.autograd.grad."
)
_ARRAY_WAY_OUT = (
    "Make the array a list of Python numbers, or a tensor, where the model is built: array.tolist(), "
    "torch.from_numpy(array). Numbers of numpy, and what numpy computes from numbers alone, are captured."
)
_SPARSE = "does not support sparse", "meta converter nyi", "sparse_coo_tensor.", "sparse_csr_tensor."
_SPARSE_WAY_OUT = (
    "A step computes with dense tensors: make it dense (to_dense()), or compute with its indices and values, as "
    "torch.zeros_like(x).index_add(0, rows, values[:, None] * x[columns]) for a matrix times x."
)
_DISABLED_WAY_OUT = "Leave torch.compiler.disable out: a captured step is one graph of all that the forward computes."
_OUTSIDE = "Call that outside of the forward: a captured step has ops on tensors alone. Then compile again."
_RAISED = (
    "The model itself stops here: mend the call or the config, then compile again. If it runs by itself, it makes up "
    "an optional input (such as attention_mask) only where it is not compiled: give it that input."
)
_OVERWRITTEN_WAY_OUT = (
    "Its backward fails without shardweave, too: make a new tensor where a value is changed in place (x = x * 2 for "
    "x.mul_(2)), or change a copy of it (x.clone().mul_(2))."
)
_OF_A_LIBRARY = (
    "That line belongs to an installed library, {library}. Look for an argument of the call, or a setting of the "
    "model's config, that avoids it; else, before you compile, put a function of your own in the place of {function}, "
    "in which that line can be captured. "
)
_TORCH = torch.__path__[0]
_OWN = str(Path(__file__).parents[1])
INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib"))
"""Folders of Python's own code and of installed libraries."""


@contextlib.contextmanager
def internal_errors(model: nn.Module) -> Iterator[None]:
    """While this runs, an unexpected error in shardweave's own code becomes an `InternalError`.

    Errors in a user's code (the model, a function that returns a batch), or in functions that this code calls, pass.
    """
    try:
        yield
    except ParallelError:
        raise
    except Exception as error:
        if (place := _defect_location(error)) is None:
            raise
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InternalError(
            f"{type(model).__name__} cannot be compiled, by a defect of shardweave: {told} (at {place}). Please report "
            "it with the model. Until it is mended, options that decide more by hand may avoid it, such as "
            "Options(force={'*': 'zero3'}, sub_batches=1, micro_batches=1)"
        ) from error


def _defect_location(error: Exception) -> str | None:
    """The last line of shardweave in the traceback of `error`; None if a user's code comes after it."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(_OWN):
            found = f"{file.removeprefix(_OWN)[1:]}:{line}"
        elif not file.startswith((*INSTALLED, "<")):
            found = None
    return found


def capture_error(
    model: nn.Module, reason: str, module: str = "", line: str = "", way_out: str = _WAY_OUT
) -> CaptureError:
    """An error with the reason, the module, the source line and the way out."""
    where = f"in {module} ({type(model.get_submodule(module)).__name__}), " if module else ""
    hints = [hint for word, hint in HINTS.items() if word in line or f"`{word.rstrip('(')}`" in reason]
    if found := re.match(r"\n  (\S+):\d+ in ([^:\s]+): ", line):
        folder = next((each for each in INSTALLED if found[1].startswith(each)), None)
        if folder and way_out != _RAISED:
            library = Path(found[1]).relative_to(folder).parts[0]
            way_out = _OF_A_LIBRARY.format(library=library, function=found[2]) + way_out
    return CaptureError(
        f"{type(model).__name__} cannot be captured as one graph: {where}{reason}{line}\n{' '.join(hints) or way_out}"
    )


@contextlib.contextmanager
def readable_errors(model: nn.Module) -> Iterator[None]:
    """Turn whatever a capture raises into a `CaptureError`."""
    try:
        # Without `verbose` Dynamo removes the tracebacks of its errors, which name the module.
        with torch._dynamo.config.patch(verbose=True):
            yield
    except CaptureError:
        raise
    except Exception as error:
        chain = _causes(error)
        reason, way_out = _reason(chain)
        raise capture_error(model, reason, _module_of(model, chain), _line(chain), way_out) from error


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a module has hooks of the older `register_backward_hook`, which may get other gradients."""
    for name, module in model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            hooks = module._backward_hooks.values()
            called = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)
            raise capture_error(
                model,
                f"it has hooks of register_backward_hook ({called}), which are not captured",
                name,
                way_out="Register them by register_full_backward_hook.",
            )


def refuse_values(model: nn.Module, node: fx.Node) -> None:
    """Raise CaptureError where a number or a size of the graph depends on the values of tensors."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            what = "a size" if isinstance(value, Tensor) else "a number"
            place, way_out = module_and_line(model, node), _WAY_OUT
            raise capture_error(model, f"{what} depends on the values of tensors", *place, way_out)


def refuse_effects(model: nn.Module, node: fx.Node) -> None:
    """Raise CaptureError where an op has a side effect: it checks values, or prints."""
    if node.target is torch.ops.higher_order.with_effects:
        what = f"{node.args[1]} acts beside the graph: it checks the values of tensors, or says them"
        way_out = "Write that line with ops that only compute, then compile again."
        raise capture_error(model, what, *module_and_line(model, node), way_out)


def refuse_open_sizes(graph: fx.Graph) -> None:
    """Raise CaptureError where a size in Dynamo's graph depends on the values of tensors, and others may vary, too."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, (Tensor, torch.SymInt)) and free_unbacked_symbols(value):
                line = _user_line(str(node.meta.get("stack_trace", "")))
                way_out = "Fix the sizes of the inputs: torch.compile(..., dynamic=False)."
                raise CaptureError(f"a size of the graph depends on the values of tensors{line}\n{way_out}")


def module_and_line(model: nn.Module, node: fx.Node) -> tuple[str, str]:
    """The module and the source line that a node comes from, as `capture_error` takes them."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return _module_named(model, stack), _user_line(str(node.meta.get("stack_trace", "")))


def _causes(error: BaseException) -> list[BaseException]:
    """The error and the chain of its causes."""
    found = [error]
    while (inner := found[-1].__cause__) is not None and inner not in found:
        found.append(inner)
    return found


def _reason(chain: list[BaseException]) -> tuple[str, str]:
    """The reason, and the way out."""
    text = str(chain[0])
    if EMPTY_OBSERVER in text:
        return EMPTY_OBSERVER, "Call the model once before it is compiled, with the same batch on all ranks."
    if any(words in text for words in _SPARSE):
        return "it computes with a sparse tensor", _SPARSE_WAY_OUT
    if raised := re.search(r"(?:raised exception|: got) (\w+)\((.*?)\)\n", text, re.DOTALL):
        return f"it raises {raised[1]}: {raised[2]}", _RAISED
    if "assertion failed" in text and "ConstantVariable" in text:
        return "it raises AssertionError", _RAISED
    if text.startswith("Data-dependent branching"):
        return "a branch depends on the values of tensors", _WAY_OUT
    if "object has no attribute 'item'" in text:
        return "it takes a number out of an array of numpy", _ARRAY_WAY_OUT
    if text.startswith(INDEXED):
        return INDEXED, "Read it by torch.index_select(x, dim, t.reshape(1)), a copy; write it as x[t] = value."
    if "entirely functional graph" in text or "mutating a non-functional tensor" in text:  # of torch's own, by x.data
        return f"it writes into {NO_BUFFER}", BUFFER_WAY_OUT
    if CHANGED_PARAMETER in text:
        return CHANGED_PARAMETER, PARAMETER_WAY_OUT
    if SEVERAL_GRADIENTS in text:
        return SEVERAL_GRADIENTS, _HOOK_WAY_OUT
    if "outside the scope of this HOP" in text:
        return "a hook on a gradient, or another function that is traced by itself, changes a variable", _KEPT_WAY_OUT
    for reason, way_out in ((DRAWN, DRAW_WAY_OUT), (CLOCK, CLOCK_WAY_OUT)):
        if reason in text:
            return text.strip().split("\n")[0], way_out
    if USED_GRADIENT in text:
        return USED_GRADIENT, _GRADIENT_WAY_OUT
    if LOOP in text:
        return LOOP, _LOOP_WAY_OUT
    if LISTED in text:
        return LISTED, _LIST_WAY_OUT
    if "data-dependent expression" in text or "nbacked symbol" in text:
        return "a number depends on the values of tensors", _WAY_OUT
    explanation = re.search(r"Explanation: (.+)", text)
    if explanation and "trace the builtin" in explanation[1]:
        return explanation[1].partition(" This function is")[0], _OUTSIDE
    if explanation and (skipped := re.search(r"marked that the function `([^`]+)`", explanation[1])):
        return f"it calls {skipped[1]}, which torch does not trace", _OUTSIDE
    if explanation and (disabled := re.search(r"function `<function (\S+).*torch\.compiler\.disable", explanation[1])):
        return f"it calls {disabled[1]}, which torch.compiler.disable keeps out of graphs", _DISABLED_WAY_OUT
    if "modified by an inplace operation" in text:
        return text.strip().partition(" Hint:")[0], _OVERWRITTEN_WAY_OUT
    return explanation[1] if explanation else text.strip().split("\n")[0] or type(chain[0]).__name__, _WAY_OUT


def _line(chain: list[BaseException]) -> str:
    """The user's line that Dynamo traced last, or that an error's text names."""
    frames: list[Any] = []
    for error in chain:
        frames += getattr(error, "real_stack", None) or []
    # After a `finally`, only the traceback of the traced exception has the line that raised it.
    for local in _locals_of(chain):
        raised: Any = getattr(local.get("curr_exc"), "__traceback__", None)
        frames += [one.frame_summary for one in raised.extract_tb()] if hasattr(raised, "extract_tb") else []
    for frame in reversed(frames):
        if not frame.filename.startswith((_TORCH, _OWN)):
            return f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}"
    return next((found for error in chain if (found := _user_line(str(error)))), "")


def _locals_of(chain: list[BaseException]) -> Iterator[dict[str, Any]]:
    """The local variables of each frame in the errors' tracebacks."""
    for error in chain:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame.f_locals


def _user_line(text: str) -> str:
    """The last source line in a stack trace, for a message; empty if there is none."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.+)', text)
    lines = [line for line in lines if not line[0].startswith(_OWN)]  # forms that are traced for torch's functions
    return "".join(f"\n  {file}:{line} in {function}: {code.strip()}" for file, line, function, code in lines[-1:])


def _module_of(model: nn.Module, chain: list[BaseException]) -> str:
    """The innermost module that Dynamo traced, from the frames of its interpreter."""
    paths: list[str] = []
    for local in _locals_of(chain):
        stack: Any = getattr(local.get("self"), "nn_module_stack", None)
        if isinstance(stack, dict) and stack:
            paths = [path for path, _ in stack.values()]
    return _module_named(model, paths)


def _module_named(model: nn.Module, stack: list[str]) -> str:
    """The model's name for the last of a stack of Dynamo's paths, such as "L['self']._modules['layers'][0]"."""
    if not stack:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", stack[-1])
    name = re.sub(r"(?:\._modules)?\['?([^'\]]+)'?\]", r".\1", path).strip(".")
    return name if name in dict(model.named_modules()) else ""
