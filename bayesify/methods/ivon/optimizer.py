"""The optimizer of method "ivon": one theta per step, a curvature per weight, and the prior in the step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, over_processes, part, part_of
from bayesify.core.modes import Draw
from bayesify.core.penalty import pull_of
from bayesify.core.prior import Factor, host, squares
from bayesify.core.ranks import shared_seed
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_num_data, scopes_of
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run_all
from bayesify.methods.ivon.method import IVONPosterior
from bayesify.methods.natural import MEMORY
from bayesify.methods.optimizers import MethodOptimizer, check_like, posteriors_for

WARM = 10  # steps before the curvature moves, over which lr grows


class IVON(MethodOptimizer):
    """The optimizer of method "ivon".

    With g^ the gradient at theta = m + s eps, t the step and h^ = g^ (theta - m)/s^2 = g^ eps/s:

    g <- b1 g + (1-b1) g^;  h <- b2 h + (1-b2) h^ + (1-b2)^2 (h - h^)^2 / (2 (h + delta));
    m <- m - lr (h0 + delta) (g/(1-b1^t) + (delta + p) (m - theta0)) / (h + delta).

    p = c/(sigma^2 (D0 + D)) is the pull of `penalty` where `prior_sig` is None, else 0.

    The factor h0 + delta, with the curvature h0 that a tensor starts with, lets lr mean what it means for SGD. This
    needs thousands of steps: h^ is mostly noise, which only a small 1-b2 averages out. With b2 = None, for runs of any
    length, the curvature's profile comes from squared gradients, its scale r from the sum over all weights
    (`bayesify.methods.natural`), and m moves as by SGD:

    h <- h + 0.05 (r g^^2 - h),  r = (running mean of sum g^ eps s) / (running mean of sum (g^ s)^2);
    m <- m - lr (g/(1-b1^t) + (delta + p) (m - theta0)).

    One theta serves a whole step, on all processes, and however many batches its gradient is accumulated over. The
    prior is in the step: `penalty` adds its value, and no gradient.

    Args:
        model: A model bayesified with "ivon", or a module that contains some.
        lr: A learning rate, or groups of `param_groups`.
        num_data: The size of the training set.
        betas: b1, and b2 or None, with which lr grows over the first ten steps.
        clip: The largest change of an element in units of lr, or None.
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

    run_key = "run"

    def __init__(
        self,
        model: nn.Module,
        lr: float | list[dict[str, Any]],
        *,
        num_data: float,
        betas: tuple[float, float | None] = (0.9, None),
        clip: float | None = None,
        like: str = "sgd",
    ) -> None:
        self.like = check_like(like)
        check_num_data(num_data)
        first, second = betas
        if not 0 <= first < 1 or not (second is None or 0 <= second < 1):
            raise ValueError(f"betas must be two numbers in [0, 1), the second one or None, got {betas!r}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be a positive number or None, got {clip!r}")
        if not isinstance(lr, (list, tuple)) and not (isinstance(lr, (int, float)) and 0 < lr < math.inf):
            raise ValueError(f"lr must be a positive number or groups of param_groups, got {lr!r}")
        self._own = [(p, scope) for p, scope, _ in posteriors_for("IVON", model, IVONPosterior, "ivon")]
        self._scopes = scopes_of(model)
        groups = list(lr) if isinstance(lr, (list, tuple)) else [{"params": list(model.parameters()), "lr": lr}]
        super().__init__(groups, {"lr": 0.0, "beta": first})
        self.clip, self.second = clip, second
        for posterior, scope in self._own:
            with torch.no_grad(), on_shard(posterior) as own:
                own.begin(1 / scope.method.scale(num_data))
        self.run = {"seed": shared_seed(), "step": 0, "cost": 0.0, "power": 0.0}
        self._announce()

    def _announce(self) -> None:
        """Tell the models which theta the next step is taken at."""
        for i, scope in enumerate(self._scopes):
            scope.step_draw = Draw((noises.mix(self.run["seed"], i) + self.run["step"]) % 2**63)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a run: its seed, its step and its momentum."""
        super().load_state_dict(state_dict)
        self._announce()

    def advance(self) -> None:
        """Move the posterior by one step."""
        run: dict[str, Any] = {**self.run, "step": self.run["step"] + 1}
        own = {id(p.original): (p, scope) for p, scope in self._own}
        if self.second is None:
            self._look(run)
        pulls = {id(scope): self._pull(scope) for scope in self._scopes}
        ratio = host(_ratio(run))
        # Momentum of SGD begins as slowly; a whole step by the first gradient may leave a pretrained model for good.
        warm = min(1.0, run["step"] / WARM) if self.second is None else 1.0
        jobs, rows = [], []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    posterior, scope = own.get(id(param), (None, None))
                    numbers = (
                        1 - group["beta"],
                        self.rate(param, group["lr"]) * warm,
                        1 - group["beta"] ** run["step"],
                    )
                    pull = pulls[id(scope)] if posterior is not None and posterior.relative else 0.0
                    rate = MEMORY if self.second is None and run["step"] > WARM else 0.0
                    found, row = self._job(param, posterior, scope, numbers, (pull, rate, ratio))
                    jobs.append(found)
                    rows += row
        run_all(jobs)
        for restore in rows:
            restore()
        self.run = run
        self._announce()

    def _pull(self, scope: Scope) -> Factor:
        """Return c/(D0 + D), D over the model's weights with a relative prior (see `bayesify.core.penalty`)."""
        near = [p for p, own in self._own if own is scope and p.relative]
        strength, floor = pull_of(scope, near)
        if not strength:
            return 0.0
        parts = [part_of(p) for p in near]
        jobs = [Job(squares, None, (p.original.detach(), p.center, 1 / p.prior_sig)) for p in parts]
        return strength / (floor + host(_over_shards(near, jobs)[0]))

    def _look(self, run: dict[str, Any]) -> None:
        """Learn from a step what the noise costs, sum g^ eps s, and what its squared gradients are, sum (g^ s)^2."""
        jobs, owners = [], []
        for owner, posterior, scope in ((p, part_of(p), scope) for p, scope in self._own):
            grad, h, row = posterior.original.grad, posterior.h, posterior.fixed_row
            if grad is not None and h is not None and posterior.strength is not None:
                if row is not None:  # which has no noise
                    grad = grad.clone()
                    grad[row] = 0
                numbers = (posterior.strength, posterior.delta)
                jobs.append(Job(observe, posterior.stream(_seed(scope)), (grad, h, *numbers)))
                owners.append(owner)
        if not jobs:
            return
        sums = _over_shards(owners, jobs)
        for name, now in zip(("cost", "power"), torch.where(sums.isfinite().all(), sums, torch.nan), strict=True):
            known = run[name]
            before = known.to(now) if isinstance(known, Tensor) else torch.full_like(now, known)
            run[name] = torch.where(now.isnan(), before, torch.lerp(before, now, MEMORY))

    def _job(
        self, param: Tensor, posterior: Any, scope: Any, numbers: tuple[float, ...], more: tuple[Factor, ...]
    ) -> tuple[Job, list[Callable[[], None]]]:
        """Return the move of one parameter, and of its curvature where it is Bayesian; and what a fixed row needs."""
        state, whole_grad = self.state[param], param.grad
        assert whole_grad is not None
        if "average" not in state:
            state["average"] = torch.zeros_like(param)
            if posterior is not None and self.second is not None:
                sums = torch.stack(
                    [part(posterior.h).sum(), torch.full_like(posterior.h.sum(), part(posterior.h).numel())]
                )
                total, count = over_processes([(posterior, sums)])
                state["start"] = float(total / count)
        grad, average, mean = part(whole_grad), part(state["average"]), part(param)
        if posterior is None:
            return Job(drift, None, (grad, average, mean, *numbers), (average, mean)), []
        own = part_of(posterior)
        h, clip = own.h, math.inf if self.clip is None else self.clip
        given: tuple[Factor, ...] = (*numbers, clip, own.delta, more[0], 1 / own.prior_sig**2)
        outs = (average, h, mean)
        if self.second is None:
            return Job(move, None, (grad, average, h, mean, own.center, *given, *more[1:]), outs), []
        inputs = (grad, average, h, mean, own.center, *given, own.strength, 1 - self.second, state["start"])
        rows = []
        if own.fixed_row is not None:  # it has no noise, and keeps its curvature
            row = own.fixed_row
            kept = [x[row].clone() for x in outs]
            center = own.center[row] if isinstance(own.center, Tensor) and own.center.dim() else own.center
            still = Job(move, None, (grad[row], *kept, center, *given, 0.0, 0.0), tuple(kept))

            def restore() -> None:
                run_all([still])
                for x, value in zip(outs, kept, strict=True):
                    x[row] = value

            rows.append(restore)
        return Job(newton, own.stream(_seed(scope)), inputs, outs), rows


