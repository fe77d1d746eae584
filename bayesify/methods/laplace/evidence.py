"""What curvature says without another pass: the Laplace evidence of the prior's scale, and a regression's noise."""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.core.distributed import on_shard, over_processes, part_of
from bayesify.core.prior import deviation, wide
from bayesify.methods.laplace.method import Kron, LaplacePosterior
from bayesify.prediction.likelihoods import Regression

logger = logging.getLogger("bayesify")

WEAK = 80.0  # standard deviations of the targets: how far functions from the widest prior vary on the data
DOSE = 0.4  # nats per example that a wider prior may cost in evidence
SHARE = 0.1  # of the examples, which weights without their correlations may follow
WIDTHS = tuple(10 ** (-k / 6) for k in range(37))  # of the widest prior, down to 1e-6
GIVE_UP = 1.0  # nats below the largest evidence, from where narrower priors are not tried
LEAST_FREE = 0.02  # of the examples, which count as free however many weights the data decides
ROUNDS = 8  # of noise and prior in turn


class Fitted(NamedTuple):
    """A parameter with its curvature."""

    posterior: LaplacePosterior
    h: Tensor | Kron | None  # by element (of a sharded parameter this process's rows) or in factors; None without any
    weight: LaplacePosterior | None = None  # of a bias that is one Gaussian with its weight, whose prior counts

    @property
    def sig(self) -> float:
        """The prior's scale."""
        return (self.posterior if self.weight is None else self.weight).prior_sig

    @property
    def values(self) -> Tensor | None:
        """The curvature in its eigenbases; None where there is none, and for a bias that is in its weight's."""
        return None if self.weight is not None else self.h.curvature() if isinstance(self.h, Kron) else self.h

    def scaled(self, ratio: float) -> "Fitted":
        """Return the parameter with its curvature times a ratio."""
        if isinstance(self.h, Kron):
            return self._replace(h=self.h._replace(left_values=self.h.left_values * ratio))
        return self._replace(h=None if self.h is None else self.h * ratio)

    def spread(self, factor: float) -> None:
        """Give the posterior its variances for the prior's scale times `factor`."""
        with on_shard(self.posterior) as own:
            own.fit(self.h, self.sig * factor, "" if self.weight is None else self.weight.name)


def spread_all(fitted: Sequence[Fitted], factor: float) -> None:
    """Give the posteriors their variances for the prior's scales times a factor."""
    for one in fitted:
        one.spread(factor)


def typical_sig(fitted: Sequence[Fitted]) -> float:
    """Return the geometric mean of prior_sig over the parameters that have curvature."""
    sigs = [math.log(f.sig) for f in fitted if f.h is not None] or [math.log(f.sig) for f in fitted]
    return math.exp(sum(sigs) / len(sigs))


def log_evidence(fitted: Sequence[Fitted], factor: float) -> float:
    """Return the part of the Laplace log-evidence that depends on the prior's scale.

    sum over elements of -(theta* - theta0)^2/(2 sigma^2) - 1/2 log(1 + sigma^2 (h + damping)), where h is the
    curvature, of Kronecker factors in their eigenbases, and sigma the prior's scale times `factor`. Flat priors and
    parameters without curvature have no part in it.
    """
    found = []
    for one in fitted:
        posterior, values, layout = part_of(one.posterior), one.values, one.posterior.layout
        if one.h is None or posterior.flat:
            continue
        sig = one.sig * factor
        away = deviation(posterior.original.detach(), posterior)
        value = -(float(torch.linalg.vector_norm(away, dtype=wide(away)) / sig) ** 2) / 2
        if values is not None:
            holders = layout.size if layout is not None and isinstance(one.h, Kron) else 1  # of the same eigenvalues
            value -= float((values.to(wide(values)) + posterior.damping).mul_(sig * sig).log1p_().sum()) / 2 / holders
        found.append((one.posterior, torch.tensor(value, dtype=torch.float64)))
    return float(over_processes(found)) if found else 0.0


