"""Calibration of a classifier: reliability by bins, expected calibration errors, and temperature scaling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.quality.arrays import Array, ArrayT, like, to_classes, to_double, to_labels, to_logits

Kind: TypeAlias = Literal["top", "pooled"]

_KINDS = get_args(Kind)
_GRID_POINTS = 41
_NLL_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and accuracy by bin; empty bins have count, accuracy and confidence zero."""

    edges: Tensor  # of the bins, M + 1
    counts: Tensor  # predictions in each bin
    accuracy: Tensor  # the fraction of each bin's predictions that came true
    confidence: Tensor  # the mean probability of each bin

    @property
    def ece(self) -> float:
        r"""Expected calibration error :math:`\sum_m \frac{|B_m|}{\sum_j |B_j|} |acc_m - conf_m|`."""
        return float((self.counts * self._gaps).sum() / self.counts.sum())

    @property
    def ece_debiased(self) -> float:
        r"""The ECE without what noise alone adds to it, 2 ECE - E[ECE*], at least 0 (Kumar, Liang and Ma 2019).

        ECE* is the score of another sample of labels, in which the gap of bin m is
        :math:`N(g, s^2), g = acc_m - conf_m, s^2 = acc_m (1 - acc_m) / |B_m|`, so that
        :math:`E|N(g, s^2)| = s \sqrt{2/\pi} \exp(-g^2/2s^2) + g \, \mathrm{erf}(g/(s \sqrt 2))`.
        """
        gap = self._gaps
        s = (self.accuracy * (1 - self.accuracy) / self.counts.clamp_min(1)).sqrt().clamp_min(1e-12)
        z = gap / s
        again = s * math.sqrt(2 / math.pi) * torch.exp(-(z**2) / 2) + gap * torch.erf(z / math.sqrt(2))
        return max(0.0, float((self.counts * (2 * gap - again)).sum() / self.counts.sum()))

    @property
    def mce(self) -> float:
        r"""Maximum calibration error :math:`\max_m |acc_m - conf_m|` over the bins that are not empty."""
        return float(self._gaps.max())

    @property
    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()


def reliability(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> Reliability:
    """Sort predictions into M equal bins of confidence and compare with how often they came true.

    Bin m holds m/M <= p < (m+1)/M, and the last one p = 1 too. The edges are rounded to the precision of `probs`, so
    0.7 in float32 lies on the edge 0.7.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).
        bins: The number of bins M.
        kind: "top" bins the N highest probabilities; "pooled" all N * K probabilities, most of them near zero, which
            makes its errors much smaller: report which kind it is.

    Returns:
        The bins, with their `ece` and `mce`.

    Example:
        >>> reliability(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]), bins=2).counts
        tensor([0, 2])
    """
    p, y = to_classes(probs, labels)
    if not isinstance(bins, int) or isinstance(bins, bool):
        raise TypeError(f"bins must be an int, got {type(bins).__name__}; 15 is customary")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}; 15 is customary")
    if kind == "top":
        confidence, top = p.max(1)
        true = top == y
    elif kind == "pooled":
        confidence, true = p.flatten(), one_hot(y, p.shape[1]).flatten()
    else:
        raise ValueError(f"kind must be one of {_KINDS}, got {kind!r}; most papers report 'top'")
    edges = torch.arange(bins + 1, dtype=torch.float64, device="cpu") / bins
    return replace(binned(confidence, true, to_double(like(edges, probs), "edges")), edges=edges)


def binned(confidence: Tensor, true: Tensor, edges: Tensor) -> Reliability:
    """Return the bins of confidences, given whether each came true."""
    bins = len(edges) - 1
    bin_of = torch.bucketize(confidence, edges, right=True).sub(1).clamp(max=bins - 1)
    counts = torch.bincount(bin_of, minlength=bins)
    accuracy, mean_confidence = (
        torch.bincount(bin_of, values, minlength=bins) / counts.clamp(min=1) for values in (true.double(), confidence)
    )
    return Reliability(edges, counts, accuracy, mean_confidence)


