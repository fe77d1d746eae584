"""One coherent theta: which value a model's reads see, and for how long.

Every read of a parameter inside one outermost forward sees the same theta. A recomputation inside a backward pass
(activation checkpointing) sees the theta of the forward that it repeats. All state belongs to one model, and what
runs now to one thread or coroutine.

In compiled code the outermost forward decides as ever what is read, but by a seed that is a tensor, and each read is
the posterior's own formula of mean and noise: one graph serves all draws. What only watches is left to eager mode.
"""

import copy
import warnings
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bayesify.core import caches, lost
from bayesify.core.compile import enroll, graph, training_seed_of
from bayesify.core.distributed import check_whole, follow_at_work, mean_of, shards_itself, whole
from bayesify.core.draws import BY_TRAINING_FLAG, MEAN, PRIOR, Draw, Mode, Traced
from bayesify.core.frames import Frame, Now, Thread
from bayesify.core.method import Method
from bayesify.core.modes import block_of, own_block
from bayesify.core.posterior import Posterior
from bayesify.core.recompute import Past, Record, node_count
from bayesify.core.remade import Remaking
from bayesify.core.replicas import agree
from bayesify.core.seeds import shared_seed, training_seed
from bayesify.core.start import Buffers
from bayesify.engine.dispatch import transformed


class Site(NamedTuple):
    """A place in the model that reads a posterior: its module, attribute, and the order of the module's parameters."""

    module: nn.Module
    attribute: str
    order: tuple[str, ...]


