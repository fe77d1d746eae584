"""Choose the prior's scale after training: by evidence, by validation, or by the model's own predictions.

The curvature is at hand, so that a candidate costs a pass over it, and no training. All prior scales are multiplied by
one common factor. Where the prediction is a closed form, the last layer's inputs are computed once for all candidates.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.prior import TOLERANCE
from bayesify.core.scopes import scopes_of
from bayesify.methods.laplace.closed_form import LastLayer
from bayesify.methods.laplace.evidence import (
    CLOSED,
    SAMPLED,
    Fitted,
    by_evidence,
    check_evidence,
    least,
    spread_all,
    typical_sig,
)
from bayesify.prediction.batches import as_batches, is_one_batch, split_batch
from bayesify.prediction.last_layer import NotLastError, passed
from bayesify.prediction.likelihoods import Classification, Given, Likelihood, Regression
from bayesify.prediction.predict import predict
from bayesify.prediction.predictive import join_labels
from bayesify.prediction.view import evaluation

logger = logging.getLogger("bayesify")

CHOICES = ("marglik", "self")
VALIDATION_RANGE = (-4.0, 1.0)  # for sampled predictions
CLOSED_RANGE = (-2.0, 2.5)  # 1/prior_sig^2 from 1e4 to 1e-5
SAMPLES = (5, 10)  # fewer say more about themselves than about the prior; more cost more than they say
VALIDATION_EXAMPLES = 2048  # on which sampled predictions are compared
DOSE = 0.1  # nats that tune="self" may cost on the model's own predictions
SELF_EXAMPLES = 2048  # training inputs that it looks at
BOUND_EXAMPLES = 256  # training inputs on which an untuned spread must do no harm: at most these,
BOUND_LEAST, BOUND_SHARE = 8, 32  # at least so many, and else one of so many: five scales cost less than a forward pass
BOUND_RANGE, BOUND_STEP = (-4.0, 0.0), 0.25  # powers of ten of its factor
NO_LABELS = "tune= needs data with labels, got inputs alone; pass batches of (inputs, labels), or tune='self'"


def choose(
    tune: Any, fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood, first: Any, *, progress: bool
) -> tuple[float, str]:
    """Return the factor of prior_sig, and a word for how it was chosen.

    Args:
        tune: As in `fit_laplace`.
        fitted: The parameters, whose posteriors are changed on the way.
        model: The model.
        likelihood: The loss.
        first: Batches of training inputs.
        progress: Whether to show a progress bar.
    """
    if tune is None:
        return bounded(fitted, model, likelihood, first), ""
    if tune == "marglik":
        check_evidence(fitted, model, likelihood)
        return by_evidence(fitted), "evidence"
    if tune == "self":
        return by_itself(fitted, model, first), "itself"
    return by_validation(fitted, model, tune, likelihood, progress=progress), "validation"


# -- validation ---------------------------------------------------------------------------------------------------


def by_validation(
    fitted: Sequence[Fitted], model: nn.Module, data: Any, likelihood: Likelihood, *, progress: bool = False
) -> float:
    """Return the factor of prior_sig with the lowest NLL of the prediction on validation data.

    In closed form where there is one, else by the same few samples at about ten scales, on the first batches.
    """
    base = typical_sig(fitted)
    data = list(data) if isinstance(data, Iterator) else data  # every scale reads it again
    closed = isinstance(likelihood, (Classification, Regression))
    cached = Cached.of(model, fitted, data) if closed else None
    ends, fine = (VALIDATION_RANGE, SAMPLED) if cached is None else (CLOSED_RANGE, CLOSED)
    data = _first_batches(data, VALIDATION_EXAMPLES) if cached is None else data
    tried: dict[float, float] = {}
    bar = tqdm(desc="tune", unit="scale", disable=not progress)

    def loss(power: float) -> float:
        if power not in tried:
            spread_all(fitted, 10**power / base)
            found = validation_nll(model, data, likelihood) if cached is None else cached.nll(likelihood)
            tried[power] = _over_ranks(*found)
            bar.update()
            logger.info("prior_sig %.3g: validation NLL %.4f", 10**power, tried[power])
        return tried[power]

    with bar:
        best = least(loss, ends, fine)
    if best - ends[0] < fine[1]:
        logger.warning(
            "the least spread that was tried, prior_sig %.3g, has the lowest validation NLL: the model is not "
            "over-confident, and no spread improves its probabilities; a temperature may (metrics.fit_temperature)",
            10**best,
        )
    if ends[1] - best < fine[1]:
        logger.warning("the validation NLL falls up to the end of the range, prior_sig %.3g", 10**best)
    logger.info("prior_sig %.4g has the lowest validation NLL, %.4f (was %.4g)", 10**best, tried[best], base)
    return 10**best / base


def validation_nll(model: nn.Module, data: Any, likelihood: Likelihood) -> tuple[float, int]:
    """Return the sum over the examples of the NLL of the mixture over samples, and how many there are."""
    linear = None if isinstance(likelihood, Regression) else False
    found = predict(model, data, samples=_samples(model), seed=0, task="regression", linear=linear)
    if found.labels is None:
        raise ValueError(NO_LABELS)
    labels: Any = found.labels
    if isinstance(likelihood, Given):  # a function of the caller's takes the labels as they are
        labels = join_labels([split_batch(batch)[1] for batch in as_batches(data)], len(found))
    assert found.outputs is not None
    try:
        nll = likelihood.mixture_nll(found.outputs, labels)
    except ValueError:
        if bool(torch.isfinite(found.outputs).all()):
            raise
        return math.inf, len(found)  # the prior is so wide that samples overflow
    return float(nll.sum()), len(found)


def _samples(model: nn.Module) -> int:
    """Return how many samples a scale is tried with."""
    return min(max(SAMPLES[0], *(scope.method.nst for scope in scopes_of(model))), SAMPLES[1])


def _first_batches(data: Any, most: int) -> Any:
    """Return the first batches, with `most` examples or all of them."""
    if is_one_batch(data):
        return data
    kept, count = [], 0
    for batch in data:
        kept.append(batch)
        count += _size(batch)
        if count >= most:
            break
    return kept


def _size(batch: Any) -> int:
    """Return the number of labels, or rows of the first tensor."""
    inputs, labels = split_batch(batch)
    inputs = next(iter(inputs.values()), ()) if isinstance(inputs, Mapping) else inputs
    return len(next((v for v in (labels, inputs) if isinstance(v, Tensor) and v.dim()), ()))


def _over_ranks(total: float, count: int) -> float:
    """Return the mean loss over the data of all processes."""
    found = ranks.gathered((total, count))
    every, number = sum(t for t, _ in found), sum(n for _, n in found)
    return float(every / number)


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
        """Return the summed NLL of the closed-form prediction at the posterior's present scale, and the count.

        For a regression the variances of outputs and noise add up.
        """
        if self.labels is None:
            raise ValueError(NO_LABELS)
        found = self.form.logits(self.features, self.outputs)
        if isinstance(likelihood, Regression):
            mean = found.mean.cpu().double()
            variance = found.variance().cpu().double() + likelihood.variances(mean)
            squares = 2 * Regression(1.0).item_losses(mean, self.labels.double()) - math.log(2 * math.pi)
            return float((squares / variance + (2 * math.pi * variance).log()).sum() / 2), len(mean)
        return float(likelihood.item_losses(found.log_probs(), self.labels).sum()), len(found.mean)


# -- the model's own predictions ----------------------------------------------------------------------------------


def by_itself(fitted: Sequence[Fitted], model: nn.Module, data: Sequence[Any]) -> float:
    """Return the largest factor of prior_sig that costs no more than `DOSE`.

    The cost is the rise of the NLL of the classes that the trained model itself predicts for training inputs; no label
    is needed. It grows with the scale, so that the largest is found by bisection.
    """
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

    low, high = CLOSED_RANGE
    if cost(low) > DOSE:
        logger.warning("even prior_sig %.3g costs more than %g nats", 10**low, DOSE)
        high = low
    elif cost(high) <= DOSE:
        low = high
    while high - low > CLOSED[0] / 64:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= DOSE else (low, middle)
    logger.info("prior_sig %.4g costs %.3g nats on the model's own predictions (was %.4g)", 10**low, cost(low), base)
    return 10**low / base


def trial(batches: Sequence[Any], count: int) -> list[Any]:
    """Cut the first batches of a fit to the few examples that `bounded` looks at.

    A search over five scales with five samples each then costs less than one forward pass over the `count` examples.
    """
    wanted, kept = min(BOUND_EXAMPLES, max(BOUND_LEAST, count // BOUND_SHARE)), []
    for batch in batches:
        size = _size(batch)
        kept.append(_cut(batch, wanted, size) if size > wanted else batch)
        wanted -= size
        if wanted <= 0:
            break
    return kept


def _cut(batch: Any, few: int, size: int) -> Any:
    """Keep the first examples, where every tensor has a row for each; ragged batches stay whole."""
    found: list[Tensor] = []

    def rows(value: Any) -> Any:
        if isinstance(value, Tensor):
            found.append(value)
            return value[:few] if value.dim() and len(value) == size else value
        if isinstance(value, Mapping):
            return {k: rows(v) for k, v in value.items()}
        return type(value)(rows(v) for v in value) if type(value) in (tuple, list) else value

    cut = rows(batch)
    return cut if all(t.dim() and len(t) == size for t in found) else batch


def bounded(fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood, data: Sequence[Any]) -> float:
    """Return the largest factor of prior_sig, at most 1, with which samples cost no more than `TOLERANCE` nats.

    The cost is KL(p || q) of the trained model's prediction p and the sampled prediction q, on a few training inputs
    (`trial`), with the same noise at every scale, which is bisected. A network that fits its training data exactly has
    little curvature there, and then the spread is the prior's. One whose priors were given as numbers, whose prediction
    is a closed form, or which is no classifier, is left as it is.
    """
    if not data or not isinstance(likelihood, Classification):
        return 1.0
    if not all(f.posterior.relative for f in fitted if f.h is not None) or Cached.of(model, fitted, data[:1]):
        return 1.0

    def log_probs(samples: int) -> Tensor:
        """Return the prediction for every item; batches may be of sequences of different lengths."""
        found = [
            predict(model, [batch], samples=samples, seed=0, task="classification", keep_samples=False).log_probs
            for batch in data
        ]
        return torch.cat([one.flatten(0, -2) for one in found])

    samples, log_p = _samples(model), log_probs(0)

    def harmless(step: int) -> bool:
        spread_all(fitted, 10 ** (step * BOUND_STEP))
        value = (log_p.exp() * (log_p - log_probs(samples))).sum(-1)
        return _over_ranks(float(value.sum()), len(value)) <= TOLERANCE

    low, high = round(BOUND_RANGE[0] / BOUND_STEP), 0
    if harmless(high):
        return 1.0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if harmless(middle) else (low, middle)
    logger.info("prior scales times %.3g: samples cost %g nats on training inputs", 10 ** (low * BOUND_STEP), TOLERANCE)
    return float(10 ** (low * BOUND_STEP))
