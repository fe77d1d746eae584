"""Views of a model, and what their samples share.

A prediction runs a view in eval mode, so that it changes nothing for a thread that trains the model, or predicts with
it too. One view per sample keeps what a model remembers of its calls (hidden states, caches) from the other samples.

The outermost modules without spread keep inputs and outputs of their calls; a call with equal inputs gets a copy of the
outputs. Only inside of `predict`, and only modules that have proved to be functions of their inputs: each runs twice at
first, and the outputs agree, no generator has moved, no buffer, attribute or input has changed, and no posterior was
read. Whatever else is run as ever.
"""

import copy
import functools
import random
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from bayesify.core.distributed import is_sharded, shards_itself
from bayesify.core.modes import put_buffers_of_start
from bayesify.core.posterior import Posterior
from bayesify.core.reading import Scope, scope_behind

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
        put_buffers_of_start(found)
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
def views(model: nn.Module, count: int = 1) -> Iterator[list[nn.Module]]:
    """Yield a model in eval mode so many times, without gradients: views of it.

    The code of compiled and sharded modules belongs to them: such a model is yielded itself, and its flags are put back
    afterwards. It must not be trained meanwhile.
    """
    with torch.no_grad():
        if can_be_viewed(model):
            yield [view(model) for _ in range(count)]
        else:
            with evaluation(model):
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


CALLS = 8  # with different inputs that a module remembers: those of one forward
PATIENCE = 3 * CALLS  # cache misses in a row after which a module is taken to depend on a draw
BYTES = 1 << 30  # all that is remembered, at most
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

_local = threading.local()


class Kept(NamedTuple):
    """A copy of a tensor, and its strides: other layouts may round in another way."""

    value: Tensor
    stride: tuple[int, ...]


class Call(NamedTuple):
    """One call: its inputs and its outputs."""

    key: Any
    inputs: list[Any]
    nesting: Any
    outputs: list[Any]


class Memory:
    """What the modules of one model remember during a prediction, by the model's own modules."""

    def __init__(self) -> None:
        self.bytes = 0
        self.known: dict[nn.Module, Remembered] = {}

    def forget(self) -> None:
        """Drop all outputs: the data is about to change."""
        self.bytes = 0
        for module in self.known.values():
            module.calls.clear()


