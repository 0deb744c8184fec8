"""Capture: an `nn.Module` and example inputs become one joint graph of forward and backward.

A capture leaves the user's model, and the state that torch and Python hold for the whole process, as they were
(`preserved`). Torch's own capture writes into both: it replaces parameters by traced tensors and installs names in the
globals of the user's module, and it may fail at any point in between.

`joint_graph` rewrites the graph, `capture_errors` reads torch's errors, and `plan_cache` saves graphs. With these, this
is the only module that touches torch's private capture interfaces.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.compiler.capture_errors import (
    PARAMETER_WAY_OUT,
    SEVERAL_GRADIENTS,
    capture_error,
    module_and_line,
    readable_errors,
    refuse_backward_hooks,
    refuse_effects,
    refuse_values,
)
from shardweave.compiler.constants import fold_constant_masks, numbers_of_buffers, storage_of
from shardweave.compiler.dynamo_workarounds import inputs_made_leaves, objects_as_arguments, traceable
from shardweave.compiler.effects import attributes_refused, recorded_effects
from shardweave.compiler.guards import after_a_call, assigned_buffers, reads_of
from shardweave.compiler.joint_graph import (
    asserts_as_values,
    cast,
    cast_inputs_inside,
    enclose_open_sizes,
    extend_backward,
    fold_conjugates,
    fold_copies,
    linalg_checks_as_values,
    take_cast_parameters,
    take_parameter_changes,
    working_copies,
)
from shardweave.compiler.plan_cache import cached_graph, save_graph, trace_key
from shardweave.ir import (
    TENSOR_OUTPUT,
    CallTree,
    Captured,
    CaptureError,
    Precision,
    Reads,
    arguments_opened,
    as_call,
    canonical_arguments,
    leaf_names,
    refuse_layout,
    with_objects_opened,
)
from shardweave.runtime import copy_with_tensors, wants_gradient

_MANY_CALLS = 64
"""After so many calls, containers that calls append to are looked at again, as a forward may ask for their length."""


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore `model` and the state of the process afterwards, also after an error.

    Of the model: each module's class, attributes, parameters, buffers, submodules and hooks, the contents of its
    attributes that are dicts, lists or sets, and each tensor's ``requires_grad`` and ``grad``. Of the process: the
    generators of random numbers on the CPU, the default dtype, the grad and the autocast mode, and the names in the
    globals of the module where the model's ``forward`` is defined.

    Examples
    --------
    >>> model = nn.Linear(2, 2)
    >>> weight = model.weight
    >>> with contextlib.suppress(KeyError), preserved(model):
    ...     model.weight = nn.Parameter(torch.ones(2, 2))
    ...     raise KeyError
    >>> model.weight is weight
    True
    """
    snapshots = [_snapshot(module) for module in model.modules()]
    tensors = [(tensor, tensor.requires_grad, tensor.grad) for tensor in [*model.parameters(), *model.buffers()]]
    names = [(found, set(found)) for found in _globals(model)]
    python, cpu, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        for restore in snapshots:
            restore()
        for tensor, requires_grad, gradient in tensors:
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for found, before in names:
            for name in set(found) - before:
                if name.startswith("__"):  # Dynamo's names; another thread may have added others
                    del found[name]
        random.setstate(python)
        torch.set_rng_state(cpu)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", autocast)


def _snapshot(module: nn.Module) -> Callable[[], None]:
    """Record a module's class, its attributes, and the contents of attributes that are containers; returns the undo."""
    kind, attributes = type(module), dict(vars(module))
    contents: dict[str, Any] = {
        name: container(value)
        for name, value in attributes.items()
        for container in (dict, list, set)
        if isinstance(value, container)
    }

    def restore() -> None:
        if type(module) is not kind:
            module.__class__ = kind
        for name, before in contents.items():
            _restore(attributes[name], before)
        _restore(vars(module), attributes)

    return restore


