"""Plain training with an L2 penalty towards the prior mean: the baseline without a posterior."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayesify.core.method import Method
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Energy, Factor, Prior, quadratic_pull, quadratic_terms


@dataclass(frozen=True, kw_only=True)
class Vanilla(Method):
    """Options of "vanilla".

    Attributes:
        wd: Weight decay towards the prior mean: the penalty is `wd/2 |theta - theta0|^2`, whatever `prior_sig` and the
            data's size.
        bias: "penalty" treats biases as the weights, "ignore" leaves them free.
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
        flat = (prior.is_bias and self.bias == "ignore") or self.wd == 0
        return VanillaPosterior(param, prior, flat=flat, fixed_row=fixed_row, wd=self.wd)

    def scale(self, num_data: float) -> float:
        """Weight decay does not shrink with the data."""
        return 1.0


class VanillaPosterior(Posterior):
    """A point: every sample is the parameter itself."""

    settings = (*Posterior.settings, "wd")
    stochastic = False
    random = False

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, wd: float) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.wd = wd

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return the parameter."""
        return mean

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return wd/2 |theta - theta0|^2."""
        return quadratic_terms(mean, self, self.wd, scale)

    def pullback(self, mean: Tensor, seed: int, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at theta, as it is."""
        return (grad,)

    def energy_pull(self, mean: Tensor, coef: Factor, pull: Factor) -> tuple[Tensor | None, ...]:
        """Return coef * wd (theta - theta0)."""
        return (quadratic_pull(mean, self, coef * self.wd),)
