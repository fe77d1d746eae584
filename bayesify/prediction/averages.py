"""Average what the samples give, batch by batch; mix the members of a mixture; join the parts of processes."""

import math
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.core import ranks
from bayesify.prediction.batches import classes_last, joined, joined_labels, mean_and_log_var
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.predictive import (
    BY_SAMPLE,
    MultilabelPredictive,
    Prediction,
    Predictive,
    averaged,
    entropy_of,
    in_full,
)
from bayesify.prediction.regression import RegressionPredictive

AnyPredictive = Predictive | MultilabelPredictive | RegressionPredictive
TOGETHER, AT_ONCE = 16, 1 << 26  # outputs, or bytes, that reach the CPU in one copy

P = TypeVar("P", bound=Prediction)
C = TypeVar("C", Predictive, MultilabelPredictive)


class Tally(ABC, Generic[P]):
    """Running averages of every batch over the samples, which come one after the other."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.sums: dict[int, Any] = {}
        self.kept: dict[int, list[Tensor]] = defaultdict(list)
        self.waiting: list[tuple[int, list[Tensor]]] = []  # on the device, to reach the CPU in one copy

    def add(self, batch: int, output: Tensor, exact: GaussianLogits | None = None) -> None:
        """Add the output of the next sample on one batch; or that of the mean, whose distribution is known exactly."""
        value = self._checked(output.detach().clone())  # a compiled model may write to its output again
        self.waiting.append((batch, [value] if exact is None else [value, *self._moments(exact)]))
        full = len(self.waiting) == TOGETHER or sum(t.nbytes for _, own in self.waiting for t in own) > AT_ONCE
        if value.is_cpu or full:
            self._take()

    def finish(self, num_samples: int, labels: Sequence[Any], *, closed_form: bool = False) -> P:
        """Return the prediction for all batches."""
        self._take()
        count = max(num_samples, 1)
        each = [self._part(i, count, torch.stack(self.kept.pop(i)) if self.keep else None) for i in sorted(self.sums)]
        found = concatenated(each)
        joined = joined_labels(labels, len(found))
        return replace(found, labels=joined, num_samples=num_samples, closed_form=closed_form)

    def _take(self) -> None:
        """Add what is waiting to the sums."""
        found = iter(in_full([t for _, own in self.waiting for t in own]))
        for batch, own in self.waiting:
            value, *moments = islice(found, len(own))
            self.sums[batch] = self._exactly(value, *moments) if moments else self._plus(self.sums.get(batch), value)
            if self.keep:
                self.kept[batch].append(value)
        self.waiting.clear()

    def _checked(self, value: Tensor) -> Tensor:
        """Return an output as it is kept."""
        return value

    @abstractmethod
    def _plus(self, sums: Any, value: Tensor) -> Any:
        """Return a batch's sums with one more sample; they are None before the first."""

    def _moments(self, exact: GaussianLogits) -> Sequence[Tensor]:
        """Return what counts of a Gaussian distribution around the output."""
        raise NotImplementedError

    def _exactly(self, value: Tensor, *moments: Tensor) -> Any:
        """Return a batch's sums, given the output and these moments."""
        raise NotImplementedError

    @abstractmethod
    def _part(self, batch: int, count: int, kept: Tensor | None) -> P:
        """Return the prediction for one batch, given the kept outputs of all `count` samples."""


class ProbabilityTally(Tally[C]):
    """Sums of probabilities, as logarithms, and of entropies."""

    kind: type[C]

    @abstractmethod
    def _log_probs(self, value: Tensor) -> Tensor:
        """Return the log-probabilities in float64."""

    def _plus(self, sums: Any, value: Tensor) -> Any:
        log_probs = self._log_probs(value)
        entropy = entropy_of(log_probs)
        return (log_probs, entropy) if sums is None else (torch.logaddexp(sums[0], log_probs), sums[1] + entropy)

    def _moments(self, exact: GaussianLogits) -> Sequence[Tensor]:
        return exact.scaled(), exact.mutual_information()

    def _exactly(self, value: Tensor, *moments: Tensor) -> Any:
        scaled, information = moments
        log_probs = F.log_softmax(scaled.double(), -1)
        return log_probs, (entropy_of(log_probs) - information.double()).clamp_min(0)  # that of the draws of logits

    def _part(self, batch: int, count: int, kept: Tensor | None) -> C:
        log_sum, entropies = self.sums[batch]
        return self.kind((log_sum - math.log(count)).clamp_max_(0), entropies / count, kept)


