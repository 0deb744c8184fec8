"""The figure of the two loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def plot_losses(parallel: Sequence[float], single: Sequence[float], label: str, path: Path | None = None) -> Figure:
    """The loss curves of a parallel and a single-device training above, their relative difference below.

    Parameters
    ----------
    parallel, single : sequence of float
        The loss of every step.
    label : str
        What the parallel curve is called.
    path : Path, optional
        Where to save the figure.

    Examples
    --------
    >>> len(plot_losses([2.0, 1.0], [2.0, 1.0], "4 ranks").axes)
    2
    """
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = range(1, len(single) + 1)
    above.plot(steps, single, color="#b0b7c3", linewidth=5, label="one device")
    above.plot(steps, parallel, color="#1f5fa8", linewidth=1.5, marker="o", markersize=3, label=label)
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False)
    # The smallest difference that can be drawn on a logarithmic axis stands for none.
    below.semilogy(steps, [max(abs(a - b) / abs(b), 1e-9) for a, b in zip(parallel, single)], color="#c2571a")
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("step")
    below.set_ylim(1e-9, 1e-4)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
