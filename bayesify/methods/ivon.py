"""IVON: variational inference by an online Newton method, at about the cost of Adam.

The optimizer (`bayesify.IVON`) keeps the curvature h where Adam keeps squared gradients, and the posterior's spread
follows from it: no parameter for the spread, no second gradient, no array of noise.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, over_processes, part, part_of
from bayesify.core.method import Tempered, gaussian
from bayesify.core.penalty import pull_of
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Energy, Factor, Part, Prior, has_moved, host, scaled, squares, state_dtype
from bayesify.core.ranks import shared_seed
from bayesify.core.reading import Scope
from bayesify.core.sampling import Draw, Recipe
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run_all
from bayesify.engine.writing import Formula
from bayesify.methods.optimizers import MethodOptimizer, except_row
from bayesify.methods.vi import MEMORY

WARM = 10  # steps before the curvature moves, over which lr grows


@dataclass(frozen=True, kw_only=True)
class IVON(Tempered):
    """Options of "ivon".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower. None
            is 1, or by the number of weights where `prior_sig` is None.
        init_sig: The spread before the first steps; None is min(1e-3, prior_sig/10), or 0.3 % of the prior's scale
            where `prior_sig` is None.
        bias: "informative" treats biases as the weights.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "ivon"
    optimizer: ClassVar[str] = "IVON"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative",)

    Ninflate: float | None = None
    init_sig: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("init_sig", above=0)

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the Gaussian posterior of one parameter, N(param, init_sig^2) at first."""
        return IVONPosterior(param, prior, fixed_row=fixed_row, init_sig=self.init_sig or prior.init_sig)


class IVONPosterior(Posterior):
    """theta = m + s eps with s^2 = 1/(lambda (h + delta)), lambda = N Ninflate and delta = 1/(lambda sigma^2).

    The tensor `h` is there once an optimizer is; before it s is `init_sig`.
    """

    gaussian = True
    kept = Posterior.kept | {"h": "same"}
    draws_on_shards = True  # one theta per optimizer step, on all processes
    results = ("strength",)
    strength: float | None = None  # lambda, which the optimizer knows
    h: Tensor | None
    init_sig: float

    @property
    def delta(self) -> float:
        """1/(lambda sigma^2): the prior's curvature, in units of the mean loss."""
        assert self.strength is not None
        return 1 / (self.strength * self.prior_sig**2)

    def begin(self, strength: float) -> None:
        """Take over lambda, and the curvature that the present spread stands for: h = 1/(lambda s^2) - delta."""
        if self.h is None or self.strength != strength:  # else a run goes on
            s, self.strength = self.own_std, strength
            self.h = (1 / (strength * s.square()) - self.delta).clamp_(min=0)

    def forget(self) -> None:
        """Let s be what it was at first."""
        self.h = None
        if self.strength is not None:
            self.begin(self.strength)

    @property
    def own_std(self) -> Tensor:
        """The spread s = 1/sqrt(lambda (h + delta))."""
        if self.h is None or self.strength is None:
            return torch.full(self.shape, self.init_sig, dtype=state_dtype(self.original), device=self.original.device)
        return (self.h + self.delta).mul_(self.strength).rsqrt_()

    @property
    def untrained(self) -> str:
        """Whether the curvature is where it started."""
        if self.h is not None and self.strength is not None and self.h.numel():
            ends = torch.stack(torch.aminmax(part(self.h)))
            if has_moved((ends + self.delta).mul_(self.strength).rsqrt_(), self.init_sig):
                return ""
        return "the optimizer bayesify.IVON, which alone finds it, has made too few steps or none"

    def _known(self) -> tuple[Any, float, float]:
        """Return h, lambda and delta; before an optimizer has begun, numbers with which s is init_sig."""
        begun = self.h is not None and self.strength is not None
        return (self.h, self.strength, self.delta) if begun else (1 / self.init_sig**2, 1.0, 0.0)  # type: ignore[return-value]

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]]:
        """Return m + s eps; its gradient passes to the mean as it is."""
        known = self._known()
        return (draw, (mean, *known)) if isinstance(known[0], Tensor) else (gaussian, (mean, self.init_sig))

    def terms(self, mean: Tensor, scale: float) -> Energy:
        """Return KL(N(m, s^2) || N(theta0, sigma^2)), without a gradient: the optimizer's step has the prior.

        sum_i 1/2 (log(sigma^2/s_i^2) - 1 + s_i^2/sigma^2 + (m_i - theta0_i)^2/sigma^2). A fixed row has no s.
        """
        if self.strength is not None and not math.isclose(scale * self.strength, 1, rel_tol=1e-6):
            raise ValueError(
                f"the optimizer IVON counts {self.strength * scale:.6g} times the data that penalty does; give both "
                "the same num_data, the size of the training set"
            )
        mean, (h, strength, delta) = mean.detach(), self._known()
        h = h if isinstance(h, Tensor) else torch.full_like(mean, h, dtype=state_dtype(mean))
        inverse, count = 1 / self.prior_sig, mean.numel()
        spread = scale / 2 * inverse**2 / strength
        inputs = (*scaled((mean, h, self.center), inverse), delta, inverse)
        parts = [Part(terms, inputs, (scale / 2, spread, scale / 2))]
        if self.fixed_row is not None:
            row = h[self.fixed_row]
            count -= row.numel()
            parts.append(Part(variances, (row, delta), (-spread, -scale / 2)))
        constant = scale * count * (math.log(self.prior_sig * math.sqrt(strength)) - 0.5)
        return Energy(tuple(parts), constant, self.prior_sig)

    def pulling(self, mean: Tensor, seed: int, grad: Tensor) -> Recipe:
        """Return the gradient at theta, as it is."""
        return Recipe(inputs=(grad,), passes=True)

    def energy_pulling(self, mean: Tensor, coef: Factor, pull: Factor) -> Recipe:
        """Return nothing: the optimizer's step has the prior."""
        return Recipe()


