"""One outermost forward, and what a thread does with a model meanwhile."""

import sys
import threading
from collections.abc import Collection
from types import FrameType

from torch import Tensor, nn

from bayesify.core import lost
from bayesify.core.draws import NOWHERE, Mode
from bayesify.core.posterior import Posterior
from bayesify.core.remade import Remaking


class Frame:
    """One outermost forward: the modules entered so far, and the thetas that its reads have seen."""

    def __init__(self, mode: Mode, caller: FrameType | None, start: int, *, recomputes: bool) -> None:
        self.mode = mode
        self.caller = caller
        self.start = start
        self.recomputes = recomputes
        self.stack: list[nn.Module] = []
        self.thetas: dict[Posterior, Tensor] = {}
        self.remaking: Remaking | None = None
        self.traced = NOWHERE

    def runs(self) -> bool:
        """Tell whether the forward still runs: its Python frame is on the stack.

        Torch calls no hook where an interrupt ends a forward, nor any other exception that is not an `Exception`. A
        forward that compiled code began has no frame, and lasts until the model's next one at most.
        """
        if self.caller is None:
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is self.caller:
                return True
            frame = frame.f_back
        return False


class Now:
    """What one thread does with a model."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.mode: Mode | None = None  # of a block inside compiled code
        self.bare: lost.BareRead | None = None
        self.watched: Collection[Posterior] = ()  # by a prediction that asks what a module depends on
        self.touched = False


class Thread(threading.local):
    """The thread's own `Now`: compiled code can write to a plain object only."""

    def __init__(self) -> None:
        self.now = Now()
