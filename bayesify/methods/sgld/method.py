"""SGLD and SGHMC: a noisy chain of weights, and the Gaussian of its running moments.

The chain itself is moved by the optimizer `bayesify.SGLD`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.engine import fusion
from bayesify.model.method import Tempered
from bayesify.model.moments import MomentsPosterior
from bayesify.model.posteriors import Posterior, Prior, state_dtype


@dataclass(frozen=True, kw_only=True)
class SGLD(Tempered):
    """Options of "sgld".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower. None
            is 1, or by the number of weights where `prior_sig` is None.
        nd: Factor of the noise; below 1 the chain is colder than the posterior.
        burnin: Optimizer steps before the first that counts.
        thin: Every how many steps after these the chain's state enters the moments.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "sgld"
    tempers: ClassVar[str] = "Ninflate"
    optimizer: ClassVar[str] = "SGLD"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")

    Ninflate: float | None = None
    nd: float = 1.0
    burnin: int = 0
    thin: int = 10
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", above=0)
        self.check("nd", least=0)
        for option, least in (("burnin", 0), ("thin", 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{option} must be an integer >= {least} (optimizer steps), got {value!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without moments at first."""
        flat = prior.is_bias and self.bias == "uninformative"
        return SGLDPosterior(param, prior, flat=flat, fixed_row=fixed_row)

    def collects(self, step: int) -> bool:
        """Tell whether the state after this step (from 1) enters the moments."""
        return step > self.burnin and (step - self.burnin) % self.thin == 0


class SGLDPosterior(MomentsPosterior):
    """The Gaussian of a chain's running moments; the chain before there are any.

    Tensors: `count`, how many states were collected; `average`, their mean; `scatter`, the sum of their squared
    deviations from it.
    """

    moments = ("count", "average", "scatter")
    missing = "the chain has no moments; step bayesify.SGLD beyond burnin + thin steps first"

    count: Tensor | None
    average: Tensor | None
    scatter: Tensor | None

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

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless the count is a positive integer and the scatter not negative."""
        if name == "count":
            if tensor.dim() or tensor.dtype != torch.int64 or int(tensor) < 1:
                raise ValueError("count is not a positive integer")
            return
        super().check_tensor(name, tensor)
        if name == "scatter" and bool((tensor < 0).any()):
            raise ValueError("scatter is negative")

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the moments' mean, or the chain before there are any; the gradient passes to the parameter."""
        if self.average is None:
            return original
        center = self.average.to(original.dtype)
        if torch.is_grad_enabled() and original.requires_grad:
            center = center + (original - original.detach())
        return center

    @torch.no_grad()
    def collect(self) -> None:
        """Add the chain's present state to the moments (Welford's recurrence).

        n <- n + 1; d = theta - average; average <- average + d/n; scatter <- scatter + (n-1)/n d^2.
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
        if fusion.fused(theta, self.average, self.scatter):
            fusion.run_plain(_collect, (theta,), (self.average, self.scatter), (1 / n, (n - 1) / n))
            return
        away = theta - self.average
        self.average.add_(away, alpha=1 / n)
        self.scatter.addcmul_(away, away, value=(n - 1) / n)


def _collect(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
    """Do Welford's recurrence on one element; par is (1/n, (n-1)/n)."""
    away = ins[0][i] - outs[0][i]
    outs[0][i] += par[0] * away
    outs[1][i] += par[1] * (away * away)
