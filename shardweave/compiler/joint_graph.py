"""The joint graph as AOTAutograd makes it, and what is rewritten in it before it is described as a captured step.

Mixed precision
    Parameters are captured in their working dtype (`working_copies`). The casts of inputs and outputs move into the
    graph.

Changes of parameters
    A parameter that the forward clamps in place, say, before it reads it is changed before the step. Where an element
    of the new value depends on others, the step computes it, as those of buffers (`take_parameter_changes`).

Checks
    An assert has no users and would be removed. It becomes a value that the forward needs.

Open sizes
    A size that depends on values, such as that of ``x[mask]``, and what is computed with it, becomes one op
    (`enclose_open_sizes`), which every rank computes whole.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import networkx
import torch
import torch.utils._pytree as pytree
from networkx.utils import UnionFind
from torch import Tensor, fx, nn
from torch.utils.flop_counter import flop_registry

from shardweave.compiler.capture_errors import capture_error, module_and_line
from shardweave.ir import InternalError, Precision
from shardweave.ops import REGION_NAMES
from shardweave.sharding import INHERITED_META, draws, graph_outputs, tensors, writes_by_mask

CAST = torch.ops.aten._to_copy.default
_ASSERTS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}


@contextlib.contextmanager
def working_copies(model: nn.Module, precision: Precision | None, fake: Any) -> Iterator[None]:
    """While this runs, `model` has fake parameters in the working dtype, and casts its outputs.

    The parameters are restored afterwards. Buffers are not changed. `fake` is the FakeTensorMode of the parameters.
    """
    if precision is None:
        yield
        return
    owned = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    copies: dict[Tensor, nn.Parameter] = {}
    for _, _, master in owned:  # a tied parameter remains one
        if master not in copies and precision.working(master.dtype) != master.dtype:
            with fake:
                value = torch.empty(master.size(), dtype=precision.working(master.dtype), device=master.device)
            copies[master] = nn.Parameter(value, master.requires_grad)
    hooks = []
    try:
        for module, name, master in owned:
            if master in copies:
                setattr(module, name, copies[master])  # setattr, as recurrent layers keep a list of theirs
        _refer_to_weights(model)
        if (output := precision.output_dtype) is not None:
            hooks.append(model.register_forward_hook(lambda _, inputs, result: cast(result, output)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, master in owned:
            setattr(module, name, master)
        _refer_to_weights(model)


def _refer_to_weights(model: nn.Module) -> None:
    """Let recurrent layers know their present weights: a forward that finds other ones rebuilds its list of them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights: Any = module._flat_weights
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """`values` with every floating-point tensor in `dtype`.

    >>> cast((torch.ones(1), torch.ones(1, dtype=torch.int32), None), torch.float16)
    (tensor([1.], dtype=torch.float16), tensor([1], dtype=torch.int32), None)
    """
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


def cast_inputs_inside(graph: fx.Graph, given: Mapping[str, tuple[torch.dtype, int | None]]) -> None:
    """Let a captured graph take its inputs in the dtypes `given` by placeholder, and cast them itself.

    It casts their gradients back, whose places among the graph's outputs are given with the dtypes.
    """
    output = graph.output_node()
    results: list[Any] = [*graph_outputs(graph)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.name in given]:
        value, (dtype, place) = node.meta["val"], given[node.name]
        if value.dtype == dtype:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(CAST, (node,), {"dtype": value.dtype})
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
        copy.meta["val"] = value
        node.meta["val"] = value.to(dtype)
        if place is not None and isinstance(results[place], fx.Node):
            with graph.inserting_before(output):
                back = graph.call_function(CAST, (results[place],), {"dtype": dtype})
            back.meta.update(val=results[place].meta["val"].to(dtype), partitioner_tag="is_backward")
            results[place] = back
    output.args = (results,)


def take_cast_parameters(graph: fx.Graph, parameters: Mapping[str, str], gradients: Sequence[str]) -> None:
    """Make a captured graph take parameters in the dtype that it casts them to, and return gradients in that dtype.

    With ``torch.autocast`` in a model, each rank then casts its shard before it is gathered. `parameters` has the names
    by placeholder, `gradients` the names of those whose gradients are the last outputs.
    """
    output = graph.output_node()
    results: list[Any] = [*graph_outputs(graph)]
    places = {name: len(results) - len(gradients) + index for index, name in enumerate(gradients)}
    for node in [node for node in graph.nodes if node.name in parameters]:
        casts, place = list(node.users), places.get(parameters[node.name])
        gradient = None if place is None else results[place]
        if not casts or not all(_is_cast_of(user, node) for user in casts):
            continue
        if len({user.meta["val"].dtype for user in casts}) > 1 or (
            gradient is not None and gradient.target is not CAST
        ):
            continue
        node.meta["val"] = casts[0].meta["val"]
        for user in casts:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        if place is not None and gradient is not None:
            results[place] = gradient.args[0]
            output.args = (list(results),)
            if not gradient.users:
                graph.erase_node(gradient)


