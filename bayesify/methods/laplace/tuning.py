"""Choose the prior's scale after training: by evidence, by validation, or by the model's own predictions.

All prior scales are multiplied by one common factor. A candidate needs no training, and where the prediction is a
closed form, the last layer's inputs are computed once for all candidates.
"""

import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesify.core import ranks
from bayesify.core.distributed import part_of
from bayesify.core.prior import TOLERANCE, deviation
from bayesify.core.scopes import scopes_of
from bayesify.methods.laplace.evidence import Fitted, log_evidence, spread_all, typical_sig
from bayesify.methods.laplace.method import LastLayer
from bayesify.prediction.batches import as_batches, is_one_batch, joined_labels, split_batch, values_like
from bayesify.prediction.last_layer import NotLastError, passed
from bayesify.prediction.likelihoods import Classification, Given, Likelihood, Regression
from bayesify.prediction.predict import predict
from bayesify.prediction.view import evaluation
from bayesify.quality.calibration import golden_section
from bayesify.quality.regression import gaussian_nll

logger = logging.getLogger("bayesify")

# Of searches, in powers of ten: where they look, and a grid's step with the width at which golden sections end.
EVIDENCE_RANGE, SAMPLED_RANGE, CLOSED_RANGE, BOUND_RANGE = (-6.0, 3.0), (-4.0, 1.0), (-2.0, 2.5), (-4.0, 0.0)
SAMPLED, CLOSED = (1.0, 0.5), (0.5, 0.02)
FLAT = 1e-7  # nats: where a loss is flat, it is the grid's least
GIVE_UP = 1.0  # nats per example above the best so far, from where larger scales are not tried
DOSE = 0.1  # nats that tune="self" may cost on the model's own predictions
EXAMPLES = 2048  # at most, of validation data for sampled predictions, and of training inputs for tune="self"
# An untuned spread is bounded on this many training inputs at most, this many at least, and else one of so many: five
# scales then cost less than a forward pass over the data.
BOUND_EXAMPLES, BOUND_LEAST, BOUND_SHARE = 256, 8, 32
NO_LABELS = "tune= needs data with labels, got inputs alone; pass batches of (inputs, labels), or tune='self'"
CHOICES = {"marglik": "evidence", "self": "itself", "wide": "evidence"}


def choose(tune: Any, fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood, data: Sequence[Any]) -> float:
    """Return the factor of prior_sig by `fit_laplace`'s `tune`, with training inputs; posteriors change on the way."""
    if any(scope.sharded for scope in scopes_of(model)):
        data = data[: min(ranks.gathered(len(data)))]  # their forwards wait for each other
    if tune is None:
        return bounded(fitted, model, likelihood, data)
    if tune == "marglik":
        return by_evidence(fitted, model, likelihood)
    if tune == "self":
        return by_own_predictions(fitted, model, data)
    return by_validation(fitted, model, tune, likelihood)


def least(loss: Callable[[float], float], ends: tuple[float, float], fine: tuple[float, float]) -> float:
    """Return where a loss is least: on a grid from the low end until it is hopeless, then by golden sections."""
    (low, high), (step, width) = ends, fine
    tried: dict[float, float] = {}
    for i in range(round((high - low) / step) + 1):
        tried[low + i * step] = loss(low + i * step)
        if not tried[low + i * step] <= min(tried.values()) + GIVE_UP:
            break
    best = min(tried, key=lambda power: tried[power])
    finer = golden_section(loss, max(low, best - step), min(high, best + step), width)
    better = min(finer, key=lambda power: finer[power])
    return better if finer[better] < tried[best] - FLAT else best


def largest(cost: Callable[[float], float], limit: float, ends: tuple[float, float], width: float) -> float:
    """Return the largest power whose cost, which grows with it, is within a limit; the low end where none is."""
    low, high = ends
    if cost(high) <= limit:
        return high
    while high - low > width:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    return low


# -- evidence -----------------------------------------------------------------------------------------------------


