"""Where the seeds of draws come from: torch's global generator, by itself or agreed upon by all processes."""

from numbers import Integral
from typing import Any

import torch

from bayesify.core.ranks import gathered
from bayesify.engine import noise as noises


def in_a_group() -> bool:
    """Tell whether this process is one of several that torch.distributed has brought together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def training_seed() -> int:
    """Take a seed from torch's global generator; ranks that share its state still draw apart."""
    seed = noises.global_seed()
    return noises.mix(seed, torch.distributed.get_rank()) if in_a_group() else seed


def shared_seed() -> int:
    """Take a seed from torch's global generator; in a process group, that of rank 0 on all ranks.

    So all ranks must come here together. The chains of replicas must move alike, and a prediction that is spread over
    ranks must be one model's.
    """
    seed = [noises.global_seed()]
    if in_a_group() and torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(seed)
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
    """Tell whether this is an integer, Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)
