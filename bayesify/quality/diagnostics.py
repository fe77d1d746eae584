"""Convergence of Markov chains: R-hat and the effective sample size of function values.

Weights of a network can be exchanged without changing what it computes, so that chains which agree differ in their
weights. What should agree are function values: outputs on a few inputs, a loss. Values come as (chains, draws, ...),
and every element of what follows is a quantity of its own.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesify.quality.arrays import Array

FEWEST = 4  # draws of a chain: two halves, each with a variance
GOOD_RHAT, GOOD_ESS = 1.01, 400.0
TAILS = (0.05, 0.95)


class Diagnosis(NamedTuple):
    """How well chains have mixed: the largest R-hat and the smallest effective sample sizes of all quantities."""

    rhat: float
    ess: float  # of the bulk
    chains: int
    draws: int  # of each chain
    tail_ess: float

    @property
    def good(self) -> bool:
        """Whether R-hat is at most 1.01, and bulk and tails have 400 effective draws at least (Vehtari et al. 2021)."""
        return self.rhat <= GOOD_RHAT and min(self.ess, self.tail_ess) >= GOOD_ESS

    def __str__(self) -> str:
        verdict = "mixed" if self.good else "not mixed: run longer, or from more starts"
        return (
            f"{self.chains} chains of {self.draws} draws: R-hat {self.rhat:.3f} (at most {GOOD_RHAT}), "
            f"{self.ess:.0f} effective draws, {self.tail_ess:.0f} in the tails (at least {GOOD_ESS:.0f}); {verdict}"
        )


def diagnose(values: Array) -> Diagnosis:
    """Return the worst R-hat and effective sample sizes over all quantities.

    Args:
        values: (chains, draws, ...), such as the outputs of each chain's states on a few inputs.

    Raises:
        ValueError: The shape is another, a value is not finite, or a chain has fewer than four draws.

    Example:
        >>> import torch
        >>> from bayesify import diagnostics
        >>> values = torch.randn(4, 500, 3, generator=torch.Generator().manual_seed(0))
        >>> diagnostics.diagnose(values).good, diagnostics.diagnose(values + torch.arange(4).view(4, 1, 1)).good
        (True, False)
    """
    x = _checked(values)
    tail_ess = float(ess(x, kind="tail").min())
    return Diagnosis(float(rhat(x).max()), float(ess(x).min()), x.shape[0], x.shape[1], tail_ess)


def rhat(values: Array) -> Tensor:
    """Return the rank-normalized, folded split R-hat of every quantity in float64: 1 where the chains agree.

    Each chain is cut into halves of n draws, which makes M chains. With W the mean of their variances and B/n the
    variance of their means, R = sqrt(((n-1)/n W + B/n)/W). The result is the larger R of the ranks' normal scores,
    Phi^-1((rank - 3/8)/(M n + 1/4)), and of those of the distances to the median, which sees chains that differ in
    scale (Vehtari et al. 2021). Where nothing moves it is 1, or infinite if the chains differ.

    Args:
        values: (chains, draws, ...).

    Example:
        >>> bool(rhat(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))) < 1.01)
        True
    """
    halves = _halves(_checked(values))
    folded = (halves - _quantile(halves, 0.5)).abs()
    return torch.maximum(_ratio(_scores(halves)), _ratio(_scores(folded)))


def ess(values: Array, *, kind: str = "bulk") -> Tensor:
    """Return how many independent draws would estimate every quantity as well, in float64.

    M n/tau for the M halves of n draws each, tau = -1 + 2 sum_k P_k, with P_k = rho_2k + rho_2k+1 summed while they are
    positive, each at most the one before (Geyer 1992); rho_t = 1 - (W - mean of the autocovariances at lag t)/V, where
    V = (n-1)/n W + B/n as in `rhat` and autocovariances are divided by n. At most M n log10(M n), for chains that
    swing. Where nothing moves it is all the draws, or 1 if the chains differ.

    Args:
        values: (chains, draws, ...).
        kind: "bulk" is about the ranks' normal scores, as in `rhat`; "tail" the smaller one of the indicators
            x <= the 5% and x <= the 95% quantile.

    Example:
        >>> bool(ess(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))) > 1500)
        True
    """
    if kind not in ("bulk", "tail"):
        raise ValueError(f"kind must be 'bulk' or 'tail', got {kind!r}")
    x = _checked(values)
    if kind == "tail":
        low, high = (_size(_halves((x <= _quantile(x, q)).double())) for q in TAILS)
        return torch.minimum(low, high)
    return _size(_scores(_halves(x)))


def _checked(values: Array) -> Tensor:
    """Return values in float64, if they are chains."""
    x = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if x.dim() < 2 or not x.numel() or x.shape[1] < FEWEST:
        raise ValueError(
            f"values must be (chains, draws, ...) with {FEWEST} draws of each chain at least, got shape "
            f"{tuple(x.shape)}; a single chain is values[None]"
        )
    if not bool(x.isfinite().all()):
        raise ValueError("values must be finite; a chain has diverged, take a smaller learning rate")
    return x


def _halves(x: Tensor) -> Tensor:
    """Cut (C, S, ...) into (2C, S//2, ...); the draw in the middle of an odd number is left out."""
    n = x.shape[1] // 2
    return torch.cat([x[:, :n], x[:, -n:]])


def _quantile(x: Tensor, q: float) -> Tensor:
    """Return the quantile of all draws of every quantity; torch.quantile has a largest size."""
    return torch.as_tensor(np.quantile(x.numpy(), q, axis=(0, 1)))


def _scores(halves: Tensor) -> Tensor:
    """Return the normal scores of the ranks among all draws; equal values share their mean rank."""
    columns = halves.reshape(halves.shape[0] * halves.shape[1], -1).T.contiguous()
    ordered = columns.sort().values
    above = torch.searchsorted(ordered, columns) + torch.searchsorted(ordered, columns, right=True)
    ranks = (above.double() + 1) / 2
    scores: Tensor = torch.special.ndtri((ranks - 0.375) / (columns.shape[1] + 0.25))
    return scores.T.reshape(halves.shape)


def _variances(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return W and V = (n-1)/n W + B/n."""
    n = halves.shape[1]
    within = halves.var(1).mean(0)
    return within, (n - 1) / n * within + halves.mean(1).var(0)


def _ratio(halves: Tensor) -> Tensor:
    """Return sqrt(V/W)."""
    within, total = _variances(halves)
    return torch.where(within > 0, (total / within).sqrt(), torch.where(total > 0, math.inf, 1.0))


def _size(halves: Tensor) -> Tensor:
    """Return the effective sample size of the mean; autocovariances by a Fourier transform of twice the length."""
    count, n = halves.shape[:2]
    within, total = _variances(halves)
    spectrum = torch.fft.rfft(halves - halves.mean(1, keepdim=True), n=2 * n, dim=1)
    autocovariances = torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=1)[:, :n] / n
    rho = 1 - (within - autocovariances.mean(0)) / torch.where(within > 0, total, 1.0)
    rho[0] = 1
    pairs = rho[0 : n // 2 * 2 : 2] + rho[1 : n // 2 * 2 : 2]
    positive = (pairs > 0).long().cumprod(0)
    tau = 2 * (pairs.cummin(0).values * positive).sum(0) - 1
    size = count * n
    found = size / tau.clamp_min(1 / math.log10(size))
    return torch.where(within > 0, found, torch.where(total > 0, 1.0, float(size)))
