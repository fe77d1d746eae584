"""Put posteriors on a model's parameters and take them off again: parametrizations, hooks, and classes that share code.

A failed call changes nothing: everything is checked and built before the first parametrization is registered.
"""

import warnings
from collections import OrderedDict
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from bayesify.core.distributed import follow, is_sharded
from bayesify.core.method import Method, resolve
from bayesify.core.mixture import Mixture
from bayesify.core.modes import (
    MEAN,
    block_of,
    keep_buffers,
    lasting_buffers,
    load_start,
    one_draw,
    override,
    restore_buffers,
    save_start,
)
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import draw_seeds
from bayesify.core.reading import Scope, Site, forget_weights, refuse_to_pickle, scope_behind
from bayesify.core.scopes import NOISE, check_module, scopes_of
from bayesify.core.selection import Candidate, Patterns, candidates, prior_buffers, priors, select
from bayesify.core.stored import check_state_dict

M = TypeVar("M", bound=nn.Module)

extensions: list[Any] = []
"""Modules with `put_on(model)` and `take_off(model)`, which fit a bayesified model to another library."""


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
    check_wrappable(model)
    chosen = resolve(method, bias, options)
    every = candidates(model)
    select(every, include, exclude)
    check_parameters(every)
    found = priors(every, prior_mean, prior_sig)
    chosen = chosen.resolve_defaults(
        relative=any(prior.relative for prior in found.values()),
        weights=sum(c.param.numel() for c in every if not c.skipped),
    )
    posteriors = [(c, chosen.posterior(c.param, found[id(c)], fixed_row=c.fixed_row)) for c in every if not c.skipped]
    buffers = prior_buffers({name: module.get_buffer(own) for name, module, own in lasting_buffers(model)}, prior_mean)
    scope = wrap(model, chosen, posteriors)
    scope.starts_at_prior = prior_mean is None
    scope.frozen = tuple(c.name for c in every if c.skipped == "frozen")
    keep_buffers(model, buffers)
    return model


def check_wrappable(model: nn.Module) -> None:
    """Raise if the model as a whole cannot be wrapped."""
    check_module(model)
    for name, module in model.named_modules():
        where, kind = f"the submodule {name!r}" if name else "the model", type(module)
        if isinstance(module, Posterior):
            raise ValueError("the model is bayesified already; call unbayesify(model) first")
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ValueError(f"{where} is wrapped in {kind.__name__}; call bayesify first, then wrap it")
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(f"{where} is compiled; call bayesify on the plain model, before torch.compile")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{where} is scripted, and TorchScript has no parametrizations; bayesify the original one")
        if ".quantized" in kind.__module__:
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
    _put_hooks(model, scope)
    for module in {s.module for s in sites if parametrize.is_parametrized(s.module)}:
        # Its class may be shared with copies of the module; a class of its own goes away with the posteriors.
        parametrize._inject_new_class(module)
    for candidate, posterior in posteriors:
        posterior.train(candidate.places[0][0].training)
        for module, attribute in candidate.places:
            parametrize.register_parametrization(module, attribute, posterior, unsafe=True)
        module, attribute = candidate.places[0]
        posterior.attach(candidate.name, module.parametrizations[attribute], "original", scope)  # type: ignore[index,arg-type]
    for module, names in _attributes(sites).items():
        _share_class(module, frozenset(names))
    model._bayesify_scope = scope  # type: ignore[assignment]
    for extension in extensions:
        extension.put_on(model)
    model.register_forward_pre_hook(_warn_of_export)
    for hook in (check_state_dict, load_start):
        model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    model.register_state_dict_pre_hook(restore_buffers)  # type: ignore[no-untyped-call]
    model.register_state_dict_post_hook(save_start)  # type: ignore[no-untyped-call]
    method.wrapped(scope)
    return scope


