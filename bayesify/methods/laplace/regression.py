"""Settle a regression's fit: the variance of its noise, and how wide a prior its spread is computed with.

Both follow from the curvature, without another pass. The residuals of the training data are too small, as if the noise
were less, by the number of weights that the data decides; and the scale of the weights before training says nothing
about what a function may do where there is no data.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.methods.laplace.evidence import Fitted, log_evidence
from bayesify.methods.laplace.kron import Kron
from bayesify.prediction.likelihoods import Regression

logger = logging.getLogger("bayesify")

WEAK = 80.0  # standard deviations of the targets: how far functions from the widest prior vary on the data
DOSE = 0.4  # nats per example that a wider prior may cost in evidence
SHARE = 0.1  # of the examples, which weights without their correlations may follow
WIDTHS = tuple(10 ** (-k / 6) for k in range(37))  # of the widest prior, down to 1e-6
PAST = 1.0  # nats below the largest evidence, from where narrower priors are not tried
LEAST_FREE = 0.02  # of the examples, which count as free however many weights the data decides
ROUNDS = 8  # of noise and prior in turn


class Settled(NamedTuple):
    """What a regression's fit found.

    Attributes:
        fitted: The parameters, with their curvature for the noise that was found.
        factor: The prior's scale over `prior_sig`.
    """

    fitted: list[Fitted]
    factor: float


def settle(fitted: Sequence[Fitted], likelihood: Regression, examples: float, *, wide: bool, power: int) -> Settled:
    """Estimate the noise, unless it is known, and choose the prior's scale.

    With gamma = sum h/(h + 1/sigma^2) weights that the data decides, shared evenly by the outputs, the variance is the
    mean of its posterior, RSS/(N - gamma/K - 2). The prior is the widest one whose functions vary at most `WEAK` times
    as much as the targets, and whose evidence is within `DOSE` nats per example of the largest; where the prior mean is
    the trained weights themselves, the evidence is that of a prior around zero. Both constants were chosen on a noisy
    sine with a gap, such that the truth is inside the intervals far from the data too. A diagonal, whose weights know
    nothing of each other, follows at most `SHARE` of the data.

    Args:
        fitted: The parameters with their curvature, at the likelihood's present noise.
        likelihood: Gets its noise, unless that was given.
        examples: N, which the curvature is a sum over.
        wide: Whether to choose the prior's scale.
        power: The curvature goes with v^-power: 1 for Gauss-Newton, 2 for the empirical Fisher.
    """
    rows = list(fitted)
    if any(f.posterior.layout is not None for f in rows):
        return Settled(rows, 1.0)  # each process has rows of its own
    factor = 1.0
    for _ in range(ROUNDS):
        factor = widest(rows, likelihood, examples) if wide else 1.0
        if not likelihood.estimated:
            break
        known = variances(likelihood)
        free = free_examples(rows, factor, examples, len(known))
        found = likelihood.residuals.squares / likelihood.residuals.count * (examples / free)
        likelihood.noise_var = tuple(found.tolist()) if len(found) > 1 else float(found)  # type: ignore[union-attr, arg-type]
        ratio = float((found / known).mean())
        rows = [f._replace(h=_times(f.h, ratio**-power)) for f in rows]
        if abs(ratio - 1) < 1e-3:
            break
    logger.info("noise variance %s, prior scale times %.3g", likelihood.noise_var, factor)
    return Settled(rows, factor)


def variances(likelihood: Regression) -> Tensor:
    """Return the present variance of each output."""
    count = max(likelihood.residuals.outputs, 1)
    return torch.tensor(likelihood.noise_var, dtype=torch.float64).expand(count)


def free_examples(fitted: Sequence[Fitted], factor: float, examples: float, outputs: int) -> float:
    """Return N - gamma/K - 2, but at least a small part of N."""
    gamma = followed(fitted, factor)
    free = examples - gamma / outputs - 2
    if free < LEAST_FREE * examples:
        logger.warning(
            "the weights follow %.0f of %.0f examples, so that the residuals say little about the noise; fit it to "
            "held-out data and pass likelihood=Regression(noise_var)",
            gamma / outputs,
            examples,
        )
    return max(free, LEAST_FREE * examples)


def followed(fitted: Sequence[Fitted], factor: float) -> float:
    """Return gamma = sum h/(h + 1/sigma^2): how many weights the data decides."""
    gamma = 0.0
    for one in fitted:
        if one.h is not None and one.weight is None:  # a joined bias is in its weight's eigenvalues
            h = (one.h.curvature() if isinstance(one.h, Kron) else one.h).cpu().double()
            ridge = 0.0 if one.posterior.flat else 1 / (one.sig * factor) ** 2
            gamma += float((h / (h + ridge + one.posterior.damping).clamp_min(1e-300)).sum())
    return gamma


def widest(fitted: Sequence[Fitted], likelihood: Regression, examples: float) -> float:
    """Return the factor of the prior's scale: see `settle`."""
    own = [f for f in fitted if f.h is not None and not f.posterior.flat]
    sums = likelihood.residuals
    spread = sum(float(_trace(f.h)) * f.sig**2 for f in own if f.weight is None)  # of f/sqrt(v), summed over the data
    if not own or not spread > 0 or not isinstance(sums.scatter, Tensor):
        return 1.0
    size = float((sums.scatter / sums.count / variances(likelihood)).sum()) * examples
    if not size > 0:
        return 1.0
    limit = WEAK * math.sqrt(size / spread)
    weights = sum(_elements(f.h) for f in own if f.weight is None)
    still = all(torch.equal(f.posterior.original, f.posterior.prior_mean.to(f.posterior.original)) for f in own)

    def evidence(factor: float) -> float:
        # A relative scale is a weight's own size: around zero, each is one scale away.
        return log_evidence(own, factor) - (weights / (2 * factor**2) if still else 0.0)

    alone = [f for f in own if not isinstance(f.h, Kron)]
    tried: dict[float, float] = {}
    for width in WIDTHS:
        tried[limit * width] = evidence(limit * width)
        if tried[limit * width] < max(tried.values()) - PAST:
            break  # beyond the largest
    enough = max(tried.values()) - DOSE * examples
    found = next(factor for factor, value in tried.items() if value >= enough)
    outputs = max(sums.outputs, 1)
    while alone and found > limit * WIDTHS[-1] and followed(alone, found) > SHARE * examples * outputs:
        found *= WIDTHS[1]
    return found


def _times(h: Tensor | Kron | None, ratio: float) -> Tensor | Kron | None:
    if isinstance(h, Kron):
        return h._replace(left_values=h.left_values * ratio)
    return None if h is None else h * ratio


def _trace(h: Tensor | Kron | None) -> float:
    if isinstance(h, Kron):
        return float(h.left_values.double().sum() * h.right_values.double().sum())
    return 0.0 if h is None else float(h.double().sum())


def _elements(h: Tensor | Kron | None) -> int:
    return h.noise_shape.numel() if isinstance(h, Kron) else 0 if h is None else h.numel()