def draw(eps: Any, m: Any, h: Any, strength: Any, delta: Any) -> Any:
    """Return m + eps/sqrt(lambda (h + delta))."""
    return m + eps * torch.rsqrt(strength * (h + delta))


def variances(h: Any, delta: Any) -> Any:
    """Return 1/(h + delta) and log(h + delta)."""
    return 1 / (h + delta), torch.log(h + delta)


def terms(m: Any, h: Any, m0: Any, delta: Any, inverse: Any) -> Any:
    """Return ((m - theta0)/sigma)^2 and `variances`."""
    return squares(m, m0, inverse), *variances(h, delta)


# -- the step ----------------------------------------------------------------------------------------------------------


def observe(eps: Any, g: Any, h: Any, strength: Any, delta: Any) -> Any:
    """Return g^ eps s and (g^ s)^2."""
    each = g * torch.rsqrt(strength * (h + delta))
    return each * eps, each * each


def drift(g: Any, average: Any, m: Any, fresh: Any, lr: Any, warm: Any) -> Any:
    """Return the momentum, and a step of a parameter that is not Bayesian."""
    average = average + fresh * (g - average)
    return average, m - lr * (average / warm)


def move(
    g: Any, average: Any, h: Any, m: Any, m0: Any, fresh: Any, lr: Any, warm: Any, delta: Any, pull: Any,
    precision: Any, rate: Any, ratio: Any,
) -> Any:  # fmt: skip
    """Return momentum, curvature and mean after a step with b2 = None."""
    average = average + fresh * (g - average)
    direction = average / warm + (delta + pull * precision) * (m - m0)
    return average, h + rate * (ratio * (g * g) - h), m - lr * direction


def newton(
    eps: Any, g: Any, average: Any, h: Any, m: Any, m0: Any, fresh: Any, lr: Any, warm: Any, delta: Any, pull: Any,
    precision: Any, strength: Any, rate: Any, start: Any,
) -> Any:  # fmt: skip
    """Return momentum, curvature and mean after a step with b2."""
    average = average + fresh * (g - average)
    found = g * eps * torch.sqrt(strength * (h + delta))
    after = h + rate * (found - h) + rate * rate * (h - found) ** 2 / (2 * (h + delta))
    direction = (average / warm + (delta + pull * precision) * (m - m0)) * ((start + delta) / (after + delta))
    return average, after, m - lr * direction


