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
from bayesify.core import named_posteriors, scopes_of
from bayesify.methods import sgld
from bayesify.posteriors import LOW_PRECISION

CHAIN = "chain"


class Sampled(NamedTuple):
    """A parameter that takes noise: its posterior, the method's options, and which of the model's chains it is in."""

    posterior: sgld.SGLDPosterior
    method: sgld.SGLD
    scope: int


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
        if not _is_number(num_data) or not num_data > 0:
            raise ValueError(f"num_data must be a positive number, the size of the training set, got {num_data!r}")
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
        moves: list[tuple[Tensor, Tensor]] = []
        kicks: list[Kick] = []
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                moving = self._drift(param, param.grad, lr, mu)
                if moving is not param:
                    moves.append((param, moving))
                if (found := sampled.get(id(param))) is not None and found.method.nd > 0 and lr > 0:
                    data = self.num_data * found.method.Ninflate
                    size = found.method.nd * math.sqrt(2 * lr * (1 - mu) / data)
                    seed = (noises.mix(chain["seed"], found.scope) + chain["step"]) % 2**64
                    kicks.append(Kick(moving.detach(), found.posterior, size, seed))
        add_noise(kicks)
        for param, velocity in moves:
            param.add_(velocity)
        for found in self._sampled:
            if found.method.collects(chain["step"]):
                found.posterior.collect()
        return loss

    def _drift(self, param: Tensor, grad: Tensor, lr: float, mu: float) -> Tensor:
        """Apply the gradient, and return what the noise is to be added to: the velocity, or theta without momentum."""
        if mu == 0 and not self.state.get(param):
            return param.add_(grad, alpha=-lr)
        if not self.state[param]:
            self.state[param]["velocity"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        velocity: Tensor = self.state[param]["velocity"]
        return velocity.mul_(mu).add_(grad, alpha=-lr)


class Kick(NamedTuple):
    """Noise of standard deviation `size` to be added to `out`."""

    out: Tensor
    posterior: sgld.SGLDPosterior
    size: float
    seed: int

    def add(self, piece: Tensor, generator: torch.Generator) -> None:
        """Add noise to a flat piece of `out`."""
        piece.add_(torch.empty_like(piece).normal_(generator=generator), alpha=self.size)


def add_noise(kicks: list[Kick]) -> None:
    """Add noise in place, chunk by chunk, so that it is never in memory as a whole; fixed rows get none."""
    # Elements are numbered in logical order: another memory layout goes through a copy.
    flat = [k if k.out.is_contiguous() else k._replace(out=k.out.contiguous()) for k in kicks]
    rows = [None if k.posterior.fixed_row is None else k.out[k.posterior.fixed_row].clone() for k in flat]
    noises.fill(noises.Job(k.out, k.add, k.seed, k.posterior.key) for k in flat)
    for kick, kicked, row in zip(kicks, flat, rows, strict=True):
        if row is not None:
            kicked.out[kick.posterior.fixed_row] = row
        if kicked.out is not kick.out:
            kick.out.copy_(kicked.out)


def _sampled(model: nn.Module) -> Iterator[Sampled]:
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
        yield Sampled(posterior, scope.method, number)


def _shared_seed(model: nn.Module) -> int:
    """Take the chain's seed from torch's global generator; replicas of one model must move alike, and share it."""
    seed = [noises.global_seed()]
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        torch.distributed.broadcast_object_list(seed)
    return seed[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
