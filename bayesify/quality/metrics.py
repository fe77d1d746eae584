"""Scores of predictive distributions: proper scores, calibration, uncertainties and out-of-distribution detection.

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

from bayesify.quality.arrays import Array, ArrayT, like, to_classes, to_double, to_logits, to_probs, to_scores
from bayesify.quality.conformal import (
    ConformalQuantile,
    Drift,
    abstain_threshold,
    clopper_pearson,
    conformal_quantile,
    drift,
)
from bayesify.quality.distances import feature_distance
from bayesify.quality.regression import crps, fit_noise, gaussian_nll, interval_coverage, interval_score
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
        :math:`E|N(g, s^2)| = s \sqrt{2/\pi} \exp(-g^2/2s^2) + g \, \mathrm{erf}(g/(s \sqrt 2))`.
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

    It is infinite where a true class has probability zero. Where zeros come from underflow, use float64.

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
    accuracy = torch.bincount(bin_of, true.double(), minlength=bins) / counts.clamp(min=1)
    mean_confidence = torch.bincount(bin_of, confidence, minlength=bins) / counts.clamp(min=1)
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
    p, y = to_classes(probs, labels)
    confidence, top = p.max(1)
    ranking = -confidence if uncertainty is None else to_scores(uncertainty, "uncertainty")
    if len(ranking) != len(p):
        raise ValueError(f"uncertainty must have one value for each of {len(p)} rows of probs, got {len(ranking)}")
    _, group, sizes = torch.unique(ranking, return_inverse=True, return_counts=True)
    group_risk = torch.bincount(group, (top != y).double()) / sizes
    kept = torch.arange(1, len(p) + 1, dtype=torch.float64, device="cpu")
    return RiskCoverage(kept / len(p), group_risk.repeat_interleave(sizes).cumsum(0) / kept)


def aurc(probs: Array, labels: Array, *, uncertainty: Array | None = None) -> float:
    """Area under the risk-coverage curve, `risk_coverage(...).aurc`: low where only uncertain predictions are wrong.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        0.25
    """
    return risk_coverage(probs, labels, uncertainty=uncertainty).aurc


# -- what the model does not know --------------------------------------------------------------------------------------


def auroc(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the ROC curve, :math:`\frac{1}{NM} \sum_{n, m} 1[out_m > in_n] + \tfrac12 1[out_m = in_n]`.

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
    r"""False alarms :math:`\frac{1}{N} \sum_n 1[in_n \geq t]` at the highest threshold t that detects 95%.

    Args:
        scores_in: Uncertainties of in-distribution examples, shape (N,).
        scores_out: Uncertainties of out-of-distribution examples, shape (M,).

    Returns:
        The fraction of in-distribution examples that are flagged.

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


def energy(logits: ArrayT, temperature: float = 1.0) -> ArrayT:
    """Energy of each example, -T log sum_k exp(f_k/T), averaged over posterior samples; high is out of distribution.

    Unlike the entropy it sees the size of the logits, which softmax forgets.

    Args:
        logits: Shape (N, K), or (S, N, K) with one slice per posterior sample.
        temperature: T.

    Returns:
        Shape (N,), of the type of `logits`.

    Example:
        >>> energy(torch.tensor([[10.0, 0.0], [0.0, 0.0]]))
        tensor([-10.0000,  -0.6931])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; 1.0 is customary")
    each = -temperature * torch.logsumexp(to_logits(logits) / temperature, -1)
    return like(each.mean(0), logits)
