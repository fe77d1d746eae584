"""The running statistics of normalization layers, which belong to the members of an ensemble as their weights do."""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bayesify.core.modes import kept_buffers, lasting_buffers
from bayesify.core.ranks import several


def norms_in(root: nn.Module) -> list[Any]:
    """Return the layers with running statistics."""
    return [m for m in root.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def live(root: nn.Module) -> Tensor | None:
    """Return the present statistics of all layers, one after the other."""
    buffers = [t.detach().float() for norm in norms_in(root) for t in (norm.running_mean, norm.running_var)]
    return torch.cat(buffers) if buffers else None


def keep(scope: Any) -> None:
    """Keep the present statistics as those of the next member; of several processes those of rank 0."""
    now, holder = live(scope.root), scope.posteriors[0]
    if now is not None:
        if several():
            torch.distributed.broadcast(now, 0)
        holder.statistics = torch.cat([now[None]] if holder.statistics is None else [holder.statistics, now[None]])


def kept(scope: Any, number: int | None) -> Tensor | None:
    """Return the statistics of a member by its number, or (None) those of the mean; None where there are none."""
    holder = scope.posteriors[0]
    every: Tensor | None = getattr(holder, "statistics", None)
    if every is None:
        return None
    if number is None:
        return every.mean(0) if holder.soup else every[0]
    return every[number % len(every)]


@torch.no_grad()
def write(values: Tensor | None, root: nn.Module) -> None:
    """Write statistics into the layers; None leaves them as they are."""
    if values is not None:
        buffers = [t for norm in norms_in(root) for t in (norm.running_mean, norm.running_var)]
        for buffer, value in zip(buffers, torch.split(values, [b.numel() for b in buffers]), strict=True):
            buffer.copy_(value)


@torch.no_grad()
def write_start(root: nn.Module) -> None:
    """Give all buffers the values that they had at `bayesify`."""
    first = kept_buffers(root)
    for name, module, attribute in lasting_buffers(root):
        if name in first:
            module.get_buffer(attribute).copy_(first[name])


def read_by_member(scope: Any) -> None:
    """Let every normalization layer of a model read the statistics of the member that is in force."""
    offset = 0
    for norm in norms_in(scope.root):
        hook = MemberStatistics(scope, offset)
        norm.register_forward_pre_hook(hook)
        norm.register_forward_hook(hook, always_call=True)
        offset += 2 * norm.num_features


class MemberStatistics:
    """Hook before and after a layer's forward: until it ends, the statistics are those of the member in force."""

    def __init__(self, scope: Any, offset: int) -> None:
        self.scope = scope  # by which `unbayesify` knows the hook
        self.offset = offset  # the place of the layer's numbers among those of all layers
        self.lock = threading.RLock()  # another thread may read another member
        self.own: list[dict[str, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "MemberStatistics":
        return MemberStatistics(copy.deepcopy(self.scope, memo), self.offset)

    def __call__(self, norm: Any, args: Any, *output: Any) -> None:
        """Put the member's statistics in place; after the forward, or its error, the layer's own."""
        if output:
            norm._buffers.update(self.own.pop())
            self.lock.release()
            return
        self.lock.acquire()
        own = {"running_mean": norm.running_mean, "running_var": norm.running_var}
        self.own.append(own)
        mode, root = self.scope.mode, self.scope.root
        trains = mode.draw is None and not mode.mean and root is not None and root.training
        number = None if mode.draw is None else mode.member
        if not (norm.training or mode.prior or trains) and (values := kept(self.scope, number)) is not None:
            size = norm.num_features
            for name, value in zip(own, values[self.offset :][: 2 * size].view(2, size), strict=True):
                norm._buffers[name] = value.to(own[name])
