"""One draw of theta: a seed, the noise that follows from it, and the values that are worth keeping."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify import noise as noises
from bayesify.posteriors import Posterior, Sampled, make_noise


class Draw:
    """One theta of the whole model, given by its seed.

    Args:
        seed: From which the noise of every parameter follows.
        pinned: Whether the draw outlives a forward, so that its thetas are worth keeping.
        fresh: Whether the forward that reads it took its seed from the global generator.
    """

    def __init__(self, seed: int, *, pinned: bool = False, fresh: bool = False) -> None:
        self.seed = seed
        self.pinned = pinned
        self.fresh = fresh
        self.noise: dict[Posterior, Tensor] = {}
        self.values: dict[Posterior, Kept] = {}
        self.parts: dict[int, Draw] = {}

    def part(self, i: int) -> "Draw":
        """Return the draw for the i-th of several models: parameters of one name need noise of their own."""
        return self.parts.setdefault(i, Draw(noises.mix(self.seed, i), pinned=self.pinned)) if i else self

    def prepare(self, posteriors: Iterable[Posterior]) -> None:
        """Draw the noise of several posteriors at once, which is faster than one by one."""
        missing = [p for p in posteriors if p not in self.values and p not in self.noise]
        self.noise.update(make_noise(missing, self.seed))

    def theta(self, posterior: Posterior, original: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this draw's theta of one posterior, with its energy handle where gradients are wanted."""
        tensors = (original, *posterior.learnable())
        noise = self.noise.pop(posterior, None)
        value = self._kept_value(posterior, tensors) if self.pinned else None
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wants_grad:
            theta, handle = Sampled.apply(posterior, self.seed, noise, value, *tensors)
        elif value is None:
            noise = make_noise([posterior], self.seed)[posterior] if noise is None else noise
            with torch.no_grad():
                theta, handle = posterior.draw(original, noise), None
        else:
            theta, handle = value, None
        if self.pinned and value is None:
            self.values[posterior] = Kept(tensors, _stamps(tensors), theta.detach())
        return theta, handle

    def _kept_value(self, posterior: Posterior, tensors: tuple[Tensor, ...]) -> Tensor | None:
        """Return the theta of an earlier forward, unless the parameters have changed since."""
        kept = self.values.get(posterior)
        if kept is None or kept.value.is_inference() > torch.is_inference_mode_enabled():
            return None
        same = all(a is b for a, b in zip(kept.tensors, tensors, strict=True)) and kept.stamps == _stamps(tensors)
        return kept.value if same else None


class Kept(NamedTuple):
    """A theta worth keeping, with the tensors that it was made from and their state then."""

    tensors: tuple[Tensor, ...]
    stamps: list[tuple[int, int]]
    value: Tensor


def _stamps(tensors: tuple[Tensor, ...]) -> list[tuple[int, int]]:
    """Return what changes when a tensor is written or moved."""
    return [(0 if t.is_inference() else t._version, t.data_ptr()) for t in tensors]


class Mode(NamedTuple):
    """What a block or a forward reads: a draw, the mean, or (both unset) what train() and eval() say.

    A block that was entered inside a backward pass is meant for what runs there, recomputation or not. A block is in
    force on the thread that entered it, and on threads without blocks of their own (DataParallel's, autograd's).
    """

    draw: Draw | None = None
    mean: bool = False
    in_backward: bool = False
    thread: int = 0


BY_TRAINING_FLAG = Mode()
MEAN = Mode(mean=True)
