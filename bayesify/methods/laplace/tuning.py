"""Choose the prior's scale after training: by evidence, by validation, or by the model's own predictions.

The curvature is at hand, so that a candidate costs a pass over it, and no training. All prior scales are multiplied by
one common factor. Where the prediction is a closed form, the last layer's inputs are computed once for all candidates.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.distributed import Layout, on_shard, part_of
from bayesify.core.quadratics import deviation, wide
from bayesify.core.scales import TOLERANCE
from bayesify.core.wrap import scopes_of
from bayesify.methods.laplace.closed_form import LastLayer
from bayesify.methods.laplace.kron import Kron
from bayesify.methods.laplace.method import LaplacePosterior
from bayesify.prediction.batches import is_one_batch
from bayesify.prediction.last_layer import NotLastError, passed
from bayesify.prediction.likelihoods import Classification, Likelihood, Regression
from bayesify.prediction.predict import predict
from bayesify.prediction.view import evaluation
from bayesify.quality.temperature import golden_section

logger = logging.getLogger("bayesify")

CHOICES = ("marglik", "self")
EVIDENCE_RANGE = (-6.0, 3.0)  # powers of ten of prior_sig
VALIDATION_RANGE = (-4.0, 1.0)  # for sampled predictions
CLOSED_RANGE = (-2.0, 2.5)  # 1/prior_sig^2 from 1e4 to 1e-5
COARSE = 0.5  # the grid's step, in powers of ten
WIDTH = 0.01  # of the power, at which a golden-section search ends
FINE = COARSE / 2  # for closed forms
LEAST_SAMPLES = 5  # fewer say more about themselves than about the prior
HOPELESS = 1.0  # nats per example above the best so far, from where larger scales are not tried
DOSE = 0.1  # nats that tune="self" may cost on the model's own predictions
SELF_EXAMPLES = 2048  # training inputs that it looks at
BOUND_EXAMPLES = 256  # training inputs on which an untuned spread must do no harm
BOUND_RANGE = (-4.0, 0.0)  # powers of ten of its factor
NO_LABELS = "tune= needs data with labels, got inputs alone; pass batches of (inputs, labels), or tune='self'"


class Fitted(NamedTuple):
    """A parameter with its curvature (None where it has none).

    Attributes:
        posterior: Its posterior.
        h: The curvature: element by element (of a sharded parameter this process's rows), or in Kronecker factors.
        weight: Of a bias that is one Gaussian with its weight, the weight's posterior, whose prior counts.
    """

    posterior: LaplacePosterior
    h: Tensor | Kron | None
    weight: LaplacePosterior | None = None

    @property
    def sig(self) -> float:
        """The prior's scale."""
        return (self.posterior if self.weight is None else self.weight).prior_sig

    def spread(self, factor: float) -> None:
        """Give the posterior its variances for the prior's scale times `factor`."""
        with on_shard(self.posterior) as own:
            own.fit(self.h, self.sig * factor, "" if self.weight is None else self.weight.name)


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
        return by_evidence(fitted), "evidence"
    if tune == "self":
        return by_itself(fitted, model, first), "itself"
    return by_validation(fitted, model, tune, likelihood, progress=progress), "validation"


# -- evidence -----------------------------------------------------------------------------------------------------


def log_evidence(fitted: Sequence[Fitted], factor: float) -> float:
    """Return the part of the Laplace log-evidence that depends on the prior's scale.

    sum over elements of -(theta* - theta0)^2/(2 sigma^2) - 1/2 log(1 + sigma^2 (h + damping)), where h is the
    curvature, of Kronecker factors in their eigenbases, and sigma the prior's scale times `factor`. Flat priors and
    parameters without curvature have no part in it.
    """
    sums: dict[Layout | None, float] = {}
    for one in fitted:
        posterior, h, layout = part_of(one.posterior), one.h, one.posterior.layout
        if h is None or posterior.flat:
            continue
        sig = one.sig * factor
        away = deviation(posterior.original.detach(), posterior)
        value = -(float(torch.linalg.vector_norm(away, dtype=wide(away)) / sig) ** 2) / 2
        if one.weight is None:  # a joined bias is in its weight's eigenvalues
            holders = layout.size if layout is not None and isinstance(h, Kron) else 1  # of the same eigenvalues
            h = h.curvature() if isinstance(h, Kron) else h
            value -= float((h.to(wide(h)) + posterior.damping).mul_(sig * sig).log1p_().sum()) / 2 / holders
        group = None if layout is None else layout.group
        sums[group] = sums.get(group, 0.0) + value
    return sum(v if group is None else float(group.summed(torch.tensor(v))) for group, v in sums.items())


def by_evidence(fitted: Sequence[Fitted]) -> float:
    """Return the factor of prior_sig with the largest evidence: the best of a grid, then golden sections."""
    base = typical_sig(fitted)

    def loss(power: float) -> float:
        return -log_evidence(fitted, 10**power / base)

    best = min(_grid(EVIDENCE_RANGE, COARSE), key=loss)
    if best in EVIDENCE_RANGE:
        logger.warning("the evidence grows up to the end of the range, prior_sig %.3g: is the model trained?", 10**best)
    tried = golden_section(loss, best - COARSE, best + COARSE, WIDTH)
    power = min(tried, key=lambda power: tried[power])
    logger.info("prior_sig %.4g has the largest evidence (was %.4g)", 10**power, base)
    return 10**power / base


# -- validation ---------------------------------------------------------------------------------------------------


def by_validation(
    fitted: Sequence[Fitted], model: nn.Module, data: Any, likelihood: Likelihood, *, progress: bool = False
) -> float:
    """Return the factor of prior_sig with the lowest NLL of the prediction on validation data.

    In closed form where there is one, else by samples.
    """
    base = typical_sig(fitted)
    data = list(data) if isinstance(data, Iterator) else data  # every scale reads it again
    closed = isinstance(likelihood, (Classification, Regression))
    cached = Cached.of(model, fitted, data) if closed else None
    ends, step = (VALIDATION_RANGE, COARSE) if cached is None else (CLOSED_RANGE, FINE)
    tried: dict[float, float] = {}
    bar = tqdm(desc="tune", unit="scale", disable=not progress)

    def loss(power: float) -> float:
        if power not in tried:
            _spread(fitted, 10**power / base)
            found = validation_nll(model, data, likelihood) if cached is None else cached.nll(likelihood)
            tried[power] = _over_ranks(*found)
            bar.update()
            logger.info("prior_sig %.3g: validation NLL %.4f", 10**power, tried[power])
        return tried[power]

    with bar:
        for power in _grid(ends, step):
            if not loss(power) <= min(tried.values()) + HOPELESS:
                break
        for finer in (step / 2, step / 4):
            best = min(tried, key=loss)
            for power in (best - finer, best + finer):
                if ends[0] <= power <= ends[1]:
                    loss(power)
    best = min(tried, key=loss)
    if best == ends[0]:
        logger.warning(
            "the least spread that was tried, prior_sig %.3g, has the lowest validation NLL: the model is not "
            "over-confident, and no spread improves its probabilities; a temperature may (metrics.fit_temperature)",
            10**best,
        )
    if best == ends[1]:
        logger.warning("the validation NLL falls up to the end of the range, prior_sig %.3g", 10**best)
    logger.info("prior_sig %.4g has the lowest validation NLL, %.4f (was %.4g)", 10**best, tried[best], base)
    return 10**best / base


def validation_nll(model: nn.Module, data: Any, likelihood: Likelihood) -> tuple[float, int]:
    """Return the sum over the examples of the NLL of the mixture over samples, and how many there are."""
    samples = max(LEAST_SAMPLES, *(scope.method.nst for scope in scopes_of(model)))
    found = predict(model, data, samples=samples, seed=0, task="regression")
    if found.labels is None:
        raise ValueError(NO_LABELS)
    assert found.outputs is not None
    try:
        nll = likelihood.mixture_nll(found.outputs, found.labels)
    except ValueError:
        if bool(torch.isfinite(found.outputs).all()):
            raise
        return math.inf, len(found)  # the prior is so wide that samples overflow
    return float(nll.sum()), len(found)


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
        _spread(fitted, 1.0)
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
        _spread(fitted, 10**power / base)
        return _over_ranks(*own.nll(Classification())) - before

    low, high = CLOSED_RANGE
    if cost(low) > DOSE:
        logger.warning("even prior_sig %.3g costs more than %g nats", 10**low, DOSE)
        high = low
    elif cost(high) <= DOSE:
        low = high
    while high - low > COARSE / 64:
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= DOSE else (low, middle)
    logger.info("prior_sig %.4g costs %.3g nats on the model's own predictions (was %.4g)", 10**low, cost(low), base)
    return 10**low / base


def bounded(fitted: Sequence[Fitted], model: nn.Module, likelihood: Likelihood, data: Sequence[Any]) -> float:
    """Return the largest factor of prior_sig, at most 1, with which samples cost no more than `TOLERANCE` nats.

    The cost is KL(p || q) of the trained model's prediction p and the sampled prediction q, on training inputs. A
    network that fits its training data exactly has little curvature there, and then the spread is the prior's. One
    whose priors were given as numbers, whose prediction is a closed form, or which is no classifier, is left as it is.
    """
    if not data or not isinstance(likelihood, Classification):
        return 1.0
    if not all(f.posterior.relative for f in fitted if f.h is not None) or Cached.of(model, fitted, data[:1]):
        return 1.0
    samples = max(LEAST_SAMPLES, *(scope.method.nst for scope in scopes_of(model)))

    def log_probs(samples: int) -> Tensor:
        """Return the prediction for every item; batches may be of sequences of different lengths."""
        found = [predict(model, [batch], samples=samples, seed=0, keep_samples=False).log_probs for batch in data]
        return torch.cat([one.flatten(0, -2) for one in found])

    log_p = log_probs(0)

    def cost(power: float) -> float:
        _spread(fitted, 10**power)
        value = (log_p.exp() * (log_p - log_probs(samples))).sum(-1)
        return _over_ranks(float(value.sum()), len(value))

    power = next((p for p in reversed(_grid(BOUND_RANGE, FINE)) if cost(p) <= TOLERANCE), BOUND_RANGE[0])
    if power < 0:
        logger.info("prior scales times %.3g: samples cost %g nats on training inputs", 10**power, TOLERANCE)
    return 10**power


def _spread(fitted: Sequence[Fitted], factor: float) -> None:
    for one in fitted:
        one.spread(factor)


def typical_sig(fitted: Sequence[Fitted]) -> float:
    """Return the geometric mean of prior_sig over the parameters that have curvature."""
    sigs = [math.log(f.sig) for f in fitted if f.h is not None] or [math.log(f.sig) for f in fitted]
    return math.exp(sum(sigs) / len(sigs))


def _grid(ends: tuple[float, float], step: float) -> list[float]:
    low, high = ends
    return [low + i * step for i in range(round((high - low) / step) + 1)]
