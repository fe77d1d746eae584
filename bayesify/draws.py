"""One coherent theta: which value a model's reads see, and for how long.

Every read of a parameter inside one outermost forward sees the same theta. A recomputation inside a backward pass
(activation checkpointing) sees the theta of the forward that it repeats. All state belongs to one model.
"""

import copy
import sys
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify import caches
from bayesify import noise as noises
from bayesify.methods.base import Method
from bayesify.posteriors import Posterior, Sampled, make_noise

REMEMBERED_FORWARDS = 1 << 14
PATIENCE = 100  # training forwards without a penalty before the warning


class Draw:
    """One theta of the whole model, given by its seed.

    Args:
        seed: From which the noise of every parameter follows.
        pinned: Whether the draw outlives a forward, so that its thetas are worth keeping.
    """

    def __init__(self, seed: int, *, pinned: bool = False) -> None:
        self.seed = seed
        self.pinned = pinned
        self.noise: dict[Posterior, Tensor] = {}
        self.values: dict[Posterior, tuple[list[Any], Tensor]] = {}

    def prepare(self, posteriors: Iterable[Posterior]) -> None:
        """Draw the noise of several posteriors at once, which is faster than one by one."""
        self.noise = make_noise([p for p in posteriors if p not in self.values], self.seed)

    def theta(self, posterior: Posterior, original: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this draw's theta of one posterior, with its energy handle where gradients are wanted."""
        tensors = (original, *posterior.learnable())
        noise = self.noise.pop(posterior, None)
        value = self._kept_value(posterior, tensors) if self.pinned else None
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants_grad:
            theta, handle = Sampled.apply(posterior, self.seed, noise, value, *tensors)
        elif value is None:
            noise = make_noise([posterior], self.seed)[posterior] if noise is None else noise
            with torch.no_grad():
                theta, handle = posterior.theta(original, noise), None
        else:
            theta, handle = value, None
        if self.pinned and value is None:
            self.values[posterior] = (_fingerprint(tensors), theta.detach())
        return theta, handle

    def _kept_value(self, posterior: Posterior, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the theta of an earlier forward, unless the parameters have changed since."""
        fingerprint, value = self.values.get(posterior, (None, None))
        if value is None or fingerprint != _fingerprint(tensors):
            return None
        return None if value.is_inference() and not torch.is_inference_mode_enabled() else value


def _fingerprint(tensors: tuple[Tensor, ...]) -> list[Any]:
    """Return what changes when a tensor is written, moved or replaced."""
    return [(id(t), t._version if not t.is_inference() else 0, t.data_ptr()) for t in tensors]


class Mode(NamedTuple):
    """What a block or a forward reads: a draw, the mean, or (both unset) what train() and eval() say."""

    draw: Draw | None = None
    mean: bool = False


BY_TRAINING_FLAG = Mode()
MEAN = Mode(mean=True)


class Site(NamedTuple):
    """A place in the model that reads a posterior: its module, attribute, and the order of the module's parameters."""

    module: nn.Module
    attribute: str
    order: tuple[str, ...]


class Frame:
    """One outermost forward: the modules entered so far, and the thetas that its reads have seen."""

    def __init__(self, mode: Mode, caller: FrameType | None, start: int, *, recomputes: bool) -> None:
        self.mode = mode
        self.caller = caller
        self.start = start
        self.recomputes = recomputes
        self.stack: list[nn.Module] = []
        self.thetas: dict[Posterior, Tensor] = {}

    def alive(self) -> bool:
        """Tell whether the forward still runs; an interrupt may have ended it without a word."""
        if self.caller is None:
            return True
        try:
            self.caller.clear()  # refused by a frame that is still executing
        except RuntimeError:
            return True
        return False


class Record(NamedTuple):
    """A forward of the past: which module ran, which autograd nodes it made, and what it read."""

    start: int
    end: int
    module: "weakref.ref[nn.Module]"
    seed: int | None
    pinned: bool
    mean: bool

    def covers(self, node: int, module: nn.Module) -> bool:
        """Tell whether a module run on behalf of an autograd node belongs to this forward."""
        outer = self.module()
        return self.start <= node < self.end and outer is not None and any(m is module for m in outer.modules())

    def mode(self) -> "Mode":
        """Return the mode that reads the same theta again."""
        if self.seed is not None:
            return Mode(draw=Draw(self.seed, pinned=self.pinned))
        return MEAN if self.mean else BY_TRAINING_FLAG


class Scope:
    """The reads of one bayesified model: its modes, its running forward and its memory of past ones."""

    def __init__(
        self, method: Method, posteriors: list[Posterior], sites: list[Site], caching: list[nn.Module]
    ) -> None:
        self.method = method
        self.posteriors = posteriors
        self.sites = sites
        self.caching = caching
        self.modes: list[Mode] = []
        self.handles: dict[Posterior, Tensor] = {}
        self.forwards = 0
        self.warned = not any(not p.flat for p in posteriors)
        self._forget()

    def _forget(self) -> None:
        self._local = threading.local()
        self._records: deque[Record] = deque(maxlen=REMEMBERED_FORWARDS)
        self._seeds: OrderedDict[int, None] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        """Copy for a copied model: its own posteriors, nothing of the running state."""
        copied = object.__new__(Scope)
        memo[id(self)] = copied
        copied.method = self.method
        copied.posteriors = copy.deepcopy(self.posteriors, memo)
        copied.sites = copy.deepcopy(self.sites, memo)
        copied.caching = copy.deepcopy(self.caching, memo)
        copied.modes, copied.handles = [], {}
        copied.forwards, copied.warned = self.forwards, self.warned
        copied._forget()
        return copied

    # -- forwards ----------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, caller: FrameType | None) -> None:
        """Begin a module's forward; the outermost one decides what is read."""
        frame: Frame | None = getattr(self._local, "frame", None)
        if frame is None or not frame.alive():
            frame = self._local.frame = self._begin(module, caller)
        frame.stack.append(module)

    def leave(self, module: nn.Module) -> None:
        """End a module's forward, by return or by exception."""
        frame: Frame | None = getattr(self._local, "frame", None)
        if frame is None or not any(m is module for m in frame.stack):
            return
        while frame.stack.pop() is not module:
            pass
        if not frame.stack:
            self._local.frame = None
            self._end(module, frame)

    def _begin(self, module: nn.Module, caller: FrameType | None) -> Frame:
        """Choose the mode of an outermost forward and draw its noise."""
        node = torch._C._current_autograd_node()
        start = torch._C._autograd._get_sequence_nr()
        sampled = self._sampled_under(module)
        mode = self.modes[-1] if self.modes else BY_TRAINING_FLAG
        if node is not None:
            mode = self._recall(module, node._sequence_nr(), mode, fresh=bool(sampled))
        elif mode is BY_TRAINING_FLAG and sampled:
            mode = Mode(draw=Draw(self._remember_seed(self._fresh_seed())))
        if mode.draw is not None:
            mode.draw.prepare(self._random_under(module) if mode.draw.pinned else sampled)
        return Frame(mode, caller, start, recomputes=node is not None)

    def _end(self, module: nn.Module, frame: Frame) -> None:
        """Remember a finished outermost forward for recomputations, and warn where the penalty is forgotten."""
        caches.forget_weights(self.caching)
        if torch.is_grad_enabled():
            end = torch._C._autograd._get_sequence_nr()
            draw = frame.mode.draw
            self._records.append(
                Record(
                    frame.start,
                    end,
                    weakref.ref(module),
                    draw.seed if draw else None,
                    draw is not None and draw.pinned,
                    frame.mode.mean,
                )
            )
            if module.training and not frame.recomputes:
                self._count_forward()

    def _sampled_under(self, module: nn.Module) -> list[Posterior]:
        """Return the posteriors inside a module that train() samples now."""
        return [p for p in self._random_under(module) if p.training and p.stochastic]

    def _random_under(self, module: nn.Module) -> list[Posterior]:
        """Return the posteriors inside a module that have something to sample."""
        if isinstance(module, Posterior):
            inside: Iterable[Posterior] = (module,)
        elif getattr(module, "_bayesify_scope", None) is self:
            inside = self.posteriors
        else:
            inside = (m for m in module.modules() if isinstance(m, Posterior) and m.reader is self)
        return [p for p in inside if p.random]

    # -- seeds and recomputations ------------------------------------------------------------------------------

    def _fresh_seed(self) -> int:
        """Take a seed from torch's global generator; ranks that share its state still draw apart."""
        seed = noises.global_seed()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            seed = noises.mix(seed, torch.distributed.get_rank())
        return seed

    def _remember_seed(self, seed: int) -> int:
        self._seeds[seed] = None
        if len(self._seeds) > REMEMBERED_FORWARDS:
            self._seeds.popitem(last=False)
        return seed

    def _recall(self, module: nn.Module, node: int, mode: Mode, *, fresh: bool) -> Mode:
        """Find the forward that a recomputation inside a backward pass repeats.

        Either the checkpoint lies inside a forward: the autograd node that runs now was made between that forward's
        first and last. Or a whole forward lies inside the checkpoint: then checkpointing has put the global generator
        back, and the seed that it gives is one that was given before.
        """
        found = [r for r in self._records if r.covers(node, module)]
        if len({(r.seed, r.mean) for r in found}) == 1:
            return found[0].mode()
        if mode is not BY_TRAINING_FLAG or not fresh:
            return mode
        state = torch.get_rng_state()
        seed = self._fresh_seed()
        if seed in self._seeds:
            return Mode(draw=Draw(seed))
        torch.set_rng_state(state)
        raise RuntimeError(
            f"a {type(module).__name__} is run inside a backward pass, and it cannot be told which forward it repeats. "
            "With activation checkpointing around the whole model keep preserve_rng_state=True; to run the model for "
            "another purpose there, do it under bayesify.mean(model) or bayesify.sample(model, seed=...)"
        )

    # -- reads -------------------------------------------------------------------------------------------------

    def read(self, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read of a posterior sees now."""
        frame: Frame | None = getattr(self._local, "frame", None)
        if frame is None or not frame.alive():
            # Outside every forward: a forward of its own, one parameter wide.
            frame = self._begin(posterior, None)
        mode, draw = frame.mode, frame.mode.draw
        trains = posterior.training and not mode.mean and (draw is None or not draw.pinned)
        if draw is None or not posterior.random or not (draw.pinned or (trains and posterior.stochastic)):
            return original if trains else posterior.mean_theta(original)
        theta = frame.thetas.get(posterior)
        if theta is None or not (theta.requires_grad or _no_grad_wanted(posterior, original)):
            theta, handle = draw.theta(posterior, original)
            frame.thetas[posterior] = theta
            if handle is not None and posterior.training and not frame.recomputes:
                self.handles[posterior] = handle
        return theta

    # -- modes -------------------------------------------------------------------------------------------------

    def push(self, mode: Mode) -> None:
        """Override train() and eval() until `pop`."""
        if mode.draw is not None:
            for posterior in self.posteriors:
                posterior.check_ready()
        self.modes.append(mode)
        caches.forget_eval(self.caching)

    def pop(self, mode: Mode) -> None:
        """End a mode, whichever came after it."""
        self.modes = [m for m in self.modes if m is not mode]
        caches.forget_eval(self.caching)

    # -- the penalty's watch -----------------------------------------------------------------------------------

    def take_handle(self, posterior: Posterior) -> Tensor | None:
        """Return the energy handle of the last training forward, once, if the posterior is as it was then."""
        self.forwards, self.warned = 0, True
        handle = self.handles.pop(posterior, None)
        if handle is None or handle.grad_fn is None:
            return None
        node: Any = handle.grad_fn
        return handle if [t._version for t in node.tensors] == node.versions else None

    def _count_forward(self) -> None:
        self.forwards += 1
        if self.forwards >= PATIENCE and not self.warned:
            self.warned = True
            warnings.warn(
                f"{PATIENCE} training forwards without the prior: add bayesify.penalty(model, num_data) to the loss "
                "(with Hugging Face's Trainer use bayesify.integrations.huggingface.BayesTrainer, which does)",
                stacklevel=4,
            )


def _no_grad_wanted(posterior: Posterior, original: Tensor) -> bool:
    """Tell whether a theta without gradient will do."""
    return not torch.is_grad_enabled() or not (
        original.requires_grad or any(p.requires_grad for p in posterior.learnable())
    )


class Enter:
    """Forward pre-hook: a module's forward begins."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Enter the scope, with the stack frame that lives as long as the forward."""
        self.scope.enter(module, sys._getframe(1))


class Leave:
    """Forward hook, called on exceptions too: a module's forward ends."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave the scope."""
        self.scope.leave(module)


@contextmanager
def override(scopes: Iterable[Scope], mode: Mode) -> Iterator[None]:
    """Push a mode on several scopes, and pop it whatever happens."""
    pushed: list[Scope] = []
    try:
        for scope in scopes:
            scope.push(mode)
            pushed.append(scope)
        yield
    finally:
        for scope in pushed:
            scope.pop(mode)
