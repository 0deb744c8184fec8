"""Capture: an `nn.Module` and example inputs become one joint graph of forward and backward.

A capture leaves the user's model, and the state that torch and Python hold for the whole process, as they were
(`preserved`). Torch's own capture writes into both: it replaces parameters by traced tensors and installs names in the
globals of the user's module, and it may fail at any point in between.

With `capture_errors`, which reads their errors, and `plan_cache`, which describes and saves their graphs, this is the
only module that touches torch's private capture interfaces.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import random
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import networkx
import torch
import torch.utils._pytree as pytree
from networkx.utils import UnionFind
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from shardweave.compiler.capture_errors import (
    capture_error,
    module_and_line,
    readable_errors,
    refuse_backward_hooks,
    refuse_effects,
    refuse_values,
    way_out_of,
)
from shardweave.compiler.constant_masks import fold_constant_masks
from shardweave.compiler.dynamo_workarounds import traceable
from shardweave.compiler.guards import after_a_call, numbers_of_buffers, reads_of, recorded_effects
from shardweave.compiler.mixed_precision import cast, cast_inputs_inside, take_cast_parameters, working_copies
from shardweave.compiler.plan_cache import cached_graph, save_graph, trace_key
from shardweave.ir import (
    TENSOR_OUTPUT,
    CallTree,
    Captured,
    CaptureError,
    InternalError,
    Precision,
    Reads,
    as_call,
    canonical_arguments,
    leaf_names,
    with_objects_opened,
)
from shardweave.ops import REGION_NAMES
from shardweave.runtime import copy_with_tensors, wants_gradient
from shardweave.sharding import INHERITED_META, draws, graph_outputs, tensors, writes_by_mask


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
    sized = {name: leaf for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    if sized and all(leaf.shape[0] == 0 for leaf in sized.values()):
        shapes = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in sized.items())
        raise CaptureError(
            f"the batch has no rows ({shapes}), so there is nothing to spread over devices: compile for the batch that "
            "a step trains on, and leave out a last batch without rows"
        )
    # 3. Trace, describe the inputs and outputs, and move the casts of mixed precision to them.
    graph, out_spec, reads = _joint_graph(model, args, kwargs, precision)
    captured = _captured_step(graph, out_spec, model, signature, spec, names, leaves)
    given = {name: leaf.dtype for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor)}
    first = len(captured.mutated_buffers) + len(captured.outputs)
    places = {name: first + index for index, name in enumerate(captured.input_gradients)}
    cast_inputs_inside(graph.graph, {node: (given[name], places.get(name)) for node, name in captured.inputs.items()})
    take_cast_parameters(graph.graph, captured.parameters, captured.gradients)
    graph.recompile()
    policy = precision or Precision()
    dtypes = {name: policy.dtypes(model.get_parameter(name).dtype) for name in captured.parameters.values()}
    return replace(captured, dtypes=dtypes, reads=reads)


def _joint_graph(
    model: nn.Module, args: Any, kwargs: Any, precision: Precision | None
) -> tuple[fx.GraphModule, pytree.TreeSpec, Reads]:
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._subclasses.fake_tensor import FakeTensorMode

    with readable_errors(model), preserved(model), contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        # Dynamo makes a size dynamic that differs from an earlier capture's; a step has the sizes of its inputs.
        stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        if any(parameter.is_meta for parameter in model.parameters()):
            given = [leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            model = _off_meta(model, fake, next((device for device in given if device.type != "meta"), None))
        wanted = [wants_gradient(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: _fake_like(t, fake), (args, kwargs))
        if precision is not None and precision.cast_forward_inputs and precision.param_dtype is not None:
            args, kwargs = cast((args, kwargs), precision.param_dtype)  # see cast_inputs_inside
        for leaf in (leaf for leaf, wants in zip(pytree.tree_leaves((args, kwargs)), wanted, strict=True) if wants):
            leaf.requires_grad_()
        stack.enter_context(traceable(model))
        fixed = stack.enter_context(numbers_of_buffers())
        stack.enter_context(working_copies(model, precision, fake))
        # Not under `fake`: Dynamo makes its own mode, and under another one it mistakes buffers that are views.
        with recorded_effects() as effects:
            module = dynamo_graph_capture_for_export(model)(*args, **kwargs)
        reads, changes = reads_of(module, model, effects, fixed)
        if changes:
            with after_a_call(changes), recorded_effects() as later:
                again = dynamo_graph_capture_for_export(model)(*args, **kwargs)
                still = reads_of(again, model, later, fixed)[1]
            if still or again.code != module.code:
                raise changes[0].error
            reads = reads.without({change.shown for change in changes})  # a call of the model itself sets them
        _name_once(module)
        _assign_data_in_place(module.graph)
        fold_constant_masks(module.graph)
        module.recompile()
        codegen = module.graph._codegen
        returned = codegen.process_outputs
        vars(codegen)["process_outputs"] = lambda outputs: with_objects_opened(returned(outputs))
        stack.enter_context(torch._guards.tracing(module.meta["tracing_context"]))
        # AOTAutograd takes half of the time. What it made of the same graph is taken from an earlier run.
        traced = trace_key(module, args, kwargs)
        if traced and (known := cached_graph(traced[0], module.meta["tracing_context"].fake_mode)):
            return known, traced[1], reads
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs)
        if traced:
            save_graph(traced[0], joint.graph_module)
    return joint.graph_module, joint.out_spec, reads


def _assign_data_in_place(graph: fx.Graph) -> None:
    """Let ``x.data = value`` write into x, where the value has its shape and dtype: AOTAutograd refuses ``set_``."""
    data_of: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    for node in graph.find_nodes(op="call_function", target=torch.Tensor.set_):
        if len(node.args) != 2 or not all(isinstance(each, fx.Node) for each in node.args):
            continue
        old, new = (each.meta["example_value"] for each in node.all_input_nodes)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            continue
        with graph.inserting_before(node):
            target, value = (graph.call_function(data_of, (each,)) for each in node.args)
            graph.call_method("copy_", (target, value))
        for user in list(node.users):  # it sets the version counter
            graph.erase_node(user)
        graph.erase_node(node)


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


def _captured_step(
    module: fx.GraphModule,
    out_spec: pytree.TreeSpec,
    model: nn.Module,
    signature: inspect.Signature,
    spec: pytree.TreeSpec,
    names: tuple[str, ...],
    leaves: Sequence[Any],
) -> Captured:
    """The captured step of AOTAutograd's joint graph, whose inputs and outputs are described in ``meta["desc"]``."""
    graph = module.graph
    _linalg_checks_as_values(graph)
    enclose_open_sizes(model, graph)
    kinds = [type(described).__name__ for described in graph.output_node().meta["desc"]]
    asserts_as_values(graph, [index for index, kind in enumerate(kinds) if kind == "PlainAOTOutput"])
    for node in graph.nodes:
        if node.op != "placeholder" or node.users:  # AOTAutograd has an open input for a number that is a constant
            refuse_values(model, node)
        refuse_effects(model, node)
    # 1. Name the inputs. A tied tensor that comes in twice becomes one input.
    tied = _first_names(model.named_parameters(remove_duplicate=False))
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
            if type(described.mutated_input).__name__ != "BufferAOTInput" and not _is_like_buffer(model, target, value):
                what = f"parameter {target}" if target else f"input {names[described.mutated_input.idx]}"
                reason, way_out = f"it changes its {what} in place", f"Copy that {what.split()[0]} first (.clone())."
                if target:
                    way_out = "Compute with a changed copy of it, or change it between steps, under torch.no_grad()."
                raise capture_error(model, reason, *module_and_line(model, value), way_out_of(value, way_out))
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
    wanted = {name for name, leaf in zip(names, leaves, strict=True) if wants_gradient(leaf)}
    input_gradients = tuple(name for name in inputs.values() if name in wanted)
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
    captured = Captured(
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
        ),
        model.training,
        input_gradients=input_gradients,
    )
    return with_buffers(captured, mutated)