class Scope:
    """The reads of one bayesified model: its blocks, its running forwards and its memory of past ones."""

    def __init__(
        self,
        root: nn.Module,
        method: Method,
        posteriors: list[Posterior],
        sites: list[Site],
        caching: list[nn.RNNBase],
    ) -> None:
        self.root: nn.Module | None = root
        self.method = method
        self.posteriors = posteriors
        self.sites = sites
        self.caching = caching
        self.replica_of: weakref.ref[nn.Module] | None = None
        self.sharded = False
        self.step_draw: Draw | None = None
        self.penalized = all(p.flat for p in posteriors)  # or needs no penalty
        self.starts_at_prior = False
        """Whether the means were the prior means when `bayesify` was called."""
        self.frozen: tuple[str, ...] = ()
        """The parameters that have no posterior since they were frozen when `bayesify` was called."""
        self.told: set[str] = set()
        self.scores: dict[str, float] = {}  # of an evaluation, for the model card
        self.tree: lost.Tree | None = None
        self.buffers = Buffers()
        self._forget()

    def _forget(self) -> None:
        self.number = enroll(self, self.posteriors)
        self._thread = Thread()
        self._past = Past()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        """Copy for a copied model: its own posteriors, nothing of the running state."""
        caches.forget_weights(self.caching)  # an RNN that was moved holds samples, which cannot be copied
        copied = object.__new__(Scope)
        memo[id(self)] = copied
        copied.method = self.method
        copied.root = memo.get(id(self.root))  # none where only a part of the model is copied
        copied.posteriors = copy.deepcopy(self.posteriors, memo)
        copied.sites = copy.deepcopy(self.sites, memo)
        copied.caching = copy.deepcopy(self.caching, memo)
        copied.step_draw = copied.replica_of = None
        copied.sharded = self.sharded
        copied.penalized = True  # nobody knows what a copy is for
        copied.told, copied.scores, copied.frozen = set(self.told), dict(self.scores), self.frozen
        copied.starts_at_prior = self.starts_at_prior
        copied.tree = None
        copied.buffers = copy.deepcopy(self.buffers, memo)
        copied._forget()
        return copied

    @property
    def now(self) -> Now:
        """What the running thread does with the model."""
        return self._thread.now

    def trains(self, posterior: Posterior) -> bool:
        """Tell whether the model is in train mode, whatever flag the module around a posterior has.

        A normalization layer in eval mode inside a training model must be sampled, or its spread would learn from the
        prior alone. A copied part without its model follows its own flag.
        """
        return (posterior if self.root is None else self.root).training

    # -- forwards ----------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, caller: FrameType | None) -> None:
        """Begin a module's forward; the outermost one decides what is read."""
        frame = self.now.frame
        if frame is None or not frame.runs() or (frame.caller is None and module is self.root):
            if frame is not None and frame.remaking is not None:
                frame.remaking.end()
            self.now.frame = None
            frame = self.now.frame = self._begin(module, caller)
            if self.sharded and torch.is_grad_enabled():
                frame.remaking = Remaking()
        frame.stack.append(module)

    def leave(self, module: nn.Module) -> None:
        """End a module's forward, by return or by exception."""
        frame = self.now.frame
        if frame is None or not any(m is module for m in frame.stack):
            return
        while frame.stack.pop() is not module:
            pass
        if self.sharded and shards_itself(module):
            inside = set(module.modules())
            frame.thetas = {p: theta for p, theta in frame.thetas.items() if p not in inside}
            if frame.remaking is not None:
                frame.remaking.drop(module)
        if not frame.stack:
            if frame.remaking is not None:
                frame.remaking.end()
            self.now.frame = None
            self._end(module, frame)

    def enter_compiled(self, module: nn.Module) -> None:
        """Begin a module's forward in compiled code; only an outermost one leaves a trace."""
        if self.now.frame is None or module is self.root:
            self.now.frame = self._begin_compiled(module)

    def leave_compiled(self, module: nn.Module) -> None:
        """End a module's forward in compiled code."""
        frame = self.now.frame
        if frame is not None and frame.caller is None and frame.stack[0] is module:
            self.now.frame = None

    def _begin_compiled(self, module: nn.Module) -> Frame:
        """Choose the mode of an outermost forward, as `_begin` does."""
        block = own_block(self)
        mode = self.now.mode or (BY_TRAINING_FLAG if block is None else block.mode)
        if mode is BY_TRAINING_FLAG and self._sampled_under(module):
            whole = module is self.root
            mode = Mode(draw=self.step_draw or Draw(training_seed_of(self.number, whole), fresh=True))
        frame = Frame(mode, None, 0, recomputes=False)
        frame.traced = Traced(graph())
        frame.stack.append(module)
        return frame

    def compiled_seed(self, *, whole: bool) -> int:
        """Return the seed of a training forward in compiled code, when it runs.

        Args:
            whole: Whether the forward is the model's, or that of a part of it.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return self._past.remember_seed(self._seed())
        mode = self._recall(self.root if whole else None, node, BY_TRAINING_FLAG, fresh=True)
        if mode.draw is None:
            raise RuntimeError(
                "a compiled part of the model is recomputed inside a backward pass, of a forward that read the mean; "
                "keep the bayesify.mean block open until backward() is done"
            )
        return int(mode.draw.seed)

    def _begin(self, module: nn.Module, caller: FrameType | None) -> Frame:
        """Choose the mode of an outermost forward."""
        self.look_for_lost_writes()
        if module is self.root:
            lost.look_for_replaced(self)
        agree(self)
        if not self.sharded and self.root is not None:
            self.sharded = follow_at_work(self.root, self.posteriors)
        node = torch._C._current_autograd_node()
        start = node_count()
        sampled = self._sampled_under(module)
        block = block_of(self, module, node)
        mode = BY_TRAINING_FLAG if block is None else block.mode
        if node is not None and not (block is not None and block.in_backward):
            mode = self._recall(module, node, mode, fresh=bool(sampled))
        elif mode is BY_TRAINING_FLAG and sampled:
            mode = Mode(draw=self._training_draw())
        self.buffers.put(self.root, start=mode.start)
        return Frame(mode, caller, start, recomputes=node is not None)

    def _training_draw(self) -> Draw:
        """Return a fresh draw, or that of the present step where an optimizer says which it is."""
        if self.step_draw is not None:
            return self.step_draw
        return Draw(self._past.remember_seed(self._seed()), fresh=True)

    def _seed(self) -> int:
        """Take the seed of a training forward from the global generator."""
        return shared_seed() if self.method.same_draw else training_seed()

    def _end(self, module: nn.Module, frame: Frame) -> None:
        """Remember a finished outermost forward for recomputations."""
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
                prior=frame.mode.prior,
            )
        )

    def _sampled_under(self, module: nn.Module) -> list[Posterior]:
        """Return the posteriors inside a module that train() samples now."""
        return [p for p in self._random_under(module) if p.stochastic and self.trains(p)]

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

    def _recall(self, module: nn.Module | None, node: Any, mode: Mode, *, fresh: bool) -> Mode:
        """Find the mode of the forward that a recomputation inside a backward pass repeats.

        Where the checkpoint lies inside a forward, the node that runs now is one of that forward's. Where a whole
        forward lies inside the checkpoint, checkpointing has put the global generator back, and the seed that it gives
        is one that was given before.
        """
        record = self._past.find(node, module, lambda posterior: posterior.reader is self)
        if record is None and (mode is not BY_TRAINING_FLAG or not fresh):
            return mode
        if record is not None and not record.is_drawn_again(module):
            if record.seed is not None:
                return Mode(draw=Draw(record.seed, pinned=record.pinned))
            return PRIOR if record.prior else MEAN if record.mean else BY_TRAINING_FLAG
        state = torch.get_rng_state()
        seed = self._seed()
        if seed in self._past.seeds:
            return Mode(draw=Draw(seed, fresh=True))
        torch.set_rng_state(state)
        what = "part of it" if module is None else type(module).__name__
        raise RuntimeError(
            f"a {what} is run inside a backward pass, and it cannot be told which forward it repeats. "
            "With activation checkpointing around the whole model keep preserve_rng_state=True; to run the model for "
            "another purpose there, do it under bayesify.mean(model) or bayesify.sample(model, seed=...)"
        )

    # -- reads -------------------------------------------------------------------------------------------------

    def read(self, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read of a posterior sees now."""
        if posterior in self.now.watched:
            self.now.touched = True
        if torch.compiler.is_compiling():
            return self._theta(self.now.frame or self._begin_compiled(posterior), posterior, original)
        if parametrize._cache_enabled:
            raise RuntimeError(
                f"{posterior.name!r} is read inside torch.nn.utils.parametrize.cached(), which would freeze its draw; "
                "leave cached() out: every forward of a bayesified model reads one theta by itself"
            )
        frame = self.now.frame
        if frame is None or not frame.runs():
            # Outside every forward: a forward of its own, one parameter wide.
            theta = self._theta(self._begin(posterior, None), posterior, original)
            if theta is not original and not theta.is_inference() and not transformed():
                self.now.bare = lost.BareRead.of(posterior, theta)
            return theta
        return self._theta(frame, posterior, original)

    def _theta(self, frame: Frame, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read in a forward sees."""
        mode, draw = frame.mode, frame.mode.draw
        if mode.prior:
            return whole(posterior.prior_center).to(original.dtype).expand(posterior.shape).contiguous()
        trains = not mode.mean and (draw is None or not draw.pinned) and self.trains(posterior)
        if draw is None or not posterior.random or not (draw.pinned or (trains and posterior.stochastic)):
            if trains:
                return original
            return posterior.mean_theta(original) if posterior.layout is None else mean_of(posterior, original)
        if posterior.particles:
            if posterior not in frame.thetas or torch.is_grad_enabled():
                frame.thetas[posterior] = posterior.member_theta(original, mode.member)
            return frame.thetas[posterior]
        if torch.compiler.is_compiling():
            return frame.traced.theta(draw, posterior, original)
        theta = frame.thetas.get(posterior)
        if theta is None or not (theta.requires_grad or _no_grad_wanted(posterior, original)):
            check_whole(posterior, original)
            theta = frame.thetas[posterior] = draw.theta(posterior, original)
            if frame.remaking is not None and theta is not original:
                frame.remaking.add(posterior, draw.seed, theta)
        return theta

    @property
    def mode(self) -> Mode:
        """The mode of the forward that is running."""
        return BY_TRAINING_FLAG if self.now.frame is None else self.now.frame.mode

    def look_for_lost_writes(self) -> None:
        """Warn, once, where a weight that was read outside of a forward has been written to since."""
        bare, self.now.bare = self.now.bare, None
        lost.look_for_written(self, bare)

    # -- the penalty's watch -----------------------------------------------------------------------------------

    def warn_in_eval(self) -> None:
        """Warn, once, where a penalty with gradients meets a model that eval() keeps from sampling."""
        sampled = [p for p in self.posteriors if p.stochastic and p.random]
        if sampled and "eval" not in self.told and own_block(self) is None and not any(map(self.trains, sampled)):
            self.told.add("eval")
            warnings.warn(
                "the model is in eval mode, so its loss is that of the posterior mean, and the spread learns from the "
                "prior alone; call model.train() before training",
                stacklevel=3,
            )


def _no_grad_wanted(posterior: Posterior, original: Tensor) -> bool:
    """Tell whether a theta without gradient will do."""
    return not torch.is_grad_enabled() or not (
        original.requires_grad or any(p.requires_grad for p in posterior.learnable())
    )
