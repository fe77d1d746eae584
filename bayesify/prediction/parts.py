"""A prediction whose data is spread over processes: everybody's part, put together in the order of the data set."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from bayesify.core import ranks
from bayesify.prediction.averaging import Found

BY_SAMPLE = ("logits", "outputs", "noise_var")  # (S, N, ...); the other tensors are (N, ...)


def own_places(data: Any) -> list[int] | None:
    """Return which items of the data set this process reads, or None where it is not told to read a part only.

    It is by a DataLoader with torch's DistributedSampler, or one in order that Hugging Face's Accelerate has prepared.
    """
    if not reads_a_part(data):
        return None
    order: Any = data.sampler if data.batch_sampler is None else data.batch_sampler
    if not isinstance(getattr(order, "sampler", order), DistributedSampler):
        whole = getattr(order, "batch_sampler", None)  # Accelerate's BatchSamplerShard is built on that of all
        if not isinstance(getattr(whole, "sampler", None), SequentialSampler):
            return None
    return list(order if data.batch_sampler is None else chain.from_iterable(order))


def reads_a_part(data: Any) -> bool:
    """Return whether a DataLoader gives this process a part of the data, by a sampler of torch's or Accelerate's."""
    if not ranks.several() or not isinstance(data, DataLoader):
        return False
    order: Any = data.sampler if data.batch_sampler is None else data.batch_sampler
    inner = getattr(order, "sampler", order)
    if isinstance(inner, DistributedSampler):
        return inner.num_replicas > 1
    return int(getattr(order, "num_processes", 1)) > 1


def together(found: Found, places: list[int]) -> Found:
    """Join the parts of all processes: each item of the data set once, in its order."""
    if len(found) != len(places):
        raise ValueError(
            f"the loader's sampler names {len(places)} items, and its batches have {len(found)}; predict on batches "
            "with one row per item, or give every process all of the data"
        )
    parts = ranks.gathered((places, found))
    rows: dict[int, int] = {}
    for row, place in enumerate(chain.from_iterable(own for own, _ in parts)):
        rows.setdefault(place, row)  # samplers repeat items, so that all processes have as many
    joined = _joined([part for _, part in parts])
    return joined[torch.tensor([rows[place] for place in sorted(rows)])]


def _joined(parts: Sequence[Found]) -> Found:
    """Join predictions of one kind on different items."""
    tensors: dict[str, Tensor] = {}
    for field in fields(parts[0]):
        values: Iterable[Any] = [getattr(part, field.name) for part in parts]
        if all(isinstance(value, Tensor) for value in values):
            tensors[field.name] = torch.cat(list(values), dim=1 if field.name in BY_SAMPLE else 0)
    return replace(parts[0], **tensors)  # type: ignore[arg-type]
