"""Guarantees that hold whatever the model: conformal sets, intervals and p-values, thresholds, and drift.

The only assumption is that the data of the fit and the new data are exchangeable.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, check_fraction, to_classes, to_probs, to_scores

CLASS_KINDS = ("lac", "aps")
INTERVAL_KINDS = ("scaled", "absolute")


class ConformalQuantile(float):
    """A quantile of conformal scores, and the kind of the scores."""

    kind: str


def conformal_quantile(
    predictive: Any, alpha: float = 0.1, kind: str | None = None, *, seed: int = 0
) -> ConformalQuantile:
    """Find the quantile of a prediction's conformal scores: the ceil((n + 1)(1 - alpha))-th smallest of n.

    Sets and intervals made with it hold the truth of new data with a probability of at least 1 - alpha.

    Args:
        predictive: What `predict` returned for labelled data that the model was not trained on.
        alpha: The share of truths that may be missed.
        kind: For classes "lac" (the default), 1 - p_y, the smallest sets; or "aps", the probability of all classes
            before y, most probable first, plus u p_y for a uniform u per example: larger sets for difficult examples
            (Romano, Sesia and Candes 2020). For regression "scaled" (the default), |y - mean|/std, or "absolute".
        seed: Of the u of "aps".

    Returns:
        The quantile, a float, for `predictive.sets`; infinite where there are too few data.

    Raises:
        ValueError: There are no labels, or an argument is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
        >>> round(conformal_quantile(SimpleNamespace(probs=probs, labels=torch.tensor([0, 0, 1])), 0.25), 4)
        0.6
    """
    check_fraction("alpha", alpha, "0.1 is customary")
    if getattr(predictive, "labels", None) is None:
        raise ValueError("the prediction has no labels; predict on batches of (inputs, labels)")
    kinds = CLASS_KINDS if hasattr(predictive, "probs") else INTERVAL_KINDS
    kind = kinds[0] if kind is None else kind
    if kind not in kinds:
        raise ValueError(f"kind must be one of {list(kinds)} here, got {kind!r}")
    if hasattr(predictive, "probs"):
        flat = predictive.flat() if hasattr(predictive, "flat") else predictive
        p, y = to_classes(flat.probs, flat.labels)
        scores = (1 - p if kind == "lac" else mass_up_to(p, 2 * seed)).gather(1, y.unsqueeze(1)).squeeze(1)
    else:
        error = (predictive.targets() - predictive.mean).abs()
        scores = (error / half_width(predictive, kind)).flatten()
    # Rounded before the ceiling: 0.9 * 10 may land above 9.
    rank = math.ceil(round((len(scores) + 1) * (1 - alpha), 9))
    quantile = ConformalQuantile(scores.sort().values[rank - 1] if rank <= len(scores) else math.inf)
    quantile.kind = kind
    return quantile


def conformal_sets(probs: Array, quantile: float, kind: str | None = None, *, seed: int = 0) -> Tensor:
    """Return which classes are in each example's set, Booleans (N, K): all whose score is at most the quantile.

    A set may be empty. The u of "aps" come from another stream than those of `conformal_quantile`.
    """
    kind = kind_of(quantile, kind, CLASS_KINDS)
    p = to_probs(probs, "probs", "(N, K)")
    return (1 - p if kind == "lac" else mass_up_to(p, 2 * seed + 1)) <= quantile


def mass_up_to(p: Tensor, seed: int) -> Tensor:
    """Return for each class the probability of all that come before it, most probable first, plus u of its own."""
    u = torch.rand(len(p), 1, dtype=p.dtype, generator=torch.Generator().manual_seed(seed))
    values, order = p.sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(p).scatter_(1, order, values.cumsum(1) - (1 - u) * values)


def half_width(predictive: Any, kind: str) -> Tensor:
    """Return the unit of a regression's conformal scores."""
    std: Tensor = predictive.std
    if kind == "absolute":
        return torch.ones_like(std)
    if bool((std <= 0).any()):
        raise ValueError("the prediction has a std of 0, by which no error can be scaled; pass kind='absolute'")
    return std


def kind_of(quantile: float, kind: str | None, kinds: tuple[str, ...]) -> str:
    """Return the kind of scores that a quantile is about: its own, or the one given for a plain number."""
    found: str = getattr(quantile, "kind", kind) or kinds[0]
    if found not in kinds or kind not in (None, found):
        raise ValueError(
            f"the quantile is one of {found!r} scores, which does not fit; make one with conformal_quantile"
        )
    return found


