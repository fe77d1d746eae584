"""The Gaussian prior of one parameter: its scale, its term in the penalty, and the gradient of that term.

An absolute prior scale fits no two tensors, and a sum over millions of weights drowns the loss of a few hundred data.
So the prior's scale is each tensor's own size, and the penalty is tempered by the number of weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.engine.dispatch import Job, run_all, transformed
from bayesify.engine.writing import Formula, several

LOW_PRECISION = (torch.float16, torch.bfloat16)
RELATIVE_SIG = 1.0  # prior_sig over a tensor's root mean square
FLOOR = 0.1  # over sqrt(fan-in): the scale of a tensor that starts at zero, as biases and LoRA's B do
START = 0.003  # a spread's start, over prior_sig
TOLERANCE = 0.001  # nats by which the posterior's noise may raise the training loss
PULL = 0.1  # nats that going e times further from the prior mean must gain, beyond SHARE
SHARE = 0.1  # of the prior's scale: how far each weight may go before the pull's logarithm begins
LEAST_CHANGE = 0.01  # of a spread, relative to its start, below which it was not trained
RATE = 0.05  # learning rate of a spread that takes natural steps: its largest relative growth in a step


def relative_sig(param: Tensor, fan_in: int) -> float:
    """Return the prior scale of a tensor, RELATIVE_SIG * max(sqrt(mean theta^2), FLOOR / sqrt(fan_in))."""
    values = param.detach()
    rms = float(values.float().square().mean().sqrt()) if values.numel() else 0.0
    rms = rms if math.isfinite(rms) else 0.0  # weights that diverged may have a prior mean from elsewhere
    return RELATIVE_SIG * max(rms, FLOOR / math.sqrt(max(fan_in, 1)))


def nearest(weights: int) -> float:
    """Return D0 = SHARE^2 W of the pull c/2 log(1 + D/D0), but at least 1: else few weights stay at the prior mean."""
    return max(SHARE**2 * weights, 1.0)


def step_size(weights: int) -> float:
    """Return what natural gradients of the spread of W weights are multiplied by, so that their norm is small."""
    return 0.01 / math.sqrt(max(weights, 1))


def tempered_scale(num_data: float, weights: int) -> float:
    """Return the factor kappa between the posteriors' energies and the penalty on a mean loss.

    kappa = min(1/N, 2 TOLERANCE / W), for N data and W weights. Where loss + kappa KL is least, an element whose
    spread the data decides has curvature times variance h s^2 = kappa, so that the noise of all raises the loss by
    1/2 sum h s^2 <= kappa W/2 <= TOLERANCE nats, whatever N and W are. 1/N would be the posterior of Bayes' rule;
    it is reached with enough data, N >= W / (2 TOLERANCE), and never exceeded.
    """
    return min(1 / num_data, 2 * TOLERANCE / weights)


Posterior = Any  # bayesify.core.posterior.Posterior, which imports this file


@dataclass(frozen=True)
class Prior:
    """The Gaussian prior N(mean, sig^2) of one parameter."""

    mean: Tensor  # theta0, of the parameter's shape, or 0-dim for a constant (a zero mean costs no memory)
    sig: float
    is_bias: bool = False  # methods may treat biases in another way
    relative: bool = False  # whether sig was chosen by the parameter's own size

    def __post_init__(self) -> None:
        if type(self.sig) not in (int, float) or not 0 < self.sig < math.inf:
            raise ValueError(f"prior_sig must be a positive number, got {self.sig!r}")

    @property
    def init_sig(self) -> float:
        """Where a spread starts that is trained."""
        return START * self.sig if self.relative else min(1e-3, self.sig / 10)


Factor = float | Tensor


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a posterior's own state: the parameter's, but never below float32."""
    return torch.float32 if tensor.dtype in LOW_PRECISION else tensor.dtype


def deviation(mean: Tensor, posterior: Posterior) -> Tensor:
    """Return m - theta0 in the state's dtype."""
    away: Tensor = mean.to(state_dtype(mean)) - posterior.prior_center
    return away


def following(theta: Tensor, original: Tensor) -> Tensor:
    """Return theta, whose gradient passes to the parameter as it is."""
    wanted = torch.is_grad_enabled() and original.requires_grad
    return theta + (original - original.detach()) if wanted else theta


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
    """A penalty's sum: parts and a constant. The first sum of the first part is ((m - theta0)/unit)^2."""

    parts: tuple[Part, ...]
    constant: float = 0.0
    unit: float = 1.0


def sums(parts: Sequence[Part]) -> Tensor:
    """Return the sums of parts without their weights, a row for each; differentiable where gradients are wanted."""
    inputs = [x for part in parts for x in part.inputs if isinstance(x, Tensor)]
    if transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        every = [several(part.formula(*part.inputs)) for part in parts]
        return torch.stack([torch.stack([x.sum(dtype=wide(x)) for x in found]) for found in every])
    rows = run_all([Job(part.formula, None, part.inputs) for part in parts])
    assert rows is not None
    return rows.to(wide(inputs[0]))


def evaluated(energy: Energy) -> Tensor:
    """Return an energy as a 0-dim tensor."""
    terms = [s * w for part in energy.parts for s, w in zip(sums([part])[0], part.weights, strict=True)]
    found: Tensor = torch.stack(terms).sum() + energy.constant
    return found


def has_moved(std: Tensor, start: float) -> bool:
    """Return whether a spread is no longer where it started."""
    return not bool(((std / start - 1).abs() < LEAST_CHANGE).all())


def scaled(tensors: tuple[Any, ...], *factors: Factor) -> tuple[Any, ...]:
    """Return tensors in a precision that holds what they are multiplied with: float64 for numbers beyond float32."""
    if all(isinstance(f, Tensor) or f == 0 or 1e-15 < abs(f) < 1e15 for f in factors):
        return tensors
    return tuple(x.to(wide(x)) if isinstance(x, Tensor) else x for x in tensors)


def squares(m: Any, m0: Any, factor: Any) -> Any:
    """Return (factor (m - theta0))^2."""
    away = (m - m0) * factor
    return away * away


def pulled(m: Any, m0: Any, coef: Any, pull: Any, precision: Any, inverse: Any) -> Any:
    """Return (coef precision + pull/sigma^2) (m - theta0)."""
    return (coef * precision + pull * inverse) * (m - m0)


def quadratic_terms(mean: Tensor, posterior: Posterior, precision: float, scale: float) -> Energy:
    """Return scale * precision/2 |m - theta0|^2."""
    factor = math.sqrt(scale) * math.sqrt(precision / 2)
    inputs = (*scaled((mean, posterior.center), factor), factor)
    return Energy((Part(squares, inputs, (1.0,)),), unit=1 / factor if factor else math.inf)
