"""SGLD and SGHMC: a noisy chain of weights, and the Gaussian of its running moments.

The chain itself is moved by the optimizer `bayesify.SGLD`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.core.method import Tempered
from bayesify.core.moments import CollectedPosterior, collected
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, state_dtype
from bayesify.engine.dispatch import run
from bayesify.methods.cycles import Stages
from bayesify.methods.sgld.cycles import Basins

FEW = 5  # states, below which a spread is none
FADE = 3.0  # half of the weight is on the last sixth of the states


@dataclass(frozen=True, kw_only=True)
class SGLD(Tempered):
    """Options of "sgld".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower. None
            is 1, or by the number of weights where `prior_sig` is None.
        nd: Factor of the noise; below 1 the chain is colder than the posterior.
        burnin: Optimizer steps before the first that counts.
        thin: Every how many steps after these the chain's state enters the moments.
        fade: How fast earlier states lose weight: the n-th counts as n^fade, nearly. 0 is the plain mean of all states.
            None is 0, or FADE where `prior_sig` is None, with which the way to the posterior needs no `burnin`.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "sgld"
    tempers: ClassVar[str] = "Ninflate"
    optimizer: ClassVar[str] = "SGLD"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")
    stages: ClassVar[type[Stages]] = Basins

    Ninflate: float | None = None
    nd: float = 1.0
    burnin: int = 0
    thin: int = 10
    fade: float | None = None
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", above=0)
        self.check("nd", least=0)
        self.check_optional("fade", least=0)
        for option, least in (("burnin", 0), ("thin", 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{option} must be an integer >= {least} (optimizer steps), got {value!r}")

    def settled(self, *, relative: bool, weights: int) -> "SGLD":
        """Forget early states where the prior is relative, besides what every tempered method does."""
        settled = super().settled(relative=relative, weights=weights)
        assert isinstance(settled, SGLD)
        return replace(settled, fade=(FADE if relative else 0.0) if self.fade is None else self.fade)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without moments at first."""
        flat = prior.is_bias and self.bias == "uninformative"
        return SGLDPosterior(param, prior, flat=flat, fixed_row=fixed_row, fade=self.fade or 0.0)

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before there are moments; warn where they are those of too few states."""
        super().check_ready(posteriors)
        counts = [int(p.count) for p in posteriors if isinstance(p, SGLDPosterior) and p.count is not None]
        if counts and min(counts) < FEW:
            states = "1 state, which has no spread" if min(counts) == 1 else f"{min(counts)} states"
            warnings.warn(
                f"the chain has collected {states}: samples will tell little; train for longer, or collect more often "
                f"(thin is {self.thin}, burnin {self.burnin} optimizer steps)",
                stacklevel=5,
            )

    def collects(self, step: int) -> bool:
        """Tell whether the state after this step (from 1) enters the moments."""
        return step > self.burnin and (step - self.burnin) % self.thin == 0


class SGLDPosterior(CollectedPosterior):
    """The Gaussian of a chain's running moments; the chain before there are any.

    The n-th of N states has the weight w_n ~ n(n+1)...(n+fade-1), 1 without `fade`. Tensors: `count`, which is N;
    `average`, sum w x / sum w; `scatter`, N - 1 times the weighted variance, made unbiased for independent states.
    """

    settings = (*CollectedPosterior.settings, "fade")
    missing = "the chain has no moments; step bayesify.SGLD beyond burnin + thin steps first"

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, fade: float = 0.0) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.fade = fade

    @property
    def own_std(self) -> Tensor:
        """sqrt(scatter/(count - 1)); 0 before the second state."""
        if self.count is None or self.scatter is None:
            return super().own_std
        std = (self.scatter / (self.count - 1).clamp(min=1)).sqrt_()
        if self.fixed_row is not None:
            std[self.fixed_row] = 0
        return std

    @property
    def note(self) -> str:
        """How far the chain is, for `summary`."""
        if self.count is None:
            return "no moments yet"
        return f"{int(self.count)} states" if self.count > 1 else "1 state, no spread yet"

    @torch.no_grad()
    def collect(self) -> None:
        """Add the chain's present state to the moments (Welford's recurrence, with weights).

        n <- n + 1; d = theta - average; r = (fade+1)/(n+fade); average <- average + r d; V <- (1-r) (V + r d^2), where
        V = sum w (x - average)^2 / sum w is scatter (1-q)/(n-1), q = sum w^2 / (sum w)^2. Without `fade` both are 1/n,
        so that scatter <- scatter + (n-1)/n d^2.
        """
        theta = self.original.detach()
        theta = theta.to(state_dtype(theta))
        if self.count is None:
            self.count = torch.ones((), dtype=torch.int64, device=theta.device)
            self.average = theta.clone(memory_format=torch.contiguous_format)
            self.scatter = torch.zeros_like(self.average)
            return
        assert self.average is not None
        assert self.scatter is not None
        n = int(self.count.add_(1))
        keep, add, rate = welford(n, self.fade)
        run(collected, None, (theta, self.average, self.scatter, rate, keep, add), (self.average, self.scatter))


@lru_cache
def welford(n: int, fade: float) -> tuple[float, float, float]:
    """Return the factors of the n-th state, n > 1: of the scatter so far, of d^2, and r."""
    if fade == 0:
        return 1.0, (n - 1) / n, 1 / n
    before, rate = concentration(n - 1, fade), (fade + 1) / (n + fade)
    after = (1 - rate) ** 2 * before + rate**2
    # Of one state the variance is 0, whatever it is divided by.
    keep = 0.0 if n == 2 else (1 - rate) * (n - 1) / (n - 2) * (1 - before) / (1 - after)
    return keep, (1 - rate) * rate * (n - 1) / (1 - after), rate


@lru_cache
def concentration(n: int, fade: float) -> float:
    """Return q = sum w^2 / (sum w)^2 of n states."""
    found = 1.0
    for k in range(2, n + 1):
        rate = (fade + 1) / (k + fade)
        found = (1 - rate) ** 2 * found + rate**2
    return found
