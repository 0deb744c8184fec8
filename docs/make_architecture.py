"""Draw docs/images/architecture.svg and write the table of rooms of docs/architecture.md: ``make figures``.

python -m docs.make_architecture [--print]

Both are made from the sources of the package: the order of the rooms stands in pyproject.toml, the purpose of a room is
the first sentence of its docstring, and every import counts, also inside functions and under ``TYPE_CHECKING``. No
module of the package is imported. ``--print`` writes the table to the standard output and changes no file.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardweave"
PAGE = ROOT / "docs" / "architecture.md"
IMAGE = ROOT / "docs" / "images" / "architecture.svg"

PUBLIC = "shardweave"
"""How the package's own ``__init__`` is called beside its rooms."""
ABOVE_PUBLIC = ("demo", "validation", "cli")
"""The rooms that stand above the public names."""
TABLE = re.compile(r"(?<=<!-- made by make_architecture.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

INK, FAINT, LINE, BOX, TOP = "#1d2733", "#5c6b7a", "#c4ccd6", "#e8eef7", "#eceef1"


def rooms() -> list[str]:
    """The rooms in their order, the lowest first; the public names stand between `compiler` and `demo`.

    >>> rooms()[0]
    'ir'
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[str] = project["tool"]["shardweave"]["rooms"]
    first = min(found.index(name) for name in ABOVE_PUBLIC)
    return [*found[:first], PUBLIC, *found[first:]]


def room_of(module: str) -> str:
    """The room of a module of the package.

    >>> room_of("shardweave.passes.base"), room_of("shardweave")
    ('passes', 'shardweave')
    """
    return (module.split(".") + [PUBLIC])[1]


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    found: set[str] = set()
    names = set(rooms())
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {room_of(each.name) for each in node.names if each.name.split(".")[0] == "shardweave"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardweave":
            if node.module == "shardweave":  # `from shardweave import runtime` takes a room, other names are public
                found |= {each.name if each.name in names else PUBLIC for each in node.names}
            else:
                found.add(room_of(node.module or ""))
    return found


def import_graph() -> nx.DiGraph:
    """The rooms as nodes, and an edge from each room to every other room that it imports from."""
    graph = nx.DiGraph()
    graph.add_nodes_from(rooms())
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = PUBLIC if parts == ("__init__",) else parts[0]
        graph.add_edges_from((room, other) for other in imported(path) if other != room)
    return graph


def purpose(room: str) -> str:
    """The first sentence of a room's docstring.

    >>> purpose("report")[:10]
    'Tables and'
    """
    path = PACKAGE if room == PUBLIC else PACKAGE / room
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split(">>>")[0].split())
    return text.partition(". ")[0].rstrip(". ").replace("``", "`") + "."


def table(graph: nx.DiGraph) -> str:
    """The rooms, their purposes and their imports, the lowest first, in Markdown."""
    order = rooms()
    lines = ["| room | what it is for | imports |", "| --- | --- | --- |"]
    for room in order:
        below = ", ".join(f"`{other}`" for other in sorted(graph.successors(room), key=order.index))
        path = "shardweave/__init__.py" if room == PUBLIC else f"shardweave/{room}"
        name = f"[`{room}`](../{path}{'' if room == PUBLIC or (PACKAGE / room).is_dir() else '.py'})"
        lines.append(f"| {name} | {purpose(room)} | {below or 'nothing'} |")
    return "\n".join(lines) + "\n"


def draw_layers(axes: Axes, graph: nx.DiGraph) -> None:
    """The rooms above what they import; an arrow that follows from two others is left out."""
    reduced = nx.transitive_reduction(graph)
    order, layers = rooms(), [*nx.topological_generations(reduced)]
    positions: dict[str, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        # Beside each other in the order of what imports them, by the mean of their places.
        above = {room: [positions[upper][0] for upper in reduced.predecessors(room)] or [0.0] for room in layer}
        row = sorted(layer, key=lambda room: (sum(above[room]) / len(above[room]), order.index(room)))
        for index, room in enumerate(row):
            positions[room] = 2.2 * index - 1.1 * (len(row) - 1), float(len(layers) - 1 - depth)
    for room, (x, y) in positions.items():
        colour = TOP if room == PUBLIC or room in ABOVE_PUBLIC else BOX
        style = "round,pad=0,rounding_size=0.12"
        box = FancyBboxPatch((x - 0.85, y - 0.27), 1.7, 0.54, boxstyle=style, fc=colour, ec="none", zorder=2)
        axes.add_patch(box)
        axes.text(x, y, room, color=INK, fontsize=10, ha="center", va="center", weight="bold")
    for upper, lower in sorted(reduced.edges):
        (x, y), (to_x, to_y) = positions[upper], positions[lower]
        around = x == to_x and y - to_y > 1  # a room stands between the two
        arrow = FancyArrowPatch(
            (x, y - 0.28), (to_x, to_y + 0.28), arrowstyle="-|>", connectionstyle="arc3,rad=-0.6" if around else "arc3",
            mutation_scale=9, shrinkA=0, shrinkB=0, color=FAINT, linewidth=1.1, zorder=1,
        )  # fmt: skip
        axes.add_patch(arrow)
    axes.set(xlim=(-2.2, 2.3), ylim=(-0.6, len(layers) - 0.4))
    axes.set_title("each room above what it imports", color=FAINT, fontsize=10)
    axes.axis("off")


def draw_matrix(axes: Axes, graph: nx.DiGraph) -> None:
    """A row for each room, a dot for each room that it imports from: all dots are below the diagonal."""
    order = rooms()
    for row, upper in enumerate(order):
        axes.plot([-0.5, row], [row, row], color=LINE, linewidth=0.6, zorder=0)
        axes.text(row, row, "■", color=BOX, ha="center", va="center", fontsize=13)
        for column, lower in enumerate(order):
            if graph.has_edge(upper, lower):
                (dot,) = axes.plot(column, row, marker="o", markersize=6, color=INK)
                dot.set_gid(f"{upper}-imports-{lower}")
    axes.set_yticks(range(len(order)), order, fontsize=9, color=INK)
    axes.set_xticks(range(len(order)), order, fontsize=9, color=INK, rotation=60, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.set(xlim=(-0.6, len(order) - 0.4), ylim=(-0.6, len(order) - 0.4))
    axes.set_title("all imports: the row imports from the column", color=FAINT, fontsize=10)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw(path: Path, graph: nx.DiGraph) -> None:
    """Both views of the imports as an SVG whose bytes follow from the imports alone."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardweave", "font.family": "sans-serif"}):
        figure = Figure(figsize=(11, 6.2))
        draw_layers(figure.add_axes((0.01, 0.01, 0.41, 0.93)), graph)
        draw_matrix(figure.add_axes((0.52, 0.13, 0.47, 0.81)), graph)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    graph = import_graph()
    if "--print" in sys.argv:
        print(table(graph), end="")
        return
    draw(IMAGE, graph)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(graph), text), encoding="utf-8")


if __name__ == "__main__":
    main()