def _is_cast_of(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` is `node` in another dtype, on the same device with the same strides."""
    if user.target is not CAST:
        return False
    made, own = user.meta["val"], node.meta["val"]
    same_memory = (made.device, made.stride()) == (own.device, own.stride())
    return same_memory and made.dtype != own.dtype and own.is_floating_point() and made.is_floating_point()


def take_parameter_changes(
    graph: fx.Graph, parameters: Mapping[str, torch.dtype], frozen: Collection[str]
) -> tuple[dict[str, fx.GraphModule], set[str]]:
    """Take in-place changes of these parameters out of the graph, which then reads the parameters as changed.

    Parameters are given by their names, with their own dtypes: in mixed precision, the graph has copies in others. The
    change of a parameter that is trained and read before is left as it is: the backward in eager mode reads the changed
    one, or refuses it.

    Returns
    -------
    changes : dict of str to GraphModule
        By the names of the parameters, the changes in which an element depends on that element alone, so that a rank
        can change its part.
    computed : set of str
        The parameters whose new values are results of the graph, as those of buffers are.
    """
    output = graph.output_node()
    changes: dict[str, fx.GraphModule] = {}
    computed: set[str] = set()
    for described in list(output.meta["desc"]):
        name = getattr(getattr(described, "mutated_input", None), "target", "")
        if name not in parameters:
            continue
        # 1. What computes the new value
        placeholders = graph.find_nodes(op="placeholder")
        parameter = next(node for node in placeholders if node.meta["desc"] == described.mutated_input)
        place = output.meta["desc"].index(described)
        value = graph_outputs(graph)[place]
        steps = {value}
        for node in reversed(graph.nodes):
            steps |= {*node.all_input_nodes} if node in steps else set()
        of_parameter = {parameter}
        for node in graph.nodes:
            of_parameter |= {node} if node in steps and not of_parameter.isdisjoint(node.all_input_nodes) else set()
        is_read = any(user not in steps for node in of_parameter - {value} for user in node.users)
        is_own = parameter.meta["val"].dtype == parameters[name]
        # 2. The gradient by the new value, of which nothing is asked, is added to the parameter's.
        tangents = [node for node in placeholders if getattr(node.meta["desc"], "output", None) == described]
        sums = [user for tangent in tangents for user in tangent.users]
        is_read_by_backward = name not in frozen and is_read
        if is_read_by_backward or not is_own or any(user.target is not torch.ops.aten.add.Tensor for user in sums):
            continue
        for total in sums:
            total.replace_all_uses_with(next(arg for arg in total.all_input_nodes if arg not in tangents))
        for node in (*sums, *tangents):
            graph.erase_node(node)
        ops = [node for node in graph.nodes if node in steps and node is not parameter]
        if is_read or parameter not in steps or not all(map(_is_elementwise, ops)):
            computed.add(name)
            continue
        # 3. Move the change.
        inner = fx.Graph()
        copies = {parameter: inner.placeholder("parameter")}
        for node in ops:
            copies[node] = inner.node_copy(node, copies.__getitem__)
        inner.output(copies[value])
        changes[name] = fx.GraphModule({}, inner)
        output.args = (graph_outputs(graph)[:place] + graph_outputs(graph)[place + 1 :],)
        del output.meta["desc"][place]
        value.replace_all_uses_with(parameter)
        for node in reversed(ops):
            graph.erase_node(node)
    return changes, computed


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on the same element of the arguments alone, and on no others."""
    aten = torch.ops.aten
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and not draws(node)
    return is_pointwise or node.target in (aten.clone.default, aten.detach.default, aten.copy.default)


def fold_conjugates(graph: fx.Graph) -> None:
    """Replace the conjugate of a Python number, which torch's derivative of a product has as an op on a tensor."""
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten._conj.default)
    numbers = {node: node.args[0].conjugate() for node in nodes if isinstance(node.args[0], complex)}
    for node in numbers:
        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, lambda leaf: numbers.get(leaf, leaf))
        graph.erase_node(node)


def fold_copies(graph: fx.Graph) -> None:
    """Replace a copy onto a tensor that is laid out like the copied one by the copied one."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        written, source = node.args[:2]
        if isinstance(source, fx.Node) and _layout(node) == _layout(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            is_unread = isinstance(written, fx.Node) and not written.users
            if is_unread and written.target is torch.ops.aten.zeros_like.default:
                graph.erase_node(written)


def _layout(node: fx.Node) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device


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


def linalg_checks_as_values(graph: fx.Graph) -> None:
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
