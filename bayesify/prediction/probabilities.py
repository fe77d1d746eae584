"""Averages over samples in log space: for classes and for yes-or-no labels; and how pieces are joined and shown."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.core.summary import html_table
from bayesify.prediction.novelty import Judged
from bayesify.prediction.targets import values_like
from bayesify.quality import metrics

if TYPE_CHECKING:
    from pandas import DataFrame


SHOWN = 5


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


def said(num_samples: int, closed_form: bool) -> str:
    """Say what a prediction is the average over."""
    return f"{num_samples} samples" if num_samples else "closed form" if closed_form else "one model"


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
    """Concatenate the labels, if the batches had any.

    Raises:
        ValueError: Some batches had none, or they are not as many as the examples.
        TypeError: They are not numbers.
    """
    missing = sum(value is None for value in labels)
    if missing == len(labels):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(labels)} batches have no labels; give them to all batches, or to none")
    try:
        tensors = [torch.as_tensor(value).detach().cpu() for value in labels]
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(
            f"labels must be numbers, got {labels[0]!r:.60}; pass class numbers as torch.tensor([...])"
        ) from error
    joined = join(tensors, "labels")
    if len(joined) != count:
        raise ValueError(f"there are {len(joined)} labels for {count} examples; pass (inputs, labels) of one length")
    return joined


def frame(columns: Mapping[str, Tensor | None], shape: Sequence[int]) -> "DataFrame":
    """Return a DataFrame with one row per item; items of more than one dimension have an index of as many levels.

    Args:
        columns: Tensors of this shape by name; None is left out.
        shape: (N, ...).

    Raises:
        ImportError: There is no pandas.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError("to_pandas needs pandas, which is missing: pip install pandas") from error
    index: Any = pd.RangeIndex(shape[0], name="example")
    if len(shape) > 1:
        names = ["example", *(f"position_{i}" for i in range(1, len(shape)))]
        index = pd.MultiIndex.from_product([range(n) for n in shape], names=names)
    arrays = {name: value.flatten().numpy() for name, value in columns.items() if value is not None}
    return pd.DataFrame(arrays, index=index)


def shown(said: str, columns: Mapping[str, Tensor | None], doubt: Tensor) -> str:
    """Return HTML with what a prediction says of itself and its most doubtful items.

    Args:
        said: Its `repr`.
        columns: One tensor of (N,) per column; None is left out.
        doubt: The uncertainty to sort by, (N,).
    """
    worst = doubt.argsort(descending=True, stable=True)[:SHOWN].tolist()
    kept = {name: value for name, value in columns.items() if value is not None}
    rows = [[str(i), *(_cell(value[i].item()) for value in kept.values())] for i in worst]
    below = f"the {len(worst)} most doubtful of {len(doubt):,}" if len(doubt) > SHOWN else ""
    return html_table(("", *kept), rows, above=said, below=below)


def _cell(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