def _restore(container: Any, before: dict[Any, Any] | list[Any] | set[Any]) -> None:
    """Restore the contents of a container. One that is unchanged is not written, as a write may have side effects."""
    if _identities(container) == _identities(before):
        return
    container.clear()
    if isinstance(before, list):
        container.extend(before)
    else:
        container.update(before)


def _identities(container: Any) -> list[int]:
    return [id(x) for pair in container.items() for x in pair] if isinstance(container, dict) else [*map(id, container)]


def _globals(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The globals into which Dynamo may install names: those of the traced function."""
    for function in (model.forward, type(model).__call__):
        inner = getattr(function, "__func__", function)
        if isinstance(inner, FunctionType):
            yield inner.__globals__


def capture(model: nn.Module, example_inputs: Any, precision: Precision | None = None) -> Captured:
    """Capture the forward and backward of `model` on inputs like `example_inputs` as one aten graph.

    If no parameter and no input requires a gradient, there is no backward.

    Parameters
    ----------
    model : nn.Module
        May lie on the meta device: nothing is computed. Tied parameters, buffers and the tags of activation
        checkpoints are kept; logging and warnings are left out.
    example_inputs : tensor, tuple, dict or (tuple, dict)
        The *global* batch of one call.
    precision : Precision, optional
        The graph takes parameters in their working dtype, and casts the inputs and outputs itself.

    Raises
    ------
    CaptureError
        With the user's source line, where the model branches on data.
    """
    # 1. Bring the arguments into the order of the signature, and name them.
    args, kwargs = as_call(example_inputs)
    signature = inspect.signature(model.forward)
    args, kwargs = canonical_arguments(signature, args, kwargs)
    names = leaf_names(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # 2. Refuse what cannot be trained.
    refuse_backward_hooks(model)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor):
            refuse_layout(name, leaf)
    sized = {name: leaf for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    if sized and all(leaf.shape[0] == 0 for leaf in sized.values()):
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in sized.items())
        raise CaptureError(
            f"the batch has no rows ({shapes}), so there is nothing to spread over devices: compile for the batch that "
            "a step trains on, and leave out a last batch without rows"
        )
    # 3. Trace, describe the inputs and outputs, and move the casts of mixed precision to them.
    graph, out_spec, reads, asked = _joint_graph(model, args, kwargs, precision, names)
    captured = _captured_step(graph, out_spec, model, signature, spec, names, leaves, asked)
    given = {name: leaf.dtype for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor)}
    first = len(captured.mutated) + len(captured.outputs)
    places = {name: first + index for index, name in enumerate(captured.input_gradients)}
    cast_inputs_inside(graph.graph, {node: (given[name], places.get(name)) for node, name in captured.inputs.items()})
    take_cast_parameters(graph.graph, captured.parameters, captured.gradients)
    graph.recompile()
    policy = precision or Precision()
    dtypes = {name: policy.dtypes(model.get_parameter(name).dtype) for name in captured.parameters.values()}
    return replace(captured, dtypes=dtypes, reads=reads)


def _joint_graph(
    model: nn.Module, args: Any, kwargs: Any, precision: Precision | None, names: tuple[str, ...]
) -> tuple[fx.GraphModule, pytree.TreeSpec, Reads, tuple[tuple[int, str], ...]]:
    """The joint graph, how its results are returned, the Python values that were read, and `CallTree.asked`."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensorMode

    with readable_errors(model), preserved(model), contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        # Dynamo makes a size dynamic that differs from an earlier capture's; a step has the sizes of its inputs.
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True))
        # 1. Take fake tensors for the model's on the meta device, and for the inputs.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        if any(parameter.is_meta for parameter in model.parameters()):
            devices = [leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            model = _off_meta(model, fake, next((device for device in devices if device.type != "meta"), None))
        real = pytree.tree_leaves((args, kwargs))
        wanted = [wants_gradient(leaf) for leaf in real]
        # This puts the objects together again that `capture` has opened.
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: _fake_like(t, fake), (args, kwargs))
        if precision is not None and precision.cast_forward_inputs and precision.param_dtype is not None:
            args, kwargs = cast(arguments_opened(args, kwargs), precision.param_dtype)  # see cast_inputs_inside
        opened = arguments_opened(args, kwargs)  # Dynamo traces the objects themselves, AOTAutograd their tensors
        leaves = pytree.tree_leaves(opened)
        for leaf in (leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants):
            leaf.requires_grad_()
        # 2. Let Dynamo trace what it does not by itself.
        backward_hooks_as_tensor_hooks(model)
        stack.enter_context(traceable(model))
        stack.enter_context(objects_as_arguments())
        stack.enter_context(inputs_made_leaves([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
        stack.enter_context(assigned_buffers(model))
        changing = set[int]()
        fixed = stack.enter_context(numbers_of_buffers(changing))
        stack.enter_context(working_copies(model, precision, fake))
        # 3. Trace the forward, and refuse what a step would not do.
        # Not under `fake`: Dynamo makes its own mode, and under another one it mistakes buffers that are views.
        with recorded_effects() as effects, attributes_refused(model, effects, names, leaves, real):
            module = dynamo_graph_capture_for_export(model)(*args, **kwargs)
            while written := {key for key, value in fixed.items() if storage_of(value) in effects.storages}:
                # A number of a buffer that the forward writes is no constant: another trace leaves it open.
                changing.update(storage_of(fixed.pop(key)) for key in written)
                module = dynamo_graph_capture_for_export(model)(*args, **kwargs)
        reads, changes, containers = reads_of(module, model, effects, fixed)
        asked = effects.asked_of(leaves)
        # A list grows from call to call: what a forward computes of it may be another after many of them.
        after = [1] * bool(changes or containers) + [_MANY_CALLS] * bool(containers)
        for calls in after:
            with after_a_call([*changes, *containers], calls), recorded_effects() as later:
                again = dynamo_graph_capture_for_export(model)(*args, **kwargs)
                still = bool(changes) and calls == 1 and reads_of(again, model, later, fixed)[1]
            if still or _program(again) != _program(module):
                raise (changes[0] if changes else containers[0]).error
        if changes:
            reads = reads.without({change.shown for change in changes})  # a call of the model itself sets them
        # 4. Trace the backward with it. It takes half of the time: what AOTAutograd made of the same graph is taken
        #    from an earlier run.
        _name_once(module)
        fold_constant_masks(module.graph)
        module.recompile()
        _copy_returned_aliases(module)
        stack.enter_context(torch._guards.tracing(module.meta["tracing_context"]))
        traced = trace_key(module, *opened)
        if traced and (known := cached_graph(traced[0], module.meta["tracing_context"].fake_mode)):
            return known, traced[1], reads, asked
        joint = aot_export_joint_with_descriptors(stack, module, *opened)
        if traced:
            save_graph(traced[0], joint.graph_module)
    return joint.graph_module, joint.out_spec, reads, asked


def _program(module: fx.GraphModule) -> list[str | None]:
    """What a graph computes, without inputs that nothing uses."""
    return [node.format_node() for node in module.graph.nodes if node.users or node.op != "placeholder"]


def backward_hooks_as_tensor_hooks(model: nn.Module) -> None:
    """Let hooks on the inputs and outputs of submodules call the submodules' full backward hooks.

    Dynamo traces hooks on tensors, and not those. A hook on an output keeps its gradient in a buffer, and the hook on
    the input calls those of the module with both gradients, as `torch.utils.hooks.BackwardHook` does.
    """
    for module in model.modules():
        if module is not model and (module._backward_hooks or module._backward_pre_hooks):
            hooks, pre_hooks = (*module._backward_hooks.values(),), (*module._backward_pre_hooks.values(),)
            module._backward_hooks.clear()
            module._backward_pre_hooks.clear()
            module.register_forward_pre_hook(_as_own_tensors)
            module.register_forward_hook(_calling(hooks, pre_hooks))


def _as_own_tensors(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a module as tensors whose gradients are those of this call alone."""
    return tuple(arg.view_as(arg) if wants_gradient(arg) else arg for arg in args)


def _calling(hooks: tuple[Any, ...], pre_hooks: tuple[Any, ...]) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
    """The forward hook of a module with these backward hooks."""

    def called(module: nn.Module, found: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
        for hook in hooks:
            result = hook(module, found, given)
            found = found if result is None else result
        return found

    def on_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        outputs = (*output,) if isinstance(output, tuple) else (output,)
        inputs = [index for index, arg in enumerate(args) if wants_gradient(arg)]
        places = [index for index, each in enumerate(outputs) if wants_gradient(each)]
        if not places:
            return None
        if (hooks and len(inputs) > 1) or (len(places) > 1 and (pre_hooks or not inputs)):
            torch._dynamo.graph_break(msg=SEVERAL_GRADIENTS)
        gradients = {index: torch.zeros_like(outputs[index]) for index in places}
        results = [each.view_as(each) if index in gradients else each for index, each in enumerate(outputs)]

        def with_only(gradient: Tensor, place: int, count: int) -> tuple[Any, ...]:
            return tuple(gradient if index == place else None for index in range(count))

        def keep(place: int) -> Callable[[Tensor], Tensor]:
            def kept(gradient: Tensor) -> Tensor:
                for hook in pre_hooks:
                    result = hook(module, with_only(gradient, place, len(outputs)))
                    gradient = gradient if result is None else result[place]
                gradients[place].copy_(gradient)
                if not inputs:
                    called(module, (None,) * len(args), with_only(gradient, place, len(outputs)))
                return gradient

            return kept

        def on_input(gradient: Tensor) -> Tensor:
            given = tuple(gradients.get(index) for index in range(len(outputs)))
            result: Tensor = called(module, with_only(gradient, inputs[0], len(args)), given)[inputs[0]]
            return result

        for place in places:
            results[place].register_hook(keep(place))
        if hooks and inputs:
            args[inputs[0]].register_hook(on_input)
        if not isinstance(output, tuple):
            return results[0]
        return type(output)(*results) if hasattr(output, "_fields") else (*results,)

    return on_outputs


def _copy_returned_aliases(module: fx.GraphModule) -> None:
    """Let a module of Dynamo's return copies of outputs that need gradients and are views of something else.

    That is of parameters, of inputs (or these themselves) and of other outputs. AOTAutograd gives them no gradients of
    their own, so that the gradient of a loss of them would be lost.
    """
    codegen: Any = module.graph._codegen
    returned = codegen.process_outputs

    def process_outputs(outputs: Any) -> Any:
        given = [*module.parameters(), *pytree.tree_leaves(with_objects_opened(codegen._inputs))]
        storages = {storage_of(tensor) for tensor in given if isinstance(tensor, Tensor)}
        own: dict[int, Tensor] = {}  # for each tensor, which may be returned several times

        def with_own_storage(tensor: Tensor) -> Tensor:
            if not wants_gradient(tensor):
                return tensor
            if id(tensor) not in own:
                own[id(tensor)] = tensor.clone() if storage_of(tensor) in storages else tensor
                storages.add(storage_of(tensor))
            return own[id(tensor)]

        results = pytree.tree_map_only(Tensor, with_own_storage, with_objects_opened(returned(outputs)))
        return with_objects_opened(results)  # which `tree_map_only` has put together again

    vars(codegen)["process_outputs"] = process_outputs


def _name_once(module: nn.Module) -> None:
    """Let `named_parameters` list the tensors of a module that is registered twice under its first name only.

    AOTAutograd replaces tensors by traced ones under each name, and would restore the traced one of the first name.
    Tensors that several modules share keep all names. Buffers are handled alike.
    """

    def members(kind: str) -> Callable[..., Iterator[tuple[str, Tensor]]]:
        def named(
            prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
        ) -> Iterator[tuple[str, Tensor]]:
            seen: set[Tensor] = set()
            for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
                for leaf, tensor in getattr(owner, kind).items():
                    if tensor is not None and not (remove_duplicate and tensor in seen):
                        seen.add(tensor)
                        yield f"{path}.{leaf}" if path else leaf, tensor

        return named

    vars(module).update(named_parameters=members("_parameters"), named_buffers=members("_buffers"))


def _fake_like(tensor: Tensor, fake: Any, device: torch.device | None = None) -> Tensor:
    """A contiguous fake tensor of its shape, so that a step does not depend on the strides of the example."""
    with fake:
        off_meta = device or "cpu"
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=off_meta if tensor.is_meta else tensor.device)


def _off_meta(model: nn.Module, fake: Any, device: torch.device | None) -> nn.Module:
    """A copy of a meta model with fake tensors on the inputs' device, so that the ops of a real device are captured."""
    return copy_with_tensors(model, lambda _, x: _fake_like(x, fake, device) if x.is_meta else x.detach().clone())


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """For each name the first one of the same tensor."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in named}


def _parameter_changes(
    model: nn.Module, graph: fx.Graph, first_names: Mapping[str, str]
) -> tuple[dict[str, fx.GraphModule], set[str]]:
    """What `take_parameter_changes` returns for the parameters that the graph takes once, by their first names."""
    parameters = dict(model.named_parameters())
    taken = [getattr(node.meta["desc"], "target", "") for node in graph.find_nodes(op="placeholder")]
    times = Counter(first_names[name] for name in taken if name in first_names)
    once = {name: parameters[first_names[name]] for name in taken if times[first_names.get(name, "")] == 1}
    frozen = {name for name, parameter in once.items() if not parameter.requires_grad}
    dtypes = {name: parameter.dtype for name, parameter in once.items()}
    changes, computed = take_parameter_changes(graph, dtypes, frozen)
    return {first_names[name]: each for name, each in changes.items()}, {first_names[name] for name in computed}


def _captured_step(
    module: fx.GraphModule,
    out_spec: pytree.TreeSpec,
    model: nn.Module,
    signature: inspect.Signature,
    spec: pytree.TreeSpec,
    names: tuple[str, ...],
    leaves: Sequence[Any],
    asked: tuple[tuple[int, str], ...],
) -> Captured:
    """The captured step of AOTAutograd's joint graph, whose inputs and outputs are described in ``meta["desc"]``."""
    graph = module.graph
    tied = _first_names(model.named_parameters(remove_duplicate=False))
    changes, computed = _parameter_changes(model, graph, tied)
    fold_conjugates(graph)
    fold_copies(graph)
    linalg_checks_as_values(graph)
    enclose_open_sizes(model, graph)
    kinds = [type(described).__name__ for described in graph.output_node().meta["desc"]]
    asserts_as_values(graph, [index for index, kind in enumerate(kinds) if kind == "PlainAOTOutput"])
    for node in graph.nodes:
        if node.op != "placeholder" or node.users:  # AOTAutograd has an open input for a number that is a constant
            refuse_values(model, node)
        refuse_effects(model, node)
    # 1. Name the inputs. A tied tensor that comes in twice becomes one input.
    shared = _first_names(model.named_buffers(remove_duplicate=False))
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    inputs: dict[str, str] = {}
    tangents: dict[str, int] = {}
    by_name: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        described = node.meta["desc"]
        kind = type(described).__name__
        if kind in ("ParamAOTInput", "BufferAOTInput"):
            first_names, found = (tied, parameters) if kind == "ParamAOTInput" else (shared, buffers)
            name = first_names.get(described.target, described.target)
            if name in by_name:
                node.replace_all_uses_with(by_name[name])
                graph.erase_node(node)
            else:
                by_name[name] = node
                found[node.name] = name
        elif kind == "PlainAOTInput":
            if isinstance(leaves[described.idx], Tensor):
                inputs[node.name] = names[described.idx]
            else:  # a number is a constant of the captured graph
                graph.erase_node(node)
        elif kind == "TangentAOTInput":
            # The tangent of a changed parameter has no such index; step 2 refuses the change.
            tangents[node.name] = getattr(described.output, "idx", -1)
        else:
            raise CaptureError(
                f"the captured graph has an input of the kind {kind} ({described}), which is not supported"
            )
    # 2. Sort the outputs: new values of buffers, results of the forward, gradients. Add the gradients of tied names.
    output = graph.output_node()
    gradient_of: dict[str, Any] = {}
    gradient_of_input: dict[str, Any] = {}
    mutated: dict[str, Any] = {}
    returned: list[Any] = []
    for value, described in zip(output.args[0], output.meta.pop("desc")):  # type: ignore[arg-type]
        kind = type(described).__name__
        if kind == "InputMutationAOTOutput":
            target = getattr(described.mutated_input, "target", "")
            target = shared.get(target, tied.get(target, target))
            is_buffer = type(described.mutated_input).__name__ == "BufferAOTInput"
            if not is_buffer and target not in computed:
                what = f"parameter {target}" if target else f"input {names[described.mutated_input.idx]}"
                reason, way_out = f"it changes its {what} in place", f"Copy that {what.split()[0]} first (.clone())."
                if target:
                    way_out = PARAMETER_WAY_OUT
                raise capture_error(model, reason, *module_and_line(model, value), way_out)
            mutated[target] = value
        elif kind == "PlainAOTOutput":
            returned.append(value)
        elif kind == "GradAOTOutput" and type(described.grad_of).__name__ == "PlainAOTInput":
            gradient_of_input[names[described.grad_of.idx]] = value
        elif kind == "GradAOTOutput":
            name = tied.get(described.grad_of.target, described.grad_of.target)
            before = gradient_of.get(name)
            if before is not None and value is not None:
                with graph.inserting_before(output):
                    total = graph.call_function(torch.ops.aten.add.Tensor, (before, value))
                total.meta.update(val=value.meta["val"], partitioner_tag="is_backward")
                value = total
            gradient_of[name] = before if value is None else value
    # 3. Return the tensors among these: a constant of the forward is no output of the graph.
    gradients = tuple(name for name in parameters.values() if model.get_parameter(name).requires_grad)
    input_gradients = tuple(name for name in inputs.values() if name in gradient_of_input)
    made_leaves = [
        index
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        if name in gradient_of_input and not wants_gradient(leaf)
    ]
    positions = [index for index, value in enumerate(returned) if isinstance(value, fx.Node)]
    tensors = [returned[index] for index in positions]
    of_inputs, of_parameters = map(gradient_of_input.get, input_gradients), map(gradient_of.get, gradients)
    output.args = ([*mutated.values(), *tensors, *of_inputs, *of_parameters],)
    extend_backward(graph)
    graph.set_codegen(fx.graph.CodeGen())  # flat arguments, in the placeholders' order
    graph.lint()
    module.recompile()
    # 4. Describe the step.
    aliases: dict[str, tuple[str, ...]] = {}
    for name, first in tied.items():
        if name != first:
            aliases[first] = (*aliases.get(first, ()), name)
    return Captured(
        module,
        parameters,
        buffers,
        inputs,
        {name: positions.index(index) for name, index in tangents.items()},
        tuple(f"output{index}" for index in range(len(tensors))),
        gradients,
        tuple(mutated),
        aliases,
        CallTree(
            signature,
            spec,
            names,
            tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)),
            tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            out_spec,
            tuple(TENSOR_OUTPUT if isinstance(value, fx.Node) else value for value in returned),
            tuple(made_leaves),
            asked,
        ),
        model.training,
        input_gradients=input_gradients,
        changes=changes,
    )
