"""Pictures of calibration and uncertainty, one paper column wide and readable in greyscale.

Every function draws on `ax`, or on a new figure if that is None, and returns the figure; `figure.savefig` writes it,
660 pixels wide, or sharper with `dpi=400`.
matplotlib is imported when a picture is drawn, and its global state (pyplot, rcParams) is never touched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.quality import metrics
from bayesify.quality.arrays import Array, to_scores
from bayesify.quality.bands import calibration_curve, regression_band
from bayesify.quality.drawing import (
    ACCENT,
    DARK,
    FONT,
    LIGHT,
    PAD_ABOVE_LEGEND,
    SMALL,
    TINY,
    WIDTH,
    box,
    figure_of,
    finish,
    legend_above,
    new_axes,
    new_figure,
)
from bayesify.quality.temperature import Temperature, tempered_probs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "before_after", "calibration_curve", "regression_band", "reliability_diagram", "reliability_pair", "report",
    "risk_coverage", "temperature_curve", "uncertainty_histogram",
]  # fmt: skip

_LINES: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", DARK),
    ("--", "s", ACCENT),
    ("-.", "^", "#2e7d32"),
    (":", "D", "#6a3d9a"),
    ((0, (6, 1, 1, 1, 1, 1)), "v", "#8a6d00"),
)
_MOST_BINS_WITH_NUMBERS = 20
_STEADY_COVERAGE = 0.05
FEW = 10


def reliability_diagram(
    probs: Array,
    labels: Array,
    *,
    bins: int = 15,
    kind: metrics.Kind = "top",
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw accuracy against confidence by bin, the size of each bin, and a box with ECE, MCE and NLL.

    Bins of fewer than ten items are drawn white and dotted: their bars are mostly chance.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).
        bins: The number of bins.
        kind: "top" or "pooled"; see `metrics.reliability`.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure.

    Example:
        >>> figure = reliability_diagram(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> figure.axes[0].get_xlabel()
        'Confidence'
    """
    table = metrics.reliability(probs, labels, bins, kind)
    ax = ax or new_axes(height=3.5)
    filled = table.counts > 0
    lefts, counts = table.edges[:-1][filled].numpy(), table.counts[filled].numpy()
    accuracy, confidence = table.accuracy[filled].numpy(), table.confidence[filled].numpy()
    bar: dict[str, Any] = {"width": 1 / bins, "align": "edge", "linewidth": 0.6}
    observed = ax.bar(lefts, accuracy, color=LIGHT, edgecolor="black", label="Observed", **bar)
    gap = confidence - accuracy
    gaps = ax.bar(lefts, gap, bottom=accuracy, color="none", edgecolor=ACCENT, hatch="/////", label="Gap", **bar)
    few = [i for i, count in enumerate(counts) if count < FEW]
    if few:
        ax.bar([0], [0], color="white", edgecolor="0.55", linestyle=":", linewidth=0.6, label=f"Under {FEW} items")
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.9, label="Perfect")
    ax.axhline(0, color="black", linewidth=0.8)

    # The counts stand below zero in the same axes: a panel of their own would not follow a layout made by others.
    floor, tallest = -0.34, 0.15
    heights = tallest * counts / counts.max()
    ax.bar(lefts, heights, bottom=floor, color="0.75", edgecolor="black", label="_counts", **bar)
    if bins <= _MOST_BINS_WITH_NUMBERS:
        for left, height, count in zip(lefts, heights, counts, strict=True):
            where = left + 0.5 / bins, floor + height + 0.015
            ax.text(*where, _short(int(count)), rotation=90, ha="center", va="bottom", fontsize=TINY)
    ax.set(xlim=(0, 1), ylim=(floor, 1))
    ax.set_yticks([floor + tallest / 2, 0, 0.2, 0.4, 0.6, 0.8, 1], ["count", "0", "0.2", "0.4", "0.6", "0.8", "1"])

    ax.set_xlabel("Confidence" if kind == "top" else "Predicted probability", fontsize=FONT)
    ax.set_ylabel("Accuracy" if kind == "top" else "Observed frequency", fontsize=FONT, y=0.63)
    box(ax, f"ECE {table.ece:.4f}\nMCE {table.mce:.4f}\nNLL {metrics.nll(probs, labels):.4f}")
    legend_above(ax, 4 if few else 3)
    for i in few:  # pale, since they say little; after the legend, which copies the look of the first bar
        observed[i].set(facecolor="white", edgecolor="0.55", linestyle=":")
        gaps[i].set(edgecolor="0.7", linestyle=":")
    finish(ax, title, PAD_ABOVE_LEGEND)
    return figure_of(ax)