# -- formulas of a step ------------------------------------------------------------------------------------------------


def observe(eps: Any, g: Any, h: Any, strength: Any, delta: Any) -> Any:
    """Return g^ eps s and (g^ s)^2."""
    each = g * torch.rsqrt(strength * (h + delta))
    return each * eps, each * each


def drift(g: Any, average: Any, m: Any, fresh: Any, lr: Any, warm: Any) -> Any:
    """Return the momentum, and a step of a parameter that is not Bayesian."""
    average = average + fresh * (g - average)
    return average, m - lr * (average / warm)


def move(
    g: Any, average: Any, h: Any, m: Any, m0: Any, fresh: Any, lr: Any, warm: Any, clip: Any, delta: Any, pull: Any,
    precision: Any, rate: Any, ratio: Any,
) -> Any:  # fmt: skip
    """Return momentum, curvature and mean after a step with b2 = None."""
    average = average + fresh * (g - average)
    direction = average / warm + (delta + pull * precision) * (m - m0)
    return average, h + rate * (ratio * (g * g) - h), m - lr * torch.clamp(direction, -clip, clip)


def newton(
    eps: Any, g: Any, average: Any, h: Any, m: Any, m0: Any, fresh: Any, lr: Any, warm: Any, clip: Any, delta: Any,
    pull: Any, precision: Any, strength: Any, rate: Any, start: Any,
) -> Any:  # fmt: skip
    """Return momentum, curvature and mean after a step with b2."""
    average = average + fresh * (g - average)
    found = g * eps * torch.sqrt(strength * (h + delta))
    after = h + rate * (found - h) + rate * rate * (h - found) ** 2 / (2 * (h + delta))
    direction = (average / warm + (delta + pull * precision) * (m - m0)) * ((start + delta) / (after + delta))
    return average, after, m - lr * torch.clamp(direction, -clip, clip)


