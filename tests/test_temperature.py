"""Temperature scaling: closed-form optima, the Monte Carlo average, and optima that do not exist."""

import math

import numpy as np
import pytest
import torch

from bayesify import metrics
from bayesify.prediction.predictive import Predictive
from bayesify.quality.calibration import tempered_probs
from bayesify.quality.metrics import TemperatureError, fit_temperature


def overconfident(n=500, classes=4, samples=None, seed=0):
    """Logits that are three times too large for their labels, perhaps with noise per posterior sample."""
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator).squeeze(1)
    noise = torch.randn(samples or 1, n, classes, generator=generator, dtype=torch.float64)
    return (3 * honest + noise, labels) if samples else (3 * honest, labels)


def nll_by_loops(logits, labels, temperature):
    """The likelihood of an average of softmaxes, sample by sample."""
    total = 0.0
    for n, label in enumerate(labels.tolist()):
        rows = [[math.exp(z / temperature) for z in sample[n].tolist()] for sample in logits]
        total -= math.log(sum(row[label] / sum(row) for row in rows) / len(rows))
    return total / len(labels)


@pytest.mark.parametrize(("logit", "right", "wrong"), [(4.0, 3, 1), (0.5, 9, 1), (30.0, 6, 4), (1e-2, 2, 1)])
def test_the_optimum_makes_confidence_equal_accuracy(logit, right, wrong):
    logits = torch.tensor([[logit, 0.0]] * (right + wrong), dtype=torch.float64)
    labels = torch.tensor([0] * right + [1] * wrong)
    fitted = fit_temperature(logits, labels)
    assert float(fitted) == fitted.temperature == pytest.approx(logit / math.log(right / wrong), rel=1e-6)
    accuracy = right / (right + wrong)
    assert fitted.apply(logits)[0, 0].item() == pytest.approx(accuracy, abs=1e-6)
    assert fitted.nll == pytest.approx(-accuracy * math.log(accuracy) - (1 - accuracy) * math.log(1 - accuracy))


def test_the_temperature_is_inside_the_average():
    logits, labels = overconfident(n=40, samples=3)
    fitted = fit_temperature(logits, labels)
    assert fitted.nll_before == pytest.approx(nll_by_loops(logits, labels, 1.0), abs=1e-10)
    assert fitted.nll == pytest.approx(nll_by_loops(logits, labels, fitted.temperature), abs=1e-10)
    expected = (logits / fitted.temperature).softmax(-1).mean(0)
    torch.testing.assert_close(fitted.apply(logits), expected)
    outside = fit_temperature(logits.softmax(-1).mean(0).log(), labels)
    assert abs(outside.temperature - fitted.temperature) > 0.01


def test_no_nearby_temperature_is_better():
    logits, labels = overconfident(samples=5)
    fitted = fit_temperature(logits, labels)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert metrics.nll(tempered_probs(logits, factor * fitted.temperature), labels) > fitted.nll
    assert fitted.nll < fitted.nll_before


def test_one_sample_and_no_sample_axis_are_the_same():
    logits, labels = overconfident()
    assert fit_temperature(logits, labels) == fit_temperature(logits[None], labels)
    torch.testing.assert_close(tempered_probs(logits, 2.0), (logits / 2).softmax(1))


def test_the_curve_is_sorted_and_holds_the_optimum():
    fitted = fit_temperature(*overconfident())
    temperatures = [t for t, _ in fitted.curve]
    assert temperatures == sorted(set(temperatures))
    assert (fitted.temperature, fitted.nll) in fitted.curve
    assert fitted.nll == min(nll for _, nll in fitted.curve)
    assert temperatures[0] == pytest.approx(1e-2)
    assert temperatures[-1] == pytest.approx(1e2)


def test_numpy_in_numpy_out():
    logits, labels = overconfident()
    fitted = fit_temperature(logits.numpy(), labels.numpy())
    assert fitted == fit_temperature(logits, labels)
    probs = fitted.apply(logits.numpy().astype(np.float32))
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs, fitted.apply(logits).numpy(), atol=1e-6)


def test_half_precision_logits_give_probabilities_that_the_metrics_take():
    logits, labels = overconfident()
    probs = tempered_probs(logits.bfloat16(), 2.0)
    assert probs.dtype == torch.float32
    assert 0 < metrics.nll(probs, labels) < 2


