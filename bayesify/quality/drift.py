"""Has the incoming data changed? A test for a stream of p-values, whose false-alarm rate holds over all time."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, to_scores

BETS = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], dtype=torch.float64)
"""The powers of p that are betted on; all with the same stake."""


@dataclass(frozen=True, eq=False)
class Drift:
    """What `drift` found.

    Attributes:
        wealth: The wealth after each p-value, (T,): how many times its stake a gambler has who bets on small ones.
        threshold: 1/false_alarms, at which the alarm is raised.
    """

    wealth: Tensor
    threshold: float

    @property
    def at(self) -> int | None:
        """The number of the p-value at which the alarm is raised, from 0; None without one."""
        above = (self.wealth >= self.threshold).nonzero()
        return int(above[0]) if len(above) else None

    @property
    def alarm(self) -> bool:
        """Whether there is an alarm."""
        return self.at is not None

    def __repr__(self) -> str:
        said = "no alarm" if self.at is None else f"alarm at {self.at}"
        return (
            f"Drift({len(self.wealth)} p-values, {said}, wealth {float(self.wealth[-1]):.3g} of {self.threshold:.3g})"
        )


def drift(pvalues: Array, false_alarms: float = 0.01, *, held_out: int | None = None, seed: int = 0) -> Drift:
    r"""Test whether a stream is still like the held-out data of `fit_novelty`.

    The wealth :math:`M_t = \frac1K \sum_k \prod_{i \le t} \epsilon_k q_i^{\epsilon_k - 1}` is a martingale while the q
    are uniform and independent, and grows while they are small. By Ville's inequality it ever reaches 1/a with a
    probability of at most a: one may look after every input, for ever.

    Args:
        pvalues: `novelty_pvalue` of inputs in the order of their arrival, shape (T,).
        false_alarms: The probability of an alarm, ever, on a stream that does not change.
        held_out: How many held-out examples the p-values come from, `len(model.novelty.held_out)`. All of these
            p-values depend on the same examples; with their number, each input is compared with them and with all
            inputs before it, and the q are independent. None takes the p-values as they are.
        seed: Orders inputs that have the same p-value.

    Returns:
        The wealth, with `.alarm` and `.at`.

    Raises:
        ValueError: A p-value is not in (0, 1], or the probability or the number is out of range.

    Example:
        >>> drift(torch.tensor([0.4, 0.9, 0.01, 0.02, 0.01, 0.03, 0.01]))
        Drift(7 p-values, alarm at 6, wealth 430 of 100)
    """
    if not 0 < false_alarms < 1:
        raise ValueError(f"false_alarms must be between 0 and 1, got {false_alarms}; 0.01 is one stream in a hundred")
    p = to_scores(pvalues, "pvalues")
    if bool(((p <= 0) | (p > 1)).any()):
        raise ValueError(f"pvalues must be in (0, 1], got {float(p.min()):.3g} to {float(p.max()):.3g}")
    if held_out is not None:
        if isinstance(held_out, bool) or not isinstance(held_out, int) or held_out < 1:
            raise ValueError(f"held_out must be a number of examples, got {held_out!r}; len(model.novelty.held_out)")
        p = _independent(p, held_out, seed)
    log_wealth = (BETS.log() + (BETS - 1) * p.log().unsqueeze(1)).cumsum(0)
    wealth = (log_wealth.logsumexp(1) - math.log(len(BETS))).exp()
    return Drift(wealth, 1 / false_alarms)


def _independent(p: Tensor, held_out: int, seed: int) -> Tensor:
    """Return q_t = (#{held-out and earlier inputs that are stranger than input t} + u_t) / (n + t), u_t uniform.

    A p-value k/(n + 1) puts an input between the k - 1 stranger held-out examples and the others; inputs of the same
    place are in any order with the same probability.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(2, len(p), generator=generator, dtype=torch.float64)
    stranger = (p * (held_out + 1)).round() - 1
    places, earlier, found = (stranger + noise[0]).tolist(), list[float](), list[float]()
    for t, (k, place, u) in enumerate(zip(stranger.tolist(), places, noise[1].tolist(), strict=True), start=1):
        before = bisect.bisect_left(earlier, place)
        found.append((k + before + u) / (held_out + t))
        earlier.insert(before, place)
    return torch.tensor(found, dtype=torch.float64).clamp_min(1e-300)
