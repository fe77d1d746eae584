"""Parameter groups for an optimizer: learning rates for body, head and spread, and no decay on posteriors."""

import difflib
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from bayesify.core.wrap import named_posteriors, scopes_of


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
        lr_sig: Learning rate of the posteriors' own parameters (VI's rho): `lr` by default, or 0.05 where they take
            natural steps, in which it is the relative change of s.
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
        [('body', 0.1), ('head', 1.0), ('sig', 0.05)]
    """
    scopes_of(model)
    for name, value in {"lr": lr, "lr_head": lr_head, "lr_sig": lr_sig}.items():
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if lr_head is not None and head is None:
        raise ValueError("lr_head needs head=, the module that it is for (or its name)")
    heads = [] if head is None else head if isinstance(head, (list, tuple)) else [head]
    in_head = {id(p) for h in heads for p in _find_head(model, h).parameters()}
    own = next((p.rate for _, p in named_posteriors(model) if p.rate is not None), None)
    rates = {"body": lr, "head": lr_head or lr, "sig": lr_sig or own or lr, "rest": lr}
    extra = {"sig": {"momentum": 0.0} if own else {}}  # natural steps need none; optimizers without it ignore it
    kinds: dict[int, str] = {}
    for _, posterior in named_posteriors(model):
        kinds[id(posterior.original)] = "body"
        kinds.update({id(p): "sig" for p in posterior.learnable()})
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in rates}
    for param in model.parameters():
        if param.requires_grad:
            kind = kinds.get(id(param), "rest")
            groups["head" if id(param) in in_head and kind != "sig" else kind].append(param)
    return [
        {
            "name": name,
            "params": params,
            "lr": rates[name],
            **({} if name == "rest" else {"weight_decay": 0.0}),
            **extra.get(name, {}),
        }
        for name, params in groups.items()
        if params
    ]


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
