"""Metrics against literal loops, closed forms and torchmetrics; every refusal of bad input."""

import doctest
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bayesify.quality.calibration
import bayesify.quality.conformal
import bayesify.quality.metrics
import bayesify.quality.regression
from bayesify import metrics

CLASSIFICATION = {
    "nll": metrics.nll, "error": metrics.error, "brier": metrics.brier, "ece": metrics.ece, "mce": metrics.mce,
    "reliability": metrics.reliability, "risk_coverage": metrics.risk_coverage, "aurc": metrics.aurc,
}  # fmt: skip
GOOD = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]])
LABELS = torch.tensor([0, 1])


def batch(n=200, classes=5, seed=0, dtype=torch.float64, scale=2.0):
    """Random probabilities, and labels that are somewhat overconfidently predicted."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator).squeeze(1)
    return logits.softmax(1).to(dtype), labels


def bin_index(p, bins):
    """The bin of a probability, found by looking at every bin."""
    return next((m for m in range(bins) if m / bins <= p < (m + 1) / bins), bins - 1)


def calibration_by_loops(pairs, bins):
    """ECE and MCE of (probability, came true) pairs."""
    size, acc, conf = [0] * bins, [0.0] * bins, [0.0] * bins
    for p, true in pairs:
        m = bin_index(p, bins)
        size[m], acc[m], conf[m] = size[m] + 1, acc[m] + true, conf[m] + p
    gaps = [abs(acc[m] - conf[m]) / size[m] if size[m] else 0.0 for m in range(bins)]
    return sum(n * gap for n, gap in zip(size, gaps, strict=True)) / len(pairs), max(gaps)


def test_proper_scores_match_loops():
    probs, labels = batch()
    nll = brier = wrong = 0.0
    for row, label in zip(probs.tolist(), labels.tolist(), strict=True):
        nll -= math.log(row[label])
        brier += sum((p - (k == label)) ** 2 for k, p in enumerate(row))
        wrong += row.index(max(row)) != label
    n = len(labels)
    assert metrics.nll(probs, labels) == pytest.approx(nll / n, abs=1e-12)
    assert metrics.brier(probs, labels) == pytest.approx(brier / n, abs=1e-12)
    assert metrics.error(probs, labels) == pytest.approx(wrong / n, abs=1e-12)


def test_an_impossible_truth_costs_infinitely_much():
    assert metrics.nll(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 0])) == math.inf


def test_equal_classes_count_for_the_first():
    tied = torch.tensor([[0.4, 0.4, 0.2]] * 2)
    assert metrics.error(tied, torch.tensor([0, 1])) == 0.5


@pytest.mark.parametrize("bins", [1, 7, 15, 40])
def test_pooled_calibration_is_the_triple_loop(bins):
    probs, labels = batch(seed=bins)
    pairs = [(probs[i, j].item(), labels[i].item() == j) for i in range(len(probs)) for j in range(probs.shape[1])]
    ece, mce = calibration_by_loops(pairs, bins)
    assert metrics.ece(probs, labels, bins, "pooled") == pytest.approx(ece, abs=1e-12)
    assert metrics.mce(probs, labels, bins, "pooled") == pytest.approx(mce, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any), min_size=1, max_size=12),
    bins=st.integers(1, 25),
    data=st.data(),
)
def test_both_kinds_match_loops_even_on_the_edges(counts, bins, data):
    probs = np.array([[c / sum(row) for c in row] for row in counts])
    labels = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts))))
    top = [(max(row), row.argmax() == y) for row, y in zip(probs, labels, strict=True)]
    pooled = [(p, k == y) for row, y in zip(probs, labels, strict=True) for k, p in enumerate(row)]
    for kind, pairs in (("top", top), ("pooled", pooled)):
        ece, mce = calibration_by_loops(pairs, bins)
        assert metrics.ece(probs, labels, bins, kind) == pytest.approx(ece, abs=1e-12)
        assert metrics.mce(probs, labels, bins, kind) == pytest.approx(mce, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [10, 15])
def test_top_calibration_agrees_with_torchmetrics(dtype, bins):
    reference = pytest.importorskip("torchmetrics.functional.classification").multiclass_calibration_error
    probs, labels = batch(n=3000, classes=10, seed=1, dtype=dtype)
    for ours, norm in ((metrics.ece, "l1"), (metrics.mce, "max")):
        theirs = reference(probs, labels, num_classes=10, n_bins=bins, norm=norm).item()
        assert ours(probs, labels, bins) == pytest.approx(theirs, abs=1e-6)


def test_auroc_agrees_with_torchmetrics():
    reference = pytest.importorskip("torchmetrics.functional.classification").binary_auroc
    scores = torch.rand(400, generator=torch.Generator().manual_seed(0))
    target = torch.arange(400) % 3 == 0
    theirs = reference(scores, target.int()).item()
    assert metrics.auroc(scores[~target], scores[target]) == pytest.approx(theirs, abs=1e-6)


def test_float32_values_lie_on_the_edges_they_are_written_as():
    probs = torch.tensor([[0.7, 0.3]])
    assert probs.double()[0, 0] < 0.7
    assert metrics.reliability(probs, torch.tensor([0]), bins=10).counts.nonzero().item() == 7


def test_empty_bins_are_zero_and_certainty_is_in_the_last_bin():
    bins = metrics.reliability(torch.tensor([[1.0, 0.0], [0.95, 0.05]]), torch.tensor([0, 1]), bins=10)
    assert bins.counts.tolist() == [0] * 9 + [2]
    assert bins.accuracy.tolist() == [0.0] * 9 + [0.5]
    assert bins.confidence[-1].item() == pytest.approx(0.975)
    assert bins.confidence[:-1].sum() == 0
    assert bins.edges.tolist() == [m / 10 for m in range(11)]
    assert bins.mce == bins.ece == pytest.approx(0.475)


def test_calibrated_predictions_have_no_calibration_error():
    probs = torch.tensor([[0.75, 0.25]] * 4, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1])
    for kind in ("top", "pooled"):
        assert metrics.ece(probs, labels, kind=kind) == metrics.mce(probs, labels, kind=kind) == 0


@settings(max_examples=60, deadline=None)
@given(*[st.lists(st.integers(0, 6).map(float), min_size=1, max_size=30)] * 2)
def test_auroc_and_fpr95_match_loops_with_ties(inside, outside):
    wins = sum((o > i) + 0.5 * (o == i) for i in inside for o in outside)
    reached = [t for t in outside if sum(o >= t for o in outside) * 100 >= 95 * len(outside)]
    alarms = min(sum(i >= t for i in inside) for t in reached) / len(inside)
    scores = np.array(inside), np.array(outside)
    assert metrics.auroc(*scores) == pytest.approx(wins / (len(inside) * len(outside)), abs=1e-12)
    assert metrics.fpr95(*scores) == pytest.approx(alarms, abs=1e-12)


def test_aurc_matches_a_loop_without_ties():
    probs, labels = batch(n=60)
    ranked = sorted(zip(probs.tolist(), labels.tolist(), strict=True), key=lambda pair: -max(pair[0]))
    wrong = [row.index(max(row)) != label for row, label in ranked]
    risks = [sum(wrong[:n]) / n for n in range(1, 61)]
    curve = metrics.risk_coverage(probs, labels)
    torch.testing.assert_close(curve.risk, torch.tensor(risks, dtype=torch.float64))
    assert curve.coverage.tolist() == [n / 60 for n in range(1, 61)]
    assert metrics.aurc(probs, labels) == pytest.approx(sum(risks) / 60, abs=1e-12)


def test_aurc_of_ties_is_the_mean_over_their_orders():
    uncertainty, wrong = [1.0, 1.0, 1.0, 0.0, 2.0], [1, 0, 0, 0, 1]
    areas = []
    for order in itertools.permutations(range(5)):
        if [uncertainty[i] for i in order] == sorted(uncertainty):
            areas.append(sum(sum(wrong[i] for i in order[:n]) / n for n in range(1, 6)) / 5)
    probs, labels = torch.tensor([[0.9, 0.1]] * 5), torch.tensor(wrong)
    got = metrics.aurc(probs, labels, uncertainty=torch.tensor(uncertainty))
    assert got == pytest.approx(sum(areas) / len(areas), abs=1e-12)


def test_entropy_of_known_distributions():
    probs = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([math.log(4), 0.0, math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(metrics.entropy(probs), expected)


def test_mutual_information_is_total_minus_expected_entropy():
    samples = torch.stack([batch(seed=s)[0] for s in range(4)])
    total = torch.distributions.Categorical(samples.mean(0)).entropy()
    expected = torch.distributions.Categorical(samples).entropy().mean(0)
    torch.testing.assert_close(metrics.mutual_information(samples), total - expected)
    assert metrics.mutual_information(samples[:1]).max() < 1e-12
    assert metrics.mutual_information(samples[:1]).min() >= 0


def test_gaussian_nll_matches_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    mean, std, targets = torch.rand(3, 50, 2, generator=generator, dtype=torch.float64) + 0.1
    exact = -torch.distributions.Normal(mean, std).log_prob(targets).mean().item()
    assert metrics.gaussian_nll(mean, std, targets) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(("level", "half_width"), [(0.95, 1.959963984540054), (0.5, 0.6744897501960817)])
def test_intervals_end_at_the_normal_quantile(level, half_width):
    targets = torch.tensor([half_width - 1e-9, -half_width + 1e-9, half_width + 1e-9, 9.0], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    assert metrics.interval_coverage(3 * ones, 2 * ones, 3 + 2 * targets, level) == 0.5


@pytest.mark.parametrize("function", CLASSIFICATION.values(), ids=CLASSIFICATION)
def test_numpy_and_tensors_give_the_same(function):
    probs, labels = batch(dtype=torch.float32)
    mine, numpys = function(probs, labels), function(probs.numpy(), labels.numpy())
    if isinstance(mine, float):
        assert mine == numpys
    else:
        assert all(torch.equal(a, b) for a, b in zip(vars(mine).values(), vars(numpys).values(), strict=True))


@pytest.mark.parametrize(
    ("function", "rows"), [(metrics.entropy, GOOD), (metrics.mutual_information, torch.stack([GOOD, GOOD.flip(0)]))]
)
def test_values_per_example_keep_type_and_precision(function, rows):
    assert function(rows).dtype == torch.float32
    assert function(rows.double()).dtype == torch.float64
    as_numpy = function(rows.numpy())
    assert isinstance(as_numpy, np.ndarray)
    assert as_numpy.dtype == np.float32
    np.testing.assert_array_equal(as_numpy, function(rows).numpy())


def test_gradients_and_read_only_arrays_do_no_harm():
    frozen = GOOD.numpy().copy()
    frozen.setflags(write=False)
    assert metrics.nll(GOOD.clone().requires_grad_(), LABELS) == metrics.nll(frozen[::-1], LABELS.flip(0))


NAN, INF = GOOD.clone(), GOOD.clone()
NAN[1, 2], INF[0, 0] = math.nan, math.inf
BAD_INPUT = {
    "nan": (NAN, LABELS, ValueError, "NaN or infinity in 1 of 6 values"),
    "inf": (INF, LABELS, ValueError, "NaN or infinity in 1 of 6 values"),
    "empty": (torch.empty(0, 3), LABELS[:0], ValueError, r"must not be empty, got shape \(0, 3\)"),
    "list": (GOOD.tolist(), LABELS, TypeError, "probs must be a tensor or a numpy array, got list"),
    "integers": (torch.tensor([[1, 0], [0, 1]]), LABELS, TypeError, "floating-point, got dtype torch.int64"),
    "vector": (GOOD[:, 0], LABELS, ValueError, r"shape \(N, K\), got \(2,\); .* columns \[1 - p, p\]"),
    "logits": (GOOD.log(), LABELS, ValueError, "these look like logits; apply softmax first"),
    "large": (GOOD * 9, LABELS, ValueError, "these look like logits; apply softmax first"),
    "sums": (GOOD * 0.9, LABELS, ValueError, "sum to one within 0.0001, got one off by 0.1"),
    "label list": (GOOD, [0, 1], TypeError, "labels must be a tensor or a numpy array, got list"),
    "float labels": (GOOD, LABELS.float(), TypeError, "labels must be integers, got dtype torch.float32"),
    "bool labels": (GOOD.numpy(), LABELS.numpy() > 0, TypeError, "labels must be integers, got dtype bool"),
    "one-hot": (GOOD, torch.eye(3).long()[:2], ValueError, r"shape \(2,\).* got \(2, 3\); one-hot .* argmax"),
    "length": (GOOD, torch.tensor([0, 1, 2]), ValueError, r"shape \(2,\), one class per example, got \(3,\)"),
    "high label": (GOOD, torch.tensor([0, 3]), ValueError, r"in 0\.\.2 for 3 classes, got 0\.\.3"),
    "padding": (GOOD, torch.tensor([-100, 1]), ValueError, r"got -100\.\.1; remap"),
}


@pytest.mark.parametrize(("probs", "labels", "kind", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
@pytest.mark.parametrize("function", CLASSIFICATION.values(), ids=CLASSIFICATION)
def test_bad_classification_input_is_refused(function, probs, labels, kind, message):
    with pytest.raises(kind, match=message):
        function(probs, labels)


def test_sums_are_checked_to_the_tolerance():
    metrics.error(GOOD * (1 + 9e-5), LABELS)
    with pytest.raises(ValueError, match="sum to one"):
        metrics.error(GOOD * (1 + 1.1e-4), LABELS)


ONE = torch.ones(2)
BAD_CALLS = {
    "bins type": (partial(metrics.ece, GOOD, LABELS, 15.0), TypeError, "bins must be an int, got float"),
    "bins bool": (partial(metrics.ece, GOOD, LABELS, True), TypeError, "bins must be an int, got bool"),
    "bins": (partial(metrics.mce, GOOD, LABELS, 0), ValueError, "bins must be at least 1, got 0"),
    "kind": (partial(metrics.ece, GOOD, LABELS, kind="all"), ValueError, r"one of \('top', 'pooled'\), got 'all'"),
    "ranking": (
        partial(metrics.aurc, GOOD, LABELS, uncertainty=torch.ones(3)), ValueError, "each of 2 rows of probs, got 3",
    ),
    "score nan": (partial(metrics.auroc, ONE, ONE * math.nan), ValueError, "scores_out must be finite"),
    "score none": (partial(metrics.fpr95, ONE[:0], ONE), ValueError, "scores_in must not be empty"),
    "score shape": (partial(metrics.auroc, GOOD, ONE), ValueError, r"scores_in must have shape \(N,\).* \(2, 3\)"),
    "entropy logits": (partial(metrics.entropy, GOOD.log()), ValueError, "these look like logits"),
    "entropy shape": (partial(metrics.entropy, GOOD[None]), ValueError, r"probs must have shape \(N, K\)"),
    "samples shape": (partial(metrics.mutual_information, GOOD), ValueError, r"shape \(S, N, K\), got \(2, 3\)"),
    "level": (partial(metrics.interval_coverage, ONE, ONE, ONE, 95), ValueError, "between 0 and 1, got 95"),
    "std": (partial(metrics.gaussian_nll, ONE, ONE - 1, ONE), ValueError, "std must be positive, got 0"),
    "shapes": (
        partial(metrics.gaussian_nll, ONE, ONE, ONE[:, None]), ValueError, r"one shape, .* and \(2, 1\)",
    ),
    "targets": (partial(metrics.gaussian_nll, ONE, ONE, ONE.long()), TypeError, "targets must be floating-point"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


MODULES = ("calibration", "conformal", "metrics", "regression")


@pytest.mark.parametrize("module", [getattr(bayesify.quality, name) for name in MODULES], ids=MODULES)
def test_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_debiased_ece_takes_away_what_another_sample_of_labels_would_add():
    """2 ECE - E[ECE*], with the expectation over normal gaps by brute force."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(400, 3, generator=generator, dtype=torch.float64).mul(4).softmax(-1)
    found = metrics.reliability(probs, torch.randint(3, (400,), generator=generator))
    share = found.counts.double() / found.counts.sum()
    s = (found.accuracy * (1 - found.accuracy) / found.counts.clamp_min(1)).sqrt()
    noise = torch.randn(20000, len(s), generator=generator, dtype=torch.float64)
    again = (found.accuracy - found.confidence + s * noise).abs() @ share
    expected = 2 * found.ece - float(again.mean())
    assert 0 < expected < found.ece
    assert found.ece_debiased == pytest.approx(expected, abs=4 * float(again.std()) / 20000**0.5)


def test_the_debiased_ece_of_calibrated_answers_is_smaller():
    """The ECE of 150 calibrated answers is noise, and nearly half of it is gone."""
    generator = torch.Generator().manual_seed(0)
    plain = debiased = 0.0
    for _ in range(100):
        p = 0.5 + 0.5 * torch.rand(150, 1, generator=generator, dtype=torch.float64)
        labels = (torch.rand(150, generator=generator, dtype=torch.float64) > p[:, 0]).long()
        found = metrics.reliability(torch.cat([p, 1 - p], 1), labels)
        plain, debiased = plain + found.ece, debiased + found.ece_debiased
    assert debiased < 0.7 * plain
