"""A posterior that is a Gaussian of stored moments: nothing to sample until something has computed them.

While training, reads see the parameter itself. The moments exist together or not at all, so that they cost no memory
before they are needed.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.core import distributed as shards
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Energy, Factor, quadratic_pull, quadratic_terms, state_dtype
from bayesify.core.stored import CENTER
from bayesify.engine.writing import Formula


def gaussian(eps: Any, center: Any, std: Any) -> Any:
    """Return center + eps * std."""
    return center + eps * std


def collected(x: Any, average: Any, scatter: Any, rate: Any, keep: Any, add: Any) -> Any:
    """Return mean and scatter after one more state (Welford's recurrence)."""
    away = x - average
    return average + rate * away, keep * scatter + add * (away * away)


COUNT = "count"  # of what moments were made of, where a posterior has one


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

    A subclass names its tensors in `moments` and gives `own_std`, `mean_theta` and what is missing before they exist.
    """

    stochastic = False
    gaussian = True
    draws_on_shards = True
    moments: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kept = (*cls.kept, *(name for name in cls.moments if name not in cls.kept))

    missing: ClassVar[str]
    """What the error says before there are moments, with the way out."""

    @property
    def ready(self) -> bool:
        """Whether there are moments."""
        return getattr(self, self.moments[0]) is not None

    def check_ready(self) -> None:
        """Raise before there are moments."""
        if not self.ready:
            raise NotReadyError(f"{self.name!r} cannot be sampled yet: {self.missing}")

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return center + std * eps; its gradient passes to the parameter as it is."""
        return gaussian, (self.mean_theta(mean), self.own_std)

    def stored(self) -> dict[str, Tensor]:
        """Return the kept tensors for a state dict; of a sharded model, room for moments to come as well.

        A distributed checkpoint is loaded into the tensors of a state dict: what has no place there would be lost.
        """
        held = super().stored()
        return held if self.layout is None or held.keys() != {CENTER} else {**held, **self.room()}

    def room(self) -> dict[str, Tensor]:
        """Return the tensors of moments that were made of nothing."""
        assert self.layout is not None
        own = shards.part_of(self).original
        return {
            name: own.new_zeros((), dtype=torch.int64)
            if name == COUNT
            else self.layout.joined(torch.zeros_like(own, dtype=state_dtype(own), requires_grad=False))
            for name in self.moments
        }

    def is_room(self) -> bool:
        """Tell whether the moments were made of nothing."""
        count = getattr(self, COUNT, None)
        return count is not None and int(count) == 0

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.is_room():
            self._forget_moments()

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise unless these tensors can be the state of this posterior, with all moments or none."""
        super().check_state(state)
        missing = [name for name in self.moments if name not in state]
        if 0 < len(missing) < len(self.moments):
            raise ValueError(f"{', '.join(missing)} is missing")

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state()`; moments that it lacks are forgotten."""
        self._forget_moments()
        super().load_state(state)

    def _forget_moments(self) -> None:
        for name in self.kept:
            if name != CENTER:
                setattr(self, name, None)


class CollectedPosterior(MomentsPosterior):
    """The Gaussian of states that training passes through; the parameter before there are any.

    Tensors: `count`, how many there were; `average`, their mean; `scatter`, the sum of their squared deviations.
    """

    moments: ClassVar[tuple[str, ...]] = (COUNT, "average", "scatter")

    count: Tensor | None
    average: Tensor | None
    scatter: Tensor | None

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the states' mean, or the parameter before there are any; the gradient passes to the parameter."""
        if self.average is None:
            return original
        center = self.average.to(original.dtype)
        if torch.is_grad_enabled() and original.requires_grad:
            center = center + (original - original.detach())
        return center

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless the count is a positive integer and the scatter not negative."""
        if name == COUNT:
            if tensor.dim() or tensor.dtype != torch.int64 or int(tensor) < 1:
                raise ValueError("count is not a positive integer")
            return
        super().check_tensor(name, tensor)
        if name == "scatter" and bool((tensor < 0).any()):
            raise ValueError("scatter is negative")
