"""Verify: what must hold of a local graph after every pass."""

from __future__ import annotations

import torch
from torch import fx

from shardweave.errors import VerifyError
from shardweave.passes.annotate import info

WAIT = torch.ops._c10d_functional.wait_tensor.default


def verify(graph_module: fx.GraphModule, after: str) -> None:
    """Check a local graph.

    - every collective that is started is waited for exactly once, and only its wait sees what it started,
    - nothing of the forward needs anything of the backward,
    - every value has the shape of its layout on one device.

    Raises
    ------
    VerifyError
        Naming the pass, the node and the rule that it breaks.
    """
    for node in graph_module.graph.nodes:
        known = info(node)
        if known.collective is not None:
            waits = [user for user in node.users if user.target is WAIT]
            if len(waits) != 1 or len(node.users) != 1:
                raise VerifyError(
                    f"after {after}: the {known.collective.kind} {node.name} of {known.collective.owner} must be "
                    f"waited for once and read by nothing else, it has the users {[user.name for user in node.users]}"
                )
        if node.op == "call_function" and not known.backward:
            late = [argument.name for argument in node.all_input_nodes if info(argument).backward]
            if late:
                raise VerifyError(f"after {after}: {node.name} of the forward needs {late} of the backward")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and known.layouts and tuple(value.shape) != known.layouts[0].local_shape:
            raise VerifyError(
                f"after {after}: {node.name} has the shape {tuple(value.shape)}, its layout {known.layouts[0]} says "
                f"{known.layouts[0].local_shape}"
            )
