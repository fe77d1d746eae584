"""Mean-field variational inference: a Gaussian per element, trained by the reparameterization trick."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.blocks import blocks, blockwise, scratch
from bayesify.methods.base import Method
from bayesify.posteriors import (
    Factor,
    Posterior,
    Prior,
    axpy_,
    host,
    quadratic_energy,
    quadratic_pull,
    state_dtype,
)

CLAMP_MIN = 1e-8
EXP_MAX = 80.0  # exp of more leaves float32


class Link(NamedTuple):
    """A positive link s = g(rho), and the same for blocks without gradients, in given memory.

    Attributes:
        std: g.
        slope: g', of (rho, s).
        log_std: log s, of (rho, s).
        inverse: The rho of an s.
        block_std: g, of (rho, out); in `out`, or rho itself where it is s already.
        block_slope: g', of (rho, s, out), or None where it is 1 everywhere.
        block_log: The sum of log s, of (rho, s, scratch).
    """

    std: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    log_std: Callable[[Tensor, Tensor], Tensor]
    inverse: Callable[[float], float]
    block_std: Callable[[Tensor, Tensor], Tensor]
    block_slope: Callable[[Tensor, Tensor, Tensor], Tensor | None]
    block_log: Callable[[Tensor, Tensor, Tensor], Tensor]


def _block_softplus(rho: Tensor, out: Tensor) -> Tensor:
    """Return log(1 + exp(rho)): faster than torch's own, which looks at every element's size."""
    if rho.amax() < EXP_MAX:
        return torch.log1p(torch.exp(rho, out=out), out=out)
    return F.softplus(rho, out=out)  # type: ignore[call-arg]


def _clamp(rho: Tensor) -> Tensor:
    """Return max(rho, 1e-8) with slope 1 on either side: a spread that fell to the floor must be able to rise again."""
    return torch.where(rho < CLAMP_MIN, CLAMP_MIN + (rho - rho.detach()), rho)


def _block_clamp(rho: Tensor, out: Tensor) -> Tensor:
    """Return max(rho, 1e-8); no pass is needed where all of rho is above."""
    return rho if rho.amin() >= CLAMP_MIN else torch.clamp(rho, min=CLAMP_MIN, out=out)


def _block_sum_log(rho: Tensor, s: Tensor, scratch: Tensor) -> Tensor:
    """Return the sum of log s; of many by the logs of products of four, where float32 holds these."""
    quarter = s.numel() // 4
    if quarter > 1000:
        product = torch.prod(s[: 4 * quarter].view(4, quarter), dim=0)
        if product.amin() > 1e-37 and product.amax() < torch.inf:
            return product.log_().sum() + s[4 * quarter :].log().sum()
    return torch.log(s, out=scratch).sum()  # s = 0 is a point, with an infinite penalty


LINKS = {
    "softplus": Link(
        std=F.softplus,
        slope=lambda rho, s: torch.sigmoid(rho),
        log_std=lambda rho, s: s.log(),
        inverse=lambda s: s + math.log(-math.expm1(-s)),
        block_std=_block_softplus,
        block_slope=lambda rho, s, out: torch.sigmoid(rho, out=out),
        block_log=_block_sum_log,
    ),
    "exp": Link(
        std=torch.exp,
        slope=lambda rho, s: s,
        log_std=lambda rho, s: rho,
        inverse=math.log,
        block_std=lambda rho, out: torch.exp(rho, out=out),
        block_slope=lambda rho, s, out: s,
        block_log=lambda rho, s, scratch: rho.sum(),
    ),
    "clamp": Link(
        std=_clamp,
        slope=lambda rho, s: torch.ones_like(rho),
        log_std=lambda rho, s: s.log(),
        inverse=lambda s: max(s, CLAMP_MIN),
        block_std=_block_clamp,
        block_slope=lambda rho, s, out: None,
        block_log=_block_sum_log,
    ),
}


@dataclass(frozen=True, kw_only=True)
class VI(Method):
    """Options of "vi".

    Attributes:
        link: How the free parameter rho becomes s > 0: "softplus", "exp", or "clamp" (max(rho, 1e-8), whose
            gradient passes through).
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
    limit = 4 * init_sig / torch.finfo(param.dtype).eps  # eps is the spacing of the numbers between 1 and 2
    if not param.numel():
        return
    least, most = torch.aminmax(param.detach())
    if max(-least, most) <= limit:
        return
    if torch.count_nonzero(param.detach().abs() > limit) > param.numel() / 2:
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

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes over: not the sums, which belong to this rho."""
        return {**self.__dict__, "_sums": None}

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
        """Compute `theta` and, in training, the sums over s that the penalty of this step needs."""
        rho, link = self.rho.detach(), LINKS[self.link]
        keep = self.training and not self.flat
        if not (blockwise(mean, rho, noise) and self._ordinary(1.0)):
            s = link.std(rho)
            self._sums = self._sums_of(rho, s) if keep else None
            return torch.addcmul(mean.to(s.dtype), noise, s).to(mean.dtype)
        theta = torch.empty_like(mean, requires_grad=False)
        logs: list[Tensor] = []
        squares: list[Tensor] = []

        def kernel(m: Tensor, r: Tensor, eps: Tensor, out: Tensor) -> None:
            s = link.block_std(r, scratch(r))
            if keep:
                logs.append(link.block_log(r, s, out))
                squares.append(torch.mul(s, s, out=out).sum())
            torch.addcmul(m, eps, s, out=out)

        blocks(kernel, mean, rho, noise, theta)
        if keep:
            self._sums = self._sums_without_row(rho, rho.numel(), math.fsum(logs), math.fsum(squares))
        return theta

    def _ordinary(self, coef: float) -> bool:
        """Tell whether float32 holds everything on the way: the prior's scale and the factors of its gradient."""
        return 1e-15 < self.prior_sig < 1e15 and 1e-30 < abs(coef) < 1e30 and 1e-30 < abs(coef) * self.precision < 1e30

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
        return self._sums_without_row(rho, rho.numel(), logs.double().sum(), s.double().square().sum())

    def _sums_without_row(self, rho: Tensor, numel: int, logs: Factor, squares: Factor) -> "Sums":
        """Take the fixed row, which is not random, away from sums over all elements."""
        if self.fixed_row is not None:
            row = rho[self.fixed_row]
            s = LINKS[self.link].std(row)
            numel -= row.numel()
            logs = logs - LINKS[self.link].log_std(row, s).double().sum()
            squares = squares - s.double().square().sum()
        return Sums(self.rho, self.rho._version, numel, logs, squares)

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
        factor = None if coef is None or self.flat else host(coef)
        if grad is not None and noise is not None and isinstance(factor, float) and self._ordinary(factor):
            grad = grad.contiguous()
            center = () if self.prior_center.dim() == 0 else (self.prior_center,)
            if blockwise(mean, self.rho, noise, grad, *center):
                return self._block_pullback(mean, noise, grad, factor, center)
        rho, link = self.rho.detach(), LINKS[self.link]
        s = link.std(rho)
        out = torch.zeros_like(rho) if grad is None or noise is None else noise * grad
        if factor is not None:
            axpy_(out, s, factor * self.precision)
            axpy_(out, s.reciprocal(), -factor)
        out *= link.slope(rho, s)
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return quadratic_pull(mean, self, self.precision, grad, coef), out

    def _block_pullback(
        self, mean: Tensor, noise: Tensor, grad: Tensor, c: float, center: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Compute `pullback` block by block; the gradient of rho takes the memory of the noise."""
        link, factor = LINKS[self.link], c * self.precision
        constant = 0.0 if center else float(self.prior_center)
        grad_mean, one = torch.empty_like(mean, requires_grad=False), mean.new_ones(())

        def kernel(m: Tensor, r: Tensor, eps: Tensor, g: Tensor, out: Tensor, *theta0: Tensor) -> None:
            s = link.block_std(r, scratch(r))
            eps.mul_(g).add_(s, alpha=factor).addcdiv_(one, s, value=-c)
            slope = link.block_slope(r, s, out)
            if slope is not None:
                eps.mul_(slope)
            away = torch.sub(m, theta0[0] if theta0 else constant, out=out) if theta0 or constant else m
            torch.add(g, away, alpha=factor, out=out)

        blocks(kernel, mean, self.rho, noise, grad, grad_mean, *center)
        if self.fixed_row is not None:
            noise[self.fixed_row] = 0
        return grad_mean, noise


class Sums(NamedTuple):
    """Sums over a posterior's s, with the rho that they belong to and its version then."""

    rho: Tensor
    version: int
    numel: int
    logs: Factor
    squares: Factor
