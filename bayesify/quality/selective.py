"""When to answer and when to refuse: risk by coverage, and a threshold with a guarantee."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, to_classes, to_scores

_BISECTIONS = 60
_AT_ONCE = 64  # tests of a sequence
_STARTS = 19  # besides a quarter of the examples


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


class Threshold(float):
    """The confidence from which on a model may answer; infinite where no answer is safe.

    Attributes:
        reason: Why there is none; empty where there is one.
    """

    reason: str

    def __new__(cls, value: float, reason: str = "") -> Threshold:
        """Make a float that can say why it is infinite."""
        self = super().__new__(cls, value)
        self.reason = reason
        return self

    def __repr__(self) -> str:
        return f"{float(self)!r} ({self.reason})" if self.reason else repr(float(self))

    __str__ = __repr__


def abstain_threshold(probs: Array, labels: Array, max_risk: float = 0.05, *, confidence: float = 0.95) -> Threshold:
    """Find the lowest confidence from which on the model may answer with an error rate of at most `max_risk`.

    Fixed-sequence testing from several starts: the examples are taken in the order of their confidence, most confident
    first. The first m with e errors pass at level d if P(Bin(m, max_risk) <= e) <= d. From each starting size m grows
    one by one (equal confidences together) up to the first that fails, and the levels of all starts sum to
    1 - `confidence` (Bonferroni). Half of it belongs to a start at a quarter of the examples, the other half to 19
    sizes spaced evenly on a logarithmic scale, from the fewest that can pass without an error; where these are more
    than half of the examples, the first start has all of it. On new data from the same source the error rate at
    confidences >= the threshold is above `max_risk` with a probability of at most 1 - `confidence`, if it does not fall
    as the threshold does.

    Args:
        probs: Probabilities of data that the model was not trained on, shape (N, K).
        labels: Integer classes, shape (N,).
        max_risk: The error rate that is allowed among the answers.
        confidence: The probability of the guarantee.

    Returns:
        The threshold, for `Predictive.select`; infinite where none is safe, with the `reason`: too few examples, or
        too many errors among the most confident ones.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1]]).expand(100, 2)
        >>> round(abstain_threshold(probs, torch.zeros(100, dtype=torch.long)), 4)
        0.9
        >>> abstain_threshold(probs[:50], torch.zeros(50, dtype=torch.long))
        inf (too few examples: 50, at least 59 are needed)
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
    count, level = len(p), 1 - confidence
    least, small = (math.ceil(math.log(share) / math.log1p(-max_risk)) for share in (level, level / 2 / _STARTS))
    if count < least:
        return Threshold(math.inf, f"too few examples: {count}, at least {least} are needed")
    few = small > count / 2
    sizes = [math.ceil(small * (count / small) ** (k / _STARTS)) for k in range(0 if few else _STARTS)]
    quarter = max(count // 4, least)
    reached = max(
        _reached(errors, ends, [quarter], max_risk, level if few else level / 2),
        _reached(errors, ends, sizes, max_risk, level / 2 / _STARTS),
    )
    if reached >= 0:
        return Threshold(float(values[reached]))
    first = int(ends[torch.searchsorted(ends, min([quarter, *sizes]) - 1)])
    said = f"{int(errors[first])} of the {first + 1} most confident are wrong"
    return Threshold(math.inf, f"no subset is good enough: {said}, which is no proof of {max_risk:g} at most")


def _reached(errors: Tensor, ends: Tensor, sizes: Sequence[int], max_risk: float, level: float) -> int:
    """Return the last of `ends` that sequences from these sizes reach, each up to its first failure; -1 if none does.

    Args:
        errors: How many of the first m are wrong, at m - 1.
        ends: The places m - 1 that may be tested, in order.
        sizes: Where sequences begin, in order.
        max_risk: The error rate of the test.
        level: The level of each test.
    """

    def passed(places: Tensor) -> Tensor:
        return binomial_tails(errors[ends[places]], ends[places] + 1, max_risk) <= level

    reached = -1  # a place in `ends`
    places = torch.searchsorted(ends, torch.tensor(sizes, dtype=torch.long) - 1)
    for place in places[passed(places)].tolist() if sizes else ():
        while reached < place:  # else it is inside of an earlier run, which it would end as
            some = torch.arange(place, min(place + _AT_ONCE, len(ends)))
            run = int(passed(some).long().cumprod(0).sum())
            reached = place + run - 1
            place = place + run if run == len(some) < len(ends) - place else reached
    return int(ends[reached]) if reached >= 0 else -1


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