def test_huge_logits_neither_overflow_nor_lose_the_optimum():
    logits, labels = overconfident()
    shifted = fit_temperature(logits * 20 + 1e6, labels)
    assert shifted.temperature == pytest.approx(20 * fit_temperature(logits, labels).temperature, rel=1e-4)


@pytest.mark.parametrize("samples", [None, 3])
def test_perfect_separation_is_no_success(samples):
    labels = torch.arange(30) % 3
    logits = torch.eye(3)[labels] * 5
    logits = logits if samples is None else logits.expand(samples, -1, -1)
    with pytest.raises(TemperatureError, match=r"lower bound T = 0\.01: the logits separate .* held-out data"):
        fit_temperature(logits, labels)


def test_contradicting_labels_are_no_success():
    labels = torch.arange(30) % 3
    with pytest.raises(TemperatureError, match=r"upper bound T = 100: .* or the opposite; check .* same order"):
        fit_temperature(-torch.eye(3)[labels], labels)


@pytest.mark.parametrize("classes", [1, 3])
def test_constant_logits_are_no_success(classes):
    with pytest.raises(TemperatureError, match="every temperature gives the same likelihood"):
        fit_temperature(torch.full((5, classes), 0.3), torch.zeros(5, dtype=torch.long))


def test_an_optimum_outside_narrow_bounds_is_no_success():
    logits, labels = overconfident()
    with pytest.raises(TemperatureError, match="upper bound T = 2"):
        fit_temperature(logits, labels, bounds=(0.5, 2.0))
    with pytest.raises(TemperatureError, match="lower bound T = 5"):
        fit_temperature(logits, labels, bounds=(5.0, 50.0))


LOGITS, LABELS = overconfident(n=6)
BAD_INPUT = {
    "nan": (LOGITS * math.nan, LABELS, ValueError, "logits must be finite, got NaN or infinity in 24 of 24"),
    "inf": (LOGITS * math.inf, LABELS, ValueError, "logits must be finite"),
    "empty": (LOGITS[:0], LABELS[:0], ValueError, "logits must not be empty"),
    "shape": (LOGITS[:, 0], LABELS, ValueError, r"shape \(N, K\), or \(S, N, K\) .* got \(6,\); .* \[0, z\]"),
    "list": (LOGITS.tolist(), LABELS, TypeError, "logits must be a tensor or a numpy array, got list"),
    "dtype": (LOGITS.long(), LABELS, TypeError, "logits must be floating-point"),
    "labels": (LOGITS, LABELS + 4, ValueError, r"labels must be in 0\.\.3"),
    "length": (LOGITS, LABELS[:5], ValueError, r"labels must have shape \(6,\)"),
}


@pytest.mark.parametrize(("logits", "labels", "kind", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused(logits, labels, kind, message):
    with pytest.raises(kind, match=message):
        fit_temperature(logits, labels)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_bounds_must_be_a_range(bounds):
    with pytest.raises(ValueError, match="bounds must be 0 < low < high < inf, got"):
        fit_temperature(LOGITS, LABELS, bounds=bounds)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperatures_are_positive_and_finite(temperature):
    with pytest.raises(ValueError, match="temperature must be positive and finite, got"):
        tempered_probs(LOGITS, temperature)


def test_dense_logits_are_the_same_rows_flattened():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, 4, 6, 3, generator=generator, dtype=torch.float64)  # (S, N, H, W, K)
    labels = logits.mean(0).argmax(-1)
    labels[:, 0] = torch.randint(3, (5, 6), generator=generator)  # some are wrong
    labels[0] = -100
    kept = labels.flatten() != -100
    for samples in (logits, logits[0]):
        rows = samples.flatten(-4, -2)[..., kept, :]
        expected = metrics.fit_temperature(rows, labels.flatten()[kept])
        assert metrics.fit_temperature(samples, labels) == expected
        assert metrics.fit_temperature(samples.movedim(-1, -3), labels) == expected
    found = Predictive.from_logits(logits, labels)
    assert float(metrics.fit_temperature(found)) == pytest.approx(
        float(metrics.fit_temperature(logits.flatten(1, 3)[:, kept], labels.flatten()[kept])), rel=1e-9
    )
    with pytest.raises(ValueError, match=r"the class dimension may be any of the dimensions \[1, 2\]"):
        metrics.fit_temperature(torch.randn(3, 4, 4), torch.zeros(3, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="the class dimension is none of"):
        metrics.fit_temperature(torch.randn(3, 4, 4), torch.zeros(3, 5, dtype=torch.long))
