"""A regression model's predictive distribution: a Gaussian for each posterior sample, mixed with equal weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.core.gaussian_noise import noise_in
from bayesify.prediction.batches import mean_and_log_var, values_like
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.novelty import Judged
from bayesify.prediction.predictive import frame, in_full, join, join_labels, one_of, said, shown, stack_samples
from bayesify.quality import regression as gaussians
from bayesify.quality.conformal import INTERVAL_KINDS, half_width, kind_of

if TYPE_CHECKING:
    from pandas import DataFrame

LEVEL = 0.95
NO_NOISE = (
    "the noise of the data is not known, and intervals without it would hold too little; train with "
    "bayesify.methods.noise(model), or fit it to held-out data: "
    "out.with_noise(metrics.fit_noise(held.outputs, targets)); interval(noise=False) is that of the function alone"
)


@dataclass(frozen=True, eq=False)
class RegressionPredictive(Judged):
    """The prediction p(y|x) = 1/S sum_s N(y; f_s(x), v_s(x)) of a regression model.

    Intervals and scores are those of this mixture. Where the outputs of the samples were not kept, or mean and spread
    have a closed form, they are those of the one Gaussian with the same mean and standard deviation.

    Attributes:
        mean: Mean over the samples, (N, ...).
        epistemic: Standard deviation over the samples, (N, ...); 0 for one sample.
        aleatoric: Standard deviation of the noise, (N, ...), the root of the mean of v_s; 0 where it is not known.
        outputs: Per-sample means, (S, N, ...); None where they were not kept.
        noise_var: v_s, (S, N, ...), or (1, N, ...) for all; None where the noise, or that of each sample, is not known.
        labels: The targets that came with the data, or None.
        num_samples: S; 0 where the posterior mean or a closed form was used.
        closed_form: Whether mean and spread are exact; `outputs` are then the mean's, (1, N, ...).
        method: The name of the model's method, for reports; empty where it has none, or is not known.
    """

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    outputs: Tensor | None
    noise_var: Tensor | None
    labels: Tensor | None
    num_samples: int
    closed_form: bool = False
    method: str = ""

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

        Args:
            level: The probability that it holds.
            noise: Whether it is for what will be observed; False gives that of the function, without the noise.

        Raises:
            ValueError: The level is no probability, or the noise is not known.
        """
        gaussians.check_level(level)
        if noise and not self.noise_known:
            raise ValueError(NO_NOISE)
        means, stds = self.components if noise else self._without_noise().components
        low, high = (gaussians.mixture_quantile(means, stds, (1 + sign * level) / 2) for sign in (-1, 1))
        return low, high

    def _without_noise(self) -> "RegressionPredictive":
        return replace(self, aleatoric=torch.zeros_like(self.mean), noise_var=None)

    def sets(self, quantile: float, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the conformal interval mean -+ quantile * std, or mean -+ quantile for "absolute" scores.

        Args:
            quantile: What `metrics.conformal_quantile` returned for labelled data of the same source.
            kind: "scaled" or "absolute", for a quantile that is a plain number.
        """
        width = quantile * half_width(self, kind_of(quantile, kind, INTERVAL_KINDS))
        return self.mean - width, self.mean + width

    def targets(self) -> Tensor:
        """Return the labels in float64 and of the mean's shape.

        Raises:
            ValueError: There are none, or they do not fit.
        """
        if self.labels is None:
            raise ValueError("the prediction has no targets; predict on batches of (inputs, targets)")
        return values_like(self.mean, self.labels)

    @property
    def ranks(self) -> Tensor:
        """F(y) of every target, uniform between 0 and 1 for an honest prediction (the PIT).

        Raises:
            ValueError: There are no targets, or the noise is not known.
        """
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

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, index: Any) -> "RegressionPredictive":
        """Take some of the examples."""
        index = one_of(index, len(self))
        return replace(
            self,
            mean=self.mean[index],
            epistemic=self.epistemic[index],
            aleatoric=self.aleatoric[index],
            outputs=None if self.outputs is None else self.outputs[:, index],
            noise_var=None if self.noise_var is None else self.noise_var[:, index],
            labels=None if self.labels is None else self.labels[index],
            **self.judged_at(index),
        )

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name."""
        names = ("mean", "std", "epistemic", "aleatoric", "outputs", "labels", "novelty", "novelty_pvalue")
        arrays = {name: getattr(self, name) for name in names}
        return {name: value.numpy() for name, value in arrays.items() if value is not None}

    def _columns(self) -> dict[str, Tensor | None]:
        low, high = self.interval() if self.noise_known else (None, None)
        targets = None if self.labels is None else self.targets()
        return {"mean": self.mean, "std": self.std, "low": low, "high": high, "target": targets}

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with one row per output: mean, both doubts, the 95% interval and the target."""
        columns = self._columns() | {"epistemic": self.epistemic, "aleatoric": self.aleatoric}
        return frame(columns, self.mean.shape)

    def _repr_html_(self) -> str:
        fits = self.labels is None or self.labels.numel() == self.mean.numel()
        columns = (self if fits else replace(self, labels=None))._columns()
        flat = {name: None if value is None else value.flatten() for name, value in columns.items()}
        return shown(repr(self), flat, self.std.flatten())

    def __repr__(self) -> str:
        what = said(self.num_samples, self.closed_form)
        try:
            scores = "".join(f", {name} {value:.4g}" for name, value in self.scores.items() if math.isfinite(value))
        except ValueError:
            scores = ", targets that do not fit the outputs"
        return f"RegressionPredictive({len(self)} examples, {what}, mean std {float(self.std.mean()):.4g}{scores})"


def noise_of(model: nn.Module, scopes: Sequence[Any]) -> Tensor | None:
    """Return the variances of a model's noise: those learned beside it, else what its fit found; None without any.

    Args:
        model: The model, or a mixture's member.
        scopes: What a forward of it reads.
    """
    if (learned := noise_in(model)) is not None:
        return learned.variance.cpu().double()
    found = next((v for scope in scopes if (v := getattr(scope.method, "noise_var", None)) is not None), None)
    return None if found is None else torch.tensor(found, dtype=torch.float64)


class RegressionTally:
    """Collect a regression model's outputs sample by sample; the spread by Welford's recurrence."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.moments: dict[int, tuple[int, Tensor, Tensor]] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}

    def add(self, sample: int, batch: int, output: Tensor) -> None:
        """Add the output of one sample on one batch."""
        output = in_full(output)
        value = output.double()
        count, mean, squares = self.moments.get(batch, (0, torch.zeros_like(value), torch.zeros_like(value)))
        delta = value - mean
        mean = mean + delta / (count + 1)
        self.moments[batch] = (count + 1, mean, squares + delta * (value - mean))
        if self.keep:
            self.outputs[sample, batch] = output

    def add_gaussian(self, batch: int, logits: GaussianLogits, output: Tensor) -> None:
        """Add one batch whose outputs have a Gaussian distribution around the model's."""
        mean = in_full(output)
        self.moments[batch] = (1, mean.double(), in_full(logits.variance()).double())
        if self.keep:
            self.outputs[0, batch] = mean

    def finish(self, num_samples: int, labels: list[Any], *, closed_form: bool = False) -> RegressionPredictive:
        """Return the predictive distribution over all batches, without noise."""
        count, order = max(num_samples, 1), sorted(self.moments)
        variance = join([self.moments[b][2] for b in order]) / max(count - 1, 1)
        return RegressionPredictive(
            mean=join([self.moments[b][1] for b in order]),
            epistemic=variance.sqrt(),
            aleatoric=torch.zeros_like(variance),
            outputs=stack_samples(self.outputs, count, order) if self.keep else None,
            noise_var=None,
            labels=join_labels(labels, len(variance)),
            num_samples=num_samples,
            closed_form=closed_form,
        )


class HeteroscedasticTally(RegressionTally):
    """The same for a model whose outputs are means and log variances, in halves of the last dimension."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__(keep=keep)
        self.sums: dict[int, Tensor] = {}
        self.variances: dict[tuple[int, int], Tensor] = {}

    def add(self, sample: int, batch: int, output: Tensor) -> None:
        """Add the output of one sample on one batch."""
        mean, log_var = mean_and_log_var(output)
        super().add(sample, batch, mean)
        variance = in_full(log_var).double().exp()
        self.sums[batch] = self.sums[batch] + variance if batch in self.sums else variance
        if self.keep:
            self.variances[sample, batch] = variance

    def finish(self, num_samples: int, labels: list[Any], *, closed_form: bool = False) -> RegressionPredictive:
        """Return the predictive distribution over all batches, with the noise that the model gives."""
        count, order = max(num_samples, 1), sorted(self.sums)
        return replace(
            super().finish(num_samples, labels),
            aleatoric=(join([self.sums[b] for b in order]) / count).sqrt(),
            noise_var=stack_samples(self.variances, count, order) if self.keep else None,
        )
