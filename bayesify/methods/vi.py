"""Mean-field variational inference: a Gaussian per element, trained by the reparameterization trick."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.methods.base import Method
from bayesify.posteriors import (
    Posterior,
    Prior,
    host,
    quadratic_energy,
    quadratic_pull,
    state_dtype,
    sum_of_squares,
    times,
)

CLAMP_MIN = 1e-8


class Link(NamedTuple):
    """A positive link s = g(rho), with its slope and its inverse."""

    std: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # of (rho, s); may return a new tensor only
    log_std: Callable[[Tensor, Tensor], Tensor]
    inverse: Callable[[float], float]


LINKS = {
    "softplus": Link(
        F.softplus,
        lambda rho, s: torch.sigmoid(rho),
        lambda rho, s: s.log(),
        lambda s: s + math.log(-math.expm1(-s)),
    ),
    "exp": Link(torch.exp, lambda rho, s: s, lambda rho, s: rho, math.log),
    "clamp": Link(
        lambda rho: rho.clamp(min=CLAMP_MIN),
        lambda rho, s: (rho >= CLAMP_MIN).to(rho.dtype),
        lambda rho, s: s.log(),
        lambda s: max(s, CLAMP_MIN),
    ),
}


@dataclass(frozen=True, kw_only=True)
class VI(Method):
    """Options of "vi".

    Attributes:
        link: How the free parameter rho becomes s > 0: "softplus", "exp", or "clamp" (max(rho, 1e-8)).
        init_sig: Where s starts; None is min(1e-3, prior_sig/10).
        kld: Factor of the KL term.
        bias: "informative" treats biases as the weights; "uninformative" drops their KL term.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "vi"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")

    link: str = "softplus"
    init_sig: float | None = None
    kld: float = 1.0
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.link not in LINKS:
            raise ValueError(f"link must be one of {list(LINKS)}, got {self.link!r}")
        if self.init_sig is not None:
            self.check("init_sig", above=0)
        self.check("kld", least=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the Gaussian posterior of one parameter, N(param, init_sig^2) at first."""
        init_sig = min(1e-3, prior.sig / 10) if self.init_sig is None else self.init_sig
        flat = prior.is_bias and self.bias == "uninformative"
        _warn_if_drowned(param, init_sig)
        return VIPosterior(param, prior, flat=flat, fixed_row=fixed_row, link=self.link, init_sig=init_sig)

    def scale(self, num_data: float) -> float:
        """Return kld/N."""
        return self.kld / num_data


def _warn_if_drowned(param: Tensor, init_sig: float) -> None:
    """Warn where most elements are so large that adding s * eps rounds back to them."""
    step = torch.finfo(param.dtype).eps  # the spacing of the numbers between 1 and 2
    drowned = torch.count_nonzero(param.detach().abs() > 4 * init_sig / step)
    if drowned > param.numel() / 2:
        warnings.warn(
            f"s = {init_sig:g} is under a quarter of the rounding step of {param.dtype} weights, so most samples equal "
            "the mean; keep the weights in float32 (torch.autocast may compute in less), or raise init_sig",
            stacklevel=4,
        )


class VIPosterior(Posterior):
    """theta = m + eps * s with s = g(rho) and eps ~ N(0, 1)."""

    def __init__(
        self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, link: str, init_sig: float
    ) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.link = link
        rho = LINKS[link].inverse(init_sig)
        self.rho = nn.Parameter(torch.full_like(param, rho, dtype=state_dtype(param), requires_grad=True))

    @property
    def std(self) -> Tensor:
        """The posterior's s = g(rho)."""
        std = LINKS[self.link].std(self.rho.detach())
        if self.fixed_row is not None:
            std = std.clone()
            std[self.fixed_row] = 0
        return std

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return rho."""
        return (self.rho,)

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return m + eps * g(rho)."""
        return torch.addcmul(mean.to(noise.dtype), noise, LINKS[self.link].std(self.rho)).to(mean.dtype)

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)).

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        if self.flat:
            return mean.new_zeros((), dtype=torch.float64)
        total = quadratic_energy(mean, self, self.precision, scale) + self._spread_energy(self.rho, scale)
        return total if self.fixed_row is None else total - self._spread_energy(self.rho[self.fixed_row], scale)

    @property
    def precision(self) -> float:
        """1/sigma^2."""
        return 1 / self.prior_sig / self.prior_sig

    def _spread_energy(self, rho: Tensor, scale: float) -> Tensor:
        """Return scale * sum (log sigma - log s - 1/2 + s^2/(2 sigma^2))."""
        link = LINKS[self.link]
        s = link.std(rho)
        square = sum_of_squares(s, math.sqrt(scale / 2) / self.prior_sig)
        logs = link.log_std(rho, s).sum(dtype=torch.float64)
        return square + scale * ((math.log(self.prior_sig) - 0.5) * rho.numel() - logs)

    def pullback(
        self, mean: Tensor, noise: Tensor | None, grad: Tensor | None, coef: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients for m and rho.

        m: grad + coef (m - theta0)/sigma^2; rho: (grad * eps + coef (s/sigma^2 - 1/s)) * ds/drho.
        """
        grad_mean = quadratic_pull(mean, self, self.precision, grad, coef)
        link = LINKS[self.link]
        s = link.std(self.rho.detach())
        out = None if grad is None or noise is None else noise.mul_(grad)
        if coef is not None and not self.flat:
            factor = host(coef)
            prior = times(s, factor * self.precision).sub_(s.reciprocal().mul_(factor))
            if self.fixed_row is not None:
                prior[self.fixed_row] = 0
            out = prior if out is None else out.add_(prior)
        if out is not None:
            out = out.mul_(link.slope(self.rho.detach(), s))
        return grad_mean, out
