"""What all pictures share: sizes, colours that are told apart in greyscale, histograms, legends and boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.3
DPI = 200  # a column is 660 pixels wide: legible in a notebook and on a slide
FONT, SMALL, TINY = 8, 7, 6.5
DARK, LIGHT, ACCENT = "#1f4e79", "#a9c4de", "#b03a2e"
SETS = ("In-distribution", "Out-of-distribution")
LINES: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", DARK),
    ("--", "s", ACCENT),
    ("-.", "^", "#2e7d32"),
    (":", "D", "#6a3d9a"),
    ((0, (6, 1, 1, 1, 1, 1)), "v", "#8a6d00"),
)


def alarm(ax: Axes, inside: Any, outside: Any, bins: int) -> None:
    """Draw the novelty of known and unknown examples, and where the alarm is raised."""
    known, strange = inside.novelty.double(), outside.novelty.double()
    flagged = [float(part.alarm().double().mean()) for part in (inside, outside)]
    # The tail of far data says no more: what is beyond counts in the last bar.
    top = float(torch.cat([known, strange]).quantile(0.98))
    low = float(min(known.min(), strange.min()))
    limits = low, top + 1e-3 * abs(top - low) + 1e-12
    histograms(ax, (known.clamp(max=top), strange.clamp(max=top)), SETS, bins, limits)
    quiet = torch.cat([known[~inside.alarm()], strange[~outside.alarm()], known.new_full((1,), low)])
    ax.axvline(float(quiet.max()), color=DARK, linestyle="--", linewidth=1.0)
    box(ax, f"alarm: {flagged[1]:.1%} of the strange,\n{flagged[0]:.1%} false alarms", right=True)
    finish(ax, None, "Novelty")


def histograms(
    ax: Axes, values: Sequence[Tensor], names: tuple[str, str], bins: int, limits: tuple[float, float]
) -> None:
    """Draw two histograms over each other, told apart without colours."""
    looks: tuple[dict[str, Any], ...] = (
        {"histtype": "stepfilled", "facecolor": LIGHT, "edgecolor": DARK},
        {"histtype": "stepfilled", "facecolor": "none", "edgecolor": ACCENT, "hatch": "////"},
    )
    for each, name, look in zip(values, names, looks, strict=True):
        weights = torch.full_like(each, 1 / len(each))
        ax.hist(each.numpy(), bins=bins, range=limits, weights=weights.numpy(), linewidth=1.0, label=name, **look)
    ax.set_ylabel("Fraction of examples", fontsize=FONT)
    ax.set_ylim(top=1.3 * ax.get_ylim()[1])
    legend_above(ax, 2)


def box(ax: Axes, text: str, *, right: bool = False) -> None:
    """Write numbers into an upper corner, on a ground that keeps them readable."""
    ground = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "0.5", "linewidth": 0.6, "alpha": 0.9}
    x, side = (0.97, "right") if right else (0.03, "left")
    look: dict[str, Any] = {"fontsize": SMALL, "family": "monospace", "bbox": ground, "zorder": 5}
    ax.text(x, 0.965, text, transform=ax.transAxes, ha=side, va="top", **look)


def legend_above(ax: Axes, columns: int) -> None:
    """Put the legend between the axes and the title, where it hides nothing."""
    look: dict[str, Any] = {"frameon": False, "fontsize": SMALL, "handlelength": 1.6, "columnspacing": 1.2}
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, **look)


def finish(ax: Axes, title: str | None, xlabel: str, ylabel: str | None = None, pad: float = 18) -> Figure:
    """Give every picture the same ticks, spines, labels and title; return its figure."""
    ax.tick_params(labelsize=SMALL, which="both")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(xlabel, fontsize=FONT)
    if ylabel is not None:
        ax.set_ylabel(ylabel, fontsize=FONT)
    if title is not None:
        ax.set_title(title, fontsize=FONT + 1, pad=pad, parse_math=False)
    return ax.figure.figure  # twice: the first may be a subfigure


def new_axes(height: float) -> Axes:
    """Make axes of one column's width in a figure of their own."""
    return new_figure(WIDTH, height).subplots()


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that no global state knows of."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "bayesify.plots draws with matplotlib, which is missing; pip install bayesify[plots]"
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def short(count: int) -> str:
    """Write a count in at most four characters or so."""
    for size, suffix in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:.0f}{suffix}"
    return str(count)
