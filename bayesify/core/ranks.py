"""The processes of a distributed run: sums over them, what replicas must agree on, and the seeds of draws."""

import weakref
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bayesify.engine import noise as noises

Scope = Any  # bayesify.core.reading.Scope, which imports this file


def in_a_group() -> bool:
    """Return whether this process is in a group of torch.distributed, perhaps alone."""
    return dist.is_available() and dist.is_initialized()


def several() -> bool:
    """Return whether there is more than one process."""
    return in_a_group() and dist.get_world_size() > 1


def gathered(value: Any) -> list[Any]:
    """Return a small object of every process, in the order of their ranks."""
    if not several():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def sum_over(totals: dict[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Add up tensors by name, in place; what a process lacks is zero, on the device of the parameter in `like`."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for found in gathered({name: (tuple(t.shape), t.dtype) for name, t in totals.items()}):
        shapes.update(found)
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        if name not in totals:
            totals[name] = torch.zeros(shape, dtype=dtype, device=like[name].device)
        dist.all_reduce(totals[name])


def agree(scope: Scope) -> None:
    """Take over prior, moments and results of rank 0 in the first forward under DistributedDataParallel.

    Replicas that were built from different random numbers get the weights of rank 0 when they are wrapped, and prior
    means and scales follow from weights. DistributedDataParallel itself knows parameters and buffers only.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is None or (scope.replica_of is not None and scope.replica_of() is around):
        return
    scope.replica_of = weakref.ref(around)
    group = around.process_group
    first = dist.get_global_rank(group, 0)
    about = [[(p.found(), p.prior_sig, {n: (t.shape, t.dtype) for n, t in p.held().items()}) for p in scope.posteriors]]
    dist.broadcast_object_list(about, src=first, group=group)
    for posterior, (results, sig, tensors) in zip(scope.posteriors, about[0], strict=True):
        posterior.__dict__.update(results, prior_sig=sig)
        for name in posterior.kept:
            own = getattr(posterior, name)
            if name not in tensors:
                setattr(posterior, name, None)
                continue
            shape, dtype = tensors[name]
            if own is None or (own.shape, own.dtype) != (shape, dtype):
                own = torch.empty(shape, dtype=dtype, device=posterior.original.device)
                setattr(posterior, name, own)
            dist.broadcast(own, src=first, group=group)
        posterior._look_at_center()


# -- seeds -------------------------------------------------------------------------------------------------------------


def training_seed() -> int:
    """Take a seed from torch's global generator; ranks that share its state still draw apart."""
    seed = noises.global_seed()
    return noises.mix(seed, dist.get_rank()) if in_a_group() else seed


def shared_seed() -> int:
    """Take a seed from torch's global generator; with several processes, which must all call this, that of rank 0.

    The chains of replicas must move alike, and a prediction that is spread over ranks must be one model's.
    """
    seed = [noises.global_seed()]
    if several():
        dist.broadcast_object_list(seed)
    return seed[0]


def check_shared(seed: int) -> None:
    """Raise where the processes of a sharded model ask for different samples, of each of which they hold a part."""
    if len(set(gathered(seed))) > 1:
        raise ValueError(
            "the processes of a sharded model ask for different samples, and would each bring a part of another one; "
            "give sample, samples and predict the same seed on all processes, or none"
        )


def draw_seeds(n: int, seed: int | None) -> list[int]:
    """Return the seeds of n draws; consecutive, so that their noise never repeats."""
    if seed is not None and not is_whole(seed):
        raise TypeError(f"seed must be an integer or None, got {seed!r}")
    base = noises.mix(shared_seed() if seed is None else int(seed))
    return [(base + i) % 2**63 for i in range(n)]


def is_whole(value: Any) -> bool:
    """Return whether this is an integer, Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)
