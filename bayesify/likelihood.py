"""The likelihood behind a fit: the loss of each example, and the curvature that it has in the model's outputs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.batches import logits_of

Loss = Callable[[Any, Any], Tensor]

FEW_OUTPUTS = 16
"""Up to how many outputs a Gauss-Newton curvature is summed over exactly, a backward pass each."""
DRAWS = 8
"""Otherwise, over how many draws per example."""
MOST_OUTPUTS = 1024
"""Up to how many outputs a loss of unknown form can be differentiated twice."""


class Likelihood:
    """-log p(y|x) of each example, given by the model's output.

    Args:
        loss: A function of (output, target) that returns one value per example; None is cross-entropy.
    """

    def __init__(self, loss: Loss | None) -> None:
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a function of (output, target), got {loss!r}")
        self.loss = loss
        self._takes_logits: bool | None = None

    def losses(self, output: Any, target: Any) -> Tensor:
        """Return one value per example.

        Raises:
            ValueError: The labels do not fit the output, or the loss is of another shape or not finite.
        """
        found = cross_entropy(logits_of(output), target) if self.loss is None else self._call(self.loss, output, target)
        count = len(target) if isinstance(target, Tensor) and target.dim() > 0 else None
        if not isinstance(found, Tensor) or found.dim() != 1 or count not in (None, len(found)):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"loss must return one value per example (reduction='none'), got {got} for {count} targets"
            )
        if not bool(torch.isfinite(found).all()):
            raise ValueError("the loss is not finite; check the data, or train the model with a smaller learning rate")
        return found

    def _call(self, loss: Loss, output: Any, target: Any) -> Tensor:
        """Call a given loss on what it takes: the model's output or, where that is an object, perhaps its logits."""
        if isinstance(output, Tensor) or self._takes_logits:
            return loss(logits_of(output), target)
        try:
            found = loss(output, target)
        except (TypeError, AttributeError):
            found = loss(logits_of(output), target)
            self._takes_logits = True
        return found

    def on_logits(self, logits: Tensor, target: Any) -> Tensor:
        """Return the losses for a tensor of logits, whatever object the model returns them in."""
        if self.loss is None or self._takes_logits:
            return self.losses(logits, target)
        try:
            return self.losses(logits, target)
        except AttributeError:
            return self.losses(SimpleNamespace(logits=logits), target)

    def roots(self, logits: Tensor, target: Any, generator: torch.Generator) -> list[Tensor]:
        """Return vectors s_k per example, of the logits' shape, with sum_k s_k s_k^T = H, the Hessian of the loss.

        Exactly for few outputs, else in expectation.
        """
        logits = logits.detach()
        many = logits[0].numel() > FEW_OUTPUTS
        if self.loss is None:
            cross_entropy(logits, target)
            return softmax_draws(logits, generator) if many else softmax_roots(logits)
        roots = self._hessian_roots(logits, target)
        if not many:
            return [root.view_as(logits) for root in roots.unbind(-1)]
        signs = torch.randint(2, (DRAWS, *roots.shape[::2]), generator=generator).mul_(2).sub_(1).to(roots)
        drawn = torch.einsum("nik,dnk->dni", roots, signs) / DRAWS**0.5
        return [root.view_as(logits) for root in drawn]

    def _hessian_roots(self, logits: Tensor, target: Any) -> Tensor:
        """Return S with S S^T = H for every example, (examples, outputs, outputs), by differentiating twice."""
        count = logits[0].numel()
        if count > MOST_OUTPUTS:
            raise ValueError(
                f"curvature='ggn' differentiates a loss of its own kind twice, for at most {MOST_OUTPUTS} outputs per "
                f"example, got {count}; use curvature='ef', or the default cross-entropy"
            )
        with torch.enable_grad():
            leaf = logits.clone().requires_grad_()
            total = self.on_logits(leaf, target).sum()
            slope = torch.autograd.grad(total, leaf, create_graph=True)[0].flatten(1)
            hessian = logits.new_zeros(len(logits), count, count, dtype=torch.float64)
            for k in range(count if slope.requires_grad else 0):
                row = torch.autograd.grad(slope[:, k].sum(), leaf, retain_graph=True, allow_unused=True)[0]
                if row is not None:
                    hessian[:, k] = row.flatten(1)
        values, vectors = torch.linalg.eigh(hessian)
        if bool((values < -1e-4 * values.abs().amax(-1, keepdim=True)).any()):
            raise ValueError("curvature='ggn' needs a loss that is convex in the model's output; use curvature='ef'")
        roots: Tensor = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return roots.to(logits.dtype)


def cross_entropy(logits: Tensor, target: Any) -> Tensor:
    """Return the cross-entropy of each example, after a look at the labels.

    Raises:
        ValueError: There are no labels, or they do not fit the logits.
    """
    if logits.dim() != 2:
        raise ValueError(
            f"the default loss takes logits of shape (examples, classes), got {tuple(logits.shape)}; "
            "give loss=, a function of (output, target) with one value per example"
        )
    if isinstance(target, np.ndarray):
        target = torch.as_tensor(target, device=logits.device)
    if not isinstance(target, Tensor):
        raise ValueError("the loader gives no labels; yield (inputs, labels), or a dict with 'labels'")
    if target.is_floating_point():
        if target.shape != logits.shape:
            raise ValueError(
                f"labels must be integers, or of the logits' shape {tuple(logits.shape)}, got {target.dtype}"
            )
        return F.cross_entropy(logits, target, reduction="none")
    if target.shape != logits.shape[:1]:
        raise ValueError(f"labels must be of shape {tuple(logits.shape[:1])}, got {tuple(target.shape)}")
    classes = logits.shape[1]
    low, high = (int(target.min()), int(target.max())) if len(target) else (0, 0)
    if low < 0 or high >= classes:
        raise ValueError(f"labels must be in 0..{classes - 1} for {classes} logits, got {low}..{high}")
    return F.cross_entropy(logits, target.long(), reduction="none")


def softmax_roots(logits: Tensor) -> list[Tensor]:
    """Return s_k = sqrt(p_k) (e_k - p), for which sum_k s_k s_k^T = diag(p) - p p^T."""
    p = logits.softmax(-1)
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return [p[:, k : k + 1].sqrt() * (eye[k] - p) for k in range(p.shape[-1])]


def softmax_draws(logits: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return (e_y - p)/sqrt(draws) for labels y drawn from p, whose squares average to diag(p) - p p^T."""
    p = logits.softmax(-1)
    labels = torch.multinomial(p.float().cpu(), DRAWS, replacement=True, generator=generator).to(p.device)
    return [(F.one_hot(y, p.shape[-1]) - p) / DRAWS**0.5 for y in labels.unbind(1)]
