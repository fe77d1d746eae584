"""The Laplace approximation: MAP training, then a Gaussian from the curvature of the loss at its optimum.

The curvature is computed by `bayesify.fit_laplace`.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bayesify.core.distributed import part
from bayesify.core.method import Tempered
from bayesify.core.moments import MomentsPosterior
from bayesify.core.posterior import Posterior
from bayesify.core.prior import Prior, state_dtype, wide
from bayesify.core.stored import Kept
from bayesify.engine.noise import Stream, name_key
from bayesify.methods.laplace.closed_form import LastLayer, last_layer
from bayesify.methods.laplace.kron import KRON, Kron
from bayesify.prediction.likelihoods import Regression

PIECE = 1 << 22  # elements at a time in full precision
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    tempers: ClassVar[str] = "Ninflate"
    bias_treatments: ClassVar[tuple[str, ...]] = ("informative", "uninformative")
    fitted: ClassVar[tuple[str, ...]] = ("noise_var", "likelihood")

    Ninflate: float | None = None
    damping: float = 0.0
    bias: str = "informative"
    noise_var: float | tuple[float, ...] | None = None
    likelihood: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_optional("Ninflate", above=0)
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
        flat = prior.is_bias and self.bias == "uninformative"
        return LaplacePosterior(param, prior, flat=flat, fixed_row=fixed_row, damping=self.damping)

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

    def closed_form(self, scope: Any) -> LastLayer | None:
        """Return the way to predict without samples, where the fit is of one linear layer only."""
        return last_layer(scope)


class LaplacePosterior(MomentsPosterior):
    """N(theta*, v) around the trained parameter, with a diagonal or a Kronecker-factored covariance.

    Diagonal: the tensor `deviation` is sqrt(v). Kronecker: four tensors are the eigenvalues and eigenvectors of the two
    factors (`bayesify.methods.laplace.kron.Kron`), and sqrt(v) follows from them and the prior's scale.
    """

    results = ("fitted_sig", "tuned", "partner")
    kept = Posterior.kept | {"deviation": Kept(least=0), **dict.fromkeys(KRON, Kept("free"))}
    missing = "Laplace has not been fitted; call bayesify.fit_laplace(model, loader) after training"

    deviation: Tensor | None
    fitted_sig: float | None = None
    """The prior's scale that the variances were computed with; `prior_sig` stays what training used."""
    tuned: str = ""
    """How `fit_laplace` chose that scale, if it did."""
    partner: str = ""
    """The name of the weight that a bias is one Kronecker-factored Gaussian with."""

    def __init__(self, param: Tensor, prior: Prior, *, flat: bool, fixed_row: int | None, damping: float = 0.0) -> None:
        super().__init__(param, prior, flat=flat, fixed_row=fixed_row)
        self.damping = damping
        self._stamp: tuple[torch.dtype, int] | None = None
        self._looked: tuple[int, int] | None = None

    # -- the fit -----------------------------------------------------------------------------------------------

    @property
    def kron(self) -> Kron | None:
        """The Kronecker factors, where the fit has given some."""
        factors = {name: getattr(self, name) for name in KRON}
        return None if factors["left_values"] is None else Kron(**factors)

    @property
    def ready(self) -> bool:
        """Whether there has been a fit."""
        return self.deviation is not None or self.kron is not None

    def fit(self, curvature: "Tensor | Kron | None", sig: float, partner: str = "") -> None:
        """Take over a curvature, with the prior's scale and the weight that a bias shares its Gaussian with."""
        if isinstance(curvature, Kron):
            self._put({"deviation": None, **curvature._asdict()})
        else:
            self._put({"deviation": self.spread(curvature, sig), **dict.fromkeys(KRON)})
        self.fitted_sig, self.partner = sig, partner
        self._remember_mean()

    def fitted(self) -> tuple[Any, ...]:
        """Return all that `fit` changes, for `put_back`."""
        tensors = {name: getattr(self, name) for name in ("deviation", *KRON)}
        return tensors, self.fitted_sig, self.tuned, self.partner, self._stamp

    def put_back(self, before: tuple[Any, ...]) -> None:
        """Undo a fit."""
        tensors, self.fitted_sig, self.tuned, self.partner, self._stamp = before
        self._put(tensors)

    def _put(self, tensors: dict[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    @property
    def ridge(self) -> float:
        """1/sigma^2 + damping, with the scale of the fit."""
        sig = self.prior_sig if self.fitted_sig is None else self.fitted_sig
        return 1 / sig / sig + self.damping

    def spread(self, curvature: Tensor | None, sig: float) -> Tensor:
        """Return sqrt(v) for a curvature h (sum over the data), in the state's dtype.

        v = 1/(1/sigma^2 + h + damping). Without any curvature (the parameter is not in use) v is 0; so it is where h
        is 0 under a flat prior, which has no 1/sigma^2.
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
        return stream._replace(key=key, shape=kron.noise_shape, dtype=kron.left_values.dtype)

    def draw(self, mean: Tensor, seed: int) -> Tensor:
        """Compute `theta`."""
        return super().draw(mean, seed) if self.kron is None else self.theta(mean, self.noise_of(seed))

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

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise unless these tensors can be a diagonal or a Kronecker-factored covariance, or none."""
        super().check_state(state)
        if (kron := {name: state.get(name) for name in KRON}) and any(t is not None for t in kron.values()):
            Kron(**kron).check(self.shape)  # type: ignore[arg-type]
            if "deviation" in state:
                raise ValueError("there is a deviation beside the Kronecker factors")

    def after_load(self) -> None:
        """Take the mean that is there for that of the fit."""
        self._remember_mean()

    # -- training that goes on ---------------------------------------------------------------------------------

    def _remember_mean(self) -> None:
        self._stamp, self._looked = self._bits(), None

    def _bits(self) -> tuple[torch.dtype, int] | None:
        """Return the sum of the parameter's bits as integers, each times its place: exact, whatever the device."""
        param = self.original.detach()
        if param.device.type == "meta" or hasattr(param, "device_mesh"):
            return None
        total = 0
        for start, piece in enumerate(
            torch.split(param.contiguous().view(BITS[param.element_size()]).flatten(), PIECE)
        ):
            places = torch.arange(1, len(piece) + 1, device=piece.device) + start * PIECE
            total += int((piece * places).sum())
        return param.dtype, total

    def has_moved(self) -> bool:
        """Tell whether the parameter is another one than at the fit; a parameter in another precision is the same."""
        now = (id(self.original), 0 if self.original.is_inference() else self.original._version)
        if self._stamp is None or self._looked == now:
            return False
        self._looked = now
        found = self._bits()
        return found is not None and found[0] == self._stamp[0] and found != self._stamp
