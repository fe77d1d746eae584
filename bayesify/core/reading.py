"""Which theta a read sees: one per outermost forward, wherever and however often the model reads it.

Hooks on every module tell the model's `Scope` where a forward begins and ends. The outermost one opens a `Frame`, which
holds a draw; reads look their theta up in it. A forward of the root always opens a frame of its own. A module that is
called alone is its own outermost forward, and so is a read outside of every forward. Inside a backward pass a forward
is a recomputation, and reads what the forward that it repeats has read.
"""

import copy
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bayesify.core.compiled import graph, numbered, training_seed_of
from bayesify.core.distributed import Remaking, check_whole, follow_at_work, mean_of, shards_itself, whole
from bayesify.core.method import Method
from bayesify.core.modes import BY_TRAINING_FLAG, REMEMBERED_FORWARDS, Buffers, Mode, Past, Record, block_of, node_count
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import agree, shared_seed, training_seed
from bayesify.core.sampling import Draw, Samples
from bayesify.engine.dispatch import groups, transformed

OURS = (parametrize.ParametrizationList, Posterior)  # no modules of the model's own
FORWARD = 8  # calls between a line that calls a model and a warning in its forward: hooks, and torch's own


class Site(NamedTuple):
    """A place in the model that reads a posterior: its module, attribute, and the order of the module's parameters."""

    module: nn.Module
    attribute: str
    order: tuple[str, ...]


class Frame:
    """One outermost forward."""

    def __init__(self, mode: Mode, start: int = 0, graph: str = "") -> None:
        self.mode = mode
        self.start = start  # the number of its first autograd node
        self.graph = graph  # the one that it began in, in compiled code
        self.stack: list[nn.Module] = []  # the modules that run
        self.thetas: dict[Any, Tensor] = {}  # what was read, by posterior; in a graph by name and need of a gradient
        self.nodes: list[tuple[Samples, Tensor]] = []  # autograd's, of what was drawn, with their handles
        self.remaking: Remaking | None = None

    def close(self) -> None:
        """Let graphs keep their tensors again."""
        if self.remaking is not None:
            self.remaking.end()
            self.remaking = None


class Now:
    """What one thread does with a model."""

    def __init__(self) -> None:
        self.frame: Frame | None = None  # the forward that runs
        self.nodes: list[tuple[Samples, Tensor]] = []  # of the last forward outside of backward passes
        self.past: deque[Record] = deque(maxlen=REMEMBERED_FORWARDS)
        self.mode: Mode | None = None  # of a block inside compiled code
        self.watched: Collection[Posterior] = ()  # by a prediction that asks what a module depends on
        self.touched = False


class Thread(threading.local):
    """The thread's own `Now`: compiled code can write to a plain object only."""

    def __init__(self) -> None:
        self.now = Now()