def ece(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> float:
    """Expected calibration error: `reliability(...).ece`, the gap of the bins weighted by their sizes.

    Example:
        >>> round(ece(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
        0.25
    """
    return reliability(probs, labels, bins, kind).ece


def mce(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> float:
    """Maximum calibration error: `reliability(...).mce`, the largest gap of a bin.

    Example:
        >>> round(mce(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
        0.4
    """
    return reliability(probs, labels, bins, kind).mce


# -- temperature scaling -----------------------------------------------------------------------------------------------


class TemperatureError(ValueError):
    """The likelihood has no optimum inside the range of temperatures."""


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature T: above one the model was overconfident, below one underconfident."""

    temperature: float
    nll: float  # mean negative log-likelihood at T, on the data of the fit
    nll_before: float  # the same at T = 1
    curve: tuple[tuple[float, float], ...] = field(repr=False)  # every (T, NLL) of the search, sorted by T

    def __float__(self) -> float:
        """Return the temperature itself."""
        return self.temperature

    def apply(self, logits: ArrayT) -> ArrayT:
        """Return the probabilities of `logits`, (N, K) or (S, N, K), at this temperature; see `tempered_probs`."""
        return tempered_probs(logits, self.temperature)


def tempered_probs(logits: ArrayT, temperature: float) -> ArrayT:
    r"""Average the softmax of each sample's logits at one temperature, in log space and in float64.

    .. math:: p_T(k | x_n) = \frac{1}{S} \sum_s \mathrm{softmax}(f_s(x_n) / T)_k

    Example:
        >>> tempered_probs(torch.tensor([[2.0, 0.0]]), 1e6)
        tensor([[0.5000, 0.5000]])
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}; 1.0 changes nothing")
    scaled = to_logits(logits) / temperature
    log_probs = torch.logsumexp(torch.log_softmax(scaled, dim=-1), dim=0) - math.log(len(scaled))
    return like(log_probs.exp(), logits)


def fit_temperature(
    logits: Any, labels: Array | None = None, *, bounds: tuple[float, float] = (1e-2, 1e2)
) -> Temperature:
    r"""Find the temperature that maximizes the likelihood of `labels`.

    .. math:: \min_T \; -\frac{1}{N} \sum_n \log \frac{1}{S} \sum_s \mathrm{softmax}(f_s(x_n) / T)_{y_n}

    A grid in log T finds the basin, a golden-section search its bottom. Fit on held-out data: a temperature fitted on
    the test labels makes the test numbers optimistic.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample; or what `predict` returned.
        labels: Integer classes, shape (N,); those of the prediction by default. Dense labels such as (N, H, W) go with
            logits of one more dimension, the classes, which is found by the shapes; -100 is ignored.
        bounds: The smallest and the largest temperature to consider.

    Returns:
        The optimum, its likelihood, and the curve of the search.

    Raises:
        TemperatureError: The optimum is at a bound: labels that the logits separate perfectly drive T to zero, labels
            that contradict them to infinity, and constant logits leave it undetermined.
        ValueError: Labels that do not fit, bounds that are no range, or probabilities in place of logits.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)
        >>> fitted = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))
        >>> round(float(fitted), 4)  # 4 / log(3), so that the confidence is 3/4
        3.641
        >>> fitted.apply(logits)[0]
        tensor([0.7500, 0.2500])
    """
    weights = None
    if hasattr(logits, "num_samples"):
        found = logits.flat() if labels is None else logits  # one row per token or pixel whose label counts
        labels, weights = found.labels if labels is None else labels, found.weights
        if (logits := found.logits) is None:
            raise ValueError("the prediction has no logits; predict with keep_samples=True")
    if labels is None:
        raise ValueError("a temperature is fitted to labels; give them, or predict on data that holds them")
    low, high = bounds
    if not 0 < low < high < math.inf:
        raise ValueError(f"bounds must be 0 < low < high < inf, got {bounds}; the default is (1e-2, 1e2)")
    values, labels = _rows(logits, labels)
    if bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < 1e-4).all()):
        raise ValueError(
            f"logits must be what softmax is applied to, got rows between 0 and {float(values.max()):.4g} that sum to "
            "one; these look like probabilities: pass the .logits of the prediction, or torch.log(probs)"
        )
    truth = to_labels(labels, values.shape[1], values.shape[2])
    margins = values - values.gather(2, truth.expand(len(values), -1).unsqueeze(2))
    share = values.new_full((len(values),), 1 / len(values)) if weights is None else weights
    log_share = share.double().log().unsqueeze(1)

    def nll(log_t: float) -> float:
        log_probs = -torch.logsumexp(margins / math.exp(log_t), dim=2)
        return float(-torch.logsumexp(log_probs + log_share, dim=0).mean())

    curve = minimized(nll, math.log(low), math.log(high), _GRID_POINTS)
    _require_interior(curve, bounds)
    best = min(curve, key=curve.__getitem__)
    pairs = tuple((math.exp(log_t), curve[log_t]) for log_t in sorted(curve))
    return Temperature(math.exp(best), curve[best], nll(0.0), pairs)


