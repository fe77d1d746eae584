"""`Cycles`: the learning rates of a training that is cut into cycles, and what its method does in each of them.

A method takes part by naming its `Stages` in `Method.stages`; of others, every cycle ends in a copy of the model.
"""

import math
import warnings
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from bayesify.core.mixture import Mixture
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import scopes_of
from bayesify.methods.stages import Copies, Place, Stages

PLAN = ("steps", "start", "ends", "high", "low")  # in which a saved state must agree


class Cycles(LRScheduler):
    """Cut a training into cycles, each with its own learning rates, and collect what the model's method wants of each.

    Call `step()` after every `optimizer.step()`, and after the `step()` of any other scheduler. At step k of a cycle of
    n the learning rate is low + (high - low) (1 + cos(pi k/n))/2 times that of the optimizer, or the largest one before
    the first cycle if that was larger.

    | method | cycles | each |
    |---|---|---|
    | "ensemble" | one for each member, from twice the rate down to 0 | ends in a member; see `restart` |
    | "swag" | 10, in the last quarter of the steps, at a constant rate | ends in an iterate |
    | "swag" with `restart` | 3, at a constant rate | has ten iterates of its last quarter; `mixture()` has all three |
    | "sgld" | 4 | looks for a basin up to `beta`, then samples it; `mixture()` has a member of each |
    | any other | 3, from twice the rate down to 0 | is a training; `mixture()` has a member of each; see `restart` |

    Args:
        optimizer: The optimizer, made after `bayesify`.
        model: The bayesified model that it trains, or a module that contains it.
        steps: How many optimizer steps the training takes.
        cycles: How many cycles.
        start: Steps before the first cycle; until then the rates are the optimizer's, or those of other schedulers.
        high: The learning rate at the beginning of a cycle, over the optimizer's.
        low: What it approaches at the end of a cycle.
        before: A scheduler that is in charge until `start`, whose `step()` is then called here.
        beta: For "sgld": the share of a cycle that looks for a basin, without noise.
        restart: Where a cycle starts, but for "sgld". "first" is the first member, which gets a cycle of twice the
            length; "prior" the prior mean, with what `fresh` names made anew; "fresh" has all modules made anew, for a
            model that is trained from scratch. None is "first", or "prior" where `fresh` is given.
        fresh: Patterns over parameter names: the modules that `reset_parameters` makes anew, with a
            seed of their own. None is the last linear layer, where it is trained; () is none.
        seed: Of the new starts; None takes one number from torch's global generator.

    Raises:
        ValueError: The optimizer moves another model, or a number is out of range.

    Example:
        >>> import torch
        >>> from bayesify import Cycles, bayesify, penalty, predict
        >>> model, x = bayesify(torch.nn.Linear(3, 2), "swag"), torch.randn(8, 3)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> cycles = Cycles(optimizer, model, steps=20)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     (model(x).square().mean() + penalty(model, num_data=8)).backward()
        ...     optimizer.step()
        ...     cycles.step()
        >>> predict(model, x)
        Predictive(8 examples, 2 classes, 30 samples)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        steps: int,
        cycles: int | None = None,
        start: int | None = None,
        high: float | None = None,
        low: float | None = None,
        before: LRScheduler | None = None,
        beta: float | None = None,
        restart: str | None = None,
        fresh: Any = None,
        seed: int | None = None,
    ) -> None:
        if isinstance(optimizer, nn.Module):
            raise TypeError("Cycles takes the optimizer first: Cycles(optimizer, model, steps=...)")
        self.optimizer, self.model, self.before = optimizer, model, before
        methods = [scope.method for scope in scopes_of(model)]
        method = next((method for method in methods if method.stages is not None), methods[0])
        kind: type[Stages] = method.stages or Copies
        if not self.posteriors():
            raise ValueError(
                "the optimizer moves no Bayesian parameter of the model; make it after bayesify(model), of "
                "model.parameters() or bayesify.param_groups(model, lr)"
            )
        options = {"beta": beta, "restart": restart, "fresh": fresh, "seed": seed}
        given = {name: value for name, value in options.items() if value is not None}
        if unknown := [name for name in given if name not in kind.options]:
            raise ValueError(f"{unknown[0]} is not for method {method.name!r}; leave it out")
        stages = kind(self, **given)
        self.stages, self.high = stages, stages.high if high is None else high
        self.low = stages.low if low is None else low
        if not 0 <= self.low <= self.high or not 0 < self.high < math.inf:
            raise ValueError(
                f"high must be positive and low between 0 and high, got high={self.high!r}, low={self.low!r}"
            )
        if not is_whole(steps) or steps < 1:
            raise ValueError(f"steps must be an integer >= 1, got {steps!r}")
        start = min(int(stages.begin * steps), max(steps - stages.least, 0)) if start is None else start
        if not is_whole(start) or not 0 <= start < steps:
            raise ValueError(f"start must be an integer >= 0 and below steps = {steps}, got {start!r}")
        self.steps, self.start, left = int(steps), int(start), int(steps - start)
        cycles = max(min(stages.cycles, left), stages.least) if cycles is None else cycles
        if not is_whole(cycles) or not stages.least <= cycles <= left:
            raise ValueError(
                f"cycles must be an integer between {stages.least} and the {left} steps from start on, got {cycles!r}"
            )
        sums = list(accumulate([stages.first, *[1.0] * (int(cycles) - 1)]))
        self.ends = [self.start + round(left * total / sums[-1]) for total in sums]
        stages.check([end - begin for begin, end in pairwise([self.start, *self.ends])])
        self.warned = False
        super().__init__(optimizer)

    def posteriors(self) -> list[Posterior]:
        """Return the model's posteriors whose mean the optimizer moves."""
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [p for scope in scopes_of(self.model) for p in scope.posteriors if id(p.original) in own]

    def place(self, done: int) -> Place | None:
        """Return where a step is that comes after so many; None where it is in no cycle."""
        if not self.start <= done < self.steps:
            return None
        number = bisect_right(self.ends, done)
        begin = self.ends[number - 1] if number else self.start
        return Place(number, done - begin, self.ends[number] - begin)

    def step(self, epoch: int | None = None) -> None:
        """Collect after an optimizer step, and set the learning rates of the next one."""
        if epoch is not None:
            raise ValueError("Cycles counts the steps by itself; call step() without an epoch")
        done = self.last_epoch  # below 0 when torch makes the first call, before any step
        place = self.place(done)
        if 0 <= done < self.start and self.before is not None:
            self.before.step()
        elif place is not None:
            self.stages.after(place)
            if place.step + 1 == place.length:
                self.stages.end(place.cycle, last=done + 1 == self.steps)
        elif done >= self.steps and not self.warned:
            self.warned = True
            warnings.warn(
                f"training goes on after the {self.steps} steps of Cycles, and collects nothing any more; give it "
                "steps=, all optimizer steps of the training",
                stacklevel=2,
            )
        super().step()
        self.stages.before(self.place(self.last_epoch))

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of the next step."""
        groups, done = self.optimizer.param_groups, self.last_epoch
        self.base_lrs += [group["lr"] for group in groups[len(self.base_lrs) :]]  # groups that were added since
        if done < self.start:
            now = [float(group["lr"]) for group in groups]
            self.base_lrs = [max(float(base), lr) for base, lr in zip(self.base_lrs, now, strict=True)]
            return list(now)
        place = self.place(done)
        r = 1.0 if place is None else place.step / place.length
        factor = self.low + (self.high - self.low) * (1 + math.cos(math.pi * r)) / 2
        return [factor * float(base) for base in self.base_lrs]

    def mixture(self) -> Mixture:
        """Return the mixture of the members so far, of a method whose cycles end in copies of the model."""
        return self.stages.mixture()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule; the model's and the optimizer's are their own."""
        return {
            **{name: getattr(self, name) for name in ("last_epoch", "_step_count", "_last_lr", "base_lrs")},
            "plan": {name: getattr(self, name) for name in PLAN},
            "stages": self.stages.state_dict(),
            "before": None if self.before is None else self.before.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of the same schedule; load the model's and the optimizer's too."""
        theirs, own = state_dict.get("plan"), {name: getattr(self, name) for name in PLAN}
        if theirs != own:
            raise ValueError(f"this is the state of another schedule: {theirs}; make it with the same arguments: {own}")
        self.__dict__.update({k: v for k, v in state_dict.items() if k not in ("plan", "stages", "before")})
        if self.before is not None and state_dict["before"] is not None:
            self.before.load_state_dict(state_dict["before"])
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        self.stages.load_state_dict(state_dict["stages"])
        self.stages.before(self.place(self.last_epoch))