def with_buffers(captured: Captured, names: Collection[str]) -> Captured:
    """The step with those of its frozen parameters among `names` handled as buffers. Its graph is changed."""
    moved = {node: name for node, name in captured.parameters.items() if name in {*names} - {*captured.gradients}}
    if not moved:
        return captured
    # The graph has parameters first, then buffers
    parameters = {node: name for node, name in captured.parameters.items() if node not in moved}
    placeholders = {node.name: node for node in captured.graph.graph.find_nodes(op="placeholder")}
    others = [node for name, node in placeholders.items() if name not in captured.parameters]
    for name in moved:
        if others:
            others[0].prepend(placeholders[name])
    captured.graph.recompile()
    return replace(captured, parameters=parameters, buffers={**moved, **captured.buffers})


def _is_like_buffer(model: nn.Module, name: str, value: Any) -> bool:
    """Whether a parameter that the forward changes to `value` in place may be handled as a buffer: it is frozen.

    As the parameters of a momentum encoder are. The step computes with all of it in its own dtype.
    """
    parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if parameter is None or parameter.requires_grad or not isinstance(value, fx.Node):
        return False
    return bool(parameter.dtype == value.meta["val"].dtype)


_ASSERTS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}


def asserts_as_values(graph: fx.Graph, outputs: Iterable[int]) -> None:
    """Let asserts return a value that the forward needs: they have no users, and would be removed.

    An assert of a flag for each element of a value, such as ``torch.isfinite(x).all()``, returns that value, so that
    each rank checks its own part. Any other returns the first tensor of these outputs.
    """
    aten = torch.ops.aten
    place = {node: index for index, node in enumerate(graph.nodes)}
    output = graph.output_node()
    for node in [node for node in place if node.target in _ASSERTS]:
        condition, message = node.args[0], node.args[1] if len(node.args) > 1 else "an assert does not hold"
        assert isinstance(condition, fx.Node)
        # 1. The flags that have to be true: those of which the condition says that all are, or that none is not.
        flags, inverted = condition, condition.target is aten.logical_not.default
        inner = condition.args[0] if inverted else condition
        if isinstance(inner, fx.Node) and inner.target is (aten.any.default if inverted else aten.all.default):
            (flags,) = inner.all_input_nodes
        # 2. The value that they belong to, of the same shape, and its users behind them; or an output.
        value, users = _checked_value(flags, place)
        if value is None:
            flags, inverted = condition, False
            returned = graph_outputs(graph)
            value = next((returned[index] for index in outputs if isinstance(returned[index], fx.Node)), None)
            users = [output]
        # 3. The check, in the forward
        if value is not None:
            last = max(value, flags, key=place.__getitem__)
            with graph.inserting_after(last):
                op = torch.ops.shardweave.asserted.default
                checked = graph.call_function(op, (value, flags, not inverted, message))
            checked.meta.update(node.meta, val=value.meta["val"])
            place[checked] = place[last]
            for user in users:
                user.replace_input_with(value, checked)
        graph.erase_node(node)


