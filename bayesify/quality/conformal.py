"""Conformal prediction: sets and intervals that hold the truth with a stated probability, whatever the model.

The only assumption is that the data of the quantile and the data of the sets are exchangeable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.quality.arrays import Array, to_classes, to_probs

CLASS_KINDS = ("lac", "aps")
INTERVAL_KINDS = ("scaled", "absolute")


class ConformalQuantile(float):
    """A quantile of conformal scores, which knows what its scores are.

    Attributes:
        kind: The kind of the scores.
    """

    kind: str

    def __new__(cls, value: float, kind: str) -> ConformalQuantile:
        """Make a float that has a kind."""
        self = super().__new__(cls, value)
        self.kind = kind
        return self


def conformal_quantile(
    predictive: Any, alpha: float = 0.1, kind: str | None = None, *, seed: int = 0
) -> ConformalQuantile:
    """Find the quantile of a prediction's conformal scores: the ceil((n + 1)(1 - alpha))-th smallest of n.

    Sets and intervals made with it hold the truth of new data with a probability of at least 1 - alpha.

    Args:
        predictive: What `predict` returned for labelled data that the model was not trained on.
        alpha: The share of truths that may be missed.
        kind: For classes "lac" (the default), 1 - p_y, which has the smallest sets; or "aps", the probability of all
            classes before y, most probable first, plus u p_y for a uniform u per example, whose sets are larger for
            difficult examples (Romano, Sesia and Candes 2020). For regression "scaled" (the default), |y - mean|/std,
            or "absolute", |y - mean|.
        seed: Of the u of "aps".

    Returns:
        The quantile, a float, for `predictive.sets`; infinite where there are too few data.

    Raises:
        ValueError: There are no labels, or an argument is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]])
        >>> round(conformal_quantile(SimpleNamespace(probs=probs, labels=torch.tensor([0, 0, 1])), 0.25), 4)
        0.6
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}; 0.1 is customary")
    if getattr(predictive, "labels", None) is None:
        raise ValueError("the prediction has no labels; predict on batches of (inputs, labels)")
    kinds = CLASS_KINDS if hasattr(predictive, "probs") else INTERVAL_KINDS
    kind = kinds[0] if kind is None else kind
    if kind not in kinds:
        raise ValueError(f"kind must be one of {list(kinds)} here, got {kind!r}")
    if hasattr(predictive, "probs"):
        flat = predictive.flat() if hasattr(predictive, "flat") else predictive
        p, y = to_classes(flat.probs, flat.labels)
        scores = (1 - p if kind == "lac" else mass_up_to(p, 2 * seed)).gather(1, y.unsqueeze(1)).squeeze(1)
    else:
        error = (predictive.targets() - predictive.mean).abs()
        scores = (error / half_width(predictive, kind)).flatten()
    # Rounded in integers where they are meant: 0.9 * 10 may land above 9.
    rank = math.ceil(round((len(scores) + 1) * (1 - alpha), 9))
    return ConformalQuantile(float(scores.sort().values[rank - 1]) if rank <= len(scores) else math.inf, kind)


def conformal_sets(probs: Array, quantile: float, kind: str | None = None, *, seed: int = 0) -> Tensor:
    """Return which classes are in each example's set, Booleans (N, K): all whose score is at most the quantile.

    A set may be empty, where even the most probable class is less typical than the quantile. The u of "aps" come from
    another stream than those of `conformal_quantile`, whatever the seed of either.
    """
    kind = kind_of(quantile, kind, CLASS_KINDS)
    p = to_probs(probs, "probs", "(N, K)")
    return (1 - p if kind == "lac" else mass_up_to(p, 2 * seed + 1)) <= quantile


def mass_up_to(p: Tensor, seed: int) -> Tensor:
    """Return for each class the probability of all that come before it, most probable first, plus u of its own."""
    u = torch.rand(len(p), 1, dtype=p.dtype, generator=torch.Generator().manual_seed(seed))
    values, order = p.sort(dim=1, descending=True, stable=True)
    return torch.zeros_like(p).scatter_(1, order, values.cumsum(1) - (1 - u) * values)


def half_width(predictive: Any, kind: str) -> Tensor:
    """Return what a regression's conformal scores are measured in."""
    mean: Tensor = predictive.mean
    if kind == "absolute":
        return torch.ones_like(mean)
    std: Tensor = predictive.std
    if bool((std <= 0).any()):
        raise ValueError("the prediction has a std of 0, by which no error can be scaled; pass kind='absolute'")
    return std


def kind_of(quantile: float, kind: str | None, kinds: tuple[str, ...]) -> str:
    """Return the kind of scores that a quantile is about: its own, or the one given for a plain number."""
    own = getattr(quantile, "kind", None)
    found = own or kind or kinds[0]
    if found not in kinds or kind not in (None, found):
        raise ValueError(
            f"the quantile is one of {found!r} scores, which does not fit; make one with conformal_quantile"
        )
    return str(found)


def conformal_pvalues(scores: Tensor, held_out: Tensor) -> Tensor:
    """Return (1 + #{held-out >= score}) / (n + 1) for each score.

    A new example of the held-out data's source has a value of at most a with a probability of at most a.

    Args:
        scores: Larger is stranger, (N,).
        held_out: The sorted scores of n examples that nothing else was fitted on.
    """
    if torch.compiler.is_compiling():  # an exported graph, for which not every format has a search
        stranger = (held_out >= scores.unsqueeze(-1)).sum(-1)
    else:
        stranger = len(held_out) - torch.searchsorted(held_out, scores.contiguous())
    return (stranger + 1).double() / (len(held_out) + 1)
