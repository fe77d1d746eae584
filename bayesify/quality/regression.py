"""Scores of Gaussian predictions, and of mixtures of Gaussians with equal weights: one per posterior sample.

A prediction is means and positive standard deviations of the targets' shape, or of (S, *shape) for a mixture of S.
What begins with `mixture_` works element by element on float64 tensors of (S, ...), and a standard deviation of 0 is
its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, check_fraction, to_double
from bayesify.quality.calibration import minimized

_TINY = 1e-300  # stands for a standard deviation of 0 in a quotient
_LEAST_NOISE, _MOST_NOISE = 1e-8, 4.0  # times the largest mean square of residuals


def gaussian_nll(mean: Array, std: Array, targets: Array) -> float:
    """Mean negative log-likelihood, -log 1/S sum_s N(y; m_s, s_s^2); for one Gaussian 1/2 log 2 pi s^2 + (y-m)^2/2 s^2.

    Example:
        >>> round(gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
        0.9189
    """
    return float(mixture_nll(*_checked(mean, std, targets)).mean())


def crps(mean: Array, std: Array, targets: Array) -> float:
    """Continuous ranked probability score, the mean integral over x of (F(x) - 1[x >= y])^2, in the targets' unit.

    In closed form, 1/S sum_i A(y - m_i, s_i^2) - 1/(2 S^2) sum_ij A(m_i - m_j, s_i^2 + s_j^2), where
    A(d, v) = d (2 Phi(d/sqrt v) - 1) + 2 sqrt v phi(d/sqrt v) is the expected |d + sqrt v eps|. Smaller is better, and
    for a point it is the absolute error.

    Example:
        >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
        0.2337
    """
    return float(mixture_crps(*_checked(mean, std, targets)).mean())


def interval_coverage(mean: Array, std: Array, targets: Array, level: float = 0.95) -> float:
    """Fraction of targets in the central interval, (1 - level)/2 <= F(y) <= (1 + level)/2; `level` where std is right.

    Example:
        >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]))
        0.5
    """
    check_fraction("level", level, "0.95 is customary")
    return float(((mixture_cdf(*_checked(mean, std, targets)) - 0.5).abs() <= level / 2).double().mean())


def fit_noise(outputs: Array, targets: Array) -> float | Tensor:
    """Find the noise variance v that maximizes the likelihood of `targets`, for each output by itself.

    It minimizes - 1/N sum_n log 1/S sum_s N(y_n; f_s(x_n), v) by a grid in log v and golden sections. Fit on held-out
    data: residuals of the training data are too small wherever the model overfits.

    Args:
        outputs: The outputs of each posterior sample, (S, N, ...), or of one model, of the targets' shape (N, ...).
        targets: What was observed.

    Returns:
        The variance, one for each of several outputs, for `with_noise` or `likelihoods.Regression`.

    Raises:
        ValueError: The shapes do not fit, or a model hits every target of an output exactly.

    Example:
        >>> round(fit_noise(torch.zeros(2), torch.tensor([1.0, -1.0])), 4)
        1.0
    """
    f, y = to_double(outputs, "outputs"), to_double(targets, "targets")
    return _each_noise(_samples_first(f, y, "outputs"), y, mixture_nll)


def _each_noise(f: Tensor, y: Tensor, cost: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float | Tensor:
    """Return the variance of every output that has the least mean cost, a function of f, the noise's std and y."""
    f = f.reshape(len(f), len(y), y[0].numel())
    found = [_one_noise(f[..., k], column, cost) for k, column in enumerate(y.reshape(len(y), -1).unbind(1))]
    return found[0] if len(found) == 1 else torch.tensor(found, dtype=torch.float64).view(y.shape[1:])


