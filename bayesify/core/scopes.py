"""The bayesified models inside a module: their posteriors, blocks, parameter groups and mistakes."""

import difflib
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bayesify.core.distributed import follow, part, rest
from bayesify.core.modes import MEAN, PRIOR, Mode, TracedBlock, block_of, one_draw, override
from bayesify.core.posterior import Posterior
from bayesify.core.prior import RATE, step_size
from bayesify.core.ranks import draw_seeds, is_whole
from bayesify.core.reading import Scope
from bayesify.core.sampling import Draw

NOISE = "bayesify_noise"  # the module in a regression model that learns its noise (`bayesify.core.penalty`)


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
    """Return the scopes of every bayesified model inside a module, or raise a ValueError where there is none."""
    check_module(model)
    modules = list(model.modules())
    found: dict[int, Any] = {id(m.reader): m.reader for m in modules if isinstance(m, Posterior) and m.reader}
    if not found:
        raise not_bayesian(model)
    scopes: list[Scope] = list(found.values())
    if not torch.compiler.is_compiling():
        for scope in scopes:
            scope.sharded = follow(scope.posteriors)
            scope.warn_of_replaced(modules)
    return scopes


def root_of(model: nn.Module) -> tuple[nn.Module, Scope]:
    """Return the one bayesified model inside a module, ready to be saved, and its scope."""
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


# -- blocks ------------------------------------------------------------------------------------------------------------


def mean(model: nn.Module) -> AbstractContextManager[None]:
    """Use the posterior mean inside a `with` block, even in train mode.

    Args:
        model: A bayesified model, or a module that contains one.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, mean
        >>> model, x = bayesify(torch.nn.Linear(3, 2)), torch.ones(1, 3)
        >>> with mean(model):
        ...     bool((model(x) == model(x)).all())
        True
    """
    scopes = scopes_of(model)
    if torch.compiler.is_compiling() and len(scopes) == 1:
        return TracedBlock(scopes[0], mean=True)
    return override(scopes, MEAN)


def sample(model: nn.Module, seed: int | None = None) -> AbstractContextManager[None]:
    """Use one posterior sample for a whole `with` block: a generation, a loader, an evaluation.

    Args:
        model: A bayesified model, or a module that contains one.
        seed: Which sample; None takes one number from torch's global generator.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, sample
        >>> model, x = bayesify(torch.nn.Linear(3, 2)), torch.ones(1, 3)
        >>> with sample(model, seed=3):
        ...     bool((model(x) == model(x)).all())
        True
    """
    scopes = scopes_of(model)
    if torch.compiler.is_compiling() and len(scopes) == 1:
        return TracedBlock(scopes[0], seed)
    return override(scopes, one_draw(draw_seeds(1, seed)[0]))


def prior(model: nn.Module) -> AbstractContextManager[None]:
    """Use the prior mean inside a `with` block, with the model's buffers as they were at `bayesify`.

    By default this is the pretrained model: its weights are the prior mean, and its buffers (BatchNorm's running
    statistics) are kept for this. Parameters that are not Bayesian are read as they are now. Of a mixture it is the
    prior of the first member.

    Args:
        model: A bayesified model, or a module that contains one.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, prior
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
        >>> pretrained = model(x)
        >>> with torch.no_grad():
        ...     _ = bayesify(model, "vanilla").parametrizations.weight.original.add_(1.0)
        >>> with prior(model):
        ...     torch.equal(model(x), pretrained)
        True
    """
    return override(scopes_of(model), PRIOR)


def samples(model: nn.Module, n: int, seed: int | None = None) -> Iterator[int]:
    """Loop over posterior samples: inside each turn the model is one of them.

    Draw i is the same theta whatever the data or the batch size. The modes are restored when the loop ends or breaks.

    Args:
        model: A bayesified model, or a module that contains one.
        n: How many samples.
        seed: Which samples; None takes one number from torch's global generator.

    Yields:
        The number of the draw, from 0.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, samples
        >>> model, x = bayesify(torch.nn.Linear(3, 2)), torch.ones(1, 3)
        >>> len({model(x).sum().item() for _ in samples(model, 5, seed=0)})
        5
    """
    if not is_whole(n) or n < 0:
        raise ValueError(f"n must be an integer >= 0, got {n!r}")
    return _samples(scopes_of(model), draw_seeds(n, seed))


def _samples(scopes: list[Scope], seeds: list[int]) -> Iterator[int]:
    for i, seed in enumerate(seeds):
        with override(scopes, Mode(draw=Draw(seed, pinned=True), member=i)):
            yield i


