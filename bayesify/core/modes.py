"""Which theta a forward reads: modes, the `with` blocks that set them, and a record of past forwards.

A block holds for the code inside of it: threads and coroutines have blocks of their own, and a task inherits those of
the code that starts it. Leaving a block ends it for all threads.
"""

import copy
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.compiled import graph, sample_seed
from bayesify.core.ranks import check_shared, draw_seeds
from bayesify.core.sampling import Draw
from bayesify.core.stored import Stored
from bayesify.engine import noise as noises

Scope = Any  # bayesify.core.reading.Scope, which imports this file
MEMBER = noises.name_key("mixture/member")
REMEMBERED_FORWARDS = 1 << 14
REMEMBERED_THREADS = 64


class Mode(NamedTuple):
    """What a block or a forward reads: a draw, the mean, the prior mean, or (none set) what train() and eval() say."""

    draw: Draw | None = None
    mean: bool = False
    member: int = 0  # which component of a mixture runs, modulo how many it has
    prior: bool = False
    start: bool = False  # whether the model's buffers are the original ones


BY_TRAINING_FLAG = Mode()
MEAN = Mode(mean=True)
PRIOR = Mode(prior=True, start=True)


def one_draw(seed: int) -> Mode:
    """Return the mode of a single draw, which takes a random member of a mixture too."""
    return Mode(draw=Draw(seed, pinned=True), member=noises.mix(seed, MEMBER))


# -- buffers -----------------------------------------------------------------------------------------------------------

START_SUFFIX = "_at_start"


def lasting_buffers(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (plain name, module, attribute) of every buffer that a state dict holds, the posteriors' own left out."""
    for path, module in root.named_modules():
        if not isinstance(module, Stored):
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}" if path else name, module, name


def put_buffers(root: nn.Module, values: Mapping[str, Tensor], *, copies: bool = False) -> dict[str, Tensor]:
    """Replace buffers, by their plain names, with tensors or copies of them; return the replaced ones."""
    before = {}
    for name, module, attribute in [place for place in lasting_buffers(root) if place[0] in values]:
        before[name] = now = module.get_buffer(attribute)
        module._buffers[attribute] = values[name].to(now, copy=True) if copies else values[name]
    return before


class Buffers:
    """A bayesified model's original buffers, which `prior` reads, and its current ones while these are set aside."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}  # by plain name, as they were when `bayesify` was called
        self.aside: dict[str, Tensor] = {}  # the current ones, while copies of the original ones are in their place
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Buffers":
        memo[id(self)] = copied = Buffers()
        copied.start, copied.aside = copy.deepcopy(self.start, memo), copy.deepcopy(self.aside, memo)
        return copied

    def put(self, root: nn.Module | None, *, start: bool) -> None:
        """Put copies of the original buffers in place, which a forward may write to; or put the current ones back."""
        if root is not None and start != bool(self.aside):
            with self._lock:
                if start and not self.aside:
                    self.aside = put_buffers(root, self.start, copies=True)
                elif not start:
                    put_buffers(root, self.aside)
                    self.aside = {}


def keep_buffers(root: Any, known: Mapping[str, Tensor]) -> None:
    """Keep the present buffers as the original ones, but for those whose original values are `known` by plain name."""
    now = {name: module.get_buffer(attribute) for name, module, attribute in lasting_buffers(root)}
    root._bayesify_scope.buffers.start = {n: known.get(n, t).detach().to(t, copy=True) for n, t in now.items()}


def kept_buffers(root: Any) -> dict[str, Tensor]:
    """Return the original buffers by their plain names."""
    start = root._bayesify_scope.buffers.start
    return {name: start[name] for name, _, _ in lasting_buffers(root) if name in start}


def put_buffers_of_start(view: nn.Module) -> None:
    """Put copies of the original buffers into a view of a model, whose buffers are its own."""
    for root in view.modules():
        if "_bayesify_scope" in root.__dict__:
            put_buffers(root, kept_buffers(root), copies=True)


def drop_from_state_dict(state_dict: dict[str, Any]) -> None:
    """Remove the original buffers from a state dict that is meant for a plain model."""
    for key in [k for k in state_dict if k.endswith(START_SUFFIX) and k.removesuffix(START_SUFFIX) in state_dict]:
        del state_dict[key]


def save_start(root: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the original buffers to a state dict; a hook on the bayesified model."""
    state_dict.update({prefix + name + START_SUFFIX: tensor for name, tensor in kept_buffers(root).items()})


def restore_buffers(root: Any, *_: Any) -> None:
    """Put the current buffers back before a state dict is made; a hook on the bayesified model."""
    root._bayesify_scope.buffers.put(root, start=False)