def reliability_pair(
    logits: Array,
    labels: Array,
    temperature: Temperature | float,
    *,
    bins: int = 15,
    kind: metrics.Kind = "top",
) -> Figure:
    """Draw reliability diagrams before and after temperature scaling, side by side.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        labels: Integer classes, shape (N,).
        temperature: What `metrics.fit_temperature` returned, or T itself.
        bins: The number of bins.
        kind: "top" or "pooled"; see `metrics.reliability`.

    Returns:
        The figure, two columns wide.

    Example:
        >>> figure = reliability_pair(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]), 2.0)
        >>> [axis.get_title() for axis in figure.axes]
        ['Before: T = 1', 'After: T = 2.000']
    """
    figure = new_figure(2 * WIDTH, 3.5)
    titles = "Before: T = 1", f"After: T = {float(temperature):.3f}"
    for ax, t, title in zip(figure.subplots(1, 2), (1.0, float(temperature)), titles, strict=True):
        reliability_diagram(tempered_probs(logits, t), labels, bins=bins, kind=kind, ax=ax, title=title)
    return figure


def temperature_curve(temperature: Temperature, *, ax: Axes | None = None, title: str | None = None) -> Figure:
    """Draw the likelihood that the search for a temperature saw, with T = 1 and the optimum marked.

    Args:
        temperature: What `metrics.fit_temperature` returned.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure.

    Example:
        >>> logits, labels = torch.tensor([[4.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
        >>> temperature_curve(metrics.fit_temperature(logits, labels)).axes[0].get_xlabel()
        'Temperature T'
    """
    ax = ax or new_axes(height=2.5)
    t_best, best, before = float(temperature), temperature.nll, temperature.nll_before
    low, high = min(1.0, t_best) / 3, max(1.0, t_best) * 3
    inside = [(t, nll) for t, nll in temperature.curve if low <= t <= high]
    ax.plot(*zip(*inside, strict=True), color=DARK, linewidth=1.2, marker=".", markersize=3)
    marks: dict[str, Any] = {"linestyle": "none", "markersize": 5, "markeredgecolor": "black", "clip_on": False}
    ax.plot(1.0, before, marker="s", color="white", label=f"T = 1, NLL {before:.4f}", **marks)
    ax.plot(t_best, best, marker="o", color=ACCENT, label=f"T = {t_best:.3f}, NLL {best:.4f}", **marks)
    ax.set_xscale("log")
    ax.set_xticks([digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlim(low, high)
    ax.set_xlabel("Temperature T", fontsize=FONT)
    ax.set_ylabel("NLL", fontsize=FONT)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center")  # "best" is slow, and warns on a busy machine
    finish(ax, title)
    return figure_of(ax)


def risk_coverage(
    curves: metrics.RiskCoverage | Mapping[str, metrics.RiskCoverage],
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the error rate among the most certain predictions, for one method or several.

    The vertical scale fits the risks from a coverage of 5% on; below, they are means of few examples.

    Args:
        curves: What `metrics.risk_coverage` returned, or a mapping from names to that.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure; the legend gives each area under the curve.

    Example:
        >>> curve = metrics.risk_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> risk_coverage({"vi": curve}).axes[0].get_legend().get_texts()[0].get_text()
        'vi (AURC 0.25)'
    """
    named = {"": curves} if isinstance(curves, metrics.RiskCoverage) else curves
    if not named:
        raise ValueError("curves must not be empty, got no curve; pass {name: metrics.risk_coverage(probs, labels)}")
    ax = ax or new_axes(height=2.5)
    for index, ((name, curve), (line, marker, color)) in enumerate(zip(named.items(), cycle(_LINES), strict=False)):
        # Markers start at different points, so that curves which coincide can still be told apart.
        every = (len(curve.risk) * (2 + index % len(_LINES)) // 30, max(1, len(curve.risk) // 5))
        label = f"{name} (AURC {curve.aurc:.3g})".strip()
        look: dict[str, Any] = {"linestyle": line, "marker": marker, "color": color, "markevery": every}
        ax.plot(curve.coverage.numpy(), curve.risk.numpy(), linewidth=1.2, markersize=4, label=label, **look)
    # One early mistake makes the first few risks jump to one; the scale is for the rest.
    top = max(curve.risk[curve.coverage >= _STEADY_COVERAGE].max().item() for curve in named.values())
    ax.set(xlim=(0, 1), ylim=(0, 1.15 * top or 1.0))
    ax.set_xlabel("Coverage", fontsize=FONT)
    ax.set_ylabel("Error rate of those kept", fontsize=FONT)
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")  # the curves rise to the right
    finish(ax, title)
    return figure_of(ax)


def uncertainty_histogram(
    in_dist: Array,
    out_dist: Array,
    *,
    quantity: str = "Entropy",
    names: tuple[str, str] = ("In-distribution", "Out-of-distribution"),
    bins: int = 30,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    r"""Draw how the uncertainties of two sets are spread, and how well they tell the sets apart.

    Args:
        in_dist: Uncertainties that ought to be low, shape (N,).
        out_dist: Uncertainties that ought to be high, shape (M,).
        quantity: What the uncertainties are.
        names: What the two sets are.
        bins: The number of bars over the common range.
        ax: Where to draw.
        title: Written above the picture.

    Returns:
        The figure; the box gives AUROC and FPR95.

    Example:
        >>> figure = uncertainty_histogram(torch.tensor([0.1, 0.2]), torch.tensor([0.9, 1.1]))
        >>> figure.axes[0].texts[0].get_text()
        'AUROC 1.0000\nFPR95 0.0000'
    """
    scores = to_scores(in_dist, "in_dist"), to_scores(out_dist, "out_dist")
    ax = ax or new_axes(height=2.5)
    both = torch.cat(scores)
    _histograms(ax, scores, names, bins, (both.min().item(), both.max().item()))
    ax.set_xlabel(f"{quantity} (nats)", fontsize=FONT)
    box(ax, f"AUROC {metrics.auroc(*scores):.4f}\nFPR95 {metrics.fpr95(*scores):.4f}", right=True)
    finish(ax, title, PAD_ABOVE_LEGEND)
    return figure_of(ax)


def before_after(
    before: Any,
    after: Any,
    *,
    ood: tuple[Any, Any] | None = None,
    names: tuple[str, str] = ("Before", "After"),
    bins: int = 15,
) -> Figure:
    """Draw two predictions of the same data side by side: reliability, and how sure each is of what it never saw.

    Args:
        before: What `predict` returned for labelled data, by one model.
        after: The same by another, or by the same one after `bayesify`.
        ood: What both return for out-of-distribution data; below the reliabilities, the confidences in and out of the
            distribution, with the AUROC of 1 - confidence. Of a model with `fit_novelty`, how strange both kinds of
            data are instead, and how many examples of each its alarm flags.
        names: What the two are.
        bins: The number of bins of each reliability diagram.

    Returns:
        The figure, two columns wide.

    Raises:
        ValueError: A prediction has no labels.
        TypeError: `ood` is no pair.

    Example:
        >>> from bayesify.prediction.predictive import Predictive
        >>> logits, labels = torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> figure = before_after(Predictive.from_logits(logits, labels), Predictive.from_logits(logits / 2, labels))
        >>> [axis.get_title() for axis in figure.axes]
        ['Before', 'After']
    """
    flat = [prediction.flat() for prediction in (before, after)]
    if any(prediction.labels is None for prediction in flat):
        raise ValueError("before_after needs labels, and a prediction has none; predict batches of (inputs, labels)")
    if ood is not None and not (isinstance(ood, (tuple, list)) and len(ood) == 2):
        raise TypeError(
            f"ood must be a pair (before, after) of predictions, got {type(ood).__name__}; predict with both"
        )
    heights = [3.3] if ood is None else [3.3, 2.2]
    figure = new_figure(2 * WIDTH, sum(heights))
    axes = figure.subplots(len(heights), 2, height_ratios=heights, squeeze=False)
    for ax, prediction, name in zip(axes[0], flat, names, strict=True):
        reliability_diagram(prediction.probs, prediction.labels, bins=bins, ax=ax, title=name)
    for ax, inside, outside in zip(axes[-1], flat, ood or (), strict=False):
        if getattr(inside, "novelty", None) is not None and getattr(outside, "novelty", None) is not None:
            _alarm(ax, inside, outside.flat(), 2 * bins)
            continue
        sure = inside.confidence.double(), outside.flat().confidence.double()
        _histograms(ax, sure, ("In-distribution", "Out-of-distribution"), 2 * bins, (0.0, 1.0))
        ax.set_xlim(0, 1)
        ax.set_xlabel("Confidence", fontsize=FONT)
        box(ax, f"AUROC {metrics.auroc(1 - sure[0], 1 - sure[1]):.4f}\n{float(sure[1].mean()):.1%} sure of the unknown")
        finish(ax, None)
    return figure


def _alarm(ax: Axes, inside: Any, outside: Any, bins: int) -> None:
    """Draw how strange known and unknown examples are, and where the alarm is raised."""
    known, strange = inside.novelty.double(), outside.novelty.double()
    flagged = [float(part.alarm().double().mean()) for part in (inside, outside)]
    # The tail of far data says no more: what is beyond counts in the last bar.
    top = float(torch.cat([known, strange]).quantile(0.98))
    low = float(min(known.min(), strange.min()))
    limits = low, top + 1e-3 * abs(top - low) + 1e-12
    parts = known.clamp(max=top), strange.clamp(max=top)
    _histograms(ax, parts, ("In-distribution", "Out-of-distribution"), bins, limits)
    quiet = torch.cat([known[~inside.alarm()], strange[~outside.alarm()], known.new_full((1,), low)])
    ax.axvline(float(quiet.max()), color=DARK, linestyle="--", linewidth=1.0)
    ax.set_xlabel("Novelty", fontsize=FONT)
    box(ax, f"alarm: {flagged[1]:.1%} of the strange,\n{flagged[0]:.1%} false alarms", right=True)
    finish(ax, None)


def _histograms(
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


def report(
    predictive: Any,
    path: str | os.PathLike[str],
    *,
    ood: Any = None,
    temperature: Temperature | float | None = None,
    title: str = "Predictive uncertainty",
    items: Sequence[Any] | None = None,
) -> Path:
    """Write one self-contained HTML page with every number and picture of a prediction.

    Args:
        predictive: What `predict` returned for classification or regression; without labels, only the uncertainties
            are shown.
        path: The file to write, replaced as a whole.
        ood: The prediction for out-of-distribution data, to see whether the uncertainty tells it apart.
        temperature: A temperature fitted on other data. If None it is fitted on the labels of `predictive`, which
            flatters the numbers, and the page says so.
        title: The heading.
        items: The examples of a classification in their order, texts or images, to show the most uncertain ones.

    Returns:
        The path.

    Raises:
        TypeError: `predictive` or `ood` has no class probabilities.
        ValueError: `items` are not one text or image for each example.

    Example:
        >>> from types import SimpleNamespace
        >>> import tempfile
        >>> probs, zeros = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.zeros(2)
        >>> out = SimpleNamespace(probs=probs, logits=None, labels=torch.tensor([0, 1]), confidence=probs.amax(1),
        ...     entropy=metrics.entropy(probs), expected_entropy=metrics.entropy(probs), mutual_information=zeros)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report(out, f"{folder}/report.html").name
        'report.html'
    """
    from bayesify.quality.report import write_report

    return write_report(predictive, path, ood=ood, temperature=temperature, title=title, items=items)


def _short(count: int) -> str:
    """Write a count in at most four characters or so."""
    for size, suffix in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:.0f}{suffix}"
    return str(count)
