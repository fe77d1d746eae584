"""The Laplace approximation: MAP training, then a Gaussian from the curvature of the loss at its optimum.

The curvature is computed by `bayesify.fit_laplace`: element by element, or as Kronecker factors of each layer.
"""

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.distributed import part, whole
from bayesify.core.method import MomentsPosterior, Tempered
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, state_dtype, wide
from bayesify.core.reading import Scope
from bayesify.engine.noise import Stream, name_key
from bayesify.engine.writing import Formula
from bayesify.prediction.gaussian import GaussianLogits, Spread
from bayesify.prediction.likelihoods import Regression

PIECE = 1 << 22  # elements at a time in full precision
KRON = dict.fromkeys(("left", "left_values", "right", "right_values"), "free")  # the tensors that hold a `Kron`


class Kron(NamedTuple):
    """The eigendecomposition of a curvature's Kronecker factors, as one parameter needs it.

    The curvature of a linear map's weight (with its bias as the weight of a constant input 1) is taken as A x B: A =
    sum a a^T over the rows that the map is applied to, and B the mean over these rows of the curvature of the loss at
    its outputs. With the parameter's first dimension as rows and the others as columns, its deviation from the mean is
    left (sqrt(v) * eps) right^T, v_ki = 1/(left_values_k right_values_i + ridge), ridge = 1/sigma^2 + damping. Weight
    and bias of a layer have the same eigenvalues and draw the same eps; each has its own rows of A's eigenvectors.
    """

    left: Tensor | None  # eigenvectors of the rows' factor, (rows, m); None is the identity
    left_values: Tensor  # (m,)
    right: Tensor | None  # of the columns' factor, (columns, n)
    right_values: Tensor  # (n,)

    def curvature(self) -> Tensor:
        """Return b_k a_i in the eigenbases."""
        return torch.outer(self.left_values, self.right_values)

    def variances(self, ridge: float) -> Tensor:
        """Return v_ki = 1/(b_k a_i + ridge), in the eigenbases."""
        return (self.curvature() + ridge).reciprocal_()

    def variance(self, ridge: float) -> Tensor:
        """Return the variance of each element of the parameter: left^2 v (right^2)^T."""
        left, right = (None if basis is None else basis.square() for basis in (self.left, self.right))
        return _between(left, self.variances(ridge), right)

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


def _between(left: Tensor | None, middle: Tensor, right: Tensor | None) -> Tensor:
    """Return left middle right^T, the smaller product first."""
    if right is not None and len(right) <= len(middle):
        middle, right = middle @ right.T, None
    middle = middle if left is None else left @ middle
    return middle if right is None else middle @ right.T


@dataclass(frozen=True, kw_only=True)
class Laplace(Tempered):
    """Options of "la".

    Attributes:
        Ninflate: The data counts as if each item were there this many times; the posterior is that much narrower. None
            is 1; where `prior_sig` is None, the penalty and a diagonal fit are tempered by the number of weights.
        damping: Added to every element's precision.
        bias: "informative" treats biases as the weights; "uninformative" gives them a flat prior.
        nst: Samples at prediction.
        noise_var: The variance of a regression's noise, or one for each output, which every `fit_laplace` sets; None
            where there is none.
        likelihood: The name of the likelihood of the last `fit_laplace`, which is the task that `predict` is for.
    """

    name: ClassVar[str] = "la"
    fitted: ClassVar[tuple[str, ...]] = ("noise_var", "likelihood")

    Ninflate: float | None = None
    damping: float = 0.0
    noise_var: float | tuple[float, ...] | None = None
    likelihood: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("damping", least=0)
        Regression(self.noise_var)  # which checks it
        if self.likelihood is not None and not isinstance(self.likelihood, str):
            raise TypeError(f"likelihood must be a name, which fit_laplace sets, got {self.likelihood!r}")

    @property
    def linear(self) -> bool:
        """Whether the last fit was a regression: its Gaussian belongs to the linear model."""
        return self.likelihood == "regression"

    def posterior(self, param: Tensor, prior: Prior, *, fixed_row: int | None) -> Posterior:
        """Return the posterior of one parameter, without variances at first."""
        return LaplacePosterior(param, prior, flat=self.flat(prior), fixed_row=fixed_row, damping=self.damping)

    def inflation(self, num_data: float, *, kron: bool = False) -> float:
        """Return how many times each item counts in a fit; once where the factors keep the weights' correlations."""
        return 1.0 if kron and self.Ninflate is None else super().inflation(num_data)

    def check_ready(self, posteriors: Sequence[Posterior]) -> None:
        """Raise before the fit, and warn where training went on after it."""
        super().check_ready(posteriors)
        moved = [p for p in posteriors if isinstance(p, LaplacePosterior) and p.has_moved()]
        if moved:
            warnings.warn(
                f"{len(moved)} parameters (the first is {moved[0].name!r}) have changed since fit_laplace, whose "
                "spread belongs to the old ones; call fit_laplace again after training",
                stacklevel=4,
            )

    def closed_form(self, scope: Scope) -> "LastLayer | None":
        """Return the linear layer that alone has variance, as a way to predict without samples.

        Whether it is the last one shows in the model's outputs.
        """
        moving = {p for p in scope.posteriors if p.moves}
        lists: dict[tuple[nn.Module, str], Any] = {
            (site.module, site.attribute): site.module.parametrizations[site.attribute]  # type: ignore[index]
            for site in scope.sites
        }
        places = [(*place, own) for place, own in lists.items() if not moving.isdisjoint(own)]
        if len({module for module, *_ in places}) != 1 or any(len(own) != 1 for *_, own in places):
            return None
        head, found = places[0][0], {attribute: own[0] for _, attribute, own in places}
        weight, bias = found.get("weight"), found.get("bias")
        if not isinstance(head, nn.Linear) or weight is None or found.keys() - {"weight", "bias"}:
            return None
        if bias is not None and (weight.kron is None) != (bias.kron is None):
            return None  # the sum of two covariances with different bases
        return LastLayer(head, weight, bias)


