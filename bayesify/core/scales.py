"""Scales that need no choice: a prior relative to each tensor, and a temperature that bounds what the noise costs.

An absolute prior scale fits no two tensors, and a sum over millions of weights drowns the loss of a few hundred data.
So the prior's scale is each tensor's own size, and the penalty is tempered by the number of weights.
"""

import math

from torch import Tensor

RELATIVE_SIG = 1.0  # prior_sig over a tensor's root mean square
FLOOR = 0.1  # over sqrt(fan-in): the scale of a tensor that starts at zero, as biases and LoRA's B do
START = 0.003  # a spread's start, over prior_sig
TOLERANCE = 0.001  # nats by which the posterior's noise may raise the training loss
PULL = 0.1  # nats that going e times further from the prior mean must gain, beyond SHARE
SHARE = 0.1  # of the prior's scale: how far each weight may go before the pull's logarithm begins
LEAST_CHANGE = 0.01  # of a spread, relative to its start, below which it was not trained
RATE = 0.05  # learning rate of a spread that takes natural steps: its largest relative growth in a step


def relative_sig(param: Tensor, fan_in: int) -> float:
    """Return the prior scale of a tensor: its root mean square, but at least FLOOR / sqrt(fan_in).

    sigma = RELATIVE_SIG * max(sqrt(mean theta^2), FLOOR / sqrt(fan_in))
    """
    values = param.detach()
    rms = float(values.float().square().mean().sqrt()) if values.numel() else 0.0
    return RELATIVE_SIG * max(rms, FLOOR / math.sqrt(max(fan_in, 1)))


def nearest(weights: int) -> float:
    """Return D0 = SHARE^2 W, but at least 1, of the pull c/2 log(1 + D/D0).

    Far below 1 the prior mean itself is an optimum of a model of few weights.
    """
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
