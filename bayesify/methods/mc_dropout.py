"""MC-dropout on weights: each element is the trained value or falls back to the prior mean."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.core.distributed import part_of
from bayesify.core.method import QuadraticPosterior, Tempered
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior
from bayesify.core.sampling import Recipe
from bayesify.engine.noise import Stream
from bayesify.engine.writing import Formula


@dataclass(frozen=True, kw_only=True)
class MCDropout(Tempered):
    """Options of "mc_dropout".

    Attributes:
        p_drop: The probability p with which an element falls back to the prior mean.
        kld: Factor of the penalty. None is 1, or by the number of weights where `prior_sig` is None.
        bias: "spikymix" treats biases as the weights; "gaussian" gives them p = 0 (no dropout, the penalty without its
            factor 1 - p); "ignore" takes neither dropout nor penalty.
        mean: What mean mode reads: "kept" is m, "expected" is (1-p) m + p theta0.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "mc_dropout"
    tempers: ClassVar[str] = "kld"
    bias_treatments: ClassVar[tuple[str, ...]] = ("spikymix", "gaussian", "ignore")

    p_drop: float = 0.1
    kld: float | None = None
    bias: str = "spikymix"
    mean: str = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("p_drop", least=0)
        if self.p_drop >= 1:
            raise ValueError(f"p_drop must be in [0, 1), got {self.p_drop!r}")
        if self.mean not in ("kept", "expected"):
            raise ValueError(f"mean must be one of ['kept', 'expected'], got {self.mean!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the two-spike posterior of one parameter."""
        dropped = not prior.is_bias or self.bias == "spikymix"
        p_drop = self.p_drop if dropped else 0.0
        options = {"p_drop": p_drop, "expected": self.mean == "expected", "random": p_drop > 0}
        return DropoutPosterior(param, prior, flat=self.flat(prior), fixed_row=fixed_row, **options)


class DropoutPosterior(QuadraticPosterior):
    """theta = z m + (1-z) theta0 with z ~ Bernoulli(1-p), element by element."""

    settings = (*QuadraticPosterior.settings, "p_drop", "expected")
    expected: bool

    @property
    def precision(self) -> float:
        """(1-p)/sigma^2, the curvature of the energy."""
        return (1 - self.p_drop) / self.prior_sig / self.prior_sig

    @property
    def own_std(self) -> Tensor:
        """sqrt(p (1-p)) |m - theta0|."""
        return (self.original.detach() - self.prior_center).abs() * math.sqrt(self.p_drop * (1 - self.p_drop))

    @property
    def untrained(self) -> str:
        """Whether there is nothing to drop to, as the mean is the prior's."""
        own = part_of(self)
        if self.random and not torch.equal(own.original, own.prior_center.expand(own.original.shape)):
            return ""
        return "the weights are the prior mean, to which dropout goes; train first"

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return m, or (1-p) m + p theta0 where the mean is "expected"."""
        if not self.expected or self.p_drop == 0:
            return original
        mean = torch.lerp(original, self.prior_mean, self.p_drop)
        if self.fixed_row is not None:
            rows = torch.arange(len(mean), device=mean.device).view(-1, *[1] * (mean.dim() - 1))
            mean = torch.where(rows == self.fixed_row, original, mean)
        return mean

    def core(self, mean: Tensor) -> Tensor:
        """Return m: a calibrated draw is m + f (1-z)(theta0 - m)."""
        return mean

    def noise(self, stream: Stream) -> Tensor:
        """Return the mask z."""
        return stream.keep_mask(self.p_drop)

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return z m + (1-z) theta0."""
        return choice, (mean, self.center)

    def pulling(self, mean: Tensor, seed: int, grad: Tensor) -> Recipe:
        """Return grad * z."""
        if not self.random:
            return super().pulling(mean, seed, grad)
        return Recipe(masked, (grad,), (0,), stream=self.stream(seed), p_drop=self.p_drop)


def choice(keep: Any, m: Any, m0: Any) -> Any:
    """Return z m + (1-z) theta0."""
    return torch.where(keep, m, m0)


def masked(keep: Any, g: Any) -> Any:
    """Return z g."""
    return torch.where(keep, g, 0.0)
