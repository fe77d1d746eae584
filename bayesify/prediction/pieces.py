"""Join the pieces that batches and samples bring, and take some of the examples."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def one_of(index: Any, count: int) -> Any:
    """Return one example's index as a slice, which keeps the dimension, and any other index as it is.

    Raises:
        IndexError: There is no such example.
    """
    if isinstance(index, (slice, bool, np.bool_)) or getattr(index, "dtype", None) == torch.bool:
        return index
    try:
        index = operator.index(index)
    except TypeError:
        return index
    if not -count <= index < count:
        raise IndexError(f"there are {count} examples, got index {index}")
    return slice(index, index + 1 or None)


def said(num_samples: int, closed_form: bool) -> str:
    """Say what a prediction is the average over."""
    return f"{num_samples} samples" if num_samples else "closed form" if closed_form else "one model"


def in_full(output: Tensor) -> Tensor:
    """Return a model's output on the CPU, in float32 or better."""
    return output.detach().to("cpu", torch.promote_types(output.dtype, torch.float32))


def stack_samples(pieces: dict[tuple[int, int], Tensor], count: int, order: list[int]) -> Tensor:
    """Join the pieces by (sample, batch) to (S, N, ...)."""
    return torch.stack([join([pieces[s, b] for b in order]) for s in range(count)])


def join(pieces: list[Tensor], what: str = "outputs") -> Tensor:
    """Concatenate the batches.

    Raises:
        ValueError: Their shapes differ beyond the first dimension.
    """
    shapes = {tuple(p.shape[1:]) for p in pieces}
    if len(shapes) > 1:
        raise ValueError(
            f"batches give {what} of different shapes {sorted(shapes)}; pad the inputs to one length, "
            "or predict the batches one by one"
        )
    return torch.cat(pieces)


def join_labels(labels: list[Any], count: int) -> Tensor | None:
    """Concatenate the labels, if the batches had any.

    Raises:
        ValueError: Some batches had none, or they are not as many as the examples.
        TypeError: They are not numbers.
    """
    missing = sum(value is None for value in labels)
    if missing == len(labels):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(labels)} batches have no labels; give them to all batches, or to none")
    try:
        tensors = [torch.as_tensor(value).detach().cpu() for value in labels]
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(
            f"labels must be numbers, got {labels[0]!r:.60}; pass class numbers as torch.tensor([...])"
        ) from error
    joined = join(tensors, "labels")
    if len(joined) != count:
        raise ValueError(f"there are {len(joined)} labels for {count} examples; pass (inputs, labels) of one length")
    return joined
