"""Which theta a forward is asked for: draws, the blocks `mean`, `sample` and `prior`, and buffers as they were.

A block holds for the code inside of it: threads and coroutines have blocks of their own, and a task inherits those of
the code that starts it. Leaving a block ends it for all threads.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bayesify.core.compile import draw, graph, in_one_operation, part_seed, sample_seed
from bayesify.core.method import Method
from bayesify.core.posterior import Posterior, Sampled
from bayesify.core.ranks import check_shared, draw_seeds
from bayesify.core.stored import Stored
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import transformed

MEMBER = noises.name_key("mixture/member")


class Draw:
    """One theta of the whole model, given by its seed.

    Args:
        seed: From which the noise of every parameter follows. In compiled code it is a tensor, so that one graph serves
            every draw; of a draw that was made outside, `traced` is that tensor.
        pinned: Whether the draw outlives a forward: the theta of a `sample` block.
        fresh: Whether the forward that reads it took its seed from the global generator.
        keep: Whether thetas without gradient are kept from one forward to the next. Only for a draw whose reader knows
            that no weight changes before `forget`: a write to a parameter cannot be noticed in every case.
    """

    def __init__(self, seed: Any, *, pinned: bool = False, fresh: bool = False, keep: bool = False) -> None:
        self.seed = seed
        self.traced = seed if isinstance(seed, Tensor) else torch.tensor(noises.signed(seed))
        self.pinned = pinned
        self.fresh = fresh
        self.keep = keep
        self.agreed = False
        self.kept: dict[Posterior, Tensor] = {}
        self.parts: dict[int, Draw] = {}

    def part(self, i: int) -> "Draw":
        """Return the draw for the i-th of several models: parameters of one name need noise of their own."""
        if not i:
            return self
        seed = part_seed(self.seed, i) if isinstance(self.seed, Tensor) else noises.mix(self.seed, i)
        return self.parts.setdefault(i, Draw(seed, pinned=self.pinned, keep=self.keep))

    def forget(self) -> None:
        """Drop the thetas that were kept."""
        self.kept.clear()
        self.parts.clear()

    def all_thetas(self, posteriors: Sequence[Posterior]) -> dict[Posterior, Tensor]:
        """Return the thetas that are drawn as soon as an outermost forward begins, of all posteriors in its module.

        This is the place for one grouped launch on an accelerator. On a CPU a read draws its own tensor, which is then
        in the cache; so do shards, which are gathered when their module runs, and what torch.func transforms.

        Args:
            posteriors: Those that the forward draws.
        """
        here = [p for p in posteriors if p.layout is None and p.original.device.type not in ("cpu", "meta")]
        return {} if transformed() else {p: self.theta(p, p.original) for p in here}

    def theta(self, posterior: Posterior, original: Tensor) -> Tensor:
        """Return this draw's theta of one posterior."""
        tensors = (original, *posterior.learnable())
        if transformed():
            compiling = torch.compiler.is_compiling()
            if compiling and in_one_operation(posterior, original):
                drawn: Tensor = draw(posterior._number, self.traced, list(tensors))
                return drawn
            seed: Any = self.traced if compiling else self.seed
            return posterior.calibrated(original, posterior.theta(original, posterior.noise_of(seed)))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            theta: Tensor = Sampled.apply(posterior, self.seed, *tensors)
            return theta
        kept = self.kept.get(posterior)
        if kept is None:
            with torch.no_grad():
                kept = posterior.drawn(original, self.seed)
            if self.keep and posterior.layout is None:  # a sharded model is one that does not fit into the memory
                self.kept[posterior] = kept
        return kept


class Traced:
    """What a forward in compiled code has drawn, known in the graph that it began in.

    Args:
        graph: The name of that graph.
    """

    def __init__(self, graph: str) -> None:
        self.graph = graph
        self.thetas: dict[tuple[str, bool], Tensor] = {}

    def is_here(self) -> bool:
        """Tell whether it is the graph that is made now."""
        return self.graph == graph()

    def theta(self, draw: Draw, posterior: Posterior, original: Tensor) -> Tensor:
        """Return the theta that a read sees: the same as an earlier one, where that is known."""
        if not self.is_here():
            return draw.theta(posterior, original)
        key = posterior.name, torch.is_grad_enabled()
        if key not in self.thetas:
            self.thetas[key] = draw.theta(posterior, original)
        return self.thetas[key]


NOWHERE = Traced("")


