"""A classifier's predictive distribution: what the model says, how sure it is, and where the doubt comes from."""

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.core.summary import html_table
from bayesify.prediction.batches import IGNORED, classes_last, values_like
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.novelty import Judged
from bayesify.quality import metrics
from bayesify.quality.arrays import Array
from bayesify.quality.conformal import conformal_sets

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


@dataclass(frozen=True, eq=False)
class Predictive(Probabilities):
    """The average over posterior samples of a classifier's probabilities.

    p(y|x) = 1/S sum_s softmax(logits_s(x)), computed in log space.

    Attributes:
        log_probs: Log of the averaged probabilities, (N, ..., K).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ..., K); None where they were not kept.
        labels: The labels that came with the data, or None.
        num_samples: S; 0 where the posterior mean or a closed form was used.
        weights: What each row of `logits` weighs, (S,); None where all weigh the same.
        closed_form: Whether the average, or that of some of a mixture's members, is over Gaussian logits, by
            `bayesify.prediction.gaussian.GaussianLogits`; their `logits` are then the mean's, (1, N, ..., K).
        method: The name of the model's method, for reports; empty where it has none, or is not known.
    """

    _arrays = ("probs", "confidence", "prediction", *Probabilities._arrays)

    closed_form: bool = False
    method: str = ""

    @classmethod
    def from_logits(cls, logits: "Array | Sequence[Array]", labels: Any = None) -> "Predictive":
        """Return the prediction of an ensemble that was made by hand, or of one model.

        Args:
            logits: (S, N, ..., K) with the classes last, or a list of S arrays (N, ..., K); (N, K) is one model.
            labels: Integer classes, (N, ...), if there are any.

        Returns:
            1/S sum_s softmax(logits_s), with the mean of the members' entropies.

        Raises:
            ValueError: The shapes do not fit.

        Example:
            >>> Predictive.from_logits(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]))
            Predictive(1 examples, 2 classes, 2 samples)
        """
        members = [in_full(torch.as_tensor(member)) for member in logits]
        each = torch.stack(members) if len({m.shape for m in members}) == 1 else torch.empty(0)
        count = 0 if each.dim() == 2 else len(each)
        each = each.unsqueeze(0) if each.dim() == 2 else each
        if each.dim() < 3 or each.shape[-1] < 2 or not each.shape[1]:
            raise ValueError(
                "logits must be (S, N, ..., K) with two classes or more, or (N, K) of one model, got "
                f"{[tuple(m.shape) for m in members[:3]]} for the first members; stack equal shapes, classes last"
            )
        log_probs, expected_entropy = averaged(F.log_softmax(member.double(), -1) for member in each)
        labels = join_labels([labels], each.shape[1])
        return cls(log_probs, expected_entropy, logits=each, labels=labels, num_samples=count)

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name, and how they were made: what `bayesify report` reads from an .npz file."""
        made = {"num_samples": self.num_samples, "closed_form": self.closed_form, "method": self.method}
        return super().numpy() | {name: np.array(value) for name, value in made.items()}

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

    def select(self, threshold: float) -> Tensor:
        """Tell which examples to answer, Booleans (N, ...): those of at least this confidence.

        `metrics.abstain_threshold` finds a threshold that keeps a promise about the error, infinite if none does.

        Raises:
            ValueError: The threshold is no probability.
        """
        if not (0 <= threshold <= 1 or threshold == math.inf):
            raise ValueError(f"threshold must be between 0 and 1, or infinite, got {threshold}; eighty percent is 0.8")
        return self.confidence >= threshold

    def tempered(self, temperature: float) -> "Predictive":
        """Return the prediction at another temperature, sum_s w_s softmax(logits_s / T) with weights w_s, mostly 1/S.

        Args:
            temperature: T, or what `metrics.fit_temperature` returned for a prediction of held-out data.

        Raises:
            ValueError: T is not positive and finite, or there are no logits of samples to divide.

        Example:
            >>> found = Predictive.from_logits(torch.tensor([[2.0, 0.0]]))
            >>> found.tempered(2.0).probs
            tensor([[0.7311, 0.2689]], dtype=torch.float64)
        """
        value = float(temperature)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"temperature must be positive and finite, got {value}; 1.0 changes nothing")
        if self.closed_form:
            whose = "of a member " if self.num_samples else ""
            raise ValueError(
                f"a closed form {whose}has no samples to temper, and its prior was tuned; predict with samples="
            )
        if self.logits is None:
            raise ValueError("the prediction has no logits; predict with keep_samples=True")
        each = (F.log_softmax(row.double() / value, -1) for row in self.logits)
        log_probs, expected_entropy = averaged(each, self.weights)
        return replace(self, log_probs=log_probs, expected_entropy=expected_entropy, logits=self.logits / value)

    def sets(self, quantile: float, kind: str | None = None, *, seed: int = 0) -> Tensor:
        """Tell which classes are in each example's conformal set, Booleans (N, ..., K).

        Args:
            quantile: What `metrics.conformal_quantile` returned for labelled data of the same source.
            kind: "lac" or "aps", for a quantile that is a plain number.
            seed: Of the randomness of "aps", without which its sets would cover more than they promise.
        """
        return conformal_sets(self.probs.flatten(0, -2), quantile, kind, seed=seed).view_as(self.log_probs)

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with one row per item: class, doubts, label, and the probability of each class."""
        names = ("prediction", "confidence", "entropy", "expected_entropy", "mutual_information", "labels")
        columns = {name: getattr(self, name) for name in names}
        columns |= {f"p_{k}": p for k, p in enumerate(self.probs.unbind(-1))}
        return frame(columns, self.expected_entropy.shape)

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
            **self.judged_at(torch.arange(len(self)).repeat_interleave(self.entropy[:1].numel())[kept]),
        )

    def __repr__(self) -> str:
        what = said(self.num_samples, self.closed_form)
        if not bool(self.log_probs.sum(-1).isnan().any()):
            scores = self._scores_in_words()
        else:
            scores = ", outputs that are not finite"
        return f"Predictive({len(self)} examples, {self.log_probs.shape[-1]} classes, {what}{scores})"

    def _repr_html_(self) -> str:
        flat = self.flat()
        names = ("prediction", "labels", "confidence", "entropy", "mutual_information")
        return shown(repr(self), {name: getattr(flat, name) for name in names}, flat.entropy)

    def _scores_in_words(self) -> str:
        try:
            return "".join(f", {name} {value:.4f}" for name, value in self.scores.items())
        except (ValueError, IndexError, RuntimeError):  # labels of another kind, or of another set of classes
            return ", labels that do not fit the classes"