class IVONOptimizer(MethodOptimizer):
    """The optimizer of method "ivon".

    With g^ the gradient at theta = m + s eps, t the step and h^ = g^ (theta - m)/s^2 = g^ eps/s:

    g <- b1 g + (1-b1) g^;  h <- b2 h + (1-b2) h^ + (1-b2)^2 (h - h^)^2 / (2 (h + delta));
    m <- m - lr (h0 + delta) (g/(1-b1^t) + (delta + p) (m - theta0)) / (h + delta).

    p = c/(sigma^2 (D0 + D)) is the pull of `penalty` where `prior_sig` is None, else 0.

    The factor h0 + delta, with the curvature h0 that a tensor starts with, lets lr mean what it means for SGD. This
    takes thousands of steps, since h^ is mostly noise. With b2 = None, for runs of any length, squared gradients give
    the curvature's profile and sums over all weights its scale r (as in `bayesify.methods.vi`), and m moves as by SGD:

    h <- h + 0.05 (r g^^2 - h),  r = (running mean of sum g^ eps s) / (running mean of sum (g^ s)^2);
    m <- m - lr (g/(1-b1^t) + (delta + p) (m - theta0)).

    One theta serves a whole step, on all processes, and however many batches its gradient is accumulated over. The
    prior is in the step: `penalty` adds its value, and no gradient.

    Args:
        model: A model bayesified with "ivon", or a module that contains some.
        lr: A learning rate, or groups of `param_groups`.
        num_data: The size of the training set.
        betas: b1, and b2 or None, with which lr grows over the first ten steps.
        like: Whose rate `lr` is. "sgd": SGD's without momentum, so that of SGD with momentum b is lr (1 - b): where SGD
            with momentum 0.9 takes 0.05, this takes 0.5. "adamw": AdamW's, from which each tensor's own rate follows by
            the mean square of its gradients.

    Example:
        >>> import torch
        >>> from bayesify import IVON, bayesify, penalty, predict
        >>> model, x = bayesify(torch.nn.Linear(3, 1), "ivon"), torch.randn(8, 3)
        >>> optimizer = IVON(model, lr=0.1, num_data=8)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     (model(x).square().mean() + penalty(model, num_data=8)).backward()
        ...     optimizer.step()
        >>> predict(model, x, samples=5, task="regression").mean.shape
        torch.Size([8, 1])
    """

    method, kind, run_key = "ivon", IVONPosterior, "run"

    def __init__(
        self,
        model: nn.Module,
        lr: float | list[dict[str, Any]],
        *,
        num_data: float,
        betas: tuple[float, float | None] = (0.9, None),
        like: str = "sgd",
    ) -> None:
        first, self.second = betas
        if not 0 <= first < 1 or not (self.second is None or 0 <= self.second < 1):
            raise ValueError(f"betas must be two numbers in [0, 1), the second one or None, got {betas!r}")
        super().__init__(model, lr, num_data, {"beta": first}, like)
        for posterior in self._posteriors:
            with torch.no_grad(), on_shard(posterior) as own:
                own.begin(1 / posterior.reader.method.scale(num_data))
        self.run = {"seed": shared_seed(), "step": 0, "observed": torch.zeros(2)}
        self._announce()

    def _announce(self) -> None:
        """Choose the theta at which the gradients of the next step are taken."""
        for i, scope in enumerate(self._scopes):
            scope.step_draw = Draw((noises.mix(self.run["seed"], i) + self.run["step"]) % 2**63)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a run: its seed, its step and its momentum."""
        super().load_state_dict(state_dict)
        self._announce()

    def advance(self) -> None:
        """Move the posterior by one step."""
        run = {**self.run, "step": self.run["step"] + 1}
        warm, rate = 1.0, 0.0
        ratio: Factor = 0.0
        if self.second is None:
            run["observed"] = self._observed()
            cost, power = run["observed"]
            ratio = host(torch.where(power > 0, cost.clamp(min=0) / power, 0.0))
            # SGD's momentum begins as slowly; a whole step by the first gradient may leave a pretrained model for good.
            warm, rate = min(1.0, run["step"] / WARM), MEMORY if run["step"] > WARM else 0.0
        pulls = {id(scope): self._pull(scope) for scope in self._scopes}
        jobs = []
        for param, group, posterior in self.moving():
            numbers = (1 - group["beta"], self.rate(param, group["lr"]) * warm, 1 - group["beta"] ** run["step"])
            pull = pulls[id(posterior.reader)] if posterior is not None and posterior.relative else 0.0
            jobs += self._jobs(param, posterior, numbers, pull, (rate, ratio))
        run_all(jobs)
        self.run = run
        self._announce()

    def _pull(self, scope: Scope) -> Factor:
        """Return c/(D0 + D), D over the model's weights with a relative prior (see `bayesify.core.penalty`)."""
        near = [p for p in self._posteriors if p.reader is scope and p.relative]
        strength, floor = pull_of(scope, near)
        if not strength:
            return 0.0
        parts = [part_of(p) for p in near]
        jobs = [Job(squares, None, (p.original.detach(), p.center, 1 / p.prior_sig)) for p in parts]
        return strength / (floor + host(_sums(zip(near, jobs, strict=True))[0]))

    def _observed(self) -> Tensor:
        """Return the running means of what the noise costs, sum g^ eps s, and of sum (g^ s)^2, after a step."""
        before: Tensor = self.run["observed"]
        jobs = []
        for owner in self._posteriors:
            posterior = part_of(owner)
            if (grad := posterior.original.grad) is not None:
                if posterior.fixed_row is not None:  # which has no noise
                    grad = grad.clone()
                    grad[posterior.fixed_row] = 0
                inputs = (grad, *posterior._known())
                jobs.append((owner, Job(observe, posterior.stream(owner.reader.step_draw.seed), inputs)))
        if not jobs:
            return before
        sums = _sums(jobs)
        before = before.to(sums)
        return torch.where(sums.isfinite().all(), torch.lerp(before, sums, MEMORY), before)

    def _jobs(
        self, param: Tensor, posterior: Any, numbers: tuple[float, ...], pull: Factor, profile: tuple[Factor, ...]
    ) -> list[Job]:
        """Return the move of a parameter and its curvature."""
        state = self.state[param]
        assert param.grad is not None
        if "average" not in state:
            state["average"] = torch.zeros_like(param)
        grad, average, mean = part(param.grad), part(state["average"]), part(param)
        if posterior is None:
            return [Job(drift, None, (grad, average, mean, *numbers), (average, mean))]
        own = part_of(posterior)
        outs = (average, own.h, mean)
        inputs = (grad, *outs, own.center, *numbers, own.delta, pull, 1 / own.prior_sig**2)
        still = Job(move, None, (*inputs, *profile), outs)  # with b2, of a fixed row, which keeps its curvature
        if self.second is None:
            return [still]
        if "start" not in state:
            sums = torch.stack([own.h.sum(), own.h.new_tensor(own.h.numel())])
            total, count = over_processes([(posterior, sums)])
            state["start"] = float(total / count)
        inputs = (*inputs, own.strength, 1 - self.second, state["start"])
        stream = own.stream(posterior.reader.step_draw.seed)
        return except_row(own.fixed_row, Job(newton, stream, inputs, outs), still)


def _sums(jobs: Iterable[tuple[IVONPosterior, Job]]) -> Tensor:
    """Return the sums of jobs over posteriors and processes, each on the rows that it holds."""
    groups: dict[Any, list[tuple[IVONPosterior, Job]]] = {}
    for owner, job in jobs:
        group = None if owner.layout is None else owner.layout.group
        groups.setdefault((group, job.inputs[0].device), []).append((owner, job))
    rows = ((own[0][0], run_all([job for _, job in own])) for own in groups.values())
    return over_processes((owner, each.sum(0)) for owner, each in rows if each is not None)
