"""Temperature scaling: one number that repairs the confidence of a classifier.

The temperature divides the logits of every posterior sample *inside* the Monte Carlo average, and an optimum at the
edge of the search range is an error, never a result. The checks of arrays that `metrics` shares live here, below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = Tensor | npt.NDArray[Any]
ArrayT = TypeVar("ArrayT", bound=Array)

_GRID_POINTS = 41
_LOG_T_WIDTH = 1e-8
_NLL_ROUNDING = 1e-12
_SUM_TOLERANCE = 1e-4


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
    r"""Average the softmax of each sample's logits at one temperature.

    .. math:: p_T(k | x_n) = \frac{1}{S} \sum_s \mathrm{softmax}(f_s(x_n) / T)_k

    The average is taken in log space and in float64.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        temperature: T, positive and finite.

    Returns:
        Probabilities of shape (N, K), of the type of `logits`.

    Raises:
        TypeError: `logits` is not a floating-point tensor or array.
        ValueError: The logits are empty, not finite or of another shape, or T is not positive and finite.

    Example:
        >>> tempered_probs(torch.tensor([[2.0, 0.0]]), 1e6)
        tensor([[0.5000, 0.5000]])
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, got {temperature}; 1.0 changes nothing")
    scaled = _to_logits(logits) / temperature
    log_probs = torch.logsumexp(torch.log_softmax(scaled, dim=-1), dim=0) - math.log(len(scaled))
    return like(log_probs.exp(), logits)


def fit_temperature(logits: Array, labels: Array, *, bounds: tuple[float, float] = (1e-2, 1e2)) -> Temperature:
    r"""Find the temperature that maximizes the likelihood of `labels`.

    .. math:: \min_T \; -\frac{1}{N} \sum_n \log \frac{1}{S} \sum_s \mathrm{softmax}(f_s(x_n) / T)_{y_n}

    A grid in log T finds the basin, a golden-section search its bottom, in float64. Fit on held-out data: a
    temperature fitted on the test labels makes the test numbers optimistic.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        labels: Integer classes, shape (N,).
        bounds: The smallest and the largest temperature to consider.

    Returns:
        The optimum, its likelihood, and the curve of the search.

    Raises:
        TemperatureError: The optimum is at a bound: labels that the logits separate perfectly drive T to zero, labels
            that contradict the logits drive it to infinity, and constant logits leave it undetermined.
        TypeError: `logits` are not floating-point or `labels` not integers.
        ValueError: Empty or non-finite input, wrong shapes, labels out of range, or bounds that are no range.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]] * 4)
        >>> fitted = fit_temperature(logits, torch.tensor([0, 0, 0, 1]))
        >>> round(float(fitted), 4)  # 4 / log(3), so that the confidence is 3/4
        3.641
        >>> fitted.apply(logits)[0]
        tensor([0.7500, 0.2500])
    """
    low, high = bounds
    if not 0 < low < high < math.inf:
        raise ValueError(f"bounds must be 0 < low < high < inf, got {bounds}; the default is (1e-2, 1e2)")
    values = _to_logits(logits)
    truth = to_labels(labels, values.shape[1], values.shape[2])
    margins = values - values.gather(2, truth.expand(len(values), -1).unsqueeze(2))

    def nll(log_t: float) -> float:
        log_probs = -torch.logsumexp(margins / math.exp(log_t), dim=2)
        return float(-(torch.logsumexp(log_probs, dim=0) - math.log(len(margins))).mean())

    grid = torch.linspace(math.log(low), math.log(high), _GRID_POINTS, dtype=torch.float64).tolist()
    curve = {log_t: nll(log_t) for log_t in grid}
    best = min(curve, key=curve.__getitem__)
    _require_interior(curve, bounds)
    index = grid.index(best)
    curve |= _golden_section(nll, grid[index - 1], grid[index + 1])
    best = min(curve, key=curve.__getitem__)
    pairs = tuple((math.exp(log_t), curve[log_t]) for log_t in sorted(curve))
    return Temperature(math.exp(best), curve[best], nll(0.0), pairs)


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