class Remembered:
    """The last calls of a module without spread."""

    def __init__(self, memory: Memory, spread: set[Posterior]) -> None:
        self.memory, self.spread = memory, spread
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.wasted, self.proved, self.off = 0, False, False

    def __call__(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Return what a view's module returns."""
        inputs, nesting = pytree.tree_flatten((args, kwargs))
        usable = all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in inputs)
        if self.off or getattr(_local, "inside", False) or torch.is_grad_enabled() or not usable:
            return forward(*args, **kwargs)
        key = (nesting, _precision())
        for call in list(self.calls):
            if call.key == key and _equal(call.inputs, inputs):
                self.wasted = 0
                outputs = [leaf.value.clone() if isinstance(leaf, Kept) else leaf for leaf in call.outputs]
                return pytree.tree_unflatten(outputs, call.nesting)
        kept, before = _copies(inputs), _state(module)
        found, pure = self._watched(forward, args, kwargs)
        outputs, out_nesting = pytree.tree_flatten(found)
        pure = pure and all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in outputs) and _apart(inputs, outputs)
        pure = pure and _equal(kept, inputs) and before == _state(module)
        self.wasted += 1
        if not pure or self.wasted > PATIENCE:
            self.off = True
            self.calls.clear()
            return found
        call = Call(key, kept, out_nesting, _copies(outputs))
        if not self.proved:
            again, pure = self._watched(forward, args, kwargs)
            self.proved = pure and _equal(call.outputs, pytree.tree_flatten(again)[0])
            self.proved = self.proved and _equal(kept, inputs) and before == _state(module)
            if not self.proved:
                self.off = True
                return found
        size = sum(leaf.value.nbytes for leaf in (*call.inputs, *call.outputs) if isinstance(leaf, Kept))
        if self.memory.bytes + size <= BYTES:
            self.memory.bytes += size
            self.calls.append(call)
        return found

    def _watched(self, forward: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Run a forward; return its output, and whether it read no posterior and no generator."""
        readers: list[Any] = list({id(p.reader): p.reader for p in self.spread}.values())
        drawn, threads = _random_state(), [reader.now for reader in readers]
        for now in threads:
            now.watched, now.touched = self.spread, False
        _local.inside = True
        try:
            found = forward(*args, **kwargs)
        finally:
            _local.inside = False
            for now in threads:
                now.watched = ()
        return found, drawn == _random_state() and not any(now.touched for now in threads)


def _state(module: nn.Module) -> list[Any]:
    """Return what changes where a module changes an attribute, a buffer or a parameter."""
    return [(id(part), [_stamp(v) for v in vars(part).values()]) for part in module.modules()]


def _stamp(value: Any, depth: int = 2) -> Any:
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, PLAIN):
        return value
    if depth and isinstance(value, dict):
        return [(k, _stamp(v, depth - 1)) for k, v in value.items()]
    if depth and isinstance(value, (list, tuple, set)):
        return [_stamp(v, depth - 1) for v in value]
    return id(value)


def _precision() -> Any:
    """Return what autocast would compute in."""
    return [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]


def _random_state() -> list[bytes | int]:
    """Return what changes where random numbers are drawn."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    states = [torch.get_rng_state(), *devices]
    legacy: Any = np.random.get_state()
    return [*(s.numpy().tobytes() for s in states), legacy[1].tobytes(), int(legacy[2]), hash(random.getstate())]


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [Kept(leaf.clone(), leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _equal(known: Sequence[Any], leaves: Sequence[Any]) -> bool:
    """Return whether values, types and layouts are the same."""
    return len(known) == len(leaves) and all(_same(a, b) for a, b in zip(known, leaves, strict=True))


def _same(known: Any, leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return type(known) is type(leaf) and bool(known == leaf)
    if not isinstance(known, Kept):
        return False
    value, stride = known
    alike = (value.shape, value.dtype, value.device, stride) == (leaf.shape, leaf.dtype, leaf.device, leaf.stride())
    return alike and torch.equal(value, leaf)


def _apart(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Return whether copies of the outputs are as good: they share no memory, and a copy keeps the layout."""
    taken = {leaf.untyped_storage().data_ptr() for leaf in inputs if isinstance(leaf, Tensor)}
    found = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
    storages = [leaf.untyped_storage().data_ptr() for leaf in found]
    dense = all(torch.empty_like(leaf).stride() == leaf.stride() for leaf in found)
    return dense and not taken.intersection(storages) and len(set(storages)) == len(storages)


@contextmanager
def reusing(model: nn.Module, views: Sequence[nn.Module]) -> Iterator[Memory | None]:
    """Let the views of a model share what its modules without spread return, inside a `with` block.

    Args:
        model: The model.
        views: Views of it, one per sample; nothing is done where they are the model itself.

    Yields:
        The memory, or None where there is nothing to remember.
    """
    memory, modules = Memory(), list(model.modules())
    spread = {m for m in modules if isinstance(m, Posterior) and m.moves}
    if spread and not any(v is model for v in views):
        for module in modules:
            still = not isinstance(module, Posterior) and not spread.intersection(module.modules())
            if still and next(module.parameters(), None) is not None and not _is_hooked(module):
                memory.known[module] = Remembered(memory, spread)
    for own in views if memory.known else ():
        for module, twin in zip(modules, own.modules(), strict=True):
            if module in memory.known:
                twin.__dict__["forward"] = _remembering(memory.known[module], twin, twin.forward)
    try:
        yield memory if memory.known else None
    finally:
        memory.forget()


def _remembering(known: Remembered, twin: nn.Module, forward: Any) -> Any:
    return lambda *args, **kwargs: known(twin, forward, args, kwargs)


def _is_hooked(module: nn.Module) -> bool:
    """Return whether somebody else's hooks wait for calls inside a module, which would not happen."""
    inside = (m for m in module.modules() if m is not module)
    hooks = (hook for m in inside for held in (m._forward_pre_hooks, m._forward_hooks) for hook in held.values())
    return any(not isinstance(scope_behind(hook), Scope) for hook in hooks)
