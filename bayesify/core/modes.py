"""Blocks: where `mean` and `sample` are in force.

A block holds for the code inside of it: threads and coroutines have blocks of their own, and a task inherits those of
the code that starts it. A block that was left is over for everybody.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bayesify.core.compile import graph, sample_seed
from bayesify.core.draws import MEAN, Draw, Mode, one_draw
from bayesify.core.seeds import check_shared, draw_seeds

if TYPE_CHECKING:
    from bayesify.core.reading import Scope


class Block:
    """A `mean` or `sample` block of one model, and the one around it.

    A block that was entered inside a backward pass is meant for what runs there, recomputation or not.
    """

    def __init__(self, scope: "Scope", mode: Mode) -> None:
        self.scope = scope
        self.mode = mode
        self.outer = own_block(scope)
        self.in_backward = torch._C._current_autograd_node() is not None
        self.open = True


_INSIDE: ContextVar[tuple[Block, ...]] = ContextVar("bayesify_blocks", default=())
_OPEN: list[Block] = []  # of every thread
_LOCK = threading.Lock()


@contextmanager
def override(scopes: Iterable["Scope"], mode: Mode) -> Iterator[None]:
    """Override train() and eval() of several models until the block is left."""
    blocks = [Block(scope, mode._replace(draw=mode.draw and mode.draw.part(i))) for i, scope in enumerate(scopes)]
    if mode.draw is not None:
        for block in blocks:
            block.scope.method.check_ready(block.scope.posteriors)
        if not mode.draw.agreed and any(block.scope.sharded for block in blocks):
            check_shared(mode.draw.seed)
            mode.draw.agreed = True
    _INSIDE.set((*_INSIDE.get(), *blocks))
    with _LOCK:
        _OPEN.extend(blocks)
    for block in blocks:
        block.scope.buffers.put(block.scope.root, start=mode.start)
    try:
        yield
    finally:
        with _LOCK:
            for block in blocks:
                block.open = False
                _OPEN.remove(block)
        # By what is open, and not by a token: a generator may be closed in another context than it was started in.
        _INSIDE.set(tuple(b for b in _INSIDE.get() if b.open))
        for block in blocks:
            outer = own_block(block.scope)
            block.scope.buffers.put(block.scope.root, start=outer is not None and outer.mode.start)


class TracedBlock:
    """A block inside compiled code: it holds in the graph that it begins and ends in, and for nobody else.

    Where the code is cut into several graphs, or none is made after all, it is a block as any other.

    Args:
        scopes: The models.
        mean: Whether it is a `mean` block.
        seed: As in `sample`, else.
    """

    def __init__(self, scopes: "list[Scope]", *, mean: bool = False, seed: int | None = None) -> None:
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


def own_block(scope: "Scope") -> Block | None:
    """Return the innermost block of a model that the running code is inside of."""
    return next((b for b in reversed(_INSIDE.get()) if b.scope is scope and b.open), None)


def block_of(scope: "Scope", module: nn.Module, node: Any) -> Block | None:
    """Return the block in force for a forward of `module`, on behalf of an autograd node or None.

    Threads that torch starts know nothing of the code that they work for: a replica of DataParallel, and a backward
    pass on autograd's own threads, take the only block that the model is in.

    Raises:
        RuntimeError: Such a thread cannot tell which block it works for.
    """
    own = own_block(scope)
    if own is not None or not _OPEN:
        return own
    by_autograd = node is not None and isinstance(threading.current_thread(), threading._DummyThread)
    if not by_autograd and not getattr(module, "_is_replica", False):
        return None
    with _LOCK:
        ours = [b for b in _OPEN if b.scope is scope]
    innermost = [b for b in ours if not any(other.outer is b for other in ours)]
    if len(innermost) > 1:
        raise RuntimeError(
            "the model is in several mean or sample blocks at once, and a thread of torch's own cannot tell which one "
            "it works for; use one block at a time with DataParallel, and in hooks of a backward pass"
        )
    return innermost[0] if innermost else None
