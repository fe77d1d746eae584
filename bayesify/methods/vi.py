"""Mean-field variational inference: a Gaussian per element, trained by the reparameterization trick."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.distributed import part
from bayesify.core.method import Tempered
from bayesify.core.posterior import Posterior, Step
from bayesify.core.prior import Energy, Factor, Part, Prior, has_moved, scaled, squares, state_dtype
from bayesify.core.sampling import Recipe
from bayesify.engine.writing import Formula

CLAMP_MIN = 1e-8
MEMORY = 0.05  # weight of a backward pass in the running means of natural steps
LARGEST = 6.0  # bound of h s^2/kappa in a natural step; its smallest value is 0


@dataclass(frozen=True, kw_only=True)
class VI(Tempered):
    """Options of "vi".

    Attributes:
        link: How the free parameter rho becomes s > 0: "softplus", "exp", or "clamp" (max(rho, 1e-8), whose
            gradient passes through).
        init_sig: Where s starts; None is min(1e-3, prior_sig/10), or 0.3 % of the prior's scale where `prior_sig` is
            None.
        kld: Factor of the KL term. None is 1, or by the number of weights where `prior_sig` is None.
        natural: Whether s follows the curvature by natural steps, which a short training needs, instead of its plain
            gradient. None: where `prior_sig` is None, and the link is not "clamp".
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
        self.check_optional("init_sig", above=0)
        self.check_optional("kld", least=0)
        if self.natural and self.link == "clamp":
            raise ValueError("natural steps change s by a factor, which 'clamp' cannot; use 'exp' or 'softplus'")

    def resolve_defaults(self, *, relative: bool, weights: int) -> Self:
        """Temper by the number of weights and take natural steps where the prior is relative."""
        natural = relative and self.link != "clamp" if self.natural is None else self.natural
        return replace(super().resolve_defaults(relative=relative, weights=weights), natural=natural)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the Gaussian posterior of one parameter, N(param, init_sig^2) at first."""
        init_sig = self.init_sig or prior.init_sig
        _warn_if_rounded_away(param, init_sig)
        options = {"link": self.link, "init_sig": init_sig, "natural": bool(self.natural)}
        return VIPosterior(param, prior, flat=self.flat(prior), fixed_row=fixed_row, **options)


def _warn_if_rounded_away(param: Tensor, init_sig: float) -> None:
    """Warn where most elements are so large that adding s * eps rounds back to them."""
    limit = 4 * init_sig / torch.finfo(param.dtype).eps  # eps is the spacing of the numbers between 1 and 2
    values = param.detach()
    # The extremes are quick to find, and seldom beyond the limit.
    if not values.numel() or torch.stack(torch.aminmax(values)).abs().max() <= limit:
        return
    if torch.count_nonzero(values.abs() > limit) > values.numel() / 2:
        warnings.warn(
            f"s = {init_sig:g} is under a quarter of the rounding step of {param.dtype} weights, so most samples equal "
            "the mean; keep the weights in float32 (torch.autocast may compute in less), or raise init_sig",
            stacklevel=4,
        )


class VIPosterior(Posterior):
    """theta = m + eps * s with s = g(rho) and eps ~ N(0, 1).

    With `natural`, rho takes natural steps in log s, where the gradient of loss + kappa KL is

        h s^2/kappa + s^2/sigma^2 - 1,   h s^2 ~ r (g s)^2,   r = mean of sum g eps s / mean of sum (g eps s)^2.

    The curvature h of the mean loss is the mean of g eps/s, whose noise hides it in a short training. Squared gradients
    have little noise and no known scale, so they give the profile of h, and r, from sums over all weights, its scale.
    Both parts are in rho's gradient, s^2/sigma^2 - 1 with the penalty's and h s^2/kappa with the sample's, so that
    accumulation and a GradScaler treat them as gradients. `step_size` makes them so small that clipping the norm of all
    gradients leaves the mean's as they are; `param_groups` divides the learning rate by it. The tensor `observed` has
    the running means of the two sums over this posterior.
    """

    gaussian = True
    settings = (*Posterior.settings, "link")
    drawn_with = ()
    link: str
    init_sig: float

    def __init__(self, param: Tensor, prior: Prior, **options: Any) -> None:
        super().__init__(param, prior, **options)
        rho = LINKS[self.link].inverse(self.init_sig)
        self.rho = nn.Parameter(torch.full_like(param, rho, dtype=state_dtype(param), requires_grad=True))
        if self.natural:
            self.register_buffer("observed", torch.zeros(2, dtype=self.rho.dtype, device=self.rho.device))

    @property
    def own_std(self) -> Tensor:
        """The posterior's s = g(rho)."""
        std: Tensor = LINKS[self.link].std(self.rho.detach())
        return std

    @property
    def precision(self) -> float:
        """1/sigma^2."""
        return 1 / self.prior_sig / self.prior_sig

    @property
    def untrained(self) -> str:
        """Whether s is where it started, and what moves it."""
        rho = part(self.rho)
        if not rho.numel() or has_moved(LINKS[self.link].std(torch.stack(torch.aminmax(rho))), self.init_sig):
            return ""
        return "s is what it was at first; train with an optimizer of bayesify.param_groups(model, lr)"

    def learnable(self) -> tuple[nn.Parameter, ...]:
        """Return rho."""
        return (self.rho,)

    @torch.no_grad()
    def forget(self) -> None:
        """Let s be what it was at first."""
        self.rho.fill_(LINKS[self.link].inverse(self.init_sig))
        if self.observed is not None:
            self.observed.zero_()

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return m + eps * g(rho)."""
        return LINKS[self.link].draw, (mean, self.rho)

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)).

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        link, count, inverse = LINKS[self.link], self.rho.numel(), 1 / self.prior_sig
        inputs = (*scaled((mean, self.rho, self.center), inverse), inverse)
        parts = [Part(link.terms, inputs, (scale / 2, scale / 2, -scale))]
        if self.fixed_row is not None:
            row = self.rho[self.fixed_row]
            count -= row.numel()
            parts.append(Part(link.spread, (*scaled((row,), inverse), inverse), (-scale / 2, scale)))
        return Energy(tuple(parts), scale * count * (math.log(self.prior_sig) - 0.5), self.prior_sig)

    def pulling(self, mean: Tensor, seed: int, grad: Tensor) -> Recipe:
        """Return the gradients for m, grad, and rho: grad * eps * ds/drho, or h s^2/kappa as a natural step."""
        link, stream = LINKS[self.link], self.stream(seed)
        if self.natural and self.step is not None:
            inputs = (grad, self.rho, self.step.factor, self.step.scale)
            return Recipe(link.natural, inputs, (1,), passes=True, stream=stream)
        return Recipe(link.pull, (grad, self.rho), (1,), passes=True, stream=stream)

    @classmethod
    def observe(cls, posteriors: Sequence[Posterior], sums: Tensor) -> None:
        """Add g eps s and its square to the running means, where they are finite."""
        known = [p.observed for p in posteriors if p.observed is not None]
        before, units = torch.stack(known), cast(Step, posteriors[0].step).units
        seen = (sums * units.to(sums)).to(before)
        finite = seen.isfinite().all(1, keepdim=True)
        torch._foreach_copy_(known, list(torch.where(finite, torch.lerp(before, seen, MEMORY), before).unbind()))

    def energy_pulling(self, mean: Tensor, coef: Factor, pull: Factor) -> Recipe:
        """Return the gradients for m, (coef + pull) (m - theta0)/sigma^2, and rho, coef (s/sigma^2 - 1/s) ds/drho.

        With natural steps the latter is multiplied by size/kappa (d rho/d log s)^2.
        """
        if self.flat:
            return Recipe()
        link, unit, precision = LINKS[self.link], 1.0 if self.step is None else self.step.unit, self.precision
        far = () if isinstance(coef, Tensor) else ((coef + pull) * precision, coef * unit * precision, coef * unit)
        inputs = (*scaled((mean, self.rho, self.center), *far), coef, pull, precision, unit)
        return Recipe(link.natural_energy if self.natural else link.energy, inputs, (0, 1))


# -- links and their formulas ------------------------------------------------------------------------------------------


class Link(NamedTuple):
    """A positive link s = g(rho), and the formulas of it."""

    std: Callable[[Any], Any]  # g
    inverse: Callable[[float], float]  # the rho of an s
    draw: Formula
    pull: Formula  # the gradient of rho
    natural: Formula  # the natural step of a sample, with the sums of g eps s and its square
    energy: Formula  # the gradients of the KL term
    natural_energy: Formula  # the same with the natural step of rho
    terms: Formula  # the sums of the KL term
    spread: Formula  # those of them without m


def _link(
    std: Callable[[Any], Any],
    slope: Callable[[Any, Any], Any],
    log_std: Callable[[Any, Any], Any],
    inverse: Callable[[float], float],
) -> Link:
    """Write the formulas for a link g = std(rho), g' = slope(rho, s), log g = log_std(rho, s).

    Natural steps are in log s: d rho/d log s is s/g'(rho).
    """

    def draw(eps: Any, m: Any, rho: Any) -> Any:
        return m + eps * std(rho)

    def pull(eps: Any, g: Any, rho: Any) -> Any:
        return g * eps * slope(rho, std(rho))

    def natural(eps: Any, g: Any, rho: Any, factor: Any, scale: Any) -> Any:
        s = std(rho)
        each = g * s
        noise = each * eps
        return scale * torch.clamp(factor * (each * each), max=LARGEST) * (s / slope(rho, s)), noise, noise * noise

    def energy(m: Any, rho: Any, m0: Any, coef: Any, pull: Any, precision: Any, unit: Any) -> Any:
        s, scale = std(rho), coef * unit
        return (coef + pull) * precision * (m - m0), (scale * precision * s - scale / s) * slope(rho, s)

    def natural_energy(m: Any, rho: Any, m0: Any, coef: Any, pull: Any, precision: Any, unit: Any) -> Any:
        s, scale = std(rho), coef * unit
        return (coef + pull) * precision * (m - m0), (scale * precision * s * s - scale) * (s / slope(rho, s))

    def spread(rho: Any, precision: Any) -> Any:
        s = std(rho)
        return (s * precision) ** 2, log_std(rho, s)

    def terms(m: Any, rho: Any, m0: Any, precision: Any) -> Any:
        return squares(m, m0, precision), *spread(rho, precision)

    return Link(std, inverse, draw, pull, natural, energy, natural_energy, terms, spread)


def _clamp(rho: Any) -> Any:
    """Return max(rho, 1e-8) with slope 1 on either side: a spread that fell to the floor must be able to rise again."""
    return torch.where(rho < CLAMP_MIN, CLAMP_MIN + (rho - rho.detach()), rho)


def _log(rho: Any, s: Any) -> Any:
    return torch.log(s)


LINKS = {
    "softplus": _link(F.softplus, lambda rho, s: torch.sigmoid(rho), _log, lambda s: s + math.log(-math.expm1(-s))),
    "exp": _link(torch.exp, lambda rho, s: s, lambda rho, s: rho, math.log),
    "clamp": _link(_clamp, lambda rho, s: 1.0, _log, lambda s: max(s, CLAMP_MIN)),
}
