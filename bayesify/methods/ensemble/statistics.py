"""The running statistics of normalization layers, which belong to the members of an ensemble as their weights do."""

import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.core.modes import MEAN, kept_buffers, lasting_buffers
from bayesify.core.ranks import in_a_group


def is_norm(module: nn.Module) -> bool:
    """Return whether a module keeps running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def norms_of(scope: Any) -> Iterator[tuple[int, _NormBase]]:
    """Yield the layers with running statistics, each with the place of its numbers among those of all."""
    offset = 0
    for module in scope.root.modules():
        if is_norm(module):
            yield offset, module
            offset += 2 * module.num_features


def live(scope: Any) -> Tensor | None:
    """Return the present statistics of all layers, one after the other."""
    buffers: Any = [t for _, norm in norms_of(scope) for t in (norm.running_mean, norm.running_var)]
    return torch.cat([buffer.detach().float() for buffer in buffers]) if buffers else None


def kept(scope: Any, number: Any) -> Tensor | None:
    """Return the statistics of a member by its number, or those of MEAN; None where there are none."""
    holder = scope.posteriors[0]
    every: Tensor | None = getattr(holder, "statistics", None)
    if every is None:
        return None
    if number is MEAN:
        return every.mean(0) if holder.soup else every[0]
    return every[number % len(every)]


def keep(scope: Any) -> None:
    """Keep the present statistics as those of the next member; of several processes those of rank 0."""
    now, holder = live(scope), scope.posteriors[0]
    if now is not None:
        if in_a_group() and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast(now, 0)
        holder.statistics = torch.cat([now[None]] if holder.statistics is None else [holder.statistics, now[None]])


def put(scope: Any, number: Any) -> None:
    """Write the statistics of a member, or those of MEAN, into the layers."""
    write(kept(scope, number), [norm for _, norm in norms_of(scope)])


@torch.no_grad()
def write(values: Tensor | None, norms: Sequence[Any]) -> None:
    """Write statistics into layers; None leaves them as they are."""
    if values is not None:
        buffers = [t for norm in norms for t in (norm.running_mean, norm.running_var)]
        for buffer, value in zip(buffers, torch.split(values, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(value)


@torch.no_grad()
def put_start(root: nn.Module) -> None:
    """Give all buffers the values that they had at `bayesify`."""
    first = kept_buffers(root)
    for name, module, attribute in lasting_buffers(root):
        if name in first:
            module._buffers[attribute].copy_(first[name])  # type: ignore[union-attr]


class Borrow:
    """Forward pre-hook of a normalization layer: it reads the statistics of the member that is in force."""

    def __init__(self, scope: Any, offset: int) -> None:
        self.scope, self.offset = scope, offset
        self.lock = threading.RLock()  # another thread may read another member
        self.own: list[dict[str, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Borrow":
        memo[id(self)] = twin = Borrow(None, self.offset)
        twin.scope = copy.deepcopy(self.scope, memo)
        return twin

    def __call__(self, norm: Any, args: Any) -> None:
        """Put them in the place of the layer's own, until its forward ends."""
        self.lock.acquire()
        own = {"running_mean": norm.running_mean, "running_var": norm.running_var}
        self.own.append(own)
        mode, root = self.scope.mode, self.scope.root
        trains = mode.draw is None and not mode.mean and root is not None and root.training
        values = None
        if not (norm.training or mode.prior or trains):
            values = kept(self.scope, MEAN if mode.draw is None else mode.member)
        if values is not None:
            size = norm.num_features
            for name, value in zip(own, values[self.offset :][: 2 * size].view(2, size), strict=True):
                norm._buffers[name] = value.to(own[name])


class GiveBack:
    """Forward hook, called on exceptions too: the layer has its own statistics again."""

    def __init__(self, borrow: Borrow) -> None:
        self.borrow = borrow

    @property
    def scope(self) -> Any:
        """The scope of the model, by which `unbayesify` knows the hook."""
        return self.borrow.scope

    def __call__(self, norm: nn.Module, args: Any, output: Any) -> None:
        """Give the statistics back."""
        norm._buffers.update(self.borrow.own.pop())
        self.borrow.lock.release()