class Scope:
    """The reads of one bayesified model: its running forwards, by thread, and its memory of past ones."""

    def __init__(self, root: nn.Module, method: Method, posteriors: list[Posterior], sites: list[Site]) -> None:
        self.root: nn.Module | None = root  # None where only a part of the model was copied
        self.method = method
        self.posteriors = posteriors
        self.sites = sites
        self.recurrent = [m for m in root.modules() if isinstance(m, nn.RNNBase)]
        self.buffers = Buffers()
        self.sharded = False
        self.replica_of: weakref.ref[nn.Module] | None = None
        self.step_draw: Draw | None = None  # of an optimizer whose steps have one draw each
        self.penalized = all(p.flat for p in posteriors)  # whether a penalty was computed, or need not be
        self.starts_at_prior = False  # whether the means were the prior means when `bayesify` was called
        self.frozen: tuple[str, ...] = ()  # the parameters without a posterior since they were frozen then
        self.warned: set[str] = set()  # the kinds of warnings that were given
        self.stale_statistics = False  # whether the mean has moved since BatchNorm's statistics were computed
        self.scores: dict[str, float] = {}  # of an evaluation, for the model card
        self._reset()

    def _reset(self) -> None:
        for posterior in self.posteriors:
            posterior._number = numbered(posterior)
        self.number = numbered(self)
        self.links: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._thread = Thread()
        self._past = Past()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scope":
        """Copy for a copied model: its own posteriors, nothing of the running state."""
        forget_weights(self.recurrent)  # an RNN that was moved holds samples, which cannot be copied
        copied = object.__new__(Scope)
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        copied.root = memo.get(id(self.root))
        for name in ("posteriors", "sites", "recurrent", "buffers"):
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        copied.step_draw = copied.replica_of = None
        copied.penalized = True  # nobody knows what a copy is for
        copied.warned, copied.scores = set(self.warned), dict(self.scores)
        copied._reset()
        return copied

    def __reduce__(self) -> Any:
        refuse_to_pickle(self)

    @property
    def now(self) -> Now:
        """What the running thread does with the model."""
        return self._thread.now

    @property
    def mode(self) -> Mode:
        """The mode of the forward that is running."""
        return BY_TRAINING_FLAG if self.now.frame is None else self.now.frame.mode

    def trains(self, posterior: Posterior) -> bool:
        """Return whether the model is in train mode, whatever flag the module around a posterior has.

        A normalization layer in eval mode inside a training model must be sampled, or its spread would learn from the
        prior alone. A copied part without its model follows its own flag.
        """
        return (posterior if self.root is None else self.root).training

    # -- forwards ------------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        """Begin a module's forward, as a hook of it; the outermost one decides what is read.

        What an interrupt (no `Exception`) has left open is closed by the next forward of the same module.
        """
        frame = self.now.frame
        if torch.compiler.is_compiling():
            if frame is None or module is self.root:
                self.now.frame = self._begin_compiled(module)
            return
        if frame is None or module is self.root or module is frame.stack[0]:
            if frame is not None:
                frame.close()
            self.now.frame = None  # also where an error follows
            frame = self.now.frame = self._begin(module)
            if self.sharded and torch.is_grad_enabled():
                frame.remaking = Remaking()
        frame.stack.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a module's forward, by return or by exception, as a hook of it."""
        frame = self.now.frame
        if torch.compiler.is_compiling():
            if frame is not None and frame.graph and frame.stack[0] is module:
                self.now.frame = None
            return
        if frame is None or not any(m is module for m in frame.stack):
            return
        while frame.stack.pop() is not module:
            pass
        if self.sharded and shards_itself(module):
            inside = set(module.modules())
            frame.thetas = {p: theta for p, theta in frame.thetas.items() if p not in inside}
            if frame.remaking is not None:
                frame.remaking.drop(inside)
        if not frame.stack:
            frame.close()
            self.now.frame = None
            self.now.nodes = frame.nodes if torch._C._current_autograd_node() is None else self.now.nodes
            forget_weights(self.recurrent)
            self._past.remember(self.now.past, Record.of(frame.mode, frame.start, module))

    def _begin(self, module: nn.Module) -> Frame:
        """Choose the mode of an outermost forward."""
        if module is self.root:
            self._look_for_replaced()
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "a replica of nn.DataParallel runs in a thread that knows nothing of mean, sample and predict around "
                "it; use DistributedDataParallel, or one device"
            )
        agree(self)
        if not self.sharded and self.root is not None:
            self.sharded = follow_at_work(self.root, self.posteriors)
        node, start = torch._C._current_autograd_node(), node_count()
        inside = self._random_under(module)
        sampled = any(p.stochastic and self.trains(p) for p in inside)
        block = block_of(self)
        mode = BY_TRAINING_FLAG if block is None else block.mode
        if node is not None and not (block is not None and block.in_backward):
            mode = self._recall(module, node, mode, fresh=sampled)
        elif mode is BY_TRAINING_FLAG and sampled:
            mode = Mode(draw=self.step_draw or Draw(self._fresh_seed(), fresh=True))
        self.buffers.put(self.root, start=mode.start)
        frame = Frame(mode, start)
        if mode.draw is not None and not isinstance(module, Posterior) and not transformed():
            # An accelerator draws all at once. On a CPU a read draws its own tensor, which is then in the cache.
            here: dict[torch.device, list[Posterior]] = {}
            for p in inside:
                if groups(p.original.device) and p.layout is None and self._draws(mode, p) and not p.particles:
                    here.setdefault(p.original.device, []).append(p)
            for some in here.values():
                thetas = mode.draw.thetas(some, [p.original for p in some], frame.nodes)
                frame.thetas.update(zip(some, thetas, strict=True))
        return frame

    def _begin_compiled(self, module: nn.Module) -> Frame:
        """Choose the mode of an outermost forward in compiled code, as `_begin` does."""
        block = block_of(self)
        mode = self.now.mode or (BY_TRAINING_FLAG if block is None else block.mode)
        if mode is BY_TRAINING_FLAG and any(p.stochastic and self.trains(p) for p in self._random_under(module)):
            seed = training_seed_of(self.number, module is self.root)
            mode = Mode(draw=self.step_draw or Draw(seed, fresh=True))
        frame = Frame(mode, graph=graph())
        frame.stack.append(module)
        return frame

    def compiled_seed(self, whole: bool) -> int:
        """Return the seed of a training forward in compiled code, of the whole model or of a part, when it runs."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._fresh_seed()
        mode = self._recall(self.root if whole else None, node, BY_TRAINING_FLAG, fresh=True)
        if mode.draw is None:
            raise RuntimeError(
                "a compiled part of the model is recomputed inside a backward pass, of a forward that read the mean; "
                "keep the bayesify.mean block open until backward() is done"
            )
        return int(mode.draw.seed)

    def _seed(self) -> int:
        """Take the seed of a training forward from the global generator."""
        return shared_seed() if self.method.same_draw else training_seed()

    def _fresh_seed(self) -> int:
        """Take the seed of a training forward, and remember it for recomputations."""
        seed = self._seed()
        self._past.seeds.appendleft(seed)
        return seed

    def _random_under(self, module: nn.Module) -> list[Posterior]:
        """Return the posteriors inside a module that have something to sample."""
        inside: Iterable[nn.Module] = module.modules()
        if isinstance(module, Posterior):
            inside = (module,)
        elif getattr(module, "_bayesify_scope", None) is self:
            inside = self.posteriors
        return [p for p in inside if isinstance(p, Posterior) and p.reader is self and p.random]

    def _recall(self, module: nn.Module | None, node: Any, mode: Mode, *, fresh: bool) -> Mode:
        """Return the mode of the forward that a recomputation inside a backward pass repeats.

        Where the checkpoint lies inside a forward, the node that runs now is one of that forward's. Where a whole
        forward lies inside the checkpoint, checkpointing has put the global generator back, and the seed that it gives
        is one that was given before.
        """
        record = self._past.find(node, module)
        if record is None and (mode is not BY_TRAINING_FLAG or not fresh):
            return mode
        if record is not None and not record.is_drawn_again(module):
            return record.again()
        state = torch.get_rng_state()
        seed = self._seed()
        if seed in self._past.seeds:
            return Mode(draw=Draw(seed, fresh=True))
        torch.set_rng_state(state)
        what = "part of it" if module is None else type(module).__name__
        raise RuntimeError(
            f"a {what} is run inside a backward pass, and this recomputation cannot be matched to a forward pass. "
            "With activation checkpointing around the whole model keep preserve_rng_state=True; to run the model for "
            "another purpose there, do it under bayesify.mean(model) or bayesify.sample(model, seed=...)"
        )

    # -- reads ---------------------------------------------------------------------------------------------------------

    def read(self, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read of a posterior sees now."""
        now = self.now
        if torch.compiler.is_compiling():
            return self._theta(now.frame or self._begin_compiled(posterior), posterior, original)
        if parametrize._cache_enabled:
            raise RuntimeError(
                f"{posterior.name!r} is read inside torch.nn.utils.parametrize.cached(), which would freeze its draw; "
                "leave cached() out: every forward of a bayesified model reads one theta by itself"
            )
        if posterior in now.watched:
            now.touched = True
        return self._theta(now.frame or self._begin(posterior), posterior, original)

    def _draws(self, mode: Mode, posterior: Posterior) -> bool:
        """Return whether a posterior is drawn in a mode, where it has something to sample."""
        return mode.draw is not None and (mode.draw.pinned or (posterior.stochastic and self.trains(posterior)))

    def _theta(self, frame: Frame, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read in a forward sees."""
        mode, draw = frame.mode, frame.mode.draw
        if mode.prior:
            return whole(posterior.prior_center).to(original.dtype).expand(posterior.shape).contiguous()
        if draw is None or not posterior.random or not self._draws(mode, posterior):
            if not mode.mean and (draw is None or not draw.pinned) and self.trains(posterior):
                return original
            return posterior.mean_theta(original) if posterior.layout is None else mean_of(posterior, original)
        if posterior.particles:
            if posterior not in frame.thetas or torch.is_grad_enabled():
                frame.thetas[posterior] = posterior.member_theta(original, mode.member)
            return frame.thetas[posterior]
        if torch.compiler.is_compiling():
            if frame.graph != graph():  # a compiler knows nothing of what another graph has made
                return draw.theta(posterior, original)
            key = posterior.name, torch.is_grad_enabled()
            if key not in frame.thetas:
                frame.thetas[key] = draw.theta(posterior, original)
            return frame.thetas[key]
        theta = frame.thetas.get(posterior)
        if theta is None or not (theta.requires_grad or _no_grad_wanted(posterior, original)):
            if posterior.layout is not None:
                check_whole(posterior, original)
            theta = frame.thetas[posterior] = draw.theta(posterior, original, frame.nodes)
            if frame.remaking is not None and theta is not original:
                frame.remaking.add(posterior, draw.seed, theta)
        return theta

    # -- mistakes ------------------------------------------------------------------------------------------------------

    def _look_for_replaced(self) -> None:
        """Warn, once, where a forward finds that a module with posteriors was replaced; a lookup for each child."""
        if any(children.get(name) is not child for children, name, child in self.links):
            self.links = []
        if not self.links and self.root is not None and "replaced" not in self.warned:
            self.warn_of_replaced(self.root.modules(), FORWARD)
            self.links = [
                (module._modules, name, child)
                for module in self.root.modules()
                if not isinstance(module, OURS)
                for name, child in module._modules.items()
                if child is not None and not isinstance(child, OURS)
            ]

    def warn_of_replaced(self, modules: Iterable[nn.Module], level: int = 4) -> None:
        """Warn, once and `level` calls above, where a module with posteriors is not among those of the model."""
        if "replaced" not in self.warned and (why := self.replaced(modules)):
            self.warned.add("replaced")
            warnings.warn(why, stacklevel=level)

    def replaced(self, modules: Iterable[nn.Module]) -> str | None:
        """Return what is wrong where a module was replaced after `bayesify`; `modules` are those of the model now."""
        present = set(map(id, modules))
        gone = [s for s in self.sites if id(s.module) not in present]
        if not gone or id(self.root) not in present:  # without the root it is a part of the model
            return None
        kept: Any = gone[0].module.parametrizations
        return (
            f"{kept[gone[0].attribute][0].name!r} was made Bayesian, and its module is no longer in the model; "
            "what has taken its place is not Bayesian. Replace modules first: unbayesify(model), replace, bayesify"
        )


def _no_grad_wanted(posterior: Posterior, original: Tensor) -> bool:
    """Return whether a theta without gradient will do."""
    return not torch.is_grad_enabled() or not (
        original.requires_grad or any(p.requires_grad for p in posterior.learnable())
    )


def forget_weights(modules: list[nn.RNNBase]) -> None:
    """Let RNNs drop the list of weights that their last forward read; they read them anew in the next one."""
    for module in modules:
        kept = getattr(module, "parametrizations", {})
        module._flat_weights = [
            kept[name].original if name in kept else getattr(module, name, None) for name in module._flat_weights_names
        ]


def scope_behind(hook: Any) -> Any:
    """Return the scope that a hook on a module belongs to, if any."""
    return getattr(hook, "scope", getattr(hook, "__self__", None))


def refuse_to_pickle(part: Any) -> Any:
    """Say how a bayesified model is kept, in the place of torch's own refusal."""
    raise RuntimeError(
        "a bayesified model cannot be pickled, nor copied without its parameters: this is only supported through "
        "state_dict(), bayesify.save and load, and copy.deepcopy"
    )