def _golden_section(nll: Callable[[float], float], low: float, high: float) -> dict[float, float]:
    """Shrink a bracket of the minimum to `_LOG_T_WIDTH` and return every point evaluated."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    curve = {left: nll(left), right: nll(right)}
    while high - low > _LOG_T_WIDTH:
        if curve[left] <= curve[right]:
            high, right = right, left
            left = high - ratio * (high - low)
            curve[left] = nll(left)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
            curve[right] = nll(right)
    return curve


def to_double(values: Array, name: str) -> Tensor:
    """Return finite, non-empty floating-point `values` as a float64 tensor on the CPU."""
    if not isinstance(values, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a tensor or a numpy array, got {type(values).__name__}; use torch.tensor(...)")
    floating = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    if not floating:
        raise TypeError(f"{name} must be floating-point, got dtype {values.dtype}; use .double() or .astype(float)")
    if isinstance(values, Tensor):
        tensor = values.detach().cpu().double()
    else:
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
    if tensor.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}; check the data behind it")
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise ValueError(
            f"{name} must be finite, got NaN or infinity in {bad} of {tensor.numel()} values; "
            "nothing is dropped here: repair the model or the data that made them"
        )
    return tensor


def to_labels(labels: Array, count: int, classes: int) -> Tensor:
    """Return `count` integer labels below `classes` as an int64 tensor on the CPU."""
    if not isinstance(labels, Tensor | np.ndarray):
        raise TypeError(f"labels must be a tensor or a numpy array, got {type(labels).__name__}; use torch.tensor(...)")
    if isinstance(labels, Tensor):
        integral = labels.dtype != torch.bool and not (labels.is_floating_point() or labels.is_complex())
    else:
        integral = labels.dtype.kind in "iu"
    if not integral:
        raise TypeError(f"labels must be integers, got dtype {labels.dtype}; use .long() or .astype(int)")
    if tuple(labels.shape) != (count,):
        raise ValueError(
            f"labels must have shape ({count},), one class per example, got {tuple(labels.shape)}; "
            "one-hot labels need argmax(1), a column of labels squeeze(1)"
        )
    truth = labels.cpu().long() if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels, dtype=np.int64))
    if truth.min() < 0 or truth.max() >= classes:
        raise ValueError(
            f"labels must be in 0..{classes - 1} for {classes} classes, got {int(truth.min())}..{int(truth.max())}; "
            "remap them, and leave out padding such as -100 in both arguments"
        )
    return truth


def to_probs(probs: Array, name: str, shape: str) -> Tensor:
    """Return probabilities of a shape such as "(N, K)" as a float64 tensor."""
    p = to_double(probs, name)
    if p.dim() != len(shape.split()):
        raise ValueError(
            f"{name} must have shape {shape}, got {tuple(p.shape)}; the p of a binary model becomes columns [1 - p, p]"
        )
    if p.min() < 0 or p.max() > 1 + _SUM_TOLERANCE:
        raise ValueError(
            f"{name} must lie in [0, 1], got values from {float(p.min()):.4g} to {float(p.max()):.4g}; "
            "these look like logits; apply softmax first"
        )
    off = (p.sum(-1) - 1).abs()
    if off.max() > _SUM_TOLERANCE:
        raise ValueError(
            f"the rows of {name} must sum to one within {_SUM_TOLERANCE:g}, got one off by {float(off.max()):.4g}; "
            "normalize them in float32 or better"
        )
    return p


def to_scores(scores: Array, name: str) -> Tensor:
    """Return one-dimensional scores as a float64 tensor."""
    values = to_double(scores, name)
    if values.dim() != 1:
        raise ValueError(f"{name} must have shape (N,), one score per example, got {tuple(values.shape)}; flatten it")
    return values


def like(values: Tensor, reference: ArrayT) -> ArrayT:
    """Return `values` with the type, the precision (float32 at least) and the device of `reference`."""
    result: Array
    if isinstance(reference, Tensor):
        result = values.to(torch.promote_types(reference.dtype, torch.float32)).to(reference.device)
    else:
        result = values.numpy().astype(np.promote_types(reference.dtype, np.float32))
    return cast(ArrayT, result)


def _to_logits(logits: Array) -> Tensor:
    """Return logits as a float64 tensor of shape (S, N, K)."""
    values = to_double(logits, "logits")
    if values.dim() not in (2, 3):
        raise ValueError(
            f"logits must have shape (N, K), or (S, N, K) with one slice per sample, got {tuple(values.shape)}; "
            "the logit z of a binary model becomes the two columns [0, z]"
        )
    return values if values.dim() == 3 else values.unsqueeze(0)