def conformal_pvalues(scores: Tensor, held_out: Tensor) -> Tensor:
    """Return (1 + #{held-out >= score}) / (n + 1) for each score.

    A new example of the held-out data's source has a value of at most a with a probability of at most a. `held_out`
    are the sorted scores of n examples that nothing else was fitted on.
    """
    if torch.compiler.is_compiling():  # an exported graph, for which not every format has a search
        stranger = (held_out >= scores.unsqueeze(-1)).sum(-1)
    else:
        stranger = len(held_out) - torch.searchsorted(held_out, scores.contiguous())
    return (stranger + 1).double() / (len(held_out) + 1)


# -- a threshold on the confidence -------------------------------------------------------------------------------------

_STARTS = 19  # besides a quarter of the examples


class Threshold(float):
    """The lowest confidence at which a model may answer; infinite where none is safe, with the `reason`."""

    reason: str = ""

    @classmethod
    def refused(cls, reason: str) -> Self:
        """Return the threshold that answers nothing."""
        threshold = cls(math.inf)
        threshold.reason = reason
        return threshold

    def __repr__(self) -> str:
        return f"{float(self)!r} ({self.reason})" if self.reason else repr(float(self))

    __str__ = __repr__


def abstain_threshold(probs: Array, labels: Array, max_risk: float = 0.05, *, confidence: float = 0.95) -> Threshold:
    """Find the lowest confidence from which on the model may answer with an error rate of at most `max_risk`.

    Fixed-sequence testing: the m most confident examples with e errors pass at level d if P(Bin(m, max_risk) <= e) <=
    d. From each starting size m grows (equal confidences together) up to the first that fails. The levels of all starts
    sum to 1 - `confidence` (Bonferroni): half belongs to a quarter of the examples, half to 19 sizes spaced evenly on a
    logarithmic scale from the fewest that can pass; where these are more than half of the examples, the first has all
    of it. On new data from the same source the error rate at confidences >= the threshold is above `max_risk` with a
    probability of at most 1 - `confidence`, if it does not fall as the threshold does.

    Args:
        probs: Probabilities of data that the model was not trained on, shape (N, K).
        labels: Integer classes, shape (N,).
        max_risk: The error rate that is allowed among the answers.
        confidence: The probability of the guarantee.

    Returns:
        The threshold, for `Predictive.select`; infinite where none is safe, with the `reason`.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1]]).expand(100, 2)
        >>> round(abstain_threshold(probs, torch.zeros(100, dtype=torch.long)), 4)
        0.9
        >>> abstain_threshold(probs[:50], torch.zeros(50, dtype=torch.long))
        inf (too few examples: 50, at least 59 are needed)
    """
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        check_fraction(name, value, "ten percent is 0.1")
    p, y = to_classes(probs, labels)
    top, predicted = p.max(1)
    values, order = top.sort(descending=True, stable=True)
    errors = (predicted != y)[order].long().cumsum(0)

    # Equal confidences are answered together or not at all.
    ends = torch.cat([values[1:] != values[:-1], torch.tensor([True])]).nonzero().flatten()
    count, level = len(p), 1 - confidence
    least, small = (math.ceil(math.log(share) / math.log1p(-max_risk)) for share in (level, level / 2 / _STARTS))
    if count < least:
        return Threshold.refused(f"too few examples: {count}, at least {least} are needed")
    few = small > count / 2
    quarter, sizes = max(count // 4, least), list[int]()
    if not few:
        sizes = [math.ceil(small * (count / small) ** (k / _STARTS)) for k in range(_STARTS)]
    tails = binomial_tails(errors, max_risk)[ends]
    first, others = (torch.searchsorted(ends, torch.tensor(m, dtype=torch.long) - 1) for m in ([quarter], sizes))
    reached = max(_reached(tails, first, level if few else level / 2), _reached(tails, others, level / 2 / _STARTS))
    if reached >= 0:
        return Threshold(values[ends[reached]])
    fewest = 1 + int(ends[int(torch.cat([first, others]).min())])
    found = f"{int(errors[fewest - 1])} of the {fewest} most confident are wrong"
    return Threshold.refused(f"no subset is good enough: {found}, which is no proof of {max_risk:g} at most")


def _reached(tails: Tensor, starts: Tensor, level: float) -> int:
    """Return the last place that passes in the sequences from these starts, each up to its first failure; or -1."""
    passed = tails <= level
    failures = (~passed).cumsum(0)
    ends = torch.searchsorted(failures, failures[starts[passed[starts]]], right=True) - 1
    return int(ends.max()) if len(ends) else -1


def binomial_tails(errors: Tensor, rate: float) -> Tensor:
    """Return P(Bin(n, r) <= e_n) for the e_n errors among the first n examples, n = 1, 2, ...

    From 1 for n = 0, an example that is right takes away r P(Bin(n - 1, r) = e_n), an error adds (1 - r) times that.
    """
    e, n = errors.double(), torch.arange(len(errors), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(e + 1) - torch.lgamma(n - e + 1)  # minus infinity where e > n
    at = torch.exp(ways + e * math.log(rate) + (n - e) * math.log1p(-rate))
    wrong = torch.diff(errors, prepend=errors.new_zeros(1)) > 0
    return 1 + torch.where(wrong, (1 - rate) * at, -rate * at).cumsum(0)


# -- drift -------------------------------------------------------------------------------------------------------------

BETS = torch.arange(1, 10, dtype=torch.float64) / 10  # the powers of p that are bet on, all with the same stake


@dataclass(frozen=True, eq=False)
class Drift:
    """The result of `drift`."""

    wealth: Tensor  # after each p-value, (T,): how many times the stake a gambler has who bets on small ones
    threshold: float  # 1/false_alarms, at which the alarm is raised

    @property
    def at(self) -> int | None:
        """Index of the p-value at which the alarm is raised; None without an alarm."""
        above = (self.wealth >= self.threshold).nonzero()
        return int(above[0]) if len(above) else None

    @property
    def alarm(self) -> bool:
        """Whether there is an alarm."""
        return self.at is not None

    def __repr__(self) -> str:
        found = "no alarm" if self.at is None else f"alarm at {self.at}"
        return (
            f"Drift({len(self.wealth)} p-values, {found}, wealth {float(self.wealth[-1]):.3g} of {self.threshold:.3g})"
        )


def drift(pvalues: Array, false_alarms: float = 0.01, *, held_out: int | None = None, seed: int = 0) -> Drift:
    r"""Test whether a stream is still like the held-out data of `fit_novelty`.

    The wealth :math:`M_t = \frac1K \sum_k \prod_{i \le t} \epsilon_k q_i^{\epsilon_k - 1}` is a martingale while the q
    are uniform and independent, and grows while they are small. By Ville's inequality it ever reaches 1/a with a
    probability of at most a, however often one looks.

    Args:
        pvalues: `novelty_pvalue` of inputs in the order of their arrival, shape (T,).
        false_alarms: The probability of an alarm, ever, on a stream that does not change.
        held_out: How many held-out examples the p-values come from, `len(model.novelty.held_out)`. With it, each input
            is compared with them and with all inputs before it, so that the q are independent. None takes the p-values
            as they are, which all depend on the same examples.
        seed: Orders inputs that have the same p-value.

    Returns:
        The wealth, with `.alarm` and `.at`.

    Raises:
        ValueError: A p-value is not in (0, 1], or the probability or the number is out of range.

    Example:
        >>> drift(torch.tensor([0.4, 0.9, 0.01, 0.02, 0.01, 0.03, 0.01]))
        Drift(7 p-values, alarm at 6, wealth 430 of 100)
    """
    check_fraction("false_alarms", false_alarms, "0.01 is one stream in a hundred")
    p = to_scores(pvalues, "pvalues")
    if bool(((p <= 0) | (p > 1)).any()):
        raise ValueError(f"pvalues must be in (0, 1], got {float(p.min()):.3g} to {float(p.max()):.3g}")
    if held_out is not None:
        if isinstance(held_out, bool) or not isinstance(held_out, int) or held_out < 1:
            raise ValueError(f"held_out must be a number of examples, got {held_out!r}; len(model.novelty.held_out)")
        p = _independent(p, held_out, seed)
    log_wealth = (BETS.log() + (BETS - 1) * p.log().unsqueeze(1)).cumsum(0)
    wealth = (log_wealth.logsumexp(1) - math.log(len(BETS))).exp()
    return Drift(wealth, 1 / false_alarms)


def _independent(p: Tensor, held_out: int, seed: int) -> Tensor:
    """Return q_t = (#{held-out and earlier inputs that are stranger than input t} + u_t) / (n + t), u_t uniform.

    A p-value k/(n + 1) puts an input between the k - 1 stranger held-out examples and the others.
    """
    noise = torch.rand(2, len(p), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stranger = (p * (held_out + 1)).round() - 1
    earlier, found = list[float](), list[float]()
    rows = zip(stranger.tolist(), (stranger + noise[0]).tolist(), noise[1].tolist(), strict=True)
    for t, (k, place, u) in enumerate(rows, start=1):
        before = bisect.bisect_left(earlier, place)
        found.append((k + before + u) / (held_out + t))
        earlier.insert(before, place)
    return torch.tensor(found, dtype=torch.float64).clamp_min(1e-300)