def _rows(logits: Array, labels: Array) -> tuple[Tensor, Array]:
    """Return logits (S, N, K) and labels (N,), of dense ones a row for each label that counts."""
    shape, wanted = (tuple(getattr(values, "shape", ())) for values in (logits, labels))
    first = len(shape) - len(wanted)  # the class dimension is behind samples and examples
    if len(wanted) < 2 or first not in (1, 2):
        return to_logits(logits), labels
    places = [d for d in range(first, len(shape)) if shape[first - 1 : d] + shape[d + 1 :] == wanted]
    if len(places) != 1:
        found = f"may be any of the dimensions {places} of" if places else "is none of"
        raise ValueError(
            f"the class dimension {found} logits of shape {shape} for labels of shape {wanted}; give rows: "
            "logits.movedim(class_dim, -1).flatten(0, -2) and labels.flatten()"
        )
    values = to_double(logits, "logits").movedim(places[0], -1).flatten(first - 1, -2)
    truth = torch.as_tensor(labels).flatten()
    kept = truth != -100
    return to_logits(values[..., kept, :]), truth[kept]


def _require_interior(curve: dict[float, float], bounds: tuple[float, float]) -> None:
    """Raise if an end of the curve is as good as its best point, up to rounding."""
    lowest = min(curve.values())
    level = lowest + _NLL_ROUNDING * (1 + lowest)
    at_low, at_high = curve[min(curve)] <= level, curve[max(curve)] <= level
    if at_low and at_high:
        raise TemperatureError(
            "every temperature gives the same likelihood, so none can be fitted; give logits that vary over the classes"
        )
    if at_low:
        raise TemperatureError(
            f"the likelihood is best at the lower bound T = {bounds[0]:g}: the logits separate these labels perfectly "
            "and T runs to zero; fit on held-out data with some errors in it, or lower the bound"
        )
    if at_high:
        raise TemperatureError(
            f"the likelihood is best at the upper bound T = {bounds[1]:g}: the logits say nothing about these labels, "
            "or the opposite; check that both are in the same order, or raise the bound"
        )


def minimized(cost: Callable[[float], float], low: float, high: float, points: int) -> dict[float, float]:
    """Search a minimum by a grid, then by golden sections around its best point; return every point evaluated."""
    grid = torch.linspace(low, high, points, dtype=torch.float64).tolist()
    curve = {x: cost(x) for x in grid}
    best = grid.index(min(curve, key=curve.__getitem__))
    curve |= golden_section(cost, grid[max(best - 1, 0)], grid[min(best + 1, points - 1)])
    return curve


def golden_section(cost: Callable[[float], float], low: float, high: float, width: float = 1e-8) -> dict[float, float]:
    """Shrink a bracket of the minimum to a width, by golden sections, and return every point evaluated."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    curve = {left: cost(left), right: cost(right)}
    while high - low > width:
        if curve[left] <= curve[right]:
            high, right = right, left
            left = high - ratio * (high - low)
            curve[left] = cost(left)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
            curve[right] = cost(right)
    return curve
