"""The sampler of method "sgld": gradient steps with just the noise that makes the chain's states posterior samples.

The noise is a pure function of (seed, step, parameter), so that a chain that is saved and resumed goes on as if it had
never stopped.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, part, part_of
from bayesify.core.reading import Scope
from bayesify.core.seeds import shared_seed
from bayesify.core.stored import LOW_PRECISION
from bayesify.core.wrap import check_num_data, scopes_of
from bayesify.engine import fusion
from bayesify.engine import noise as noises
from bayesify.methods.optimizers import MethodOptimizer, check_like, posteriors_for
from bayesify.methods.sgld import method as sgld

OWN_WAY = {"noise": 1.0, "collects": True}
"""In every group: a factor on the noise, and whether the method's own count collects; `Cycles` may change both."""


class Chained(NamedTuple):
    """A parameter that takes noise: its posterior, its model's scope, and which of several chains that is."""

    posterior: sgld.SGLDPosterior
    home: Scope
    scope: int

    @property
    def method(self) -> sgld.SGLD:
        """The options in force, which `load` may have changed since."""
        assert isinstance(self.home.method, sgld.SGLD)
        return self.home.method


class SGLD(MethodOptimizer):
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

    run_key = "chain"

    def __init__(
        self,
        model: nn.Module,
        lr: float | list[dict[str, Any]],
        *,
        num_data: float,
        momentum: float = 0.0,
        like: str = "sgd",
    ) -> None:
        self.like = check_like(like)
        self._sampled, self._scopes = list(_sampled(model)), scopes_of(model)
        check_num_data(num_data)
        self.num_data = float(num_data)
        if isinstance(lr, (list, tuple)):
            if not lr or not all(isinstance(group, dict) and "lr" in group for group in lr):
                raise ValueError("lr must be a number or a list of groups, each with 'params' and 'lr' (param_groups)")
            groups, defaults = list(lr), {"momentum": momentum, **OWN_WAY}
        else:
            groups, defaults = [{"params": list(model.parameters())}], {"lr": lr, "momentum": momentum, **OWN_WAY}
        super().__init__(groups, defaults)
        self.run = {"seed": shared_seed(), "step": 0}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after a look at its numbers."""
        group = {**self.defaults, **param_group}
        if not _is_number(group.get("lr")) or not group["lr"] > 0:
            raise ValueError(f"lr must be a positive number, got {group.get('lr')!r}")
        if not _is_number(group["momentum"]) or not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']!r}")
        if group.get("weight_decay", 0):
            raise ValueError("SGLD takes no weight_decay: the prior enters through bayesify.penalty alone")
        super().add_param_group(param_group)

    def advance(self) -> None:
        """Move the chain by one step, and collect its state where the method says so."""
        chain = self.run = {**self.run, "step": self.run["step"] + 1}
        sampled = {id(s.posterior.original): s for s in self._sampled}
        moves = [
            self._move(param, group, sampled.get(id(param)), chain)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for move in moves:
            move.step()
        for found in self._sampled:
            if self.param_groups[0]["collects"] and found.method.collects(chain["step"]):
                with on_shard(found.posterior) as own:
                    own.collect()

    def _move(self, param: Tensor, group: dict[str, Any], found: Chained | None, chain: dict[str, int]) -> "Move":
        """Gather what one parameter's step needs."""
        assert param.grad is not None
        lr, mu = self.rate(param, group["lr"]), group["momentum"]
        if self.like == "adamw":
            lr *= 1 - mu  # momentum adds up 1/(1-mu) steps
        if mu != 0 and "velocity" not in self.state[param]:
            self.state[param]["velocity"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        velocity = self.state[param].get("velocity") if self.state.get(param) else None
        move = Move(part(param), part(param.grad), None if velocity is None else part(velocity), lr, mu)
        if found is None:
            return move
        size = group["noise"] * found.method.nd * math.sqrt(2 * lr * (1 - mu) * found.method.scale(self.num_data))
        seed = (noises.mix(chain["seed"], found.scope) + chain["step"]) % 2**64
        own = part_of(found.posterior)
        return move._replace(size=size, seed=seed, key=own.key, start=own.start, fixed_row=own.fixed_row)


class Move(NamedTuple):
    """One parameter's step; `size` is the standard deviation of its noise."""

    theta: Tensor
    grad: Tensor
    velocity: Tensor | None
    lr: float
    mu: float
    size: float = 0.0
    seed: int = 0
    key: int = 0
    start: int = 0
    fixed_row: int | None = None

    def step(self) -> None:
        """Move theta in place."""
        row = None if self.fixed_row is None or self.size == 0 else self._row()
        if self.size == 0:
            self._step_with(None)
        elif not self._fused_step():
            # Elements are numbered in logical order, whatever their order in memory.
            self._step_with(self._stream().normal())
        if row is not None:
            row._step_with(None)
            self.theta[self.fixed_row] = row.theta
            if self.velocity is not None and row.velocity is not None:
                self.velocity[self.fixed_row] = row.velocity

    def _step_with(self, noise: Tensor | None) -> None:
        """Move theta by its gradient, and by noise if there is any."""
        if self.velocity is None:
            self.theta.add_(self.grad, alpha=-self.lr)
            if noise is not None:
                self.theta.add_(noise, alpha=self.size)
        else:
            self.velocity.mul_(self.mu).add_(self.grad, alpha=-self.lr)
            if noise is not None:
                self.velocity.add_(noise, alpha=self.size)
            self.theta.add_(self.velocity)

    def _fused_step(self) -> bool:
        """Move theta in one pass, where that can be done."""
        velocity = () if self.velocity is None else (self.velocity,)
        grad = self.grad.contiguous()
        if not fusion.fused(self.theta, grad, *velocity):
            return False
        stream = self._stream()
        outs, par = (self.theta, *velocity), (self.lr, self.size, self.mu)
        fusion.run(_step_element if velocity else _step_without_momentum, stream, (grad,), outs, par)
        torch.autograd.graph.increment_version(self.theta)
        return True

    def _stream(self) -> noises.Stream:
        """Return where the noise comes from."""
        theta = self.theta
        return noises.Stream(self.seed, self.key, theta.shape, theta.dtype, theta.device, self.start)

    def _row(self) -> "Move":
        """Return the step of a copy of the fixed row, which takes no noise."""
        velocity = None if self.velocity is None else self.velocity[self.fixed_row].clone()
        return self._replace(
            theta=self.theta[self.fixed_row].clone(), grad=self.grad[self.fixed_row], velocity=velocity
        )


def _step_element(i: Any, xi: Any, ins: Any, outs: Any, par: Any) -> None:
    """Do v <- mu v - lr g + size xi; theta <- theta + v, on one element."""
    v = par[2] * outs[1][i] - par[0] * ins[0][i] + par[1] * xi
    outs[1][i] = v
    outs[0][i] += v


def _step_without_momentum(i: Any, xi: Any, ins: Any, outs: Any, par: Any) -> None:
    """Do theta <- theta - lr g + size xi, on one element."""
    outs[0][i] += par[1] * xi - par[0] * ins[0][i]


def _sampled(model: nn.Module) -> Iterator[Chained]:
    """Yield the posteriors of a model, all of which must be of method "sgld"."""
    for posterior, scope, number in posteriors_for("SGLD", model, sgld.SGLDPosterior, "sgld"):
        if posterior.original.dtype in LOW_PRECISION:
            warnings.warn(
                f"{posterior.name!r} is {posterior.original.dtype}, in which SGLD's small steps round to nothing; "
                "keep the model in float32 (torch.autocast may still compute in less)",
                stacklevel=4,
            )
        yield Chained(posterior, scope, number)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
