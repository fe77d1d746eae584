"""Find the bayesified models inside a module, and name the mistakes that they show."""

import math
import warnings
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bayesify.core.distributed import follow, part, rest
from bayesify.core.posterior import Posterior
from bayesify.core.prior import wide
from bayesify.core.reading import Scope

NOISE = "bayesify_noise"  # the module in a regression model that learns its noise (`bayesify.core.gaussian_noise`)


def check_module(model: Any) -> None:
    """Raise unless this is a module."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, got {got}; pass the model itself")


def check_num_data(num_data: Any) -> None:
    """Raise unless this can be the number of training items."""
    if isinstance(num_data, bool) or not isinstance(num_data, Real) or not 0 < float(num_data) < math.inf:
        items, name = getattr(num_data, "dataset", num_data), type(num_data).__name__
        got, hint = repr(num_data), ""
        if hasattr(items, "__len__"):  # a loader's own length counts batches
            got, hint = f"a {name}", f"; pass len({'loader.dataset' if items is not num_data else '...'}), {len(items)}"
        raise ValueError(f"num_data must be a positive number, the size of the training set, got {got}{hint}")


def not_bayesian(model: nn.Module) -> ValueError:
    """Return the error for a model without posteriors."""
    return ValueError(f"{type(model).__name__} has no posteriors; call bayesify(model, ...) first")


def scopes_of(model: nn.Module) -> list[Scope]:
    """Return the scopes of every bayesified model inside a module.

    Raises:
        ValueError: There are none.
    """
    found: dict[int, Any] = {}
    check_module(model)
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Posterior) and module.reader is not None:
            found[id(module.reader)] = module.reader
    if not found:
        raise not_bayesian(model)
    scopes: list[Scope] = list(found.values())
    if torch.compiler.is_compiling():
        return scopes
    for scope in scopes:
        scope.sharded = follow(scope.posteriors)
        scope.warn_of_replaced(modules)
    return scopes


def named_posteriors(model: nn.Module) -> Iterator[tuple[str, Posterior]]:
    """Yield (plain parameter name, posterior), each posterior once, ties under their first name.

    Args:
        model: A bayesified model, or a module that contains one or lies inside one.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, named_posteriors
        >>> [name for name, _ in named_posteriors(bayesify(torch.nn.Linear(3, 2)))]
        ['weight', 'bias']
    """
    check_module(model)
    names: dict[Posterior, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Posterior):
            names.setdefault(module, []).append(plain_name(path))
    scopes = scopes_of(model) if names else []
    for posterior in (p for scope in scopes for p in scope.posteriors if p in names):
        own = posterior.name
        yield next((n for n in names[posterior] if n.endswith(own) or own.endswith(n)), names[posterior][0]), posterior


def plain_name(path: str) -> str:
    """Turn a posterior's module path into the name of its parameter in the plain model."""
    # "a.parametrizations.weight.0" is the posterior of "a.weight".
    head, _, attribute = path.rpartition(".")[0].rpartition("parametrizations.")
    return head + attribute


def root_of(model: nn.Module) -> tuple[nn.Module, Scope]:
    """Return the one bayesified model inside a module, and its scope."""
    check_module(model)
    roots = [m for m in model.modules() if "_bayesify_scope" in m.__dict__]
    if not roots:
        raise not_bayesian(model)
    if len(roots) > 1:
        raise ValueError(f"{len(roots)} parts of the model were bayesified on their own; save and load each by itself")
    scope: Any = roots[0]._bayesify_scope
    rest(model)
    follow(scope.posteriors)
    scope.buffers.put(roots[0], start=False)
    if why := scope.replaced(roots[0].modules()):
        raise ValueError(why)
    return roots[0], scope


def mistakes(scope: Scope, *, spread: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the kind of each mistake that a model shows, and what to do about it.

    Args:
        scope: The model's.
        spread: Whether the spread is of interest, as for samples.
    """
    posteriors, root = scope.posteriors, scope.root
    if (name := _not_finite(scope)) is not None:
        yield (
            "finite",
            (
                f"the weights are not finite, {name!r} first: training diverged; lower the learning rate and train "
                "again from finite weights"
            ),
        )
        return
    if spread and posteriors and all(p.untrained for p in posteriors):
        yield (
            "spread",
            (
                f"the spread of the posterior was never trained: {posteriors[0].untrained}, so samples hardly "
                "differ from the mean, or say nothing about the data"
            ),
        )
    if not scope.penalized and any(_trained(p, scope) for p in posteriors):
        yield (
            "penalty",
            (
                "no penalty was ever computed, though the model was trained: add bayesify.penalty(model, num_data) to "
                "the loss (with Hugging Face's Trainer use bayesify.integrations.huggingface.BayesTrainer, which does)"
            ),
        )
    params = {} if root is None else dict(root.named_parameters())
    if thawed := [name for name in scope.frozen if name in params and params[name].requires_grad]:
        yield (
            "thawed",
            (
                f"{thawed[0]!r} and {len(thawed) - 1} others were frozen when bayesify was called and train now: they "
                "have no posterior; unfreeze first, or pass include= to bayesify"
            ),
        )


def warn_of_mistakes(scopes: Sequence[Scope], *, spread: bool = True, stacklevel: int = 3) -> None:
    """Warn of the mistakes that models show, of each kind once per model."""
    for scope in scopes:
        for kind, text in mistakes(scope, spread=spread):
            if kind not in scope.told:
                scope.told.add(kind)
                warnings.warn(text, stacklevel=stacklevel)


def check_averaged(model: nn.Module) -> None:
    """Raise where a posterior's state has not followed an average of the parameters.

    Raises:
        ValueError: The model is inside an `AveragedModel`, and its spread is what training collects.
    """
    for averaged in (m for m in model.modules() if isinstance(m, AveragedModel)):
        for scope in {p.reader for p in averaged.modules() if isinstance(p, Posterior) and isinstance(p.reader, Scope)}:
            if scope.method.optimizer or scope.method.stages is not None:
                raise ValueError(
                    f"AveragedModel averages parameters alone: what method {scope.method.name!r} collects in training "
                    "stays what it was when the average began; average a model of another method ('vi', 'mc_dropout', "
                    "or 'la', fitted after), use 'swag', which is an average itself, or predict with the model"
                )


def _trained(posterior: Posterior, scope: Scope) -> bool:
    """Return whether the mean has left the prior mean that it started at."""
    mean, center = part(posterior.original), part(posterior.prior_center)
    return scope.starts_at_prior and center.shape == mean.shape and not torch.equal(mean, center)


def _not_finite(scope: Scope) -> str | None:
    """Return the plain name of the first parameter that is not finite."""
    tensors = [(p.name, part(t)) for p in scope.posteriors for t in (p.original, *p.learnable())]
    others = () if scope.root is None else scope.root.named_parameters()
    tensors += [(name, part(t)) for name, t in others if "parametrizations." not in name]
    sums = [t.sum(dtype=wide(t)) for _, t in tensors]
    if bool(torch.stack([s.to(sums[0]) for s in sums]).isfinite().all()):
        return None
    return next((name for name, t in tensors if not bool(t.isfinite().all())), None)
