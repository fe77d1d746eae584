"""Pictures of a regression: the band around its mean, and whether its intervals hold what they promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bayesify.quality.arrays import Array, to_double
from bayesify.quality.drawing import (
    ACCENT,
    DARK,
    FONT,
    LIGHT,
    PAD_ABOVE_LEGEND,
    SMALL,
    box,
    figure_of,
    finish,
    legend_above,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def regression_band(
    x: Array,
    predictive: Any,
    *,
    data: tuple[Array, Array] | None = None,
    level: float = 0.95,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a regression over one input: data, mean, and two shades, what the model doubts and all of the prediction.

    The dark shade is mean -+ z epistemic, with z the Gaussian's quantile for the level, the light one the prediction's
    interval, noise included; where the noise is not known they are about the same.

    Args:
        x: The input, as many as the predictions, in any order.
        predictive: What `predict(..., task="regression")` returned for it, one output each.
        data: Training inputs and targets, drawn as points.
        level: The probability of the interval.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure.

    Raises:
        ValueError: x and the predictions are not as many, or the model has several outputs.

    Example:
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(1, 1), "vi", prior_sig=1.0, init_sig=0.1)
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> regression_band(x, predict(model, x, samples=20, task="regression").with_noise(0.1)).axes[0].get_ylabel()
        'y'
    """
    at = to_double(x, "x").flatten()
    mean, epistemic = predictive.mean.flatten(), predictive.epistemic.flatten()
    if len(at) != len(mean):
        raise ValueError(f"x has {len(at)} values for {len(mean)} predictions; pass one input and one output for each")
    low, high = (side.flatten() for side in predictive.interval(level, noise=predictive.noise_known))
    order = at.argsort()
    z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
    ax = ax or new_axes(height=2.6)
    t = at[order].numpy()
    ax.fill_between(t, low[order], high[order], color=LIGHT, alpha=0.6, linewidth=0, label=f"{level:.0%}")
    sure, unsure = (mean - z * epistemic)[order], (mean + z * epistemic)[order]
    ax.fill_between(t, sure, unsure, color=DARK, alpha=0.45, linewidth=0, label="Doubt")
    ax.plot(t, mean[order], color=DARK, linewidth=1.4, label="Mean")
    if data is not None:
        points = [to_double(v, name).flatten().numpy() for v, name in zip(data, ("data[0]", "data[1]"), strict=True)]
        ax.plot(*points, ".", color="black", markersize=3, alpha=0.7, label="Data", markeredgewidth=0)
    ax.set_xlim(t[0], t[-1])
    ax.set_xlabel("x", fontsize=FONT)
    ax.set_ylabel("y", fontsize=FONT)
    legend_above(ax, 4)
    finish(ax, title, PAD_ABOVE_LEGEND)
    return figure_of(ax)


def calibration_curve(predictive: Any, *, ax: Axes | None = None, title: str | None = None) -> Figure:
    """Draw how many targets lie in the central interval of each level; an honest prediction follows the diagonal.

    Below it the intervals are too narrow, above it too wide. The box has the mean distance from the diagonal and the
    coverage of the 95% interval.

    Args:
        predictive: What `predict(..., task="regression")` returned for data with targets.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure.

    Example:
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(1, 1), "vi", prior_sig=1.0, init_sig=0.1)
        >>> batch = torch.randn(50, 1), torch.randn(50, 1)
        >>> out = predict(model, [batch], samples=20, task="regression").with_noise(1.0)
        >>> calibration_curve(out).axes[0].get_xlabel()
        'Level of the interval'
    """
    needed = (2 * predictive.ranks.flatten() - 1).abs().sort().values  # the level from which on each target is inside
    count = len(needed)
    levels = torch.linspace(0, 1, 201, dtype=torch.float64)
    observed = torch.searchsorted(needed, levels, right=True) / count
    ax = ax or new_axes(height=3.1)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.9, label="Honest")
    ax.fill_between(
        levels, levels, observed, facecolor="none", edgecolor=ACCENT, hatch="/////", linewidth=0, label="Gap"
    )
    ax.plot(levels, observed, color=DARK, linewidth=1.4, label="Observed")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_aspect("equal")
    ax.set_xlabel("Level of the interval", fontsize=FONT)
    ax.set_ylabel("Targets inside", fontsize=FONT)
    gap = float((observed - levels).abs().mean())
    box(ax, f"Mean gap {gap:.4f}\n95% holds {float((needed <= 0.95).double().mean()):.1%}")
    ax.tick_params(labelsize=SMALL)
    legend_above(ax, 3)
    finish(ax, title, PAD_ABOVE_LEGEND)
    return figure_of(ax)