class ClassificationTally(ProbabilityTally[Predictive]):
    """The average of a classifier's probabilities."""

    kind = Predictive
    classes: int | None = None  # the dimension of the classes; None is that of `classes_last`

    def _checked(self, value: Tensor) -> Tensor:
        if value.dim() < 2 or (value.dim() == 2 and value.shape[1] < 2):
            raise ValueError(
                f"classification needs at least two logits per example, got outputs of shape {tuple(value.shape)}; "
                "give a single example as a batch, x.unsqueeze(0), and a binary model two outputs, or use "
                "task='multilabel' for a yes or no, 'regression' for a number"
            )
        return classes_last(value) if self.classes is None else value.movedim(self.classes, -1)

    def _log_probs(self, value: Tensor) -> Tensor:
        first = not self.sums and value.numel() and bool((value >= 0).all())
        if first and bool(((value.sum(-1) - 1).abs() < 1e-4).all()):
            warnings.warn(
                "the model's outputs look like probabilities, rows from 0 to 1 that sum to one, and softmax is applied "
                "to them once more; let the model return logits",
                stacklevel=2,
            )
        return F.log_softmax(value.double(), -1)


class MultilabelTally(ProbabilityTally[MultilabelPredictive]):
    """The average of the probabilities of a multi-label model, each a pair of no and yes."""

    kind = MultilabelPredictive

    def _log_probs(self, value: Tensor) -> Tensor:
        return F.logsigmoid(torch.stack([-value, value], -1).double())


class RegressionTally(Tally[RegressionPredictive]):
    """Mean and spread of a regression model's outputs, by Welford's recurrence."""

    def _plus(self, sums: Any, value: Tensor) -> Any:
        value = self._values(value)
        count, mean, squares = sums or (0, torch.zeros_like(value), torch.zeros_like(value))
        delta = value - mean
        mean = mean + delta / (count + 1)
        return count + 1, mean, squares + delta * (value - mean)

    def _moments(self, exact: GaussianLogits) -> Sequence[Tensor]:
        return (exact.variance(),)

    def _exactly(self, value: Tensor, *moments: Tensor) -> Any:
        return 1, value.double(), moments[0].double()

    def _values(self, value: Tensor) -> Tensor:
        return value.double()

    def _part(self, batch: int, count: int, kept: Tensor | None) -> RegressionPredictive:
        _, mean, squares = self.sums[batch]
        return RegressionPredictive(mean, (squares / max(count - 1, 1)).sqrt(), torch.zeros_like(mean), kept)


class HeteroscedasticTally(RegressionTally):
    """The same for outputs that are means and log variances, in halves of the last dimension."""

    def _values(self, value: Tensor) -> Tensor:
        mean, log_var = mean_and_log_var(value)
        return torch.cat([mean.double(), log_var.double().exp()], -1)

    def _part(self, batch: int, count: int, kept: Tensor | None) -> RegressionPredictive:
        both = super()._part(batch, count, None)
        mean, noise_var = mean_and_log_var(both.mean)
        outputs, log_var = (None, None) if kept is None else mean_and_log_var(kept)
        noise = None if log_var is None else log_var.double().exp()
        return RegressionPredictive(mean, both.epistemic.chunk(2, -1)[0], noise_var.sqrt(), outputs, noise)


