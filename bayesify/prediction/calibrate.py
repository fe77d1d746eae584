"""After training: one factor on the spread of any posterior, and the BatchNorm statistics of its mean or samples.

Training chooses the shape of a posterior, and rarely its size: a spread that the training loss tolerates may be too
small for data that the model has not seen. The factor is the posterior's own from then on: in draws, `std` and files.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.mixture import member_count
from bayesify.core.modes import MEAN, override
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import is_whole
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_module, scopes_of
from bayesify.core.scopes import samples as draws
from bayesify.prediction.batches import as_batches, own_places, rereadable, run_through, values_like
from bayesify.prediction.likelihoods import Classification, Likelihood, Regression, found_likelihood, likelihood_of
from bayesify.prediction.predict import predict
from bayesify.prediction.regression import noise_of
from bayesify.prediction.view import estimating, norms_in
from bayesify.quality.regression import sampled_nll, sampled_noise

logger = logging.getLogger("bayesify")
M = TypeVar("M", bound=nn.Module)

TARGET = 0.1  # nats that the spread may cost on the model's own predictions
FACTORS = tuple(2.0**k for k in range(-4, 8))
WIDEST, COARSE = 2.0**15, 8.0  # without labels: the largest factor, and the first steps
FINE = 2**0.25  # the last refinement's step
HOPELESS = 0.1  # nats above the best so far, from where larger factors are not tried
GAIN = 1e-4  # nats that count as a difference
LEAST = 5  # samples of a regression, whose variance is taken
SURE = 3.32  # nats by which a regression's spread must gain on all the data: 1% of chi-squared by chance


def calibrate(
    model: M,
    data: Any,
    *,
    target: float | None = None,
    samples: int = 10,
    likelihood: Any = None,
    progress: bool = True,
) -> M:
    """Find one factor on the posterior's spread, by what it does to predictions.

    With labels it is the factor with the lowest NLL of the sampled prediction; in a regression that of the Gaussian
    that is sampled, with the noise that is known, or else fitted beside each factor, and 1 unless another is better by
    more than chance. Without labels, or
    with `target`, it is the largest whose samples stay close to the model's own predictions:
    KL(mean prediction || sampled prediction) <= target. A draw is then core + f (theta - core): for a Gaussian
    m + f s eps, for dropout m + f (1-z)(theta0 - m). The penalty and the prior stay what they were. Where
    torch.distributed runs several processes, each may give its part of the data, and all get the same factor.

    Args:
        model: A bayesified model that can be sampled, or a module that contains one.
        data: Batches that training has not seen: a held-out part of the training data, with labels if there are any.
            What comes in another order each time, or once only, is kept in memory.
        target: The tolerance in nats for data whose labels are absent or not to be used; 0.1 by default.
        samples: How many posterior samples each candidate is judged by; at least 5 in a regression.
        likelihood: What the labels are, as in `fit_laplace`; None finds it, where outputs and labels leave no choice.
        progress: Whether to show a progress bar.

    Returns:
        The same model.

    Raises:
        ValueError: The model has nothing to sample, an argument is out of range, or the data is empty. The posterior is
            as it was before.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, calibrate, summary
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi")
        >>> calibrated = calibrate(model, torch.randn(20, 3), progress=False)
        >>> "calibrated" in str(summary(calibrated))
        True
    """
    check_module(model)
    posteriors = [p for scope in scopes_of(model) for p in scope.posteriors if p.random]
    if not posteriors:
        raise ValueError("the model has no spread to calibrate; use a method that samples, not 'vanilla'")
    if target is not None and not (isinstance(target, (int, float)) and 0 < target < math.inf):
        raise ValueError(f"target must be a positive number of nats, got {target!r}")
    if not is_whole(samples) or samples < 2:
        raise ValueError(f"samples must be an integer >= 2, got {samples!r}; fewer are too noisy")
    for scope in scopes_of(model):
        scope.warned.add("spread")  # which it is about to get
    likelihood, before = likelihood_of(likelihood), [p.calibration for p in posteriors]
    data = as_batches(data)
    if not rereadable(data) and own_places(data) is None:
        data = list(data)  # all candidates are compared with the labels, and the mean's outputs, of one reading
    try:
        with tqdm(desc="calibrate", unit="candidate", disable=not progress) as bar:
            trial = Trial(model, posteriors, data, samples, bar.update, likelihood)
            by_labels = trial.labels is not None and target is None
            factor = _best(trial) if by_labels else _largest_within(trial.divergence, target or TARGET)
            before = [factor] * len(posteriors)
    finally:
        for posterior, kept in zip(posteriors, before, strict=True):
            posterior.calibration = kept
    return model


class Trial:
    """Candidates on one set of data, each judged by the same draws."""

    def __init__(
        self,
        model: nn.Module,
        posteriors: Sequence[Posterior],
        data: Any,
        samples: int,
        tick: Callable[[], Any],
        likelihood: Likelihood | None = None,
    ) -> None:
        self.model, self.posteriors, self.data, self.tick = model, posteriors, data, tick
        self.point, self.labels = self._predicted(0)
        if self.labels is None and (self.point.dim() < 3 or self.point.shape[-1] < 2):
            raise ValueError(
                "without labels calibrate needs class probabilities, and these outputs are none; give labels"
            )
        if likelihood is None:
            likelihood = Classification() if self.labels is None else found_likelihood(self.point[0], self.labels)
        if isinstance(likelihood, Regression) and likelihood.noise_var is None:
            noise = noise_of(model, scopes_of(model))
            likelihood = likelihood if noise is None else Regression(noise)
        self.likelihood = likelihood
        samples, members = max(samples, LEAST * isinstance(likelihood, Regression)), member_count(model)
        self.samples = -(-samples // members) * members  # as many of each member

    def _predicted(self, samples: int) -> tuple[Tensor, Tensor | None]:
        """Return the outputs as they are, whatever the task, (samples, examples, ...), and the labels."""
        found = predict(self.model, self.data, samples=samples, seed=0, task="regression")
        assert found.outputs is not None
        return found.outputs, found.labels

    def outputs(self, factor: float) -> Tensor:
        """Return the outputs of all draws, (samples, examples, ...)."""
        for posterior in self.posteriors:
            posterior.calibration = factor
        found, _ = self._predicted(self.samples)
        self.tick()
        return found

    def nll(self, outputs: Tensor) -> float:
        """Return the mean NLL of the mixture over draws, or of a regression's Gaussian.

        Noise that is not known is fitted beside each candidate: residuals of the mean hold the epistemic error too.
        """
        likelihood = self.likelihood
        if not isinstance(likelihood, Regression):
            return _mean(likelihood.mixture_nll(outputs, self.labels))
        f, y = outputs.cpu().double(), values_like(outputs[0], self.labels).cpu().double()
        known = likelihood if likelihood.noise_var is not None else Regression(sampled_noise(f, y))
        return _mean(sampled_nll(f, known.variances(f[0]).sqrt().expand_as(f), y).reshape(len(y), -1).sum(1))

    def divergence(self, factor: float) -> float:
        """Return the mean KL(p || q) of the mean's prediction p and the sampled prediction q."""
        p, log_p = (f(self.point[0].double(), -1) for f in (torch.softmax, torch.log_softmax))
        log_q = torch.logsumexp(torch.log_softmax(self.outputs(factor).double(), -1), 0) - math.log(self.samples)
        return _mean((p * (log_p - log_q)).sum(-1))


