"""Reports: tables that print themselves in a terminal, in a notebook and as plain text, and listings of graphs."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import fx

from shardweave.ir import META, Collective, NodeInfo, axes_size, readable_bytes
from shardweave.ops import seeded

TABLE_WIDTH = 140
"""The width of tables in plain text, in characters."""
MAX_ALIGNED_WIDTH = 96
"""The widest line of a listing, in characters, that moves the column of shapes to the right."""


@dataclass(frozen=True, repr=False)
class Report:
    """A table with lines above it.

    Parameters
    ----------
    lines : tuple of str
        The lines above the table. The first one is its title.
    columns : tuple of str
        Headings. A column whose heading ends in a blank is aligned to the right.
    rows : tuple of tuple of str
        The cells of each row, one for each column.
    total : tuple of str
        The last row, or an empty tuple.
    """

    lines: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] = ()

    def __rich__(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", border_style="dim", padding=(0, 1, 0, 0))
        for number, column in enumerate(self.columns):
            right = column.endswith(" ")
            table.add_column(
                column.strip(), justify="right" if right else "left", no_wrap=number < len(self.columns) - 1
            )
        for row in self.rows:
            table.add_row(*map(Text, row))
        if self.total:
            table.add_section()
            table.add_row(*(Text(cell, style="bold") for cell in self.total))
        title, *others = self.lines
        return Group(Text(title, style="bold"), *map(Text, others), *([table] if self.rows else []))

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=TABLE_WIDTH, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def __getitem__(self, place: int | slice) -> str:
        """A part of the text, as of a string: ``plan.explain()[:600]``."""
        return str(self)[place]

    def __contains__(self, text: str) -> bool:
        return text in str(self)

    def _repr_html_(self) -> str:
        align = ["right" if column.endswith(" ") else "left" for column in self.columns]

        def cells(tag: str, row: Sequence[str]) -> str:
            style = "padding: 2px 10px; white-space: nowrap; text-align:"
            pairs = zip(row, align, strict=True)
            return "".join(f'<{tag} style="{style} {side}">{html.escape(cell.strip())}</{tag}>' for cell, side in pairs)

        title, *others = self.lines
        head = f"<p><b>{html.escape(title)}</b>{''.join(f'<br>{html.escape(line)}' for line in others)}</p>"
        if not self.rows:
            return head
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        foot = f"<tfoot><tr>{cells('th', self.total)}</tr></tfoot>" if self.total else ""
        return f"{head}<table><thead><tr>{cells('th', self.columns)}</tr></thead><tbody>{body}</tbody>{foot}</table>"


def listing(graph_module: fx.GraphModule, op: str = "*", backward: bool | None = None) -> str:
    """List the nodes of a graph that belong to an op, one in each line.

    Parameters
    ----------
    graph_module : GraphModule
        A stage of a compiled step, such as ``graphs["shard"]``.
    op : str
        Name of a module or a parameter, or a pattern as in a shell: ``"blocks.0.*"``.
    backward : bool, optional
        Only the nodes of the backward, or only those of the forward.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> y.meta["val"], y.meta[META] = torch.zeros(4, 2), NodeInfo(op="blocks.0.act")
    >>> print(listing(fx.GraphModule({}, graph), "blocks.0.*"))
    relu_default = relu(x)  # [4, 2]
    """
    lines: list[tuple[str, str]] = []
    for node in graph_module.graph.nodes:
        info = node.meta.get(META)
        if not isinstance(info, NodeInfo) or node.op == "output" or backward not in (None, info.backward):
            continue
        if not any(fnmatchcase(info.op, pattern) for pattern in (op, f"{op}.weight", f"{op}.bias")):
            continue
        if info.collective is not None:
            lines.append((f"# {_reason(info.collective)}", ""))
        lines.append((_code(node), _shapes(node)))
    width = max((len(code) for code, shape in lines if shape and len(code) <= MAX_ALIGNED_WIDTH), default=0)
    return "\n".join(f"{code:<{width}}  # {shape}" if shape else code for code, shape in lines)


def source(graph_module: fx.GraphModule) -> str:
    """A whole graph as readable Python code, with all shapes, and one input in each line.

    Examples
    --------
    >>> graph = fx.Graph()
    >>> _ = graph.output((graph.placeholder("head_weight"), graph.placeholder("tokens")))
    >>> print(source(fx.GraphModule({}, graph, "Forward")).strip())
    class Forward(torch.nn.Module):
        def forward(
            self,
            head_weight,
            tokens,
        ):
            return (head_weight, tokens)
    """
    lines = []
    for line in graph_module.print_readable(print_output=False).splitlines():
        if line.strip() == "# No stacktrace found for following nodes":
            continue
        indent, defined, signature = line.partition("def forward(")
        if defined and signature.endswith("):"):
            # Annotations hold commas too ("f32[8, 128]"): arguments end where a name begins.
            arguments = re.split(r", (?=[A-Za-z_])", signature.removesuffix("):"))
            line = "\n".join([f"{indent}def forward(", *(f"{indent}    {name}," for name in arguments), f"{indent}):"])
        lines.append(line)
    return "\n".join(lines) + "\n"


def _code(node: fx.Node) -> str:
    if node.op == "placeholder":
        # A parameter has its own name. The backward's other inputs have the names of nodes that the forward saved.
        at_rest = node.name == re.sub(r"\W", "_", node.meta[META].op)
        return f"{node.name} = {'at rest' if at_rest else 'saved'}"
    arguments = [_value(argument) for argument in node.args]
    arguments += [f"{name}={_value(value)}" for name, value in node.kwargs.items()]
    if getattr(node.target, "__name__", "") == "getitem":
        return f"{node.name} = {arguments[0]}[{arguments[1]}]"
    if node.target is seeded:  # show the random op itself, and the numbers that its seed is made of
        op, _, index, position = node.args[:4]
        given = [*arguments[4:], f"draw={index}", *([] if position == 0 else [f"part={_value(position)}"])]
        return f"{node.name} = {_name(op)}({', '.join(given)})"
    return f"{node.name} = {_name(node.target)}({', '.join(arguments)})"


def _name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return repr(value)


def _shapes(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    shapes = [str(list(value.shape)) for value in values if isinstance(value, torch.Tensor)]
    return ", ".join(shapes)


def _reason(collective: Collective) -> str:
    over = " ".join(axis.name for axis in collective.axes)
    size = f"{readable_bytes(collective.bytes)} over {over} ({axes_size(collective.axes)} devices)"
    return f"{collective.owner}: {collective.kind} of {size}{collective.reason and ', '}{collective.reason}"
