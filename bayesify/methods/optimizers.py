"""What the optimizers of this library share: whose posteriors they move, their step, and the run in their state."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn

from bayesify.core.distributed import follow, whole
from bayesify.core.posterior import Posterior
from bayesify.core.reading import Scope
from bayesify.core.scopes import named_posteriors, scopes_of

P = TypeVar("P", bound=Posterior)
LIKE = ("sgd", "adamw")
LONGEST = 100  # steps over which squared gradients are averaged for a rate like AdamW's


class MethodOptimizer(torch.optim.Optimizer):
    """An optimizer that belongs to a method. A subclass gives `advance`, which moves everything by one step.

    What it knows of its run is in the first group, and not in the state: distributed checkpoints take the state's keys
    for parameters.

    Attributes:
        called: Its public name.
        run_key: Where the run lies in the first group, which is also what an error calls it.
        like: Which optimizer's learning rate `lr` is: "sgd", or "adamw".
    """

    called: ClassVar[str]
    run_key: ClassVar[str]

    def __init__(self, model: nn.Module, lr: Any, defaults: dict[str, Any], like: str) -> None:
        if like not in LIKE:
            raise ValueError(f"like must be one of {list(LIKE)}, got {like!r}")
        self.like, self._scopes = like, scopes_of(model)
        groups = lr if isinstance(lr, (list, tuple)) else [{"params": list(model.parameters()), "lr": lr}]
        if not groups or not all(isinstance(group, dict) and "lr" in group for group in groups):
            raise ValueError("lr must be a number or a list of groups, each with 'params' and 'lr' (param_groups)")
        super().__init__(groups, {"lr": groups[0]["lr"], **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after a look at its learning rate."""
        lr = param_group.get("lr", self.defaults["lr"])
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
            raise ValueError(f"lr must be a positive number, got {lr!r}")
        super().add_param_group(param_group)

    @property
    def run(self) -> dict[str, Any]:
        """What goes into the state dict beside the parameters' own: a seed, the number of steps."""
        found: dict[str, Any] = self.param_groups[0][self.run_key]
        return found

    @run.setter
    def run(self, run: dict[str, Any]) -> None:
        self.param_groups[0][self.run_key] = run

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a run: its seed, its step and its momentum."""
        if self.run_key not in state_dict["param_groups"][0]:
            raise ValueError(
                f"this is not the state of an {self.called} {self.run_key}; give what {self.called}.state_dict() "
                "returned"
            )
        super().load_state_dict(state_dict)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step.

        Args:
            closure: Computes the loss and its gradients again, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for scope in self._scopes:
            scope.sharded = follow(scope.posteriors)
            if scope.root is not None and not scope.root.training:
                raise RuntimeError(
                    f"{self.called} makes a step while the model is in eval mode, in which gradients are not those of "
                    "its own state; call model.train() before the forward pass (BatchNorm alone may stay in eval mode)"
                )
        self.advance()
        return loss

    def rate(self, param: Tensor, lr: float) -> float:
        """Return the rate of SGD with which a parameter's step has the size of AdamW's, if that is wanted.

        AdamW moves an element by lr in a step, whatever the loss; SGD's step of the rate lr/sqrt(mean g^2) moves the
        elements of a tensor by lr in the root mean square, and keeps where training ends. The mean is over elements
        and steps, of which the last hundred count. A tensor without gradients does not move.
        """
        if self.like == "sgd" or param.grad is None:
            return lr
        state, square = self.state[param], float(whole(param.grad.detach().square().mean()))
        if math.isfinite(square):
            state["steps"] = min(state.get("steps", 0) + 1, LONGEST)
            state["square"] = state.get("square", 0.0) + (square - state.get("square", 0.0)) / state["steps"]
        return lr / math.sqrt(state["square"]) if state.get("square", 0.0) > 0 else 0.0

    def advance(self) -> None:
        """Move everything by one step, by the gradients that are there."""
        raise NotImplementedError


def apart(
    row: int | None, tensors: Sequence[Tensor], step: Callable[[list[Tensor], int], Any]
) -> list[Callable[[], None]]:
    """Return what is to be done after a noisy step of tensors, so that a fixed row has taken `step` instead."""
    if row is None:
        return []
    kept = [x[row].clone() for x in tensors]

    def put_back() -> None:
        step(kept, row)
        for x, value in zip(tensors, kept, strict=True):
            x[row] = value

    return [put_back]


def posteriors_for(optimizer: str, model: nn.Module, kind: type[P], method: str) -> Iterator[tuple[P, Scope, int]]:
    """Yield a model's posteriors, each with its scope and the scope's number.

    Raises:
        ValueError: One is of another method than the optimizer's.
    """
    numbers = {id(scope): (scope, i) for i, scope in enumerate(scopes_of(model))}
    for _, posterior in named_posteriors(model):
        scope, number = numbers[id(posterior.reader)]
        if not isinstance(posterior, kind):
            raise ValueError(
                f"{optimizer} trains models of method {method!r}, this one is {scope.method.name!r}; "
                f"bayesify(model, {method!r}), or train it with an optimizer of torch.optim"
            )
        yield posterior, scope, number
