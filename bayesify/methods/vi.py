"""Mean-field variational inference: a Gaussian per element, trained by the reparameterization trick."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.distributed import part
from bayesify.core.method import Tempered
from bayesify.core.posterior import Posterior, Prior
from bayesify.core.quadratics import (
    Factor,
    axpy_,
    by_center,
    ordinary,
    quadratic_energy,
    quadratic_pull,
    state_dtype,
    wide,
)
from bayesify.core.scales import LEAST_CHANGE, START
from bayesify.engine import elements, fusion
from bayesify.methods.natural import natural_formula, pull_spread

CLAMP_MIN = 1e-8


class Link(NamedTuple):
    """A positive link s = g(rho), for tensors and for one element.

    Attributes:
        std: g.
        slope: g', of (rho, s).
        log_std: log s, of (rho, s).
        inverse: The rho of an s.
        formulas: Its `Formulas`.
    """

    std: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    log_std: Callable[[Tensor, Tensor], Tensor]
    inverse: Callable[[float], float]
    formulas: "Formulas"


class Formulas(NamedTuple):
    """What is done with one element, in one pass; the last three for either kind of prior mean."""

    draw: Callable[..., Any]
    pull: Callable[..., Any]
    natural: Callable[..., Any]
    terms: tuple[Callable[..., Any], ...]
    energy: tuple[Callable[..., Any], ...]
    natural_energy: tuple[Callable[..., Any], ...]


def _formulas(std: Callable[..., Any], slope: Callable[..., Any], log_std: Callable[..., Any]) -> Formulas:
    """Write the formulas for a link g = std(rho), g' = slope(rho, s), log g = log_std(rho, s)."""

    def draw(i: Any, eps: Any, ins: Any, outs: Any, par: Any) -> None:
        outs[0][i] = ins[0][i] + eps * std(ins[1][i])

    def pull(i: Any, eps: Any, ins: Any, outs: Any, par: Any) -> None:
        rho = ins[1][i]
        outs[0][i] = ins[0][i] * eps * slope(rho, std(rho))

    def make_energy(center: Callable[..., Any]) -> Callable[..., Any]:
        def energy(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
            rho = ins[1][i]
            s = std(rho)
            outs[0][i] = par[0] * (ins[0][i] - center(i, ins, par))
            outs[1][i] = (par[1] * s - par[2] / s) * slope(rho, s)

        return energy

    def make_natural_energy(center: Callable[..., Any]) -> Callable[..., Any]:
        def natural_energy(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
            rho = ins[1][i]
            s = std(rho)
            outs[0][i] = par[0] * (ins[0][i] - center(i, ins, par))
            outs[1][i] = (par[1] * s * s - par[2]) * (s / slope(rho, s))

        return natural_energy

    def make_terms(center: Callable[..., Any]) -> Callable[..., Any]:
        def terms(i: Any, ins: Any, par: Any) -> Any:
            away, rho = ins[0][i] - center(i, ins, par), ins[1][i]
            s = std(rho)
            return away * away, s * s, log_std(rho, s)

        return terms

    natural, by_prior = natural_formula(std, slope), (make_terms, make_energy, make_natural_energy)
    return Formulas(draw, pull, natural, *(by_center(make) for make in by_prior))


def _clamp(rho: Tensor) -> Tensor:
    """Return max(rho, 1e-8) with slope 1 on either side: a spread that fell to the floor must be able to rise again."""
    return torch.where(rho < CLAMP_MIN, CLAMP_MIN + (rho - rho.detach()), rho)


def _clamp_element(rho: Any) -> Any:
    floor = elements.like(CLAMP_MIN, rho)
    return floor if rho < floor else rho


def _one_element(rho: Any, s: Any) -> Any:
    return elements.ONE


def _sigmoid_element(rho: Any, s: Any) -> Any:
    return elements.sigmoid(rho)


def _log_element(rho: Any, s: Any) -> Any:
    return elements.log(s)


def _s_element(rho: Any, s: Any) -> Any:
    return s


def _rho_element(rho: Any, s: Any) -> Any:
    return rho


LINKS = {
    "softplus": Link(
        std=F.softplus,
        slope=lambda rho, s: torch.sigmoid(rho),
        log_std=lambda rho, s: s.log(),
        inverse=lambda s: s + math.log(-math.expm1(-s)),
        formulas=_formulas(elements.softplus, _sigmoid_element, _log_element),
    ),
    "exp": Link(
        std=torch.exp,
        slope=lambda rho, s: s,
        log_std=lambda rho, s: rho,
        inverse=math.log,
        formulas=_formulas(elements.exp, _s_element, _rho_element),
    ),
    "clamp": Link(
        std=_clamp,
        slope=lambda rho, s: torch.ones_like(rho),
        log_std=lambda rho, s: s.log(),
        inverse=lambda s: max(s, CLAMP_MIN),
        formulas=_formulas(_clamp_element, _one_element, _log_element),
    ),
}


@dataclass(frozen=True, kw_only=True)
class VI(Tempered):
    """Options of "vi".

    Attributes:
        link: How the free parameter rho becomes s > 0: "softplus", "exp", or "clamp" (max(rho, 1e-8), whose
            gradient passes through).
        init_sig: Where s starts; None is min(1e-3, prior_sig/10), or START (0.3 %) of the
            prior's scale where `prior_sig` is None.
        kld: Factor of the KL term. None is 1, or by the number of weights where `prior_sig` is None.
        natural: Whether s follows the curvature by natural steps (`bayesify.methods.natural`), which a short training
            needs, instead of its plain gradient. None: where `prior_sig` is None, and the link is not "clamp".
        bias: "informative" treats biases as the weights; "uninformative" drops their KL term.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "vi"
    tempers: ClassVar[str] = "kld"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")

    link: str = "softplus"
    init_sig: float | None = None
    natural: bool | None = None
    kld: float | None = None
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.link not in LINKS:
            raise ValueError(f"link must be one of {list(LINKS)}, got {self.link!r}")
        if self.init_sig is not None:
            self.check("init_sig", above=0)
        self.check_optional("kld", least=0)
        if self.natural and self.link == "clamp":
            raise ValueError(
                "natural steps change s by a factor, which the link 'clamp' cannot; use 'exp' or 'softplus'"
            )

    def settled(self, *, relative: bool, weights: int) -> "VI":
        """Temper by the number of weights and take natural steps where the prior is relative."""
        settled = super().settled(relative=relative, weights=weights)
        assert isinstance(settled, VI)
        natural = relative and self.link != "clamp" if self.natural is None else self.natural
        return replace(settled, natural=natural)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the Gaussian posterior of one parameter, N(param, init_sig^2) at first."""
        start = START * prior.sig if prior.relative else min(1e-3, prior.sig / 10)
        init_sig = start if self.init_sig is None else self.init_sig
        flat = prior.is_bias and self.bias == "uninformative"
        _warn_if_drowned(param, init_sig)
        posterior = VIPosterior(param, prior, flat=flat, fixed_row=fixed_row, link=self.link, init_sig=init_sig)
        if self.natural:
            posterior.take_natural_steps()
        return posterior


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

    gaussian = True
    settings = (*Posterior.settings, "link")
    drawn_with = ()

    def __init__(
        self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, link: str, init_sig: float
    ) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.link, self.init_sig = link, init_sig
        rho = LINKS[link].inverse(init_sig)
        self.rho = nn.Parameter(torch.full_like(param, rho, dtype=state_dtype(param), requires_grad=True))

    def take_natural_steps(self) -> None:
        """Keep the running means that natural steps need."""
        self.natural = True
        self.register_buffer("observed", torch.zeros(2, dtype=self.rho.dtype, device=self.rho.device))

    @property
    def formulas(self) -> Formulas:
        """The formulas of one element of its link."""
        return LINKS[self.link].formulas

    def spread_and_unit(self) -> tuple[Tensor, Tensor]:
        """Return s and d rho / d log s = s/g'(rho)."""
        rho, link = self.rho.detach(), LINKS[self.link]
        s = link.std(rho)
        return s, s / link.slope(rho, s)

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless one tensor of a stored state fits; the running sums are two numbers."""
        if name == "observed":
            if tensor.shape != (2,) or not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} is not two finite numbers")
        else:
            super().check_tensor(name, tensor)

    @property
    def own_std(self) -> Tensor:
        """The posterior's s = g(rho)."""
        std = LINKS[self.link].std(self.rho.detach())
        if self.fixed_row is not None:
            std = std.clone()
            std[self.fixed_row] = 0
        return std

    @property
    def untrained(self) -> str:
        """Whether s is where it started, and what moves it."""
        if not self.rho.numel():
            return ""
        low, high = (float(s) for s in LINKS[self.link].std(torch.stack(torch.aminmax(part(self.rho)))))
        if self.init_sig * (1 - LEAST_CHANGE) < low and high < self.init_sig * (1 + LEAST_CHANGE):
            return "s is what it was at first; train with an optimizer of bayesify.param_groups(model, lr)"
        return ""

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return rho."""
        return (self.rho,)

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return m + eps * g(rho)."""
        return torch.addcmul(mean.to(noise.dtype), noise, LINKS[self.link].std(self.rho)).to(mean.dtype)

    def draw(self, mean: Tensor, seed: int) -> Tensor:
        """Compute `theta`."""
        if not fusion.fused(mean, self.rho):
            return super().draw(mean, seed)
        return self.by_element(LINKS[self.link].formulas.draw, seed, (mean, self.rho))

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)).

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        if self.flat:
            return mean.new_zeros((), dtype=wide(mean))
        factor, center, link = scale / 2 * self.precision, self.center, LINKS[self.link]
        if not torch.is_grad_enabled() and ordinary(factor) and fusion.fused(mean, self.rho, *center.tensors):
            ins = (mean, self.rho, *center.tensors)
            away, squares, logs = fusion.total(link.formulas.terms[center.given], ins, center.numbers)
            row = self._row_sums()
            spread = (self.rho.numel() - row.numel) * (math.log(self.prior_sig) - 0.5) - (logs - float(row.logs))
            return mean.new_tensor(factor * (away + squares - float(row.squares)) + scale * spread, dtype=torch.float64)
        s, row = link.std(self.rho), self._row_sums()
        logs_all = link.log_std(self.rho, s).sum(dtype=wide(s)) - row.logs
        each = s if torch.compiler.is_compiling() else s.to(wide(s))  # a compiled gradient would be of that precision
        squares_all = each.square().sum(dtype=wide(s)) - row.squares
        spread_all = (s.numel() - row.numel) * (math.log(self.prior_sig) - 0.5) - logs_all
        square = (math.sqrt(scale / 2) / self.prior_sig) ** 2 * squares_all
        return quadratic_energy(mean, self, self.precision, scale) + square + scale * spread_all

    def _row_sums(self) -> "Sums":
        """Return the sums over the fixed row, which is not random: to be taken away from those over all elements."""
        if self.fixed_row is None:
            return Sums(0, 0.0, 0.0)
        row, link = self.rho[self.fixed_row], LINKS[self.link]
        s = link.std(row)
        return Sums(row.numel(), link.log_std(row, s).to(wide(s)).sum(), s.to(wide(s)).square().sum())

    @property
    def precision(self) -> float:
        """1/sigma^2."""
        return 1 / self.prior_sig / self.prior_sig

    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for m, which is grad, and rho: grad * eps * ds/drho, or a natural step."""
        if self.natural and (step := pull_spread(self, seed, grad)) is not None:
            return grad, step
        rho, whole, link = self.rho.detach(), grad.contiguous(), LINKS[self.link]
        if fusion.fused(rho, whole):
            out = torch.empty_like(rho)
            fusion.run(link.formulas.pull, self.stream(seed), (whole, rho), (out,))
        else:
            out = (self.noise_of(seed) * grad).mul_(link.slope(rho, link.std(rho)))
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return grad, out

    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> tuple[Tensor | None, ...]:
        """Return the gradients for m, (coef + pull) (m - theta0)/sigma^2, and rho, coef (s/sigma^2 - 1/s) ds/drho.

        With natural steps the latter is multiplied by size/kappa (d rho/d log s)^2.
        """
        if self.flat:
            return None, None
        rho, link, center = self.rho.detach(), LINKS[self.link], self.center
        scale = coef if self.step is None else self.step.size * coef / self.step.kappa
        first, second = (coef + pull) * self.precision, scale * self.precision
        fits = all(isinstance(f, float) and (f == 0 or ordinary(f)) for f in (first, second, scale))
        if fits and fusion.fused(mean, rho, *center.tensors):
            first_out: Tensor | None = torch.empty_like(mean, requires_grad=False)
            out = torch.empty_like(rho)
            formula = (link.formulas.natural_energy if self.natural else link.formulas.energy)[center.given]
            par = (float(first), float(second), float(scale), *center.numbers)
            fusion.run_plain(formula, (mean, rho, *center.tensors), (first_out, out), par)  # type: ignore[arg-type]
        else:
            first_out = quadratic_pull(mean, self, first)
            s = link.std(rho)
            slope = link.slope(rho, s)
            out = axpy_(torch.zeros_like(rho), s.square() if self.natural else s, second)
            out = axpy_(out, torch.ones_like(s) if self.natural else s.reciprocal(), -1 * scale)
            out.mul_(s / slope if self.natural else slope)
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return first_out, out


class Sums(NamedTuple):
    """How many elements, the sum of log s and that of s^2."""

    numel: int
    logs: Factor
    squares: Factor
