"""Deciding: thresholds and sets that keep their promises, out-of-distribution scores, what to label next."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from bayesify import active, bayesify, fit_laplace, metrics, predict
from bayesify.prediction.averages import ClassificationTally
from bayesify.prediction.predictive import MultilabelPredictive, Predictive
from bayesify.prediction.regression import RegressionPredictive
from bayesify.quality import conformal


def classes(count, seed, *, sharp=2.0, number=4):
    """Simulate a classifier: overconfident probabilities, and labels from honest ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(count, number, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (1.5 * logits).softmax(-1), labels


def predictive(probs, labels=None):
    tally = ClassificationTally(keep=True)
    tally.add(0, probs.log())
    return tally.finish(0, [labels])


def test_binomial_tails_are_scipys():
    for rate in (0.01, 0.1, 0.9):  # of errors, where 0.03 is tested
        errors = (torch.rand(2000, generator=torch.Generator().manual_seed(0)) < rate).long().cumsum(0)
        expected = torch.from_numpy(stats.binom.cdf(errors, torch.arange(1, 2001), 0.03))
        torch.testing.assert_close(conformal.binomial_tails(errors, 0.03), expected, atol=1e-12, rtol=1e-9)


def test_the_abstention_threshold_keeps_its_promise():
    """Over 500 splits, the risk on unseen data exceeds max_risk in at most 5% of them, up to 4 standard errors."""
    probs, labels = classes(200_000, 0, sharp=3.0)
    top, wrong = probs.amax(1), (probs.argmax(1) != labels).double()
    order = top.argsort(descending=True)
    risks, sorted_top = wrong[order].cumsum(0) / torch.arange(1, len(top) + 1), top[order]
    failures, answered = 0, 0.0
    for seed in range(500):
        rows = torch.randint(len(probs), (600,), generator=torch.Generator().manual_seed(seed))
        threshold = metrics.abstain_threshold(probs[rows], labels[rows], max_risk=0.1)
        count = int(torch.searchsorted(-sorted_top, torch.tensor(-threshold, dtype=torch.float64), right=True))
        failures += count > 0 and float(risks[count - 1]) > 0.1
        answered += count / len(top) / 500
    safe = float((risks <= 0.1).nonzero().max() + 1) / len(top)
    assert failures / 500 <= 0.05 + 4 * (0.05 * 0.95 / 500) ** 0.5
    assert failures > 0
    assert answered > 0.7 * safe, "a promise that is kept by refusing everything is worth nothing"


def starts_of(count, max_risk, confidence=0.95):
    """Return where sequences of tests begin, and at which level."""
    alpha = 1 - confidence
    small, least = (math.ceil(math.log(d) / math.log(1 - max_risk)) for d in (alpha / 38, alpha))
    if small > count / 2:
        return [(max(count // 4, least), alpha)]
    sizes = [math.ceil(small * (count / small) ** (k / 19)) for k in range(19)]
    return [(max(count // 4, least), alpha / 2), *((m, alpha / 38) for m in sizes)]


def last_passed(wrong, max_risk):
    """Return the largest m that a sequence of tests reaches, one start and one m after the other; 0 for none."""
    count, errors, found = len(wrong), wrong.long().cumsum(0).tolist(), 0
    for m, level in starts_of(count, max_risk):
        while m <= count and stats.binom.cdf(errors[m - 1], m, max_risk) <= level:
            found, m = max(found, m), m + 1
    return found


def test_the_promise_holds_at_its_limit_in_10000_repetitions():
    """Where every threshold has a risk just above max_risk, any answer at all is a violation.

    There is an answer where a sequence passes at its start; for 100 repetitions the function itself is asked.
    """
    count, risk = 200, 0.2
    wrong = torch.rand(10_000, count, generator=torch.Generator().manual_seed(0)) < risk + 1e-6
    errors = wrong.long().cumsum(1)
    answered = torch.zeros(10_000, dtype=torch.bool)
    for m, level in starts_of(count, risk):
        answered |= torch.from_numpy(stats.binom.cdf(errors[:, m - 1].numpy(), m, risk) <= level)
    assert 0.01 < float(answered.double().mean()) <= 0.05
    top = torch.linspace(0.99, 0.6, count, dtype=torch.float64)
    probs, some = torch.stack([top, 1 - top], 1), [*answered.nonzero().flatten()[:50].tolist(), *range(50)]
    asked = [metrics.abstain_threshold(probs, wrong[i].long(), max_risk=risk) < math.inf for i in some]
    assert asked == answered[some].tolist()


@pytest.mark.parametrize(("count", "sharp", "risk"), [(800, 4.0, 0.08), (300, 3.0, 0.15), (150, 4.0, 0.05)])
def test_the_threshold_is_where_the_last_sequence_ends(count, sharp, risk):
    probs, labels = classes(count, 1, sharp=sharp)
    threshold = metrics.abstain_threshold(probs, labels, max_risk=risk)
    top, wrong = probs.amax(1), probs.argmax(1) != labels
    order = top.argsort(descending=True)
    last = last_passed(wrong[order], risk)
    assert threshold == (float(top[order][last - 1]) if last else math.inf)
    if last:
        out = predictive(probs, labels)
        assert torch.equal(out.select(threshold), out.confidence >= threshold)
        assert float(wrong[out.select(threshold)].double().mean()) <= risk


def test_what_would_pass_after_a_failure_is_not_tested():
    top = torch.linspace(0.99, 0.6, 100, dtype=torch.float64)  # too few for more than one start
    labels = torch.zeros(100, dtype=torch.long)
    labels[33:38] = 1  # the first 33 pass, soon nothing does, and all 100 would again
    assert stats.binom.cdf(5, 100, 0.12) <= 0.05
    assert metrics.abstain_threshold(torch.stack([top, 1 - top], 1), labels, max_risk=0.12) == float(
        top[last_passed(labels, 0.12) - 1]
    )
    assert last_passed(labels, 0.12) < 40


def test_a_few_confident_examples_are_enough():
    """The most confident 15% of 2,000 have 1% errors, all others 30%."""
    answered = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        top = torch.rand(2000, generator=generator, dtype=torch.float64) / 2 + 0.5
        wrong = torch.rand(2000, generator=generator) < torch.where(top > 0.925, 0.01, 0.3)
        threshold = metrics.abstain_threshold(torch.stack([top, 1 - top], 1), wrong.long())
        answered.append(float((top >= threshold).double().mean()))
    assert sum(answered) / 20 > 0.1


def test_an_infinite_threshold_says_why():
    probs, zeros = torch.tensor([[0.9, 0.1]]).expand(100, 2), torch.zeros(100, dtype=torch.long)
    few, none = metrics.abstain_threshold(probs[:50], zeros[:50]), metrics.abstain_threshold(probs, 1 - zeros)
    assert few == none == math.inf
    assert few.reason == "too few examples: 50, at least 59 are needed"
    assert metrics.abstain_threshold(probs[:59], zeros[:59]) < math.inf
    assert none.reason.startswith("no subset is good enough: 100 of the 100 most confident are wrong")
    assert repr(few) == f"inf ({few.reason})"
    assert metrics.abstain_threshold(probs, zeros).reason == ""


def test_no_threshold_is_infinite_and_ties_stay_together():
    probs = torch.tensor([[0.6, 0.4]], dtype=torch.float64).expand(200, 2)
    assert metrics.abstain_threshold(probs, torch.ones(200, dtype=torch.long)) == math.inf
    assert not predictive(probs).select(math.inf).any()
    labels = torch.zeros(200, dtype=torch.long)
    assert metrics.abstain_threshold(probs, labels) == 0.6
    labels[-20:] = 1  # 10% of all, wherever they are in the order
    assert metrics.abstain_threshold(probs, labels) == math.inf
    for arguments in ({"max_risk": 0.0}, {"confidence": 1.0}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            metrics.abstain_threshold(probs, labels, **arguments)


@pytest.mark.parametrize("kind", ["lac", "aps"])
def test_conformal_sets_cover_exactly_what_they_promise(kind):
    """Over 10,000 repetitions of 99 examples and a new one the coverage is 0.9 within 4 standard errors.

    Two stages: 100 quantiles of fresh data, each with 100 new examples.
    """
    covered, size = torch.zeros(100, dtype=torch.float64), 0.0
    for i in range(100):
        probs, labels = classes(199, i, sharp=1.5)
        held, new = predictive(probs[:99], labels[:99]), predictive(probs[99:], labels[99:])
        sets = new.sets(metrics.conformal_quantile(held, 0.1, kind=kind, seed=i), seed=i)
        covered[i] = sets.gather(1, new.labels[:, None]).double().mean()
        size += float(sets.double().sum(1).mean()) / 100
    assert abs(float(covered.mean()) - 0.9) < 4 * float(covered.std()) / 10
    assert float(covered.std()) < 0.06
    assert size < {"lac": 2.4, "aps": 2.7}[kind]


@pytest.mark.parametrize("kind", ["scaled", "absolute"])
def test_conformal_intervals_cover_what_they_promise(kind):
    x = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1) * (1 + x[:, 0].abs()) + torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    model = fit_laplace(bayesify(nn.Linear(3, 1), "la", prior_sig=1.0), [(x[:500], y[:500])])
    covered = []
    for start in range(500, 20_000 - 200, 200):
        held, new = (
            predict(model, [(x[a : a + 100], y[a : a + 100])], samples=5, seed=0, task="regression")
            for a in (start, start + 100)
        )
        low, high = new.sets(metrics.conformal_quantile(held, 0.2, kind=kind))
        covered.append(float(((low <= new.targets()) & (new.targets() <= high)).double().mean()))
    values = torch.tensor(covered)
    expected = math.ceil(round(101 * 0.8, 9)) / 101
    assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / len(values) ** 0.5


def test_the_quantile_is_a_score_of_the_sample_or_infinite():
    probs, labels = classes(99, 0)
    out = predictive(probs, labels)
    scores = sorted(1 - float(p[y]) for p, y in zip(out.probs, labels, strict=True))
    assert metrics.conformal_quantile(out, 0.1) == pytest.approx(scores[89], abs=1e-12)
    assert metrics.conformal_quantile(out, 0.01) == pytest.approx(scores[98], abs=1e-12)
    assert metrics.conformal_quantile(out, 0.005) == math.inf
    assert out.sets(math.inf).all()
    u = torch.rand(99, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    mass = sorted(float(p[p > p[y]].sum() + v * p[y]) for p, y, v in zip(out.probs, labels, u, strict=True))
    assert metrics.conformal_quantile(out, 0.3, kind="aps", seed=3) == pytest.approx(mass[69], abs=1e-12)


def test_aps_sets_are_the_most_probable_until_the_quantile():
    """A class is in the set where what comes before it, plus u times its own probability, is within the quantile."""
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).expand(4000, 4)
    for quantile, size in ((0.4, 0.8), (0.6, 1 + 1 / 3), (0.81, 2 + 1 / 15), (1.0, 4)):
        sets = conformal.conformal_sets(probs, quantile, "aps")
        assert float(sets.double().sum(1).mean()) == pytest.approx(size, abs=0.03)
        assert bool((sets[:, :-1] | ~sets[:, 1:]).all()), "a more probable class is never left out alone"


def test_a_quantile_belongs_to_its_kind():
    probs, labels = classes(50, 0)
    out = predictive(probs, labels)
    quantile = metrics.conformal_quantile(out, 0.2, kind="aps")
    assert torch.equal(out.sets(quantile), out.sets(float(quantile), kind="aps"))
    with pytest.raises(ValueError, match="'aps' scores"):
        out.sets(quantile, kind="lac")
    with pytest.raises(ValueError, match="kind must be one of"):
        metrics.conformal_quantile(out, 0.2, kind="absolute")
    with pytest.raises(ValueError, match="alpha must be"):
        metrics.conformal_quantile(out, 5)
    with pytest.raises(ValueError, match="no labels"):
        metrics.conformal_quantile(predictive(probs), 0.2)
    point = SimpleNamespace(mean=torch.zeros(3), std=torch.zeros(3), labels=labels, targets=lambda: torch.zeros(3))
    with pytest.raises(ValueError, match="kind='absolute'"):
        metrics.conformal_quantile(point, 0.2)


def test_energy_is_minus_the_log_sum_of_the_logits():
    logits = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = -(logits.exp().sum(-1).log()).mean(0)
    torch.testing.assert_close(metrics.energy(logits), expected)
    torch.testing.assert_close(metrics.energy(logits[0], 2.0), -2 * (logits[0] / 2).exp().sum(-1).log())
    with pytest.raises(ValueError, match="temperature must be"):
        metrics.energy(logits, 0.0)


def test_feature_distances_tell_noise_at_the_default():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    train = torch.randn(300, 5, generator=generator) + 4 * F.one_hot(labels, 5)
    known = torch.randn(90, 5, generator=generator) + 4 * F.one_hot(labels[:90], 5)
    noise = torch.randn(90, 5, generator=generator)
    distance = partial(metrics.feature_distance, train, labels)
    assert metrics.auroc(distance(known), distance(noise)) > 0.9  # which was worse than chance once
    for kind in ("mahalanobis++", "relative", "knn"):
        assert metrics.auroc(distance(known, kind=kind), distance(noise, kind=kind)) > 0.8
        torch.testing.assert_close(distance(known, kind=kind), distance(9 * known, kind=kind))  # lengths do not count
    torch.testing.assert_close(metrics.feature_distance(train, labels + 4, known), distance(known))
    assert metrics.feature_distance(train, None, known).shape == (90,)
    assert isinstance(metrics.feature_distance(train.numpy(), labels.numpy(), known.numpy()), np.ndarray)
    with pytest.raises(ValueError, match=r"\(M, D\) and \(N, D\)"):
        distance(known[0])
    with pytest.raises(ValueError, match=r"kind must be one of .*'knn'.*got 'near'"):
        distance(known, kind="near")


def pool(samples=12, count=30, seed=0):
    tally = ClassificationTally(keep=True)
    generator = torch.Generator().manual_seed(seed)
    center = torch.randn(count, 3, generator=generator)
    for _ in range(samples):
        tally.add(0, center + 0.3 * torch.randn(count, 3, generator=generator, dtype=torch.float64))
    return tally.finish(samples, [None])


def test_without_diversity_the_largest_mutual_information():
    out = pool()
    expected = out.mutual_information.argsort(descending=True)[:5]
    assert torch.equal(active.select(out, 5, diverse=False), expected)


def test_diverse_selection_is_the_greedy_log_determinant():
    out = pool()
    each, eye, total, chosen = active.deviations(out), torch.eye(12, dtype=torch.float64), 0, []
    for _ in range(6):
        gains = [torch.logdet(eye + total + c @ c.T) if i not in chosen else -math.inf for i, c in enumerate(each)]
        chosen.append(max(range(len(gains)), key=gains.__getitem__))
        total = total + each[chosen[-1]] @ each[chosen[-1]].T
    assert active.select(out, 6).tolist() == chosen


def test_deviations_square_to_twice_the_mutual_information():
    """To second order: halving the spread brings the two closer by more than half."""
    errors = []
    for spread in (0.1, 0.05):
        tally = ClassificationTally(keep=True)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            tally.add(0, 1.0 + spread * torch.randn(4, 3, generator=generator, dtype=torch.float64))
        out = tally.finish(20, [None])
        second = active.deviations(out).square().sum((1, 2)) / 2
        errors.append(float((second / out.mutual_information - 1).abs().max()))
    assert errors[0] < 0.1 and errors[1] < 0.6 * errors[0]


def test_a_second_copy_adds_little():
    out = pool()
    doubled = out[[*range(30), *range(30)]]
    first = int(active.select(out, 1))
    assert {first, first + 30} != set(active.select(doubled, 2).tolist())
    flat = active.select(doubled, 2, diverse=False)
    assert int(flat[0]) % 30 == int(flat[1]) % 30


@pytest.mark.parametrize("shape", [(30,), (30, 2)])
def test_information_of_a_regression_is_that_of_gaussians(shape):
    outputs = torch.randn(400, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.full(shape, 0.5, dtype=torch.float64)
    out = RegressionPredictive(outputs.mean(0), outputs.std(0), noise, outputs, num_samples=len(outputs))
    unknown = torch.distributions.Normal(0.0, (outputs.var(0) + 0.25).sqrt()).entropy()
    expected = unknown - torch.distributions.Normal(0.0, noise).entropy()
    torch.testing.assert_close(active.information(out), expected if len(shape) == 1 else expected.sum(1))


def test_selection_for_regression_and_labels_and_its_errors():
    model = bayesify(nn.Linear(3, 2), "vi", prior_sig=1.0, init_sig=0.5)
    x = torch.randn(9, 3)
    for task in ("regression", "multilabel"):
        out = predict(model, x, samples=8, seed=0, task=task)
        assert len(set(active.select(out, 9).tolist())) == 9
        assert active.information(out).shape == (9,)
    known = predict(model, x, samples=8, seed=0, task="regression").with_noise(0.5)
    expected = (1 + known.epistemic**2 / 0.5).log().sum(1) / 2
    torch.testing.assert_close(active.information(known), expected)
    assert isinstance(out, MultilabelPredictive) and isinstance(pool(), Predictive)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.9"):
        active.select(out, 10)
    with pytest.raises(ValueError, match="samples=20"):
        active.select(predict(model, x, samples=0), 2)
