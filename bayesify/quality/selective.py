"""When to answer and when to refuse: risk by coverage, and a threshold with a guarantee."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, to_classes, to_scores

_BISECTIONS = 60
_AT_ONCE = 256  # tests of the sequence


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
    """Area under the risk-coverage curve: low where the model errs only when it is uncertain.

    It is `RiskCoverage.aurc`; the arguments are those of `risk_coverage`.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        0.25
    """
    return risk_coverage(probs, labels, uncertainty=uncertainty).aurc


def abstain_threshold(probs: Array, labels: Array, max_risk: float = 0.05, *, confidence: float = 0.95) -> float:
    """Find the lowest confidence from which on the model may answer with an error rate of at most `max_risk`.

    Fixed-sequence testing: the examples are taken in the order of their confidence, most confident first. The first m
    with e errors pass where the Clopper-Pearson upper bound of their error rate, at level `confidence`, is at most
    `max_risk`: P(Bin(m, max_risk) <= e) <= 1 - confidence. The first m that is tested is a quarter of the examples,
    or the fewest that could pass without an error if these are more; then one by one (equal confidences together) up
    to the first that fails. Since each is tested only after all before have passed, no correction is due for choosing
    among them: on new data from the same source the error rate at confidences >= the threshold is above `max_risk`
    with a probability of at most 1 - `confidence`, if it does not fall as the threshold does.

    Args:
        probs: Probabilities of data that the model was not trained on, shape (N, K).
        labels: Integer classes, shape (N,).
        max_risk: The error rate that is allowed among the answers.
        confidence: The probability of the guarantee.

    Returns:
        The threshold, for `Predictive.select`; infinite where no threshold is safe.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1]]).expand(100, 2)
        >>> round(abstain_threshold(probs, torch.zeros(100, dtype=torch.long)), 4)
        0.9
        >>> abstain_threshold(probs[:50], torch.zeros(50, dtype=torch.long))  # too few for a guarantee
        inf
    """
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}; ten percent is 0.1")
    p, y = to_classes(probs, labels)
    top, predicted = p.max(1)
    values, order = top.sort(descending=True, stable=True)
    errors = (predicted != y)[order].long().cumsum(0)
    # Equal confidences are answered together or not at all.
    ends = torch.cat([values[1:] != values[:-1], torch.tensor([True])]).nonzero().flatten()
    fewest = math.ceil(math.log1p(-confidence) / math.log1p(-max_risk))
    start = max(fewest, len(p) // 4)
    threshold = math.inf
    tested = ends[ends + 1 >= start]
    for some in torch.split(tested, _AT_ONCE) if len(tested) else ():
        passed = binomial_tails(errors[some], some + 1, max_risk) <= 1 - confidence
        first_failure = int(passed.long().cumprod(0).sum())
        if first_failure:
            threshold = float(values[some[first_failure - 1]])
        if first_failure < len(some):
            break
    return threshold


def clopper_pearson(errors: int, count: int, confidence: float = 0.95) -> float:
    """Upper bound of an error rate: the largest r with P(Bin(count, r) <= errors) >= 1 - confidence.

    Args:
        errors: How many were wrong.
        count: Of how many.
        confidence: The probability that the bound holds.

    Returns:
        The bound; 1 where all were wrong.

    Example:
        >>> round(clopper_pearson(0, 59), 4)
        0.0495
    """
    if not 0 <= errors <= count or count < 1:
        raise ValueError(f"errors must be in 0..count, got {errors} of {count}")
    if errors == count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if binomial_tail(errors, count, middle) >= 1 - confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def binomial_tail(errors: int, count: int, rate: float) -> float:
    """Return P(Bin(count, rate) <= errors)."""
    return float(binomial_tails(torch.tensor([errors]), torch.tensor([count]), rate))


def binomial_tails(errors: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Return P(Bin(n, r) <= e), the sum of C(n, k) r^k (1 - r)^(n - k) for k = 0..e by logarithms, for every (e, n)."""
    if rate >= 1:
        return (errors >= counts).double()
    k = torch.arange(int(errors.max()) + 1, dtype=torch.float64)
    n = counts.double().unsqueeze(1)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp_min(0) + 1)
    terms = ways + k * math.log(rate) + (n - k) * math.log1p(-rate)
    return torch.logsumexp(terms.masked_fill(k > errors.unsqueeze(1), -math.inf), 1).exp().clamp_max(1)
