"""The Gaussian prior's term and its gradient, as formulas of elements; energies as weighted sums of formulas."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.core.stored import LOW_PRECISION
from bayesify.engine.dispatch import run, total, transformed
from bayesify.engine.writing import Formula, several

Posterior = Any  # bayesify.core.posterior.Posterior, which imports this file

Factor = float | Tensor


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a posterior's own state: the parameter's, but never below float32."""
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def deviation(mean: Tensor, posterior: Posterior) -> Tensor:
    """Return m - theta0 in the state's dtype: a new tensor, or `mean` itself where theta0 is zero."""
    mean = mean.to(state_dtype(mean))
    return mean if posterior.zero_prior else mean - posterior.prior_center


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over a tensor: float64 on a CPU; elsewhere the tensor's, as MPS has no float64."""
    return torch.float64 if tensor.device.type == "cpu" or tensor.dtype == torch.float64 else torch.float32


def host(coef: Tensor) -> Factor:
    """Return a CPU scalar as a float; leave one on an accelerator there, so that nothing waits for it."""
    return float(coef) if coef.device.type == "cpu" else coef


class Part(NamedTuple):
    """Weighted sums of what a formula returns over its inputs, tensors and numbers."""

    formula: Formula
    inputs: tuple[Any, ...]
    weights: tuple[float, ...]


class Energy(NamedTuple):
    """A penalty's sum: parts and a constant. The first sum of the first part is ((m - theta0)/unit)^2.

    Attributes:
        parts: The sums.
        constant: What is added.
        unit: The scale of the first sum.
    """

    parts: tuple[Part, ...]
    constant: float = 0.0
    unit: float = 1.0


def summed(part: Part) -> Tensor:
    """Return the sums of a part without their weights, differentiable where gradients are wanted."""
    inputs = [x for x in part.inputs if isinstance(x, Tensor)]
    if transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        found = several(part.formula(*part.inputs))
        return torch.stack([x.sum(dtype=wide(x)) for x in found])
    return total(part.formula, part.inputs).to(wide(inputs[0]))


def evaluated(energy: Energy) -> Tensor:
    """Return an energy as a 0-dim tensor."""
    terms = [s * w for part in energy.parts for s, w in zip(summed(part), part.weights, strict=True)]
    found: Tensor = sum(terms[1:], terms[0]) + energy.constant
    return found


def scaled(tensors: tuple[Any, ...], *factors: Factor) -> tuple[Any, ...]:
    """Return tensors in a precision that holds what they are multiplied with: float64 for numbers beyond float32."""
    if all(isinstance(f, Tensor) or f == 0 or 1e-15 < abs(f) < 1e15 for f in factors):
        return tensors
    return tuple(x.to(wide(x)) if isinstance(x, Tensor) else x for x in tensors)


def squares(m: Any, m0: Any, factor: Any) -> Any:
    """Return (factor (m - theta0))^2."""
    away = (m - m0) * factor
    return away * away


def pulled(m: Any, m0: Any, factor: Any) -> Any:
    """Return factor (m - theta0)."""
    return factor * (m - m0)


def quadratic_terms(mean: Tensor, posterior: Posterior, precision: float, scale: float) -> Energy:
    """Return scale * precision/2 |m - theta0|^2."""
    factor = math.sqrt(scale) * math.sqrt(precision / 2)
    inputs = (*scaled((mean, posterior.center), factor), factor)
    return Energy((Part(squares, inputs, (1.0,)),), unit=1 / factor if factor else math.inf)


def quadratic_energy(mean: Tensor, posterior: Posterior, precision: float, scale: float) -> Tensor:
    """Return scale * precision/2 |m - theta0|^2, or 0 under a flat prior."""
    if posterior.flat:
        return mean.new_zeros((), dtype=wide(mean))
    return evaluated(quadratic_terms(mean, posterior, precision, scale))


def quadratic_pull(mean: Tensor, posterior: Posterior, factor: Factor) -> Tensor | None:
    """Return factor (m - theta0), or None under a flat prior."""
    if posterior.flat:
        return None
    out = torch.empty_like(mean, requires_grad=False)
    run(pulled, None, (*scaled((mean.detach(), posterior.center), factor), factor), (out,))
    return out
