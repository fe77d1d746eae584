"""A multi-label model's predictive distribution: independent yes-or-no labels, each with its own doubt."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.prediction.pieces import in_full, said
from bayesify.prediction.probabilities import Probabilities, ProbabilityTally
from bayesify.prediction.showing import shown
from bayesify.prediction.targets import values_like
from bayesify.quality import metrics


@dataclass(frozen=True, eq=False)
class MultilabelPredictive(Probabilities):
    """The average over posterior samples of each label's probability, p(y_k=1|x) = 1/S sum_s sigmoid(f_sk(x)).

    Attributes:
        log_probs: Log of the averaged probabilities of no and yes, (N, ..., 2).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ...); None where they were not kept.
        labels: The labels that came with the data, or None.
        num_samples: S; 0 where the posterior mean was used.
        method: The name of the model's method; empty where it has none, or is not known.
    """

    _arrays = ("probs", "prediction", *Probabilities._arrays)

    method: str = ""

    @property
    def probs(self) -> Tensor:
        """Averaged probability of every label, (N, ...)."""
        return self.log_probs[..., 1].exp()

    @property
    def prediction(self) -> Tensor:
        """Whether each label is more probable than not."""
        return self.log_probs[..., 1] > self.log_probs[..., 0]

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

    def _repr_html_(self) -> str:
        names = ("probs", "prediction", "labels", "entropy", "mutual_information")
        columns = {n: None if (value := getattr(self, n)) is None else value.flatten() for n in names}
        return shown(repr(self), columns, self.entropy.flatten())

    def __repr__(self) -> str:
        what = said(self.num_samples, closed_form=False)
        try:
            scores = "".join(f", {name} {value:.4f}" for name, value in self.scores.items())
        except ValueError:
            scores = ", labels that do not fit the outputs"
        return f"MultilabelPredictive({len(self)} examples, {self.log_probs[0].numel() // 2} labels, {what}{scores})"


class MultilabelTally(ProbabilityTally):
    """Collect a multi-label model's outputs."""

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the log-probabilities of no and yes, (N, ..., 2)."""
        logits = in_full(output)
        return logits, F.logsigmoid(torch.stack([-logits, logits], -1).double())

    def finish(self, num_samples: int, labels: list[Any]) -> MultilabelPredictive:
        """Return the predictive distribution over all batches."""
        return MultilabelPredictive(**self.averages(num_samples, labels))
