"""SGLD and SGHMC: gradient steps with the noise that makes a chain's states posterior samples.

The posterior is the Gaussian of the chain's running moments. The noise is a pure function of (seed, step, parameter),
so that a resumed chain continues exactly. With `Cycles` a chain visits several basins, the members of a mixture.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from bayesify.core.distributed import part, part_of
from bayesify.core.method import CollectedPosterior, Tempered, collect_states
from bayesify.core.posterior import Posterior
from bayesify.core.prior import LOW_PRECISION, Prior
from bayesify.core.ranks import is_whole, shared_seed
from bayesify.core.scopes import scopes_of
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run_all
from bayesify.methods.optimizers import MethodOptimizer, except_row
from bayesify.methods.stages import Copies, Place

FEW = 5  # minimum number of states for a usable spread
FADE = 3.0  # half of the weight is on the last sixth of the states
SAMPLING = {"noise": 1.0, "collects": True}  # in every group: a factor on the noise, and whether `thin` collects


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
    optimizer: ClassVar[str] = "SGLD"

    Ninflate: float | None = None
    nd: float = 1.0
    burnin: int = 0
    thin: int = 10
    fade: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("nd", least=0)
        self.check_optional("fade", least=0)
        for option, least in (("burnin", 0), ("thin", 1)):
            value = getattr(self, option)
            if not is_whole(value) or value < least:
                raise ValueError(f"{option} must be an integer >= {least} (optimizer steps), got {value!r}")

    def resolve_defaults(self, *, relative: bool, weights: int) -> Self:
        """Forget early states where the prior is relative, besides what every tempered method does."""
        fade = (FADE if relative else 0.0) if self.fade is None else self.fade
        return replace(super().resolve_defaults(relative=relative, weights=weights), fade=fade)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without moments at first."""
        return SGLDPosterior(param, prior, flat=self.flat(prior), fixed_row=fixed_row, fade=self.fade or 0.0)

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before there are moments; warn if there are too few states."""
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
        """Return whether the state after this step (from 1) enters the moments."""
        return step > self.burnin and (step - self.burnin) % self.thin == 0


class SGLDPosterior(CollectedPosterior):
    """The Gaussian of a chain's running moments; the chain before there are any.

    The n-th of N states has the weight w_n ~ n(n+1)...(n+fade-1), 1 without `fade`. Tensors: `count`, which is N;
    `average`, sum w x / sum w; `scatter`, N - 1 times the weighted variance, made unbiased for independent states.
    """

    settings = (*CollectedPosterior.settings, "fade")
    missing = "the chain has no moments; step bayesify.SGLD beyond burnin + thin steps first"
    fade: float

    @property
    def own_std(self) -> Tensor:
        """sqrt(scatter/(count - 1)); 0 before the second state."""
        if self.count is None or self.scatter is None:
            return super().own_std
        return (self.scatter / (self.count - 1).clamp(min=1)).sqrt_()

    @property
    def note(self) -> str:
        """How many states the chain has collected, for `summary`."""
        if self.count is None:
            return "no moments yet"
        return f"{int(self.count)} states" if self.count > 1 else "1 state, no spread yet"

    def recurrence(self, n: int) -> tuple[float, float, float]:
        """Return the factors of the n-th state: of d, of the scatter so far and of d^2."""
        return weighted_recurrence(n, self.fade) if self.fade else super().recurrence(n)


@lru_cache
def weighted_recurrence(n: int, fade: float) -> tuple[float, float, float]:
    """Return r = (fade+1)/(n+fade), and the factors with which the scatter follows V = sum w (x - average)^2 / sum w.

    V <- (1-r) (V + r d^2), and V = scatter (1-q)/(n-1) with q = sum w^2 / (sum w)^2.
    """
    before, rate = concentration(n - 1, fade), (fade + 1) / (n + fade)
    after = (1 - rate) ** 2 * before + rate**2
    # Of one state the variance is 0, whatever it is divided by.
    keep = 0.0 if n == 2 else (1 - rate) * (n - 1) / (n - 2) * (1 - before) / (1 - after)
    return rate, keep, (1 - rate) * rate * (n - 1) / (1 - after)


@lru_cache
def concentration(n: int, fade: float) -> float:
    """Return q = sum w^2 / (sum w)^2 of n states."""
    found = 1.0
    for k in range(2, n + 1):
        rate = (fade + 1) / (k + fade)
        found = (1 - rate) ** 2 * found + rate**2
    return found


# -- the step ----------------------------------------------------------------------------------------------------------


def descend(theta: Any, g: Any, lr: Any) -> Any:
    """Return theta - lr g."""
    return theta - lr * g


def kicked(eps: Any, theta: Any, g: Any, lr: Any, size: Any) -> Any:
    """Return theta - lr g + size xi."""
    return theta + (size * eps - lr * g)


def glide(theta: Any, v: Any, g: Any, lr: Any, mu: Any) -> Any:
    """Return theta + v and v <- mu v - lr g."""
    v = mu * v - lr * g
    return theta + v, v


def kicked_glide(eps: Any, theta: Any, v: Any, g: Any, lr: Any, mu: Any, size: Any) -> Any:
    """Return theta + v and v <- mu v - lr g + size xi."""
    v = mu * v - lr * g + size * eps
    return theta + v, v


class SGLDOptimizer(MethodOptimizer):
    """Stochastic gradient Langevin dynamics; with momentum, stochastic gradient Hamiltonian Monte Carlo.

    v <- mu v - lr g + nd sqrt(2 lr (1-mu)/(N Ninflate)) xi;  theta <- theta + v,  xi ~ N(0, 1),

    where g is the gradient of the mean loss plus `penalty`, through which alone the prior enters. After `burnin` steps
    every `thin`-th state enters the moments of its posterior. Parameters that are not Bayesian, and an embedding's
    padding row, move without noise.

    Args:
        model: A model bayesified with "sgld", or a module that contains one.
        lr: The learning rate, or the groups of `param_groups`, each with its own.
        num_data: N, the number of training items; the same as in `penalty`.
        momentum: mu, in [0, 1).
        like: Whose rate `lr` is: that of torch.optim.SGD with this momentum ("sgd"), or of "adamw", from which each
            tensor's own rate follows by the mean square of its gradients.

    Raises:
        ValueError: The model is of another method, or a number is out of its range.

    Example:
        >>> import torch
        >>> from bayesify import SGLD, bayesify, penalty, predict
        >>> model, x = bayesify(torch.nn.Linear(3, 1), "sgld", thin=1), torch.randn(8, 3)
        >>> chain = SGLD(model, lr=0.01, num_data=8)
        >>> for _ in range(5):
        ...     chain.zero_grad()
        ...     (model(x).square().mean() + penalty(model, num_data=8)).backward()
        ...     chain.step()
        >>> predict(model, x, samples=5, task="regression").mean.shape
        torch.Size([8, 1])
    """

    method, kind, run_key = "sgld", SGLDPosterior, "chain"

    def __init__(
        self,
        model: nn.Module,
        lr: float | list[dict[str, Any]],
        *,
        num_data: float,
        momentum: float = 0.0,
        like: str = "sgd",
    ) -> None:
        super().__init__(model, lr, num_data, {"momentum": momentum, **SAMPLING}, like)
        self.run = {"seed": shared_seed(), "step": 0}
        for posterior in self._posteriors:
            if posterior.original.dtype in LOW_PRECISION:
                warnings.warn(
                    f"{posterior.name!r} is {posterior.original.dtype}, in which SGLD's small steps round to nothing; "
                    "keep the model in float32 (torch.autocast may still compute in less)",
                    stacklevel=2,
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after a look at its numbers."""
        mu = {**self.defaults, **param_group}["momentum"]
        if isinstance(mu, bool) or not isinstance(mu, (int, float)) or not 0 <= mu < 1:
            raise ValueError(f"momentum must be in [0, 1), got {mu!r}")
        if param_group.get("weight_decay", 0):
            raise ValueError("SGLD takes no weight_decay: the prior enters through bayesify.penalty alone")
        super().add_param_group(param_group)

    def advance(self) -> None:
        """Move the chain by one step, and collect its state where the method says so."""
        self.run = {**self.run, "step": self.run["step"] + 1}
        run_all([job for found in self.moving() for job in self._jobs(*found)])
        if self.param_groups[0]["collects"]:
            collect_states((p for p in self._posteriors if p.reader.method.collects(self.run["step"])), SGLDPosterior)

    def _jobs(self, param: Tensor, group: dict[str, Any], posterior: Any) -> list[Job]:
        """Return one parameter's step."""
        assert param.grad is not None
        lr, mu = self.rate(param, group["lr"]), group["momentum"]
        if self.like == "adamw":
            lr *= 1 - mu  # momentum adds up 1/(1-mu) steps
        if mu != 0 and "velocity" not in self.state[param]:
            self.state[param]["velocity"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        velocity = [part(self.state[param]["velocity"])] if "velocity" in self.state.get(param, {}) else []
        moved = [part(param), *velocity]
        inputs = (*moved, part(param.grad), lr, *([mu] if velocity else []))
        still = Job(glide if velocity else descend, None, inputs, moved)
        method = None if posterior is None else posterior.reader.method
        if method is None or group["noise"] * method.nd * lr == 0:
            return [still]
        size = group["noise"] * method.nd * math.sqrt(2 * lr * (1 - mu) * method.scale(self.num_data))
        own, number = part_of(posterior), self._scopes.index(posterior.reader)
        seed = (noises.mix(self.run["seed"], number) + self.run["step"]) % 2**64
        stream = noises.Stream(seed, own.key, moved[0].shape, moved[0].dtype, moved[0].device, own.start)
        noisy = Job(kicked_glide if velocity else kicked, stream, (*inputs, size), moved)
        return except_row(own.fixed_row, noisy, still)


# -- cycles ------------------------------------------------------------------------------------------------------------


class Basins(Copies):
    """Look for a basin without noise up to `beta`; from there on sample it, and collect every `thin`-th state.

    At the end of a cycle a copy of the model is its member, and the moments start anew (Zhang et al. 2020). The chain's
    own collection and the `burnin` of the method have no meaning here.
    """

    cycles, high, options = 4, 1.0, ("beta",)

    def __init__(self, run: Any, *, beta: float = 0.8) -> None:
        super().__init__(run, restart="first", seed=0)
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be in [0, 1), got {beta!r}")
        self.beta, self.first = beta, 1.0
        self.thin = max(getattr(scope.method, "thin", 1) for scope in scopes_of(run.model))

    def check(self, lengths: Sequence[int]) -> None:
        """Raise where a cycle collects fewer than two states."""
        super().check(lengths)
        sampling = min(lengths) - math.ceil(self.beta * min(lengths))
        if sampling // self.thin < 2:
            raise ValueError(
                f"a cycle has {sampling} steps from beta on, of which every {self.thin}th is collected: fewer than "
                "two states; take more steps, fewer cycles, a smaller beta or thin"
            )

    def before(self, place: Place | None) -> None:
        """Choose whether the next step takes noise."""
        explores = place is not None and place.step < self.beta * place.length
        for group in self.run.optimizer.param_groups:
            group["noise"], group["collects"] = float(not explores), False

    def after(self, place: Place) -> None:
        """Collect a state."""
        sampled = place.step + 1 - math.ceil(self.beta * place.length)  # steps of this cycle with noise, so far
        if sampled > 0 and sampled % self.thin == 0:
            collect_states(self.run.posteriors(), SGLDPosterior)

    def go_on(self, number: int) -> None:
        """Let the chain go on where it is, without moments."""
        for posterior in self.run.posteriors():
            posterior.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the members."""
        return {**super().state_dict(), "beta": self.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the members, as copies of the model."""
        super().load_state_dict(state)
        self.beta = state["beta"]


SGLD.stages = Basins
