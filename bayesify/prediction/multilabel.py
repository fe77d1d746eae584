"""A multi-label model's predictive distribution: independent yes-or-no labels, each with its own doubt."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.prediction.pieces import in_full, join, join_labels, one_of, stack_samples
from bayesify.prediction.showing import shown
from bayesify.prediction.targets import values_like
from bayesify.quality import metrics


@dataclass(frozen=True, eq=False)
class MultilabelPredictive:
    """The average over posterior samples of each label's probability, p(y_k=1|x) = 1/S sum_s sigmoid(f_sk(x)).

    Attributes:
        log_probs: Log of the averaged probabilities of no and yes, (N, ..., 2).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ...); None where they were not kept.
        labels: The labels that came with the data, or None.
        num_samples: S; 0 where the posterior mean was used.
        method: The name of the model's method; empty where it has none, or is not known.
    """

    log_probs: Tensor
    expected_entropy: Tensor
    logits: Tensor | None
    labels: Tensor | None
    num_samples: int
    method: str = ""

    @property
    def probs(self) -> Tensor:
        """Averaged probability of every label, (N, ...)."""
        return self.log_probs[..., 1].exp()

    @property
    def prediction(self) -> Tensor:
        """Whether each label is more probable than not."""
        return self.log_probs[..., 1] > self.log_probs[..., 0]

    @property
    def entropy(self) -> Tensor:
        """Entropy of every label's average (total uncertainty)."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy (epistemic uncertainty); never negative."""
        return (self.entropy - self.expected_entropy).clamp_min(0)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Error, NLL and ECE over all labels, each a decision between two; empty where there are none."""
        if self.labels is None:
            return {}
        truth = values_like(self.probs, self.labels.double()).flatten().round().long()
        log_probs = self.log_probs.flatten(0, -2)
        return {
            "error": metrics.error(log_probs.exp(), truth),
            "nll": float(F.nll_loss(log_probs, truth)),
            "ece": metrics.ece(log_probs.exp(), truth),
        }

    def __len__(self) -> int:
        return len(self.log_probs)

    def __getitem__(self, index: Any) -> "MultilabelPredictive":
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
        names = ("probs", "prediction", "entropy", "expected_entropy", "mutual_information", "logits", "labels")
        arrays = {name: getattr(self, name) for name in names}
        return {name: value.numpy() for name, value in arrays.items() if value is not None}

    def _repr_html_(self) -> str:
        names = ("probs", "prediction", "labels", "entropy", "mutual_information")
        columns = {n: None if (value := getattr(self, n)) is None else value.flatten() for n in names}
        return shown(repr(self), columns, self.entropy.flatten())

    def __repr__(self) -> str:
        what = f"{self.num_samples} samples" if self.num_samples else "one model"
        try:
            scores = "".join(f", {name} {value:.4f}" for name, value in self.scores.items())
        except ValueError:
            scores = ", labels that do not fit the outputs"
        return f"MultilabelPredictive({len(self)} examples, {self.log_probs[0].numel() // 2} labels, {what}{scores})"


class MultilabelTally:
    """Collect a multi-label model's outputs sample by sample, in log space."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.log_sums: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}

    def add(self, sample: int, batch: int, output: Tensor) -> None:
        """Add the output of one sample on one batch."""
        logits = in_full(output)
        log_probs = F.logsigmoid(torch.stack([-logits, logits], -1).double())
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        if batch in self.log_sums:
            log_probs = torch.logaddexp(self.log_sums[batch], log_probs)
            entropy = self.entropies[batch] + entropy
        self.log_sums[batch], self.entropies[batch] = log_probs, entropy
        if self.keep:
            self.logits[sample, batch] = logits

    def finish(self, num_samples: int, labels: list[Any]) -> MultilabelPredictive:
        """Return the predictive distribution over all batches."""
        count, order = max(num_samples, 1), sorted(self.log_sums)
        return MultilabelPredictive(
            log_probs=(join([self.log_sums[b] for b in order]) - np.log(count)).clamp_max_(0),
            expected_entropy=join([self.entropies[b] for b in order]) / count,
            logits=stack_samples(self.logits, count, order) if self.keep else None,
            labels=join_labels(labels, sum(len(self.log_sums[b]) for b in order)),
            num_samples=num_samples,
        )