def _mean(values: Tensor) -> float:
    """Return the mean over the items of all processes, which must choose alike; infinite where it is not finite."""
    found = ranks.gathered((float(values.double().sum()), values.numel()))
    value = sum(total for total, _ in found) / sum(count for _, count in found)
    return value if math.isfinite(value) else math.inf


def _best(trial: Trial) -> float:
    """Return the factor with the lowest NLL: by doubling and halving, then refined; 0 where the mean does as well."""
    point = trial.nll(trial.point)
    tried: dict[float, float] = {}

    def nll(factor: float) -> float:
        if factor not in tried:
            tried[factor] = trial.nll(trial.outputs(factor))
        return tried[factor]

    for factor in (f for f in FACTORS if f >= 1):
        if not nll(factor) <= min(tried.values()) + HOPELESS:
            break
    for factor in reversed([f for f in FACTORS if f < 1]):
        if min(tried, key=nll) != 2 * factor:
            break  # it rises on the way down already
        nll(factor)
    for step in (FINE**2, FINE):
        best = min(tried, key=nll)
        for factor in (best / step, best * step):
            nll(factor)
    best = min(tried, key=nll)
    logger.info("spread times %.3g: NLL %.4f, of the mean %.4f", best, tried[best], point)
    if isinstance(trial.likelihood, Regression):
        # What is in between is chance: twice the gain is chi-squared distributed where the spread is right as it is.
        count = sum(ranks.gathered(len(trial.point[0])))
        return best if count * (tried[1.0] - tried[best]) > SURE else 1.0
    if tried[best] >= point - GAIN:
        logger.warning("no spread does better than the posterior mean (NLL %.4f): samples are of no use here", point)
        return 0.0
    return best


