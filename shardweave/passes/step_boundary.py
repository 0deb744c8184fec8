"""The step that passes start from: a captured step whose ops have rules, its boundary, and its batch.

The boundary of a step is its mesh in layout order, the axes of the batch, and the layouts of its inputs and outputs.

The batch dimension of an input is found in the graph, by the factor class of its first dimension. Its size alone does
not tell: a mask or a table of positions may happen to have as many rows as the batch has samples.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from shardweave.cost_model import Options
from shardweave.ir import (
    SEED,
    Assignment,
    Axis,
    Captured,
    Layout,
    Mesh,
    ParameterSpec,
    PlanError,
    StepSpec,
    Strategy,
    ValueSpec,
    as_call,
    axes_size,
    canonical_arguments,
    dtype_name,
    leaf_names,
    normalise,
    outermost_first,
    without_axes,
)
from shardweave.sharding import (
    LINEAR_IN_EACH,
    LINEAR_IN_FIRST,
    Annotate,
    Classes,
    Op,
    assign_column_row_forms,
    batch_classes,
    find_classes,
    find_ops,
    graph_outputs,
    info,
    op_name,
    source_of,
)

aten = torch.ops.aten

# Ops whose result is zero if one argument is. A division is not among them: zero may be the divisor.
LINEAR = (LINEAR_IN_FIRST | LINEAR_IN_EACH) - {aten.div.Tensor}


@dataclass
class Annotated:
    """A captured step whose ops have rules: what the planner and every lowering start from."""

    captured: Captured
    classes: Classes
    ops: list[Op]
    batch: int
    tangents: tuple[str, ...]
    """The placeholders of the outputs that a backward may start from."""
    loss_inside: bool
    idle: frozenset[Axis] = frozenset()
    """Axes that do not shard the batch: see `Op.idle`."""
    first: StepSpec | None = None
    """The boundary of the first step of a module, whose later step this is: its axes have the order of the first one,
    which the runtime relies on, and no others shard inputs and outputs, so that a rank's part of the batch stays."""

    def leave_idle(self, axes: frozenset[Axis]) -> None:
        """Shard the batch over none of these axes."""
        self.idle, self.ops = axes, [replace(op, idle=axes) for op in self.ops]

    def without_idle(self, node: fx.Node, assignment: Assignment) -> Assignment:
        """The assignment of a node without the axes that are idle and on the batch."""
        bound, (batches, _) = info(node).rule, batch_classes(self.captured, self.classes)
        if not self.idle or bound is None:
            return assignment
        names = {factor.name for factor in bound.factors}
        return Assignment.of({
            axis: name for axis, name in assignment.items
            if name in names and not (axis in self.idle and self.classes.of[node, name] in batches)
        })  # fmt: skip


def annotate(captured: Captured, options: Options) -> Annotated:
    """Bind every op to its sharding rule, and find the ops that a plan decides on.

    If the model returns a scalar loss, the backward starts there, and the other outputs have no gradient. For
    torch.compile, where autograd passes a tangent for each output, all of them keep theirs.
    """
    values = graph_outputs(captured.graph.graph)
    first = len(captured.mutated)
    returned = values[first : first + len(captured.outputs)]
    scalars = {index for index, value in enumerate(returned) if value.meta["val"].dim() == 0}
    # A step without gradients has no tangents, but returns the outputs of a model with a loss in the same way.
    losses = captured.tangents.values() or [i for i in scalars if returned[i].meta["val"].is_floating_point()]
    loss_inside = not scalars.isdisjoint(losses)
    if loss_inside and not captured.whole:
        unused = [name for name, index in captured.tangents.items() if index not in scalars]
        drop_tangents(captured.graph, unused)
    Annotate(options.replicate_unknown_ops, captured.known)(captured.graph)
    classes = find_classes(captured.graph.graph)
    _, batch = batch_classes(captured, classes)
    kept = {node.name for node in captured.graph.graph.nodes if node.op == "placeholder"}
    tangents = tuple(name for name in captured.tangents if name in kept)
    ops = assign_column_row_forms(find_ops(captured, classes), classes, captured.graph.graph, batch)
    return Annotated(captured, classes, ops, batch, tangents, loss_inside)


