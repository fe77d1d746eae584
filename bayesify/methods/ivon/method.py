"""IVON: variational inference by an online Newton method, at about the cost of Adam.

The optimizer (`bayesify.IVON`) keeps the curvature h where Adam keeps squared gradients, and the posterior's spread
follows from it: no parameter for the spread, no second gradient, no array of noise.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.core.distributed import part
from bayesify.core.method import Tempered
from bayesify.core.moments import gaussian
from bayesify.core.posterior import Posterior
from bayesify.core.prior import LEAST_CHANGE, START, Energy, Factor, Part, Prior, scaled, squares, state_dtype
from bayesify.engine.writing import Formula


@dataclass(frozen=True, kw_only=True)
class IVON(Tempered):
    """Options of "ivon".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower. None
            is 1, or by the number of weights where `prior_sig` is None.
        init_sig: The spread before the first steps; None is min(1e-3, prior_sig/10), or START of the prior's scale
            where `prior_sig` is None.
        bias: "informative" treats biases as the weights.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "ivon"
    tempers: ClassVar[str] = "Ninflate"
    optimizer: ClassVar[str] = "IVON"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative",)

    Ninflate: float | None = None
    init_sig: float | None = None
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", "init_sig", above=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the Gaussian posterior of one parameter, N(param, init_sig^2) at first."""
        start = START * prior.sig if prior.relative else min(1e-3, prior.sig / 10)
        return IVONPosterior(param, prior, fixed_row=fixed_row, init_sig=self.init_sig or start)


class IVONPosterior(Posterior):
    """theta = m + s eps with s^2 = 1/(lambda (h + delta)), lambda = N Ninflate and delta = 1/(lambda sigma^2).

    The tensor `h` is there once an optimizer is; before it s is `init_sig`.
    """

    gaussian = True
    kept = (*Posterior.kept, "h")
    draws_on_shards = True  # one theta per optimizer step, on all processes
    results = ("strength",)
    strength: float | None = None
    """lambda, which the optimizer knows."""
    h: Tensor | None

    def __init__(self, param: Tensor, prior: Prior, *, fixed_row: int | None, init_sig: float) -> None:
        super().__init__(param, prior, fixed_row=fixed_row)
        self.init_sig = init_sig

    @property
    def delta(self) -> float:
        """1/(lambda sigma^2): the prior's curvature, in units of the mean loss."""
        assert self.strength is not None
        return 1 / (self.strength * self.prior_sig**2)

    def begin(self, strength: float) -> None:
        """Take over lambda, and the curvature that the present spread stands for: h = 1/(lambda s^2) - delta."""
        if self.h is not None and self.strength == strength:
            return  # a run that goes on
        s = self.spread()  # also of a fixed row, whose standard deviation is 0
        self.strength = strength
        if self.h is None:
            value = max(1 / (strength * self.init_sig**2) - self.delta, 0.0)
            self.h = torch.full(self.shape, value, dtype=state_dtype(self.original), device=self.original.device)
        else:
            self.h = (1 / (strength * s.square()) - self.delta).clamp_(min=0)

    def spread(self) -> Tensor:
        """Return s = 1/sqrt(lambda (h + delta))."""
        if self.h is None or self.strength is None:
            return torch.full(self.shape, self.init_sig, dtype=state_dtype(self.original), device=self.original.device)
        return (self.h + self.delta).mul_(self.strength).rsqrt_()

    @property
    def own_std(self) -> Tensor:
        """The spread s; 0 in a fixed row."""
        s = self.spread()
        if self.fixed_row is not None:
            s[self.fixed_row] = 0
        return s

    @property
    def untrained(self) -> str:
        """Whether the curvature is where it started."""
        if self.h is not None and self.strength is not None and self.h.numel():
            ends = torch.stack(torch.aminmax(part(self.h)))
            s = (ends + self.delta).mul_(self.strength).rsqrt_() / self.init_sig
            if not bool(((s > 1 - LEAST_CHANGE) & (s < 1 + LEAST_CHANGE)).all()):
                return ""
        return "the optimizer bayesify.IVON, which alone finds it, has made too few steps or none"

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return m + s eps; its gradient passes to the mean as it is."""
        if self.h is None or self.strength is None:
            return gaussian, (mean, self.init_sig)
        return draw, (mean, self.h, self.strength, self.delta)

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)), without a gradient: the optimizer's step has the prior.

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        if self.strength is not None and not math.isclose(scale * self.strength, 1, rel_tol=1e-6):
            raise ValueError(
                f"the optimizer IVON counts {self.strength * scale:.6g} times the data that penalty does; give both "
                "the same num_data, the size of the training set"
            )
        mean, strength = mean.detach(), 1.0 if self.strength is None else self.strength
        begun = self.h is not None and self.strength is not None
        h = self.h if begun else torch.full_like(mean, 1 / self.init_sig**2, dtype=state_dtype(mean))
        assert h is not None
        delta, inverse, count = self.delta if begun else 0.0, 1 / self.prior_sig, mean.numel()
        spread = scale / 2 * inverse**2 / strength
        inputs = (*scaled((mean, h, self.center), inverse), delta, inverse)
        parts = [Part(terms, inputs, (scale / 2, spread, scale / 2))]
        if self.fixed_row is not None:
            row = h[self.fixed_row]
            count -= row.numel()
            parts.append(Part(variances, (row, delta), (-spread, -scale / 2)))
        return Energy(
            tuple(parts), scale * count * (math.log(self.prior_sig * math.sqrt(strength)) - 0.5), self.prior_sig
        )

    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at theta, as it is."""
        return (grad,)

    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> tuple[Tensor | None, ...]:
        """Return nothing: the optimizer's step has the prior."""
        return (None,)

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless the curvature is not negative beyond the prior's."""
        super().check_tensor(name, tensor)
        if name == "h" and bool((tensor < 0).any()):
            raise ValueError("h is negative")

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over the tensors of `state()`; a curvature that it lacks is forgotten."""
        self.h = None
        super().load_state(state)


def draw(eps: Any, m: Any, h: Any, strength: Any, delta: Any) -> Any:
    """Return m + eps/sqrt(lambda (h + delta))."""
    return m + eps * torch.rsqrt(strength * (h + delta))


def variances(h: Any, delta: Any) -> Any:
    """Return 1/(h + delta) and log(h + delta)."""
    return 1 / (h + delta), torch.log(h + delta)


def terms(m: Any, h: Any, m0: Any, delta: Any, inverse: Any) -> Any:
    """Return ((m - theta0)/sigma)^2, 1/(h + delta) and log(h + delta)."""
    return squares(m, m0, inverse), *variances(h, delta)
