"""Plain training with an L2 penalty towards the prior mean: the baseline without a posterior."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayesify.core.method import Method, QuadraticPosterior
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior


@dataclass(frozen=True, kw_only=True)
class Vanilla(Method):
    """Options of "vanilla".

    Attributes:
        wd: Weight decay towards the prior mean: the penalty is `wd/2 |theta - theta0|^2`, whatever `prior_sig` and the
            number of data.
        bias: "penalty" treats biases as the weights, "ignore" leaves them out of the penalty.
        nst: 0: there is nothing to sample.
    """

    name: ClassVar[str] = "vanilla"
    bias_treatments: ClassVar[tuple[str, ...]] = ("penalty", "ignore")

    wd: float = 1e-4
    bias: str = "penalty"
    nst: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("wd", least=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the point posterior of one parameter."""
        flat = self.flat(prior) or self.wd == 0
        return VanillaPosterior(param, prior, flat=flat, fixed_row=fixed_row, wd=self.wd)

    def scale(self, num_data: float) -> float:
        """Weight decay does not shrink with the data."""
        return 1.0


class VanillaPosterior(QuadraticPosterior):
    """A point: every sample is the parameter itself."""

    settings = (*QuadraticPosterior.settings, "wd")
    stochastic = False
    random = False
    wd: float

    @property
    def precision(self) -> float:
        """The weight decay, wd/2 |theta - theta0|^2."""
        return self.wd

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return the parameter."""
        return mean
