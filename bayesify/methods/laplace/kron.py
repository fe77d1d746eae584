"""Kronecker-factored curvature: the two factors of a layer, their eigenbases, and what follows from them.

The curvature of a linear map's weight (with its bias as the weight of a constant input 1) is taken as A x B: A = sum
a a^T over the rows that the map is applied to, and B the mean over these rows of the curvature of the loss at its
outputs. In the eigenbases of both a posterior variance is v_ki = 1/(b_k a_i + 1/sigma^2 + damping).
"""

from typing import NamedTuple

import torch
from torch import Tensor

KRON = ("left", "left_values", "right", "right_values")
"""The buffers of a posterior that hold its `Kron`."""


EXACT = (torch.float32, torch.float64)


class Kron(NamedTuple):
    """The eigendecomposition of both factors, as one parameter needs it.

    The deviation of the parameter, with its first dimension as rows and the others as columns, from its mean is
    left (sqrt(v) * eps) right^T with v_ki = 1/(left_values_k right_values_i + ridge). Weight and bias of a layer have
    the same eigenvalues and draw the same eps; each has its own rows of A's eigenvectors.

    Attributes:
        left: Eigenvectors of the rows' factor in columns, (rows, m); None is the identity (a factor kept as diagonal).
        left_values: Its eigenvalues, (m,).
        right: Eigenvectors of the columns' factor, (columns, n); None is the identity.
        right_values: Its eigenvalues, (n,).
    """

    left: Tensor | None
    left_values: Tensor
    right: Tensor | None
    right_values: Tensor

    @property
    def noise_shape(self) -> torch.Size:
        """The shape of eps."""
        return torch.Size((len(self.left_values), len(self.right_values)))

    def check(self, shape: torch.Size) -> None:
        """Raise a ValueError unless these can be the factors of a parameter of some shape."""
        rows = 1
        sides = (("left", self.left, self.left_values), ("right", self.right, self.right_values))
        for side, vectors, values in sides:
            if not isinstance(values, Tensor) or values.dim() != 1 or not len(values):
                raise ValueError(f"{side}_values is missing or no vector")
            if vectors is not None and (vectors.dim() != 2 or vectors.shape[1] != len(values)):
                raise ValueError(f"{side} does not fit {side}_values")
            exact = [t.dtype in EXACT and bool(t.isfinite().all()) for t in (vectors, values) if t is not None]
            if not all(exact):
                raise ValueError(f"{side} is not finite, or of another type than float32 or float64")
            if bool((values < 0).any()):
                raise ValueError(f"{side}_values is negative")
            rows *= len(values) if vectors is None else len(vectors)
        if rows != shape.numel():
            raise ValueError(f"the Kronecker factors are of {rows} elements, the parameter of {shape.numel()}")

    def curvature(self) -> Tensor:
        """Return b_k a_i in the eigenbases."""
        return torch.outer(self.left_values, self.right_values)

    def variances(self, ridge: float) -> Tensor:
        """Return v_ki = 1/(b_k a_i + ridge), in the eigenbases."""
        return (self.curvature() + ridge).reciprocal_()

    def variance(self, ridge: float) -> Tensor:
        """Return the variance of each element of the parameter: left^2 v (right^2)^T."""
        return _between(_square(self.left), self.variances(ridge), _square(self.right))

    def draw(self, noise: Tensor, ridge: float) -> Tensor:
        """Return left (sqrt(v) * eps) right^T, of (rows, columns)."""
        return _between(self.left, noise.to(self.left_values.dtype) * self.variances(ridge).sqrt_(), self.right)

    def pull(self, grads: Tensor, ridge: float) -> Tensor:
        """Return sqrt(v) * (left^T g right) of each of several gradients: the transpose of `draw`."""
        rows = len(self.left_values if self.left is None else self.left)
        g = grads.to(self.left_values.dtype).reshape(len(grads), rows, -1)
        g = g if self.left is None else self.left.T @ g
        g = g if self.right is None else g @ self.right
        return g * self.variances(ridge).sqrt_()

    def rows(self, left: slice | None, right: slice | None) -> "Kron":
        """Keep some rows of the eigenvectors: the part of one of several parameters."""
        own_left = self.left if left is None or self.left is None else self.left[left].contiguous()
        own_right = self.right if right is None or self.right is None else self.right[right].contiguous()
        return self._replace(left=own_left, right=own_right)


def _square(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.square()


def _between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return left middle right^T, the smaller product first."""
    if right is not None and len(right) <= len(middle):
        middle, right = middle @ right.T, None
    middle = middle if left is None else left @ middle
    return middle if right is None else middle @ right.T


def eigen(factor: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return eigenvectors and eigenvalues of a factor, in its dtype but computed in float64 on the CPU.

    A factor that was kept as its diagonal (one dimension) has the identity as its basis, which is None.
    """
    if factor.dim() == 1:
        return None, factor.clamp_min(0)
    exact = factor.cpu().double()
    values, vectors = torch.linalg.eigh((exact + exact.T) / 2)
    return vectors.contiguous().to(factor), values.clamp_(min=0).to(factor)
