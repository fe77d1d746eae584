"""Probabilities averaged over posterior samples, in log space: what classes and yes-or-no labels have in common."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from bayesify.prediction.novelty import Judged
from bayesify.prediction.pieces import join, join_labels, one_of, stack_samples


@dataclass(frozen=True, eq=False)
class Probabilities(Judged):
    """The average p = 1/S sum_s p_s of categorical distributions; the subclasses say what their categories are."""

    _arrays: ClassVar[tuple[str, ...]] = (
        "entropy", "expected_entropy", "mutual_information", "logits", "labels", "novelty", "novelty_pvalue",
    )  # fmt: skip

    log_probs: Tensor
    expected_entropy: Tensor
    logits: Tensor | None
    labels: Tensor | None
    num_samples: int
    weights: Tensor | None = None
    """What each row of `logits` weighs, (S,), where members of a mixture have unequal numbers of samples."""

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

    def __getitem__(self, index: Any) -> Self:
        """Take some of the examples."""
        index = one_of(index, len(self))
        return replace(
            self,
            log_probs=self.log_probs[index],
            expected_entropy=self.expected_entropy[index],
            logits=None if self.logits is None else self.logits[:, index],
            labels=None if self.labels is None else self.labels[index],
            **self.judged_at(index),
        )

    def __array__(self, *about: Any, **more: Any) -> NoReturn:
        raise TypeError("a prediction is no array but several; pass its .probs, or take them by name from .numpy()")

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name."""
        found = {name: getattr(self, name) for name in self._arrays}
        return {name: value.numpy() for name, value in found.items() if value is not None}


class ProbabilityTally:
    """Collect a model's outputs sample by sample, keeping the logits or only the sums of probabilities and entropies.

    Subclasses say how an output is read.
    """

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.log_sums: dict[int, Tensor] = {}
        self.entropies: dict[int, Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits to keep, and the log-probabilities in float64."""
        raise NotImplementedError

    def add(self, sample: int, batch: int, output: Tensor) -> None:
        """Add the output of one sample on one batch."""
        logits, log_probs = self.read(output)
        entropy = entropy_of(log_probs)
        if batch in self.log_sums:
            log_probs = torch.logaddexp(self.log_sums[batch], log_probs)
            entropy = self.entropies[batch] + entropy
        self.log_sums[batch], self.entropies[batch] = log_probs, entropy
        if self.keep:
            self.logits[sample, batch] = logits

    def averages(self, num_samples: int, labels: list[Any]) -> dict[str, Any]:
        """Return the fields of `Probabilities` over all batches."""
        count, order = max(num_samples, 1), sorted(self.log_sums)
        return {
            "log_probs": (join([self.log_sums[b] for b in order]) - math.log(count)).clamp_max_(0),
            "expected_entropy": join([self.entropies[b] for b in order]) / count,
            "logits": stack_samples(self.logits, count, order) if self.keep else None,
            "labels": join_labels(labels, sum(len(self.log_sums[b]) for b in order)),
            "num_samples": num_samples,
        }


def averaged(log_probs: Iterable[Tensor], weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log sum_s w_s p_s and sum_s w_s H[p_s]; w_s is 1/S by default.

    The sums go from the first to the last, as those over a model's samples do: equal logits give equal bits.
    """
    rows = list(log_probs)
    entropies = [entropy_of(row) for row in rows]
    if weights is not None:
        total = reduce(torch.logaddexp, [row + w.log() for row, w in zip(rows, weights, strict=True)])
        entropy = reduce(torch.add, [row * w for row, w in zip(entropies, weights, strict=True)])
        return total.clamp_max_(0), entropy
    total = (reduce(torch.logaddexp, rows) - math.log(len(rows))).clamp_max_(0)
    return total, reduce(torch.add, entropies) / len(rows)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    probs = log_probs.exp()
    return -torch.where(probs == 0, 0.0, probs * log_probs).sum(-1)
