"""What all pictures share: sizes, colours that are told apart in greyscale, legends and boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 3.3
DPI = 200  # a column is 660 pixels wide: legible in a notebook and on a slide
FONT, SMALL, TINY = 8, 7, 6.5
DARK, LIGHT, ACCENT = "#1f4e79", "#a9c4de", "#b03a2e"
PAD_ABOVE_LEGEND = 18


def box(ax: Axes, text: str, *, right: bool = False) -> None:
    """Write numbers into an upper corner, on a ground that keeps them readable."""
    ground = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "0.5", "linewidth": 0.6, "alpha": 0.9}
    x, side = (0.97, "right") if right else (0.03, "left")
    ax.text(
        x, 0.965, text, transform=ax.transAxes, ha=side, va="top", fontsize=SMALL, family="monospace", bbox=ground,
        zorder=5,
    )  # fmt: skip


def legend_above(ax: Axes, columns: int) -> None:
    """Put the legend between the axes and the title, where it hides nothing."""
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, frameon=False, fontsize=SMALL, handlelength=1.6,
        columnspacing=1.2,
    )  # fmt: skip


def finish(ax: Axes, title: str | None, pad: float = 6) -> None:
    """Give every picture the same ticks, spines and title."""
    ax.tick_params(labelsize=SMALL, which="both")
    ax.spines[["top", "right"]].set_visible(False)
    if title is not None:
        ax.set_title(title, fontsize=FONT + 1, pad=pad, parse_math=False)


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


def figure_of(ax: Axes) -> Figure:
    """Return the figure that axes belong to."""
    return ax.figure.figure  # twice: the first may be a subfigure
