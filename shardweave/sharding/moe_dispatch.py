"""Mixtures of experts: rewrite the dispatch by a sort so that rows stay in token order.

Frameworks sort (token, expert) pairs by expert, multiply the groups, and undo the sort. A sort over all tokens cannot
be computed in parts. But no result depends on the order: between the sort and its inverse, every op works row by row.
So the region is rewritten without the sort. Each value in sorted order has a twin in token order. A row-wise op on
sorted values becomes the same op on their twins. A grouped product becomes `torch.ops.shardweave.expert_mm`, which gets
the expert of each row and groups the rows inside. The inverse of the sort is replaced by the twin.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import shardweave.ops  # noqa: F401  (registers the ops)
from shardweave.ir import RuleError
from shardweave.sharding.graphs import INHERITED_META, decompose, describe, fake_result
from shardweave.sharding.rules import find_rule
from shardweave.sharding.rules.registry import argument, argument_names, form_of, tensor_args

aten = torch.ops.aten
custom_ops = torch.ops.shardweave

_INDEX = ("aten::index", "aten::index_select", "aten::gather")
_VALUES = {"aten::index_put": "values", "aten::scatter_add": "src", "aten::index_add": "source"}
_FRESH = ("aten::new_zeros", "aten::zeros_like", "aten::zeros", "aten::full", "aten::full_like", "aten::empty_like",
          "aten::new_empty", "aten::empty")  # fmt: skip
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_COUNTING = ("aten::cumsum", "aten::histc", "aten::bincount", "aten::_to_copy", "aten::clone", "aten::detach")
_GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"


def undo_dispatch(graph: fx.Graph, known: dict[object, Any] | None = None) -> None:
    """Rewrite every region of `graph` that sorts rows for grouped products. Other sorts stay.

    `known` is a cache of decompositions: see `decompose`.
    """
    for node in list(graph.nodes):
        if _name(node) in ("aten::sort", "aten::argsort") and node.meta["val"] is not None:
            region = _Region(node, {} if known is None else known)
            if region.feeds_grouped_product():
                region.rewrite()
    graph.eliminate_dead_code()


@dataclass
class _Region:
    """A sort and the values that depend on it.

    `twins` maps a value in sorted order to its twin and the dimension that is sorted. The keys of `rows` are values
    that hold the original row of each sorted row; their values are the number of sorted rows of an original one. The
    values in `inverses` hold the sorted position of each row.
    """

    sort: fx.Node
    known: dict[object, Any]
    twins: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    rows: dict[fx.Node, int] = field(default_factory=dict)
    inverses: set[fx.Node] = field(default_factory=set)

    @property
    def keys(self) -> fx.Node:
        """The sorted value: the expert of each row."""
        keys = self.sort.args[0]
        assert isinstance(keys, fx.Node)
        return keys

    def feeds_grouped_product(self) -> bool:
        """Whether the sort is of one list of integers and a grouped product depends on it."""
        value = self.keys.meta["val"]
        if value.dim() != 1 or value.is_floating_point():
            return False
        if _name(self.sort) == "aten::sort" and _flag(self.sort, "descending"):
            return False
        seen, queue = {self.sort}, [self.sort]
        while queue:
            for user in queue.pop().users:
                if _name(user) in _GROUPED:
                    return True
                if user not in seen:
                    seen.add(user)
                    queue.append(user)
        return False

    def rewrite(self) -> None:
        """Give each sorted value its twin, in the order of the graph, and replace the results of the region."""
        self.length = int(self.keys.meta["val"].shape[0])
        if _name(self.sort) == "aten::argsort":
            self.rows[self.sort] = 1
        nodes = list(self.sort.graph.nodes)
        for node in nodes[nodes.index(self.sort) + 1 :]:
            self._visit(node)

    def _known(self, node: fx.Node) -> bool:
        if _name(node) == _GROUPED_BACKWARD:
            return node.args[0] in self.twins
        return node is self.sort or node in self.twins or node in self.rows or node in self.inverses

    def _visit(self, node: fx.Node, decomposes: bool = True) -> None:
        if node.op != "call_function" or not node.users or not any(map(self._known, node.all_input_nodes)):
            return
        name = _name(node)
        if node.target is operator.getitem:
            self._getitem(node)
        elif name == "aten::floor_divide" and node.args[0] in self.rows:
            source, times = _arguments(node)
            self.rows[node] = self.rows[source] * int(times)
        elif name in _FRESH:
            for source in node.all_input_nodes:  # only shapes and dtypes matter, not the order
                node.replace_input_with(source, self._twin(source))
        elif name in _INDEX and self._ordered(_index(node)):
            self._pick(node)
        elif name in _VALUES and self._ordered(_index(node)):
            self._put(node)
        elif name in ("aten::histc", "aten::bincount"):
            self._replace(
                node, node.target, *map(self._twin, node.args), **node.kwargs
            )  # counts do not depend on the order
        elif name in _GROUPED:
            self._product(node)
        elif name == _GROUPED_BACKWARD:
            return  # its two results are rewritten at their `getitem` nodes
        elif decomposes and (form := form_of(node)) and (parts := decompose(node, form, self.known)):
            for part in parts:
                self._visit(part, decomposes=part.target is not node.target)
        else:
            self._row_wise(node)

    def _ordered(self, index: fx.Node | None) -> bool:
        return index is not None and (index in self.rows or index in self.inverses)

    # -- one kind of op each

    def _getitem(self, node: fx.Node) -> None:
        parent, index = _arguments(node)
        if parent is self.sort:
            if index == 0:
                self.twins[node] = self.keys, 0
            else:
                self.rows[node] = 1
        elif _name(parent) == _GROUPED_BACKWARD:
            x, weight, ends, grad = _arguments(parent)
            expert = self._expert(node, ends)
            if index == 0:
                back = self._new(node, aten.transpose.int, weight, -2, -1)
                self.twins[node] = self._new(node, custom_ops.expert_mm.default, self._twin(grad), back, expert), 0
            else:
                experts = weight.meta["val"].shape[0]
                self._gradient_of_weights(node, self._twin(x), self._twin(grad), expert, experts)
        else:
            twin, dim = self.twins[parent]
            self.twins[node] = self._new(node, operator.getitem, twin, index), dim

    def _pick(self, node: fx.Node) -> None:
        """Rows taken into sorted order, or out of it."""
        value, index = _arguments(node)[0], _index(node)
        assert index is not None
        if index in self.inverses:
            if value not in self.twins or self.twins[value][1] != 0:
                raise self._unknown(node)
            node.replace_all_uses_with(self.twins[value][0])
        elif value in self.twins:
            raise self._unknown(node)
        else:
            self.twins[node] = self._repeated(node, value, self.rows[index]), 0

    def _put(self, node: fx.Node) -> None:
        """Rows summed at their original position, or the sorted positions of rows."""
        base, index, values = _arguments(node)[0], _index(node), argument(node, _VALUES[_name(node)])
        assert index is not None
        summed = _name(node) != "aten::index_put" or _flag(node, "accumulate")
        if _name(base) not in _FRESH:
            raise self._unknown(node)
        if index in self.inverses:
            self.twins[node] = values, 0
        elif self.rows[index] == 1 and _name(values) == "aten::arange":
            self.inverses.add(node)
        elif values in self.twins and self.twins[values][1] == 0 and (summed or self.rows[index] == 1):
            self._gathered(node, self.twins[values][0], self.rows[index])
        else:
            raise self._unknown(node)

    def _repeated(self, node: fx.Node, value: fx.Node, times: int) -> fx.Node:
        """Repeat each row of `value` once for each of its sorted rows."""
        size = list(value.meta["val"].shape)
        if size[0] * times != self.length:
            raise self._unknown(node)
        if times == 1:
            return value
        wide = self._new(node, aten.unsqueeze.default, value, 1)
        wide = self._new(node, aten.expand.default, wide, [size[0], times, *size[1:]])
        return self._new(node, aten.reshape.default, wide, [self.length, *size[1:]])

    def _gathered(self, node: fx.Node, twin: fx.Node, times: int) -> None:
        """The sum over the sorted rows of each row."""
        size = list(twin.meta["val"].shape)
        if times == 1:
            node.replace_all_uses_with(twin)
            return
        folded = self._new(node, aten.view.default, twin, [self.length // times, times, *size[1:]])
        self._replace(node, aten.sum.dim_IntList, folded, [1])

    def _product(self, node: fx.Node) -> None:
        """A grouped product of rows with weights, or of rows with rows (the weights' gradient)."""
        left, right, ends, *rest = _arguments(node)
        if any(value is not None for value in rest[:1]) or left not in self.twins:
            raise self._unknown(node)
        expert = self._expert(node, ends)
        twin, dim = self.twins[left]
        if right not in self.twins and dim == 0:
            self.twins[node] = self._new(node, custom_ops.expert_mm.default, twin, right, expert), 0
        elif right in self.twins and dim == 1 and self.twins[right][1] == 0:
            rows = self._new(node, aten.t.default, twin)
            experts = node.meta["val"].shape[0]
            self._gradient_of_weights(node, rows, self._twin(right), expert, experts)
        else:
            raise self._unknown(node)

    def _gradient_of_weights(self, node: fx.Node, x: fx.Node, grad: fx.Node, expert: fx.Node, experts: int) -> None:
        """The gradient of the weights; transposed if they were for the product, so in the parameters' memory order."""
        transposes = [user for user in node.users if _swaps_last_dims(user)]
        if transposes and len(transposes) == len(node.users):
            for user in transposes:
                self._replace(user, custom_ops.expert_outer.default, grad, x, expert, experts)
        else:
            self._replace(node, custom_ops.expert_outer.default, x, grad, expert, experts)

    def _expert(self, node: fx.Node, ends: Any) -> fx.Node:
        """The expert of each row, in token order: the keys, if `ends` are the cumulative sums of their counts."""
        source: Any = ends
        passed: set[str] = set()
        while isinstance(source, fx.Node) and _name(source) in _COUNTING:
            passed.add(_name(source))
            source = _arguments(source)[0]
        if source is not self.keys or "aten::cumsum" not in passed or not passed & {"aten::histc", "aten::bincount"}:
            raise self._unknown(node)
        keys: fx.Node = source
        return keys

    def _row_wise(self, node: fx.Node) -> None:
        """An op each of whose rows depends only on the same rows of its inputs, or that sums over all rows."""
        rule = find_rule(node)
        if any(source in self.rows or source in self.inverses for source in node.all_input_nodes) or rule is None:
            raise self._unknown(node)
        bound = rule.bind(node)
        names: set[str] = set()
        others: set[str] = set()
        for source, dims in zip(tensor_args(node), bound.inputs):
            if source in self.twins and dims[self.twins[source][1]]:
                names.update(dims[self.twins[source][1]])
                others |= {name for at, part in enumerate(dims) for name in part if at != self.twins[source][1]}
            else:
                others |= {name for part in dims for name in part}
        if len(names) != 1 or names & others or any(bound.factor(name).blocked for name in names):
            raise self._unknown(node)
        (name,) = names
        places = {at for dims in bound.outputs for at, part in enumerate(dims) if name in part}
        kept = [any(name in part for part in dims) for dims in bound.outputs]
        if len(places) > 1 or any(kept) != all(kept):
            raise self._unknown(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._twin)
        if places:
            self.twins[node] = self._new(node, node.target, *args, **kwargs), places.pop()
        else:
            self._replace(node, node.target, *args, **kwargs)

    # -- writing

    def _twin(self, value: Any) -> Any:
        return self.twins[value][0] if isinstance(value, fx.Node) and value in self.twins else value

    def _new(self, place: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before `place`, with the module and phase of `place`."""
        graph = place.graph
        with graph.inserting_before(place):
            node = graph.call_function(target, args, kwargs)
        node.meta |= {key: place.meta[key] for key in INHERITED_META if key in place.meta}
        node.meta["val"] = fake_result(target, args, kwargs, self.keys.meta["val"].fake_mode)
        return node

    def _replace(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        node.replace_all_uses_with(self._new(node, target, *args, **kwargs))

    def _unknown(self, node: fx.Node) -> RuleError:
        return RuleError(
            f"{describe(node)}: it uses rows that were sorted for grouped products in a way that has no form without "
            "the sort. Route tokens as transformers' grouped_mm experts do (sort, index, grouped_mm, undo the sort), "
            "or multiply all experts at once with bmm"
        )


def _name(node: Any) -> str:
    """The name of the op of a node, without its overload; "" if the node calls no op."""
    target = getattr(node, "target", None)
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else ""


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _flag(node: fx.Node, name: str) -> bool:
    return name in argument_names(node) and bool(argument(node, name))


def _swaps_last_dims(node: fx.Node) -> bool:
    """Whether a node swaps the last two of three dimensions."""
    dims = _arguments(node)[1:]
    if _name(node) == "aten::permute":
        return [dim % 3 for dim in dims[0]] == [0, 2, 1]
    return _name(node) == "aten::transpose" and {dim % 3 for dim in dims} == {1, 2}


def _index(node: fx.Node) -> fx.Node | None:
    """The list of row numbers by which an op picks or puts rows; None if it indexes otherwise."""
    names = argument_names(node)
    given = argument(node, "indices" if "indices" in names else "index")
    index, *others = given if isinstance(given, (list, tuple)) else [given]
    dim = argument(node, "dim") if "dim" in names else 0
    single = not others and dim == 0 and isinstance(index, fx.Node) and index.meta["val"].dim() == 1
    return index if single else None
