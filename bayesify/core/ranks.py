"""Sums over the processes of a distributed run, each of which has seen its own part of the data."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def several() -> bool:
    """Tell whether there is more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathered(value: Any) -> list[Any]:
    """Return a small object of every process, in the order of their ranks."""
    if not several():
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def sum_over(totals: dict[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Add up tensors by name, in place; a process that has none of a name counts as zero.

    Args:
        totals: This process's.
        like: The parameters, for the device of what is missing.
    """
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for found in gathered({name: (tuple(t.shape), t.dtype) for name, t in totals.items()}):
        shapes.update(found)
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        if name not in totals:
            totals[name] = torch.zeros(shape, dtype=dtype, device=like[name].device)
        dist.all_reduce(totals[name])