def load_start(root: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take over the original buffers from a state dict that is loaded; a hook on the bayesified model."""
    restore_buffers(root)
    for name, module, attribute in lasting_buffers(root):
        found = state_dict.pop(prefix + name + START_SUFFIX, None)
        if found is not None:
            device = module.get_buffer(attribute).device
            root._bayesify_scope.buffers.start[name] = found.detach().to(device, copy=True)


# -- blocks ------------------------------------------------------------------------------------------------------------


class Block:
    """A block of one model."""

    def __init__(self, scope: Scope, mode: Mode) -> None:
        self.scope = scope
        self.mode = mode
        self.in_backward = torch._C._current_autograd_node() is not None  # then it holds for recomputations too
        self.open = True


_INSIDE: ContextVar[tuple[Block, ...]] = ContextVar("bayesify_blocks", default=())


def block_of(scope: Scope) -> Block | None:
    """Return the innermost block of a model that the running code is inside of."""
    return next((b for b in reversed(_INSIDE.get()) if b.scope is scope and b.open), None)


@contextmanager
def override(scopes: Iterable[Scope], mode: Mode) -> Iterator[None]:
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
        now.frame = None  # a forward that is running around the block continues after it
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
    """A block of one model inside compiled code; it holds in the graph that it begins and ends in, and nowhere else.

    Where the code is cut into several graphs, or none is made after all, it is a block as any other.
    """

    def __init__(self, scope: Scope, seed: int | None = None, *, mean: bool = False) -> None:
        self.scope, self.seed, self.mean = scope, seed, mean
        self.graph = graph()
        self.outer: Mode | None = None
        self.plain: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        """Put the mode where forwards of the same graph look first."""
        if not torch.compiler.is_compiling() or self.graph != graph() or self.scope.sharded:
            self.plain = override([self.scope], MEAN if self.mean else one_draw(draw_seeds(1, self.seed)[0]))
            self.plain.__enter__()
            return
        mode = MEAN
        if not self.mean:
            for posterior in self.scope.posteriors:
                posterior.check_ready()
            mode = Mode(draw=Draw(sample_seed(self.seed), pinned=True))
        self.outer, self.scope.now.mode = self.scope.now.mode, mode

    def __exit__(self, *error: Any) -> None:
        """Restore the mode around the block."""
        if self.plain is not None:
            self.plain.__exit__(*error)
            self.plain = None
            return
        self.scope.now.mode = self.outer


# -- past forwards -----------------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """An outermost forward of the past: the autograd nodes that it made, by their numbers, and what it read."""

    start: int  # the number of its first node
    end: int  # one past its last; equal to `start` where it made none, as inside reentrant checkpointing
    module: "weakref.ref[nn.Module]"
    mode: Mode  # without its draw
    seed: int | None = None  # of its draw
    pinned: bool = False  # whether that came from a `sample` block
    fresh: bool = False  # whether the forward took the seed from the global generator itself

    @classmethod
    def of(cls, mode: Mode, start: int, module: nn.Module) -> "Record":
        """Return the record of a forward that ends now."""
        known, drawn = (start, node_count(), weakref.ref(module), mode._replace(draw=None)), mode.draw
        return cls(*known) if drawn is None else cls(*known, drawn.seed, drawn.pinned, drawn.fresh)

    def again(self) -> Mode:
        """Return the mode that reads the same."""
        return self.mode if self.seed is None else self.mode._replace(draw=Draw(self.seed, pinned=self.pinned))

    def is_drawn_again(self, module: nn.Module | None) -> bool:
        """Return whether the recomputation by `module` runs the whole forward, so that it takes its seed once more."""
        return self.fresh and (self.start == self.end or self.module() is module)

    def contains(self, module: nn.Module | None) -> bool:
        """Return whether a module lies inside the one that ran; None is some part of it."""
        outer = self.module()
        return module is None or (outer is not None and any(m is module for m in outer.modules()))


def node_count() -> int:
    """Return the number that this thread's next autograd node will have."""
    return int(torch._C._autograd._get_sequence_nr())


class Past:
    """The past forwards of a model, by thread, and the seeds that were drawn for them.

    Autograd numbers the nodes of a thread in the order of their creation. A recomputation runs on behalf of a node,
    whose number lies in the range of the forward that it repeats, whatever kind of checkpointing it is.
    """

    def __init__(self) -> None:
        self.threads: deque[deque[Record]] = deque(maxlen=REMEMBERED_THREADS)
        self.seeds: deque[int] = deque(maxlen=REMEMBERED_FORWARDS)
        self._lock = threading.Lock()

    def remember(self, thread: "deque[Record]", record: Record) -> None:
        """Keep a finished forward of a thread; the oldest threads make room for new ones."""
        with self._lock:
            if not any(known is thread for known in self.threads):
                self.threads.append(thread)
            # Of forwards in a row that made no nodes, as in evaluation, the first is enough.
            if record.end > record.start or not thread or thread[-1][:2] != record[:2]:
                thread.append(record)

    def find(self, node: Any, module: nn.Module | None) -> Record | None:
        """Return the forward that a recomputation of a module (None: some part of a model) for a node repeats."""
        with self._lock:
            found = [r for t in self.threads if (r := _made(t, node._sequence_nr(), module)) is not None]
        if len({record[3:] for record in found}) > 1:
            raise RuntimeError(
                f"a {type(module).__name__} is recomputed inside a backward pass, and forwards of several threads may "
                "be meant; run the forwards of one model, and their backward passes, in one thread"
            )
        return found[0] if found else None


def _made(thread: Sequence[Record], number: int, module: nn.Module | None) -> Record | None:
    """Return the forward of a thread that made a node, or that ran right after it without making any."""
    after = None
    for record in reversed(thread):
        if record.end <= number:
            break
        if record.start <= number + (record.start == record.end) and record.contains(module):
            if record.end > record.start:
                return record
            after = record  # reentrant checkpointing makes its node first and then runs the forward, which makes none
    return after
