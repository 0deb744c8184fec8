"""Draw the figures of README.md and docs/ again: ``make figures``.

``how-it-works.png`` is a drawing; ``timeline.png`` is the simulated step of the demo model under the demo's own plan.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).parent / "images"

INK, FAINT, LINE = "#1d2733", "#5c6b7a", "#c4ccd6"


@dataclass(frozen=True)
class Box:
    """A stage of the compiler: what happens there in a line, and what its result looks like."""

    title: str
    line: str
    code: str
    colour: str


STAGES = (
    Box(
        "your model",
        "an nn.Module that knows one device",
        """\
        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            logits = self.head(x)
            return cross_entropy(logits, y)""",
        "#eceef1",
    ),
    Box(
        "1  capture",
        "forward and backward, one graph",
        """\
        mm   = tokens @ qkv.weight
        view = mm.view(b, t, 3, h, d)
        sdpa = attention(q, k, v)
        ...
        mm_9 = grad.T @ saved""",
        "#e8eef7",
    ),
    Box(
        "2  annotate",
        "every op's loops, by a rule",
        """\
        mm     m k, k n -> m n
        bmm    b m k, b k n -> b m n
        view   b t (3 h d) -> b t 3 h d
        norm   ... [d], [d] -> ... [d]
        gelu   ... -> ...""",
        "#e6f3ec",
    ),
    Box(
        "3  plan",
        "an integer program, a memory limit",
        """\
        min  Σ time + Σ layout change
        s.t. Σ memory <= limit
             one strategy an op

        qkv  (x=2, data=2)  ZDP
        up   (data=4)       DP""",
        "#fdf1dd",
    ),
    Box(
        "4  shard",
        "local shapes, collectives, why",
        """\
        # qkv.weight: gathered from rest
        w = all_gather(qkv_weight)
        ...
        w = wait_tensor(w)
        mm = x @ w""",
        "#fbe9e4",
    ),
    Box(
        "5  run",
        "an nn.Module like the one before",
        """\
        loss = parallel(x, y)
        loss.backward()
        adamw.step()

        # the same losses,
        # the same parameters""",
        "#eee9f7",
    ),
)


def how_it_works(path: Path) -> None:
    """The stages from the model to the parallel module."""
    width, height, gap, columns = 2.65, 1.85, 0.35, 3
    rows = -(-len(STAGES) // columns)
    size = columns * (width + gap), rows * (height + gap)
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-gap / 2, size[0] - gap / 2), ylim=(-gap / 2, size[1] - gap / 2))
    axes.axis("off")
    for index, box in enumerate(STAGES):
        row, column = divmod(index, columns)
        x, y = column * (width + gap), (rows - 1 - row) * (height + gap)
        style = "round,pad=0,rounding_size=0.1"
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=box.colour, edgecolor="none"))
        top = y + height
        axes.text(x + 0.15, top - 0.32, box.title, color=INK, fontsize=12, weight="bold")
        axes.text(x + 0.15, top - 0.54, box.line, color=FAINT, fontsize=9)
        axes.plot([x + 0.15, x + width - 0.15], [top - 0.65] * 2, color=LINE, linewidth=1)
        code = dedent(box.code)
        axes.text(x + 0.15, top - 0.77, code, color=INK, fontsize=7.6, family="monospace", va="top", linespacing=1.5)
        if index + 1 < len(STAGES):
            arrow = {"arrowstyle": "->", "color": FAINT, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
            if column < columns - 1:
                middle, right = y + height / 2, x + width
                axes.annotate("", (right + gap - 0.04, middle), (right + 0.04, middle), arrowprops=arrow)
            else:  # down, back to the left, and into the next row
                middle, left = y - gap / 2, width / 2
                axes.plot([x + width / 2] * 2 + [left], [y - 0.04, middle, middle], color=FAINT, linewidth=1.4)
                axes.annotate("", (left, y - gap + 0.02), (left, middle + 0.007), arrowprops=arrow)
    figure.savefig(path, dpi=160)


def timeline(path: Path) -> None:
    """The simulated step of the demo's plan."""
    from shardweave.demo.run import Recipe, make_plans

    _, plan = make_plans(Recipe(), ranks=4)
    plan.timeline().plot(path, memory_limit=plan.memory_limit)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    how_it_works(IMAGES / "how-it-works.png")
    if "--drawings" not in sys.argv:
        timeline(IMAGES / "timeline.png")


if __name__ == "__main__":
    main()
