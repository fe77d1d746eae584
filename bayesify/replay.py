"""Past forwards, and which of them a recomputation inside a backward pass repeats.

Autograd numbers its nodes in the order in which a thread makes them. A forward is known by the numbers of its nodes,
a recomputation by the node on whose behalf it runs.
"""

import threading
import weakref
from collections import OrderedDict, deque
from typing import NamedTuple

import torch
from torch import nn

REMEMBERED_FORWARDS = 1 << 14


def node_count() -> int:
    """Return the number that this thread's next autograd node will have."""
    return int(torch._C._autograd._get_sequence_nr())


class Record(NamedTuple):
    """An outermost forward of the past.

    Attributes:
        start: The number of its first autograd node.
        end: One past its last; equal to `start` where none was made, as inside reentrant checkpointing.
        module: The module that ran.
        seed: The seed of the draw that it read, if any.
        pinned: Whether that draw came from a `sample` block.
        fresh: Whether the forward took the seed from the global generator itself.
        mean: Whether it read the mean because a `mean` block said so.
    """

    start: int
    end: int
    module: "weakref.ref[nn.Module]"
    seed: int | None
    pinned: bool
    fresh: bool
    mean: bool

    @property
    def hidden(self) -> bool:
        """Whether the forward left no autograd nodes."""
        return self.start == self.end

    def is_drawn_again(self, module: nn.Module) -> bool:
        """Tell whether the recomputation by `module` runs the whole forward, so that it takes its seed once more."""
        return self.fresh and (self.hidden or self.module() is module)

    def contains(self, module: nn.Module) -> bool:
        """Tell whether a module lies inside the one that ran."""
        outer = self.module()
        return outer is not None and any(m is module for m in outer.modules())


class Track:
    """The forwards of one thread."""

    def __init__(self) -> None:
        self.shown: deque[Record] = deque(maxlen=REMEMBERED_FORWARDS)
        self.hidden: OrderedDict[int, Record] = OrderedDict()

    def remember(self, record: Record) -> None:
        """Keep a finished forward; of those without nodes only the first after a node."""
        if not record.hidden:
            self.shown.append(record)
        elif record.start not in self.hidden:
            self.hidden[record.start] = record
            if len(self.hidden) > REMEMBERED_FORWARDS:
                self.hidden.popitem(last=False)

    def find(self, node: int, module: nn.Module) -> Record | None:
        """Return the forward that made a node, or that ran right after it without making any."""
        for record in reversed(self.shown):
            if record.end <= node:
                break
            if record.start <= node and record.contains(module):
                return record
        # Reentrant checkpointing makes its node first and then runs the forward, which makes none.
        hidden = self.hidden.get(node + 1)
        return hidden if hidden is not None and hidden.contains(module) else None


class Past:
    """The forwards of every thread, and the seeds that were drawn for them."""

    def __init__(self) -> None:
        self.tracks: dict[int, Track] = {}
        self.seeds: OrderedDict[int, None] = OrderedDict()

    def remember(self, record: Record) -> None:
        """Keep a finished forward."""
        self.tracks.setdefault(threading.get_ident(), Track()).remember(record)

    def remember_seed(self, seed: int) -> int:
        """Keep a seed that was drawn for a forward, and return it."""
        self.seeds[seed] = None
        if len(self.seeds) > REMEMBERED_FORWARDS:
            self.seeds.popitem(last=False)
        return seed

    def find(self, node: int, module: nn.Module) -> Record | None:
        """Return the forward that made an autograd node and contains a module, if it can be told."""
        # Threads number their nodes apart. A backward pass runs in the forward's thread, or in an accelerator's.
        own = self.tracks.get(threading.get_ident())
        record = own.find(node, module) if own is not None else None
        if record is not None:
            return record
        others = [r for t in self.tracks.values() if (r := t.find(node, module)) is not None]
        return others[0] if len(others) == 1 else None
