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

from bayesify.temperature import (
    Array,
    ArrayT,
    Temperature,
    TemperatureError,
    fit_temperature,
    like,
    to_double,
    to_labels,
    to_probs,
    to_scores,
)

__all__ = [
    "Reliability", "RiskCoverage", "Temperature", "TemperatureError", "aurc", "auroc", "brier", "ece", "entropy",
    "error", "fit_temperature", "fpr95", "gaussian_nll", "interval_coverage", "mce", "mutual_information", "nll",
    "reliability", "risk_coverage",
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
    def mce(self) -> float:
        r"""Maximum calibration error :math:`\max_m |acc_m - conf_m|` over the bins that are not empty."""
        return float(self._gaps.max())

    @property
    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate among the n most certain predictions, for n = 1..N.

    Attributes:
        coverage: n / N.
        risk: The error rate at that coverage.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def aurc(self) -> float:
        r"""Area under the curve, :math:`\frac{1}{N} \sum_n risk(n / N)`."""
        return float(self.risk.mean())


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
    p, y = _checked(probs, labels)
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
    p, y = _checked(probs, labels)
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
    p, y = _checked(probs, labels)
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
    p, y = _checked(probs, labels)
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


def risk_coverage(probs: Array, labels: Array, *, uncertainty: Array | None = None) -> RiskCoverage:
    """Trace the error rate as the most certain predictions are kept and the others refused.

    Equally uncertain predictions are kept in random order, on average: the curve does not depend on the data's order.

    Args:
        probs: Probabilities, shape (N, K).
        labels: Integer classes, shape (N,).
        uncertainty: What to rank by, shape (N,), higher is less certain; minus the highest probability if None.

    Returns:
        The curve, with its `aurc`.

    Example:
        >>> risk_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])).risk
        tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    p, y = _checked(probs, labels)
    confidence, top = p.max(1)
    ranking = -confidence if uncertainty is None else to_scores(uncertainty, "uncertainty")
    if len(ranking) != len(p):
        raise ValueError(f"uncertainty must have one value for each of {len(p)} rows of probs, got {len(ranking)}")
    _, group, sizes = torch.unique(ranking, return_inverse=True, return_counts=True)
    group_risk = torch.bincount(group, (top != y).double()) / sizes
    kept = torch.arange(1, len(p) + 1, dtype=torch.float64, device="cpu")
    return RiskCoverage(kept / len(p), group_risk.repeat_interleave(sizes).cumsum(0) / kept)


def aurc(probs: Array, labels: Array, *, uncertainty: Array | None = None) -> float:
    """Area under the risk-coverage curve: low where the model errs only when it is uncertain.

    It is `RiskCoverage.aurc`; the arguments are those of `risk_coverage`.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        0.25
    """
    return risk_coverage(probs, labels, uncertainty=uncertainty).aurc


def auroc(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the ROC curve of telling out from in by the score, higher being out.

    .. math:: \frac{1}{NM} \sum_{n, m} 1[out_m > in_n] + \tfrac12 1[out_m = in_n]

    Args:
        scores_in: Uncertainties of in-distribution examples, shape (N,).
        scores_out: Uncertainties of out-of-distribution examples, shape (M,).

    Returns:
        1 where every out-of-distribution score is higher, 0.5 for chance.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
        0.875
    """
    inside, outside = to_scores(scores_in, "scores_in").sort().values, to_scores(scores_out, "scores_out")
    below, not_above = torch.searchsorted(inside, outside), torch.searchsorted(inside, outside, right=True)
    return float((below + not_above).double().mean() / (2 * len(inside)))


def fpr95(scores_in: Array, scores_out: Array) -> float:
    r"""False alarms at 95% detection: :math:`\frac{1}{N} \sum_n 1[in_n \geq t]`.

    The threshold t is the highest at which at least 95% of the out-of-distribution scores are >= t.

    Args:
        scores_in: Uncertainties of in-distribution examples, shape (N,).
        scores_out: Uncertainties of out-of-distribution examples, shape (M,).

    Returns:
        The fraction of in-distribution examples that are flagged along.

    Example:
        >>> fpr95(torch.tensor([0.1, 0.2, 0.5, 0.3]), torch.tensor([0.4, 0.9]))
        0.25
    """
    inside, outside = to_scores(scores_in, "scores_in"), to_scores(scores_out, "scores_out")
    detected = -(-95 * len(outside) // 100)  # rounded up in integers: 0.95 * n may land above a whole number
    threshold = outside.sort(descending=True).values[detected - 1]
    return float((inside >= threshold).double().mean())


def entropy(probs: ArrayT) -> ArrayT:
    r"""Entropy of each row, :math:`-\sum_k p_{nk} \log p_{nk}`, in nats.

    Args:
        probs: Probabilities, shape (N, K).

    Returns:
        Shape (N,), of the type of `probs`.

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return like(torch.special.entr(to_probs(probs, "probs", "(N, K)")).sum(-1), probs)


def mutual_information(sample_probs: ArrayT) -> ArrayT:
    r"""Mutual information of label and weights, :math:`H[\frac1S \sum_s p_s] - \frac1S \sum_s H[p_s]`, in nats.

    Args:
        sample_probs: Probabilities by posterior sample, shape (S, N, K).

    Returns:
        Shape (N,), of the type of `sample_probs`; never negative.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    p = to_probs(sample_probs, "sample_probs", "(S, N, K)")
    total, expected = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    return like((total - expected).clamp(min=0), sample_probs)


def gaussian_nll(mean: Array, std: Array, targets: Array) -> float:
    r"""Mean negative log-likelihood of Gaussians, :math:`\frac12 \log 2 \pi s^2 + (y - m)^2 / 2 s^2`.

    Args:
        mean: Predicted means, any shape.
        std: Predicted standard deviations, the same shape, positive.
        targets: What was observed, the same shape.

    Returns:
        The mean over all elements.

    Example:
        >>> round(gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
        0.9189
    """
    m, s, y = _gaussian(mean, std, targets)
    return float((s.log() + ((y - m) / s).square() / 2).mean()) + math.log(2 * math.pi) / 2


def interval_coverage(mean: Array, std: Array, targets: Array, level: float = 0.95) -> float:
    r"""Fraction of targets in the central interval, :math:`|y - m| \leq \sqrt2 \, \mathrm{erf}^{-1}(level) \, s`.

    Args:
        mean: Predicted means, any shape.
        std: Predicted standard deviations, the same shape, positive.
        targets: What was observed, the same shape.
        level: The probability of the interval, between 0 and 1.

    Returns:
        The coverage; near `level` for honest standard deviations.

    Example:
        >>> interval_coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]))
        0.5
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is customary")
    m, s, y = _gaussian(mean, std, targets)
    width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64))
    return float(((y - m).abs() <= width * s).double().mean())


def _checked(probs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Return probabilities (N, K) and labels (N,) that fit together."""
    p = to_probs(probs, "probs", "(N, K)")
    return p, to_labels(labels, len(p), p.shape[1])


def _gaussian(mean: Array, std: Array, targets: Array) -> tuple[Tensor, Tensor, Tensor]:
    """Return means, standard deviations and targets of one shape."""
    m, s, y = to_double(mean, "mean"), to_double(std, "std"), to_double(targets, "targets")
    if not m.shape == s.shape == y.shape:
        raise ValueError(
            f"mean, std and targets must have one shape, got {tuple(m.shape)}, {tuple(s.shape)} and {tuple(y.shape)}; "
            "nothing is broadcast: use expand_as or squeeze"
        )
    if s.min() <= 0:
        raise ValueError(f"std must be positive, got {float(s.min()):.4g}; add the noise of the data to it")
    return m, s, y
