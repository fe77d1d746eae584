"""A posterior that is a Gaussian of stored moments: nothing to sample until something has computed them.

While training, reads see the parameter itself. The moments exist together or not at all, so that they cost no memory
before they are needed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.core.posterior import Posterior
from bayesify.core.prior import Energy, Factor, following, quadratic_pull, quadratic_terms, state_dtype
from bayesify.core.stored import CENTER, Kept
from bayesify.engine.dispatch import run
from bayesify.engine.writing import Formula


def gaussian(eps: Any, center: Any, std: Any) -> Any:
    """Return center + eps * std."""
    return center + eps * std


def collected(x: Any, average: Any, scatter: Any, rate: Any, keep: Any, add: Any) -> Any:
    """Return mean and scatter after one more state (Welford's recurrence)."""
    away = x - average
    return average + rate * away, keep * scatter + add * (away * away)


class NotReadyError(ValueError, RuntimeError):
    """A posterior that cannot be sampled yet."""


class QuadraticPosterior(Posterior):
    """A posterior whose penalty is precision/2 |m - theta0|^2, and whose sample has the gradient of the parameter."""

    @property
    def precision(self) -> float:
        """1/sigma^2, the curvature of the energy."""
        return 1 / self.prior_sig / self.prior_sig

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return precision/2 |m - theta0|^2."""
        return quadratic_terms(mean, self, self.precision, scale)

    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at theta, as it is."""
        return (grad,)

    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> tuple[Tensor | None, ...]:
        """Return (coef precision + pull/sigma^2) (m - theta0)."""
        return (quadratic_pull(mean, self, coef * self.precision + pull / self.prior_sig / self.prior_sig),)


class MomentsPosterior(QuadraticPosterior):
    """theta = mean + std * eps with eps ~ N(0, 1), once there are moments.

    A subclass names its tensors in `kept` and gives `ready`, `own_std`, `mean_theta` and `missing`.
    """

    stochastic = False
    gaussian = True
    draws_on_shards = True
    missing: ClassVar[str]  # what the error says before there are moments, with the way out

    @property
    def ready(self) -> bool:
        """Whether there are moments."""
        raise NotImplementedError

    def check_ready(self) -> None:
        """Raise before there are moments."""
        if not self.ready:
            raise NotReadyError(f"{self.name!r} cannot be sampled yet: {self.missing}")

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return center + std * eps; its gradient passes to the parameter as it is."""
        return gaussian, (self.mean_theta(mean), self.own_std)


class CollectedPosterior(MomentsPosterior):
    """The Gaussian of states that training passes through; the parameter before there are any.

    Tensors: `count`, how many there were; `average`, their mean; `scatter`, the sum of their squared deviations.
    """

    kept = Posterior.kept | {"count": Kept("count"), "average": Kept(), "scatter": Kept(positive=True)}

    count: Tensor | None
    average: Tensor | None
    scatter: Tensor | None

    @property
    def ready(self) -> bool:
        """Whether there was a state."""
        return self.count is not None

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the states' mean, or the parameter before there are any; the gradient passes to the parameter."""
        return original if self.average is None else following(self.average.to(original.dtype), original)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's present value to the moments (Welford's recurrence).

        n <- n + 1; d = theta - average; average <- average + d/n; scatter <- scatter + (n-1)/n d^2.
        """
        theta = self.original.detach()
        theta = theta.to(state_dtype(theta))
        if self.count is None or self.average is None or self.scatter is None:
            self.count = torch.ones((), dtype=torch.int64, device=theta.device)
            self.average = theta.clone(memory_format=torch.contiguous_format)
            self.scatter = torch.zeros_like(self.average)
            return
        moments = (self.average, self.scatter)
        run(collected, None, (theta, *moments, *self.recurrence(int(self.count.add_(1)))), moments)

    def recurrence(self, n: int) -> tuple[float, float, float]:
        """Return the factors of the n-th value: of d, of the scatter so far and of d^2."""
        return 1 / n, 1.0, (n - 1) / n

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise unless these tensors can be the state of this posterior, with all moments or none."""
        super().check_state(state)
        missing = self.kept.keys() - state.keys()
        if missing and missing != self.kept.keys() - {CENTER}:
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
