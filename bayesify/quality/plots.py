"""Pictures of calibration and uncertainty, one paper column wide and readable in greyscale.

Every function draws on `ax`, under `title`, or on a new figure if `ax` is None, and returns the figure;
`figure.savefig` writes it, 660 pixels wide, or sharper with `dpi=400`.
matplotlib is imported when a picture is drawn, and its global state (pyplot, rcParams) is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.quality import metrics
from bayesify.quality.arrays import Array, to_double, to_scores
from bayesify.quality.report import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "before_after", "calibration_curve", "regression_band", "reliability_diagram", "report", "risk_coverage",
    "temperature_curve", "uncertainty_histogram",
]  # fmt: skip

WIDTH, DPI = 3.3, 200  # a column is 660 pixels wide: legible in a notebook and on a slide
FONT, SMALL, TINY = 8, 7, 6.5
DARK, LIGHT, ACCENT = "#1f4e79", "#a9c4de", "#b03a2e"
LINES: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", DARK),
    ("--", "s", ACCENT),
    ("-.", "^", "#2e7d32"),
    (":", "D", "#6a3d9a"),
    ((0, (6, 1, 1, 1, 1, 1)), "v", "#8a6d00"),
)
SETS = ("In-distribution", "Out-of-distribution")
WITHOUT_UNIT = ("Confidence", "Novelty", "Standard deviation")  # all other uncertainties are in nats
FEW = 10  # items of a bin, below which its bar is mostly chance
MOST_NUMBERED_BINS = 20
STEADY_COVERAGE = 0.05


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

    The arguments are those of `metrics.reliability`. Bins of fewer than ten items are drawn white and dotted: their
    bars are mostly chance.

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
    if bins <= MOST_NUMBERED_BINS:
        for left, height, count in zip(lefts, heights, counts, strict=True):
            where = left + 0.5 / bins, floor + height + 0.015
            ax.text(*where, short(int(count)), rotation=90, ha="center", va="bottom", fontsize=TINY)
    ax.set(xlim=(0, 1), ylim=(floor, 1))
    ax.set_yticks([floor + tallest / 2, 0, 0.2, 0.4, 0.6, 0.8, 1], ["count", "0", "0.2", "0.4", "0.6", "0.8", "1"])
    box(ax, f"ECE {table.ece:.4f}\nMCE {table.mce:.4f}\nNLL {metrics.nll(probs, labels):.4f}")
    legend_above(ax, 4 if few else 3)
    for i in few:  # after the legend, which copies the look of the first bar
        observed[i].set(facecolor="white", edgecolor="0.55", linestyle=":")
        gaps[i].set(edgecolor="0.7", linestyle=":")
    names = ("Confidence", "Accuracy") if kind == "top" else ("Predicted probability", "Observed frequency")
    ax.set_ylabel(names[1], fontsize=FONT, y=0.63)
    return finish(ax, title, names[0])


def temperature_curve(temperature: metrics.Temperature, *, ax: Axes | None = None, title: str | None = None) -> Figure:
    """Draw the likelihood that `metrics.fit_temperature` saw in its search, with T = 1 and the optimum marked.

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
    ax.legend(fontsize=SMALL, frameon=False, loc="upper center")  # "best" is slow, and warns on a busy machine
    return finish(ax, title, "Temperature T", "NLL", pad=6)


