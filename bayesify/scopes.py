"""One coherent theta: which value a model's reads see, and for how long.

Every read of a parameter inside one outermost forward sees the same theta. A recomputation inside a backward pass
(activation checkpointing) sees the theta of the forward that it repeats. All state belongs to one model.
"""

import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify import caches
from bayesify import noise as noises
from bayesify.blocks import transformed
from bayesify.draws import BY_TRAINING_FLAG, MEAN, Draw, Mode
from bayesify.methods.base import Method
from bayesify.posteriors import Posterior, Sampled
from bayesify.replay import Past, Record, node_count

PATIENCE = 100  # training steps without a penalty before the warning


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
        self.steps = self.last_state = 0
        self.warned = not any(not p.flat for p in posteriors)
        self.told_of_eval = False
        self._forget()

    def _forget(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._past = Past()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        """Copy for a copied model: its own posteriors, nothing of the running state."""
        caches.forget_weights(self.caching)  # an RNN that was moved holds samples, which cannot be copied
        copied = object.__new__(Scope)
        memo[id(self)] = copied
        copied.method = self.method
        copied.posteriors = copy.deepcopy(self.posteriors, memo)
        copied.sites = copy.deepcopy(self.sites, memo)
        copied.caching = copy.deepcopy(self.caching, memo)
        copied.modes, copied.handles = [], {}
        copied.steps, copied.last_state, copied.warned = self.steps, self.last_state, self.warned
        copied.told_of_eval = self.told_of_eval
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
        start = node_count()
        sampled = self._sampled_under(module)
        mode = self._mode()
        if node is not None:
            mode = self._recall(module, node._sequence_nr(), mode, fresh=bool(sampled))
        elif mode is BY_TRAINING_FLAG and sampled:
            mode = Mode(draw=Draw(self._past.remember_seed(self._fresh_seed()), fresh=True))
        if mode.draw is not None:
            mode.draw.prepare(self._random_under(module) if mode.draw.pinned else sampled)
        return Frame(mode, caller, start, recomputes=node is not None)

    def _end(self, module: nn.Module, frame: Frame) -> None:
        """Remember a finished outermost forward for recomputations, and warn where the penalty is forgotten."""
        caches.forget_weights(self.caching)
        draw = frame.mode.draw
        self._past.remember(
            Record(
                start=frame.start,
                end=node_count(),
                module=weakref.ref(module),
                seed=draw.seed if draw else None,
                pinned=draw is not None and draw.pinned,
                fresh=draw is not None and draw.fresh,
                mean=frame.mode.mean,
            )
        )
        if not self.warned and torch.is_grad_enabled() and module.training and not frame.recomputes:
            self._count_step()

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

    def _recall(self, module: nn.Module, node: int, mode: Mode, *, fresh: bool) -> Mode:
        """Find the mode of the forward that a recomputation inside a backward pass repeats.

        Where the checkpoint lies inside a forward, the node that runs now is one of that forward's. Where a whole
        forward lies inside the checkpoint, checkpointing has put the global generator back, and the seed that it gives
        is one that was given before.
        """
        if mode.in_backward:
            return mode
        record = self._past.find(node, module)
        if record is None and (mode is not BY_TRAINING_FLAG or not fresh):
            return mode
        if record is not None and not record.is_drawn_again(module):
            if record.seed is not None:
                return Mode(draw=Draw(record.seed, pinned=record.pinned))
            return MEAN if record.mean else BY_TRAINING_FLAG
        state = torch.get_rng_state()
        seed = self._fresh_seed()
        if seed in self._past.seeds:
            return Mode(draw=Draw(seed, fresh=True))
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
            return self._point(frame, posterior, original) if trains else posterior.mean_theta(original)
        theta = frame.thetas.get(posterior)
        if theta is None or not (theta.requires_grad or _no_grad_wanted(posterior, original)):
            theta, handle = draw.theta(posterior, original)
            frame.thetas[posterior] = theta
            if handle is not None and posterior.training and not frame.recomputes:
                self.handles[posterior] = handle
        return theta

    def _point(self, frame: Frame, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the parameter itself; by an alias that takes the penalty's gradient along, where that saves a pass."""
        wants_grad = torch.is_grad_enabled() and original.requires_grad
        if not frame.stack or posterior.stochastic or posterior.flat or not wants_grad or transformed():
            return original
        theta = frame.thetas.get(posterior)
        if theta is None:
            theta, handle = Sampled.apply(posterior, 0, None, original, original)
            frame.thetas[posterior] = theta
            if not frame.recomputes:
                self.handles[posterior] = handle
        return theta

    # -- modes -------------------------------------------------------------------------------------------------

    def push(self, mode: Mode) -> None:
        """Override train() and eval() until `pop`."""
        if mode.draw is not None:
            for posterior in self.posteriors:
                posterior.check_ready()
        with self._lock:
            self.modes.append(mode)
        caches.forget_eval(self.caching)

    def pop(self, mode: Mode) -> None:
        """End a mode, whichever came after it."""
        with self._lock:
            self.modes = [m for m in self.modes if m is not mode]
        caches.forget_eval(self.caching)

    def _mode(self) -> Mode:
        """Return the mode in force: the thread's own last one; a thread that has none is somebody's helper."""
        modes, thread = self.modes, threading.get_ident()
        own = next((m for m in reversed(modes) if m.thread == thread), None)
        return own or (modes[-1] if modes else BY_TRAINING_FLAG)

    # -- the penalty's watch -----------------------------------------------------------------------------------

    def take_handle(self, posterior: Posterior) -> Tensor | None:
        """Return the energy handle of the last training forward, once, if the posterior is as it was then."""
        self.warned = True  # no need to: the penalty is known
        handle = self.handles.pop(posterior, None)
        if handle is None or handle.grad_fn is None:
            return None
        node: Any = handle.grad_fn
        own = (posterior.original, *posterior.learnable())
        same = all(a is b for a, b in zip(node.tensors, own, strict=True))
        return handle if same and [t._version for t in node.tensors] == node.versions else None

    def warn_in_eval(self) -> None:
        """Warn, once, where a penalty with gradients meets a model that eval() keeps from sampling."""
        sampled = [p for p in self.posteriors if p.stochastic and p.random]
        if sampled and not (self.told_of_eval or self.modes or any(p.training for p in sampled)):
            self.told_of_eval = True
            warnings.warn(
                "the model is in eval mode, so its loss is that of the posterior mean, and the spread learns from the "
                "prior alone; call model.train() before training",
                stacklevel=3,
            )

    def _count_step(self) -> None:
        """Count the training forwards that find other parameters than the last one did: optimizer steps."""
        state = sum(p.original._version for p in self.posteriors)
        self.steps += state != self.last_state
        self.last_state = state
        if self.steps > PATIENCE:
            self.warned = True
            warnings.warn(
                f"{PATIENCE} training steps without the prior: add bayesify.penalty(model, num_data) to the loss "
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
    in_backward = torch._C._current_autograd_node() is not None
    pushed: list[tuple[Scope, Mode]] = []
    try:
        for i, scope in enumerate(scopes):
            own = Mode(mode.draw and mode.draw.part(i), mode.mean, in_backward, threading.get_ident())
            scope.push(own)
            pushed.append((scope, own))
        yield
    finally:
        for scope, own in pushed:
            scope.pop(own)
