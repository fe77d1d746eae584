"""The Laplace approximation: MAP training, then a Gaussian from the curvature of the loss at its optimum.

The curvature is computed by `bayesify.fit_laplace`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.methods.base import Method
from bayesify.moments import MomentsPosterior
from bayesify.posteriors import Posterior, Prior, state_dtype

PIECE = 1 << 22  # elements at a time in float64


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Options of "la".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower.
        damping: Added to every element's precision.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "la"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")

    Ninflate: float = 1.0
    damping: float = 0.0
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("Ninflate", above=0)
        self.check("damping", least=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without variances at first."""
        flat = prior.is_bias and self.bias == "uninformative"
        return LaplacePosterior(param, prior, flat=flat, fixed_row=fixed_row)

    def scale(self, num_data: float) -> float:
        """Return 1/(N Ninflate)."""
        return 1 / (num_data * self.Ninflate)


class LaplacePosterior(MomentsPosterior):
    """N(theta*, v) around the trained parameter; the buffer `deviation` is sqrt(v)."""

    moments = ("deviation",)
    missing = "Laplace has not been fitted; call bayesify.fit_laplace(model, loader) after training"

    deviation: Tensor | None
    tuned: str = ""
    """How prior_sig was chosen, if `fit_laplace` chose it."""

    @property
    def std(self) -> Tensor:
        """sqrt(v); 0 before the fit."""
        return super().std if self.deviation is None else self.deviation

    @property
    def note(self) -> str:
        """What `summary` says about the fit."""
        if self.deviation is None:
            return "not fitted"
        points = int((self.deviation == 0).sum())
        notes = (
            f"prior_sig by {self.tuned}" if self.tuned else "",
            "" if points == 0 else "no variance" if points == self.deviation.numel() else f"{points} without variance",
        )
        return ", ".join(n for n in notes if n)

    def spread(self, curvature: Tensor | None, sig: float, damping: float) -> Tensor:
        """Return sqrt(v) for a curvature h (sum over the data), in the state's dtype.

        v = 1/(1/sigma^2 + h + damping). Without any curvature (the parameter is not in use) v is 0; so it is where h
        is 0 under a flat prior, which has no 1/sigma^2.
        """
        out = torch.zeros(self.shape, dtype=state_dtype(self.original), device=self.original.device)
        if curvature is None:
            return out
        prior = damping if self.flat else 1 / sig / sig + damping
        for piece, h in zip(torch.split(out.view(-1), PIECE), torch.split(curvature.view(-1), PIECE), strict=True):
            piece.copy_((h.double() + prior).rsqrt_())
            if self.flat:
                piece[h == 0] = 0
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return out
