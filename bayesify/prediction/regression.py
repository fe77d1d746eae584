"""A regression model's predictive distribution: a Gaussian for each posterior sample, mixed with equal weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from bayesify.core.penalty import noise_in
from bayesify.core.reading import Scope
from bayesify.prediction.batches import values_like
from bayesify.prediction.predictive import Prediction
from bayesify.quality import regression as gaussians
from bayesify.quality.arrays import check_fraction
from bayesify.quality.conformal import INTERVAL_KINDS, half_width, kind_of

LEVEL = 0.95
NO_NOISE = (
    "the noise of the data is not known, and intervals without it would hold too little; train with "
    "bayesify.methods.noise(model), or fit it to held-out data: "
    "out.with_noise(metrics.fit_noise(held.outputs, targets)); interval(noise=False) is that of the function alone"
)


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPredictive(Prediction):
    """The prediction p(y|x) = 1/S sum_s N(y; f_s(x), v_s(x)) of a regression model.

    Intervals and scores are those of this mixture. Where the outputs of the samples were not kept, or mean and spread
    have a closed form, they are those of the one Gaussian with the same mean and standard deviation.

    Attributes:
        mean: Mean over the samples, (N, ...).
        epistemic: Standard deviation over the samples, (N, ...); 0 for one sample.
        aleatoric: Standard deviation of the noise, (N, ...), the root of the mean of v_s; 0 where it is not known.
        outputs: Per-sample means, (S, N, ...); None where they were not kept.
        noise_var: v_s, (S, N, ...), or (1, N, ...) for all; None where the noise, or that of each sample, is not known.
    """

    _arrays = ("mean", "std", "epistemic", "aleatoric", "outputs")
    _average, _uncertainty, _digits = "mean", "std", ".4g"

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    outputs: Tensor | None = None
    noise_var: Tensor | None = None

    @property
    def std(self) -> Tensor:
        """Both standard deviations together, sqrt(epistemic^2 + aleatoric^2)."""
        return (self.epistemic**2 + self.aleatoric**2).sqrt()

    def with_noise(self, noise_var: float | Sequence[float] | Tensor) -> "RegressionPredictive":
        """Return the same prediction with noise of this variance, such as `metrics.fit_noise` finds on other data.

        Args:
            noise_var: A number, a variance for each output, or a tensor that broadcasts to the mean.

        Raises:
            ValueError: The variance is negative or not finite, or of another shape.
        """
        noise = torch.as_tensor(noise_var, dtype=torch.float64).detach().cpu()
        if not bool((torch.isfinite(noise) & (noise >= 0)).all()):
            raise ValueError(f"noise_var must be finite and >= 0, got {noise_var!r}")
        if noise.dim() == 1 and noise.shape != self.mean.shape[-1:] and len(noise) == self.mean[:1].numel():
            noise = noise.view(self.mean.shape[1:])
        try:
            noise = noise.expand_as(self.mean)
        except RuntimeError:
            raise ValueError(
                f"noise_var must be a number or one for each output, got shape {tuple(noise.shape)} for a mean of "
                f"shape {tuple(self.mean.shape)}"
            ) from None
        return replace(self, aleatoric=noise.sqrt(), noise_var=noise.unsqueeze(0))

    @property
    def components(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the mixture's Gaussians, each (S, N, ...)."""
        if self.outputs is None or self.closed_form:
            return self.mean.unsqueeze(0), self.std.unsqueeze(0)
        means = self.outputs.double()
        return means, torch.zeros_like(means) if self.noise_var is None else self.noise_var.sqrt().expand_as(means)

    @property
    def noise_known(self) -> bool:
        """Whether the noise of the data is part of the prediction."""
        return self.noise_var is not None or bool(self.aleatoric.any())

    def interval(self, level: float = LEVEL, *, noise: bool = True) -> tuple[Tensor, Tensor]:
        """Return the central interval (low, high): the mixture's quantiles at (1 - level)/2 and (1 + level)/2.

        Few samples make it too narrow where the epistemic part is the larger one: take 50 or more.

        Args:
            level: The probability that it holds.
            noise: Whether it is for what will be observed; False gives that of the function, without the noise.

        Raises:
            ValueError: The level is no probability, or the noise is not known.
        """
        check_fraction("level", level, "0.95 is customary")
        if noise and not self.noise_known:
            raise ValueError(NO_NOISE)
        without = replace(self, aleatoric=torch.zeros_like(self.mean), noise_var=None)
        means, stds = (self if noise else without).components
        low, high = (gaussians.mixture_quantile(means, stds, (1 + sign * level) / 2) for sign in (-1, 1))
        return low, high

    def sets(self, quantile: float, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the conformal interval mean -+ quantile * std, or mean -+ quantile for "absolute" scores.

        Args:
            quantile: What `metrics.conformal_quantile` returned for labelled data of the same source.
            kind: "scaled" or "absolute", for a quantile that is a plain number.
        """
        width = quantile * half_width(self, kind_of(quantile, kind, INTERVAL_KINDS))
        return self.mean - width, self.mean + width

    def targets(self) -> Tensor:
        """Return the labels in float64 and of the mean's shape."""
        if self.labels is None:
            raise ValueError("the prediction has no targets; predict on batches of (inputs, targets)")
        return values_like(self.mean, self.labels)

    @property
    def ranks(self) -> Tensor:
        """F(y) of every target, uniform between 0 and 1 for a calibrated prediction (the PIT)."""
        if not self.noise_known:
            raise ValueError(NO_NOISE)
        return gaussians.mixture_cdf(*self.components, self.targets())

    @cached_property
    def scores(self) -> dict[str, float]:
        """RMSE, and NLL, CRPS, coverage and width of the 95% interval of the mixture; empty without targets.

        Where the noise is not known, the RMSE alone: see `with_noise`.
        """
        if self.labels is None:
            return {}
        y, parts = self.targets(), self.components
        rmse = {"rmse": float((y - self.mean).square().mean().sqrt())}
        if not self.noise_known:
            return rmse
        low, high = self.interval()
        return rmse | {
            "nll": float(gaussians.mixture_nll(*parts, y).mean()),
            "crps": float(gaussians.mixture_crps(*parts, y).mean()),
            "coverage": float(((low <= y) & (y <= high)).double().mean()),
            "width": float((high - low).mean()),
        }

    def _columns(self) -> dict[str, Tensor | None]:
        low, high = self.interval() if self.noise_known else (None, None)
        targets = None if self.labels is None else self.targets()
        table = {"mean": self.mean, "std": self.std, "low": low, "high": high, "target": targets}
        return table | {"epistemic": self.epistemic, "aleatoric": self.aleatoric}

    def _details(self, averaged: str) -> str:
        return f"{averaged}, mean std {float(self.std.mean()):.4g}"


def noise_of(model: nn.Module, scopes: Sequence[Scope]) -> Tensor | None:
    """Return the variances of a model's noise: those learned beside it, else what its fit found; None without any."""
    if (learned := noise_in(model)) is not None:
        return learned.variance.cpu().double()
    found = next((v for scope in scopes if (v := getattr(scope.method, "noise_var", None)) is not None), None)
    return None if found is None else torch.tensor(found, dtype=torch.float64)
