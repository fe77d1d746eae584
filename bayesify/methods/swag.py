"""SWAG: the Gaussian of the weights that an optimizer passes through (Maddox et al. 2019).

theta = mu + (sqrt(diag) eps1 + D eps2 / sqrt(K-1)) / sqrt(2): mu and diag are mean and variance of all collected
iterates, the K columns of D the deviations of the last K from mu. eps1 is the parameter's own noise; eps2 is one vector
of K numbers for the whole draw, so that weights of different layers move together as they did in training.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, part
from bayesify.core.method import Tempered
from bayesify.core.moments import CollectedPosterior
from bayesify.core.posterior import Posterior, Prior, state_dtype
from bayesify.core.wrap import named_posteriors, scopes_of
from bayesify.engine.noise import name_key
from bayesify.prediction.statistics import STALE

SHARED = name_key("swag/shared")
CYCLES = 10  # iterates of a schedule


@dataclass(frozen=True, kw_only=True)
class SWAG(Tempered):
    """Options of "swag".

    Any optimizer trains the model, and its steps are noticed. The spread is that of the optimizer's own path, so the
    learning rate is a part of the method: at a small one the iterates hardly differ. With `steps`, the length of the
    training, the method has a schedule. Three quarters are the optimizer's own. From `start` on the rate is the largest
    one again, whatever a scheduler says, and ten iterates are collected. With a `low` below `high` it goes from one to
    the other, by a cosine, in cycles of `every` steps, of which the last is collected.

    Without `steps` the rates are yours. By default ten iterates or so of the path's latter half are kept, however long
    it gets; `start` and `every` say it exactly, or `collect(model)` does. In mean mode the model is the mean of the
    iterates. The statistics of BatchNorm layers are the last iterate's; `predict(..., update_bn=train_loader)` computes
    those of every sample.

    Attributes:
        steps: How many optimizer steps training takes; None leaves the learning rate alone. `BayesTrainer` knows it.
        start: Steps before the first that counts; None is three quarters of `steps`, or 0.
        every: Every how many steps after these an iterate is collected; None is a tenth of the rest of `steps`; with 0
            nothing is collected but by `collect`.
        high: The learning rate at the beginning of a cycle, over the largest one before.
        low: The learning rate at the end of a cycle, likewise; the same as `high` for a constant rate.
        rank: K, how many of the last iterates are kept, each of the parameters' size; at least 2.
        Ninflate: The data counts as if each item were there this many times; it weakens the penalty. None is 1, or by
            the number of weights where `prior_sig` is None.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction; the iterates differ in a few directions, and few samples miss some of them.
    """

    name: ClassVar[str] = "swag"
    tempers: ClassVar[str] = "Ninflate"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")
    follows_steps: ClassVar[bool] = True

    steps: int | None = None
    start: int | None = None
    every: int | None = None
    high: float = 1.0
    low: float = 1.0
    rank: int = 20
    Ninflate: float | None = None
    bias: str = "informative"
    nst: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", above=0)
        self.check("low", least=0)
        self.check("high", above=0)
        if self.low > self.high:
            raise ValueError(f"low must be at most high = {self.high!r}, got {self.low!r}")
        for option, least in (("steps", 4), ("start", 0), ("every", 0), ("rank", 2)):
            value = getattr(self, option)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (whole and value >= least) and not (value is None and option != "rank"):
                raise ValueError(f"{option} must be an integer >= {least}, got {value!r}")
        if self.steps is not None and self.first + 2 * max(self.period, 1) > self.steps:
            raise ValueError(
                f"{self.steps} steps end before the second iterate, after start + 2 * every = "
                f"{self.first + 2 * max(self.period, 1)}; take a smaller start or every, or leave them out"
            )

    @property
    def first(self) -> int:
        """How many steps pass before the first that counts."""
        if self.start is not None or self.steps is None:
            return self.start or 0
        return min(3 * self.steps // 4, self.steps - 2)

    @property
    def period(self) -> int:
        """Every how many steps an iterate is collected; 0 is never."""
        if self.every is not None or self.steps is None:
            return 1 if self.every is None else self.every
        return max((self.steps - self.first) // CYCLES, 1)

    @property
    def latter(self) -> bool:
        """Whether the latter half of the path so far is collected, since nobody has said how long it gets."""
        return self.steps is None and self.start is None and self.every is None

    def pace(self, step: int) -> int:
        """Return every how many steps the latter half of a path is collected: a power of two, for ten or so of them."""
        pace = 1
        while step > 2 * pace * min(self.rank, CYCLES):
            pace *= 2
        return pace

    def rate_factor(self, posteriors: Sequence[Posterior], moved: Collection[int]) -> float | None:
        """Return low + (high - low) (1 + cos(pi r))/2; r goes from 0 at a cycle's first step to 1 at its last.

        None before `start`, and without `steps`.
        """
        made = max((p.steps for p in posteriors if isinstance(p, SWAGPosterior) and id(p.original) in moved), default=0)
        if self.steps is None or made < self.first:
            return None
        period = max(self.period, 1)
        r = (made - self.first) % period / max(period - 1, 1)
        return self.low + (self.high - self.low) * (1 + math.cos(math.pi * r)) / 2

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without iterates at first."""
        flat = prior.is_bias and self.bias == "uninformative"
        return SWAGPosterior(param, prior, flat=flat, fixed_row=fixed_row, rank=self.rank)

    def after_step(self, posteriors: Sequence[Posterior], moved: Collection[int]) -> None:
        """Count a step for the parameters that an optimizer has moved, and collect them where it is time."""
        for posterior in posteriors:
            if isinstance(posterior, SWAGPosterior) and id(posterior.original) in moved:
                posterior.steps += 1
                since = posterior.steps - self.first
                if self.latter:
                    self._follow(posterior)
                elif self.period and since > 0 and since % self.period == 0:
                    with on_shard(posterior) as own:
                        own.collect()

    def _follow(self, posterior: "SWAGPosterior") -> None:
        """Keep the multiples of the pace among the steps of the path's latter half."""
        step = posterior.steps
        pace = self.pace(step)
        if step % pace == 0:
            with on_shard(posterior) as own:
                own.slide(step // pace - step // 2 // pace, slower=self.pace(step - pace) < pace)

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before the second iterate; a parameter that nobody has moved since stays a point."""
        if not any(isinstance(p, SWAGPosterior) and p.collected > 1 for p in posteriors):
            for posterior in posteriors:
                posterior.check_ready()


class SWAGPosterior(CollectedPosterior):
    """N(mu, (diag + D D^T/(K-1))/2) of the collected iterates; the parameter before there are any.

    The tensor `iterates`, (K, ...), has the last K of them.
    """

    moments = (*CollectedPosterior.moments, "iterates")
    results = ("steps",)
    missing = (
        "SWAG needs two iterates; train first (beyond start + 2 * every steps where these were given), or call "
        "bayesify.methods.swag.collect(model) now and then"
    )

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

    def _own(self) -> Tensor:
        """Return sqrt(diag/2)."""
        assert self.scatter is not None
        return self._still((self.scatter / (2 * (self.collected - 1))).sqrt_())

    def _together(self, eps: Tensor) -> Tensor:
        """Return D eps/sqrt(2 (K-1)), for K numbers.

        One column after the other: D, of K times the parameter's size, is never written out.
        """
        assert self.average is not None
        assert self.iterates is not None
        total = torch.zeros_like(self.average)
        for number, iterate in zip(eps / math.sqrt(2 * (len(self.iterates) - 1)), self.iterates, strict=True):
            total.addcmul_(iterate - self.average, number)
        return self._still(total)

    def _still(self, spread: Tensor) -> Tensor:
        """Return a spread without that of the fixed row."""
        if self.fixed_row is not None:
            spread[self.fixed_row] = 0
        return spread

    @property
    def own_std(self) -> Tensor:
        """sqrt((diag + sum of D^2 over its columns/(K-1))/2); 0 before the second iterate."""
        if not self.ready or self.average is None or self.iterates is None:
            return super().own_std
        shared = _squares(self.iterates, self.average) / (2 * (len(self.iterates) - 1))
        return self._still((self._own().square_() + shared).sqrt_())

    def noise_of(self, seed: int) -> Tensor:
        """Return theta - mu of a draw: (sqrt(diag) eps1 + D eps2/sqrt(K-1))/sqrt(2)."""
        stream = self.stream(seed)
        if not self.ready:
            return torch.zeros(self.shape, dtype=stream.dtype, device=stream.device)
        assert self.iterates is not None
        columns, dtype = torch.Size([len(self.iterates)]), self.iterates.dtype
        eps2 = stream._replace(key=SHARED, shape=columns, dtype=dtype, start=0).normal()
        return self._own() * stream.normal() + self._together(eps2)

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
        if self.reader is not None:
            self.reader.told.add(STALE)
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

    @torch.no_grad()
    def slide(self, kept: int, *, slower: bool) -> None:
        """Keep the present value and the iterates before it, `kept` in all; if slower, every second one of those."""
        before = self.original.new_empty(0) if self.iterates is None else self.iterates
        self._forget_moments()
        self.collect()
        if len(before) and kept > 1:
            assert self.iterates is not None
            before = before[(len(before) - 1) % 2 :: 2] if slower else before
            self.iterates = torch.cat([before, self.iterates])[-kept:]
            self.average = self.iterates.mean(0)
            self.scatter = _squares(self.iterates, self.average)
            self.count = torch.full_like(self.count, len(self.iterates))  # type: ignore[arg-type]

    # -- state -------------------------------------------------------------------------------------------------

    def stored(self) -> dict[str, Tensor]:
        """Return the kept tensors for a state dict; of a sharded model always as many iterates, the last ones zero."""
        held = super().stored()
        if self.layout is not None:
            own = part(held["average"])
            every = own.new_zeros((self.rank, *own.shape))
            if self.iterates is not None:
                every[: len(self.iterates)] = part(self.iterates)
            held["iterates"] = self.layout.joined(every)
        return held

    def _load_from_state_dict(self, *args: Any) -> None:
        """Take over a state dict, without the iterates that are not there yet."""
        super()._load_from_state_dict(*args)
        if self.iterates is not None and len(self.iterates) > self.collected:
            own = part(self.iterates)[: self.collected].clone()
            self.iterates = own if self.layout is None else self.layout.joined(own)

    def check_tensor(self, name: str, tensor: Tensor) -> None:
        """Raise unless one tensor of a stored state fits; of the iterates each."""
        if name != "iterates":
            super().check_tensor(name, tensor)
            return
        if tensor.dim() != len(self.shape) + 1 or not len(tensor):
            raise ValueError(f"iterates has shape {tuple(tensor.shape)}, the parameter {tuple(self.shape)}")
        for one in tensor:
            super().check_tensor(name, one)

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise unless these tensors can be moments and iterates of one path."""
        super().check_state(state)
        if "count" in state and len(state["iterates"]) != min(int(state["count"]), self.rank):
            raise ValueError(f"{len(state['iterates'])} iterates are kept of {int(state['count'])}")


def _squares(iterates: Tensor, average: Tensor) -> Tensor:
    """Return the sum of (x - average)^2 over the iterates x, without an array of all their deviations."""
    total = torch.zeros_like(average)
    for iterate in iterates:
        away = iterate - average
        total.addcmul_(away, away)
    return total


def collect(model: nn.Module) -> None:
    """Collect the present weights of a model of method "swag", all at once.

    For schedules of your own, such as one iterate at the end of each epoch. With `every=0` nothing else collects, and
    by default nothing else from the first call on.

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
    for scope in scopes_of(model):
        if isinstance(scope.method, SWAG) and scope.method.latter:
            scope.method = replace(scope.method, every=0)
            for posterior in (p for p in scope.posteriors if isinstance(p, SWAGPosterior)):
                posterior._forget_moments()
    for posterior in found:
        with on_shard(posterior) as own:
            own.collect()
