"""SWAG: the Gaussian of the weights that an optimizer passes through (Maddox et al. 2019).

theta = mu + (sqrt(diag) eps1 + D eps2 / sqrt(K-1)) / sqrt(2): mu and diag are mean and variance of all collected
iterates, the K columns of D the deviations of the last K from mu. eps1 is the parameter's own noise; eps2 is one vector
of K numbers for the whole draw, so that weights of different layers move together as they did in training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.core.method import CollectedPosterior, Tempered, collect_states
from bayesify.core.mixture import Mixture
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, state_dtype
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import named_posteriors
from bayesify.engine.noise import name_key
from bayesify.methods.stages import Copies, Place, Stages

SHARED = name_key("swag/shared")
ITERATES, SHORTEST = 10, 8  # of a training that is a cycle: how many it collects, and its least steps


class Iterates(Copies):
    """The last quarter of training at a constant rate, or in cosines, each of which ends in an iterate.

    With `restart` each cycle is a training at a constant rate, which collects `ITERATES` in its last quarter and ends
    in a member (Wilson and Izmailov 2020).
    """

    high = low = 1.0

    def __init__(self, run: Any, **options: Any) -> None:
        self.repeats = "restart" in options or "fresh" in options
        super().__init__(run, **(options if self.repeats else {"restart": "first", "seed": 0}))
        if not self.repeats:
            self.cycles, self.least, self.begin, self.first = ITERATES, 2, 0.75, 1.0

    def check(self, lengths: Sequence[int]) -> None:
        """Raise where a cycle collects fewer than two iterates."""
        if self.repeats:
            super().check(lengths)
            if min(lengths) < SHORTEST:
                raise ValueError(f"a cycle takes at least {SHORTEST} steps, got {min(lengths)}; take fewer cycles")

    def after(self, place: Place) -> None:
        """Collect an iterate in the last quarter of a training."""
        before, now = (ITERATES * (4 * k - 3 * place.length) // place.length for k in (place.step, place.step + 1))
        if self.repeats and now > max(before, 0):
            collect_states(self.run.posteriors(), SWAGPosterior)

    def end(self, number: int, *, last: bool) -> None:
        """Collect an iterate of what the optimizer moves, or keep a member."""
        if self.repeats:
            super().end(number, last=last)
        else:
            collect_states(self.run.posteriors(), SWAGPosterior)

    def mixture(self) -> Mixture:
        """Return the mixture of the members so far."""
        return super().mixture() if self.repeats else Stages.mixture(self)


@dataclass(frozen=True, kw_only=True)
class SWAG(Tempered):
    """Options of "swag".

    Any optimizer trains the model. `bayesify.Cycles` collects ten iterates in the last quarter of the steps, at the
    largest learning rate, which decides how wide the posterior is; without it, call `collect(model)` now and then. Mean
    mode reads the mean of the iterates. The statistics of BatchNorm layers are the last iterate's;
    `predict(..., update_bn=train_loader)` computes those of every sample.

    Attributes:
        rank: K, how many of the last iterates are kept, each of the parameters' size; at least 2.
        Ninflate: The data counts as if each item were there this many times; it weakens the penalty. None is 1, or by
            the number of weights where `prior_sig` is None.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction; the iterates differ in a few directions, and few samples miss some of them.
    """

    name: ClassVar[str] = "swag"
    stages: ClassVar[type[Stages]] = Iterates

    rank: int = 20
    Ninflate: float | None = None
    nst: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.rank) or self.rank < 2:
            raise ValueError(f"rank must be an integer >= 2, got {self.rank!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without iterates at first."""
        return SWAGPosterior(param, prior, flat=self.flat(prior), fixed_row=fixed_row, most=self.rank)

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before the second iterate; a parameter that nobody has moved since stays a point."""
        if not any(isinstance(p, SWAGPosterior) and p.ready for p in posteriors):
            super().check_ready(posteriors)


class SWAGPosterior(CollectedPosterior):
    """N(mu, (diag + D D^T/(K-1))/2) of the collected iterates; the parameter before there are any.

    The tensor `iterates`, (K, ...), has the last K of them.
    """

    gaussian = False  # the elements' noise is shared
    kept = CollectedPosterior.kept | {"iterates": "stack"}
    missing = (
        "SWAG needs two iterates; train with cycles = bayesify.Cycles(optimizer, model, steps=...) and cycles.step() "
        "after every optimizer.step(), or call bayesify.methods.swag.collect(model) now and then"
    )

    iterates: Tensor | None

    @property
    def collected(self) -> int:
        """How many iterates there were."""
        return 0 if self.count is None else int(self.count)

    @property
    def ready(self) -> bool:
        """Whether there is a spread."""
        return self.collected > 1

    moves = ready

    @property
    def note(self) -> str:
        """How many iterates there are, for `summary`."""
        return f"{self.collected} iterates" if self.ready else "no spread yet"

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameter's present value to the moments, and keep it in place of the oldest."""
        super().collect()
        if self.reader is not None:
            self.reader.stale_statistics = True
        theta = self.original.detach()
        theta = theta.to(state_dtype(theta)).clone(memory_format=torch.contiguous_format).unsqueeze(0)
        if self.iterates is None or len(self.iterates) < self.most:
            self.iterates = theta if self.iterates is None else torch.cat([self.iterates, theta])
        else:
            self.iterates[(self.collected - 1) % self.most] = theta[0]

    def _diagonal_std(self) -> Tensor:
        """Return sqrt(diag/2)."""
        assert self.scatter is not None
        return (self.scatter / (2 * (self.collected - 1))).sqrt_()

    def _low_rank(self, eps: Tensor) -> Tensor:
        """Return D eps/sqrt(2 (K-1)), for K numbers, without D, which is K times the parameter's size."""
        assert self.average is not None
        assert self.iterates is not None
        numbers = eps / math.sqrt(2 * (len(self.iterates) - 1))
        found: Tensor = torch.tensordot(numbers, self.iterates, 1).sub_(self.average * numbers.sum())
        return found

    @property
    def own_std(self) -> Tensor:
        """sqrt((diag + sum of D^2 over its columns/(K-1))/2); 0 before the second iterate."""
        if not self.ready or self.iterates is None:
            return super().own_std
        total = self._diagonal_std().square_()
        for iterate in self.iterates:
            away = iterate - self.average
            total.addcmul_(away, away, value=0.5 / (len(self.iterates) - 1))
        return total.sqrt_()

    def drawing(self, mean: Tensor) -> None:
        """Return nothing: a draw is no formula of single elements."""

    def noise_of(self, seed: int) -> Tensor:
        """Return theta - mu of a draw: (sqrt(diag) eps1 + D eps2/sqrt(K-1))/sqrt(2)."""
        stream = self.stream(seed)
        if not self.ready or self.iterates is None:
            return torch.zeros(self.shape, dtype=stream.dtype, device=stream.device)
        columns, dtype = torch.Size([len(self.iterates)]), self.iterates.dtype
        eps2 = stream._replace(key=SHARED, shape=columns, dtype=dtype, start=0).normal()
        noise = self._low_rank(eps2).addcmul_(self._diagonal_std(), stream.normal())
        if self.fixed_row is not None:
            noise[self.fixed_row] = 0
        return noise

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return mu + noise; its gradient passes to the parameter as it is."""
        return (self.mean_theta(mean).to(noise.dtype) + noise).to(mean.dtype)


def collect(model: nn.Module) -> None:
    """Collect the present weights of a model of method "swag".

    For schedules of your own, such as one iterate at the end of each epoch, in place of `bayesify.Cycles`.
    """
    found = [p for _, p in named_posteriors(model) if isinstance(p, SWAGPosterior)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no posterior of method 'swag'; call bayesify(model, 'swag') first"
        )
    collect_states(found, SWAGPosterior)