# -- parameter groups --------------------------------------------------------------------------------------------------


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
    scopes = scopes_of(model)
    for name, value in {"lr": lr, "lr_head": lr_head, "lr_sig": lr_sig}.items():
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    if lr_head is not None and head is None:
        raise ValueError("lr_head needs head=, the module that it is for (or its name)")
    heads = [] if head is None else head if isinstance(head, (list, tuple)) else [head]
    in_head = {id(p) for h in heads for p in _find_head(model, h).parameters()}
    body = {id(p.original) for scope in scopes for p in scope.posteriors}
    spreads = {id(t): i for i, scope in enumerate(scopes) for p in scope.posteriors for t in p.learnable()}
    groups: dict[Any, dict[str, Any]] = {
        "body": {"name": "body", "params": [], "lr": lr, "weight_decay": 0.0},
        "head": {"name": "head", "params": [], "lr": lr_head or lr, "weight_decay": 0.0},
    }
    for i, scope in enumerate(scopes):
        groups[i] = {"name": "sig", "params": [], **_spread(scope.posteriors, lr, lr_sig), "weight_decay": 0.0}
    groups["rest"] = {"name": "rest", "params": [], "lr": lr}
    for param in model.parameters():
        if param.requires_grad:
            kind = "head" if id(param) in in_head else "body" if id(param) in body else "rest"
            groups[spreads.get(id(param), kind)]["params"].append(param)
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


# -- mistakes ----------------------------------------------------------------------------------------------------------


def mistakes(scope: Scope, *, spread: bool = True, known: Collection[str] = ()) -> dict[str, str]:
    """Return the mistakes that a model shows, by kind, and what to do about them; `spread` is whether it matters.

    Those that are `known` need not be among them.
    """
    if (name := not_finite(_tensors(scope))) is not None:
        text = "training diverged; lower the learning rate and train again from finite weights"
        return {"finite": f"the weights are not finite, {name!r} first: {text}"}
    found, posteriors = dict[str, str](), scope.posteriors
    why = (p.untrained if p.calibration == 1 else "" for p in posteriors)  # `calibrate` finds a spread too
    causes = list(takewhile(bool, why)) if spread and "spread" not in known else []
    if posteriors and len(causes) == len(posteriors):
        found["spread"] = (
            f"the spread of the posterior was never trained: {causes[0]}, so samples hardly differ from "
            "the mean, or say nothing about the data"
        )
    unpenalized = posteriors if scope.starts_at_prior and not scope.penalized else []
    ends = ((part(p.original), part(p.prior_center)) for p in unpenalized)
    if any(mean.shape == center.shape and not torch.equal(mean, center) for mean, center in ends):
        found["penalty"] = (
            "no penalty was ever computed, though the model was trained: add bayesify.penalty(model, num_data) to the "
            "loss (with Hugging Face's Trainer use bayesify.integrations.huggingface.BayesTrainer, which does)"
        )
    params = {} if scope.root is None else dict(scope.root.named_parameters())
    if thawed := [name for name in scope.frozen if name in params and params[name].requires_grad]:
        found["thawed"] = (
            f"{thawed[0]!r} and {len(thawed) - 1} others were frozen when bayesify was called and train now: they have "
            "no posterior; unfreeze first, or pass include= to bayesify"
        )
    return found


def warn_of_mistakes(scopes: Sequence[Scope], *, spread: bool = True, stacklevel: int = 3) -> None:
    """Warn of the mistakes that models show, of each kind once per model."""
    for scope in scopes:
        for kind, text in mistakes(scope, spread=spread, known=scope.warned).items():
            if kind not in scope.warned:
                scope.warned.add(kind)
                warnings.warn(text, stacklevel=stacklevel)


def warn_in_eval(scope: Scope) -> None:
    """Warn, once, where a penalty with gradients meets a model that eval() keeps from sampling."""
    sampled = [p for p in scope.posteriors if p.stochastic and p.random]
    if sampled and "eval" not in scope.warned and block_of(scope) is None and not any(map(scope.trains, sampled)):
        scope.warned.add("eval")
        warnings.warn(
            "the model is in eval mode, so its loss is that of the posterior mean, and the spread learns from the "
            "prior alone; call model.train() before training",
            stacklevel=3,
        )


def check_averaged(model: nn.Module) -> None:
    """Raise a ValueError for an `AveragedModel` of a method whose spread is what training collects."""
    for averaged in (m for m in model.modules() if isinstance(m, AveragedModel)):
        readers: list[Any] = [m.reader for m in averaged.modules() if isinstance(m, Posterior)]
        for method in (reader.method for reader in readers if isinstance(reader, Scope)):
            if method.optimizer or method.stages is not None:
                raise ValueError(
                    f"AveragedModel averages parameters alone: what method {method.name!r} collects in training stays "
                    "what it was when the average began; average a model of another method ('vi', 'mc_dropout', or "
                    "'la', fitted after), use 'swag', which is an average itself, or predict with the model"
                )


def _tensors(scope: Scope) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model has learned, by plain name."""
    yield from ((p.name, t) for p in scope.posteriors for t in (p.original, *p.learnable()))
    others = () if scope.root is None else scope.root.named_parameters()
    yield from ((name, t) for name, t in others if "parametrizations." not in name)


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that is not finite; where all are, a device is waited for once."""
    parts = [(name, part(t)) for name, t in tensors if t.is_floating_point()]
    norms = torch._foreach_norm([t for _, t in parts]) if parts else ()  # a launch for all, unlike `isfinite`
    if not norms or bool(torch.stack([n.to(norms[0]) for n in norms]).isfinite().all()):
        return None
    return next((name for name, t in parts if not bool(t.isfinite().all())), None)
