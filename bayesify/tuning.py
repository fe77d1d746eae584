"""Choose the prior's scale after training: by the evidence of the Laplace approximation, or by validation.

The curvature is at hand, so that a candidate costs a pass over it, and no training. All prior_sig are multiplied by one
common factor.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core import scopes_of
from bayesify.likelihood import Likelihood
from bayesify.methods.la import LaplacePosterior
from bayesify.posteriors import deviation
from bayesify.prediction import predict

logger = logging.getLogger("bayesify")


class Fitted(NamedTuple):
    """A parameter with its curvature h (None where it has none) and its method's damping."""

    posterior: LaplacePosterior
    h: Tensor | None
    damping: float


EVIDENCE_RANGE = (-6.0, 3.0)  # powers of ten of prior_sig
VALIDATION_RANGE = (-4.0, 1.0)
COARSE = 0.5  # the grid's step, in powers of ten
LEAST_SAMPLES = 5  # fewer say more about themselves than about the prior
HOPELESS = 1.0  # nats per example above the best so far, from where larger scales are not tried


def log_evidence(fitted: Sequence[Fitted], factor: float) -> float:
    """Return the part of the Laplace log-evidence that depends on the prior's scale.

    sum over elements of -(theta* - theta0)^2/(2 sigma^2) - 1/2 log(1 + sigma^2 (h + damping)), where h is the curvature
    and sigma the prior's scale times `factor`. Flat priors and parameters without curvature have no part in it.
    """
    total = 0.0
    for posterior, h, damping in fitted:
        if h is not None and not posterior.flat:
            sig = posterior.prior_sig * factor
            away = deviation(posterior.original.detach(), posterior)
            total -= float(torch.linalg.vector_norm(away, dtype=torch.float64) / sig) ** 2 / 2
            total -= float((h.double() + damping).mul_(sig * sig).log1p_().sum()) / 2
    return total


def by_evidence(fitted: Sequence[Fitted]) -> float:
    """Return the factor of prior_sig with the largest evidence: the best of a grid, then golden sections."""
    base = typical_sig(fitted)

    def loss(power: float) -> float:
        return -log_evidence(fitted, 10**power / base)

    best = min(_grid(EVIDENCE_RANGE), key=loss)
    if best in EVIDENCE_RANGE:
        logger.warning("the evidence grows up to the end of the range, prior_sig %.3g: is the model trained?", 10**best)
    power = _golden(loss, best - COARSE, best + COARSE, 10)
    logger.info("prior_sig %.4g has the largest evidence (was %.4g)", 10**power, base)
    return 10**power / base


def by_validation(
    fitted: Sequence[Fitted], model: nn.Module, data: Any, likelihood: Likelihood, spread: Callable[[float], None]
) -> float:
    """Return the factor of prior_sig with the lowest NLL of the sampled prediction on validation data.

    Args:
        fitted: The parameters.
        model: The model.
        data: Batches with labels.
        likelihood: The loss whose average is taken.
        spread: Gives the posteriors the standard deviations for a factor.
    """
    base = typical_sig(fitted)
    data = list(data) if isinstance(data, Iterator) else data  # every scale reads it again
    tried: dict[float, float] = {}

    def loss(power: float) -> float:
        if power not in tried:
            spread(10**power / base)
            tried[power] = validation_nll(model, data, likelihood)
            logger.info("prior_sig %.3g: validation NLL %.4f", 10**power, tried[power])
        return tried[power]

    for power in _grid(VALIDATION_RANGE):
        if not loss(power) <= min(tried.values()) + HOPELESS:
            break
    for step in (COARSE / 2, COARSE / 4):
        best = min(tried, key=loss)
        for power in (best - step, best + step):
            if VALIDATION_RANGE[0] <= power <= VALIDATION_RANGE[1]:
                loss(power)
    best = min(tried, key=loss)
    if best in VALIDATION_RANGE:
        logger.warning("the validation NLL falls up to the end of the range, prior_sig %.3g", 10**best)
    logger.info("prior_sig %.4g has the lowest validation NLL, %.4f (was %.4g)", 10**best, tried[best], base)
    return 10**best / base


def validation_nll(model: nn.Module, data: Any, likelihood: Likelihood) -> float:
    """Return the mean over the examples of -log of the mean over samples of exp(-loss): the mixture's NLL."""
    samples = max(LEAST_SAMPLES, *(scope.method.nst for scope in scopes_of(model)))
    found = predict(model, data, samples=samples, seed=0, task="regression")
    if found.labels is None:
        raise ValueError("tune= needs data with labels")
    assert found.outputs is not None
    try:
        losses = torch.stack([likelihood.on_logits(outputs, found.labels) for outputs in found.outputs])
    except ValueError:
        if bool(torch.isfinite(found.outputs).all()):
            raise
        return math.inf  # the prior is so wide that samples overflow
    return float((math.log(len(losses)) - torch.logsumexp(-losses.double(), 0)).mean())


def typical_sig(fitted: Sequence[Fitted]) -> float:
    """Return the geometric mean of the parameters' prior_sig."""
    return math.exp(sum(math.log(f.posterior.prior_sig) for f in fitted) / len(fitted))


def _grid(ends: tuple[float, float]) -> list[float]:
    low, high = ends
    return [low + i * COARSE for i in range(round((high - low) / COARSE) + 1)]


def _golden(loss: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Narrow down a minimum between two points by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = loss(a), loss(b)
    for _ in range(steps):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = loss(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = loss(b)
    return a if at_a < at_b else b
