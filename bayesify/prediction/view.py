"""Views of a model: its parameters, with flags, buffers and attributes of their own.

A prediction runs a view in eval mode, so that it changes nothing for a thread that trains the model, or predicts with
it too. One view per sample keeps what a model remembers of its calls (hidden states, caches) from the other samples.
"""

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from bayesify.core import start
from bayesify.core.distributed import is_sharded, shards_itself

CONTAINERS = (list, tuple, dict, set, OrderedDict)


def can_be_viewed(model: nn.Module) -> bool:
    """Return whether a view computes what the model does: not if code is bound to the modules themselves.

    Compiled, scripted and sharded modules are such, and forwards that were replaced by a closure.
    """
    return not any(_is_bound(module) for module in model.modules())


def _is_bound(module: nn.Module) -> bool:
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    scripted = isinstance(module, (torch.jit.ScriptModule, nn.DataParallel))
    sharded = shards_itself(module) or any(is_sharded(p) for p in module._parameters.values() if p is not None)
    replaced = module.__dict__.get("forward")
    return compiled or scripted or sharded or not (replaced is None or _rebinds(replaced))


def _rebinds(function: Any) -> bool:
    """Return whether a replaced forward names its module, so that a view can have one of its own."""
    return isinstance(function, (types.MethodType, functools.partial))


def view(model: nn.Module, *, prior: bool = False) -> nn.Module:
    """Return a view of a model in eval mode; its parameters and posteriors are the model's own.

    Args:
        model: A model that `can_be_viewed`.
        prior: Whether its buffers are those of the start, for a prediction at the prior mean.
    """
    twins: dict[int, Any] = {}
    for module in model.modules():
        if id(module) not in twins:
            # What draws a parameter is shared: it knows by the thread that runs what is read.
            twins[id(module)] = module if _shared(module) else object.__new__(type(module))
    for module in model.modules():
        twin = twins[id(module)]
        if twin is not module:
            twin.__dict__.update({name: _twin(value, twins) for name, value in vars(module).items()})
            twin.__dict__["_parameters"] = module._parameters
            buffers = {n: b if b is None else b.detach().clone() for n, b in module._buffers.items()}
            twin.__dict__.update(_buffers=OrderedDict(buffers), training=False)
    found: nn.Module = twins[id(model)]
    if prior:
        start.put_back(found)
    return found


def _shared(module: nn.Module) -> bool:
    """Return whether a view holds the very module: the parametrizations, which keep the parameters."""
    return isinstance(module, ParametrizationList) or hasattr(module, "prior_center")


def _twin(value: Any, twins: dict[int, Any], depth: int = 3) -> Any:
    """Return an attribute for a view: modules become their twins, containers are copied, all else is the same."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _twin(value.__self__, twins, 0))
    if isinstance(value, functools.partial):
        words = {k: _twin(v, twins, depth - 1) for k, v in value.keywords.items()}
        return functools.partial(
            _twin(value.func, twins, 0), *(_twin(v, twins, depth - 1) for v in value.args), **words
        )
    if not depth or type(value) not in CONTAINERS:
        return value
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({k: _twin(v, twins, depth - 1) for k, v in value.items()})
        return copied
    return type(value)(_twin(v, twins, depth - 1) for v in value)


@contextmanager
def views(model: nn.Module, count: int = 1, *, prior: bool = False) -> Iterator[list[nn.Module]]:
    """Yield a model in eval mode so many times, without gradients: views of it.

    The code of compiled and sharded modules belongs to them: such a model is yielded itself, and its flags are put back
    afterwards. It must not be trained meanwhile.
    """
    with torch.no_grad():
        if can_be_viewed(model):
            yield [view(model, prior=prior) for _ in range(count)]
        else:
            with evaluation(model), start.started(model) if prior else nullcontext():
                yield [model] * count


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Set eval mode for a `with` block, and put every module's flag back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training


def same_place(model: nn.Module, part: nn.Module, other: nn.Module) -> nn.Module:
    """Return the module of a view that a module of the model has become."""
    return other.get_submodule(next(path for path, module in model.named_modules() if module is part))
