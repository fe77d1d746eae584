"""MC-dropout on weights: each element is the trained value or falls back to the prior mean."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify import noise as noises
from bayesify.blocks import bits, blocks, blockwise, scratch
from bayesify.methods.base import Method
from bayesify.posteriors import Posterior, Prior, host, quadratic_energy, quadratic_pull

MEANS = ("kept", "expected")


@dataclass(frozen=True, kw_only=True)
class MCDropout(Method):
    """Options of "mc_dropout".

    Attributes:
        p_drop: The probability p with which an element falls back to the prior mean.
        kld: Factor of the penalty.
        bias: "spikymix" treats biases as the weights; "gaussian" gives them p = 0 (no dropout, the penalty without its
            factor 1 - p); "ignore" takes neither dropout nor penalty.
        mean: What mean mode is: "kept" is m, "expected" is (1-p) m + p theta0.
        nst: Samples at prediction.
    """

    name: ClassVar[str] = "mc_dropout"
    bias_treatments: ClassVar[tuple[str, ...]] = ("spikymix", "gaussian", "ignore")

    p_drop: float = 0.1
    kld: float = 1.0
    bias: str = "spikymix"
    mean: str = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("p_drop", least=0)
        if self.p_drop >= 1:
            raise ValueError(f"p_drop must be in [0, 1), got {self.p_drop!r}")
        self.check("kld", least=0)
        if self.mean not in MEANS:
            raise ValueError(f"mean must be one of {list(MEANS)}, got {self.mean!r}")

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the two-spike posterior of one parameter."""
        dropped = not prior.is_bias or self.bias == "spikymix"
        return DropoutPosterior(
            param,
            prior,
            flat=prior.is_bias and self.bias == "ignore",
            fixed_row=fixed_row,
            p_drop=self.p_drop if dropped else 0.0,
            expected=self.mean == "expected",
        )

    def scale(self, num_data: float) -> float:
        """Return kld/N."""
        return self.kld / num_data


class DropoutPosterior(Posterior):
    """theta = z m + (1-z) theta0 with z ~ Bernoulli(1-p), element by element."""

    neutral_noise = 1.0

    def __init__(
        self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, p_drop: float, expected: bool
    ) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.p_drop = p_drop
        self.expected = expected
        self.random = p_drop > 0

    @property
    def std(self) -> Tensor:
        """sqrt(p (1-p)) |m - theta0|."""
        std = (self.original.detach() - self.prior_center).abs() * math.sqrt(self.p_drop * (1 - self.p_drop))
        if self.fixed_row is not None:
            std[self.fixed_row] = 0
        return std

    def mean_theta(self, original: Tensor) -> Tensor:
        """Return m, or (1-p) m + p theta0 where the mean is "expected"."""
        if not self.expected or self.p_drop == 0:
            return original
        mean = torch.lerp(original, self.prior_mean, self.p_drop)
        if self.fixed_row is not None:
            rows = torch.arange(len(mean), device=mean.device).view(-1, *[1] * (mean.dim() - 1))
            mean = torch.where(rows == self.fixed_row, original, mean)
        return mean

    def empty_noise(self) -> Tensor:
        """Return an uninitialised mask."""
        return torch.empty(self.shape, dtype=torch.bool, device=self.original.device)

    def fill_noise(self, out: Tensor, generator: torch.Generator) -> None:
        """Fill a piece of the mask z."""
        noises.keep_mask_(out, generator, self.p_drop)

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return z m + (1-z) theta0."""
        return torch.where(noise, mean, self.prior_center)

    def draw(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Compute `theta`, where it can be done by blocks: exactly, on the bits of m and theta0."""
        center = self._block_center(mean, noise)
        if center is None:
            return self.theta(mean, noise)
        theta = torch.empty_like(mean, requires_grad=False)

        def kernel(m: Tensor, z: Tensor, out: Tensor, *theta0: Tensor) -> None:
            m, z, out = bits(m), z.view(torch.int8), bits(out)
            if theta0:
                torch.bitwise_xor(m, bits(theta0[0]), out=out).mul_(z).bitwise_xor_(bits(theta0[0]))
            else:
                torch.mul(m, z, out=out)

        blocks(kernel, mean, noise, theta, *center)
        return theta

    def _block_center(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return theta0 for a kernel on blocks (nothing where it is zero), or None where no such kernel can run."""
        center = () if self.zero_prior else (self.prior_center,)
        return center if all(c.dim() for c in center) and blockwise(*tensors, *center) else None

    @property
    def precision(self) -> float:
        """(1-p)/sigma^2, the curvature of the energy."""
        return (1 - self.p_drop) / self.prior_sig / self.prior_sig

    def energy(self, mean: Tensor, scale: float) -> Tensor:
        """Return (1-p)/(2 sigma^2) |m - theta0|^2."""
        return quadratic_energy(mean, self, self.precision, scale)

    def pullback(
        self, mean: Tensor, noise: Tensor | None, grad: Tensor | None, coef: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return grad * z + coef (1-p)/sigma^2 (m - theta0)."""
        if grad is None:
            return (quadratic_pull(mean, self, self.precision, None, coef),)
        assert noise is not None
        factor = None if coef is None or self.flat else host(coef) * self.precision
        if isinstance(factor, float) and 1e-30 < abs(factor) < 1e30:
            grad = grad.contiguous()
            center = self._block_center(mean, noise, grad)
            if center is not None:
                return (self._block_pullback(mean, noise, grad, factor, center),)
        return (quadratic_pull(mean, self, self.precision, torch.where(noise, grad, 0), coef),)

    def _block_pullback(
        self, mean: Tensor, noise: Tensor, grad: Tensor, factor: float, center: tuple[Tensor, ...]
    ) -> Tensor:
        """Compute `pullback` block by block."""
        grad_mean = torch.empty_like(mean, requires_grad=False)

        def kernel(m: Tensor, z: Tensor, g: Tensor, out: Tensor, *theta0: Tensor) -> None:
            kept = scratch(g)
            torch.mul(bits(g), z.view(torch.int8), out=bits(kept))
            torch.add(kept, torch.sub(m, theta0[0], out=out) if theta0 else m, alpha=factor, out=out)

        blocks(kernel, mean, noise, grad, grad_mean, *center)
        return grad_mean
