"""Roots of a loss's Hessian in the model's outputs: s_k with sum_k s_k s_k^T = H for every example.

Exactly for few outputs, a root per output; else draws whose squares are H in expectation.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

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
