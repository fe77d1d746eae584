"""The sampler of method "sgld": gradient steps with just the noise that makes the chain's states posterior samples.

The noise is a pure function of (seed, step, parameter), so that a chain that is saved and resumed goes on as if it had
never stopped.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from bayesify import noise as noises
from bayesify import threads
from bayesify.core import check_num_data, named_posteriors, scopes_of
from bayesify.methods import sgld
from bayesify.posteriors import LOW_PRECISION
from bayesify.scopes import Scope

CHAIN = "chain"


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


class SGLD(torch.optim.Optimizer):
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

    def __init__(
        self, model: nn.Module, lr: float | list[dict[str, Any]], *, num_data: float, momentum: float = 0.0
    ) -> None:
        self._sampled = list(_sampled(model))
        check_num_data(num_data)
        self.num_data = float(num_data)
        if isinstance(lr, (list, tuple)):
            if not lr or not all(isinstance(group, dict) and "lr" in group for group in lr):
                raise ValueError("lr must be a number or a list of groups, each with 'params' and 'lr' (param_groups)")
            groups, defaults = list(lr), {"momentum": momentum}
        else:
            groups, defaults = [{"params": list(model.parameters())}], {"lr": lr, "momentum": momentum}
        super().__init__(groups, defaults)
        self.state[CHAIN] = {"seed": _shared_seed(model), "step": 0}  # type: ignore[index]

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a chain: its seed, its step and its momentum."""
        if CHAIN not in state_dict["state"]:
            raise ValueError("this is not the state of an SGLD chain; give what SGLD.state_dict() returned")
        super().load_state_dict(state_dict)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move the chain by one step, and collect its state where the method says so.

        Args:
            closure: Computes the loss and its gradients again, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before: dict[str, int] = self.state[CHAIN]  # type: ignore[index]
        chain = self.state[CHAIN] = {**before, "step": before["step"] + 1}  # type: ignore[index]
        sampled = {id(s.posterior.original): s for s in self._sampled}
        move_all(
            [
                self._move(param, group["lr"], group["momentum"], sampled.get(id(param)), chain)
                for group in self.param_groups
                for param in group["params"]
                if param.grad is not None
            ]
        )
        for found in self._sampled:
            if found.method.collects(chain["step"]):
                found.posterior.collect()
        return loss

    def _move(self, param: Tensor, lr: float, mu: float, found: Chained | None, chain: dict[str, int]) -> "Move":
        """Gather what one parameter's step needs."""
        assert param.grad is not None
        if mu != 0 and not self.state[param]:
            self.state[param]["velocity"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        velocity = self.state[param]["velocity"] if self.state.get(param) else None
        move = Move(param.detach(), param.grad, velocity, lr, mu)
        if found is None:
            return move
        size = found.method.nd * math.sqrt(2 * lr * (1 - mu) / (self.num_data * found.method.Ninflate))
        seed = (noises.mix(chain["seed"], found.scope) + chain["step"]) % 2**64
        return move._replace(size=size, seed=seed, key=found.posterior.key, fixed_row=found.posterior.fixed_row)


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
    fixed_row: int | None = None

    def step(self, piece: Tensor, generator: torch.Generator) -> None:
        """Move a flat piece of theta, all in one go while it is in the cache."""
        start = piece.storage_offset() - self.theta.storage_offset()
        part = slice(start, start + piece.numel())
        on_cpu = piece.device.type == "cpu"
        noise = threads.scratch_tensor(piece.numel(), piece.dtype) if on_cpu else torch.empty_like(piece)
        noise.normal_(generator=generator)
        if self.velocity is None:
            piece.add_(self.grad.view(-1)[part], alpha=-self.lr).add_(noise, alpha=self.size)
        else:
            velocity = self.velocity.view(-1)[part]
            velocity.mul_(self.mu).add_(self.grad.view(-1)[part], alpha=-self.lr).add_(noise, alpha=self.size)
            piece.add_(velocity)

    def step_without_noise(self) -> None:
        """Move theta by its gradient alone."""
        if self.velocity is None:
            self.theta.add_(self.grad, alpha=-self.lr)
        else:
            self.theta.add_(self.velocity.mul_(self.mu).add_(self.grad, alpha=-self.lr))

    def row(self) -> "Move":
        """Return the step of a copy of the fixed row."""
        velocity = None if self.velocity is None else self.velocity[self.fixed_row].clone()
        return self._replace(
            theta=self.theta[self.fixed_row].clone(), grad=self.grad[self.fixed_row], velocity=velocity
        )


def move_all(moves: list[Move]) -> None:
    """Make the steps of all parameters; the noise is made chunk by chunk, and never in memory as a whole."""
    noisy = []
    for move in moves:
        if move.size == 0:
            move.step_without_noise()
        else:
            # Elements are numbered in logical order: another memory layout goes through a copy.
            noisy.append(move._replace(theta=move.theta.contiguous(), grad=move.grad.contiguous()))
    rows = [(move, move.row()) for move in noisy if move.fixed_row is not None]
    noises.fill(noises.Job(move.theta, move.step, move.seed, move.key) for move in noisy)
    for move, row in rows:
        row.step_without_noise()
        move.theta[move.fixed_row] = row.theta
        if move.velocity is not None and row.velocity is not None:
            move.velocity[move.fixed_row] = row.velocity
    for move, moved in zip((m for m in moves if m.size != 0), noisy, strict=True):
        if moved.theta.data_ptr() != move.theta.data_ptr():
            move.theta.copy_(moved.theta)


def _sampled(model: nn.Module) -> Iterator[Chained]:
    """Yield the posteriors of a model, all of which must be of method "sgld"."""
    scopes = scopes_of(model)
    for _, posterior in named_posteriors(model):
        number, scope = next((i, s) for i, s in enumerate(scopes) if s is posterior.reader)
        if not isinstance(posterior, sgld.SGLDPosterior) or not isinstance(scope.method, sgld.SGLD):
            raise ValueError(
                f"SGLD samples models of method 'sgld', this one is {scope.method.name!r}; "
                "bayesify(model, 'sgld'), or train it with an optimizer of torch.optim"
            )
        if posterior.original.dtype in LOW_PRECISION:
            warnings.warn(
                f"{posterior.name!r} is {posterior.original.dtype}, in which SGLD's small steps round to nothing; "
                "keep the model in float32 (torch.autocast may still compute in less)",
                stacklevel=4,
            )
        yield Chained(posterior, scope, number)


def _shared_seed(model: nn.Module) -> int:
    """Take the chain's seed from torch's global generator; replicas of one model must move alike, and share it."""
    seed = [noises.global_seed()]
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        torch.distributed.broadcast_object_list(seed)
    return seed[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
