"""Parameter groups for an optimizer: learning rates for body, head and spread, and no decay on posteriors."""

import difflib
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from bayesify.core.posterior import Posterior
from bayesify.core.prior import RATE, step_size
from bayesify.core.scopes import scopes_of


def param_groups(
    model: nn.Module,
    lr: float,
    *,
    lr_head: float | None = None,
    lr_sig: float | None = None,
    head: nn.Module | str | Sequence[nn.Module | str] | None = None,
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups that an optimizer takes.

    Every posterior parameter has weight decay 0: the penalty is what regularizes it, and decay would pull sigma away.

    Args:
        model: A bayesified model, or a module that contains one.
        lr: Learning rate of everything that has no other.
        lr_head: Learning rate of the head.
        lr_sig: Learning rate of the posteriors' own parameters (VI's rho), `lr` by default. Where they take natural
            steps it is the relative change of s in a step, 0.05 by default: the group's rate is that over the factor
            that keeps these gradients small, for SGD and for the relatives of Adam (by their `eps`).
        head: The head, as a module of the model or its exact name; several of them for a model with several.

    Returns:
        Groups named "body", "head", "sig" and, for what is not Bayesian, "rest"; empty ones are left out.

    Raises:
        ValueError: A learning rate is not positive, `lr_head` comes without `head`, or the head is not in the model.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, param_groups
        >>> model = bayesify(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)))
        >>> [(g["name"], g["lr"]) for g in param_groups(model, 0.1, lr_head=1.0, head="1")]
        [('body', 0.1), ('head', 1.0), ('sig', 22.36...)]
    """
    scopes_of(model)
    for name, value in {"lr": lr, "lr_head": lr_head, "lr_sig": lr_sig}.items():
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if lr_head is not None and head is None:
        raise ValueError("lr_head needs head=, the module that it is for (or its name)")
    heads = [] if head is None else head if isinstance(head, (list, tuple)) else [head]
    in_head = {id(p) for h in heads for p in _find_head(model, h).parameters()}
    rates = {"body": lr, "head": lr_head or lr, "rest": lr}
    groups: dict[str, dict[str, Any]] = {
        name: {"name": name, "params": [], "lr": rate, **({} if name == "rest" else {"weight_decay": 0.0})}
        for name, rate in rates.items()
    }
    kinds: dict[int, str] = {}
    for i, scope in enumerate(scopes_of(model)):
        groups[f"sig{i}"] = {"name": "sig", "params": [], **_spread(scope.posteriors, lr, lr_sig), "weight_decay": 0.0}
        for posterior in scope.posteriors:
            kinds[id(posterior.original)] = "body"
            kinds.update({id(p): f"sig{i}" for p in posterior.learnable()})
    groups["rest"] = groups.pop("rest")  # the last one
    for param in model.parameters():
        if param.requires_grad:
            kind = kinds.get(id(param), "rest")
            groups["head" if id(param) in in_head and not kind.startswith("sig") else kind]["params"].append(param)
    return [group for group in groups.values() if group["params"]]


def _spread(posteriors: Sequence[Posterior], lr: float, lr_sig: float | None) -> dict[str, Any]:
    """Return the options of the group of a model's spreads."""
    natural = sum(p.shape.numel() for p in posteriors if p.natural)
    if not natural:
        return {"lr": lr_sig or lr}
    # Natural steps are steps of SGD without momentum, which an Adam with a large eps makes too.
    return {"lr": (lr_sig or RATE) / step_size(natural), "momentum": 0.0, "eps": 1.0}


def _find_head(model: nn.Module, head: Any) -> nn.Module:
    """Return the head as a module of the model."""
    if isinstance(head, str):
        try:
            return model.get_submodule(head)
        except AttributeError:
            names = [name for name, module in model.named_modules() if name and "parametrizations" not in name]
            near = [n for n in names if n.endswith(head)] or difflib.get_close_matches(head, names) or names[-1:]
            raise ValueError(
                f"head {head!r} is not a module of the model; give its full name, e.g. {near[:3]}"
            ) from None
    if not isinstance(head, nn.Module):
        raise TypeError(f"head must be a module or its name, got {head!r}")
    if not any(m is head for m in model.modules()):
        raise ValueError(f"head is a {type(head).__name__} that is not part of the model; pass model.<head> itself")
    return head
