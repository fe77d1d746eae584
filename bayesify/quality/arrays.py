"""Validation of what metrics take: missing, misshapen or non-finite values raise, and nothing is repaired."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = Tensor | npt.NDArray[Any]
ArrayT = TypeVar("ArrayT", bound=Array)

_SUM_TOLERANCE = 1e-4


def _require_array(values: object, name: str) -> None:
    """Raise for what is neither a tensor nor an array."""
    if isinstance(values, Tensor | np.ndarray):
        return
    if values is None:
        fix = "the data had none: give predict batches of (inputs, labels)"
    elif isinstance(values, (list, tuple)) and values and isinstance(values[0], str):
        fix = "number the classes, and pass torch.tensor of the numbers"
    elif hasattr(values, "num_samples"):
        fix = f"it is what predict returned: pass its .{name}"
    else:
        fix = "use torch.tensor(...)"
    raise TypeError(f"{name} must be a tensor or a numpy array, got {type(values).__name__}; {fix}")


def check_fraction(name: str, value: float, usual: str) -> None:
    """Raise unless a number is between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}; {usual}")


def to_double(values: Array, name: str) -> Tensor:
    """Return finite, non-empty floating-point `values` as a float64 tensor on the CPU."""
    _require_array(values, name)
    floating = values.is_floating_point() if isinstance(values, Tensor) else values.dtype.kind == "f"
    if not floating:
        raise TypeError(f"{name} must be floating-point, got dtype {values.dtype}; use .double() or .astype(float)")
    if isinstance(values, Tensor):
        tensor = values.detach().cpu().double()
    else:
        tensor = torch.from_numpy(np.array(values, dtype=np.float64))
    if tensor.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}; check the data behind it")
    if bad := int((~tensor.isfinite()).sum()):
        raise ValueError(
            f"{name} must be finite, got NaN or infinity in {bad} of {tensor.numel()} values; "
            "nothing is dropped here: repair the model or the data that made them"
        )
    return tensor


def to_labels(labels: Array, count: int, classes: int) -> Tensor:
    """Return `count` integer labels below `classes` as an int64 tensor on the CPU."""
    _require_array(labels, "labels")
    if isinstance(labels, Tensor):
        integral = labels.dtype != torch.bool and not (labels.is_floating_point() or labels.is_complex())
    else:
        integral = labels.dtype.kind in "iu"
    if not integral:
        fix = "one-hot labels need argmax(1)" if labels.ndim == 2 else "use .long() or .astype(int)"
        raise TypeError(f"labels must be integers, got dtype {labels.dtype}; {fix}")
    if tuple(labels.shape) != (count,):
        raise ValueError(
            f"labels must have shape ({count},), one class per example, got {tuple(labels.shape)}; "
            "one-hot labels need argmax(1), a column of labels squeeze(1)"
        )
    truth = labels.cpu().long() if isinstance(labels, Tensor) else torch.from_numpy(np.array(labels, dtype=np.int64))
    if truth.min() < 0 or truth.max() >= classes:
        raise ValueError(
            f"labels must be in 0..{classes - 1} for {classes} classes, got {int(truth.min())}..{int(truth.max())}; "
            "remap them, and leave out padding such as -100 in both arguments"
        )
    return truth


def to_probs(probs: Array, name: str, shape: str) -> Tensor:
    """Return probabilities of a shape such as "(N, K)" as a float64 tensor."""
    p = to_double(probs, name)
    if p.dim() != len(shape.split()):
        raise ValueError(
            f"{name} must have shape {shape}, got {tuple(p.shape)}; the p of a binary model becomes columns [1 - p, p]"
        )
    if p.min() < 0 or p.max() > 1 + _SUM_TOLERANCE:
        raise ValueError(
            f"{name} must lie in [0, 1], got values from {float(p.min()):.4g} to {float(p.max()):.4g}; "
            "these look like logits; apply softmax first"
        )
    off = (p.sum(-1) - 1).abs()
    if off.max() > _SUM_TOLERANCE:
        raise ValueError(
            f"the rows of {name} must sum to one within {_SUM_TOLERANCE:g}, got one off by {float(off.max()):.4g}; "
            "normalize them in float32 or better"
        )
    return p


def to_classes(probs: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Return probabilities (N, K) and labels (N,) that fit together."""
    p = to_probs(probs, "probs", "(N, K)")
    return p, to_labels(labels, len(p), p.shape[1])


def to_scores(scores: Array, name: str) -> Tensor:
    """Return one-dimensional scores as a float64 tensor."""
    values = to_double(scores, name)
    if values.dim() != 1:
        raise ValueError(f"{name} must have shape (N,), one score per example, got {tuple(values.shape)}; flatten it")
    return values


def to_logits(logits: Array) -> Tensor:
    """Return logits as a float64 tensor of shape (S, N, K)."""
    values = to_double(logits, "logits")
    if values.dim() not in (2, 3):
        raise ValueError(
            f"logits must have shape (N, K), or (S, N, K) with one slice per sample, got {tuple(values.shape)}; "
            "the logit z of a binary model becomes the two columns [0, z]"
        )
    return values if values.dim() == 3 else values.unsqueeze(0)


def like(values: Tensor, reference: ArrayT) -> ArrayT:
    """Return `values` with the type, the precision (float32 at least) and the device of `reference`."""
    result: Array
    if isinstance(reference, Tensor):
        result = values.to(reference.device, torch.promote_types(reference.dtype, torch.float32))
    else:
        result = values.numpy().astype(np.promote_types(reference.dtype, np.float32))
    return cast(ArrayT, result)