class Mode(NamedTuple):
    """What a block or a forward reads: a draw, the mean, the prior mean, or (none set) what train() and eval() say.

    `member` is the number of the component that a mixture runs, modulo how many it has; `start` is whether the model's
    buffers are those of the start.
    """

    draw: Draw | None = None
    mean: bool = False
    member: int = 0
    prior: bool = False
    start: bool = False


BY_TRAINING_FLAG = Mode()
MEAN = Mode(mean=True)
PRIOR = Mode(prior=True, start=True)


def one_draw(seed: int) -> Mode:
    """Return the mode of a single draw, which takes a mixture's member by chance too."""
    return Mode(draw=Draw(seed, pinned=True), member=noises.mix(seed, MEMBER))


# -- buffers -----------------------------------------------------------------------------------------------------------

START_SUFFIX = "_at_start"
_BUFFERS_LOCK = threading.Lock()


def lasting_buffers(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (plain name, module, attribute) of every buffer that a state dict holds, the posteriors' own left out."""
    for path, module in root.named_modules():
        if not isinstance(module, Stored):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, module, name


def check_buffers(root: nn.Module, known: Mapping[str, Tensor]) -> None:
    """Raise a ValueError where a buffer that comes with a prior mean has another shape than the model's."""
    for path, module, name in lasting_buffers(root):
        shape = module._buffers[name].shape  # type: ignore[union-attr]
        if path in known and known[path].shape != shape:
            raise ValueError(
                f"prior_mean has {path!r} in shape {tuple(known[path].shape)}, the model in {tuple(shape)}; give a "
                "model of the same architecture"
            )


def keep_buffers(root: nn.Module, known: Mapping[str, Tensor] | None = None) -> None:
    """Keep the buffers as they are now, or as they were by what is known under their plain names."""
    for path, module, name in list(lasting_buffers(root)):
        now: Any = module._buffers[name]
        setattr(module, name + START_SUFFIX, (known or {}).get(path, now).detach().to(now, copy=True))


def kept_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Return the buffers as they were, under their plain names."""
    return {
        path: getattr(m, name + START_SUFFIX)
        for path, m, name in lasting_buffers(root)
        if hasattr(m, name + START_SUFFIX)
    }


def drop_buffers(root: nn.Module) -> None:
    """Forget the buffers as they were."""
    for _, module, name in lasting_buffers(root):
        module.__dict__.pop(name + START_SUFFIX, None)


def put_buffers_of_start(view: nn.Module) -> None:
    """Give a view of a model, whose buffers are its own, the buffers of the start."""
    for _, module, name in list(lasting_buffers(view)):
        if hasattr(module, name + START_SUFFIX):
            module._buffers[name] = getattr(module, name + START_SUFFIX).to(module._buffers[name], copy=True)


@contextmanager
def buffers_of_start(model: nn.Module) -> Iterator[None]:
    """Use the buffers of the start inside a `with` block, in the model itself."""
    now = [(module, dict(module._buffers)) for module in model.modules()]
    put_buffers_of_start(model)
    try:
        yield
    finally:
        for module, buffers in now:
            module._buffers.update(buffers)


class Buffers:
    """The buffers of a bayesified model: those of now, or for a while those of the start.

    Attributes:
        now: Where those of now belong while those of the start are in their place: module, attribute and tensor.
    """

    def __init__(self) -> None:
        self.now: list[tuple[nn.Module, str, Tensor]] = []

    def put(self, root: nn.Module | None, *, start: bool) -> None:
        """Put those of the start in place, in copies that a forward may write to; or those of now."""
        if root is None or start == bool(self.now):
            return
        with _BUFFERS_LOCK:
            if start and not self.now:
                places = [(m, name) for _, m, name in lasting_buffers(root) if hasattr(m, name + START_SUFFIX)]
                self.now = [(m, name, m.get_buffer(name)) for m, name in places]
                for module, name, tensor in self.now:
                    module._buffers[name] = getattr(module, name + START_SUFFIX).to(tensor, copy=True)
            elif not start:
                for module, name, tensor in self.now:
                    module._buffers[name] = tensor
                self.now = []


def drop_from_state_dict(state_dict: dict[str, Any]) -> None:
    """Take the buffers of the start out of a state dict that is to be a plain model's."""
    for key in [k for k in state_dict if k.endswith(START_SUFFIX) and k.removesuffix(START_SUFFIX) in state_dict]:
        del state_dict[key]


def save_start(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the buffers of the start to a state dict; a hook on the bayesified model."""
    state_dict.update({prefix + name + START_SUFFIX: tensor for name, tensor in kept_buffers(root).items()})


def restore_buffers(root: nn.Module, *_: Any) -> None:
    """Put the buffers of now in place before a state dict is made; a hook on the bayesified model."""
    scope: Any = root._bayesify_scope
    scope.buffers.put(root, start=False)


def load_start(root: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the buffers of the start out of a state dict that is loaded; a hook on the bayesified model."""
    restore_buffers(root)
    for path, module, name in lasting_buffers(root):
        found = state_dict.pop(prefix + path + START_SUFFIX, None)
        if found is not None:
            with torch.no_grad():
                setattr(module, name + START_SUFFIX, found.detach().to(module._buffers[name].device, copy=True))  # type: ignore[union-attr]


# -- blocks ------------------------------------------------------------------------------------------------------------


class Reads(Protocol):
    """A model's scope (`bayesify.core.reading.Scope`), as far as its blocks are concerned."""

    root: nn.Module | None
    method: Method
    posteriors: list[Posterior]
    sharded: bool
    buffers: Buffers

    @property
    def now(self) -> Any:
        """What the running thread does with the model."""


class Block:
    """A block of one model.

    A block that was entered inside a backward pass is meant for what runs there, recomputation or not.
    """

    def __init__(self, scope: Reads, mode: Mode) -> None:
        self.scope = scope
        self.mode = mode
        self.in_backward = torch._C._current_autograd_node() is not None
        self.open = True


_INSIDE: ContextVar[tuple[Block, ...]] = ContextVar("bayesify_blocks", default=())


@contextmanager
def override(scopes: Iterable[Reads], mode: Mode) -> Iterator[None]:
    """Override train() and eval() of several models until the block is left."""
    blocks = [Block(scope, mode._replace(draw=mode.draw and mode.draw.part(i))) for i, scope in enumerate(scopes)]
    if mode.draw is not None:
        for block in blocks:
            block.scope.method.check_ready(block.scope.posteriors)
        if not mode.draw.agreed and any(block.scope.sharded for block in blocks):
            check_shared(mode.draw.seed)
            mode.draw.agreed = True
    _INSIDE.set((*_INSIDE.get(), *blocks))
    running = [(block.scope.now, block.scope.now.frame) for block in blocks]
    for block, (now, _) in zip(blocks, running, strict=True):
        block.scope.buffers.put(block.scope.root, start=mode.start)
        now.frame = None  # a forward that runs around the block goes on after it
    try:
        yield
    finally:
        for block, (now, frame) in zip(blocks, running, strict=True):
            block.open = False
            now.frame = frame
        # By what is open, and not by a token: a generator may be closed in another context than it was started in.
        _INSIDE.set(tuple(b for b in _INSIDE.get() if b.open))
        for block in blocks:
            outer = block_of(block.scope)
            block.scope.buffers.put(block.scope.root, start=outer is not None and outer.mode.start)


class TracedBlock:
    """A block inside compiled code: it holds in the graph that it begins and ends in, and for nobody else.

    Where the code is cut into several graphs, or none is made after all, it is a block as any other.

    Args:
        scopes: The models.
        mean: Whether it is a `mean` block.
        seed: As in `sample`, else.
    """

    def __init__(self, scopes: Any, *, mean: bool = False, seed: int | None = None) -> None:
        self.scopes, self.mean, self.seed = scopes, mean, seed
        self.graph = graph()
        self.outer: list[Mode | None] = []
        self.plain: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        """Put the mode where forwards of the same graph look first."""
        if not torch.compiler.is_compiling() or self.graph != graph() or any(scope.sharded for scope in self.scopes):
            self.plain = override(self.scopes, MEAN if self.mean else one_draw(draw_seeds(1, self.seed)[0]))
            self.plain.__enter__()
            return
        draw = None if self.mean else Draw(sample_seed(self.seed), pinned=True)
        self.outer = [scope.now.mode for scope in self.scopes]
        for i, scope in enumerate(self.scopes):
            if draw is not None:
                for posterior in scope.posteriors:
                    posterior.check_ready()
            scope.now.mode = MEAN if draw is None else Mode(draw=draw.part(i))

    def __exit__(self, *error: Any) -> None:
        """Put back what was there."""
        if self.plain is not None:
            self.plain.__exit__(*error)
            self.plain = None
            return
        for scope, outer in zip(self.scopes, self.outer, strict=True):
            scope.now.mode = outer


def block_of(scope: Reads) -> Block | None:
    """Return the innermost block of a model that the running code is inside of."""
    return next((b for b in reversed(_INSIDE.get()) if b.scope is scope and b.open), None)
