"""Blocks: where `mean`, `sample` and `prior` are in force.

A block holds for the code inside of it: threads and coroutines have blocks of their own, and a task inherits those of
the code that starts it. Leaving a block ends it for all threads.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from bayesify.core.compile import graph, sample_seed
from bayesify.core.draws import MEAN, Draw, Mode, one_draw
from bayesify.core.method import Method
from bayesify.core.posterior import Posterior
from bayesify.core.seeds import check_shared, draw_seeds
from bayesify.core.start import Buffers


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
