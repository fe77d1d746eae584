"""The prediction of a mixture: the average of its members' predictions, each with the same weight."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor

from bayesify.prediction.multilabel import MultilabelPredictive
from bayesify.prediction.predictive import Predictive
from bayesify.prediction.regression import RegressionPredictive

Found = Predictive | MultilabelPredictive | RegressionPredictive
C = TypeVar("C", Predictive, MultilabelPredictive)


def average(parts: Sequence[Found]) -> Found:
    """Return the mixture of members' predictions, which are of one kind and on the same data."""
    if len(parts) == 1:
        return parts[0]
    if regressions := [p for p in parts if isinstance(p, RegressionPredictive)]:
        return average_regressions(regressions)
    if several := [p for p in parts if isinstance(p, MultilabelPredictive)]:
        return average_probabilities(several)
    found = average_probabilities([p for p in parts if isinstance(p, Predictive)])
    return replace(found, closed_form=any(p.closed_form for p in parts if isinstance(p, Predictive)))


def average_probabilities(parts: Sequence[C]) -> C:
    """Return log(1/M sum_m p_m) and the mean of the expected entropies, for M members.

    The sums go from the first member to the last, as those over a model's samples do: equal logits give equal bits.
    """
    return replace(
        parts[0],
        log_probs=(reduce(torch.logaddexp, [p.log_probs for p in parts]) - math.log(len(parts))).clamp_max_(0),
        expected_entropy=reduce(torch.add, [p.expected_entropy for p in parts]) / len(parts),
        logits=in_turn([p.logits for p in parts]),
        weights=_weights([max(p.num_samples, 1) for p in parts]),
        num_samples=sum(p.num_samples for p in parts),
    )


def _weights(counts: Sequence[int]) -> Tensor | None:
    """Return the weight 1/(M S_m) of every row that `in_turn` joins; None where all are equal."""
    if len(set(counts)) == 1:
        return None
    each = [torch.full((count,), 1 / (len(counts) * count), dtype=torch.float64) for count in counts]
    return in_turn(each)


def average_regressions(parts: Sequence[RegressionPredictive]) -> RegressionPredictive:
    """Return the mixture's moments: mean m = 1/M sum m_k, and variance 1/M sum (v_k + (m_k - m)^2).

    The Gaussians of single samples are kept where every member has as many of them, since each weighs the same.
    """
    means = torch.stack([p.mean for p in parts])
    mean = means.mean(0)
    within = torch.stack([p.epistemic.square() for p in parts]).mean(0)
    even = len({p.num_samples for p in parts}) == 1 and not any(p.closed_form for p in parts)
    noises = [None if p.noise_var is None else p.noise_var.expand(max(p.num_samples, 1), *mean.shape) for p in parts]
    return replace(
        parts[0],
        mean=mean,
        epistemic=(within + (means - mean).square().mean(0)).sqrt(),
        aleatoric=torch.stack([p.aleatoric.square() for p in parts]).mean(0).sqrt(),
        outputs=in_turn([p.outputs for p in parts]) if even else None,
        noise_var=in_turn(noises) if even else None,
        num_samples=sum(p.num_samples for p in parts),
        closed_form=all(p.closed_form for p in parts),
    )


def in_turn(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Join what the members' samples gave, (S_m, N, ...) each: first every member's first, then the second ones.

    So row j is that of draw j of `samples(model, n, seed)`. None where one of the members has none.
    """
    kept = [piece for piece in pieces if piece is not None]
    if len(kept) < len(pieces):
        return None
    most = max(map(len, kept))
    return torch.stack([piece[turn] for turn in range(most) for piece in kept if turn < len(piece)])
