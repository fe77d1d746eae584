"""What likelihoods read: labels at their places, targets of the right shape, and roots of a loss's Hessian.

Nothing is broadcast or repaired. Roots s_k, with sum_k s_k s_k^T = H for every example, are exact for few outputs, a
root per output, else draws whose squares are H in expectation.
"""

from collections.abc import Callable, Mapping
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


def classes_at(outputs: Tensor, labels: Any, *, last: bool) -> int:
    """Return the dimension of the classes: the second of four and more, of three the one that the labels lack.

    Args:
        outputs: (N, K), (N, T, K), (N, K, L) or (N, K, H, W, ...).
        labels: Those of the batch, or None.
        last: Whether the classes of three dimensions are known to be the last.

    Raises:
        ValueError: It cannot be known.
    """
    if outputs.dim() != 3 or last:
        return 1 if outputs.dim() >= 4 else -1
    shape = tuple(labels.shape) if isinstance(labels, (Tensor, np.ndarray)) else None
    fits = [d for d in (1, 2) if shape == (*outputs.shape[:d], *outputs.shape[d + 1 :])]
    if len(fits) == 1 or (shape is not None and not fits):
        return fits[0] if fits else -1  # labels that fit neither have an error of their own
    raise ValueError(
        f"outputs of shape {tuple(outputs.shape)} may have their classes second, as Conv1d gives them, or last, as "
        "token classifiers do, and the labels do not tell; give task='tokens' if they are last, else let the model "
        "return outputs.movedim(1, -1)"
    )


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


FEW_OUTPUTS = 16
"""Up to how many outputs a Gauss-Newton curvature is summed over exactly, a backward pass each."""
DRAWS = 8
"""Otherwise, over how many draws per example."""
MOST_OUTPUTS = 1024
"""Up to how many outputs a loss of unknown form can be differentiated twice."""


def along_axes(scale: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return roots of a diagonal H = diag(scale^2): scale_k e_k, or random signs times the scale over sqrt(draws)."""
    count = scale[0].numel()
    if count <= FEW_OUTPUTS:
        eye = torch.eye(count, dtype=scale.dtype, device=scale.device)
        return [(scale.flatten(1) * eye[k]).view_as(scale) for k in range(count)]
    return [scale * signs / DRAWS**0.5 for signs in _signs((DRAWS, *scale.shape), scale, generator)]


def by_signs(roots: Tensor, outputs: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Turn S with S S^T = H, (examples, outputs, outputs), into its columns, or into S times random signs."""
    if outputs[0].numel() <= FEW_OUTPUTS:
        return [root.view_as(outputs) for root in roots.unbind(-1)]
    signs = _signs((DRAWS, *roots.shape[::2]), roots, generator)
    return [root.view_as(outputs) for root in torch.einsum("nik,dnk->dni", roots, signs) / DRAWS**0.5]


def softmax_roots(logits: Tensor, counts: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return roots of the cross-entropy's Hessian, diag(p) - p p^T at every position.

    Exactly, sqrt(p_k) (e_k - p) at one position each; else (e_y - p)/sqrt(draws) with labels y drawn from p at every
    position.

    Args:
        logits: (examples, ..., classes).
        counts: 1 for positions that count, else 0, (examples, ...).
        generator: Where the draws come from.
    """
    p, classes = logits.softmax(-1), logits.shape[-1]
    positions = logits[0].numel() // classes
    if logits[0].numel() <= FEW_OUTPUTS:
        eye = torch.eye(classes, dtype=p.dtype, device=p.device)
        only = torch.eye(positions, dtype=p.dtype, device=p.device).view(positions, *p.shape[1:-1])
        return [
            (p[..., k].sqrt() * counts * here).unsqueeze(-1) * (eye[k] - p) for here in only for k in range(classes)
        ]
    drawn = torch.multinomial(p.flatten(0, -2).float().cpu(), DRAWS, replacement=True, generator=generator)
    labels = drawn.to(p.device).view(*p.shape[:-1], DRAWS)
    return [(F.one_hot(y, classes) - p) * counts.unsqueeze(-1) / DRAWS**0.5 for y in labels.unbind(-1)]


def hessian_roots(losses: Callable[[Tensor], Tensor], outputs: Tensor) -> Tensor:
    """Return S with S S^T = H for every example, (examples, outputs, outputs), by differentiating twice.

    Args:
        losses: A function of the outputs that returns one value per example.
        outputs: (examples, ...), without a graph.

    Raises:
        ValueError: There are too many outputs, or the loss is not convex in them.
    """
    count = outputs[0].numel()
    if count > MOST_OUTPUTS:
        raise ValueError(
            f"curvature='ggn' differentiates a loss of its own kind twice, for at most {MOST_OUTPUTS} outputs per "
            f"example, got {count}; use curvature='ef', or a likelihood by name"
        )
    with torch.enable_grad():
        leaf = outputs.clone().requires_grad_()
        slope = torch.autograd.grad(losses(leaf).sum(), leaf, create_graph=True)[0].flatten(1)
        hessian = torch.zeros(len(outputs), count, count, dtype=torch.float64, device="cpu")
        for k in range(count if slope.requires_grad else 0):
            row = torch.autograd.grad(slope[:, k].sum(), leaf, retain_graph=True, allow_unused=True)[0]
            if row is not None:
                hessian[:, k] = row.flatten(1)
    values, vectors = torch.linalg.eigh(hessian)
    if bool((values < -1e-4 * values.abs().amax(-1, keepdim=True)).any()):
        raise ValueError("curvature='ggn' needs a loss that is convex in the model's output; use curvature='ef'")
    roots: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return roots.to(outputs)


def _signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator).mul_(2).sub_(1).to(like)
