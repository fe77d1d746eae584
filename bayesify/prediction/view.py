"""How predictions run a model: views of it in eval mode, with BatchNorm statistics of their own, that share calls.

A view changes nothing for a thread that trains the model, or predicts with it too. One view per sample keeps what a
model remembers of its calls (hidden states, caches) from the other samples.
"""

import copy
import functools
import random
import threading
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import _pytree as pytree

from bayesify.core.distributed import is_sharded, shards_itself
from bayesify.core.modes import Mode, override, put_buffers_of_start
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
    replaced = module.__dict__.get("forward")  # a method or partial names its module, which `_twin` replaces
    closure = replaced is not None and not isinstance(replaced, (types.MethodType, functools.partial))
    return compiled or scripted or sharded or closure


def view(model: nn.Module, *, prior: bool = False) -> nn.Module:
    """Return a view of a model in eval mode, with its parameters and posteriors; `prior` takes its first buffers."""
    twins: dict[int, Any] = {}
    for module in model.modules():
        # What draws a parameter, and keeps it, is shared: it knows by the thread that runs what is read.
        shared = isinstance(module, ParametrizationList) or hasattr(module, "prior_center")
        twins[id(module)] = module if shared else object.__new__(type(module))
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


def _twin(value: Any, twins: dict[int, Any], depth: int = 3) -> Any:
    """Return an attribute for a view: modules become their twins, containers are copied, all else is the same."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _twin(value.__self__, twins, 0))
    if isinstance(value, functools.partial):
        args = [_twin(v, twins, depth - 1) for v in value.args]
        keywords = {k: _twin(v, twins, depth - 1) for k, v in value.keywords.items()}
        return functools.partial(_twin(value.func, twins, 0), *args, **keywords)
    if not depth or type(value) not in CONTAINERS:
        return value
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({k: _twin(v, twins, depth - 1) for k, v in value.items()})
        return copied
    return type(value)(_twin(v, twins, depth - 1) for v in value)


@contextmanager
def views(model: nn.Module, count: int = 1) -> Iterator[list[nn.Module]]:
    """Yield views of a model, without gradients; where it has none, itself in eval mode: do not train it then."""
    if can_be_viewed(model):
        with torch.no_grad():
            yield [view(model) for _ in range(count)]
    else:
        with evaluation(model):
            yield [model] * count


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Set eval mode without gradients for a `with` block, and put every module's flag back afterwards."""
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


@contextmanager
def own_statistics(
    model: nn.Module, run: Callable[[nn.Module], bool] | None, scopes: Sequence[Scope], mode: Mode
) -> Iterator[None]:
    """Use the BatchNorm statistics that a run of the model gives in some mode, and then the model's own again."""
    norms = [] if run is None else norms_in(model)
    kept = _buffers(norms)
    try:
        if norms and run is not None:
            with estimating(model, norms), override(scopes, mode):
                if not run(model):
                    raise ValueError("update_bn has no batches; pass the training data")
        yield
    finally:
        _put_back(norms, kept)


