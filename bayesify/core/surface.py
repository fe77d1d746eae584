"""How a bayesified model meets the tools around it: hooks, class names, pickling, assignment, state dicts, folders.

`wrap` puts all of this on, `unbayesify` takes it off again.
"""

import copy
import warnings
from collections import OrderedDict
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bayesify.core.modes import block_of, drop_buffers, load_start, restore_buffers, save_start
from bayesify.core.reading import Scope
from bayesify.core.stored import check_state_dict

LOADING = (check_state_dict, load_start)
extensions: list[Any] = []
"""Modules with `put_on(model)` and `take_off(model)`, which fit a bayesified model to another library."""


def put_on(model: nn.Module) -> None:
    """Let a bayesified model refuse the state dicts that are not its own, and write folders that others can read."""
    for extension in extensions:
        extension.put_on(model)
    for hook in LOADING:
        model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    model.register_forward_pre_hook(warn_of_export)
    model.register_state_dict_pre_hook(restore_buffers)  # type: ignore[no-untyped-call]
    model.register_state_dict_post_hook(save_start)  # type: ignore[no-untyped-call]


def take_off(model: nn.Module) -> None:
    """Undo `put_on`."""
    for extension in extensions:
        extension.take_off(model)
    ours = (*LOADING, warn_of_export, restore_buffers, save_start)
    places: Any = (
        model._load_state_dict_pre_hooks, model._forward_pre_hooks, model._state_dict_pre_hooks, model._state_dict_hooks
    )  # fmt: skip
    for hooks in places:
        for key in [k for k, hook in hooks.items() if getattr(hook, "hook", hook) in ours]:
            del hooks[key]
    drop_buffers(model)


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


class Hook:
    """What knows a model's scope. A copy of the model has its own, and a pickle none: its modules refuse that."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.scope = copy.deepcopy(self.scope, memo)
        return twin

    def __reduce__(self) -> Any:
        refuse_to_pickle(self)


class Enter(Hook):
    """Forward pre-hook: a module's forward begins."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Enter the scope."""
        if torch.compiler.is_compiling():
            self.scope.enter_compiled(module)
        else:
            self.scope.enter(module)


class Leave(Hook):
    """Forward hook, called on exceptions too: a module's forward ends."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the scope."""
        if torch.compiler.is_compiling():
            self.scope.leave_compiled(module)
        else:
            self.scope.leave(module)


def put_hooks(model: nn.Module, scope: Scope) -> None:
    """Let every module tell the scope where its forward begins and ends.

    All have the same numbers, by which torch knows hooks: equal blocks of a model then take one compiled graph.
    """
    first, last = (RemovableHandle(OrderedDict()).id for _ in range(2))
    for module in model.modules():
        enter, leave = (_own_code(Enter), _own_code(Leave)) if module is model else (Enter, Leave)
        before: Any = module._forward_pre_hooks
        before[first] = enter(scope)
        before.move_to_end(first, last=False)
        module._forward_hooks[last] = leave(scope)
        module._forward_hooks_always_called[last] = True


def _own_code(hook: type[Enter] | type[Leave]) -> Any:
    """Derive a hook with code of its own, for a model as a whole.

    torch.compile compiles a model's hooks apart from its forward, and refuses more than eight variants of one code; a
    process with more compiled models would fall back to eager mode.
    """
    call: Any = hook.__call__
    code = FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
    return type(hook.__name__, (hook,), {"__call__": code})