def drop_tangents(graph_module: fx.GraphModule, names: Iterable[str]) -> None:
    """Treat the tangents called `names` as zero.

    A sum with a zero becomes its other argument. An op that is linear in a zero becomes zero itself. A gradient that is
    zero becomes None, as in autograd. Where any other op reads a zero, the zero is written as a constant.
    """
    graph = graph_module.graph
    wanted = set(names)
    zeros: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder" and node.name in wanted}
    for node in list(graph.nodes):
        dead = [argument for argument in node.all_input_nodes if argument in zeros]
        if not dead or node.op == "placeholder":
            continue
        if node.target is aten.add.Tensor and len(dead) < len(node.all_input_nodes):
            other = next(argument for argument in node.all_input_nodes if argument not in zeros)
            if other.meta["val"].shape == node.meta["val"].shape and not node.kwargs:
                node.replace_all_uses_with(other)
                continue
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda value: None if value in zeros else value)
            continue
        if node.target in LINEAR or (node.target is aten.add.Tensor and len(dead) == len(node.all_input_nodes)):
            zeros.add(node)
            continue
        for argument in dead:
            node.replace_input_with(argument, _written_out(graph, node, argument))
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in zeros or node.op == "call_function"):
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _written_out(graph: fx.Graph, before: fx.Node, zero: fx.Node) -> fx.Node:
    value = zero.meta["val"]
    with graph.inserting_before(before):
        node = graph.call_function(
            aten.zeros.default, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
        )
    node.meta.update(val=value, partitioner_tag="is_backward")
    return node


def join_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every forward op with several inputs: its module, its op, and its number in that module.

    A saved plan uses these names, as names of nodes may change when the model is captured again.
    """
    counts: Counter[str] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not info(node).backward and len(node.all_input_nodes) > 1:
            module = op_name(node) if info(node).op != node.name else ""
            kind = f"{module}:{getattr(getattr(node.target, '_schema', None), 'name', node.target)}".replace(
                "aten::", ""
            )
            found[node] = f"{kind}:{counts[kind]}"
            counts[kind] += 1
    return found


def mesh_for(mesh: Mesh, strategies: Mapping[str, Strategy], sizes: Mapping[str, int]) -> Mesh:
    """The mesh in layout order: axes of tensor parallelism first, then the others, each kind from the outermost in.

    The axes that shard states are then inside those of tensor parallelism on each dimension, which keeps layouts plain
    DTensor placements. The price is paid by ops that gather over a mix of both kinds of axes: their parts arrive in
    another order than that of their ranks, and are copied. So axes only come first if the parameters of the ops that
    are tensor parallel over them, and shard their states besides, have at least as many elements as those that would be
    copied. `sizes` has the elements of each op's parameters.
    """
    asked, gathered = Counter[frozenset[Axis]](), Counter[frozenset[Axis]]()
    for name, size in sizes.items():
        axes = strategies[name].axes(mesh)
        gathered[frozenset(axes.states)] += size
        if axes.states:
            asked[frozenset((*axes.x, *axes.y))] += size
    first: set[Axis] = set()
    for tensor, size in asked.most_common():
        copied = sum(other for axes, other in gathered.items() if _ordered(axes, tensor) != outermost_first(axes))
        if size >= copied:
            first |= tensor
    return Mesh(tuple(_ordered(mesh.axes, first)))


def data_axes(ops: list[Op], strategies: Mapping[str, Strategy], mesh: Mesh) -> tuple[Axis, ...]:
    """The axes that every op shards the batch over: the user's batch is sharded over these."""
    common = set(mesh.axes)
    for op in ops:
        if op.batch > 1:
            axes = strategies[op.name].axes(mesh)
            common &= {*axes.z, *axes.data} - op.idle
    return tuple(outermost_first(common)) if any(op.batch > 1 for op in ops) else ()


def _ordered(axes: Iterable[Axis], first: Container[Axis]) -> list[Axis]:
    return sorted(outermost_first(axes), key=lambda axis: axis not in first)


