"""What targets must look like for each likelihood; nothing is broadcast or repaired."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.prediction.batches import LABELS, logits_of, split_batch, to_device
from bayesify.prediction.view import views

IGNORED = -100
"""The label of what does not count, as in cross_entropy."""


class LabelPlaces:
    """Put the labels of a run where the model's own loss compares them with its outputs.

    Causal language models of Hugging Face take labels equal to the input_ids and compare logits[:, :-1] with
    labels[:, 1:]. Whether a model does so is found by asking it once for its loss: on the first batch, in whatever
    mode the caller has put the model. Only the labels of mappings are moved; those of (inputs, labels) stay.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.next: bool | None = None
        """Whether an output is about the next label; None until a batch has told."""

    def __call__(self, batch: Any, output: Any) -> Any:
        """Return a batch's labels: of shape (N, T) at the places that its output (N, T, K) is about, else as they are.

        Args:
            batch: The batch as it was read.
            output: What the model returned for it.
        """
        inputs, labels = split_batch(batch)
        if self.next is False or not isinstance(batch, Mapping) or not isinstance(labels, Tensor):
            return labels
        logits = logits_of(output)
        if labels.is_floating_point() or labels.dim() != 2 or logits.shape[:-1] != labels.shape or labels.shape[1] < 2:
            return labels
        moved = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if self.next is None:
            self.next = self._asked(inputs, labels, moved, logits)
        return moved if self.next else labels

    def _asked(self, inputs: Mapping[str, Any], labels: Tensor, moved: Tensor, logits: Tensor) -> bool | None:
        """Return whether the model's own loss is nearer to that of the moved labels; None where none counts."""
        try:
            with views(self.model) as (view,):  # what the model remembers of its calls stays as it is
                own = view(**to_device({**inputs, LABELS: labels}, logits.device))
        except TypeError:  # it takes no labels
            return False
        loss = own.get("loss") if isinstance(own, Mapping) else getattr(own, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return False
        flat = logits.detach().flatten(0, 1).float()
        here, there = (
            F.cross_entropy(flat, y.flatten().to(flat.device), ignore_index=IGNORED) for y in (labels, moved)
        )
        found = (there - loss).abs() < (here - loss).abs()
        return bool(found) if bool(torch.isfinite(here - there + loss)) else None


def same_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Tell whether two shapes are equal, up to a last dimension of one."""
    return shape == wanted or (*shape, 1) == wanted or shape == (*wanted, 1)


def checked(losses: Any, target: Any, *, dims: int | None = None) -> Tensor:
    """Return the losses, if they are finite and as many as the targets (and of so many dimensions).

    Raises:
        ValueError: They are of another shape or not finite.
    """
    count = len(target) if isinstance(target, Tensor) and target.dim() > 0 else None
    fits = isinstance(losses, Tensor) and losses.dim() >= 1 and dims in (None, losses.dim())
    if not fits or count not in (None, len(losses)):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"loss must return one value per example (reduction='none'), got {got} for {count} targets")
    if not bool(torch.isfinite(losses).all()):
        raise ValueError("the loss is not finite; check the data, or train the model with a smaller learning rate")
    found: Tensor = losses
    return found


def as_target(target: Any, outputs: Tensor) -> Tensor:
    """Return targets as a tensor on the outputs' device.

    Raises:
        ValueError: There are none.
    """
    if isinstance(target, np.ndarray):
        return torch.as_tensor(target, device=outputs.device)
    if not isinstance(target, Tensor):
        raise ValueError("the loader gives no labels; yield (inputs, labels), or a dict with 'labels'")
    return target


def values_like(outputs: Tensor, target: Any) -> Tensor:
    """Return floating-point targets of the outputs' shape, up to a last dimension of one.

    Raises:
        ValueError: They are integers, or of another shape: nothing is broadcast.
    """
    values = as_target(target, outputs)
    if not values.is_floating_point():
        raise ValueError(f"targets must be floats, got {values.dtype}; use targets.float()")
    if not same_shape(tuple(values.shape), tuple(outputs.shape)):
        raise ValueError(f"targets must be of shape {tuple(outputs.shape)}, got {tuple(values.shape)}")
    return values.view_as(outputs).to(outputs.dtype)


def classes_last(outputs: Tensor) -> Tensor:
    """Return logits with the classes last: they are the second of four dimensions and more."""
    return outputs.movedim(1, -1) if outputs.dim() >= 4 else outputs


def class_labels(logits: Tensor, target: Any) -> Tensor:
    """Return labels that fit logits (N, ..., K): integers (N, ...), or probabilities of the logits' shape.

    Raises:
        ValueError: There are none, or they do not fit.
    """
    labels = as_target(target, logits)
    if logits.dim() < 2 or logits.shape[-1] < 2:
        raise ValueError(
            f"'classification' takes at least two logits per item, got outputs of shape {tuple(logits.shape)}; "
            "likelihood='multilabel' takes one logit per label, likelihood='regression' one output per target"
        )
    if labels.is_floating_point():
        if labels.dim() >= 4:
            labels = labels.movedim(1, -1)
        if labels.shape != logits.shape:
            raise ValueError(
                f"labels must be integers, or of the logits' shape {tuple(logits.shape)}, got {labels.dtype}"
            )
        return labels
    if labels.shape != logits.shape[:-1]:
        fix = "; a column of labels needs squeeze(1)" if same_shape(labels.shape, logits.shape[:-1]) else ""
        raise ValueError(f"labels must be of shape {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}{fix}")
    classes, counted = logits.shape[-1], labels if logits.dim() == 2 else labels[labels != IGNORED]
    low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels must be in 0..{classes - 1} for {classes} logits, got {low}..{high}; number the classes from 0, "
            "or give the model more outputs"
        )
    return labels.long()


def mean_and_log_var(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Split the last dimension into means and log variances.

    Raises:
        ValueError: Its size is odd.
    """
    if outputs.dim() < 2 or outputs.shape[-1] % 2:
        raise ValueError(
            "'heteroscedastic' needs outputs of an even last dimension, the means and then their log variances, "
            f"got shape {tuple(outputs.shape)}"
        )
    mean, log_var = outputs.chunk(2, -1)
    return mean, log_var