def _largest_within(cost: Callable[[float], float], target: float) -> float:
    """Return the largest factor whose cost is within the target, and 0 if that is below the smallest.

    Steps are coarse: adapters that are trained already may need a spread a thousand times that of a new posterior.
    """
    low, high = 0.0, 1.0
    while high <= WIDEST and cost(high) <= target:
        low, high = high, COARSE * high
    if high > WIDEST:
        logger.warning("even a spread of %g times its size costs less than %g nats", low, target)
        return low
    while low == 0.0:
        if high <= FACTORS[0]:
            return 0.0
        high, low = (high, high / COARSE) if cost(high / COARSE) <= target else (high / COARSE, 0.0)
    while high / low > FINE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return low


def update_bn(
    model: nn.Module,
    loader: Iterable[Any],
    samples: int | None = 0,
    *,
    seed: int | None = None,
    progress: bool = False,
) -> nn.Module:
    """Estimate the running statistics of every BatchNorm anew.

    During training they follow the training draws: an average over samples, not the statistics of the mean nor those
    of any one sample. This replaces them by the plain average over the batches of a loader, with every other module in
    eval mode. Of a mixture, every member gets its own.

    Args:
        model: A bayesified model, or a module that contains one.
        loader: Batches as `predict` takes them; better large ones, without augmentation.
        samples: 0 estimates for the posterior mean, n for the average over n posterior samples, None for whatever is
            in force: inside `sample(model)` or a turn of `samples(model, n)` that is this one draw.
        seed: Which samples, as in `samples(model, n, seed)`; of a mixture, n for each member.
        progress: Whether to show a progress bar.

    Returns:
        The same model.

    Raises:
        ValueError: The loader is empty, or `samples` is out of range. The statistics are then as before.

    Example:
        >>> import torch
        >>> from bayesify import bayesify
        >>> from bayesify.integrations.vision import update_bn
        >>> model = bayesify(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
        >>> update_bn(model, [torch.randn(64, 3)])[1].num_batches_tracked
        tensor(1)
    """
    if not (samples is None or (is_whole(samples) and samples >= 0)):
        raise ValueError(f"samples must be an integer >= 0, or None for what is in force, got {samples!r}")
    scopes, norms = scopes_of(model), norms_in(model)
    with estimating(model, norms):
        for turn, _ in enumerate(_modes(model, scopes, samples, seed) if norms else ()):
            bar = tqdm(as_batches(loader), desc="update_bn", unit="batch", disable=not progress)
            if not run_through(model, bar):
                fix = "pass a list or a DataLoader" if turn else "pass a non-empty loader"
                raise ValueError(f"no batches are left for sample {turn + 1}; {fix}")
    for scope in scopes:
        scope.stale_statistics = False
    return model


def _modes(model: nn.Module, scopes: list[Scope], samples: int | None, seed: int | None) -> Iterator[None]:
    """Yield once in each mode whose statistics are averaged."""
    if samples:
        for _ in draws(model, samples * member_count(model), seed):
            yield
    else:
        for member in range(member_count(model) if samples == 0 else 1):
            with override(scopes, MEAN._replace(member=member)) if samples == 0 else nullcontext():
                yield
