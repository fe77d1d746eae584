"""The optimizer of method "ivon": one theta per step, a curvature per weight, and the prior in the step."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, part, part_of
from bayesify.core.draws import Draw
from bayesify.core.penalty import distance, pull_of
from bayesify.core.quadratics import by_center, wide
from bayesify.core.reading import Scope
from bayesify.core.seeds import shared_seed
from bayesify.core.wrap import check_num_data, scopes_of
from bayesify.engine import elements, fusion
from bayesify.engine import noise as noises
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
        # Momentum of SGD begins as slowly; a whole step by the first gradient may leave a pretrained model for good.
        warm = min(1.0, run["step"] / WARM) if self.second is None else 1.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moved = {**group, "lr": self.rate(param, group["lr"]) * warm}
                    posterior, scope = own.get(id(param), (None, None))
                    pull = pulls[id(scope)] / posterior.prior_sig**2 if posterior and posterior.relative else 0.0
                    self._move(param, moved, run, posterior, scope, pull)
        self.run = run
        self._announce()

    def _pull(self, scope: Scope) -> float:
        """Return c/(D0 + D), D over the model's weights with a relative prior (see `bayesify.core.penalty`)."""
        near = [p for p, own in self._own if own is scope and p.relative]
        strength, floor = pull_of(scope, near)
        if not strength:
            return 0.0
        (total,) = _over_shards(near[0], sum(float(distance(own, own.original)) for own in map(part_of, near)))
        return strength / (floor + total)

    def _look(self, run: dict[str, Any]) -> None:
        """Learn from a step what the noise costs, sum g^ eps s, and what its squared gradients are, sum (g^ s)^2."""
        cost = power = 0.0
        for posterior, scope in ((part_of(p), scope) for p, scope in self._own):
            grad = posterior.original.grad
            if grad is not None:
                sums = _observed(posterior, grad, _seed(scope))
                cost, power = cost + sums[0], power + sums[1]
        cost, power = _over_shards(self._own[0][0], cost, power)
        if math.isfinite(cost + power):
            run["cost"] += MEMORY * (cost - run["cost"])
            run["power"] += MEMORY * (power - run["power"])

    def _move(
        self, param: Tensor, group: dict[str, Any], run: dict[str, Any], posterior: Any, scope: Any, pull: float
    ) -> None:
        """Move one parameter, and its curvature where it is Bayesian."""
        state, whole_grad = self.state[param], param.grad
        assert whole_grad is not None
        if "average" not in state:
            state["average"] = torch.zeros_like(param)
            if posterior is not None and self.second is not None:
                total, count = _over_shards(posterior, float(part(posterior.h).sum()), part(posterior.h).numel())
                state["start"] = total / count
        posterior = None if posterior is None else part_of(posterior)
        param, grad, average = part(param), part(whole_grad), part(state["average"])
        if self.second is None and self.clip is None and posterior is not None:
            follows = MEMORY if run["step"] > WARM else 0.0
            numbers = (1 - group["beta"], group["lr"], 1 - group["beta"] ** run["step"], follows, _scale(run))
            if _fused_move(posterior, param, grad, average, (*numbers, posterior.delta + pull)):
                return
        average.lerp_(grad, 1 - group["beta"])
        direction = average / (1 - group["beta"] ** run["step"])
        if posterior is not None:
            delta, h = posterior.delta, posterior.h
            direction.add_(param - posterior.prior_center, alpha=delta + pull)
            if self.second is None:
                if run["step"] > WARM:
                    _follow(h, grad, run)
            else:
                self._newton(h, grad, posterior, _seed(scope))
                if posterior.fixed_row is not None:
                    h[posterior.fixed_row] = state["start"]
                direction.mul_(state["start"] + delta).div_((h + delta).to(param.dtype))
            if self.clip is not None:
                direction.clamp_(-self.clip, self.clip)
        param.add_(direction, alpha=-group["lr"])

    def _newton(self, h: Tensor, grad: Tensor, posterior: IVONPosterior, seed: int) -> None:
        """Move the curvature by h^ = g^ eps/s, in place."""
        assert self.second is not None
        rate, s = 1 - self.second, posterior.spread()
        found = (grad.to(s.dtype) * posterior.noise_of(seed)).div_(s)
        away = (h - found).square_().div_(2 * (h + posterior.delta))
        h.lerp_(found, rate).add_(away, alpha=rate**2)


def _observed(posterior: IVONPosterior, grad: Tensor, seed: int) -> tuple[float, float]:
    """Return sum g^ eps s and sum (g^ s)^2 of one posterior; from its theta, by compiled loops, where that can be."""
    mean, h, grad = posterior.original.detach(), posterior.h, grad.contiguous()
    if h is not None and posterior.strength is not None and fusion.fused(mean, h, grad):
        theta = posterior.draw(mean, seed)
        cost, power, _ = fusion.total(_observe_element, (grad, theta, mean, h), (posterior.delta,))
        return cost, power / posterior.strength
    s = posterior.spread()
    each = grad.to(s.dtype) * s
    cost = float((each * posterior.noise_of(seed)).sum(dtype=wide(s)))
    return cost, float(each.square().sum(dtype=wide(s)))


def _observe_element(i: Any, ins: Any, par: Any) -> Any:
    """Return g (theta - m) and g^2/(h + delta) of one element."""
    g = ins[0][i]
    return g * (ins[1][i] - ins[2][i]), g * g / (ins[3][i] + par[0]), elements.ZERO


def _scale(run: dict[str, Any]) -> float:
    """Return r."""
    return max(run["cost"], 0.0) / run["power"] if run["power"] > 0 else 0.0


def _follow(h: Tensor, grad: Tensor, run: dict[str, Any]) -> None:
    """Move the curvature by r g^2, in place."""
    h.lerp_(grad.to(h.dtype).square().mul_(_scale(run)), MEMORY)


def _fused_move(
    posterior: IVONPosterior, param: Tensor, grad: Tensor, average: Tensor, numbers: tuple[float, ...]
) -> bool:
    """Move average, curvature and parameter in one pass, where that can be done."""
    center, grad, h = posterior.center, grad.contiguous(), posterior.h
    assert h is not None
    if not fusion.fused(param, grad, average, h, *center.tensors):
        return False
    par = (*numbers, *center.numbers)
    fusion.run_plain(MOVES[center.given], (grad, *center.tensors), (average, h, param), par)
    torch.autograd.graph.increment_version(param)
    return True


def _move_element(center: Callable[..., Any]) -> Callable[..., Any]:
    """Return one element's step; par is (1-b1, lr, 1-b1^t, the curvature's rate, r, delta + p)."""

    def move(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
        g, m = ins[0][i], outs[2][i]
        average = outs[0][i] + par[0] * (g - outs[0][i])
        outs[0][i] = average
        outs[1][i] += par[3] * (par[4] * (g * g) - outs[1][i])
        outs[2][i] = m - par[1] * (average / par[2] + par[5] * (m - center(i, ins, par)))

    return move


MOVES = by_center(_move_element)


def _over_shards(posterior: IVONPosterior, *sums: float) -> list[float]:
    """Add up what the processes have found, each on the rows that it holds; as it is where every one holds all."""
    if posterior.layout is None:
        return list(sums)
    values = torch.tensor(sums, dtype=torch.float64, device=part(posterior.original).device)
    return [float(v) for v in posterior.layout.summed(values)]


def _seed(scope: Scope) -> int:
    """Return the seed of the theta that the gradients were taken at."""
    assert scope.step_draw is not None
    return int(scope.step_draw.seed)
