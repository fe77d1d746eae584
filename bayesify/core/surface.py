"""How a bayesified model meets the tools around it: its class's name, pickling, assignment, state dicts, folders.

`wrap` puts all of this on, `unbayesify` takes it off again.
"""

import warnings
from typing import Any

import torch
from torch import nn

from bayesify.core import start
from bayesify.core.modes import block_of
from bayesify.core.stored import check_state_dict

LOADING = (check_state_dict, start.load_start)
extensions: list[Any] = []
"""Modules with `put_on(model)` and `take_off(model)`, which fit a bayesified model to another library."""


def put_on(model: nn.Module) -> None:
    """Let a bayesified model refuse the state dicts that are not its own, and write folders that others can read."""
    for extension in extensions:
        extension.put_on(model)
    for hook in LOADING:
        model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(warn_of_export)
    model.register_state_dict_pre_hook(start.restore)  # type: ignore[no-untyped-call]
    model.register_state_dict_post_hook(start.save_start)  # type: ignore[no-untyped-call]


def take_off(model: nn.Module) -> None:
    """Undo `put_on`."""
    for extension in extensions:
        extension.take_off(model)
    ours = (*LOADING, warn_of_export, start.restore, start.save_start)
    places: Any = (
        model._load_state_dict_pre_hooks, model._forward_pre_hooks, model._state_dict_pre_hooks, model._state_dict_hooks
    )  # fmt: skip
    for hooks in places:
        for key in [k for k, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]
    start.drop(model)


def warn_of_export(model: nn.Module, args: Any) -> None:
    """Warn where a model is traced or exported in no block: what comes out is the posterior's mean alone."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if not (torch.compiler.is_exporting() or tracing):
        return
    scope: Any = model._bayesify_scope
    if block_of(scope) is None and scope.now.mode is None and any(p.moves for p in scope.posteriors):
        warnings.warn(
            "the exported model is the posterior's mean, without its uncertainty; export bayesify.deploy(model), "
            "or inside `with bayesify.mean(model)` if the mean is meant",
            stacklevel=2,
        )


def share_class(module: nn.Module, names: frozenset[str]) -> None:
    """Give a wrapped module one class with all others of its kind, in place of the one that torch has derived for it.

    Compilers tell modules apart by their classes: equal blocks of a model then take one compiled graph.
    """
    known: list[type] = type(module).__bases__[0].__subclasses__()
    twin = next((cls for cls in known if isinstance(cls, Shared) and cls.__dict__["_bayesian"] == names), None)
    module.__class__ = twin or _derive(type(module), names, shared=True)  # type: ignore[assignment]


class Shared(type):
    """A class of several modules, of which none may change it."""

    def __delattr__(cls, name: str) -> None:
        """Refuse what torch's remove_parametrizations does."""
        raise AttributeError(
            f"{name!r} of a bayesified {cls.__name__} cannot be removed on its own; call bayesify.unbayesify(model), "
            f"or leave it out: bayesify(model, exclude=...)"
        )


def _derive(like: Any, names: frozenset[str], *, shared: bool) -> Any:
    """Make a class like the one that torch derives, which goes by the name of its base: libraries look it up."""
    base: Any = like.__bases__[0]

    def assign(self: nn.Module, name: str, value: Any) -> None:
        _refuse_to_assign(self, name)
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


def refuse_to_pickle(part: Any) -> Any:
    """Say how a bayesified model is kept, in the place of torch's own refusal."""
    raise RuntimeError(
        "a bayesified model cannot be pickled, nor copied without its parameters: this is only supported through "
        "state_dict(), bayesify.save and load, and copy.deepcopy"
    )


def _refuse_to_assign(module: nn.Module, name: str) -> None:
    """Say how a weight is written that is drawn when it is read."""
    if name in module.__dict__.get("_modules", {}).get("parametrizations", ()):
        raise AttributeError(
            f"{name!r} of a bayesified {type(module).__name__} is drawn when it is read and cannot be assigned; write "
            f"to its mean, `with torch.no_grad(): module.parametrizations.{name}.original.copy_(value)`, or assign it "
            "between unbayesify(model) and bayesify(model, ...)"
        )
