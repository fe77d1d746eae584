"""Past forwards, and which of them a recomputation inside a backward pass repeats; thetas that no graph keeps.

Autograd numbers its nodes in the order in which a thread makes them. A forward is known by its thread and the numbers
of its nodes, a recomputation by the node on whose behalf it runs: whatever kind of checkpointing it is. Where forwards
of several threads have that number and have read different things, it is an error.
"""

import threading
import weakref
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.modes import Mode
from bayesify.core.posterior import Posterior

REMEMBERED_FORWARDS = 1 << 14
REMEMBERED_THREADS = 64


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

    @classmethod
    def of(cls, mode: Mode, start: int, module: nn.Module) -> "Record":
        """Return the record of a forward that ends now."""
        draw, end = mode.draw, node_count()
        if draw is None:
            return cls(start, end, weakref.ref(module), None, False, False, mode.mean, mode.prior)
        return cls(start, end, weakref.ref(module), draw.seed, draw.pinned, draw.fresh, mode.mean, mode.prior)

    @property
    def hidden(self) -> bool:
        """Whether the forward left no autograd nodes."""
        return self.start == self.end

    def is_drawn_again(self, module: nn.Module | None) -> bool:
        """Return whether the recomputation by `module` runs the whole forward, so that it takes its seed once more."""
        return self.fresh and (self.hidden or self.module() is module)

    def contains(self, module: nn.Module | None) -> bool:
        """Return whether a module lies inside the one that ran; None is some part of it."""
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
        self.tracks: OrderedDict[Track, None] = OrderedDict()
        self.seeds: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, track: Track, record: Record) -> None:
        """Keep a finished forward; the threads that were longest without one make room for new threads."""
        with self._lock:
            self.tracks[track] = None
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

    def find(self, node: Any, module: nn.Module | None) -> Record | None:
        """Return the forward that made an autograd node and contains a module, or None where none is known.

        Args:
            node: On whose behalf the recomputation runs.
            module: What is run again; None is a part of the model that is not known.

        Raises:
            RuntimeError: Forwards of several threads have a node of this number.
        """
        with self._lock:
            found = [r for track in self.tracks if (r := track.find(node._sequence_nr(), module)) is not None]
        if len({record[3:] for record in found}) > 1:  # they have read different things
            raise RuntimeError(
                f"a {type(module).__name__} is recomputed inside a backward pass, and forwards of several threads may "
                "be meant; run the forwards of one model, and their backward passes, in one thread"
            )
        return found[0] if found else None


# -- sharded models ----------------------------------------------------------------------------------------------------


class Seed(NamedTuple):
    """What a graph keeps in the place of a theta, or of a view of it."""

    posterior: Posterior
    seed: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Remaking:
    """The thetas of one forward of a sharded model: backward makes them again, when FSDP2 has gathered the parameters.

    A layer's backward pass needs its weights. FSDP2 frees those of a plain model after the layer's forward; a theta
    in the graph would stay whole on every process, for every layer at once.
    """

    def __init__(self) -> None:
        self.thetas: dict[int, tuple[Posterior, int, Tensor]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> None:
        """Let graphs keep their tensors again."""
        self._hooks.__exit__()
        self.thetas.clear()

    def add(self, posterior: Posterior, seed: int, theta: Tensor) -> None:
        """Know a theta by its memory, for as long as it is not dropped."""
        self.thetas[theta.untyped_storage().data_ptr()] = posterior, seed, theta

    def drop(self, module: nn.Module) -> None:
        """Free the thetas of a module whose parameters are sharded again."""
        inside = set(module.modules())
        self.thetas = {place: known for place, known in self.thetas.items() if known[0] not in inside}

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or not tensor.numel():
            return tensor
        known = self.thetas.get(tensor.untyped_storage().data_ptr())
        if known is None:
            return tensor
        posterior, seed, theta = known
        return Seed(
            posterior, seed, tensor.shape, tensor.stride(), int(tensor.storage_offset() - theta.storage_offset())
        )


def _unpack(kept: Any) -> Any:
    if not isinstance(kept, Seed):
        return kept
    with torch.no_grad():
        theta = kept.posterior.drawn(kept.posterior.original, kept.seed)
    return theta.as_strided(kept.size, kept.stride, theta.storage_offset() + kept.offset)