class Boundary:
    """The layouts of everything that enters or leaves the step: inputs, outputs, tangents and parameters.

    Parameters
    ----------
    annotated : Annotated
    mesh : Mesh
    data : tuple of Axis
        The axes that the batch is sharded over.
    options : Options

    Attributes
    ----------
    sources : dict from str to Layout
        The layouts of inputs, by placeholder. For torch.compile, also those of parameters and tangents.
    wanted : list of Layout or None
        The layout of each output of the graph; None for the layout that it has.
    tangents : dict from str to int
        The index of the output that each tangent belongs to, by placeholder.
    mutated : dict from int to str
        The parameters whose new values the forward returns, by the index of the output.
    """

    def __init__(self, annotated: Annotated, mesh: Mesh, data: tuple[Axis, ...], options: Options) -> None:
        self.annotated, self.mesh, self.data = annotated, mesh, data
        self.whole_batch = bool(options.overlap.exclude_from_sub_batches)
        captured = annotated.captured
        # 1. Inputs: their layouts, and their rows for each sample.
        nodes = {node.name: node for node in captured.graph.graph.nodes if node.op == "placeholder"}
        self.values = {name: node.meta["val"] for name, node in nodes.items()}
        self.sources = {name: self._batch(self.values[name]) for name in captured.inputs}
        samples = Samples.of(captured, annotated.classes)
        self.rows = {name: samples.rows(nodes[name]) for name in captured.inputs}
        # 2. Outputs: whole, the rank's part of the batch, or as the step computes them.
        results = graph_outputs(captured.graph.graph)
        first = len(captured.mutated)
        self.returned = [node.meta["val"] for node in results[first : first + len(captured.outputs)]]
        mode = "whole" if captured.whole else options.outputs
        if mode == "auto":
            mode = "sharded" if annotated.loss_inside else "part"
        self.returned_rows = [samples.rows(node) for node in results[first : first + len(captured.outputs)]]
        outputs: list[Layout | None] = []
        for value in self.returned:
            if value.dim() == 0 or mode == "whole":
                outputs.append(Layout.replicated(value.shape))
            else:
                outputs.append(None if mode == "sharded" else self._batch(value))
        # 3. Parameters and tangents. Under torch.compile both are whole on each rank, which takes its part.
        if captured.whole:
            self.sources |= {name: Layout.replicated(self.values[name].shape) for name in captured.parameters}
        self.tangents = {name: first + captured.tangents[name] for name in annotated.tangents}
        if captured.whole:
            self.sources |= {name: self._batch(self.values[name]) for name in self.tangents}
            self.tangents = {}
        # 4. New values of buffers are whole on each rank, those of parameters are laid out as the parameters are.
        mutated = [Layout.replicated(node.meta["val"].shape) for node in results[:first]]
        names = {*captured.parameters.values()}
        self.mutated = {index: name for index, name in enumerate(captured.mutated) if name in names}
        wanted = captured.input_gradients
        self.input_gradients = [self.sources[node] for node, name in captured.inputs.items() if name in wanted]
        self.wanted = [*mutated, *outputs, *self.input_gradients, *(None for _ in captured.gradients)]

    def _batch(self, value: torch.Tensor) -> Layout:
        """The layout of an input: the first dimension sharded over data axes and micro-batches, if it is the batch."""
        shape = value.shape
        layout = Layout.replicated(shape)
        axes = (*self.mesh.time_axes, *self.data)
        if not shape or shape[0] != self.annotated.batch:
            return layout
        if shape[0] % axes_size(axes) and self.whole_batch:  # too small for sub-batches
            axes = (*self.mesh.micro_batch_axes, *self.data)
        if shape[0] % axes_size(axes):
            if times := self.mesh.time_axes:
                cuts = " of ".join(f"{axis.size} {axis.name}-batches" for axis in reversed(times))
                names = " or ".join(f"{axis.name}_batches" for axis in times)
                raise PlanError(
                    f"the batch of {shape[0]} is no multiple of {axes_size(axes)}: {cuts} "
                    f"on {axes_size(self.data)} parts of the batch; use another batch or {names}"
                )
            return layout
        return Layout((normalise([*axes, shape[0] // axes_size(axes)]), *layout.dims[1:]))

    def finish(
        self,
        output_layouts: Mapping[int, Layout],
        state_layouts: Mapping[str, Layout],
        forward: fx.GraphModule,
        code: str,
    ) -> StepSpec:
        """The calling convention of the step.

        Parameters
        ----------
        output_layouts : mapping of int to Layout
            The layouts of the outputs of the forward, and of the gradients of inputs, by index.
        state_layouts : mapping of str to Layout
            The layouts of parameters between steps, by name.
        forward : GraphModule
        code : str
            The hash of the generated code.
        """
        # 1. Parameters and buffers.
        captured = self.annotated.captured
        dtype = {name: dtype_name(value.dtype) for name, value in self.values.items()}
        trainable = set(captured.gradients)
        parameters = tuple(
            ParameterSpec(
                name,
                state_layouts.get(name, Layout.replicated(self.values[node].shape)),
                dtype_name(captured.dtypes[name].master) if name in captured.dtypes else dtype[node],
                name in trainable,
                captured.aliases.get(name, ()),
                captured.changes.get(name),
            )
            for node, name in captured.parameters.items()
        )
        buffers = tuple(
            ParameterSpec(name, Layout.replicated(self.values[node].shape), dtype[node], False)
            for node, name in captured.buffers.items()
        )
        # 2. Inputs: the layout of a micro-batch's piece, and that of the whole input.
        times = self.mesh.micro_batch_axes
        micro_batch_layouts = [without_axes(self.sources[node], self.mesh.sub_batch_axes) for node in captured.inputs]
        inputs = tuple(
            ValueSpec(
                name, without_axes(layout, times), dtype[node], name in captured.input_gradients, rows=self.rows[node]
            )
            for (node, name), layout in zip(captured.inputs.items(), micro_batch_layouts)
        )
        # 3. Outputs.
        first = len(captured.mutated)
        outputs = []
        active = {captured.tangents[name] for name in self.annotated.tangents}
        for index, (name, value) in enumerate(zip(captured.outputs, self.returned)):
            layout = output_layouts[first + index]
            micro_batch_layouts.append(layout)
            whole = without_axes(layout, times).without_partial()
            left_out = index in captured.tangents.values() and index not in active
            rows = self.returned_rows[index]
            outputs.append(ValueSpec(name, whole, dtype_name(value.dtype), index in active, left_out, rows))
        for index, layout in enumerate(self.input_gradients, first + len(captured.outputs)):
            micro_batch_layouts.append(output_layouts.get(index, layout))
        return StepSpec(
            replace(self.mesh, sub_batch_axes=(), slice_axes=()),
            parameters,
            buffers,
            inputs,
            tuple(outputs),
            captured.mutated,
            self.data,
            code,
            any(node.op == "placeholder" and node.name == SEED for node in forward.graph.nodes),
            tuple(micro_batch_layouts) if times else (),
            axes_size(self.mesh.sub_batch_axes),
        )


@dataclass(frozen=True)
class Samples:
    """The batch of an annotated step.

    Parameters
    ----------
    count : int
        Samples in a batch; 0 where no input has a batch dimension.
    batch : frozenset of int
        The factor classes of the batch.
    shared : frozenset of int
        The classes of all other dimensions of inputs, parameters and buffers.
    classes : Classes
        Of the step.
    inputs : mapping of str to int
        The rows of one sample, by the name of each input that has a batch dimension.
    grouped_rows : mapping of str to int
        The rows of each such input that the model takes together: more than one if it splits the first dimension.
    """

    count: int
    batch: frozenset[int]
    shared: frozenset[int]
    classes: Classes
    inputs: Mapping[str, int]
    grouped_rows: Mapping[str, int]

    @classmethod
    def of(cls, captured: Captured, classes: Classes) -> Samples:
        """Find the batch: the first dimension of the first input whose class no other dimension has.

        An input has a batch dimension if its first dimension is of the same class. If no op links the two, it has one
        if it has as many rows and no other dimension of an input, parameter or buffer is of its class.
        """
        nodes = {node.name: node for node in captured.graph.graph.nodes if node.op == "placeholder"}
        shared: set[int] = set()
        for name in (*captured.parameters, *captured.buffers, *captured.inputs):
            dims = _dims(nodes[name])
            rest = [*dims[1:], dims[0][1:]] if name in captured.inputs and dims else dims
            shared |= {classes.of[nodes[name], factor] for factors in rest for factor in factors}
        first = {name: lead for name in captured.inputs if (lead := _lead(nodes[name], classes)) is not None}
        own = {name: lead for name, lead in first.items() if lead not in shared}
        size = next((_size(nodes[name]) for name in own), 0)
        batch = frozenset(lead for name, lead in own.items() if _size(nodes[name]) == size)
        having = [name for name, lead in first.items() if lead in batch]
        count = min((_size(nodes[name]) for name in having), default=0)
        having = [name for name in having if _size(nodes[name]) % count == 0]
        inputs = {captured.inputs[name]: _size(nodes[name]) // count for name in having}
        grouped_rows = {captured.inputs[name]: _size(nodes[name]) // _leading_size(nodes[name]) for name in having}
        return cls(count, batch, frozenset(shared), classes, inputs, grouped_rows)

    def rows(self, value: Any) -> int:
        """The rows of one sample in the first dimension of a node; 0 if that is not the batch."""
        if not isinstance(value, fx.Node) or not self.count:
            return 0
        source, index = source_of(value)
        lead = _lead(source, self.classes, index)
        size = value.meta["val"].shape[0] if value.meta["val"].dim() else 0
        if lead is None or size % self.count:
            return 0
        if lead not in self.batch and (size != self.count or lead in self.shared):
            return 0
        return int(size) // self.count


def inputs_with_first_size(model: nn.Module, example_inputs: Any) -> tuple[frozenset[str], bool]:
    """The inputs that have as many rows as the first one, and whether their rows are certain to be the batch.

    They are if no input has another dimension of this size, such as the length of a sequence.
    """
    names, leaves, _ = _leaves(model, example_inputs)
    shapes = {name: leaf.shape for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    size = next((shape[0] for shape in shapes.values()), 0)
    clear = size > 1 and all(size not in shape[1:] for shape in shapes.values())
    return frozenset(name for name, shape in shapes.items() if shape[0] == size), clear


def global_example(
    model: nn.Module, example_inputs: Any, ranks: int, batch: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs of the global batch, with the shapes of `ranks` times one rank's part; values do not matter.

    Examples
    --------
    >>> import torch
    >>> (x,), _ = global_example(nn.Linear(4, 4), torch.ones(3, 4), 2, {"input"})
    >>> x.shape
    torch.Size([6, 4])
    """
    names, leaves, spec = _leaves(model, example_inputs)
    grown = [
        leaf.new_empty((1, *leaf.shape[1:]), requires_grad=leaf.requires_grad).expand(
            ranks * leaf.shape[0], *leaf.shape[1:]
        )
        if name in batch and isinstance(leaf, Tensor)
        else leaf
        for name, leaf in zip(names, leaves)
    ]
    args, kwargs = pytree.tree_unflatten(grown, spec)
    return args, kwargs


def check_local_batch(samples: Samples, ranks: int) -> None:
    """Raise `PlanError` if ranks cannot each pass a part of the batch: there is none, or it cuts grouped rows."""
    if not samples.count:
        raise PlanError(
            'batch="local" is for inputs with a batch dimension, their first one, but the step has none: leave it out, '
            "and pass the same inputs on all ranks"
        )
    for name, together in samples.grouped_rows.items():
        mine = samples.count * samples.inputs[name] // ranks
        if mine % together:
            raise PlanError(
                f"the model takes {together} rows of the first dimension of {name} together, but each of {ranks} ranks "
                f"passes {mine}, so that rows of several ranks would be taken together. Pass a multiple of {together} "
                'rows on each rank, or compile with batch="global"'
            )


def _leaves(model: nn.Module, example_inputs: Any) -> tuple[tuple[str, ...], list[Any], pytree.TreeSpec]:
    args, kwargs = as_call(example_inputs)
    signature = inspect.signature(model.forward)
    call = canonical_arguments(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten(call)
    return leaf_names(signature, *call), leaves, spec


def _dims(node: fx.Node, index: int = 0) -> tuple[tuple[str, ...], ...]:
    rule = info(node).rule
    return rule.outputs[index] if rule is not None and index < len(rule.outputs) else ()


def _lead(node: fx.Node, classes: Classes, index: int = 0) -> int | None:
    """The class of the outermost factor of the first dimension; None if its size is one."""
    dims = _dims(node, index)
    return classes.of[node, dims[0][0]] if dims and dims[0] else None


def _leading_size(node: fx.Node) -> int:
    rule = info(node).rule
    assert rule is not None
    return rule.factor(rule.outputs[0][0][0]).size


def _size(node: fx.Node) -> int:
    return int(node.meta["val"].shape[0])