def by_evidence(fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood) -> float:
    """Return the factor of prior_sig with the largest evidence (MacKay 1992)."""
    own = [part_of(one.posterior) for one in fitted if one.h is not None and not one.posterior.flat]
    if not any(bool(deviation(p.original.detach(), p).any()) for p in own):
        raise ValueError(
            "tune='marglik' weighs how far the weights are from the prior mean, and here they are the prior mean: the "
            "evidence would take the smallest scale; pass bayesify(..., prior_mean='zero') or the pretrained weights "
            "that training started from, or give validation batches"
        )
    spread_all(fitted, 1.0)
    closed = all(scope.method.closed_form(scope) is not None for scope in scopes_of(model))
    if not closed and not isinstance(likelihood, Regression):
        raise ValueError(
            "tune='marglik' is for regression and for a last layer (include=): the evidence is about the linear model, "
            "and sampled predictions of all weights can be far worse at its scale; give validation batches"
        )
    base = typical_sig(fitted)
    weights = max(1, sum(one.posterior.shape.numel() for one in fitted if one.h is not None))
    best = least(lambda power: -log_evidence(fitted, 10**power / base) / weights, EVIDENCE_RANGE, CLOSED)
    if min(best - EVIDENCE_RANGE[0], EVIDENCE_RANGE[1] - best) < CLOSED[1]:
        logger.warning("the evidence grows up to the end of the range, prior_sig %.3g: is the model trained?", 10**best)
    logger.info("prior_sig %.4g has the largest evidence (was %.4g)", 10**best, base)
    return 10**best / base


# -- validation ---------------------------------------------------------------------------------------------------


def by_validation(fitted: Sequence[Fitted], model: nn.Module, data: Any, likelihood: Likelihood) -> float:
    """Return the factor of prior_sig with the lowest NLL of the prediction on validation data.

    In closed form where there is one, else by the same few samples at about ten scales, on the first batches.
    """
    base = typical_sig(fitted)
    data = list(data) if isinstance(data, Iterator) else data  # every scale reads it again
    cached = Cached.of(model, fitted, data) if isinstance(likelihood, (Classification, Regression)) else None
    ends, fine = (SAMPLED_RANGE, SAMPLED) if cached is None else (CLOSED_RANGE, CLOSED)
    data = first_examples(data, EXAMPLES) if cached is None else data

    def loss(power: float) -> float:
        spread_all(fitted, 10**power / base)
        found = validation_nll(model, data, likelihood) if cached is None else cached.nll(likelihood)
        mean = _over_ranks(*found)
        logger.info("prior_sig %.3g: validation NLL %.4f", 10**power, mean)
        return mean

    best = least(loss, ends, fine)
    if best - ends[0] < fine[1]:
        logger.warning(
            "the least spread that was tried, prior_sig %.3g, has the lowest validation NLL: the model is not "
            "over-confident, and no spread improves its probabilities; a temperature may (metrics.fit_temperature)",
            10**best,
        )
    logger.info("prior_sig %.4g has the lowest validation NLL (was %.4g)", 10**best, base)
    return 10**best / base


def validation_nll(model: nn.Module, data: Any, likelihood: Likelihood) -> tuple[float, int]:
    """Return the sum over the examples of the NLL of the mixture over samples, and how many there are."""
    linear = None if isinstance(likelihood, Regression) else False
    found = predict(model, data, samples=_samples(model), seed=0, task="regression", linear=linear)
    if found.labels is None:
        raise ValueError(NO_LABELS)
    labels: Any = found.labels
    if isinstance(likelihood, Given):  # a function of the caller's takes the labels as they are
        labels = joined_labels([split_batch(batch)[1] for batch in as_batches(data)], len(found))
    assert found.outputs is not None
    try:
        nll = likelihood.mixture_nll(found.outputs, labels)
    except ValueError:
        if bool(torch.isfinite(found.outputs).all()):
            raise
        return math.inf, len(found)  # the prior is so wide that samples overflow
    return float(nll.sum()), len(found)


def _samples(model: nn.Module) -> int:
    """Return how many samples a scale is tried with: fewer say more about themselves, more cost more than they say."""
    return min(max(5, *(scope.method.nst for scope in scopes_of(model))), 10)


def _over_ranks(total: float, count: int) -> float:
    """Return the mean loss over the data of all processes."""
    found = ranks.gathered((total, count))
    return float(sum(t for t, _ in found) / sum(n for _, n in found))


