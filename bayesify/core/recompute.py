"""Past forwards, and which of them a recomputation inside a backward pass repeats.

Autograd numbers its nodes in the order in which a thread makes them. A forward is known by its thread and the numbers
of its nodes, a recomputation by the node on whose behalf it runs. Where forwards of several threads have that number,
the samples in the graph below the node tell which is meant; where they do not, it is an error.
"""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

REMEMBERED_FORWARDS = 1 << 14
REMEMBERED_THREADS = 64
SEARCHED_NODES = 1 << 12


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
        prior: Whether it read the prior mean.
    """

    start: int
    end: int
    module: "weakref.ref[nn.Module]"
    seed: int | None
    pinned: bool
    fresh: bool
    mean: bool
    prior: bool

    @property
    def hidden(self) -> bool:
        """Whether the forward left no autograd nodes."""
        return self.start == self.end

    @property
    def reads(self) -> tuple[Any, ...]:
        """What the forward read: forwards that agree in this need not be told apart."""
        return self.seed, self.pinned, self.fresh, self.mean, self.prior

    def is_drawn_again(self, module: nn.Module | None) -> bool:
        """Tell whether the recomputation by `module` runs the whole forward, so that it takes its seed once more."""
        return self.fresh and (self.hidden or self.module() is module)

    def contains(self, module: nn.Module | None) -> bool:
        """Tell whether a module lies inside the one that ran; None is a part of it by all means."""
        outer = self.module()
        return module is None or (outer is not None and any(m is module for m in outer.modules()))


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

    def find(self, number: int, module: nn.Module | None) -> Record | None:
        """Return the forward that made a node, or that ran right after it without making any."""
        for record in reversed(self.shown):
            if record.end <= number:
                break
            if record.start <= number and record.contains(module):
                return record
        # Reentrant checkpointing makes its node first and then runs the forward, which makes none.
        hidden = self.hidden.get(number + 1)
        return hidden if hidden is not None and hidden.contains(module) else None


class Past:
    """The forwards of every thread, and the seeds that were drawn for them."""

    def __init__(self) -> None:
        self.tracks: OrderedDict[object, Track] = OrderedDict()
        self.seeds: OrderedDict[int, None] = OrderedDict()
        self._local = threading.local()
        self._lock = threading.Lock()

    def remember(self, record: Record) -> None:
        """Keep a finished forward; the threads that were longest without one make room for new threads."""
        track = getattr(self._local, "track", None)
        if track is None:  # an object of the thread's own: a dead thread's number is given to another
            track = self._local.track = Track()
        with self._lock:
            self.tracks[track] = track
            self.tracks.move_to_end(track)
            if len(self.tracks) > REMEMBERED_THREADS:
                self.tracks.popitem(last=False)
            track.remember(record)

    def remember_seed(self, seed: int) -> int:
        """Keep a seed that was drawn for a forward, and return it."""
        with self._lock:
            self.seeds[seed] = None
            if len(self.seeds) > REMEMBERED_FORWARDS:
                self.seeds.popitem(last=False)
        return seed

    def find(self, node: Any, module: nn.Module | None, is_ours: Callable[[Any], bool]) -> Record | None:
        """Return the forward that made an autograd node and contains a module, or None where none is known.

        Args:
            node: On whose behalf the recomputation runs.
            module: What is run again; None is a part of the model that is not known.
            is_ours: Whether a posterior is one of this model's.

        Raises:
            RuntimeError: Forwards of several threads have a node of this number.
        """
        number = node._sequence_nr()
        with self._lock:
            found = [r for track in self.tracks.values() if (r := track.find(number, module)) is not None]
        if len({r.reads for r in found}) > 1:
            seed = _seed_below(node, is_ours)
            found = [r for r in found if r.seed == seed]
            if len({r.reads for r in found}) != 1:
                raise RuntimeError(
                    f"a {type(module).__name__} is recomputed inside a backward pass, and forwards of several threads "
                    "may be meant; use checkpoint(..., use_reentrant=False), or run the forwards of one model in one "
                    "thread"
                )
        return found[0] if found else None


def _seed_below(node: Any, is_ours: Callable[[Any], bool]) -> int | None:
    """Return the seed of the nearest sample that a node's value was computed from."""
    queue, seen = deque([node]), {node}
    while queue and len(seen) < SEARCHED_NODES:
        current = queue.popleft()
        posterior = getattr(current, "posterior", None)
        if posterior is not None and is_ours(posterior):
            return int(current.seed)
        for below, _ in current.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                queue.append(below)
    return None