def _ratio(run: dict[str, Any]) -> Tensor:
    """Return r."""
    cost, power = (torch.as_tensor(run[name]) for name in ("cost", "power"))
    return torch.where(power > 0, cost.clamp(min=0) / power, torch.zeros_like(power))


def _summed(jobs: list[Job]) -> Tensor:
    """Return the sums of formulas over all tensors, which may lie on several devices."""
    by_device: dict[torch.device, list[Job]] = {}
    for job in jobs:
        by_device.setdefault(job.inputs[0].device, []).append(job)
    first, *others = (_rows(each).sum(0) for each in by_device.values())
    return sum((o.to(first) for o in others), first)


def _rows(jobs: list[Job]) -> Tensor:
    rows = run_all(jobs)
    assert rows is not None
    return rows


def _over_shards(owners: list[IVONPosterior], jobs: list[Job]) -> Tensor:
    """Return the sums of jobs over posteriors and processes, each on the rows that it holds."""
    groups: dict[Any, tuple[IVONPosterior, list[Job]]] = {}
    for owner, job in zip(owners, jobs, strict=True):
        groups.setdefault(None if owner.layout is None else owner.layout.group, (owner, []))[1].append(job)
    return over_processes((owner, _summed(own)) for owner, own in groups.values())


def _seed(scope: Scope) -> int:
    """Return the seed of the theta that the gradients were taken at."""
    assert scope.step_draw is not None
    return int(scope.step_draw.seed)
