"""Scores of predictive distributions: proper scores, calibration, uncertainties and out-of-distribution detection.

Every function takes tensors or numpy arrays and computes in float64: `probs` are probabilities (N, K), `labels` integer
classes (N,). Scalars are Python floats, means over the examples; quantities per example come back in the type that went
in. Nothing is dropped or repaired: every function raises `TypeError` for values that are not floating-point or labels
that are not integers, and `ValueError` for input that is empty, NaN, infinite, misshapen, out of range, or logits in
place of probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.quality.arrays import (
    Array,
    ArrayT,
    like,
    to_classes,
    to_double,
    to_labels,
    to_logits,
    to_probs,
    to_scores,
)
from bayesify.quality.calibration import (
    Kind,
    Reliability,
    Temperature,
    TemperatureError,
    ece,
    fit_temperature,
    mce,
    reliability,
)
from bayesify.quality.conformal import ConformalQuantile, Drift, abstain_threshold, conformal_quantile, drift
from bayesify.quality.regression import crps, fit_noise, gaussian_nll, interval_coverage

__all__ = [
    "ConformalQuantile", "Drift", "Kind", "Reliability", "RiskCoverage", "Temperature", "TemperatureError",
    "abstain_threshold", "aurc", "auroc", "brier", "conformal_quantile", "crps", "drift", "ece", "energy", "entropy",
    "error", "feature_distance", "fit_noise", "fit_temperature", "fpr95", "gaussian_nll", "interval_coverage",
    "mce", "mutual_information", "nll", "reliability", "risk_coverage",
]  # fmt: skip


def nll(probs: Array, labels: Array) -> float:
    r"""Mean negative log-likelihood :math:`-\frac{1}{N} \sum_n \log p_{n, y_n}`, in nats.

    It is infinite where a true class has probability zero. Where zeros come from underflow, use float64.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
        0.4904
    """
    p, y = to_classes(probs, labels)
    return float(-p.gather(1, y.unsqueeze(1)).log().mean())


def error(probs: Array, labels: Array) -> float:
    r"""Error rate :math:`\frac{1}{N} \sum_n 1[\arg\max_k p_{nk} \neq y_n]`; the first of equal classes counts.

    Example:
        >>> error(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        0.5
    """
    p, y = to_classes(probs, labels)
    return float((p.argmax(1) != y).double().mean())


def brier(probs: Array, labels: Array) -> float:
    r"""Brier score :math:`\frac{1}{N} \sum_n \sum_k (p_{nk} - 1[y_n = k])^2`, between 0 and 2.

    Example:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        0.5
    """
    p, y = to_classes(probs, labels)
    return float((p - F.one_hot(y, p.shape[1])).square().sum(1).mean())


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate among the n most certain predictions, for n = 1..N."""

    coverage: Tensor  # n / N
    risk: Tensor  # the error rate at that coverage

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


# -- uncertainties, and how well they detect out-of-distribution data --------------------------------------------------


def auroc(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the ROC curve, :math:`\frac{1}{NM} \sum_{n, m} 1[out_m > in_n] + \tfrac12 1[out_m = in_n]`.

    `scores_in` are uncertainties of in-distribution examples, (N,), and `scores_out` of others, (M,). It is 1 where
    every out-of-distribution score is higher, 0.5 for chance.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4]), torch.tensor([0.4, 0.9]))
        0.875
    """
    inside, outside = to_scores(scores_in, "scores_in").sort().values, to_scores(scores_out, "scores_out")
    below, not_above = torch.searchsorted(inside, outside), torch.searchsorted(inside, outside, right=True)
    return float((below + not_above).double().mean() / (2 * len(inside)))


def fpr95(scores_in: Array, scores_out: Array) -> float:
    r"""False alarms :math:`\frac{1}{N} \sum_n 1[in_n \geq t]` at the highest threshold t that detects 95%.

    The scores are those of `auroc`.

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

    Example:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return like(torch.special.entr(to_probs(probs, "probs", "(N, K)")).sum(-1), probs)


def mutual_information(sample_probs: ArrayT) -> ArrayT:
    r"""Mutual information of label and weights, :math:`H[\frac1S \sum_s p_s] - \frac1S \sum_s H[p_s]`, in nats.

    `sample_probs` are probabilities by posterior sample, (S, N, K). It is never negative.

    Example:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    p = to_probs(sample_probs, "sample_probs", "(S, N, K)")
    total, expected = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    return like((total - expected).clamp(min=0), sample_probs)


def energy(logits: ArrayT, temperature: float = 1.0) -> ArrayT:
    """Energy of each example, -T log sum_k exp(f_k/T), averaged over posterior samples; high is out of distribution.

    Unlike the entropy it sees the size of the logits, (N, K) or (S, N, K), which softmax forgets.

    Example:
        >>> energy(torch.tensor([[10.0, 0.0], [0.0, 0.0]]))
        tensor([-10.0000,  -0.6931])
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; 1.0 is customary")
    each = -temperature * torch.logsumexp(to_logits(logits) / temperature, -1)
    return like(each.mean(0), logits)


# -- distances of features ---------------------------------------------------------------------------------------------

KINDS = ("mahalanobis++", "relative", "knn")
NEIGHBOURS = 10
BANK = 2000  # training rows, drawn at random, among which the nearest neighbours are searched