def _one_noise(f: Tensor, y: Tensor, cost: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Return the variance for one output (S, N)."""
    largest = float((y - f).square().mean(1).max())
    if largest == 0:
        raise ValueError("outputs equal the targets exactly, so that there is no noise to fit; fit on held-out data")

    def nll(log_var: float) -> float:
        return float(cost(f, torch.full_like(f, math.exp(log_var / 2)), y).mean())

    curve = minimized(nll, math.log(largest * _LEAST_NOISE), math.log(largest * _MOST_NOISE), points=61)
    return math.exp(min(curve, key=curve.__getitem__))


@dataclass
class Residuals:
    """Sums over a regression's data, for every output: what its noise and its scale are estimated from."""

    count: int = 0  # of examples
    squares: Tensor | float = 0.0  # the sum of the squared residuals
    mean: Tensor | float = 0.0  # of the targets
    scatter: Tensor | float = 0.0  # the sum of their squared deviations from it

    @classmethod
    def of(cls, values: Tensor, outputs: Tensor) -> Residuals:
        """Return those of one batch."""
        y, f = (t.detach().cpu().double().reshape(len(t), -1) for t in (values, outputs))
        return cls(len(y), (y - f).square().sum(0), y.mean(0), (y - y.mean(0)).square().sum(0))

    def __add__(self, other: Residuals) -> Residuals:
        if not self.count or not other.count:
            return self if self.count else other
        count, away = self.count + other.count, other.mean - self.mean
        mean = self.mean + away * (other.count / count)
        scatter = self.scatter + other.scatter + away**2 * (self.count * other.count / count)
        return Residuals(count, self.squares + other.squares, mean, scatter)

    @property
    def outputs(self) -> int:
        """The number of outputs; 0 before there is data."""
        return len(self.squares) if isinstance(self.squares, Tensor) else 0


def mixture_nll(mean: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    """Return -log 1/S sum_s N(y; m_s, s_s^2) of every target; infinite for points that miss."""
    s = std.clamp_min(_TINY)
    log_density = -((targets - mean) / s).square() / 2 - s.log() - math.log(2 * math.pi) / 2
    return math.log(len(mean)) - torch.logsumexp(log_density, 0)


def sampled_nll(outputs: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    """Return the NLL of every target for a Gaussian of which there are S outputs, and the noise's std.

    With V = s_n^2 + s^2, r = s^2/V, and mean m and variance s^2 of the outputs,
    1/2 (log 2 pi V + r^2/(S-1) + (1 - 2 r^2/(S-1)) (y - m)^2/V - r/S) is that of infinitely many in expectation, up to
    terms of order 1/S^2: the NLL of the mixture has a minimum elsewhere. It needs S > 3.
    """
    samples, mean = len(outputs), outputs.mean(0)
    spread = (outputs - mean).square().sum(0) / max(samples - 1, 1)
    var = (std[0].square() + spread).clamp_min(_TINY)
    ratio = spread / var
    bias = ratio.square() / max(samples - 1, 1)
    return ((2 * math.pi * var).log() + bias + (1 - 2 * bias) * (targets - mean).square() / var - ratio / samples) / 2


def sampled_noise(outputs: Tensor, targets: Tensor) -> float | Tensor:
    """Find the noise variance of every output with the least `sampled_nll`."""
    return _each_noise(outputs, targets, sampled_nll)


def mixture_crps(mean: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    """Return the CRPS of every target; see `crps`."""
    total = expected_distance(targets - mean, std).mean(0)
    for m, s in zip(mean, std, strict=True):
        total = total - expected_distance(m - mean, (s.square() + std.square()).sqrt()).mean(0) / (2 * len(mean))
    return total


def expected_distance(shift: Tensor, std: Tensor) -> Tensor:
    """Return E|d + s eps| = d (2 Phi(d/s) - 1) + 2 s phi(d/s) = d erf(d/(s sqrt 2)) + s sqrt(2/pi) exp(-d^2/2 s^2)."""
    z = shift / std.clamp_min(_TINY)
    return shift * torch.erf(z / 2**0.5) + std * math.sqrt(2 / math.pi) * torch.exp(-z.square() / 2)


def mixture_cdf(mean: Tensor, std: Tensor, targets: Tensor) -> Tensor:
    """Return F(y) = 1/S sum_s Phi((y - m_s)/s_s)."""
    each: Tensor = torch.special.ndtr((targets - mean) / std.clamp_min(_TINY))
    return each.mean(0)


def mixture_quantile(mean: Tensor, std: Tensor, probability: float, bisections: int = 100) -> Tensor:
    """Return the q with F(q) = probability by bisection: it lies between the quantiles of the components."""
    each = mean + NormalDist().inv_cdf(probability) * std
    if len(each) == 1:
        return each[0]
    low, high = each.amin(0), each.amax(0)
    for _ in range(bisections):
        middle = (low + high) / 2
        below = mixture_cdf(mean, std, middle) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _checked(mean: Array, std: Array, targets: Array) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and standard deviations of shape (S, *shape), and targets of that shape."""
    m, s, y = to_double(mean, "mean"), to_double(std, "std"), to_double(targets, "targets")
    if m.shape != s.shape or y.shape not in (m.shape, m.shape[1:]):
        raise ValueError(
            f"mean and std must have one shape, and targets too or without the samples in front, got {tuple(m.shape)}, "
            f"{tuple(s.shape)} and {tuple(y.shape)}; nothing is broadcast: use expand_as or squeeze"
        )
    if s.min() <= 0:
        raise ValueError(f"std must be positive, got {float(s.min()):.4g}; add the noise of the data to it")
    return _samples_first(m, y, "mean"), _samples_first(s, y, "std"), y


def _samples_first(values: Tensor, targets: Tensor, name: str) -> Tensor:
    """Give values of the targets' shape a first dimension of one sample."""
    if values.shape == targets.shape:
        return values.unsqueeze(0)
    if values.shape[1:] != targets.shape:
        raise ValueError(
            f"{name} must have the targets' shape {tuple(targets.shape)}, or the samples in front of it, "
            f"got {tuple(values.shape)}"
        )
    return values