class LastLayer(NamedTuple):
    """A linear layer with all of the model's spread: its Gaussian weights give Gaussian logits."""

    head: nn.Linear
    weight: Any  # its weight's posterior
    bias: Any  # its bias's posterior, or None where that is a point

    def spread(self) -> Spread:
        """Return how the layer spreads its outputs, whose covariance is Q_B diag(q) Q_B^T.

        With z the features in A's eigenbasis (and the bias's constant input with them), q_nk = sum_i z_ni^2/(b_k a_i +
        1/sigma^2 + damping). For a diagonal posterior q is sum_i x_ni^2 v_ki + v_k of the bias, and the basis the
        identity. The factor of `calibrate` is in both.
        """
        kron = self.weight.kron
        if kron is None:
            constant = None if self.bias is None else whole(self.bias.std).square()
            return Spread(None, None, whole(self.weight.std).square().T, constant, None)
        own = None if self.bias is None else self.bias.kron
        shift = None if own is None or own.right is None else own.right.squeeze(0)
        variances = kron.variances(self.weight.ridge).T * self.weight.calibration**2
        return Spread(kron.right, shift, variances, None, kron.left)

    def logits(self, features: Tensor, mean: Tensor) -> GaussianLogits:
        """Return the distribution of the outputs, for inputs (N, ..., in) and the outputs of the mean, (N, ..., K)."""
        return self.spread().logits(features, mean)


