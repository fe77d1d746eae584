"""One draw of theta: a seed, the noise that follows from it, and what a forward or a block reads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.core.compile import draw, graph, in_one_operation, part_seed
from bayesify.core.posterior import Posterior, Sampled
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
