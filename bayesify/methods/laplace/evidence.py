"""The Laplace evidence of the prior's scale, and the search for the scale where a loss is least."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.distributed import Layout, on_shard, part_of
from bayesify.core.prior import deviation, wide
from bayesify.core.scopes import scopes_of
from bayesify.methods.laplace.kron import Kron
from bayesify.methods.laplace.method import LaplacePosterior
from bayesify.prediction.likelihoods import Likelihood, Regression
from bayesify.quality.temperature import golden_section

logger = logging.getLogger("bayesify")

EVIDENCE_RANGE = (-6.0, 3.0)  # powers of ten of prior_sig
SAMPLED, CLOSED = (1.0, 0.5), (0.5, 0.02)  # a grid's step, and the width at which golden sections end, in powers of ten
NOTHING = 1e-7  # nats: where a loss is flat, it is the grid's least
HOPELESS = 1.0  # nats per example above the best so far, from where larger scales are not tried


class Fitted(NamedTuple):
    """A parameter with its curvature (None where it has none).

    Attributes:
        posterior: Its posterior.
        h: The curvature: element by element (of a sharded parameter this process's rows), or in Kronecker factors.
        weight: Of a bias that is one Gaussian with its weight, the weight's posterior, whose prior counts.
    """

    posterior: LaplacePosterior
    h: Tensor | Kron | None
    weight: LaplacePosterior | None = None

    @property
    def sig(self) -> float:
        """The prior's scale."""
        return (self.posterior if self.weight is None else self.weight).prior_sig

    def spread(self, factor: float) -> None:
        """Give the posterior its variances for the prior's scale times `factor`."""
        with on_shard(self.posterior) as own:
            own.fit(self.h, self.sig * factor, "" if self.weight is None else self.weight.name)


def least(loss: Callable[[float], float], ends: tuple[float, float], fine: tuple[float, float]) -> float:
    """Return where a loss is least: on a grid from the low end until it is hopeless, then by golden sections."""
    (low, high), (step, width) = ends, fine
    tried: dict[float, float] = {}
    for i in range(round((high - low) / step) + 1):
        tried[low + i * step] = loss(low + i * step)
        if not tried[low + i * step] <= min(tried.values()) + HOPELESS:
            break
    best = min(tried, key=lambda power: tried[power])
    finer = golden_section(loss, max(low, best - step), min(high, best + step), width)
    better = min(finer, key=lambda power: finer[power])
    return better if finer[better] < tried[best] - NOTHING else best


def log_evidence(fitted: Sequence[Fitted], factor: float) -> float:
    """Return the part of the Laplace log-evidence that depends on the prior's scale.

    sum over elements of -(theta* - theta0)^2/(2 sigma^2) - 1/2 log(1 + sigma^2 (h + damping)), where h is the
    curvature, of Kronecker factors in their eigenbases, and sigma the prior's scale times `factor`. Flat priors and
    parameters without curvature have no part in it.
    """
    sums: dict[Layout | None, float] = {}
    for one in fitted:
        posterior, h, layout = part_of(one.posterior), one.h, one.posterior.layout
        if h is None or posterior.flat:
            continue
        sig = one.sig * factor
        away = deviation(posterior.original.detach(), posterior)
        value = -(float(torch.linalg.vector_norm(away, dtype=wide(away)) / sig) ** 2) / 2
        if one.weight is None:  # a joined bias is in its weight's eigenvalues
            holders = layout.size if layout is not None and isinstance(h, Kron) else 1  # of the same eigenvalues
            h = h.curvature() if isinstance(h, Kron) else h
            value -= float((h.to(wide(h)) + posterior.damping).mul_(sig * sig).log1p_().sum()) / 2 / holders
        group = None if layout is None else layout.group
        sums[group] = sums.get(group, 0.0) + value
    return sum(v if group is None else float(group.summed(torch.tensor(v))) for group, v in sums.items())


def check_evidence(fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood) -> None:
    """Raise where the evidence says nothing about the prior, or nothing about what samples do."""
    own = [part_of(one.posterior) for one in fitted if one.h is not None and not one.posterior.flat]
    if not any(bool(deviation(p.original.detach(), p).any()) for p in own):
        raise ValueError(
            "tune='marglik' weighs how far the weights are from the prior mean, and here they are the prior mean: the "
            "evidence would take the smallest scale; pass bayesify(..., prior_mean='zero') or the pretrained weights "
            "that training started from, or give validation batches"
        )
    spread_all(fitted, 1.0)
    closed = all(scope.method.closed_form(scope) is not None for scope in scopes_of(model))
    if not closed and not isinstance(likelihood, Regression):
        raise ValueError(
            "tune='marglik' is for regression and for a last layer (include=): the evidence is about the linear model, "
            "and sampled predictions of all weights can be far worse at its scale; give validation batches"
        )


def by_evidence(fitted: Sequence[Fitted]) -> float:
    """Return the factor of prior_sig with the largest evidence (MacKay 1992)."""
    base = typical_sig(fitted)
    weights = max(1, sum(one.posterior.shape.numel() for one in fitted if one.h is not None))
    best = least(lambda power: -log_evidence(fitted, 10**power / base) / weights, EVIDENCE_RANGE, CLOSED)
    if min(best - EVIDENCE_RANGE[0], EVIDENCE_RANGE[1] - best) < CLOSED[1]:
        logger.warning("the evidence grows up to the end of the range, prior_sig %.3g: is the model trained?", 10**best)
    logger.info("prior_sig %.4g has the largest evidence (was %.4g)", 10**best, base)
    return 10**best / base


def spread_all(fitted: Sequence[Fitted], factor: float) -> None:
    """Give the posteriors their variances for the prior's scales times a factor."""
    for one in fitted:
        one.spread(factor)


def typical_sig(fitted: Sequence[Fitted]) -> float:
    """Return the geometric mean of prior_sig over the parameters that have curvature."""
    sigs = [math.log(f.sig) for f in fitted if f.h is not None] or [math.log(f.sig) for f in fitted]
    return math.exp(sum(sigs) / len(sigs))
