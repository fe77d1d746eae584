"""Logits with a Gaussian distribution: their probabilities and uncertainty without a model's samples.

Covariances are never written out: with the classes' eigenbasis Q they are V_n = Q diag(q_n) Q^T.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.quasirandom import SobolEngine

FEW, MANY = 64, 512  # draws, powers of two
DRAWN = 1 << 19  # normal numbers per example, at most
AT_ONCE = 1 << 20  # numbers of all examples


class GaussianLogits(NamedTuple):
    """N(mean, Q diag(q) Q^T) for each example."""

    mean: Tensor  # (N, ..., K)
    q: Tensor  # variances in the eigenbasis, (N, ..., K)
    basis: Tensor | None  # Q, (K, K), the same for all; None is the identity

    def variance(self) -> Tensor:
        """Return the variance of each logit: diag(Q diag(q) Q^T)."""
        return self.q if self.basis is None else self.q @ self.basis.square().T

    def centred_variance(self) -> Tensor:
        """Return s^2 = diag(J V J) with J = I - 1/K: the variance that a softmax can see.

        With the columns of Q centred this is sum_j (J Q)_kj^2 q_j; for V = diag(q) it is
        q_k (1 - 2/K) + sum_j q_j/K^2.
        """
        classes = self.mean.shape[-1]
        if self.basis is None:
            return self.q * (1 - 2 / classes) + self.q.sum(-1, keepdim=True) / classes**2
        return self.q @ (self.basis - self.basis.mean(0)).square().T

    def scaled(self) -> Tensor:
        """Return (mu - mean mu)/sqrt(1 + pi s^2/8), whose softmax is the probit approximation of the mean softmax.

        s^2 is centred, and times 4 for two classes, which makes it the variance of their difference: there the
        approximation is that of the sigmoid.
        """
        s2 = self.centred_variance() * (4 if self.mean.shape[-1] == 2 else 1)
        centred = self.mean - self.mean.mean(-1, keepdim=True)
        return centred / (1 + math.pi / 8 * s2).sqrt()

    def log_probs(self) -> Tensor:
        """Return log softmax of `scaled`, in float64 on the CPU."""
        return F.log_softmax(self.scaled().cpu().double(), -1)

    def mutual_information(self, points: Tensor | None = None) -> Tensor:
        """Return the entropy of the mean softmax minus the mean of the entropies, both over the same draws.

        The draws mu + Q (sqrt(q) * eps) use the same quasi-random `points` eps, (points, K), for every example. The
        entropy H(S) of the mean of S draws is too small, by c/S + d/S^2 + ...: at most log S, however many classes
        there are. From halves and quarters of the draws it is extrapolated to 8/3 H(S) - 2 H(S/2) + 1/3 H(S/4).
        """
        # Classes before examples: a softmax over few classes is an order of magnitude faster there.
        size, mean = (t.movedim(-1, 0).flatten(1) for t in (self.q.sqrt(), self.mean))
        entropy = torch.zeros_like(size[0])
        normals = (normal_points(len(size)) if points is None else points).to(size)
        at_once = max(1, AT_ONCE // max(1, size.numel())) if points is None else len(points)  # a graph is of any size
        quarters = []
        for quarter in normals.chunk(4):
            total = torch.zeros_like(size)
            for eps in torch.split(quarter, at_once):
                away = size.unsqueeze(1) * eps.T.unsqueeze(2)  # (K, points, examples)
                away = away if self.basis is None else (self.basis @ away.flatten(1)).view_as(away)
                p = F.softmax(mean.unsqueeze(1) + away, 0)
                total, entropy = total + p.sum(1), entropy - torch.special.xlogy(p, p).sum((0, 1))
            quarters.append(total / len(quarter))
        p = torch.stack(quarters)
        averages = p.mean(0, keepdim=True), (p[::2] + p[1::2]) / 2, p  # of all four, of pairs, of each
        whole, halves, each = (-torch.special.xlogy(a, a).sum(1).mean(0) for a in averages)
        found: Tensor = 8 / 3 * whole - 2 * halves + each / 3 - entropy / len(normals)
        return found.clamp_min(0).view(self.q.shape[:-1])


class Spread(NamedTuple):
    """How a linear layer with Gaussian weights spreads its outputs: q = z^2 V + c with z = x R + r, in a basis Q."""

    right: Tensor | None  # R, the features' eigenbasis, (D, n); None is the identity
    shift: Tensor | None  # r, what the bias's constant input adds, (n,)
    variances: Tensor  # V, (n, K)
    constant: Tensor | None  # c, the variance of the bias, (K,)
    basis: Tensor | None  # Q, the outputs' eigenbasis, (K, K); None is the identity

    def logits(self, features: Tensor, mean: Tensor) -> GaussianLogits:
        """Return the outputs' distribution for features (N, ..., D) and the outputs (N, ..., K) of the mean."""
        z = features.to(self.variances.dtype)
        z = z if self.right is None else z @ self.right
        z = z if self.shift is None else z + self.shift
        q = z.square() @ self.variances
        return GaussianLogits(mean.to(q), q if self.constant is None else q + self.constant, self.basis)


@lru_cache(maxsize=4)
def normal_points(classes: int) -> Tensor:
    """Return normal vectors that cover the space evenly, (points, classes), always the same."""
    count = max(FEW, min(MANY, 2 ** (DRAWN // classes).bit_length() // 2))
    if classes > SobolEngine.MAXDIM:
        half = torch.randn(count // 2, classes, generator=torch.Generator().manual_seed(0), device="cpu")
        return torch.cat([half, -half])
    with torch.inference_mode(False):
        engine = SobolEngine(classes, scramble=True, seed=0)  # type: ignore[no-untyped-call]
        points: Tensor = torch.special.ndtri(engine.draw(count, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
        return points.float()
