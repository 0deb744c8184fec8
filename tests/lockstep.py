"""All ranks of a generated graph in one process, node by node: an oracle that shares no code with the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardweave.ir import META, SEED, Layout, Mesh

c10d = torch.ops._c10d_functional


def shard(value: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The part of `value` that each rank holds; over partial axes the first coordinate holds it all."""
    parts = []
    value = in_places(value, layout)
    for rank in range(mesh.world_size):
        sizes = [d if isinstance(d, int) else d.size for dim in layout.dims for d in dim]
        part = value.reshape(sizes)
        index: list[Any] = [
            slice(None) if isinstance(d, int) else d.coordinate(rank) for dim in layout.dims for d in dim
        ]
        part = part[tuple(index)].reshape(layout.local_shape).contiguous()
        if any(axis.coordinate(rank) for axis in layout.partial_axes):
            part = torch.zeros_like(part)
        parts.append(part)
    return parts


def unshard(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The value whose parts the ranks hold; asserts that replicas agree."""
    digits = [d for dim in layout.dims for d in dim]
    whole = torch.zeros([d if isinstance(d, int) else d.size for d in digits], dtype=parts[0].dtype)
    local = [d for d in digits if isinstance(d, int)]
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, part in enumerate(parts):
        key = tuple(a.coordinate(rank) for a in (*layout.shard_axes, *layout.partial_axes))
        if key in seen:
            torch.testing.assert_close(part, seen[key], rtol=0, atol=0, equal_nan=True)
            continue
        seen[key] = part
        index = tuple(slice(None) if isinstance(d, int) else d.coordinate(rank) for d in digits)
        whole[index] += part.reshape(local)
    whole = whole.reshape(layout.padded_shape)
    if layout.padding is None:
        return whole
    places = in_places(torch.arange(1, layout.global_shape[layout.padding.dim] + 1), layout, 0)
    return whole.index_select(layout.padding.dim, places.nonzero().flatten())


def in_places(value: torch.Tensor, layout: Layout, dim: int | None = None) -> torch.Tensor:
    """`value`, the blocks of its padded dimension cut as `torch.chunk` cuts, level after level; zeros elsewhere."""
    if layout.padding is None:
        return value
    dim = layout.padding.dim if dim is None else dim
    parts = list(value.split(layout.padding.size, dim))
    for level in layout.padding.levels:
        parts = [piece for part in parts for piece in _chunks(part, level, dim)]
    places = []
    for part in parts:
        shape = list(part.shape)
        shape[dim] = layout.padding.place - part.shape[dim]
        places += [part, part.new_zeros(shape)]
    return torch.cat(places, dim)


def _chunks(part: torch.Tensor, level: int, dim: int) -> list[torch.Tensor]:
    """What DTensor makes of `torch.chunk`: as many chunks as asked for, of which the last may be empty."""
    found = list(part.chunk(level, dim)) if part.shape[dim] else []
    return [*found, *(part.narrow(dim, 0, 0) for _ in range(level - len(found)))]


def run(module: fx.GraphModule, mesh: Mesh, inputs: Sequence[Sequence[Any]], seed: int = 0) -> list[Any]:
    """Run the graph on all ranks; `inputs` are, a placeholder after the coordinates and the seed, one value a rank."""
    ranks = range(mesh.world_size)
    values: dict[fx.Node, list[Any]] = {}
    given = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node.name.startswith("coord_"):
                values[node] = [mesh.coordinates(rank)[node.name[len("coord_") :]] for rank in ranks]
            elif node.name == SEED:
                values[node] = [seed for rank in ranks]
            else:
                values[node] = list(next(given))
        elif node.op == "get_attr":
            values[node] = [getattr(module, str(node.target)) for rank in ranks]
        elif node.op == "output":
            return [fx.node.map_arg(node.args[0], _of_rank(values, rank)) for rank in ranks]
        else:
            arguments = [fx.node.map_arg((node.args, node.kwargs), _of_rank(values, rank)) for rank in ranks]
            info = node.meta.get(META)
            if node.target is c10d.wait_tensor.default:
                values[node] = [args[0] for args, _ in arguments]
            elif info is not None and info.collective is not None:
                values[node] = _collective(info.collective, mesh, [args[0] for args, _ in arguments], node)
            else:
                values[node] = [node.target(*args, **kwargs) for args, kwargs in arguments]
    raise AssertionError("the graph has no output")


def _of_rank(values: dict[fx.Node, list[Any]], rank: int) -> Callable[[fx.Node], Any]:
    return lambda leaf: values[leaf][rank]


def _collective(what: Any, mesh: Mesh, parts: list[torch.Tensor], node: fx.Node) -> list[torch.Tensor]:
    results = []
    # A few kernels return other strides than their fake ones (layer norm's backward on CPU), which the generated code
    # goes by. Torch's collectives copy what is not contiguous.
    assert node.args[0].meta["val"].is_contiguous(), f"{node.name} has an input that is not contiguous"
    parts = [part.contiguous() for part in parts]
    for rank in range(mesh.world_size):
        group = mesh.group_ranks(what.axes, rank)
        if what.kind == "all_gather":
            results.append(torch.cat([parts[peer] for peer in group]))
            continue
        if what.kind == "all_to_all":
            mine = group.index(rank)
            results.append(torch.cat([parts[peer].chunk(len(group))[mine] for peer in group]))
            continue
        stacked = torch.stack([parts[peer] for peer in group])
        total = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[node.args[1]](dim=0)
        if what.kind == "reduce_scatter":
            size = total.shape[0] // len(group)
            start = group.index(rank) * size
            total = total[start : start + size].contiguous()
        results.append(total)
    return results
