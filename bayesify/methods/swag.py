"""SWAG: the Gaussian of the weights that an optimizer passes through (Maddox et al. 2019).

theta = mu + (sqrt(diag) eps1 + D eps2 / sqrt(K-1)) / sqrt(2): mu and diag are mean and variance of all collected
iterates, the K columns of D the deviations of the last K from mu. eps1 is the parameter's own noise; eps2 is one vector
of K numbers for the whole draw, so that weights of different layers move together as they did in training.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bayesify.engine.noise import name_key
from bayesify.model.method import Tempered
from bayesify.model.moments import MomentsPosterior
from bayesify.model.posteriors import Posterior, Prior, state_dtype
from bayesify.model.wrapping import named_posteriors

SHARED = name_key("swag/shared")


@dataclass(frozen=True, kw_only=True)
class SWAG(Tempered):
    """Options of "swag".

    Any optimizer trains the model, and its steps are noticed: after `start` steps every `every`-th iterate is
    collected. The spread is that of the optimizer's own path, so its learning rate is part of the method: train to the
    optimum first, then go on at a constant rate, about half of the one that training began with (or a cyclic one, whose
    period is `every`, so that each cycle's end is collected); at a small rate the iterates hardly differ, and the
    spread is too small. In mean mode the model is the mean of the iterates. The statistics of BatchNorm layers are the
    last iterate's, until `bayesify.integrations.vision.update_bn` computes those of mean mode.

    Attributes:
        start: Optimizer steps before the first that counts.
        every: Every how many steps after these an iterate is collected; 0 collects by `collect(model)` alone.
        rank: K, how many of the last iterates are kept, each of the parameters' size; at least 2.
        Ninflate: The data counts as if each item were there this many times; it weakens the penalty. None is 1, or by
            the number of weights where `prior_sig` is None.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "swag"
    tempers: ClassVar[str] = "Ninflate"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")
    follows_steps: ClassVar[bool] = True

    start: int = 0
    every: int = 10
    rank: int = 20
    Ninflate: float | None = None
    bias: str = "informative"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", above=0)
        for option, least in (("start", 0), ("every", 0), ("rank", 2)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{option} must be an integer >= {least}, got {value!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without iterates at first."""
        flat = prior.is_bias and self.bias == "uninformative"
        return SWAGPosterior(param, prior, flat=flat, fixed_row=fixed_row, rank=self.rank)

    def after_step(self, posteriors: Sequence[Posterior], moved: Collection[int]) -> None:
        """Count a step for the parameters that an optimizer has moved, and collect them where it is time."""
        for posterior in posteriors:
            if isinstance(posterior, SWAGPosterior) and id(posterior.original) in moved:
                posterior.steps += 1
                since = posterior.steps - self.start
                if self.every and since > 0 and since % self.every == 0:
                    posterior.collect()

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before the second iterate; a parameter that nobody has moved since stays a point."""
        if not any(isinstance(p, SWAGPosterior) and p.collected > 1 for p in posteriors):
            for posterior in posteriors:
                posterior.check_ready()


class SWAGPosterior(MomentsPosterior):
    """N(mu, (diag + D D^T/(K-1))/2) of the collected iterates; the parameter before there are any.

    Tensors: `count`, how many were collected; `average`, their mean; `scatter`, the sum of their squared deviations
    from it; `iterates`, the last K of them, (K, ...).
    """

    moments = ("count", "average", "scatter", "iterates")
    results = ("steps",)
    missing = (
        "SWAG needs two iterates; train beyond start + 2 * every optimizer steps, or call "
        "bayesify.methods.swag.collect(model) now and then"
    )

    count: Tensor | None
    average: Tensor | None
    scatter: Tensor | None
    iterates: Tensor | None
    steps: int = 0
    """How many optimizer steps have moved the parameter."""

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, rank: int) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.rank = rank

    @property
    def collected(self) -> int:
        """How many iterates there were."""
        return 0 if self.count is None else int(self.count)

    @property
    def ready(self) -> bool:
        """Whether there is a spread."""
        return self.collected > 1

    @property
    def moves(self) -> bool:
        """Whether a draw differs from the mean."""
        return self.ready

    @property
    def note(self) -> str:
        """How many iterates there are, for `summary`."""
        return f"{self.collected} iterates" if self.ready else "no spread yet"

    def deviations(self) -> tuple[Tensor, Tensor]:
        """Return sqrt(diag/2), of the parameter's shape, and D/sqrt(2 (K-1)), (K, ...)."""
        assert self.average is not None
        assert self.scatter is not None
        assert self.iterates is not None
        own = (self.scatter / (2 * (self.collected - 1))).sqrt_()
        shared = (self.iterates - self.average) / math.sqrt(2 * (len(self.iterates) - 1))
        if self.fixed_row is not None:
            own[self.fixed_row] = 0
            shared[:, self.fixed_row] = 0
        return own, shared

    @property
    def own_std(self) -> Tensor:
        """sqrt((diag + sum of D^2 over its columns/(K-1))/2); 0 before the second iterate."""
        if not self.ready:
            return super().own_std
        own, shared = self.deviations()
        return (own.square() + shared.square().sum(0)).sqrt()

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return the iterates' mean, or the parameter before there are any; the gradient passes to the parameter."""
        if self.average is None:
            return original
        center = self.average.to(original.dtype)
        if torch.is_grad_enabled() and original.requires_grad:
            center = center + (original - original.detach())
        return center

    def noise_of(self, seed: int) -> Tensor:
        """Return theta - mu of a draw: (sqrt(diag) eps1 + D eps2/sqrt(K-1))/sqrt(2)."""
        stream = self.stream(seed)
        if not self.ready:
            return torch.zeros(self.shape, dtype=stream.dtype, device=stream.device)
        own, shared = self.deviations()
        eps2 = stream._replace(key=SHARED, shape=torch.Size([len(shared)]), dtype=shared.dtype).normal()
        together: Tensor = torch.tensordot(eps2, shared, 1)
        return own * stream.normal() + together

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return mu + noise; its gradient passes to the parameter as it is."""
        return (self.mean_theta(mean).to(noise.dtype) + noise).to(mean.dtype)

    def draw(self, mean: Tensor, seed: int) -> Tensor:
        """Compute `theta`."""
        return self.theta(mean, self.noise_of(seed))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's present value to the moments (Welford's recurrence), and keep it in place of the oldest.

        n <- n + 1; d = theta - average; average <- average + d/n; scatter <- scatter + (n-1)/n d^2.
        """
        theta = self.original.detach()
        theta = theta.to(state_dtype(theta)).clone(memory_format=torch.contiguous_format)
        if self.count is None or self.average is None or self.scatter is None or self.iterates is None:
            self.count = torch.ones((), dtype=torch.int64, device=theta.device)
            self.average, self.scatter, self.iterates = theta, torch.zeros_like(theta), theta.unsqueeze(0).clone()
            return
        n = int(self.count.add_(1))
        away = theta - self.average
        self.average.add_(away, alpha=1 / n)
        self.scatter.addcmul_(away, away, value=(n - 1) / n)
        if len(self.iterates) < self.rank:
            self.iterates = torch.cat([self.iterates, theta.unsqueeze(0)])
        else:
            self.iterates[(n - 1) % self.rank] = theta

    # -- state -------------------------------------------------------------------------------------------------

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless the count is a positive integer, the scatter not negative and the iterates of one shape."""
        if name == "count":
            if tensor.dim() or tensor.dtype != torch.int64 or int(tensor) < 1:
                raise ValueError("count is not a positive integer")
        elif name == "iterates":
            if tensor.dim() != len(self.shape) + 1 or not len(tensor):
                raise ValueError(f"iterates has shape {tuple(tensor.shape)}, the parameter {tuple(self.shape)}")
            for one in tensor:
                super().check_tensor(name, one)
        else:
            super().check_tensor(name, tensor)
            if name == "scatter" and bool((tensor < 0).any()):
                raise ValueError("scatter is negative")

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise unless these tensors can be moments and iterates of one path."""
        super().check_state(state)
        if "count" in state and len(state["iterates"]) != min(int(state["count"]), self.rank):
            raise ValueError(f"{len(state['iterates'])} iterates are kept of {int(state['count'])}")


def collect(model: nn.Module) -> None:
    """Collect the present weights of a model of method "swag", all at once.

    For schedules of your own, such as one iterate at the end of each epoch; with `every=0` nothing else collects.

    Args:
        model: A model bayesified with "swag", or a module that contains one.

    Raises:
        ValueError: There is nothing of method "swag" in it.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, predict
        >>> from bayesify.methods.swag import collect
        >>> model = bayesify(torch.nn.Linear(3, 2), "swag", every=0)
        >>> for _ in range(3):
        ...     _ = torch.nn.init.normal_(model.parametrizations.weight.original)  # an epoch
        ...     collect(model)
        >>> predict(model, torch.ones(4, 3), samples=5)
        Predictive(4 examples, 2 classes, 5 samples)
    """
    found = [p for _, p in named_posteriors(model) if isinstance(p, SWAGPosterior)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no posterior of method 'swag'; call bayesify(model, 'swag') first"
        )
    for posterior in found:
        posterior.collect()
