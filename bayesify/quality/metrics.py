"""How good a predictive distribution is: scores, calibration, and the detection of what the model does not know.

Every function takes probabilities or scores, as tensors or numpy arrays, and computes in float64. Scalars are Python
floats; quantities per example come back in the type that went in. Nothing is dropped or repaired: every function
raises `TypeError` for values that are not floating-point or labels that are not integers, and `ValueError` for
input that is empty, NaN, infinite, misshapen, out of range, or logits in place of probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bayesify.quality.arrays import Array, like, to_classes, to_double
from bayesify.quality.conformal import ConformalQuantile, conformal_quantile
from bayesify.quality.detection import auroc, energy, entropy, feature_distance, fpr95, mutual_information
from bayesify.quality.drift import Drift, drift
from bayesify.quality.regression import crps, fit_noise, gaussian_nll, interval_coverage, interval_score
from bayesify.quality.selective import RiskCoverage, abstain_threshold, aurc, clopper_pearson, risk_coverage
from bayesify.quality.temperature import Temperature, TemperatureError, fit_temperature

__all__ = [
    "ConformalQuantile", "Drift", "Reliability", "RiskCoverage", "Temperature", "TemperatureError",
    "abstain_threshold", "aurc", "auroc", "brier", "clopper_pearson", "conformal_quantile", "crps", "drift", "ece",
    "energy", "entropy", "error", "feature_distance", "fit_noise", "fit_temperature", "fpr95", "gaussian_nll",
    "interval_coverage", "interval_score", "mce", "mutual_information", "nll", "reliability", "risk_coverage",
]  # fmt: skip

Kind: TypeAlias = Literal["top", "pooled"]

_KINDS = get_args(Kind)


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and accuracy by bin; empty bins have count, accuracy and confidence zero.

    Attributes:
        edges: The M + 1 edges of the bins.
        counts: How many predictions each bin holds.
        accuracy: The fraction of each bin's predictions that came true.
        confidence: The mean probability of each bin.
    """

    edges: Tensor
    counts: Tensor
    accuracy: Tensor
    confidence: Tensor

    @property
    def ece(self) -> float:
        r"""Expected calibration error :math:`\sum_m \frac{|B_m|}{\sum_j |B_j|} |acc_m - conf_m|`."""
        return float((self.counts * self._gaps).sum() / self.counts.sum())

    @property
    def ece_debiased(self) -> float:
        r"""The ECE without what noise alone adds to it, 2 ECE - E[ECE*], at least 0 (Kumar, Liang and Ma 2019).

        ECE* is the score of another sample of labels, in which the gap of bin m is
        :math:`N(g, s^2), g = acc_m - conf_m, s^2 = acc_m (1 - acc_m) / |B_m|`, so that
        :math:`E|N(g, s^2)| = s \sqrt{2/\pi} \exp(-g^2/2s^2) + g \, \mathrm{erf}(g/(s \sqrt 2))`. With few examples in a
        bin the plain ECE of a perfectly calibrated model is far from 0.
        """
        gap = self._gaps
        s = (self.accuracy * (1 - self.accuracy) / self.counts.clamp_min(1)).sqrt().clamp_min(1e-12)
        again = s * math.sqrt(2 / math.pi) * torch.exp(-((gap / s) ** 2) / 2) + gap * torch.erf(
            gap / (s * math.sqrt(2))
        )
        return max(0.0, float((self.counts * (2 * gap - again)).sum() / self.counts.sum()))

    @property
    def mce(self) -> float:
        r"""Maximum calibration error :math:`\max_m |acc_m - conf_m|` over the bins that are not empty."""
        return float(self._gaps.max())

    @property
    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()


def nll(probs: Array, labels: Array) -> float:
    r"""Mean negative log-likelihood :math:`-\frac{1}{N} \sum_n \log p_{n, y_n}`, in nats.

    A true class of probability exactly zero makes it infinite, the honest score of calling the truth impossible.
    Where zeros come from underflow, compute the probabilities in float64.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).

    Returns:
        The mean over the examples.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
        0.4904
    """
    p, y = to_classes(probs, labels)
    return float(-p.gather(1, y.unsqueeze(1)).log().mean())


def error(probs: Array, labels: Array) -> float:
    r"""Error rate :math:`\frac{1}{N} \sum_n 1[\arg\max_k p_{nk} \neq y_n]`; the first of equal classes counts.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).

    Returns:
        The fraction of wrong predictions.

    Example:
        >>> error(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        0.5
    """
    p, y = to_classes(probs, labels)
    return float((p.argmax(1) != y).double().mean())


def brier(probs: Array, labels: Array) -> float:
    r"""Brier score :math:`\frac{1}{N} \sum_n \sum_k (p_{nk} - 1[y_n = k])^2`, between 0 and 2.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).

    Returns:
        The mean over the examples.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        0.5
    """
    p, y = to_classes(probs, labels)
    return float((p - one_hot(y, p.shape[1])).square().sum(1).mean())


def reliability(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> Reliability:
    """Sort predictions into M equal bins of confidence and compare with how often they came true.

    Bin m holds m/M <= p < (m+1)/M, and the last one p = 1 too. The edges are rounded to the precision of `probs`, so
    0.7 in float32 lies on the edge 0.7.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).
        bins: The number of bins M.
        kind: "top" bins the N highest probabilities, each true where its class is the label. "pooled" bins all N * K
            probabilities; most are near zero and rightly so, which makes its errors much smaller. Say which it is.

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
    """Do the sorting of `reliability` for confidences that are known already, and whether each came true."""
    bins = len(edges) - 1
    bin_of = torch.bucketize(confidence, edges, right=True).sub(1).clamp(max=bins - 1)
    counts = torch.bincount(bin_of, minlength=bins)
    accuracy = torch.bincount(bin_of, true.double(), minlength=bins) / counts.clamp(min=1)
    mean_confidence = torch.bincount(bin_of, confidence, minlength=bins) / counts.clamp(min=1)
    return Reliability(edges, counts, accuracy, mean_confidence)


def ece(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> float:
    """Expected calibration error: the gap between accuracy and confidence, weighted by the size of the bins.

    It is `Reliability.ece`; the arguments are those of `reliability`.

    Example:
        >>> round(ece(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
        0.25
    """
    return reliability(probs, labels, bins, kind).ece


def mce(probs: Array, labels: Array, bins: int = 15, kind: Kind = "top") -> float:
    """Maximum calibration error: the largest gap between accuracy and confidence in any bin.

    It is `Reliability.mce`; the arguments are those of `reliability`.

    Example:
        >>> round(mce(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 0])), 4)
        0.4
    """
    return reliability(probs, labels, bins, kind).mce
