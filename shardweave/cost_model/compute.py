"""How long compute takes: a roofline over each op's FLOPs and bytes, plus what every kernel costs to launch.

    t = launch_latency + max(FLOPs / (peak * matmul_efficiency), bytes / (memory_bandwidth * memory_efficiency))

(Williams, Waterman and Patterson 2009). FLOPs are those of matmuls, convolutions and attention, as
`torch.utils.flop_counter` counts them, shardweave's own ops included; every op reads its inputs and writes its outputs
once, as the generated code runs its ops one by one, unfused. The two efficiencies are constants of the `Device`, with
sources in its preset.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from shardweave.cost_model.cluster import Cluster
from shardweave.cost_model.graphs import alias_of, is_start, is_wait, tensor_bytes, tensors
from shardweave.runtime.random import seeded

_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")  # read of a table what they return
_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
_COUNTED_AS = {  # ops that the registry lacks, with the arguments of one that it has
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_fused_attention_overrideable_backward": "_scaled_dot_product_flash_attention_backward",
}


@dataclass(frozen=True)
class Work:
    """What an op does on one device: its FLOPs, the bytes it moves, and the dtype it computes in."""

    flops: int = 0
    num_bytes: int = 0
    dtype: str = "float32"


def node_work(node: fx.Node) -> Work | None:
    """The work of `node` by the local shapes in ``node.meta["val"]``; None where it runs no kernel.

    Views, waits, starts of collectives, placeholders and arithmetic on numbers run none.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, 8, device="meta")
    >>> y = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> y.meta["val"] = torch.empty(8, 8, device="meta")
    >>> node_work(y)
    Work(flops=1024, num_bytes=512, dtype='float32')
    """
    if node.op != "call_function" or is_wait(node) or is_start(node) or node.target is operator.getitem:
        return None
    target = op_of(node)
    if not isinstance(target, torch._ops.OpOverload) or (alias_of(node) is not None and not _writes(target)):
        return None
    value = node.meta.get("val")
    outputs = list(tensors(value))
    name = target._schema.name
    if name in _EMPTY or (not outputs and not _writes(target)):
        return None
    inputs = [tensor_bytes(source.meta.get("val")) for source in node.all_input_nodes]
    written = tensor_bytes(value)
    if name in _LOOKUPS and inputs:
        inputs[0] = min(inputs[0], written)
    return Work(_flops(node, value), sum(inputs) + written, _dtype(node, outputs))


def op_of(node: fx.Node) -> Any:
    """The op that `node` calls; of one that draws random numbers, the op that is run under a seed."""
    return node.args[0] if node.target is seeded else node.target


def node_seconds(node: fx.Node, cluster: Cluster) -> float:
    """Seconds that `node` takes on one device of `cluster`; 0 where it runs no kernel (see `node_work`).

    Collectives are not compute: `collectives.collective_seconds` prices them.
    """
    work = node_work(node)
    return 0.0 if work is None else work_seconds(work, cluster)


def work_seconds(work: Work, cluster: Cluster) -> float:
    """Seconds of one kernel that does `work`."""
    return matmul_seconds(work.flops, work.num_bytes, work.dtype, cluster)


def matmul_seconds(flops: float, num_bytes: float, dtype: str, cluster: Cluster) -> float:
    """Seconds of one kernel that does `flops` in `dtype` and moves `num_bytes`; with 0 FLOPs, of any other kernel.

    Examples
    --------
    >>> cluster = Cluster.preset("dgx-a100")
    >>> matmul_seconds(2 * 4096**3, 3 * 2 * 4096**2, "bfloat16", cluster) < 1e-3
    True
    """
    device = cluster.device
    arithmetic = flops / (device.peak(dtype) * device.matmul_efficiency)
    return device.launch_latency + max(arithmetic, bytes_seconds(num_bytes, cluster))


def bytes_seconds(num_bytes: float, cluster: Cluster) -> float:
    """Seconds for reading or writing `num_bytes` of a device's memory."""
    return num_bytes / (cluster.device.memory_bandwidth * cluster.device.memory_efficiency)


def _flops(node: fx.Node, value: object) -> int:
    count = _counter(op_of(node))
    if count is None:
        return 0
    own = node.args[4:] if node.target is seeded else node.args
    args, kwargs = fx.node.map_arg((own, node.kwargs), lambda source: source.meta.get("val"))
    return int(count(*args, **kwargs, out_val=value))


@cache
def _counter(target: Any) -> Callable[..., int] | None:
    packet = target.overloadpacket
    name = _COUNTED_AS.get(packet.__name__)
    if name is not None and packet not in flop_registry:
        packet = getattr(torch.ops.aten, name)
    found: Callable[..., int] | None = flop_registry.get(packet, _VECTOR_PRODUCTS.get(packet))
    return found


def _vector_product(left: torch.Tensor, right: torch.Tensor, **_: object) -> int:
    return 2 * left.numel()


_VECTOR_PRODUCTS = {torch.ops.aten.mv: _vector_product, torch.ops.aten.dot: _vector_product}  # the registry has neither


def _dtype(node: fx.Node, outputs: list[torch.Tensor]) -> str:
    for source in node.all_input_nodes:
        for tensor in tensors(source.meta.get("val")):
            if tensor.is_floating_point():
                return str(tensor.dtype).removeprefix("torch.")
    return str(outputs[0].dtype).removeprefix("torch.") if outputs else "float32"


@cache
def _writes(target: Any) -> bool:
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in target._schema.arguments
    )
