"""Mean-field variational inference: a Gaussian per element, trained by the reparameterization trick."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import threads
from bayesify.methods.base import Method
from bayesify.noise import CHUNK
from bayesify.posteriors import (
    LOW_PRECISION,
    Factor,
    Posterior,
    Prior,
    axpy_,
    host,
    quadratic_energy,
    quadratic_pull,
    square_norm,
    state_dtype,
)

CLAMP_MIN = 1e-8


class Link(NamedTuple):
    """A positive link s = g(rho).

    Attributes:
        std: g, as a new tensor.
        inverse: The rho of an s.
        log_std: log s of (rho, s).
        slope_: Of (rho, s): the slope g'(rho), written over s.
        prior_slope_: Of (out, rho, s, a, c): out <- (out + a s - c/s) g'(rho) in place; s is scratch.
    """

    std: Callable[[Tensor], Tensor]
    inverse: Callable[[float], float]
    log_std: Callable[[Tensor, Tensor], Tensor]
    slope_: Callable[[Tensor, Tensor], Tensor]
    prior_slope_: Callable[[Tensor, Tensor, Tensor, Factor, Factor], Tensor]


def softplus(rho: Tensor) -> Tensor:
    """Return log(1 + exp(rho)); without gradients by numpy, whose log1p is many times faster than torch's."""
    wants_grad = torch.is_grad_enabled() and rho.requires_grad
    rho = rho if wants_grad else rho.detach()
    plain = type(rho) is Tensor and rho.device.type == "cpu" and rho.is_contiguous() and rho.dtype not in LOW_PRECISION
    if wants_grad or not plain or rho.numel() == 0 or float(rho.max()) > 20:
        return F.softplus(rho)
    # Never rho.numpy(): it forbids a tensor's memory to be resized, which sharded parameters need.
    s = torch.exp(rho)
    threads.run([partial(np.log1p, piece, out=piece) for piece in (t.numpy() for t in torch.split(s.view(-1), CHUNK))])
    return s


def _softplus_prior_slope_(out: Tensor, rho: Tensor, s: Tensor, a: Factor, c: Factor) -> Tensor:
    axpy_(out, s, a)
    axpy_(out, s.reciprocal_(), -c)
    return out.mul_(torch.sigmoid(rho, out=s))


def _exp_prior_slope_(out: Tensor, rho: Tensor, s: Tensor, a: Factor, c: Factor) -> Tensor:
    return axpy_(out, s, a).mul_(s).sub_(c)


def _clamp_prior_slope_(out: Tensor, rho: Tensor, s: Tensor, a: Factor, c: Factor) -> Tensor:
    axpy_(out, s, a)
    axpy_(out, s.reciprocal_(), -c)
    return out.masked_fill_(rho < CLAMP_MIN, 0)


LINKS = {
    "softplus": Link(
        std=softplus,
        inverse=lambda s: s + math.log(-math.expm1(-s)),
        log_std=lambda rho, s: s.log(),
        slope_=lambda rho, s: torch.sigmoid(rho, out=s),
        prior_slope_=_softplus_prior_slope_,
    ),
    "exp": Link(
        std=torch.exp,
        inverse=math.log,
        log_std=lambda rho, s: rho,
        slope_=lambda rho, s: s,
        prior_slope_=_exp_prior_slope_,
    ),
    "clamp": Link(
        std=lambda rho: rho.clamp(min=CLAMP_MIN),
        inverse=lambda s: max(s, CLAMP_MIN),
        log_std=lambda rho, s: s.log(),
        slope_=lambda rho, s: torch.ge(rho, CLAMP_MIN, out=s),
        prior_slope_=_clamp_prior_slope_,
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
        self._sums: Sums | None = None

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

    def draw(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Compute `theta` in the memory of s, whose sums are kept for the penalty of this training step."""
        s = LINKS[self.link].std(self.rho.detach())
        if self.training and not self.flat:
            self._sums = self._sums_of(self.rho.detach(), s)
        if mean.dtype != s.dtype:
            return torch.addcmul(mean.to(s.dtype), noise, s).to(mean.dtype)
        return torch.addcmul(mean, noise, s, out=s)

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)).

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        if self.flat:
            return mean.new_zeros((), dtype=torch.float64)
        sums = self._sums
        if sums is None or torch.is_grad_enabled() or sums.rho is not self.rho or sums.version != self.rho._version:
            sums = self._sums_of(self.rho, LINKS[self.link].std(self.rho))
        spread = sums.numel * (math.log(self.prior_sig) - 0.5) - sums.logs
        square = (math.sqrt(scale / 2) / self.prior_sig) ** 2 * sums.squares
        return quadratic_energy(mean, self, self.precision, scale) + square + scale * spread

    def _sums_of(self, rho: Tensor, s: Tensor) -> "Sums":
        """Return the sums over the elements that are random: of log s and of s^2."""
        logs = LINKS[self.link].log_std(rho, s)
        safe = 1e-15 < self.prior_sig < 1e15  # else s may be so small that its square is none in float32
        cheap = safe and s.dtype == torch.float32 and not s.requires_grad
        squares = square_norm(s) if cheap else s.double().square().sum()
        count, total = rho.numel(), logs.sum().double()
        if self.fixed_row is not None:
            row = s[self.fixed_row]
            count, total = count - row.numel(), total - logs[self.fixed_row].sum()
            squares = squares - row.double().square().sum()
        return Sums(self.rho, self.rho._version, count, total, squares)

    @property
    def precision(self) -> float:
        """1/sigma^2."""
        return 1 / self.prior_sig / self.prior_sig

    def pullback(
        self, mean: Tensor, noise: Tensor | None, grad: Tensor | None, coef: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients for m and rho.

        m: grad + coef (m - theta0)/sigma^2; rho: (grad * eps + coef (s/sigma^2 - 1/s)) * ds/drho.
        """
        grad_mean = quadratic_pull(mean, self, self.precision, grad, coef)
        rho, link = self.rho.detach(), LINKS[self.link]
        out = torch.zeros_like(rho) if grad is None or noise is None else noise.mul_(grad)
        if coef is None or self.flat:
            return grad_mean, out.mul_(link.slope_(rho, link.std(rho)))
        c = host(coef)
        link.prior_slope_(out, rho, link.std(rho), c * self.precision, c)
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return grad_mean, out


class Sums(NamedTuple):
    """Sums over a posterior's s, with the rho that they belong to and its version then."""

    rho: Tensor
    version: int
    numel: int
    logs: Tensor
    squares: Tensor
