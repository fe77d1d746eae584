"""The pull to the prior mean, without a number to choose: the further a model is, the more the next step must gain.

A quadratic penalty is right for one size of steps, one model and one number of data, and nobody knows it beforehand. So
the distance from the prior mean counts by its logarithm, c/2 log D with D = sum ((m - theta0)/sigma)^2: what a prior is
whose common scale is unknown. Its gradient is

    c (m - theta0)/(sigma^2 D),

and training ends where going e times further from the pretrained weights would gain less than c nats. Near the start
the logarithm would hold the model for ever. There the force gives way: with G the running mean of
-<gradient, m - theta0>, the gain per e-fold that the gradients promise, c is at most SHARE times the largest G so far.
It acts at the step of an optimizer, on gradients that are accumulated, unscaled and averaged over processes; the
penalty, which has a closed form, is without it.
"""

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.core.changed import is_new, mark
from bayesify.core.distributed import part_of
from bayesify.core.quadratics import PULLS, by_center, deviation, wide
from bayesify.engine import elements, fusion

if TYPE_CHECKING:
    from bayesify.core.posterior import Posterior
    from bayesify.core.reading import Scope

MEMORY = 0.05  # weight of a step in the running mean of the gain
SHARE = 0.75  # of the largest gain so far, which the pull never exceeds
NEAREST = 1e-6  # of the mean squared relative distance: closer by, the pull is that of a quadratic


@torch.no_grad()
def pull(scope: "Scope", own: Collection[int]) -> None:
    """Add the pull to the gradients that an optimizer is about to use, in place.

    Args:
        scope: The model's.
        own: The ids of the optimizer's parameters.
    """
    strength = scope.method.pull_strength
    if not strength or not scope.penalty_scale:
        return
    ready = [p for p in scope.posteriors if not p.flat and is_new(p.original.grad) and id(p.original) in own]
    if not ready:
        return
    observed = [_observed(part_of(p)) for p in ready]
    sums = torch.stack([o.to(observed[0]) for o in observed]).sum(0)  # a model may lie on several devices
    if ready[0].layout is not None:
        sums = ready[0].layout.summed(sums)
    now, distance = (float(v) for v in sums.cpu())
    if not math.isfinite(now + distance):
        return  # what such a step does to the model is the optimizer's affair; the run's numbers stay what they were
    gain = ready[0].gain + MEMORY * (now - ready[0].gain)
    most = max(ready[0].most_gain, gain)
    nearest = NEAREST * sum(p.original.numel() for p in ready)
    force = min(strength, SHARE * most) / max(distance, nearest)
    for posterior in ready:
        posterior.gain, posterior.most_gain = gain, most
        _add(part_of(posterior), force / posterior.prior_sig**2)
        mark(posterior.original.grad)


def _observed(posterior: "Posterior") -> Tensor:
    """Return -<gradient, m - theta0> and |m - theta0|^2/sigma^2 of one posterior, in one pass where that can be."""
    mean, grad, center = posterior.original.detach(), posterior.original.grad, posterior.center
    assert grad is not None
    if fusion.fused(grad, mean, *center.tensors):
        gain, squares, _ = fusion.total(GAINS[center.given], (grad, mean, *center.tensors), center.numbers)
        return torch.tensor([gain, squares / posterior.prior_sig**2], dtype=torch.float64)
    away = deviation(mean, posterior)
    sums = -(grad.to(away.dtype) * away).sum(dtype=wide(away)), away.square().sum(dtype=wide(away))
    return torch.stack([sums[0], sums[1] / posterior.prior_sig**2])


def _add(posterior: "Posterior", factor: float) -> None:
    """Add factor (m - theta0) to the gradient."""
    mean, grad, center = posterior.original.detach(), posterior.original.grad, posterior.center
    assert grad is not None
    if fusion.fused(grad, mean, *center.tensors):
        fusion.run_plain(PULLS[center.given], (grad, mean, *center.tensors), (grad,), (factor, *center.numbers))
        torch.autograd.graph.increment_version(grad)
    else:
        grad.add_(deviation(mean, posterior).to(grad.dtype), alpha=factor)


def _gain(center: Callable[..., Any]) -> Callable[..., Any]:
    """Return -g (m - theta0) and (m - theta0)^2 of one element."""

    def gain(i: Any, ins: Any, par: Any) -> Any:
        away = ins[1][i] - center(i, ins, par)
        return -ins[0][i] * away, away * away, elements.ZERO

    return gain


GAINS = by_center(_gain)