def settle(
    fitted: Sequence[Fitted], likelihood: Regression, examples: float, *, wide: bool, power: int
) -> tuple[list[Fitted], float]:
    """Estimate a regression's noise, unless it is known, and choose the prior's scale.

    Residuals of the training data are too small, as if the noise were less, by the number of weights that the data
    decides. With gamma = sum h/(h + 1/sigma^2) such weights, shared evenly by the outputs, the variance is the mean of
    its posterior, RSS/(N - gamma/K - 2). The curvature goes with v^-power: 1 for Gauss-Newton, 2 for the empirical
    Fisher. Return the parameters with their curvature for that noise, and the prior's scale over `prior_sig`: that of
    `widest` if it is to be `wide`.
    """
    rows, factor, free = list(fitted), 1.0, 1.0
    if any(f.posterior.layout is not None for f in rows):
        return rows, factor  # each process has rows of its own
    for _ in range(ROUNDS):
        factor = widest(rows, likelihood, examples) if wide else 1.0
        if not likelihood.estimated:
            break
        known = _variances(likelihood)
        free = 1 - (effective_weights(rows, factor) / len(known) + 2) / examples
        found = likelihood.residuals.squares / likelihood.residuals.count / max(free, LEAST_FREE)
        likelihood.noise_var = tuple(found.tolist()) if len(found) > 1 else float(found)  # type: ignore[union-attr, arg-type]
        ratio = float((found / known).mean())
        rows = [f.scaled(ratio**-power) for f in rows]
        if abs(ratio - 1) < 1e-3:
            break
    if free < LEAST_FREE:
        logger.warning(
            "the weights follow %.0f of %.0f examples, so that the residuals say little about the noise; fit it to "
            "held-out data and pass likelihood=Regression(noise_var)",
            (1 - free) * examples - 2,
            examples,
        )
    logger.info("noise variance %s, prior scale times %.3g", likelihood.noise_var, factor)
    return rows, factor


def effective_weights(fitted: Sequence[Fitted], factor: float) -> float:
    """Return gamma = sum h/(h + 1/sigma^2): how many weights the data decides."""
    gamma = 0.0
    for one in fitted:
        if (values := one.values) is not None:
            h = values.cpu().double()
            ridge = 0.0 if one.posterior.flat else 1 / (one.sig * factor) ** 2
            gamma += float((h / (h + ridge + one.posterior.damping).clamp_min(1e-300)).sum())
    return gamma


def widest(fitted: Sequence[Fitted], likelihood: Regression, examples: float) -> float:
    """Return the factor of the widest prior that the evidence allows.

    Its functions vary at most `WEAK` times as much as the targets, and its evidence is within `DOSE` nats per example
    of the largest; where the prior mean is the trained weights themselves, the evidence is that of a prior around zero.
    Both constants were chosen on a noisy sine with a gap, such that the truth is inside the intervals far from the data
    too. A diagonal, whose weights know nothing of each other, follows at most `SHARE` of the data.
    """
    own = [f for f in fitted if f.h is not None and not f.posterior.flat]
    curved = [(values, f.sig) for f in own if (values := f.values) is not None]
    spread = sum(float(values.double().sum()) * sig**2 for values, sig in curved)  # of f/sqrt(v), summed over the data
    sums = likelihood.residuals
    known = isinstance(sums.scatter, Tensor)
    size = float((sums.scatter / sums.count / _variances(likelihood)).sum()) * examples if known else 0.0
    if not (spread > 0 and size > 0):
        return 1.0
    limit = WEAK * math.sqrt(size / spread)
    still = all(torch.equal(f.posterior.original, f.posterior.prior_mean.to(f.posterior.original)) for f in own)
    weights = sum(values.numel() for values, _ in curved) if still else 0
    tried: dict[float, float] = {}
    for factor in (limit * width for width in WIDTHS):
        # A relative scale is a weight's own size: around zero, each weight is one scale away.
        tried[factor] = log_evidence(own, factor) - weights / (2 * factor**2)
        if tried[factor] < max(tried.values()) - GIVE_UP:
            break  # beyond the largest
    enough = max(tried.values()) - DOSE * examples
    found = next(factor for factor, value in tried.items() if value >= enough)
    alone, most = [f for f in own if not isinstance(f.h, Kron)], SHARE * examples * max(sums.outputs, 1)
    while found > limit * WIDTHS[-1] and effective_weights(alone, found) > most:
        found *= WIDTHS[1]
    return found


def _variances(likelihood: Regression) -> Tensor:
    """Return the present variance of each output."""
    return torch.tensor(likelihood.noise_var, dtype=torch.float64).expand(max(likelihood.residuals.outputs, 1))