def _checked_value(flags: fx.Node, place: Mapping[fx.Node, int]) -> tuple[fx.Node | None, list[fx.Node]]:
    """The nearest value that flags are computed from element by element, and its users in the forward behind them."""
    shape, value = flags.meta["val"].shape, flags
    chain = {flags}
    while shape:
        before = [node for node in value.all_input_nodes if node.meta["val"].shape == shape]
        if not before or torch.Tag.pointwise not in getattr(value.target, "tags", ()):
            break
        value = before[0]
        users = [user for user in value.users if not _is_late(user) and user.op != "output"]
        users = [user for user in users if user not in chain and place[user] > place[flags]]
        if users and type(value.meta.get("desc")).__name__ != "ParamAOTInput":  # which products read as it is
            return value, users
        chain.add(value)
    return None, []


def _linalg_checks_as_values(graph: fx.Graph) -> None:
    """Let checks of torch.linalg return what they check: AOTAutograd orders them by tokens, and they have no result."""
    output = graph.output_node()
    effects = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    checks = [node for node in effects if node.args[1] is torch.ops.aten._linalg_check_errors.default]
    if not checks or len(checks) != len(effects):
        return  # another effect is refused
    for check in checks:
        token, _, info, what = check.args
        assert isinstance(token, fx.Node) and isinstance(info, fx.Node)
        function = info.all_input_nodes[0]
        results = [node for node in function.users if node.args[1] == 0 and node.users]
        for result in results:
            users = [user for user in result.users if not _is_late(user)]
            function.append(info)
            function.append(result)
            with graph.inserting_after(info):
                arguments = (result, info, what, check.kwargs["is_matrix"])
                checked = graph.call_function(torch.ops.shardweave.checked_matrices.default, arguments)
            checked.meta.update(result.meta)
            for user in users:
                user.replace_input_with(result, checked)
        for following in list(check.users):
            following.replace_all_uses_with(token)
            graph.erase_node(following)
        graph.erase_node(check)
    # The tokens, of which nothing is left
    described = zip(graph_outputs(graph), output.meta["desc"], strict=True)
    kept = [(value, kind) for value, kind in described if not is_token(kind)]
    output.args, output.meta["desc"] = ([value for value, _ in kept],), [kind for _, kind in kept]
    for node in graph.find_nodes(op="placeholder"):
        if is_token(node.meta["desc"]):
            graph.erase_node(node)


