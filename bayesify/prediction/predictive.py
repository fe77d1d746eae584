"""Predictive distributions of classifiers: the answer, its probability, and where the uncertainty comes from."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.core.summary import html_table
from bayesify.prediction.batches import IGNORED, joined_labels, values_like
from bayesify.quality import metrics
from bayesify.quality.arrays import Array, check_fraction
from bayesify.quality.conformal import conformal_sets

if TYPE_CHECKING:
    from pandas import DataFrame

BY_SAMPLE = ("logits", "outputs", "noise_var")  # (S, N, ...); other tensors are (N, ...)
ROWS, COLUMNS = 5, 5  # of the table in a notebook


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """What the predictions of all tasks have in common."""

    _arrays: ClassVar[tuple[str, ...]]
    _average: ClassVar[str]  # the field that has a row for every example
    _uncertainty: ClassVar[str]  # what sorts the table in a notebook
    _digits: ClassVar[str] = ".4f"

    _: KW_ONLY
    labels: Tensor | None = None  #: The labels that came with the data, or None.
    num_samples: int = 0  #: S; 0 where the posterior mean or a closed form was used.
    closed_form: bool = False  #: Whether it, or a mixture's member, is an exact average: logits are then the mean's.
    method: str = ""  #: The name of the model's method, for reports; empty where it has none, or is not known.
    novelty: Tensor | None = None  #: How strange each example is, (N,); None without `fit_novelty`.
    novelty_pvalue: Tensor | None = None  #: The share of held-out data that is at least as strange, (N,).
    false_alarms: float = 0.05  #: The default rate of `alarm`.

    def __len__(self) -> int:
        return len(getattr(self, self._average))

    def __getitem__(self, index: Any) -> Self:
        """Take some of the examples."""
        index = torch.arange(len(self))[index].view(-1)  # a single example keeps its dimension
        taken = {n: t[:, index] if n in BY_SAMPLE else t[index] for n, t in self.tensors().items()}
        return replace(self, **taken)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a row for every example, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "weights"}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def scores(self) -> dict[str, float]:
        """Scores against the labels by name; empty where there are none."""
        raise NotImplementedError

    def alarm(self, false_alarms: float | None = None) -> Tensor:
        """Return which examples are too strange, Booleans (N,).

        Args:
            false_alarms: The share of in-distribution examples that may be flagged; None is that of `fit_novelty`.

        Raises:
            ValueError: The model has no `fit_novelty`, or the share is out of range.
        """
        level = self.false_alarms if false_alarms is None else false_alarms
        check_fraction("false_alarms", level, "0.05 is one in twenty")
        if self.novelty_pvalue is None:
            raise ValueError("the prediction has no novelty; call fit_novelty(model, train_loader) before predict")
        return self.novelty_pvalue <= level

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name."""
        found = {name: getattr(self, name) for name in (*self._arrays, "labels", "novelty", "novelty_pvalue")}
        return {name: value.numpy() for name, value in found.items() if value is not None}

    def __array__(self, *about: Any, **more: Any) -> NoReturn:
        raise TypeError("a prediction is no array but several; pass its .probs, or take them by name from .numpy()")

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with one row per item; more than one dimension is an index of as many levels."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas, which is missing: pip install pandas") from error
        shape = getattr(self, self._uncertainty).shape
        index: Any = pd.RangeIndex(shape[0], name="example")
        if len(shape) > 1:
            names = ["example", *(f"position_{i}" for i in range(1, len(shape)))]
            index = pd.MultiIndex.from_product([range(n) for n in shape], names=names)
        columns = self._columns().items()
        return pd.DataFrame({n: t.flatten().numpy() for n, t in columns if t is not None}, index=index)

    def _columns(self) -> dict[str, Tensor | None]:
        """Return a tensor per column, one number per item; the first ones are those of the table in a notebook."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        try:
            columns = list(self._columns().items())[:COLUMNS]
        except ValueError:  # labels that do not fit, as the `repr` above the table says
            columns = list(replace(self, labels=None)._columns().items())[:COLUMNS]
        kept = {name: value.flatten() for name, value in columns if value is not None}
        uncertainty = getattr(self, self._uncertainty).flatten()
        worst = uncertainty.argsort(descending=True, stable=True)[:ROWS].tolist()
        numbers = [[i, *(value[i].item() for value in kept.values())] for i in worst]
        rows = [[f"{n:.4g}" if isinstance(n, float) else str(n) for n in row] for row in numbers]
        below = f"the {len(worst)} most uncertain of {len(uncertainty):,}" if len(uncertainty) > ROWS else ""
        return html_table(("", *kept), rows, above=repr(self), below=below)

    def _details(self, averaged: str) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        averaged = "closed form" if self.closed_form else "one model"
        averaged = f"{self.num_samples} samples" if self.num_samples else averaged
        try:
            scores = "".join(f", {name} {value:{self._digits}}" for name, value in self.scores.items())
        except (ValueError, IndexError, RuntimeError):  # labels of another kind, or of another set of classes
            scores = ", labels that do not fit the outputs"
        if bool(getattr(self, self._average).isnan().any()):
            scores = ", outputs that are not finite"
        return f"{type(self).__name__}({len(self)} examples, {self._details(averaged)}{scores})"


@dataclass(frozen=True, eq=False, repr=False)
class Probabilities(Prediction):
    """The average p = 1/S sum_s p_s of categorical distributions; the subclasses say what their categories are."""

    _arrays: ClassVar[tuple[str, ...]] = (
        "probs", "prediction", "entropy", "expected_entropy", "mutual_information", "logits",
    )  # fmt: skip
    _average, _uncertainty = "log_probs", "entropy"

    log_probs: Tensor
    expected_entropy: Tensor
    logits: Tensor | None = None
    weights: Tensor | None = None  # of each row of `logits`, (S,), where a mixture's members have unequal numbers

    @property
    def entropy(self) -> Tensor:
        """Entropy of the average (total uncertainty): -sum_k p_k log p_k."""
        return entropy_of(self.log_probs)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy minus expected entropy (epistemic uncertainty); never negative."""
        return (self.entropy - self.expected_entropy).clamp_min(0)


