"""The Gaussian prior's term and its gradient: scale * precision/2 |m - theta0|^2, without overflow or lost digits."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from bayesify.core.stored import LOW_PRECISION
from bayesify.engine import fusion

if TYPE_CHECKING:
    from bayesify.core.posterior import Posterior

ROW = 1024  # elements that are summed in float32
Factor = float | Tensor


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a posterior's own state: the parameter's, but never below float32."""
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def deviation(mean: Tensor, posterior: "Posterior") -> Tensor:
    """Return m - theta0 in the state's dtype: a new tensor, or `mean` itself where theta0 is zero."""
    mean = mean.to(state_dtype(mean))
    return mean if posterior.zero_prior else mean - posterior.prior_center


def axpy_(out: Tensor, tensor: Tensor, factor: Factor) -> Tensor:
    """Add factor * tensor in place, finite wherever the exact product is, also for factors beyond float32."""
    if isinstance(factor, Tensor):
        return out.add_(tensor * factor)
    if 1e-30 < abs(factor) < 1e30 or tensor.dtype == torch.float64:
        return out.add_(tensor, alpha=factor)
    return out.add_((tensor.cpu().double() * factor).to(out))


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over a tensor: float64 on a CPU; elsewhere the tensor's, as MPS has no float64."""
    return torch.float64 if tensor.device.type == "cpu" or tensor.dtype == torch.float64 else torch.float32


def sum_of_squares(tensor: Tensor, factor: float) -> Tensor:
    """Return sum (factor * x)^2 as a differentiable 0-dim tensor, without overflow on the way."""
    dtype = wide(tensor)
    if tensor.dtype == torch.float64 or not 1e-15 < factor < 1e15:
        return (tensor.to(dtype) * factor).square().sum()
    if torch.is_grad_enabled() and tensor.requires_grad:
        return (tensor * factor).square().sum(dtype=dtype)
    return square_norm(tensor) * factor**2


def square_norm(tensor: Tensor) -> Tensor:
    """Return sum x^2; by rows, because a float32 norm of ten million elements is off in the fourth digit."""
    if tensor.numel() < ROW:
        return tensor.to(wide(tensor)).square().sum()
    flat = tensor.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    return rows.to(wide(tensor)).square().sum() + flat[whole:].to(wide(tensor)).square().sum()


def quadratic_energy(mean: Tensor, posterior: "Posterior", precision: float, scale: float) -> Tensor:
    """Return scale * precision/2 |m - theta0|^2, or 0 under a flat prior."""
    if posterior.flat:
        return mean.new_zeros((), dtype=wide(mean))
    factor = math.sqrt(scale) * math.sqrt(precision / 2)
    wants_grad = torch.is_grad_enabled() and mean.requires_grad
    if not wants_grad and 1e-15 < factor < 1e15 and fusion.fused(mean, *posterior.center.tensors):
        squares, _, _ = fusion.total(
            SQUARES[posterior.center.given], (mean, *posterior.center.tensors), posterior.center.numbers
        )
        return mean.new_tensor(squares * factor**2, dtype=torch.float64)
    return sum_of_squares(deviation(mean, posterior), factor)


def quadratic_pull(mean: Tensor, posterior: "Posterior", factor: Factor) -> Tensor | None:
    """Return factor (m - theta0), or None under a flat prior."""
    if posterior.flat:
        return None
    away = deviation(mean.detach(), posterior)
    if isinstance(factor, float) and factor and not ordinary(factor):
        return axpy_(torch.zeros_like(away), away, factor).to(mean.dtype)
    return (away * factor if posterior.zero_prior else away.mul_(factor)).to(mean.dtype)


def host(coef: Tensor) -> Factor:
    """Return a CPU scalar as a float; leave one on an accelerator there, so that nothing waits for it."""
    return float(coef) if coef.device.type == "cpu" else coef


def ordinary(factor: Factor) -> TypeGuard[float]:
    """Tell whether float32 holds a factor, with room for what it is multiplied with."""
    return isinstance(factor, float) and 1e-30 < abs(factor) < 1e30


# -- formulas of one element; the prior mean is an array, the last of `ins`, or a number, the last of `par` -----------


class Center(NamedTuple):
    """The prior mean for such a formula."""

    given: bool
    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]


def constant_center(i: Any, ins: Any, par: Any) -> Any:
    """Return theta0 where it is a constant."""
    return par[-1]


def given_center(i: Any, ins: Any, par: Any) -> Any:
    """Return theta0 where it is an array."""
    return ins[-1][i]


def by_center(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """Make a formula for either kind of prior mean, to be chosen by `Center.given`."""
    return make(constant_center), make(given_center)


def _square(center: Callable[..., Any]) -> Callable[..., Any]:
    """Return (m - theta0)^2."""

    def square(i: Any, ins: Any, par: Any) -> Any:
        away = ins[0][i] - center(i, ins, par)
        return away * away, NOTHING, NOTHING

    return square


NOTHING = np.float32(0)
SQUARES = by_center(_square)