def is_token(described: Any) -> bool:
    """Whether this describes an input or output by which AOTAutograd orders effects."""
    return "Token" in type(described).__name__


def extend_backward(graph: fx.Graph) -> None:
    """Tag the users of backward nodes as backward.

    Random draws in the backward of a custom function, and products that Dynamo rewrites, have lost the tag.
    """
    for node in graph.nodes:
        late = any(map(_is_late, node.all_input_nodes))
        if late and node.op != "output":
            node.meta["partitioner_tag"] = "is_backward"


# -- regions in which sizes or numbers depend on the values of tensors


def enclose_open_sizes(model: nn.Module, graph: fx.Graph) -> None:
    """Move ops between which a size or a number depends on the values of tensors into ops ``shardweave.region``.

    A region takes and returns tensors of fixed sizes, so the rest of the compiler sees no other ones. What a backward
    needs of such values is computed again in its own region.
    """
    extend_backward(graph)
    opened = {node for node in graph.nodes if _is_open(node) and (node.op != "placeholder" or node.users)}
    for node in graph.output_node().all_input_nodes:
        if node in opened:
            what = "the size of a result depends on the values of tensors"
            way_out = "Return the whole tensor and a mask of what is meant, and select outside of the model."
            raise capture_error(model, what, *module_and_line(model, node), way_out)
    # 1. Find the ops that make or read an open value; an op and its results belong together.
    inside = {node for node in graph.nodes if opened.intersection([node, *node.all_input_nodes])}
    inside.update(filter(writes_by_mask, graph.nodes))
    if not inside:
        return
    # 2. An open value joins its maker and its readers. The forward and the backward have regions of their own.
    joined: UnionFind = UnionFind(graph.nodes)
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            if (arg in opened or node.target is operator.getitem) and _is_late(arg) == _is_late(node):
                joined.union(arg, node)
    # 3. Regions that need each other's results become one, with all that lies between.
    order = networkx.DiGraph()
    for node in graph.nodes:
        order.add_edges_from((joined[arg], joined[node]) for arg in node.all_input_nodes)
    for several in networkx.strongly_connected_components(order):
        joined.union(*several)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        members.setdefault(joined[node], []).append(node)
    regions = [found for found in members.values() if inside.intersection(found)]
    for node in (node for found in regions for node in found):
        _refuse_open(model, node)
    # 4. Replace them, those of the backward first: they may ask for more results of the forward's.
    maker = _RegionMaker(model, graph, opened)
    for found in sorted(regions, key=lambda found: not _is_late(found[0])):
        maker(found)
    for node in reversed([node for found in regions for node in found]):
        graph.erase_node(node)
    # 5. Sort the nodes: a region starts when all of its inputs are there, and no forward after the backward.
    places = {node: (_is_late(node), place) for place, node in enumerate(graph.nodes)}
    order = networkx.DiGraph((arg, node) for node in places for arg in node.all_input_nodes)
    order.add_nodes_from(places)
    for node in list(networkx.lexicographical_topological_sort(order, places.__getitem__)):
        if node.op not in ("placeholder", "output"):
            graph.output_node().prepend(node)


def _is_open(node: fx.Node) -> bool:
    """Whether a number or a size in the value of a node is no constant; those of the step's inputs are."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for value in pytree.tree_leaves(node.meta.get("val")):
        numbers = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
        if any(isinstance(number, symbolic) for number in numbers):
            return True
    return False


def _symbols(node: fx.Node) -> set[Any]:
    """The symbols of numbers and sizes in the value of a node that depend on the values of tensors."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    kinds = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, kinds)]
    return set().union(*map(free_unbacked_symbols, values))


