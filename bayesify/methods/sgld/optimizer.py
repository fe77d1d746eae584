"""The sampler of method "sgld": gradient steps with just the noise that makes the chain's states posterior samples.

The noise is a pure function of (seed, step, parameter), so that a chain that is saved and resumed goes on as if it had
never stopped.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.distributed import on_shard, part, part_of
from bayesify.core.ranks import shared_seed
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_num_data, scopes_of
from bayesify.core.stored import LOW_PRECISION
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run, run_all
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
        jobs: list[Job] = []
        ends: list[Callable[[], None]] = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    job, own_ends = self._job(param, group, sampled.get(id(param)), chain)
                    jobs.append(job)
                    ends += own_ends
        run_all(jobs)
        for end in ends:
            end()
        for found in self._sampled:
            if self.param_groups[0]["collects"] and found.method.collects(chain["step"]):
                with on_shard(found.posterior) as own:
                    own.collect()

    def _job(
        self, param: Tensor, group: dict[str, Any], found: Chained | None, chain: dict[str, int]
    ) -> tuple[Job, list[Callable[[], None]]]:
        """Return one parameter's step; and what ends it for a fixed row, which takes no noise."""
        assert param.grad is not None
        lr, mu = self.rate(param, group["lr"]), group["momentum"]
        if self.like == "adamw":
            lr *= 1 - mu  # momentum adds up 1/(1-mu) steps
        if mu != 0 and "velocity" not in self.state[param]:
            self.state[param]["velocity"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        velocity = [part(self.state[param]["velocity"])] if "velocity" in self.state.get(param, {}) else []
        moved, grad, last = [part(param), *velocity], part(param.grad), [mu] * len(velocity)
        still, noisy = (glide, kicked_glide) if velocity else (descend, kicked)
        quiet = Job(still, None, (*moved, grad, lr, *last), moved)
        if found is None:
            return quiet, []
        size = group["noise"] * found.method.nd * math.sqrt(2 * lr * (1 - mu) * found.method.scale(self.num_data))
        if size == 0:
            return quiet, []
        own, theta = part_of(found.posterior), moved[0]
        seed = (noises.mix(chain["seed"], found.scope) + chain["step"]) % 2**64
        stream = noises.Stream(seed, own.key, theta.shape, theta.dtype, theta.device, own.start)
        ends = []
        if (row := own.fixed_row) is not None:
            kept = [x[row].clone() for x in moved]

            def end() -> None:
                run(still, None, (*kept, grad[row], lr, *last), kept)
                for x, value in zip(moved, kept, strict=True):
                    x[row] = value

            ends.append(end)
        return Job(noisy, stream, (*moved, grad, lr, *last, size), moved), ends


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