def risk_coverage(
    curves: metrics.RiskCoverage | Mapping[str, metrics.RiskCoverage],
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the error rate among the most certain predictions: one `metrics.risk_coverage`, or several by name.

    The legend gives each area under the curve. The vertical scale fits the risks from a coverage of 5% on; below, they
    are means of few examples.

    Example:
        >>> curve = metrics.risk_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        >>> risk_coverage({"vi": curve}).axes[0].get_legend().get_texts()[0].get_text()
        'vi (AURC 0.25)'
    """
    named = {"": curves} if isinstance(curves, metrics.RiskCoverage) else curves
    if not named:
        raise ValueError("curves must not be empty, got no curve; pass {name: metrics.risk_coverage(probs, labels)}")
    ax = ax or new_axes(height=2.5)
    for index, ((name, curve), (line, marker, color)) in enumerate(zip(named.items(), cycle(LINES), strict=False)):
        # Markers start at different points, so that curves which coincide can still be told apart.
        every = (len(curve.risk) * (2 + index % len(LINES)) // 30, max(1, len(curve.risk) // 5))
        label = f"{name} (AURC {curve.aurc:.3g})".strip()
        look: dict[str, Any] = {"linestyle": line, "marker": marker, "color": color, "markevery": every}
        ax.plot(curve.coverage.numpy(), curve.risk.numpy(), linewidth=1.2, markersize=4, label=label, **look)
    # One early mistake makes the first few risks jump to one; the scale is for the rest.
    top = max(curve.risk[curve.coverage >= STEADY_COVERAGE].max().item() for curve in named.values())
    ax.set(xlim=(0, 1), ylim=(0, 1.15 * top or 1.0))
    ax.legend(fontsize=SMALL, frameon=False, loc="upper left")  # the curves rise to the right
    return finish(ax, title, "Coverage", "Error rate of those kept", pad=6)


def uncertainty_histogram(
    in_dist: Array,
    out_dist: Array,
    *,
    quantity: str = "Entropy",
    names: tuple[str, str] = SETS,
    bins: int = 30,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    r"""Draw an uncertainty on two sets, low in the first (N,) and high in the second (M,), with AUROC and FPR95.

    Example:
        >>> figure = uncertainty_histogram(torch.tensor([0.1, 0.2]), torch.tensor([0.9, 1.1]))
        >>> figure.axes[0].texts[0].get_text()
        'AUROC 1.0000\nFPR95 0.0000'
    """
    scores = to_scores(in_dist, "in_dist"), to_scores(out_dist, "out_dist")
    ax = ax or new_axes(height=2.5)
    both = torch.cat(scores)
    histograms(ax, scores, names, bins, (both.min().item(), both.max().item()))
    box(ax, f"AUROC {metrics.auroc(*scores):.4f}\nFPR95 {metrics.fpr95(*scores):.4f}", right=True)
    return finish(ax, title, quantity if quantity in WITHOUT_UNIT else f"{quantity} (nats)")


def before_after(
    before: Any,
    after: Any,
    *,
    ood: tuple[Any, Any] | None = None,
    names: tuple[str, str] = ("Before", "After"),
    bins: int = 15,
) -> Figure:
    """Draw reliability diagrams of two predictions for labelled data side by side, and how they detect other data.

    Args:
        before: What `predict` returned before calibration, training or anything else.
        after: The same after it, such as `before.tempered(temperature)`.
        ood: A pair of predictions for out-of-distribution data, to draw below: of a model with `fit_novelty` the
            novelty of both kinds of data and what its alarm flags, of others the confidence.
        names: What the two are.
        bins: The number of bins of each reliability diagram.

    Returns:
        The figure, two columns wide.

    Raises:
        ValueError: A prediction has no labels.
        TypeError: `ood` is no pair.

    Example:
        >>> from bayesify.prediction.predictive import Predictive
        >>> out = Predictive.from_logits(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> [axis.get_title() for axis in before_after(out, out.tempered(2.0)).axes]
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
            alarm(ax, inside, outside.flat(), 2 * bins)
        else:
            sure = inside.confidence.double(), outside.flat().confidence.double()
            histograms(ax, sure, SETS, 2 * bins, (0.0, 1.0))
            ax.set_xlim(0, 1)
            auroc = metrics.auroc(1 - sure[0], 1 - sure[1])
            box(ax, f"AUROC {auroc:.4f}\nOOD confidence {float(sure[1].mean()):.1%}")
            finish(ax, None, "Confidence")
    return figure


def regression_band(
    x: Array,
    predictive: Any,
    *,
    data: tuple[Array, Array] | None = None,
    level: float = 0.95,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a regression over one input: data, mean, the epistemic band (dark) and the prediction's interval (light).

    Args:
        x: The input, as many as the predictions, in any order.
        predictive: What `predict(..., task="regression")` returned for it, one output each.
        data: Training inputs and targets, drawn as points.
        level: The probability of the interval, noise included where it is known; the dark band is mean -+ z epistemic.
        ax: Where to draw.
        title: Written above the picture.

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
    band = (mean - z * epistemic)[order], (mean + z * epistemic)[order]
    ax.fill_between(t, *band, color=DARK, alpha=0.45, linewidth=0, label="Epistemic")
    ax.plot(t, mean[order], color=DARK, linewidth=1.4, label="Mean")
    if data is not None:
        points = [to_double(v, name).flatten().numpy() for v, name in zip(data, ("data[0]", "data[1]"), strict=True)]
        ax.plot(*points, ".", color="black", markersize=3, alpha=0.7, label="Data", markeredgewidth=0)
    ax.set_xlim(t[0], t[-1])
    legend_above(ax, 4)
    return finish(ax, title, "x", "y")


def calibration_curve(predictive: Any, *, ax: Axes | None = None, title: str | None = None) -> Figure:
    """Draw the share of a regression's targets inside the central interval of each level, for labelled data.

    A calibrated prediction follows the diagonal; below it the intervals are too narrow, above it too wide. The box has
    the mean distance from the diagonal and the coverage of the 95% interval.

    Example:
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(1, 1), "vi", prior_sig=1.0, init_sig=0.1)
        >>> out = predict(model, [(torch.randn(50, 1), torch.randn(50, 1))], samples=20, task="regression")
        >>> calibration_curve(out.with_noise(1.0)).axes[0].get_xlabel()
        'Level of the interval'
    """
    needed = (2 * predictive.ranks.flatten() - 1).abs().sort().values  # the level from which on each target is inside
    levels = torch.linspace(0, 1, 201, dtype=torch.float64)
    observed = torch.searchsorted(needed, levels, right=True) / len(needed)
    ax = ax or new_axes(height=3.1)
    ax.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=0.9, label="Calibrated")
    look: dict[str, Any] = {"facecolor": "none", "edgecolor": ACCENT, "hatch": "/////", "linewidth": 0}
    ax.fill_between(levels, levels, observed, label="Gap", **look)
    ax.plot(levels, observed, color=DARK, linewidth=1.4, label="Observed")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_aspect("equal")
    gap = float((observed - levels).abs().mean())
    box(ax, f"Mean gap {gap:.4f}\n95% holds {float((needed <= 0.95).double().mean()):.1%}")
    legend_above(ax, 3)
    return finish(ax, title, "Level of the interval", "Targets inside")


# -- parts of pictures -------------------------------------------------------------------------------------------------


def alarm(ax: Axes, inside: Any, outside: Any, bins: int) -> None:
    """Draw the novelty of in- and out-of-distribution examples, and where the alarm is raised."""
    known, strange = inside.novelty.double(), outside.novelty.double()
    flagged = [float(part.alarm().double().mean()) for part in (inside, outside)]
    # The tail of far data says no more: what is beyond counts in the last bar.
    top = float(torch.cat([known, strange]).quantile(0.98))
    low = float(min(known.min(), strange.min()))
    limits = low, top + 1e-3 * abs(top - low) + 1e-12
    histograms(ax, (known.clamp(max=top), strange.clamp(max=top)), SETS, bins, limits)
    quiet = torch.cat([known[~inside.alarm()], strange[~outside.alarm()], known.new_full((1,), low)])
    ax.axvline(float(quiet.max()), color=DARK, linestyle="--", linewidth=1.0)
    box(ax, f"alarm: {flagged[1]:.1%} of OOD data,\n{flagged[0]:.1%} false alarms", right=True)
    finish(ax, None, "Novelty")


def histograms(
    ax: Axes, values: Sequence[Tensor], names: tuple[str, str], bins: int, limits: tuple[float, float]
) -> None:
    """Draw two overlapping histograms that can be told apart without colours."""
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
    """Write numbers into a box in an upper corner."""
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
    """Make a figure without pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "bayesify.plots draws with matplotlib, which is missing; pip install bayesify[plots]"
        ) from error
    return Figure(figsize=(width, height), layout="constrained", dpi=DPI)


def short(count: int) -> str:
    """Write a count in about four characters."""
    for size, suffix in ((10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:.0f}{suffix}"
    return str(count)