def _is_late(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _refuse_open(model: nn.Module, node: fx.Node) -> None:
    """Raise CaptureError for a node that no region can hold."""
    if draws(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
        what = f"{node.target} runs on a number of elements that depends on the values of tensors"
        way_out = "Draw random numbers, such as those of dropout, for all elements, before some of them are selected."
        raise capture_error(model, what, *module_and_line(model, node), way_out)


class _RegionMaker:
    """Replaces the nodes of a region by one call. `opened` are the nodes whose values have open sizes."""

    def __init__(self, model: nn.Module, graph: fx.Graph, opened: set[fx.Node]) -> None:
        self._model, self._graph, self._opened = model, graph, opened
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        # A selection has at most as many elements as what it selects from. A number may be anything: it is taken for
        # the largest dimension of the step's inputs.
        given = [value for node in graph.find_nodes(op="placeholder") for value in tensors(node.meta.get("val"))]
        largest = max((size for value in given for size in value.shape if isinstance(size, int)), default=1)
        self._hints: dict[Any, int] = {}
        for node in (node for node in graph.nodes if node in opened):
            sources = [value for arg in node.all_input_nodes for value in tensors(arg.meta["val"])]
            bound = max((math.prod(self._size(value)) for value in sources), default=largest)
            hint = bound if any(True for _ in tensors(node.meta["val"])) else largest
            for symbol in _symbols(node) - self._hints.keys():
                self._hints[symbol] = hint

    def __call__(self, found: Sequence[fx.Node]) -> None:
        # 1. Add what the forward computed of open sizes; find the inputs and the outputs.
        within, waiting = {*found}, [*found]
        while waiting:
            more = [arg for arg in waiting.pop().all_input_nodes if arg in self._opened and arg not in within]
            within.update(more)
            waiting += more
        nodes = sorted(within, key=self._places.__getitem__)
        inputs = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in within))
        fixed = [node for node in found if node not in self._opened and isinstance(node.meta.get("val"), Tensor)]
        outputs = [node for node in fixed if any(user not in within for user in node.users)]
        if not outputs:  # nothing but checks of these sizes
            return
        # 2. Write the code, with names that are equal in equal regions.
        inner, device = fx.Graph(), inputs[0].meta["val"].device
        inside = {node: inner.placeholder(f"a{index}") for index, node in enumerate(inputs)}
        made_on = cache(lambda: inner.call_function(getattr, (inside[inputs[0]], "device")))

        def own(leaf: Any) -> Any:
            if isinstance(leaf, str):  # the message of a check
                return re.sub(r"\bz?uf?\d+\b", "value", leaf).partition(" on node ")[0]
            return inside[leaf] if isinstance(leaf, fx.Node) else made_on() if leaf == device else leaf

        for index, node in enumerate(nodes):
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), own)
            inside[node] = inner.create_node("call_function", node.target, args, kwargs, f"v{index}")
        inner.output([inside[node] for node in outputs])
        code = inner.python_code("self")
        usual = fx.Graph().python_code("self").globals.keys()
        if unknown := code.globals.keys() - usual - REGION_NAMES.keys():
            raise InternalError(f"the code of a region refers to {sorted(unknown)}")
        # 3. Call it.
        values = [node.meta["val"] for node in outputs]
        shapes = ", ".join(" ".join([str(value.dtype)[6:], *map(str, value.shape)]) for value in values)
        text = code.src.strip().replace("def forward(self, ", "def region(")
        with self._graph.inserting_before(found[0]):
            op = torch.ops.shardweave.region.default
            described = text, shapes, sum(map(self._flops, nodes)), sum(map(self._bytes, nodes))
            call = self._graph.call_function(op, (inputs, *described))
            call.meta = {name: found[0].meta[name] for name in INHERITED_META if name in found[0].meta}
            with values[0].fake_mode:
                call.meta["val"] = op([arg.meta["val"] for arg in inputs], *described)
            for index, node in enumerate(outputs):
                result = self._graph.call_function(operator.getitem, (call, index))
                result.meta = call.meta | {"val": call.meta["val"][index]}
                node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in within)

    def _size(self, value: Tensor) -> list[int]:
        """The size of a tensor, an upper bound or a guess where it is open."""
        return [self._number(size) for size in value.shape]

    def _number(self, value: Any) -> Any:
        return max(0, int(value.node.expr.xreplace(self._hints))) if isinstance(value, torch.SymInt) else value

    def _flops(self, node: fx.Node) -> int:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is None:
            return 0

        def sized(value: Any) -> Any:
            return torch.empty(self._size(value), device="meta") if isinstance(value, Tensor) else self._number(value)

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: pytree.tree_map(sized, arg.meta["val"]))
        return int(formula(*args, **kwargs, out_val=pytree.tree_map(sized, node.meta["val"])))

    def _bytes(self, node: fx.Node) -> int:
        """Bytes that a node allocates."""
        returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
        if node.target is operator.getitem or any(value.alias_info is not None for value in returned):
            return 0
        return sum(math.prod(self._size(value)) * value.element_size() for value in tensors(node.meta.get("val")))