def entropy_of(log_probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    probs = log_probs.exp()
    return -torch.where(probs == 0, 0.0, probs * log_probs).sum(-1)


def in_full(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs on the CPU, in float32 or better; their device is waited for once."""
    full = [t.detach().to(torch.promote_types(t.dtype, torch.float32)) for t in outputs]
    if all(t.device.type == "cpu" for t in full):
        return full
    flat = torch.cat([t.flatten().to(full[0].device) for t in full]).cpu()
    pieces = torch.split(flat, [t.numel() for t in full])
    return [piece.view(t.shape).to(t.dtype) for piece, t in zip(pieces, full, strict=True)]


def averaged(
    log_probs: Iterable[Tensor], entropies: Iterable[Tensor] | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log sum_s w_s p_s and sum_s w_s H_s; w_s is 1/S by default, and H_s the entropy of p_s.

    The sums go from the first to the last, as those over a model's samples do: equal logits give equal bits.
    """
    rows = list(log_probs)
    each = [entropy_of(row) for row in rows] if entropies is None else list(entropies)
    if weights is not None:
        rows = [row + w.log() for row, w in zip(rows, weights, strict=True)]
        each = [entropy * w for entropy, w in zip(each, weights, strict=True)]
    total, count = reduce(torch.logaddexp, rows), len(rows) if weights is None else 1
    return (total - math.log(count)).clamp_max_(0), reduce(torch.add, each) / count


@dataclass(frozen=True, eq=False, repr=False)
class Predictive(Probabilities):
    """The average over posterior samples of a classifier's probabilities.

    p(y|x) = 1/S sum_s softmax(logits_s(x)), computed in log space.

    Attributes:
        log_probs: Log of the averaged probabilities, (N, ..., K).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ..., K); None where they were not kept.
        weights: What each row of `logits` weighs, (S,); None where all weigh the same.
    """

    _arrays = ("confidence", *Probabilities._arrays)

    @classmethod
    def from_logits(cls, logits: "Array | Sequence[Array]", labels: Any = None) -> "Predictive":
        """Return the prediction of an ensemble that was made by hand, or of one model.

        Args:
            logits: (S, N, ..., K) with the classes last, or a list of S arrays (N, ..., K); (N, K) is one model.
            labels: Integer classes, (N, ...), if there are any.

        Raises:
            ValueError: The shapes do not fit.

        Example:
            >>> Predictive.from_logits(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]))
            Predictive(1 examples, 2 classes, 2 samples)
        """
        members = in_full([torch.as_tensor(member) for member in logits])
        each = torch.stack(members) if len({m.shape for m in members}) == 1 else torch.empty(0)
        count = 0 if each.dim() == 2 else len(each)
        each = each.unsqueeze(0) if each.dim() == 2 else each
        if each.dim() < 3 or each.shape[-1] < 2 or not each.shape[1]:
            raise ValueError(
                "logits must be (S, N, ..., K) with two classes or more, or (N, K) of one model, got "
                f"{[tuple(m.shape) for m in members[:3]]} for the first members; stack equal shapes, classes last"
            )
        log_probs, expected_entropy = averaged(F.log_softmax(member.double(), -1) for member in each)
        labels = joined_labels([labels], each.shape[1])
        return cls(log_probs, expected_entropy, each, labels=labels, num_samples=count)

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
        """Return which examples to answer, Booleans (N, ...): those of at least this confidence.

        `metrics.abstain_threshold` finds a threshold that guarantees an error rate, infinite if none does.

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
            raise ValueError(f"a closed form {whose}has no samples to temper; predict with samples=")
        if self.logits is None:
            raise ValueError("the prediction has no logits; predict with keep_samples=True")
        each = (F.log_softmax(row.double() / value, -1) for row in self.logits)
        log_probs, expected_entropy = averaged(each, weights=self.weights)
        return replace(self, log_probs=log_probs, expected_entropy=expected_entropy, logits=self.logits / value)

    def sets(self, quantile: float, kind: str | None = None, *, seed: int = 0) -> Tensor:
        """Return which classes are in each example's conformal set, Booleans (N, ..., K).

        Args:
            quantile: What `metrics.conformal_quantile` returned for labelled data of the same source.
            kind: "lac" or "aps", for a quantile that is a plain number.
            seed: Of the randomness of "aps", without which its sets would cover too much.
        """
        return conformal_sets(self.probs.flatten(0, -2), quantile, kind, seed=seed).view_as(self.log_probs)

    @cached_property
    def scores(self) -> dict[str, float]:
        """Error, NLL and ECE (top label) against the labels; empty where there are none."""
        flat = self.flat()
        return {} if flat.labels is None else _scores(flat.log_probs, flat.labels.long())

    def flat(self) -> "Predictive":
        """Return one row per item (token, pixel), without those whose label is -100."""
        kept = slice(None) if self.labels is None else self.labels.flatten() != IGNORED
        rows = torch.arange(len(self)).repeat_interleave(self.expected_entropy[:1].numel())[kept]
        return replace(
            self,
            log_probs=self.log_probs.flatten(0, -2)[kept],
            expected_entropy=self.expected_entropy.flatten()[kept],
            logits=None if self.logits is None else self.logits.flatten(1, -2)[:, kept],
            labels=None if self.labels is None else self.labels.flatten()[kept],
            novelty=None if self.novelty is None else self.novelty[rows],
            novelty_pvalue=None if self.novelty_pvalue is None else self.novelty_pvalue[rows],
        )

    def _columns(self) -> dict[str, Tensor | None]:
        names = ("prediction", "labels", "confidence", "entropy", "mutual_information", "expected_entropy")
        each = {f"p_{k}": p for k, p in enumerate(self.probs.unbind(-1))}
        return {name: getattr(self, name) for name in names} | each

    def _repr_html_(self) -> str:
        return super(Predictive, self.flat())._repr_html_()

    def _details(self, averaged: str) -> str:
        return f"{self.log_probs.shape[-1]} classes, {averaged}"


@dataclass(frozen=True, eq=False, repr=False)
class MultilabelPredictive(Probabilities):
    """The average over posterior samples of each label's probability, p(y_k=1|x) = 1/S sum_s sigmoid(f_sk(x)).

    Attributes:
        log_probs: Log of the averaged probabilities of no and yes, (N, ..., 2).
        expected_entropy: Mean over the samples of their entropies (aleatoric), (N, ...).
        logits: Per-sample logits, (S, N, ...); None where they were not kept.
        weights: What each row of `logits` weighs, (S,); None where all weigh the same.
    """

    @property
    def probs(self) -> Tensor:
        """Averaged probability of every label, (N, ...)."""
        return self.log_probs[..., 1].exp()

    @property
    def prediction(self) -> Tensor:
        """Whether each label is more probable than not."""
        return self.log_probs[..., 1] > self.log_probs[..., 0]

    def flat(self) -> Predictive:
        """Return one row per label, a decision between no and yes."""
        labels = None if self.labels is None else values_like(self.probs, self.labels.double()).round().long()
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return Predictive(**held | {"labels": labels, "logits": None, "weights": None}).flat()

    @cached_property
    def scores(self) -> dict[str, float]:
        """Error, NLL and ECE over all labels, each a decision between two; empty where there are none."""
        return self.flat().scores

    def _columns(self) -> dict[str, Tensor | None]:
        names = ("probs", "prediction", "labels", "entropy", "mutual_information", "expected_entropy")
        return {name: getattr(self, name) for name in names}

    def _details(self, averaged: str) -> str:
        return f"{self.log_probs[0].numel() // 2} labels, {averaged}"


def _scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    return {
        "error": metrics.error(log_probs.exp(), labels),
        "nll": float(F.nll_loss(log_probs, labels)),
        "ece": metrics.ece(log_probs.exp(), labels),
    }