def feature_distance(train: Array, labels: Array | None, features: ArrayT, *, kind: str = "mahalanobis++") -> ArrayT:
    """Distance of features to those of the training set; high is out of distribution.

    All are scaled to length 1, since their length says how sure a network is, and hides how strange an input is.

    Args:
        train: Features of training inputs, shape (M, D), such as `active.features` returns.
        labels: Their classes, shape (M,); None where there are none.
        features: The features to score, shape (N, D).
        kind: "mahalanobis++" is `Reference.score`; "relative", for inputs that are much like the training data,
            subtracts the same score without classes; "knn" is the distance to the tenth nearest of 2,000 training rows.

    Returns:
        Shape (N,), of the type of `features`.

    Raises:
        ValueError: The kind is unknown, or the shapes do not fit.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> near, far = feature_distance(train, torch.tensor([0, 0, 1, 1]), torch.tensor([[2.0, 0.1], [-1.0, -1.0]]))
        >>> bool(far > near)
        True
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    known, new = to_double(train, "train"), to_double(features, "features")
    if known.dim() != 2 or new.dim() != 2 or known.shape[1] != new.shape[1]:
        raise ValueError(
            f"train and features must have shapes (M, D) and (N, D), got {tuple(known.shape)} and {tuple(new.shape)}; "
            "flatten what the last layer takes"
        )
    if kind == "knn":
        some = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:BANK]
        distances = torch.cdist(F.normalize(new, dim=1), F.normalize(known[some], dim=1))
        return like(distances.kthvalue(min(NEIGHBOURS, len(some)), 1).values, features)
    classes = None if labels is None else to_labels(labels, len(known), 1 + int(torch.as_tensor(labels).max()))
    scores = Moments.of(known, classes).reference().score(new)
    return like(scores if kind != "relative" else scores - Moments.of(known, None).reference().score(new), features)


@dataclass(eq=False)
class Reference:
    """Statistics of known features, which distances of others are measured with."""

    center: Tensor  # the mean of all features, (D,)
    means: Tensor  # of each class, or of all, (C, D), in the coordinates of `whitening`
    whitening: Tensor  # W with W W^T the inverse of the shrunk covariance within classes, (D, D)

    def score(self, features: Tensor) -> Tensor:
        """Return min_c (z - mu_c)^T S^-1 (z - mu_c) of each row, for z = features/|features|; larger is stranger.

        mu_c are the means of the classes, and S is their pooled, shrunk covariance.
        """
        z = F.normalize(features.to(self.center.dtype), dim=1)
        white = (z - self.center) @ self.whitening
        away = white.square().sum(1, keepdim=True) - 2 * white @ self.means.T + self.means.square().sum(1)
        return away.clamp_min(0).amin(1)

    def to(self, dtype: torch.dtype) -> Reference:
        """Return the same in another precision."""
        return Reference(*(t.to(dtype) for t in (self.center, self.means, self.whitening)))


@dataclass
class Moments:
    """Sums over rows of length 1, by which one pass over the data is enough: D^2 numbers, and D for each class."""

    count: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    squares: Tensor | float = 0.0

    @classmethod
    def of(cls, features: Tensor, labels: Tensor | None) -> Moments:
        """Return the sums over some rows."""
        moments = cls()
        moments.add(features, labels)
        return moments

    @property
    def classes(self) -> int:
        """How many classes have a mean of their own: one where there are fewer than two rows for each."""
        return len(self.counts) if 2 * len(self.counts) <= self.count else 1

    def add(self, features: Tensor, labels: Tensor | None) -> None:
        """Add rows, (N, D), and their classes, (N,); None puts them into one class."""
        if not len(features):
            return
        z = F.normalize(features.double(), dim=1)
        self.count += len(z)
        classes = torch.zeros(len(z), dtype=torch.long) if labels is None else labels
        for c in sorted(set(classes.tolist())):
            rows = z[classes == c]
            self.counts[c] = self.counts.get(c, 0) + len(rows)
            self.sums[c] = rows.sum(0) + self.sums.get(c, 0)
        self.squares = z.T @ z + self.squares

    def reference(self) -> Reference:
        """Return what scores new rows, in float64."""
        center = torch.stack(list(self.sums.values())).sum(0) / self.count
        names = sorted(self.counts) if self.classes > 1 else []
        means = torch.stack([self.sums[c] / self.counts[c] for c in names]) if names else center.unsqueeze(0)
        sizes = torch.tensor([self.counts[c] for c in names] if names else [self.count], dtype=center.dtype)
        whitening = whitened(self.squares - (means * sizes.unsqueeze(1)).T @ means, self.count - len(means))
        return Reference(center, (means - center) @ whitening, whitening)


def whitened(scatter: Tensor, degrees: int) -> Tensor:
    """Return W with W W^T = C^-1, where C is the covariance scatter/degrees shrunk towards a multiple of I.

    C = (1 - a) S + a tr(S)/D I, with the a of oracle approximating shrinkage (Chen and others, 2010), for n degrees of
    freedom: a = ((1 - 2/D) tr(S^2) + tr(S)^2) / ((n + 1 - 2/D) (tr(S^2) - tr(S)^2/D)), at most 1.
    """
    size = len(scatter)
    covariance = scatter / max(degrees, 1)
    trace, square = float(covariance.diagonal().sum()), float(covariance.square().sum())
    gap = (degrees + 1 - 2 / size) * (square - trace**2 / size)
    share = min(1.0, ((1 - 2 / size) * square + trace**2) / gap) if gap > 0 else 1.0
    shrunk = (1 - share) * covariance
    shrunk.diagonal().add_(share * trace / size + 1e-12 + 1e-6 * trace / size)
    # Of the inverse's Cholesky factors, the transposed inverse of that of C.
    factor = torch.linalg.cholesky(shrunk)
    inverse: Tensor = torch.linalg.solve_triangular(factor, torch.eye(size, dtype=factor.dtype), upper=False)
    return inverse.T
