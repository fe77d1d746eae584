"""A predictive distribution: what the model says, how sure it is, and where the doubt comes from."""

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify import metrics

IGNORED = -100  # the label of what does not count, as in cross_entropy


@dataclass(frozen=True, eq=False)
class Predictive:
    """The average over posterior samples of a classifier's probabilities.

    p(y|x) = 1/S sum_s softmax(logits_s(x)), computed in log space.

    Attributes:
        log_probs: Log of the averaged probabilities, (N, ..., K).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ..., K); None where they were not kept.
        labels: The labels that came with the data, or None.
        num_samples: S; 0 where the posterior mean was used.
    """

    log_probs: Tensor
    expected_entropy: Tensor
    logits: Tensor | None
    labels: Tensor | None
    num_samples: int

    @property
    def probs(self) -> Tensor:
        """Averaged probabilities, (N, ..., K)."""
        return self.log_probs.exp()

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class."""
        return self.log_probs.amax(-1).exp()

    @property
    def prediction(self) -> Tensor:
        """The most probable class."""
        return self.log_probs.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the average (total uncertainty): -sum_k p_k log p_k."""
        return entropy_of(self.log_probs)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy (epistemic uncertainty); never negative."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    def __len__(self) -> int:
        return len(self.log_probs)

    def __getitem__(self, index: Any) -> "Predictive":
        """Take some of the examples."""
        index = one_of(index, len(self))
        return replace(
            self,
            log_probs=self.log_probs[index],
            expected_entropy=self.expected_entropy[index],
            logits=None if self.logits is None else self.logits[:, index],
            labels=None if self.labels is None else self.labels[index],
        )

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name."""
        names = ("probs", "confidence", "prediction", "entropy", "expected_entropy", "mutual_information")
        out = {name: getattr(self, name).numpy() for name in names}
        if self.logits is not None:
            out["logits"] = self.logits.numpy()
        if self.labels is not None:
            out["labels"] = self.labels.numpy()
        return out

    @cached_property
    def scores(self) -> dict[str, float]:
        """Error, NLL and ECE (top label) against the labels; empty where there are none."""
        flat = self.flat()
        if flat.labels is None:
            return {}
        return {
            "error": metrics.error(flat.probs, flat.labels),
            "nll": float(F.nll_loss(flat.log_probs, flat.labels.long())),
            "ece": metrics.ece(flat.probs, flat.labels),
        }

    def flat(self) -> "Predictive":
        """Return one row per item (token, pixel), without those whose label is -100."""
        kept = slice(None) if self.labels is None else self.labels.flatten() != IGNORED
        return replace(
            self,
            log_probs=self.log_probs.flatten(0, -2)[kept],
            expected_entropy=self.expected_entropy.flatten()[kept],
            logits=None if self.logits is None else self.logits.flatten(1, -2)[:, kept],
            labels=None if self.labels is None else self.labels.flatten()[kept],
        )

    def __repr__(self) -> str:
        what = f"{self.num_samples} samples" if self.num_samples else "posterior mean"
        if not bool(self.log_probs.sum(-1).isnan().any()):
            scores = self._scores_in_words()
        else:
            scores = ", outputs that are not finite"
        return f"Predictive({len(self)} examples, {self.log_probs.shape[-1]} classes, {what}{scores})"

    def _scores_in_words(self) -> str:
        try:
            return "".join(f", {name} {value:.4f}" for name, value in self.scores.items())
        except (ValueError, IndexError, RuntimeError):  # labels of another kind, or of another set of classes
            return ", labels that do not fit the classes"


@dataclass(frozen=True, eq=False)
class RegressionPredictive:
    """The mean and spread of a regression model over posterior samples.

    Attributes:
        mean: Mean over the samples, (N, ...).
        std: Standard deviation over the samples (epistemic), (N, ...); 0 for one sample.
        outputs: Per-sample outputs, (S, N, ...); None where they were not kept.
        labels: The targets that came with the data, or None.
        num_samples: S; 0 where the posterior mean was used.
    """

    mean: Tensor
    std: Tensor
    outputs: Tensor | None
    labels: Tensor | None
    num_samples: int

    def total_std(self, noise_var: "float | Tensor") -> Tensor:
        """Return sqrt(std^2 + noise_var): epistemic and aleatoric together."""
        if not isinstance(noise_var, Tensor) and not (math.isfinite(noise_var) and noise_var >= 0):
            raise ValueError(f"noise_var must be finite and >= 0, got {noise_var!r}")
        return (self.std**2 + noise_var).sqrt()

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, index: Any) -> "RegressionPredictive":
        """Take some of the examples."""
        index = one_of(index, len(self))
        return replace(
            self,
            mean=self.mean[index],
            std=self.std[index],
            outputs=None if self.outputs is None else self.outputs[:, index],
            labels=None if self.labels is None else self.labels[index],
        )

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name."""
        arrays = {"mean": self.mean, "std": self.std, "outputs": self.outputs, "labels": self.labels}
        return {name: value.numpy() for name, value in arrays.items() if value is not None}

    def __repr__(self) -> str:
        what = f"{self.num_samples} samples" if self.num_samples else "posterior mean"
        rmse = ""
        if self.labels is not None and self.labels.squeeze().shape == self.mean.squeeze().shape:
            rmse = f", rmse {float((self.mean - self.labels.view_as(self.mean)).square().mean().sqrt()):.4g}"
        return f"RegressionPredictive({len(self)} examples, {what}, mean std {float(self.std.mean()):.4g}{rmse})"


