"""Thetas of sharded models, which no graph keeps: a backward pass makes them again, when FSDP2 has gathered the rest.

A layer's backward pass needs its weights. Those of a plain model are freed by FSDP2 after the layer's forward; a theta
would stay whole on every process, for every layer at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.posterior import Posterior


class Seed(NamedTuple):
    """What a graph keeps in the place of a theta, or of a view of it."""

    posterior: Posterior
    seed: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Remaking:
    """The thetas of one forward, none of which its graph shall keep."""

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