TALLIES: dict[str, type[Tally[Any]]] = {
    "classification": ClassificationTally,
    "tokens": ClassificationTally,
    "regression": RegressionTally,
    "heteroscedastic": HeteroscedasticTally,
    "multilabel": MultilabelTally,
}


def concatenated(parts: Sequence[P]) -> P:
    """Join predictions of one kind on different examples."""
    each = [part.tensors() for part in parts]
    names = [name for name in each[0] if all(name in tensors for tensors in each)]
    return replace(parts[0], **{n: joined([t[n] for t in each], dim=int(n in BY_SAMPLE)) for n in names})  # type: ignore[arg-type]


def gathered(found: AnyPredictive, places: list[int]) -> AnyPredictive:
    """Join the parts of all processes: each item of the data set once, in its order."""
    if len(found) != len(places):
        raise ValueError(
            f"the loader's sampler names {len(places)} items, and its batches have {len(found)}; predict on batches "
            "with one row per item, or give every process all of the data"
        )
    parts = ranks.gathered((places, found))
    rows: dict[int, int] = {}
    for row, place in enumerate(chain.from_iterable(own for own, _ in parts)):
        rows.setdefault(place, row)  # samplers repeat items, so that all processes have as many
    whole: AnyPredictive = concatenated([part for _, part in parts])
    return whole[torch.tensor([rows[place] for place in sorted(rows)])]


def mixed(parts: Sequence[AnyPredictive]) -> AnyPredictive:
    """Return the mixture of members' predictions, which are of one kind and on the same data."""
    if len(parts) == 1:
        return parts[0]
    if regressions := [p for p in parts if isinstance(p, RegressionPredictive)]:
        return _mixed_regressions(regressions)
    found = [p for p in parts if not isinstance(p, RegressionPredictive)]
    log_probs, expected_entropy = averaged([p.log_probs for p in found], [p.expected_entropy for p in found])
    counts = [max(p.num_samples, 1) for p in found]
    weights = [torch.full((count,), 1 / (len(counts) * count), dtype=torch.float64) for count in counts]
    return replace(
        found[0],
        log_probs=log_probs,
        expected_entropy=expected_entropy,
        logits=_in_turn([p.logits for p in found]),
        weights=None if len(set(counts)) == 1 else _in_turn(weights),
        num_samples=sum(p.num_samples for p in found),
        closed_form=any(p.closed_form for p in found),
    )


def _mixed_regressions(parts: Sequence[RegressionPredictive]) -> RegressionPredictive:
    """Return the mixture's moments: mean m = 1/M sum m_k, and variance 1/M sum (v_k + (m_k - m)^2).

    The Gaussians of single samples are kept where every member has as many of them, since each weighs the same.
    """
    means = torch.stack([p.mean for p in parts])
    mean = means.mean(0)
    within = torch.stack([p.epistemic.square() for p in parts]).mean(0)
    even = len({p.num_samples for p in parts}) == 1 and not any(p.closed_form for p in parts)
    noises = [None if p.noise_var is None else p.noise_var.expand(max(p.num_samples, 1), *mean.shape) for p in parts]
    return replace(
        parts[0],
        mean=mean,
        epistemic=(within + (means - mean).square().mean(0)).sqrt(),
        aleatoric=torch.stack([p.aleatoric.square() for p in parts]).mean(0).sqrt(),
        outputs=_in_turn([p.outputs for p in parts]) if even else None,
        noise_var=_in_turn(noises) if even else None,
        num_samples=sum(p.num_samples for p in parts),
        closed_form=all(p.closed_form for p in parts),
    )


def _in_turn(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Join what the members' samples gave, (S_m, N, ...) each: first every member's first, then the second ones.

    So row j is that of draw j of `samples(model, n, seed)`. None where one of the members has none.
    """
    kept = [piece for piece in pieces if piece is not None]
    if len(kept) < len(pieces):
        return None
    most = max(map(len, kept))
    return torch.stack([piece[turn] for turn in range(most) for piece in kept if turn < len(piece)])
