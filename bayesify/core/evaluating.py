"""Eval mode for a while, also where several threads want it of one model."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_LOCK = threading.Lock()
_HELD: "WeakKeyDictionary[nn.Module, Held]" = WeakKeyDictionary()


class Held:
    """A module that is kept in eval mode: by how many, and which flag it had before the first of them."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.holders = 0


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; training flags and torch's global generator are as before afterwards.

    Several threads may evaluate one model: the flags come back when the last of them leaves.
    """
    modules = list(model.modules())
    state = torch.get_rng_state()
    with _LOCK:
        for module in modules:
            held = _HELD.setdefault(module, Held(module.training))
            held.holders += 1
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _LOCK:
            for module in modules:
                held = _HELD[module]
                held.holders -= 1
                if not held.holders:
                    module.training = held.training
                    del _HELD[module]
        torch.set_rng_state(state)
