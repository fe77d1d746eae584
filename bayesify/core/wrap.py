"""Wrap a model and unwrap it again; the modes and the posteriors of a wrapped one.

A failed call changes nothing: everything is checked and built before the first parametrization is registered.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from bayesify.core import surface
from bayesify.core.distributed import follow, is_sharded
from bayesify.core.method import Method, resolve
from bayesify.core.mixture import Mixture, mixture_in
from bayesify.core.modes import (
    MEAN,
    PRIOR,
    Draw,
    Mode,
    TracedBlock,
    check_buffers,
    keep_buffers,
    lasting_buffers,
    one_draw,
    override,
)
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import draw_seeds, is_whole
from bayesify.core.reading import Scope, Site, forget_weights
from bayesify.core.scopes import NOISE, check_module, scopes_of
from bayesify.core.selection import Candidate, Patterns, candidates, prior_buffers, priors, select
from bayesify.core.surface import put_hooks

M = TypeVar("M", bound=nn.Module)


def bayesify(
    model: M,
    method: str | Method = "vi",
    *,
    prior_sig: Any = None,
    prior_mean: Any = None,
    bias: str | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    **options: Any,
) -> M:
    """Turn a model into a Bayesian one, in place, without touching its source.

    Each selected parameter becomes the mean of a posterior. The output in eval mode stays the same bit for bit, and no
    random number is consumed.

    Args:
        model: Any module; its weights are the starting point and, by default, the prior mean.
        method: A name, such as "vi", "la", "ivon", "sgld", "swag" or "ensemble", or an object of `bayesify.methods`.
        prior_sig: The prior's standard deviation: None is each tensor's own size, under which the method tempers the
            prior (see `bayesify.core.prior`); a number is absolute; or a mapping from name patterns to these (first
            match wins; what no pattern matches gets None).
        prior_mean: None for the current weights, "zero" (1 for normalization scales), a module or state dict with
            other values, or a mapping from name patterns to these; what no pattern matches keeps the current weights.
        bias: How biases are treated; the method's first treatment by default.
        include: Glob pattern(s) over parameter names, or a callable of (name, parameter). All by default.
        exclude: Likewise, taken away from what is included.
        **options: The method's options, see its class in `bayesify.methods`.

    Returns:
        The same model.

    Raises:
        ValueError: An argument is out of range, unknown or matches nothing; the model cannot be wrapped as it is.
        TypeError: An argument is of the wrong type.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, penalty
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=0.1)
        >>> loss = model(torch.ones(4, 3)).square().mean() + penalty(model, num_data=100)
        >>> loss.backward()
    """
    check_module(model)
    chosen = resolve(method, bias, options)
    check_wrappable(model)
    every = candidates(model)
    select(every, include, exclude)
    check_parameters(every)
    found = priors(every, prior_mean, prior_sig)
    chosen = chosen.settled(
        relative=any(prior.relative for prior in found.values()),
        weights=sum(c.param.numel() for c in every if not c.skipped),
    )
    posteriors = [(c, chosen.posterior(c.param, found[id(c)], fixed_row=c.fixed_row)) for c in every if not c.skipped]
    buffers = prior_buffers([path for path, _, _ in lasting_buffers(model)], prior_mean)
    check_buffers(model, buffers)
    scope = wrap(model, chosen, posteriors)
    scope.starts_at_prior = prior_mean is None
    scope.frozen = tuple(c.name for c in every if c.skipped == "frozen")
    keep_buffers(model, buffers)
    return model


def check_wrappable(model: nn.Module) -> None:
    """Raise if the model as a whole cannot be wrapped."""
    check_module(model)
    for name, module in model.named_modules():
        where = f"the submodule {name!r}" if name else "the model"
        if isinstance(module, Posterior):
            raise ValueError("the model is bayesified already; call unbayesify(model) first")
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ValueError(f"{where} is wrapped in {type(module).__name__}; call bayesify first, then wrap it")
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(f"{where} is compiled; call bayesify on the plain model, before torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is scripted, and TorchScript has no parametrizations; bayesify the original one")
        if ".quantized" in type(module).__module__:
            raise ValueError(f"{where} is a quantized module, without trainable weights; quantize later")


def check_parameters(every: list[Candidate]) -> None:
    """Raise if a parameter that should become Bayesian cannot."""
    for candidate in every:
        if torch.nn.parameter.is_lazy(candidate.param):
            raise ValueError(f"{candidate.name!r} is not initialized yet (a lazy module); run one forward pass first")
        if candidate.skipped:
            continue
        if candidate.param.device.type == "meta":
            raise ValueError(f"{candidate.name!r} is on the meta device; load the weights first")
        if is_sharded(candidate.param):
            raise ValueError(f"{candidate.name!r} is sharded over devices; call bayesify first, then fully_shard")
        for module, attribute in candidate.places:
            if hasattr(nn.ModuleDict, attribute):
                raise ValueError(
                    f"torch cannot parametrize a parameter that is called {attribute!r}; rename it in "
                    f"{type(module).__name__}, or exclude={candidate.name!r}"
                )
            if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                raise ValueError(
                    f"{candidate.name!r} has sparse gradients, which a posterior cannot have; set sparse=False on the "
                    f"embedding, or exclude={candidate.name!r}"
                )


def wrap(model: nn.Module, method: Method, posteriors: list[tuple[Candidate, Posterior]]) -> Scope:
    """Register ready posteriors on their parameters, and the hooks that tell where a forward begins and ends."""
    orders = {id(m): tuple(m._parameters) for m in model.modules()}
    sites = [Site(m, a, orders[id(m)]) for c, _ in posteriors for m, a in c.places]
    scope = Scope(model, method, [p for _, p in posteriors], sites)
    put_hooks(model, scope)
    for module in {s.module for s in sites if parametrize.is_parametrized(s.module)}:
        # Its class may be shared with copies of the module; a class of its own goes away with the posteriors.
        parametrize._inject_new_class(module)
    for candidate, posterior in posteriors:
        posterior.train(candidate.places[0][0].training)
        for module, attribute in candidate.places:
            parametrize.register_parametrization(module, attribute, posterior, unsafe=True)
        module, attribute = candidate.places[0]
        posterior.attach(candidate.name, module.parametrizations[attribute], "original", scope)  # type: ignore[index,arg-type]
    names: dict[nn.Module, set[str]] = {}
    for site in sites:
        names.setdefault(site.module, set()).add(site.attribute)
    for module, own in names.items():
        surface.share_class(module, frozenset(own))
    model._bayesify_scope = scope  # type: ignore[assignment]
    surface.put_on(model)
    keep_buffers(model)
    method.wrapped(scope)
    return scope


def unbayesify(model: M, to: str = "mean") -> M:
    """Turn a bayesified model back into the plain one that it was.

    Classes, parameter names and order, parameter identity and hooks are as before `bayesify`.

    Args:
        model: A bayesified model, or a module that contains some. Of a mixture the first member, or one by chance.
        to: What the weights become: "mean", the posterior mean, or "sample", one draw.

    Returns:
        The same model; the plain member of a mixture.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, unbayesify
        >>> model = unbayesify(bayesify(torch.nn.Linear(3, 2)))
        >>> type(model).__name__, [name for name, _ in model.named_parameters()]
        ('Linear', ['weight', 'bias'])
    """
    if to not in ("mean", "sample"):
        raise ValueError(f"to must be 'mean' or 'sample', got {to!r}")
    check_module(model)
    roots = [m for m in model.modules() if "_bayesify_scope" in m.__dict__]
    if not roots:
        scopes_of(model)  # raises where there is nothing to remove
        raise ValueError(f"this {type(model).__name__} is a part of the bayesified model; unbayesify the whole")
    scopes: list[Scope] = [m._bayesify_scope for m in roots]  # type: ignore[misc]
    for scope in scopes:
        _check_removable(scope)
        scope.buffers.put(scope.root, start=False)
    mode = one_draw(draw_seeds(1, None)[0]) if to == "sample" else MEAN
    if isinstance(model, Mixture):
        return unbayesify(model.member(mode.member), to)  # type: ignore[return-value]
    with torch.no_grad(), override(scopes, mode):
        values = [(p, p(p.original)) for scope in scopes for p in scope.posteriors]
        for posterior, value in values:
            if value is not posterior.original:
                posterior.original.copy_(value)
        for scope in scopes:
            scope.method.bake(scope, mode)
    for root, scope in zip(roots, scopes, strict=True):
        _unwrap(root, scope)
    return model


def _check_removable(scope: Scope) -> None:
    if follow(scope.posteriors):
        raise ValueError(
            "the model is sharded over devices by FSDP2, which would not find its parameters any more; unbayesify it "
            "before fully_shard, or save(model, dir): its model.safetensors is the plain model"
        )
    for site in scope.sites:
        kept: Any = site.module.parametrizations[site.attribute]  # type: ignore[index]
        if len(kept) > 1:
            raise ValueError(
                f"{type(site.module).__name__}.{site.attribute} has a parametrization that was registered after "
                "bayesify; remove that one first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        ours = {s.attribute for s in scope.sites if s.module is site.module}
        later = [a for a in site.module.parametrizations if a not in ours and a in site.order]  # type: ignore[union-attr]
        if later:
            raise ValueError(
                f"{type(site.module).__name__}.{later[0]} was parametrized after bayesify; remove that parametrization "
                "first (torch.nn.utils.parametrize.remove_parametrizations)"
            )


def _unwrap(root: nn.Module, scope: Scope) -> None:
    """Remove the parametrizations and hooks of one scope."""
    for site in scope.sites:
        kept: Any = site.module.parametrizations
        site.module._parameters[site.attribute] = kept[site.attribute].original
        del kept[site.attribute]
    for module, order in {s.module: s.order for s in scope.sites}.items():
        if not module.parametrizations:
            del module.parametrizations
        # Copies share the class that the posteriors were registered on: it is left alone, not emptied.
        module.__class__ = type(module).__bases__[0]
        rank = {n: i for i, n in enumerate(order)}
        module._parameters = dict(sorted(module._parameters.items(), key=lambda kv: rank.get(kv[0], len(rank))))
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "scope", None) is scope]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    root._modules.pop(NOISE, None)
    surface.take_off(root)
    forget_weights(scope.recurrent)
    del root._bayesify_scope


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
    if torch.compiler.is_compiling() and mixture_in(model) is None:
        return TracedBlock(scopes, mean=True)
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
    if torch.compiler.is_compiling() and mixture_in(model) is None:
        return TracedBlock(scopes, seed=seed)
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
