"""Temperature scaling: one number that repairs the confidence of a classifier.

The temperature divides the logits of every posterior sample *inside* the Monte Carlo average, and an optimum at the
edge of the search range is an error, never a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, ArrayT, like, to_double, to_labels, to_logits

_GRID_POINTS = 41
_LOG_T_WIDTH = 1e-8
_NLL_ROUNDING = 1e-12


class TemperatureError(ValueError):
    """The likelihood has no optimum inside the range of temperatures."""


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature.

    Attributes:
        temperature: The optimum T; above one the model was overconfident, below one underconfident.
        nll: Mean negative log-likelihood at T, on the data of the fit.
        nll_before: The same at T = 1.
        curve: Every (T, NLL) pair that the search evaluated, sorted by T.
    """

    temperature: float
    nll: float
    nll_before: float
    curve: tuple[tuple[float, float], ...] = field(repr=False)

    def __float__(self) -> float:
        """Return the temperature itself."""
        return self.temperature

    def apply(self, logits: ArrayT) -> ArrayT:
        """Return the probabilities of `logits`, (N, K) or (S, N, K), at this temperature; see `tempered_probs`."""
        return tempered_probs(logits, self.temperature)


def tempered_probs(logits: ArrayT, temperature: float) -> ArrayT:
    r"""Average the softmax of each sample's logits at one temperature, in log space and in float64.

    .. math:: p_T(k | x_n) = \frac{1}{S} \sum_s \mathrm{softmax}(f_s(x_n) / T)_k

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        temperature: T, positive and finite.

    Returns:
        Probabilities of shape (N, K), of the type of `logits`.

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

    grid = torch.linspace(math.log(low), math.log(high), _GRID_POINTS, dtype=torch.float64).tolist()
    curve = {log_t: nll(log_t) for log_t in grid}
    best = min(curve, key=curve.__getitem__)
    _require_interior(curve, bounds)
    index = grid.index(best)
    curve |= golden_section(nll, grid[index - 1], grid[index + 1])
    best = min(curve, key=curve.__getitem__)
    pairs = tuple((math.exp(log_t), curve[log_t]) for log_t in sorted(curve))
    return Temperature(math.exp(best), curve[best], nll(0.0), pairs)


def _rows(logits: Array, labels: Array) -> tuple[Tensor, Array]:
    """Return logits (S, N, K) and labels (N,), of dense ones a row for each label that counts."""
    shape, wanted = (tuple(getattr(values, "shape", ())) for values in (logits, labels))
    if len(wanted) < 2 or len(shape) - len(wanted) not in (1, 2):
        return to_logits(logits), labels
    first = len(shape) - len(wanted)  # the class dimension is behind samples and examples
    places = [d for d in range(first, len(shape)) if shape[first - 1 : d] + shape[d + 1 :] == wanted]
    if len(places) != 1:
        said = f"may be any of the dimensions {places} of" if places else "is none of"
        raise ValueError(
            f"the class dimension {said} logits of shape {shape} for labels of shape {wanted}; give rows: "
            "logits.movedim(class_dim, -1).flatten(0, -2) and labels.flatten()"
        )
    values, truth = to_double(logits, "logits").movedim(places[0], -1), torch.as_tensor(labels).flatten()
    values = values.flatten(first - 1, -2)
    kept = truth != -100
    return to_logits(values[kept] if first == 1 else values[:, kept]), truth[kept]


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


def golden_section(
    nll: Callable[[float], float], low: float, high: float, width: float = _LOG_T_WIDTH
) -> dict[float, float]:
    """Shrink a bracket of the minimum to a width, by golden sections, and return every point evaluated."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    curve = {left: nll(left), right: nll(right)}
    while high - low > width:
        if curve[left] <= curve[right]:
            high, right = right, left
            left = high - ratio * (high - low)
            curve[left] = nll(left)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
            curve[right] = nll(right)
    return curve