class Cached(NamedTuple):
    """A closed form with the last layer's inputs and outputs, and the labels where there are some."""

    form: LastLayer
    features: Tensor
    outputs: Tensor
    labels: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, fitted: Sequence[Fitted], data: Any) -> "Cached | None":
        """Run the model once over the data; None where the fit has no closed form."""
        spread_all(fitted, 1.0)
        scopes = scopes_of(model)
        form = scopes[0].method.closed_form(scopes[0]) if len(scopes) == 1 else None
        if form is None:
            return None
        try:
            with evaluation(model):
                found = list(passed(model, scopes, form.head, [data] if is_one_batch(data) else data))
        except NotLastError:
            return None
        if not found:
            raise ValueError("tune= needs data with labels, got no batches")
        labels = None
        if all(one.target is not None for one in found):
            labels = torch.cat([torch.as_tensor(one.target).cpu() for one in found])
        return cls(form, torch.cat([one.features for one in found]), torch.cat([one.output for one in found]), labels)

    def nll(self, likelihood: Likelihood) -> tuple[float, int]:
        """Return the summed NLL of the closed-form prediction at the posterior's present scale, and the count."""
        if self.labels is None:
            raise ValueError(NO_LABELS)
        found = self.form.logits(self.features, self.outputs)
        if isinstance(likelihood, Regression):
            mean = found.mean.cpu().double()
            variance = found.variance().cpu().double() + likelihood.variances(mean)
            targets = values_like(mean, self.labels.double())
            return gaussian_nll(mean, variance.sqrt(), targets) * mean.numel(), len(mean)
        return float(likelihood.item_losses(found.log_probs(), self.labels).sum()), len(found.mean)


# -- the model's own predictions ----------------------------------------------------------------------------------


def by_own_predictions(fitted: Sequence[Fitted], model: nn.Module, data: Sequence[Any]) -> float:
    """Return the largest factor of prior_sig that raises the NLL of the model's own classes by no more than `DOSE`."""
    cached = Cached.of(model, fitted, data)
    if cached is None:
        raise ValueError(
            "tune='self' needs a prediction in closed form: a variance for the last linear layer only (include=); "
            "give validation batches instead"
        )
    base, own = typical_sig(fitted), cached._replace(labels=cached.outputs.argmax(-1).cpu())
    sure = torch.log_softmax(cached.outputs.cpu().double(), -1).amax(-1)
    before = _over_ranks(float(-sure.sum()), len(sure))

    def cost(power: float) -> float:
        spread_all(fitted, 10**power / base)
        return _over_ranks(*own.nll(Classification())) - before

    best = largest(cost, DOSE, CLOSED_RANGE, CLOSED[0] / 64)
    logger.info("prior_sig %.4g costs %.3g nats on the model's own predictions (was %.4g)", 10**best, DOSE, base)
    return 10**best / base


def bounded(fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood, data: Sequence[Any]) -> float:
    """Return the largest factor of prior_sig, at most 1, with which samples cost no more than `TOLERANCE` nats.

    The cost is KL(p || q) of the trained model's prediction p and the sampled prediction q on a few training inputs:
    where a network fits them exactly there is little curvature, and the spread is the prior's. A factor of 1 is for
    priors that were given as numbers, for closed forms, and for what is no classifier.
    """
    if not data or not isinstance(likelihood, Classification):
        return 1.0
    if not all(f.posterior.relative for f in fitted if f.h is not None) or Cached.of(model, fitted, data[:1]):
        return 1.0

    def log_probs(samples: int) -> Tensor:  # of every item; batches may be of sequences of different lengths
        how: Any = {"samples": samples, "seed": 0, "task": "classification", "keep_samples": False}
        return torch.cat([predict(model, [batch], **how).log_probs.flatten(0, -2) for batch in data])

    samples, log_p = _samples(model), log_probs(0)

    def cost(power: float) -> float:
        spread_all(fitted, 10**power)
        value = (log_p.exp() * (log_p - log_probs(samples))).sum(-1)
        return _over_ranks(float(value.sum()), len(value))

    best = largest(cost, TOLERANCE, BOUND_RANGE, 0.25)
    logger.info("prior scales times %.3g: samples cost %g nats on training inputs", 10**best, TOLERANCE)
    return float(10**best)


def inputs_needed(tune: Any, examples: int | None = None) -> int:
    """Return how many training inputs a choice looks at, of so many examples; at most, where None."""
    if tune == "self":
        return EXAMPLES
    few = BOUND_EXAMPLES if examples is None else min(BOUND_EXAMPLES, max(BOUND_LEAST, examples // BOUND_SHARE))
    return few if tune is None else 0


def first_examples(data: Any, most: int) -> list[Any]:
    """Return the first batches, cut to `most` examples; ragged batches stay whole."""
    kept: list[Any] = []
    for batch in [data] if is_one_batch(data) else data:
        if most <= 0:
            break
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        tensors = [leaf for leaf in tree_leaves(split_batch(batch)[::-1]) if isinstance(leaf, Tensor)]
        size = next((len(t) for t in tensors if t.dim()), 0)
        if size > most and all(t.dim() and len(t) == size for t in tensors):
            batch = tree_map_only(Tensor, operator.itemgetter(slice(most)), batch)
        kept.append(batch)
        most -= size
    return kept