class LaplacePosterior(MomentsPosterior):
    """N(theta*, v) around the trained parameter, with a diagonal or a Kronecker-factored covariance.

    Diagonal: the tensor `deviation` is sqrt(v). Kronecker: the four tensors of a `Kron`, from which and the prior's
    scale sqrt(v) follows.
    """

    results = ("fitted_sig", "tuned", "partner")
    kept = Posterior.kept | {"deviation": "same"} | KRON
    missing = "Laplace has not been fitted; call bayesify.fit_laplace(model, loader) after training"

    deviation: Tensor | None
    fitted_sig: float | None = None  # the prior's scale of the variances; `prior_sig` stays what training used
    tuned: str = ""  # how `fit_laplace` chose that scale, if it did
    partner: str = ""  # the name of the weight that a bias is one Kronecker-factored Gaussian with
    damping: float = 0.0
    _stamp: tuple[torch.dtype, int] | None = None  # of the parameter at the fit
    _looked: tuple[int, int] | None = None  # which parameter was compared with it last

    # -- the fit -----------------------------------------------------------------------------------------------

    @property
    def kron(self) -> Kron | None:
        """The Kronecker factors, where the fit has given some."""
        factors: Any = [getattr(self, name) for name in KRON]
        return None if factors[1] is None else Kron(*factors)

    @property
    def ready(self) -> bool:
        """Whether there has been a fit."""
        return self.deviation is not None or self.kron is not None

    def fit(self, curvature: "Tensor | Kron | None", sig: float, partner: str = "") -> None:
        """Take over a curvature, with the prior's scale and the weight that a bias shares its Gaussian with."""
        factors = curvature if isinstance(curvature, Kron) else (None,) * len(KRON)
        self.deviation = None if isinstance(curvature, Kron) else self.spread(curvature, sig)
        for name, factor in zip(KRON, factors, strict=True):
            setattr(self, name, factor)
        self.fitted_sig, self.partner = sig, partner
        self.after_load()

    @property
    def ridge(self) -> float:
        """1/sigma^2 + damping, with the scale of the fit."""
        sig = self.prior_sig if self.fitted_sig is None else self.fitted_sig
        return 1 / sig / sig + self.damping

    def spread(self, curvature: Tensor | None, sig: float) -> Tensor:
        """Return sqrt(v), v = 1/(1/sigma^2 + h + damping), for a curvature h, in the state's dtype.

        Without any curvature (the parameter is not in use) v is 0; so it is where h is 0 under a flat prior, which has
        no 1/sigma^2.
        """
        out = torch.zeros(self.shape, dtype=state_dtype(self.original), device=self.original.device)
        if curvature is None:
            return out
        prior = self.damping if self.flat else 1 / sig / sig + self.damping
        for piece, h in zip(torch.split(out.view(-1), PIECE), torch.split(curvature.view(-1), PIECE), strict=True):
            piece.copy_((h.to(wide(h)) + prior).rsqrt_())
            if self.flat:
                piece[h == 0] = 0
        if self.fixed_row is not None:
            out[self.fixed_row] = 0
        return out

    # -- what a posterior has ----------------------------------------------------------------------------------

    @property
    def own_std(self) -> Tensor:
        """sqrt(v); 0 before the fit."""
        if (kron := self.kron) is not None:
            every = kron.variance(self.ridge).sqrt_().flatten()  # also where this is a part of the parameter
            return every[self.start : self.start + self.shape.numel()].view(self.shape)
        return super().own_std if self.deviation is None else self.deviation

    @property
    def moves(self) -> bool:
        """Whether a draw differs from the mean."""
        return self.kron is not None or (self.deviation is not None and bool(part(self.deviation).any()))

    @property
    def draws_on_shards(self) -> bool:  # type: ignore[override]
        """Whether a part of theta can be drawn on its own: factors mix the rows."""
        return self.kron is None

    @property
    def note(self) -> str:
        """What `summary` says about the fit."""
        if not self.ready:
            return "not fitted"
        points = 0 if self.deviation is None else int((self.deviation == 0).sum())
        notes = (
            "kron" if self.kron is not None else "",
            f"spread with prior_sig {self.fitted_sig:.4g} by {self.tuned}" if self.tuned else "",
            "" if points == 0 else "no variance" if points == self.shape.numel() else f"{points} without variance",
        )
        return ", ".join(n for n in notes if n)

    def whitened(self, grads: Tensor) -> tuple[str, Tensor] | None:
        """Return sqrt(v) * (left^T g right), in the eigenbases where there are some."""
        kron = self.kron
        if kron is None:
            return super().whitened(grads)
        return self.partner or self.name, kron.pull(grads, self.ridge) * self.calibration

    def stream(self, seed: int) -> Stream:
        """Return where the noise comes from: weight and bias of a Kronecker-factored layer share one matrix."""
        stream, kron = super().stream(seed), self.kron
        if kron is None:
            return stream
        key = name_key(self.partner) if self.partner else self.key
        shape = torch.Size((len(kron.left_values), len(kron.right_values)))
        return stream._replace(key=key, shape=shape, dtype=kron.left_values.dtype)

    def drawing(self, mean: Tensor) -> tuple[Formula, tuple[Any, ...]] | None:
        """Return the formula of a diagonal covariance; that of Kronecker factors is no formula of single elements."""
        return super().drawing(mean) if self.kron is None else None

    def theta(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Return mean + sqrt(v) * eps, in the eigenbases where there are some; the gradient passes to the mean."""
        kron = self.kron
        if kron is None:
            return super().theta(mean, noise)
        away = kron.draw(noise, self.ridge).view(self.shape)
        return (mean.to(away.dtype) + away).to(mean.dtype)

    # -- state -------------------------------------------------------------------------------------------------

    def found(self) -> dict[str, Any]:
        """Return what the fit has found, once there is one."""
        return {n: v for n, v in super().found().items() if self.ready or n not in self.results}

    # -- training that goes on ---------------------------------------------------------------------------------

    def after_load(self) -> None:
        """Take the mean that is there for that of the fit."""
        self._stamp, self._looked = self._checksum(), None

    def _checksum(self) -> tuple[torch.dtype, int] | None:
        """Return the parameter's precision and a checksum of its bytes; None where they are not at hand."""
        param = self.original.detach()
        if param.device.type == "meta" or hasattr(param, "device_mesh"):
            return None
        return param.dtype, zlib.crc32(param.cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def has_moved(self) -> bool:
        """Return whether the parameter has changed since the fit; another precision is no change."""
        now = (id(self.original), 0 if self.original.is_inference() else self.original._version)
        if self._stamp is None or self._looked == now:
            return False
        self._looked = now
        found = self._checksum()
        return found is not None and found[0] == self._stamp[0] and found != self._stamp
