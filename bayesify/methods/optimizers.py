"""What the optimizers of this library share: whose posteriors they move, their step, and the run in their state."""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn

from bayesify.core.distributed import follow, whole
from bayesify.core.posterior import Posterior
from bayesify.core.scopes import check_num_data, named_posteriors, scopes_of
from bayesify.engine.dispatch import Job

LONGEST = 100  # steps over which squared gradients are averaged for a rate like AdamW's


class MethodOptimizer(torch.optim.Optimizer):
    """An optimizer that belongs to a method. A subclass gives `advance`, which moves everything by one step.

    What it knows of its run is in the first group, and not in the state: distributed checkpoints take the state's keys
    for parameters.
    """

    method: ClassVar[str]
    kind: ClassVar[type[Posterior]]  # the method's posteriors
    run_key: ClassVar[str]  # where the run lies in the first group, which is also what an error calls it

    def __init__(self, model: nn.Module, lr: Any, num_data: float, defaults: dict[str, Any], like: str) -> None:
        check_num_data(num_data)
        if like not in ("sgd", "adamw"):
            raise ValueError(f"like must be one of ['sgd', 'adamw'], got {like!r}")
        self.name, self.num_data, self.like = self.method.upper(), float(num_data), like
        self._scopes = scopes_of(model)
        self._posteriors: list[Any] = [p for _, p in named_posteriors(model)]
        for posterior in self._posteriors:
            if not isinstance(posterior, self.kind):
                raise ValueError(
                    f"{self.name} trains models of method {self.method!r}, this one is "
                    f"{posterior.reader.method.name!r}; bayesify(model, {self.method!r}), or train it with an "
                    "optimizer of torch.optim"
                )
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
                f"this is not the state of an {self.name} {self.run_key}; give what {self.name}.state_dict() returned"
            )
        super().load_state_dict(state_dict)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step; a closure computes the loss and its gradients again, and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for scope in self._scopes:
            scope.sharded = follow(scope.posteriors)
            if scope.root is not None and not scope.root.training:
                raise RuntimeError(
                    f"{self.name} makes a step while the model is in eval mode, in which gradients are not those of "
                    "its own state; call model.train() before the forward pass (BatchNorm alone may stay in eval mode)"
                )
        self.advance()
        return loss

    def advance(self) -> None:
        """Move everything by one step, by the gradients that are there."""
        raise NotImplementedError

    def moving(self) -> Iterator[tuple[Tensor, dict[str, Any], Any]]:
        """Yield every parameter that has a gradient, with its group and its posterior, or None."""
        posteriors = {id(p.original): p for p in self._posteriors}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield param, group, posteriors.get(id(param))

    def rate(self, param: Tensor, lr: float) -> float:
        """Return lr, or where it is AdamW's lr/sqrt(mean g^2), with which elements move by lr in the root mean square.

        The mean is over elements and the last hundred steps. A tensor without gradients does not move.
        """
        if self.like == "sgd" or param.grad is None:
            return lr
        state, square = self.state[param], float(whole(param.grad.detach().square().mean()))
        if math.isfinite(square):
            state["steps"] = min(state.get("steps", 0) + 1, LONGEST)
            state["square"] = state.get("square", 0.0) + (square - state.get("square", 0.0)) / state["steps"]
        return lr / math.sqrt(state["square"]) if state.get("square", 0.0) > 0 else 0.0


def except_row(row: int | None, noisy: Job, still: Job) -> list[Job]:
    """Return a noisy job in parts, so that a fixed row takes one without noise in its place."""
    if row is None:
        return [noisy]
    parts = [(noisy, 0, row), (still, row, row + 1), (noisy, row + 1, len(noisy.outputs[0]))]
    return [_rows(*part) for part in parts if part[1] < part[2]]


def _rows(job: Job, first: int, end: int) -> Job:
    """Return a job on some rows of its tensors."""
    every = (*job.inputs, *job.outputs)
    views = {id(x): x[first:end] for x in every if isinstance(x, Tensor) and x.dim()}  # an output may be an input
    stream = job.stream
    if stream is not None:
        shape = torch.Size((end - first, *stream.shape[1:]))
        stream = stream._replace(shape=shape, start=stream.start + first * shape[1:].numel())
    inputs, outputs = [views.get(id(x), x) for x in job.inputs], [views[id(y)] for y in job.outputs]
    return job._replace(stream=stream, inputs=inputs, outputs=outputs)