def unbayesify(model: M, to: str = "mean") -> M:
    """Turn a bayesified model back into the plain one that it was.

    Classes, parameter names and order, parameter identity and hooks are as before `bayesify`.

    Args:
        model: A bayesified model, or a module that contains some. Of a mixture the first member, or a random one.
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


def _attributes(sites: list[Site]) -> dict[nn.Module, list[str]]:
    """Return the attributes that read posteriors, by module."""
    found: dict[nn.Module, list[str]] = {}
    for site in sites:
        found.setdefault(site.module, []).append(site.attribute)
    return found


def _check_removable(scope: Scope) -> None:
    if follow(scope.posteriors):
        raise ValueError(
            "the model is sharded over devices by FSDP2, which would not find its parameters any more; unbayesify it "
            "before fully_shard, or save(model, dir): its model.safetensors is the plain model"
        )
    ours = _attributes(scope.sites)
    for module, order in {s.module: s.order for s in scope.sites}.items():
        kept: Any = module.parametrizations
        if later := [a for a in kept if (len(kept[a]) > 1 if a in ours[module] else a in order)]:
            raise ValueError(
                f"{type(module).__name__}.{later[0]} has a parametrization that was registered after bayesify; remove "
                "that one first (torch.nn.utils.parametrize.remove_parametrizations)"
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
            for key in [k for k, hook in hooks.items() if scope_behind(hook) is scope]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    for extension in extensions:
        extension.take_off(root)
    ours = (_warn_of_export, check_state_dict, load_start, restore_buffers, save_start)
    kinds = ("_forward_pre_hooks", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
    for hooks in (getattr(root, kind) for kind in kinds):
        for key in [k for k, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]
    root._modules.pop(NOISE, None)
    forget_weights(scope.recurrent)
    del root._bayesify_scope


# -- hooks -------------------------------------------------------------------------------------------------------------


def _put_hooks(model: nn.Module, scope: Scope) -> None:
    """Let every module tell the scope where its forward begins and, on exceptions too, where it ends.

    All have the same numbers, by which torch knows hooks: equal blocks of a model then take one compiled graph.
    """
    first, last = (RemovableHandle(OrderedDict()).id for _ in range(2))
    for module in model.modules():
        enter, leave = scope.enter, scope.leave
        if module is model:
            enter, leave = _own_code(enter), _own_code(leave)
        before: Any = module._forward_pre_hooks
        before[first] = enter
        before.move_to_end(first, last=False)
        module._forward_hooks[last] = leave
        module._forward_hooks_always_called[last] = True


def _own_code(hook: Any) -> Any:
    """Return a hook with code of its own, for a model as a whole.

    torch.compile compiles a model's hooks apart from its forward, and refuses more than eight variants of one code; a
    process with more compiled models would fall back to eager mode.
    """
    return MethodType(FunctionType(hook.__code__.replace(), hook.__globals__, hook.__name__), hook.__self__)


def _warn_of_export(model: nn.Module, args: Any) -> None:
    """Warn where a model is traced or exported in no block: what comes out is the posterior's mean alone."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if not (torch.compiler.is_exporting() or tracing):
        return
    scope: Any = model._bayesify_scope
    if block_of(scope) is None and scope.now.mode is None and any(p.random for p in scope.posteriors):
        warnings.warn(
            "the exported model is the posterior's mean, without its uncertainty; export bayesify.deploy(model), "
            "or inside `with bayesify.mean(model)` if the mean is meant",
            stacklevel=2,
        )


# -- classes -----------------------------------------------------------------------------------------------------------


class Shared(type):
    """A class of several modules, of which none may change it."""

    def __delattr__(cls, name: str) -> None:
        """Refuse what torch's remove_parametrizations does."""
        raise AttributeError(
            f"{name!r} of a bayesified {cls.__name__} cannot be removed on its own; call bayesify.unbayesify(model), "
            f"or leave it out: bayesify(model, exclude=...)"
        )


def _share_class(module: nn.Module, names: frozenset[str]) -> None:
    """Give a wrapped module one class with all others of its kind, in place of the one that torch has derived for it.

    Compilers tell modules apart by their classes: equal blocks of a model then take one compiled graph.
    """
    known: Any = type(module).__bases__[0].__subclasses__()
    shared: Any = (cls for cls in known if isinstance(cls, Shared) and cls.__dict__["_bayesian"] == names)
    module.__class__ = next(shared, None) or _derive(type(module), names, shared=True)


def _derive(like: Any, names: frozenset[str], *, shared: bool) -> Any:
    """Make a class like the one that torch derives, which goes by the name of its base: libraries look it up."""
    base: Any = like.__bases__[0]

    def assign(self: nn.Module, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", {}).get("parametrizations", ()):
            raise AttributeError(
                f"{name!r} of a bayesified {type(self).__name__} is drawn when it is read and cannot be assigned; write"
                f" to its mean, `with torch.no_grad(): module.parametrizations.{name}.original.copy_(value)`, or assign"
                " it between unbayesify(model) and bayesify(model, ...)"
            )
        base.__setattr__(self, name, value)

    def delete(self: nn.Module, name: str) -> None:
        if name in self._parameters or name in self._buffers:
            # Somebody parametrizes what we left alone, and is about to put a property on the class.
            self.__class__ = _derive(type(self), names, shared=False)
        base.__delattr__(self, name)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__setattr__": assign,
        "__delattr__": delete,
        "__getstate__": refuse_to_pickle,
        "_bayesian": names,
        **{name: _drawn(name) for name in names},
    }
    if "__deepcopy__" in like.__dict__:
        members["__deepcopy__"] = like.__deepcopy__
    meta = type(base) if not shared else Shared if type(base) is type else type("Shared", (Shared, type(base)), {})
    return meta(base.__name__, (base,), members)


def _drawn(name: str) -> property:
    """Return the property that reads a parametrized attribute."""
    return property(lambda self: self.parametrizations[name]())
