"""Predict with the posterior: the same few models on all the data, averaged.

Samples are the outer loop, so that n draws cost n draws; data that can be read only once, or comes in another order
each time, is read once, each batch under the same pinned draws. So it is where a part of the model has no posterior:
that part is then computed once per batch. The members of a mixture take turns, and their predictions are averaged.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import reduce
from itertools import chain
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bayesify.core import ranks
from bayesify.core.mixture import member_scopes
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import check_averaged, scopes_of, warn_of_mistakes
from bayesify.prediction.batches import (
    Readings,
    VariedError,
    as_batches,
    own_places,
    rereadable,
)
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predictive import Predictive
from bayesify.prediction.probabilities import MultilabelPredictive
from bayesify.prediction.regression import RegressionPredictive
from bayesify.prediction.run import TALLIES, Found, Member, Run, check_finite, is_plain, methods_of, task_of
from bayesify.prediction.statistics import warn_where_stale


@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["classification", "tokens"] | None = ...,
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
) -> Predictive: ...
@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["regression", "heteroscedastic"],
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
) -> RegressionPredictive: ...
@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["multilabel"],
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
) -> MultilabelPredictive: ...
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = None,
    *,
    seed: int | None = None,
    task: str | None = None,
    linear: bool | None = None,
    progress: bool = False,
    keep_samples: bool = True,
    update_bn: Any = None,
) -> Predictive | RegressionPredictive | MultilabelPredictive:
    """Average a model's predictions over posterior samples, in eval mode and without gradients.

    Args:
        model: A bayesified model, or a module that contains one. A plain model will do: its posterior is a point.
        data: One batch (a tensor, a dict, an HF BatchEncoding) or an iterable of batches, in which a tuple or list is
            (inputs,) or (inputs, labels), and a dict may hold "labels". Labels of a dict are compared with the outputs
            as in the model's own loss: a causal language model of Hugging Face's shifts them, so that each output is
            about the next token; labels of (inputs, labels) are compared place by place. Where processes
            read parts of it by a DistributedSampler (or Accelerate, in order), each gets the prediction of the whole,
            in the data set's order; all of them have to call.
        samples: How many posterior samples; 0 is the posterior mean. None takes the best way that the posterior has:
            one pass and a closed form where a fitted "la" has spread in a linear last layer only, or is a regression
            with few outputs (`num_samples` is then 0, and `logits` are the mean's), else the method's `nst` samples. A
            mixture spreads its samples evenly over the members, of which each weighs the same and has one at least;
            None does the best for every member: a closed form, one sample of a point, five of the others.
        seed: Which samples; the same as `samples(model, n, seed)`. None takes one number from torch's global generator,
            where there is anything to sample.
        task: "classification", "regression", "heteroscedastic" or "multilabel", the likelihoods of `fit_laplace`. None
            is that of the fit, or else "classification". The classes are the last dimension of outputs (N, K), the
            second of four dimensions and more, as segmentation gives them, and of three dimensions the last one
            ("tokens", and the logits of Hugging Face's outputs) or the one that the labels lack. In a regression the
            noise is that of `fit_laplace`, if it found one, or what the prediction's `with_noise` is told;
            "heteroscedastic" outputs are means and log variances, in halves of the last dimension.
        linear: Whether to read the model linearly in its weights, f(x, m) + J(x) (theta - m), with the derivative by
            `torch.func.jvp`; where there are few outputs and `samples` is None, in closed form. None does so for a
            regression that `fit_laplace` fitted, whose Gaussian belongs to that linear model.
        progress: Whether to show a progress bar.
        keep_samples: Whether to keep the outputs of every sample; False needs less memory.
        update_bn: Training data, as `data`, from which the statistics of BatchNorm layers are computed for every sample
            before it predicts: those of training belong to other weights. The model keeps its own.

    Returns:
        The predictive distribution, on the CPU.

    Raises:
        ValueError: The data is empty or can be read in two ways, or an argument is out of range.
        TypeError: The data holds arrays or texts, which the model does not take.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi")
        >>> predict(model, torch.ones(4, 3), samples=5, seed=0)
        Predictive(4 examples, 2 classes, 5 samples)
    """
    if linear not in (None, True, False):
        raise ValueError(f"linear must be True, False or None, got {linear!r}")
    if task is not None and task not in TALLIES:
        raise ValueError(f"task must be one of {list(TALLIES)}, got {task!r}")
    if samples is not None and (not is_whole(samples) or samples < 0):
        got = f"a {type(samples).__name__}; labels go with the data, [(inputs, labels)]"
        got = repr(samples) if isinstance(samples, (int, float, str)) else got
        raise ValueError(f"samples must be an integer >= 0, or None, got {got}")
    scopes = [] if is_plain(model) else scopes_of(model)
    batches, places = as_batches(data), own_places(data)
    whose = member_scopes(model, scopes)
    members = [Member(i, own, len(whose) == 1) for i, own in enumerate(whose)][: 1 if samples == 0 else None]
    if samples is not None and 0 < samples < len(members):
        raise ValueError(
            f"samples={samples} leaves {len(members) - samples} of the mixture's {len(members)} members out; give "
            f"samples={len(members)} or more, or 0 for the first member's mean"
        )
    if (len(members) > 1 or update_bn is not None) and not rereadable(batches):
        batches = list(batches)  # the members take their turns on the same data
    check_averaged(model)
    warn_of_mistakes(scopes, spread=samples != 0)
    if update_bn is None:
        warn_where_stale(model, scopes)
    elif linear:
        raise ValueError("linear=True reads the model at its mean, whose statistics it keeps; leave out update_bn")
    else:
        update_bn = as_batches(update_bn)
        update_bn = list(update_bn) if isinstance(update_bn, Iterator) else update_bn
    watch = Watch.of(model)
    if watch is not None and not rereadable(batches):
        batches = watch.follow(batches)
    run = Run(model, scopes, task or task_of(model, scopes), keep_samples, progress, update_bn, linear, watch)
    if isinstance(batches, DataLoader) and rereadable(batches):
        batches = Readings(batches)
    seeds: list[int] = []
    try:
        parts = run.over(members, batches, samples, seed, seeds)
    except VariedError:
        batches = list(data) if len(members) > 1 or update_bn is not None else iter(data)
        batches = batches if watch is None or rereadable(batches) else watch.follow(batches)
        parts = run.over(members, batches, samples, seed, seeds)
    found = replace(average(parts), method=methods_of(members))
    check_finite(model, found)
    if watch is not None:
        found = watch.judged(found, batches if rereadable(batches) else ())
    return found if places is None else together(found, places)


BY_SAMPLE = ("logits", "outputs", "noise_var")  # (S, N, ...); the other tensors are (N, ...)
SHARED = ("weights",)
C = TypeVar("C", Predictive, MultilabelPredictive)


def average(parts: Sequence[Found]) -> Found:
    """Return the mixture of members' predictions, which are of one kind and on the same data."""
    if len(parts) == 1:
        return parts[0]
    if regressions := [p for p in parts if isinstance(p, RegressionPredictive)]:
        return average_regressions(regressions)
    if several := [p for p in parts if isinstance(p, MultilabelPredictive)]:
        return average_probabilities(several)
    found = average_probabilities([p for p in parts if isinstance(p, Predictive)])
    return replace(found, closed_form=any(p.closed_form for p in parts if isinstance(p, Predictive)))


def average_probabilities(parts: Sequence[C]) -> C:
    """Return log(1/M sum_m p_m) and the mean of the expected entropies, for M members.

    The sums go from the first member to the last, as those over a model's samples do: equal logits give equal bits.
    """
    return replace(
        parts[0],
        log_probs=(reduce(torch.logaddexp, [p.log_probs for p in parts]) - math.log(len(parts))).clamp_max_(0),
        expected_entropy=reduce(torch.add, [p.expected_entropy for p in parts]) / len(parts),
        logits=in_turn([p.logits for p in parts]),
        weights=_weights([max(p.num_samples, 1) for p in parts]),
        num_samples=sum(p.num_samples for p in parts),
    )


def _weights(counts: Sequence[int]) -> Tensor | None:
    """Return the weight 1/(M S_m) of every row that `in_turn` joins; None where all are equal."""
    if len(set(counts)) == 1:
        return None
    each = [torch.full((count,), 1 / (len(counts) * count), dtype=torch.float64) for count in counts]
    return in_turn(each)


def average_regressions(parts: Sequence[RegressionPredictive]) -> RegressionPredictive:
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
        outputs=in_turn([p.outputs for p in parts]) if even else None,
        noise_var=in_turn(noises) if even else None,
        num_samples=sum(p.num_samples for p in parts),
        closed_form=all(p.closed_form for p in parts),
    )


def in_turn(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Join what the members' samples gave, (S_m, N, ...) each: first every member's first, then the second ones.

    So row j is that of draw j of `samples(model, n, seed)`. None where one of the members has none.
    """
    kept = [piece for piece in pieces if piece is not None]
    if len(kept) < len(pieces):
        return None
    most = max(map(len, kept))
    return torch.stack([piece[turn] for turn in range(most) for piece in kept if turn < len(piece)])


def together(found: Found, places: list[int]) -> Found:
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
    joined = _joined([part for _, part in parts])
    return joined[torch.tensor([rows[place] for place in sorted(rows)])]


def _joined(parts: Sequence[Found]) -> Found:
    """Join predictions of one kind on different items."""
    tensors: dict[str, Tensor] = {}
    for field in fields(parts[0]):
        values: Iterable[Any] = [getattr(part, field.name) for part in parts]
        if field.name not in SHARED and all(isinstance(value, Tensor) for value in values):
            tensors[field.name] = torch.cat(list(values), dim=1 if field.name in BY_SAMPLE else 0)
    return replace(parts[0], **tensors)  # type: ignore[arg-type]
