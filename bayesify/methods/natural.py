"""Natural steps for a Gaussian's spread: s follows the curvature of the loss within a short training.

In log s the natural gradient of loss + kappa KL is (h s^2)/kappa + s^2/sigma^2 - 1, where h is the curvature of the
mean loss: a step of SGD changes s by a factor, on a time scale that depends on neither the data nor the model.
h s^2 = E[g eps s] is what the gradient of rho estimates, but with noise that hides it: for W weights and T steps of B
items the signal is sqrt(h s^2 B T) of the noise, and h s^2 is 1/W or less. Squared gradients have no such noise, and no
known scale. So the profile of h comes from the squares, and its scale r from the sum over all weights of the former,

    h s^2 ~ r (g s)^2,   r = (running mean of sum g eps s) / (running mean of sum (g s)^2),

which is as exact as the sum is. Everything is read from the gradients that an optimizer is about to use, after
accumulation and averaging over processes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from bayesify.core.changed import is_new, mark
from bayesify.core.distributed import part_of
from bayesify.engine import elements, fusion

if TYPE_CHECKING:
    from bayesify.methods.vi import VIPosterior

RATE = 0.05  # learning rate of the spread: the largest relative growth of s in a step
MEMORY = 0.05  # weight of a step in the running means
LARGEST = 5.0  # the natural gradient's bound; its least value is -1


@torch.no_grad()
def natural_gradients(posteriors: Sequence["VIPosterior"]) -> None:
    """Replace the gradients of rho by natural ones, in place, just before an optimizer's step."""
    ready = [p for p in posteriors if p.penalty_scale and not p.flat and is_new(p.rho.grad)]
    ready = [p for p in ready if p.original.grad is not None]
    if not ready:
        return
    observed = [torch.stack(_observed(part_of(p))) for p in ready]
    sums = torch.stack([o.to(observed[0]) for o in observed])  # a model may lie on several devices
    if ready[0].layout is not None:
        sums = ready[0].layout.summed(sums)
    for posterior, (cost, power) in zip(ready, sums, strict=True):
        posterior.cost.lerp_(cost.to(posterior.cost), MEMORY)
        posterior.power.lerp_(power.to(posterior.power), MEMORY)
    total = sum(float(p.power) for p in ready)
    scale = max(sum(float(p.cost) for p in ready), 0.0) / total if total > 0 else 0.0
    for posterior in ready:
        _replace(part_of(posterior), scale)
        mark(posterior.rho.grad)


class Terms(NamedTuple):
    """What a natural step is made of, element by element and in units of log s.

    Attributes:
        unit: d rho / d log s.
        prior: s^2/sigma^2 - 1.
        square: (g s)^2, where g is the gradient of the loss alone.
    """

    unit: Tensor
    prior: Tensor
    square: Tensor


def _terms(posterior: "VIPosterior") -> Terms:
    """Compute the terms of one posterior from its gradients."""
    s, unit = posterior.spread_and_unit()
    grad = posterior.original.grad
    assert grad is not None
    pull = (posterior.original - posterior.prior_center) * (posterior.penalty_scale * posterior.precision)
    return Terms(
        unit=unit,
        prior=s.square().mul_(posterior.precision).sub_(1),
        square=(grad - pull).to(s.dtype).mul_(s).square_(),
    )


def _observed(posterior: "VIPosterior") -> tuple[Tensor, Tensor]:
    """Return this step's cost of the noise, sum g eps s, and its power, sum (g s)^2: in one pass where that can be."""
    center, ins, dtype = posterior.center, _tensors(posterior), posterior.cost.dtype
    if posterior.fixed_row is None and fusion.fused(*ins):
        numbers = (*_numbers(posterior), *center.numbers)
        sums = fusion.total(posterior.formulas.observe[center.given], ins, numbers)
        return torch.tensor(sums[0], dtype=dtype), torch.tensor(sums[1], dtype=dtype)
    terms, grad = _terms(posterior), posterior.rho.grad
    assert grad is not None
    cost = terms.unit.mul_(grad).sub_(terms.prior, alpha=posterior.penalty_scale)
    if posterior.fixed_row is not None:
        cost[posterior.fixed_row], terms.square[posterior.fixed_row] = 0, 0
    return cost.sum(dtype=dtype), terms.square.sum(dtype=dtype)


def _replace(posterior: "VIPosterior", scale: float) -> None:
    """Write the natural gradient, r (g s)^2/kappa + s^2/sigma^2 - 1, bounded."""
    grad, center, ins = posterior.rho.grad, posterior.center, _tensors(posterior)
    assert grad is not None
    if posterior.fixed_row is None and fusion.fused(*ins):
        numbers = (*_numbers(posterior), scale / posterior.penalty_scale, *center.numbers)
        fusion.run_plain(posterior.formulas.natural[center.given], ins, (grad,), numbers)
        torch.autograd.graph.increment_version(grad)
        return
    terms = _terms(posterior)
    natural = terms.square.mul_(scale / posterior.penalty_scale).add_(terms.prior).clamp_(max=LARGEST)
    grad.copy_(natural.mul_(terms.unit))
    if posterior.fixed_row is not None:
        grad[posterior.fixed_row] = 0


def _tensors(posterior: "VIPosterior") -> tuple[Tensor, ...]:
    """Return what the formulas of one element read: the gradients of rho and m, rho, m and a prior mean."""
    grads = posterior.rho.grad, posterior.original.grad
    assert grads[0] is not None
    assert grads[1] is not None
    return (grads[0], grads[1], posterior.rho, posterior.original, *posterior.center.tensors)


def _numbers(posterior: "VIPosterior") -> tuple[float, float]:
    return posterior.penalty_scale, posterior.precision


def natural_formulas(std: Callable[..., Any], slope: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the makers of the formulas of `_observed` and `_replace` for one element, for a link s = std(rho).

    The numbers are kappa and 1/sigma^2, for the latter r/kappa too, and the prior mean where it is one.
    """

    def make_observe(center: Callable[..., Any]) -> Callable[..., Any]:
        def observe(i: Any, ins: Any, par: Any) -> Any:
            rho = ins[2][i]
            s = std(rho)
            g = (ins[1][i] - par[0] * par[1] * (ins[3][i] - center(i, ins, par))) * s
            return ins[0][i] * s / slope(rho, s) - par[0] * (s * s * par[1] - elements.ONE), g * g, elements.ZERO

        return observe

    def make_natural(center: Callable[..., Any]) -> Callable[..., Any]:
        def natural(i: Any, noise: Any, ins: Any, outs: Any, par: Any) -> None:
            rho = ins[2][i]
            s = std(rho)
            g = (ins[1][i] - par[0] * par[1] * (ins[3][i] - center(i, ins, par))) * s
            step = par[2] * (g * g) + s * s * par[1] - elements.ONE
            most = elements.like(LARGEST, rho)
            outs[0][i] = (most if step > most else step) * (s / slope(rho, s))

        return natural

    return make_observe, make_natural
