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

import torch
from torch import Tensor

from bayesify.core.posterior import Posterior
from bayesify.engine.writing import Formula

MEMORY = 0.05  # weight of a backward pass in the running means
LARGEST = 6.0  # bound of h s^2/kappa, whose least value is 0


def pull_spread(posterior: Posterior, formula: Formula, seed: int, grad: Tensor, rho: Tensor) -> Tensor | None:
    """Return h s^2/kappa times the step size, in units of rho, and add g eps s to the running sums if it is finite.

    None before the first backward pass of a penalty, which says what kappa is.
    """
    step = posterior.step
    if step is None:
        return None
    inverse = 1 / step.grad if isinstance(step.grad, Tensor) or step.grad else 0.0  # times 0 asks for no step
    factor = step.ratio * inverse * inverse / step.kappa if step.kappa else 0.0
    out = torch.empty_like(rho)
    seen = posterior.with_noise(formula, seed, (grad, rho, factor, step.size * step.grad), (out,))
    assert seen is not None
    if posterior.fixed_row is not None:
        out[posterior.fixed_row] = 0
    before = posterior.observed
    assert before is not None
    sums = torch.stack([seen[0] * inverse, seen[1] * (inverse * inverse)]).to(before)
    before.copy_(torch.where(sums.isfinite().all(), torch.lerp(before, sums, MEMORY), before))
    return out