def norms_in(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def warn_where_stale(model: nn.Module, scopes: Sequence[Scope]) -> None:
    """Warn, once, where a posterior's mean is not the weights that the statistics were computed with."""
    stale = [scope for scope in scopes if scope.stale_statistics]
    if stale and norms_in(model):
        for scope in stale:
            scope.stale_statistics = False
        warnings.warn(
            "the model's BatchNorm statistics are those of its last iterate, not of the posterior's mean or samples; "
            "call predict(..., update_bn=train_loader), or bayesify.integrations.vision.update_bn(model, train_loader)",
            stacklevel=3,
        )


@contextmanager
def estimating(model: nn.Module, norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Set eval mode but for the norms, which start to average from nothing; an error puts their statistics back.

    A norm that no batch reaches, such as a resting member's, keeps what it has.
    """
    before, momenta, done = _buffers(norms), [norm.momentum for norm in norms], False
    try:
        with evaluation(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum, norm.training = None, True  # every batch counts the same
            yield
        done = True
    finally:
        undone = [not done or bool(norm.num_batches_tracked == 0) for norm in norms]
        _put_back(list(compress(norms, undone)), list(compress(before, undone)))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _buffers(norms: Sequence[_BatchNorm]) -> list[dict[str, Tensor]]:
    return [{name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)} for norm in norms]


def _put_back(norms: Sequence[_BatchNorm], kept: Sequence[dict[str, Tensor]]) -> None:
    with torch.no_grad():
        for norm, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                getattr(norm, name).copy_(buffer)


CALLS = 8  # with different inputs that a module remembers: those of one forward
PATIENCE = 3 * CALLS  # cache misses in a row after which a module is taken to depend on a draw
BYTES = 1 << 30  # all that is remembered, at most
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

_local = threading.local()


class Leaves:
    """Nested inputs or outputs of a call, with the strides of their tensors: other layouts may round in another way."""

    def __init__(self, values: Any) -> None:
        self.flat, self.nesting = pytree.tree_flatten(values)
        self.tensors = [leaf for leaf in self.flat if isinstance(leaf, Tensor)]
        self.layouts = [
            (v.shape, v.dtype, v.device, v.stride()) if isinstance(v, Tensor) else (type(v), v) for v in self.flat
        ]

    @property
    def plain(self) -> bool:
        """Whether they are tensors and constants."""
        return all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in self.flat)

    def copy(self) -> "Leaves":
        """Return copies of the tensors, and the layouts of these."""
        twin = copy.copy(self)
        twin.flat = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.flat]
        twin.tensors = [leaf for leaf in twin.flat if isinstance(leaf, Tensor)]
        return twin

    def equals(self, other: "Leaves") -> bool:
        """Return whether values, types and layouts are the same."""
        same = self.nesting == other.nesting and self.layouts == other.layouts
        return same and all(map(torch.equal, self.tensors, other.tensors))

    def can_be_copied(self, inputs: "Leaves") -> bool:
        """Return whether copies are as good: they share no memory, and keep the layout."""
        taken, own = ([t.untyped_storage().data_ptr() for t in one.tensors] for one in (inputs, self))
        dense = all(torch.empty_like(t).stride() == t.stride() for t in self.tensors)
        return dense and not set(taken).intersection(own) and len(set(own)) == len(own)


class Call(NamedTuple):
    """One call of a module."""

    inputs: Leaves
    outputs: Leaves
    autocast: list[torch.dtype]


class Memory:
    """What the modules without spread of one model return for a batch."""

    def __init__(self, spread: set[Posterior]) -> None:
        self.spread, self.bytes = spread, 0
        self.known: dict[nn.Module, Remembered] = {}

    def forget(self) -> None:
        """Drop all outputs: the data is about to change."""
        self.bytes = 0
        for module in self.known.values():
            module.calls.clear()


class Remembered:
    """The last calls of a module without spread, for as long as it proves to be a function of its inputs.

    It runs twice at first: the outputs agree, no generator has moved, no buffer, attribute or input has changed, and no
    posterior was read. A call with equal inputs then gets a copy of the outputs.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.calls: deque[Call] = deque(maxlen=CALLS)
        self.misses, self.proved, self.off = 0, False, False

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return what a view's module returns."""
        inputs = Leaves((args, kwargs))
        if self.off or getattr(_local, "inside", False) or torch.is_grad_enabled() or not inputs.plain:
            return forward(*args, **kwargs)
        autocast = [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        for call in list(self.calls):
            if call.autocast == autocast and call.inputs.equals(inputs):
                self.misses = 0
                return pytree.tree_unflatten(call.outputs.copy().flat, call.outputs.nesting)
        run = functools.partial(forward, *args, **kwargs)
        found, outputs, given = self._watched(run, module, inputs)
        if outputs is not None and not self.proved:
            _, again, _ = self._watched(run, module, inputs)
            self.proved = again is not None and outputs.equals(again)
        self.misses += 1
        if outputs is None or not self.proved or self.misses > PATIENCE:
            self.off = True
            self.calls.clear()
            return found
        size = sum(t.nbytes for t in (*given.tensors, *outputs.tensors))
        if self.memory.bytes + size <= BYTES:
            self.memory.bytes += size
            self.calls.append(Call(given, outputs, autocast))
        return found

    def _watched(self, run: Callable[[], Any], module: nn.Module, inputs: Leaves) -> tuple[Any, Leaves | None, Leaves]:
        """Run a forward; return its output, a copy of it if nothing but its inputs can have counted, and of these."""
        readers: list[Any] = list({id(p.reader): p.reader for p in self.memory.spread}.values())
        threads = [reader.now for reader in readers]
        given, before = inputs.copy(), (_state(module), _random_state())
        for now in threads:
            now.watched, now.touched = self.memory.spread, False
        _local.inside = True
        try:
            found = run()
        finally:
            _local.inside = False
            for now in threads:
                now.watched = ()
        outputs = Leaves(found)
        pure = not any(now.touched for now in threads) and before == (_state(module), _random_state())
        pure = pure and given.equals(inputs) and outputs.plain and outputs.can_be_copied(inputs)
        return found, outputs.copy() if pure else None, given


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


def _random_state() -> list[bytes | int]:
    """Return what changes where random numbers are drawn."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    legacy: Any = np.random.get_state()
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return [*states, legacy[1].tobytes(), int(legacy[2]), hash(random.getstate())]


@contextmanager
def reusing(model: nn.Module, views: Sequence[nn.Module]) -> Iterator[Memory | None]:
    """Let views, one per sample, share what modules without spread return; yield their memory, if there is any."""
    modules = list(model.modules())
    spread = {m for m in modules if isinstance(m, Posterior) and m.moves}
    memory = Memory(spread)
    for module in modules if spread and not any(v is model for v in views) else ():
        still = not isinstance(module, Posterior) and not spread.intersection(module.modules())
        if still and next(module.parameters(), None) is not None and not _is_hooked(module):
            memory.known[module] = Remembered(memory)
    for own in views if memory.known else ():
        for module, twin in zip(modules, own.modules(), strict=True):
            if module in memory.known:
                twin.__dict__["forward"] = functools.partial(memory.known[module], twin, twin.forward)
    try:
        yield memory if memory.known else None
    finally:
        memory.forget()


def _is_hooked(module: nn.Module) -> bool:
    """Return whether somebody else's hooks wait for calls inside a module."""
    inside = (m for m in module.modules() if m is not module)
    hooks = (hook for m in inside for held in (m._forward_pre_hooks, m._forward_hooks) for hook in held.values())
    return any(not isinstance(scope_behind(hook), Scope) for hook in hooks)
