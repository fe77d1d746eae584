"""Natural steps for a Gaussian's spread: s follows the curvature of the loss within a short training.

In log s the natural gradient of loss + kappa KL is h s^2/kappa + s^2/sigma^2 - 1, where h is the curvature of the mean
loss: a step of SGD changes s by a factor, on a time scale that depends on neither the data nor the model. h s^2 is the
mean of g eps s, which the gradient of rho estimates with noise that hides it: for W weights and T steps of B items the
signal is sqrt(h s^2 B T) of the noise, and h s^2 is 1/W or less. Squared gradients have no such noise, and no known
scale. So the profile of h comes from the squares, and its scale r from sums over all weights,

    h s^2 ~ r (g s)^2,   r = (running mean of sum g eps s) / (running mean of sum (g eps s)^2),

which is as exact as the sums are. Both parts are added to the gradient of rho in backward passes: s^2/sigma^2 - 1 with
the penalty's, h s^2/kappa with the sample's. Accumulation adds them up as it does gradients, and a factor on loss and
penalty (a GradScaler's) is a factor on them. So that clipping the norm of all gradients leaves those of the mean as
they are, rho's are multiplied by 0.01/sqrt(W) (`step_size`), and `param_groups` divides the learning rate by it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify.core.quadratics import Factor
from bayesify.engine import elements, fusion

MEMORY = 0.05  # weight of a backward pass in the running means
LARGEST = 6.0  # bound of h s^2/kappa, whose least value is 0


def pull_spread(posterior: Any, seed: int, grad: Tensor) -> Tensor | None:
    """Return h s^2/kappa times the step size, in units of rho, and add g eps s to the running sums if it is finite.

    None before the first backward pass of a penalty, which says what kappa is.
    """
    step = posterior.step
    if step is None:
        return None
    inverse = 1 / step.grad if step.grad else 0.0  # a penalty that is multiplied by 0 asks for no step
    factor = step.ratio * inverse * inverse / step.kappa if step.kappa else 0.0
    noise, out = _noise_and_step(posterior, seed, grad, factor, step.size * step.grad)
    before = posterior.observed
    assert before is not None
    sums = torch.stack([noise.sum() * inverse, noise.square().sum() * (inverse * inverse)]).to(before)
    before.copy_(torch.where(sums.isfinite().all(), torch.lerp(before, sums, MEMORY), before))
    return out


def _noise_and_step(posterior: Any, seed: int, grad: Tensor, factor: Factor, scale: Factor) -> tuple[Tensor, Tensor]:
    """Return g eps s, and scale min(factor (g s)^2, LARGEST) d rho/d log s."""
    rho, whole = posterior.rho.detach(), grad.contiguous()
    if isinstance(factor, float) and isinstance(scale, float) and fusion.fused(rho, whole):
        noise, out = torch.empty_like(rho), torch.empty_like(rho)
        fusion.run(posterior.formulas.natural, posterior.stream(seed), (whole, rho), (noise, out), (factor, scale))
    else:
        s, unit = posterior.spread_and_unit()
        each = grad.to(s.dtype) * s
        out = each.square().mul_(factor).clamp_(max=LARGEST).mul_(unit).mul_(scale)
        noise = each.mul_(posterior.noise_of(seed))
    if posterior.fixed_row is not None:
        noise[posterior.fixed_row], out[posterior.fixed_row] = 0, 0
    return noise, out


def natural_formula(std: Callable[..., Any], slope: Callable[..., Any]) -> Callable[..., Any]:
    """Return the formula of `_noise_and_step` for one element, for a link s = std(rho)."""

    def natural(i: Any, eps: Any, ins: Any, outs: Any, par: Any) -> None:
        rho = ins[1][i]
        s = std(rho)
        g = ins[0][i] * s
        data, most = par[0] * (g * g), elements.like(LARGEST, rho)
        outs[0][i] = g * eps
        outs[1][i] = par[1] * (most if data > most else data) * (s / slope(rho, s))

    return natural