class ClassificationTally(ProbabilityTally):
    """Collect a classifier's outputs."""

    classes: int | None = None
    """The dimension of the classes; None is that of `classes_last`."""

    def read(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits with the classes last, and log softmax of them."""
        logits = in_full(self._classes_last(output))
        if not self.log_sums:
            _warn_of_probabilities(logits)
        return logits, F.log_softmax(logits.double(), -1)

    def _classes_last(self, output: Tensor) -> Tensor:
        if output.dim() < 2 or (output.dim() == 2 and output.shape[1] < 2):
            raise ValueError(
                f"classification needs at least two logits per example, got outputs of shape {tuple(output.shape)}; "
                "give a single example as a batch, x.unsqueeze(0), and a binary model two outputs, or use "
                "task='multilabel' for a yes or no, 'regression' for a number"
            )
        return classes_last(output) if self.classes is None else output.movedim(self.classes, -1)

    def add_gaussian(self, batch: int, logits: GaussianLogits, output: Tensor) -> None:
        """Add one batch whose logits have a Gaussian distribution around a model's output.

        The expected entropy is what is left of the entropy without the mutual information, which comes from draws of
        the logits alone.
        """
        self._classes_last(output)
        log_probs = logits.log_probs()
        self.log_sums[batch] = log_probs
        information = logits.mutual_information().cpu().double()
        self.entropies[batch] = (entropy_of(log_probs) - information).clamp_min(0)
        if self.keep:
            self.logits[0, batch] = in_full(output)

    def finish(self, num_samples: int, labels: list[Any], *, closed_form: bool = False) -> Predictive:
        """Return the predictive distribution over all batches."""
        return Predictive(**self.averages(num_samples, labels), closed_form=closed_form)


def _warn_of_probabilities(logits: Tensor) -> None:
    """Warn where the first batch is made of rows that sum to one: a model that ends with softmax."""
    if logits.numel() and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-4).all()):
        warnings.warn(
            "the model's outputs look like probabilities, rows from 0 to 1 that sum to one, and softmax is applied to "
            "them once more; let the model return logits",
            stacklevel=2,
        )