def one_of(index: Any, count: int) -> Any:
    """Return one example's index as a slice, which keeps the dimension, and any other index as it is.

    Raises:
        IndexError: There is no such example.
    """
    if isinstance(index, (slice, bool, np.bool_)) or getattr(index, "dtype", None) == torch.bool:
        return index
    try:
        index = operator.index(index)
    except TypeError:
        return index
    if not -count <= index < count:
        raise IndexError(f"there are {count} examples, got index {index}")
    return slice(index, index + 1 or None)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    probs = log_probs.exp()
    return -torch.where(probs == 0, 0.0, probs * log_probs).sum(-1)


class ClassificationTally:
    """Collect a classifier's outputs sample by sample, keeping the logits or only their running average."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.log_sums: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}

    def add(self, sample: int, batch: int, output: Tensor) -> None:
        """Add the output of one sample on one batch."""
        logits = in_full(self._classes_last(output))
        log_probs = F.log_softmax(logits.double(), -1)
        entropy = entropy_of(log_probs)
        if batch in self.log_sums:
            log_probs = torch.logaddexp(self.log_sums[batch], log_probs)
            entropy = self.entropies[batch] + entropy
        self.log_sums[batch], self.entropies[batch] = log_probs, entropy
        if self.keep:
            self.logits[sample, batch] = logits

    @staticmethod
    def _classes_last(output: Tensor) -> Tensor:
        if output.dim() < 2 or (output.dim() == 2 and output.shape[1] < 2):
            raise ValueError(
                f"classification needs at least two logits per example, got outputs of shape {tuple(output.shape)}; "
                "give a binary model two outputs, or use task='regression'"
            )
        return output.movedim(1, -1) if output.dim() >= 4 else output

    def finish(self, num_samples: int, labels: list[Any]) -> Predictive:
        """Return the predictive distribution over all batches."""
        count, order = max(num_samples, 1), sorted(self.log_sums)
        return Predictive(
            log_probs=(join([self.log_sums[b] for b in order]) - math.log(count)).clamp_max_(0),
            expected_entropy=join([self.entropies[b] for b in order]) / count,
            logits=stack_samples(self.logits, count, order) if self.keep else None,
            labels=join_labels(labels, sum(len(self.log_sums[b]) for b in order)),
            num_samples=num_samples,
        )


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

    def finish(self, num_samples: int, labels: list[Any]) -> RegressionPredictive:
        """Return the predictive distribution over all batches."""
        count, order = max(num_samples, 1), sorted(self.moments)
        variance = join([self.moments[b][2] for b in order]) / max(count - 1, 1)
        return RegressionPredictive(
            mean=join([self.moments[b][1] for b in order]),
            std=variance.sqrt(),
            outputs=stack_samples(self.outputs, count, order) if self.keep else None,
            labels=join_labels(labels, len(variance)),
            num_samples=num_samples,
        )


def in_full(output: Tensor) -> Tensor:
    """Return a model's output on the CPU, in float32 or better."""
    return output.detach().to("cpu", torch.promote_types(output.dtype, torch.float32))


def stack_samples(pieces: dict[tuple[int, int], Tensor], count: int, order: list[int]) -> Tensor:
    """Join the pieces by (sample, batch) to (S, N, ...)."""
    return torch.stack([join([pieces[s, b] for b in order]) for s in range(count)])


def join(pieces: list[Tensor], what: str = "outputs") -> Tensor:
    """Concatenate the batches.

    Raises:
        ValueError: Their shapes differ beyond the first dimension.
    """
    shapes = {tuple(p.shape[1:]) for p in pieces}
    if len(shapes) > 1:
        raise ValueError(
            f"batches give {what} of different shapes {sorted(shapes)}; pad the inputs to one length, "
            "or predict the batches one by one"
        )
    return torch.cat(pieces)


def join_labels(labels: list[Any], count: int) -> Tensor | None:
    """Concatenate the labels, if every batch had some.

    Raises:
        ValueError: They are not as many as the examples.
    """
    if not labels or any(value is None for value in labels):
        return None
    joined = join([torch.as_tensor(value).detach().cpu() for value in labels], "labels")
    if len(joined) != count:
        raise ValueError(f"there are {len(joined)} labels for {count} examples; pass (inputs, labels) of one length")
    return joined
