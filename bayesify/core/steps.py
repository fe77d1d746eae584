"""What the steps of optimizers tell: mistakes that would stay silent, since a model cannot see who moves its weights.

Torch calls us before and after every step of every optimizer. Most is looked at once, in an optimizer's first steps.
What the methods do to gradients is done to each of them once, whoever moves what, as soon as the step has it: a closure
(LBFGS, Lightning) computes the gradients inside the step.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bayesify.core.distributed import follow
from bayesify.core.pull import pull

if TYPE_CHECKING:
    from bayesify.core.reading import Scope

PATIENCE = 100  # steps without a penalty before the warning
SETTLED = 10  # steps after which every optimizer of a training run should have made one

_scopes: "WeakSet[Scope]" = WeakSet()
_seen: "WeakKeyDictionary[Optimizer, Seen]" = WeakKeyDictionary()
_hooks: list[Any] = []


class Seen:
    """An optimizer: how many steps it has made, and the models whose weights it moves."""

    def __init__(self, optimizer: Optimizer) -> None:
        own = _ids(optimizer)
        self.steps = 0
        self.scopes: WeakSet[Scope] = WeakSet(scope for scope in list(_scopes) if _moved(scope, own))


def watch(scope: "Scope") -> None:
    """Look at the optimizers that move a model's weights, from now on."""
    _scopes.add(scope)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before))
        _hooks.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Look at an optimizer that is about to make a step; return arguments with a closure that looks at gradients."""
    if optimizer not in _seen:
        _seen[optimizer] = Seen(optimizer)
    seen = _seen[optimizer]
    seen.steps += 1
    for scope in seen.scopes:
        scope.sharded = follow(scope.posteriors)
        if scope.method.optimizer:
            _check_training(scope)
        if seen.steps == 1:
            _warn_of_foreigner(scope, optimizer)
            _warn_of_decay(scope, optimizer)
        elif seen.steps == SETTLED:
            _warn_of_missing(scope, optimizer)
        if not scope.warned:
            _count(scope)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _change_gradients(optimizer, seen)
        return None
    watched = _watched(closure, optimizer, seen)
    return (args, {**kwargs, "closure": watched}) if "closure" in kwargs else ((args[0], watched, *args[2:]), kwargs)


def _watched(closure: Callable[[], Any], optimizer: Optimizer, seen: Seen) -> Callable[[], Any]:
    """Return a closure whose gradients are those that the methods want."""

    def evaluate() -> Any:
        loss = closure()
        for scope in seen.scopes:
            scope.sharded = follow(scope.posteriors)
        _change_gradients(optimizer, seen)
        return loss

    return evaluate


def _change_gradients(optimizer: Optimizer, seen: Seen) -> None:
    """Let the methods change the gradients that an optimizer is about to use."""
    own = _ids(optimizer)
    for scope in seen.scopes:
        scope.method.before_step(_moved(scope, own))
        pull(scope, own)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the versions of what a fused optimizer wrote.

    A backward pass looks at the versions, which other optimizers raise themselves.
    """
    written = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
    if written:
        torch.autograd.graph.increment_version(written)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _moved(scope: "Scope", own: set[int]) -> list[Any]:
    """Return the posteriors whose mean or spread is among an optimizer's parameters."""
    return [p for p in scope.posteriors if id(p.original) in own or any(id(q) in own for q in p.learnable())]


def _check_training(scope: "Scope") -> None:
    """Raise where a method with an optimizer of its own is trained in eval mode, which reads the mean."""
    if scope.root is not None and not scope.root.training:
        raise RuntimeError(
            f"{scope.method.optimizer} makes a step while the model is in eval mode, in which gradients are not those "
            "of its own state; call model.train() before the forward pass (BatchNorm alone may stay in eval mode)"
        )


def _warn_of_foreigner(scope: "Scope", optimizer: Optimizer) -> None:
    """Warn where a method that has an optimizer of its own is trained by another."""
    wanted = scope.method.optimizer
    if wanted and wanted not in (cls.__name__ for cls in type(optimizer).__mro__):
        warnings.warn(
            f"a model of method {scope.method.name!r} is trained by {type(optimizer).__name__}, which gives it no "
            f"posterior: nothing is sampled and nothing collected; use bayesify.{wanted}",
            stacklevel=5,
        )


def _warn_of_decay(scope: "Scope", optimizer: Optimizer) -> None:
    """Warn where weight decay pulls at a spread."""
    spread = {id(p) for posterior in scope.posteriors for p in posterior.learnable()}
    decayed = [g for g in optimizer.param_groups if g.get("weight_decay") and spread & {id(p) for p in g["params"]}]
    if decayed:
        warnings.warn(
            f"weight decay {float(decayed[0]['weight_decay']):g} of {type(optimizer).__name__} pulls at the "
            "parameters of the posterior's spread, which the penalty regularizes already; pass "
            "bayesify.param_groups(model, lr), or weight_decay=0",
            stacklevel=5,
        )


def _warn_of_missing(scope: "Scope", optimizer: Optimizer) -> None:
    """Warn where the means move and the spread belongs to no optimizer that has made a step."""
    moved = set().union(*(_ids(o) for o in list(_seen)))
    own = _ids(optimizer)
    still = [
        posterior.name
        for posterior in scope.posteriors
        if id(posterior.original) in own and any(p.requires_grad and id(p) not in moved for p in posterior.learnable())
    ]
    if still:
        warnings.warn(
            f"the spread of {still[0]!r} and {len(still) - 1} others is in no optimizer and never moves; make the "
            "optimizer after bayesify, of bayesify.param_groups(model, lr) or model.parameters()",
            stacklevel=5,
        )


def _count(scope: "Scope") -> None:
    """Count the steps without a penalty."""
    scope.steps += 1
    if scope.steps > PATIENCE:
        scope.warned = True
        warnings.warn(
            f"{PATIENCE} training steps without the prior: add bayesify.penalty(model, num_data) to the loss "
            "(with Hugging Face's Trainer use bayesify.integrations.huggingface.BayesTrainer, which does)",
            stacklevel=5,
        )
