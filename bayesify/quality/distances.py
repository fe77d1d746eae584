"""Distances of features to those of known data, for `metrics.feature_distance` and `fit_novelty`.

Features are scaled to length 1 first: their length says how sure a network is, and hides how strange an input is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.quality.arrays import Array, ArrayT, like, to_double, to_labels

KINDS = ("mahalanobis++", "relative", "knn")
NEIGHBOURS = 10
BANK = 2000
"""How many rows the nearest neighbours are searched in, drawn at random from all."""


def feature_distance(train: Array, labels: Array | None, features: ArrayT, *, kind: str = "mahalanobis++") -> ArrayT:
    """Distance of features to those of the training set, all scaled to length 1; high is out of distribution.

    Args:
        train: Features of training inputs, shape (M, D), such as `active.features` returns.
        labels: Their classes, shape (M,); None where there are none.
        features: The features to score, shape (N, D).
        kind: "mahalanobis++", "relative", for inputs that are much like the training data, or "knn"; see
            `Reference.score`.

    Returns:
        Shape (N,), of the type of `features`.

    Raises:
        ValueError: The kind is unknown, or the shapes do not fit.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> near, far = feature_distance(train, torch.tensor([0, 0, 1, 1]), torch.tensor([[2.0, 0.1], [-1.0, -1.0]]))
        >>> bool(far > near)
        True
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    known, new = to_double(train, "train"), to_double(features, "features")
    if known.dim() != 2 or new.dim() != 2 or known.shape[1] != new.shape[1]:
        raise ValueError(
            f"train and features must have shapes (M, D) and (N, D), got {tuple(known.shape)} and {tuple(new.shape)}; "
            "flatten what the last layer takes"
        )
    moments = Moments(kind)
    moments.add(
        known, None if labels is None else to_labels(labels, len(known), 1 + int(torch.as_tensor(labels).max()))
    )
    return like(moments.reference().score(new), features)


@dataclass(eq=False)
class Reference:
    """What is kept of known data to measure distances from it.

    Attributes:
        kind: "mahalanobis++", "relative" or "knn".
        means: The class means, or the mean of all features, (C, D), in the coordinates of `whitening`.
        center: The mean of all features, (D,).
        whitening: W with W W^T the inverse of the shrunk covariance within classes, (D, D).
        overall: The same for the covariance of all features; only for "relative".
        bank: Some features of length 1; only for "knn".
    """

    kind: str
    center: Tensor
    means: Tensor | None = None
    whitening: Tensor | None = None
    overall: Tensor | None = None
    bank: Tensor | None = None

    def score(self, features: Tensor) -> Tensor:
        """Return the distance of each row, (N,); larger is stranger.

        "mahalanobis++" is min_c (z - mu_c)^T S^-1 (z - mu_c) for z = features/|features|, with class means and their
        pooled, shrunk covariance; "relative" subtracts (z - mu)^T T^-1 (z - mu), with the mean and covariance of all
        features; "knn" is the distance to the tenth nearest of 2,000 rows.
        """
        z = F.normalize(features.to(self.center.dtype), dim=1)
        if self.bank is not None:
            squares = (2 - 2 * z @ self.bank.T).clamp_min(0)
            return squares.kthvalue(min(NEIGHBOURS, len(self.bank)), 1).values.sqrt()
        assert self.whitening is not None
        assert self.means is not None
        white = (z - self.center) @ self.whitening
        away = white.square().sum(1, keepdim=True) - 2 * white @ self.means.T + self.means.square().sum(1)
        found = away.clamp_min(0).amin(1)
        return found if self.overall is None else found - ((z - self.center) @ self.overall).square().sum(1)

    def to(self, dtype: torch.dtype) -> Reference:
        """Return the same in another precision."""
        moved: dict[str, Any] = {n: t.to(dtype) if isinstance(t, Tensor) else t for n, t in vars(self).items()}
        return Reference(**moved)


@dataclass
class Moments:
    """Sums over rows of length 1, by which one pass over the data is enough: D^2 numbers, and D for each class."""

    kind: str = KINDS[0]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    count: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None
    bank: Tensor | None = None

    @property
    def classes(self) -> int:
        """How many classes have a mean of their own: one where there are fewer than two rows for each."""
        return len(self.counts) if 2 * len(self.counts) <= self.count else 1

    def add(self, features: Tensor, labels: Tensor | None) -> None:
        """Add rows, (N, D), and their classes, (N,); None puts them into one class."""
        if not len(features):
            return
        z = F.normalize(features.double(), dim=1)
        seen, self.count = self.count, self.count + len(z)
        if self.kind == "knn":
            self._keep(z, seen)
        classes = torch.zeros(len(z), dtype=torch.long) if labels is None else labels
        for c in sorted(set(classes.tolist())):
            rows = z[classes == c]
            self.counts[c] = self.counts.get(c, 0) + len(rows)
            self.sums[c] = rows.sum(0) + self.sums.get(c, 0)
        squares = z.T @ z
        self.squares = squares if self.squares is None else self.squares + squares

    def _keep(self, z: Tensor, seen: int) -> None:
        """Keep a random sample of all rows so far: the n-th row takes a place with probability BANK/n."""
        rows = list(self.bank if self.bank is not None else ())
        for i, row in enumerate(z):
            place = int(torch.randint(seen + i + 1, (), generator=self.generator))
            if len(rows) < BANK:
                rows.append(row)
            elif place < BANK:
                rows[place] = row
        self.bank = torch.stack(rows)

    def reference(self) -> Reference:
        """Return what scores new rows, in float64."""
        assert self.squares is not None
        total = torch.stack(list(self.sums.values())).sum(0)
        center = total / self.count
        if self.kind == "knn":
            return Reference(self.kind, center, bank=self.bank)
        names = sorted(self.counts) if self.classes > 1 else []
        means = torch.stack([self.sums[c] / self.counts[c] for c in names]) if names else center.unsqueeze(0)
        sizes = torch.tensor([self.counts[c] for c in names] if names else [self.count], dtype=center.dtype)
        within = self.squares - (means * sizes.unsqueeze(1)).T @ means
        whitening = whitened(within, self.count - len(means))
        overall = self.squares - self.count * torch.outer(center, center)
        return Reference(
            self.kind,
            center,
            (means - center) @ whitening,
            whitening,
            whitened(overall, self.count - 1) if self.kind == "relative" else None,
        )


def whitened(scatter: Tensor, degrees: int) -> Tensor:
    """Return W with W W^T = C^-1, where C is the covariance scatter/degrees shrunk towards a multiple of I.

    C = (1 - a) S + a tr(S)/D I, with the a of oracle approximating shrinkage (Chen and others, 2010), for n degrees of
    freedom: a = ((1 - 2/D) tr(S^2) + tr(S)^2) / ((n + 1 - 2/D) (tr(S^2) - tr(S)^2/D)), at most 1.
    """
    size = len(scatter)
    covariance = scatter / max(degrees, 1)
    trace, square = float(covariance.diagonal().sum()), float(covariance.square().sum())
    gap = (degrees + 1 - 2 / size) * (square - trace**2 / size)
    share = min(1.0, ((1 - 2 / size) * square + trace**2) / gap) if gap > 0 else 1.0
    shrunk = (1 - share) * covariance
    shrunk.diagonal().add_(share * trace / size + 1e-12 + 1e-6 * trace / size)
    # Of the inverse's Cholesky factors, the transposed inverse of that of C.
    factor = torch.linalg.cholesky(shrunk)
    inverse: Tensor = torch.linalg.solve_triangular(factor, torch.eye(size, dtype=factor.dtype), upper=False)
    return inverse.T
