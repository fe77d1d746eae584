"""What the pictures contain, and that they leave no trace outside of themselves."""

import doctest
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pictured import FITTED, LABELS, LOGITS, PROBS

import bayesify.quality.plots
import bayesify.quality.report
from bayesify import metrics, plots
from bayesify.prediction.predictive import Predictive

matplotlib = pytest.importorskip("matplotlib")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("kind", "xlabel", "ylabel"),
    [("top", "Confidence", "Accuracy"), ("pooled", "Predicted probability", "Observed frequency")],
)
def test_reliability_diagram_shows_the_bins(kind, xlabel, ylabel):
    (ax,) = plots.reliability_diagram(PROBS, LABELS, bins=10, kind=kind, title="A $ title $").axes
    table = metrics.reliability(PROBS, LABELS, 10, kind)
    filled = table.counts > 0
    observed, gaps, counts = [bars for bars in ax.containers if "Under" not in bars.get_label()]
    assert [bar.get_height() for bar in observed] == table.accuracy[filled].tolist()
    tops = [bar.get_y() + bar.get_height() for bar in gaps]
    assert tops == pytest.approx(table.confidence[filled].tolist())
    assert [bar.get_x() for bar in counts] == table.edges[:-1][filled].tolist()
    heights = torch.tensor([float(bar.get_height()) for bar in counts])
    torch.testing.assert_close(heights / heights.max(), (table.counts / table.counts.max())[filled])
    assert texts(ax)[:-1] == [str(count) for count in table.counts[filled].tolist()]
    assert texts(ax)[-1] == f"ECE {table.ece:.4f}\nMCE {table.mce:.4f}\nNLL {metrics.nll(PROBS, LABELS):.4f}"
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == (xlabel, ylabel, "A $ title $")
    few = ["Under 10 items"] * bool((table.counts[filled] < 10).any())
    assert sorted(legend(ax)) == ["Gap", "Observed", "Perfect", *few]


def test_many_bins_show_bars_without_numbers():
    (ax,) = plots.reliability_diagram(PROBS, LABELS, bins=21).axes
    assert len(ax.texts) == 1


@pytest.mark.parametrize(("count", "short"), [(9999, "9999"), (10_000, "10k"), (999_499, "999k"), (2 * 10**7, "20M")])
def test_counts_are_written_short(count, short):
    assert plots.short(count) == short


def test_pictures_can_be_drawn_on_axes_of_ones_own():
    figure = matplotlib.figure.Figure(figsize=(7, 3))
    for ax, draw in zip(figure.subplots(1, 2), (plots.temperature_curve, plots.risk_coverage), strict=True):
        subject = FITTED if draw is plots.temperature_curve else metrics.risk_coverage(PROBS, LABELS)
        assert draw(subject, ax=ax, title="mine") is figure
        assert ax.get_title() == "mine"
        assert ax.lines


def test_before_and_after_temperature_scaling():
    out = Predictive.from_logits(LOGITS, LABELS)
    left, right = plots.before_after(out, out.tempered(FITTED), names=("T = 1", "tempered")).axes
    assert (left.get_title(), right.get_title()) == ("T = 1", "tempered")
    assert f"NLL {FITTED.nll_before:.4f}" in texts(left)[-1]
    assert f"NLL {FITTED.nll:.4f}" in texts(right)[-1]


def test_before_and_after_show_calibration_and_confidence_in_what_was_never_seen():
    before, after = (Predictive.from_logits(LOGITS / t, LABELS) for t in (1, 2))
    strange = [Predictive.from_logits(torch.randn(50, LOGITS.shape[-1]) / t) for t in (1, 2)]
    figure = plots.before_after(before, after, ood=tuple(strange), names=("A", "B"))
    for i, (out, ood) in enumerate(zip((before, after), strange, strict=True)):
        reliability, histogram = figure.axes[i], figure.axes[2 + i]
        assert (reliability.get_title(), histogram.get_xlabel()) == ("AB"[i], "Confidence")
        assert f"NLL {out.scores['nll']:.4f}" in texts(reliability)[-1]
        auroc = metrics.auroc(-out.confidence, -ood.confidence)
        assert texts(histogram) == [f"AUROC {auroc:.4f}\nOOD confidence {ood.confidence.mean():.1%}"]
    assert len(plots.before_after(before, after).axes) == 2
    with pytest.raises(ValueError, match="a prediction has none; predict batches of"):
        plots.before_after(before, strange[0])


def test_after_shows_the_alarm_where_there_is_one():
    before, after = (Predictive.from_logits(LOGITS / t, LABELS) for t in (1, 2))
    count = len(LABELS)
    known = replace(after, novelty=torch.linspace(0, 1, count), novelty_pvalue=1 - torch.linspace(0, 0.99, count))
    strange = Predictive.from_logits(torch.randn(50, LOGITS.shape[-1]))
    alarmed = replace(strange, novelty=torch.linspace(0.9, 3, 50), novelty_pvalue=torch.full((50,), 0.01))
    figure = plots.before_after(before, known, ood=(strange, alarmed))
    left, right = figure.axes[2:]
    assert (left.get_xlabel(), right.get_xlabel()) == ("Confidence", "Novelty")
    share = float((known.novelty_pvalue <= 0.05).double().mean())
    assert texts(right) == [f"alarm: 100.0% of OOD data,\n{share:.1%} false alarms"]
    threshold = float(known.novelty[known.novelty_pvalue > 0.05].max())
    assert right.lines[0].get_xdata()[0] == pytest.approx(threshold)


def test_temperature_curve_marks_one_and_the_optimum():
    (ax,) = plots.temperature_curve(FITTED).axes
    curve, before, best = ax.lines
    assert set(zip(*curve.get_data(), strict=True)) <= set(FITTED.curve)
    assert len(curve.get_xdata()) > 10
    assert tuple(map(float, (*before.get_xdata(), *before.get_ydata()))) == (1.0, FITTED.nll_before)
    assert tuple(map(float, (*best.get_xdata(), *best.get_ydata()))) == (float(FITTED), FITTED.nll)
    assert legend(ax) == [f"T = 1, NLL {FITTED.nll_before:.4f}", f"T = {float(FITTED):.3f}, NLL {FITTED.nll:.4f}"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("Temperature T", "NLL", "log")


def test_risk_coverage_compares_methods_without_colour():
    curves = {f"method {i}": metrics.risk_coverage(PROBS, LABELS, uncertainty=torch.rand(300)) for i in range(5)}
    (ax,) = plots.risk_coverage(curves).axes
    assert legend(ax) == [f"{name} (AURC {curve.aurc:.3g})" for name, curve in curves.items()]
    for line, curve in zip(ax.lines, curves.values(), strict=True):
        assert line.get_ydata().tolist() == curve.risk.tolist()
        assert line.get_xdata().tolist() == curve.coverage.tolist()
    assert len({line.get_marker() for line in ax.lines}) == 5
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Coverage", "Error rate of those kept")


def test_risk_coverage_scale_ignores_the_first_few_examples():
    risk = torch.full((100,), 0.1)
    risk[0] = 1.0
    curve = metrics.RiskCoverage(torch.arange(1, 101) / 100, risk)
    assert plots.risk_coverage(curve).axes[0].get_ylim() == pytest.approx((0, 0.115))


def test_risk_coverage_of_a_perfect_model_has_a_scale():
    curve = metrics.risk_coverage(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
    (ax,) = plots.risk_coverage(curve).axes
    assert ax.get_ylim() == (0, 1)
    assert legend(ax) == ["(AURC 0)"]


def test_risk_coverage_needs_a_curve():
    with pytest.raises(ValueError, match=r"curves must not be empty, got no curve; pass \{name:"):
        plots.risk_coverage({})


def test_uncertainty_histogram_shows_fractions_and_detection():
    inside, outside = torch.rand(50), torch.rand(20) + 0.5
    (ax,) = plots.uncertainty_histogram(inside, outside, quantity="Doubt", bins=7, names=("Seen", "New")).axes
    for patch in ax.patches:
        low, high = patch.get_path().get_extents().intervalx
        assert inside.min().item() <= low + 1e-6
        assert high <= outside.max().item() + 1e-6
    edges = torch.linspace(float(inside.min()), float(outside.max()), 8, dtype=torch.float64)
    tallest = torch.histogram(inside.double(), edges).hist.max().item() / 50
    assert ax.patches[0].get_path().get_extents().y1 == pytest.approx(tallest)
    assert {bool(patch.get_hatch()) for patch in ax.patches} == {True, False}
    assert texts(ax) == [f"AUROC {metrics.auroc(inside, outside):.4f}\nFPR95 {metrics.fpr95(inside, outside):.4f}"]
    assert legend(ax) == ["Seen", "New"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Doubt (nats)", "Fraction of examples")


def test_uncertainty_histogram_refuses_nan():
    with pytest.raises(ValueError, match="out_dist must be finite"):
        plots.uncertainty_histogram(torch.rand(3), torch.tensor([float("nan")]))


def test_constant_uncertainties_can_be_drawn():
    (ax,) = plots.uncertainty_histogram(torch.zeros(3), torch.zeros(2)).axes
    assert texts(ax) == ["AUROC 0.5000\nFPR95 1.0000"]


def test_matplotlib_is_imported_late_and_its_global_state_untouched():
    code = """
import sys, torch
import bayesify.quality.metrics
from bayesify import metrics, plots
assert 'matplotlib' not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
logits, labels = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1, 0])
fitted = metrics.fit_temperature(logits, labels)
plots.reliability_diagram(fitted.apply(logits), labels).canvas.draw()
plots.temperature_curve(fitted).canvas.draw()
assert 'matplotlib.pyplot' not in sys.modules
assert dict.__eq__(before, matplotlib.rcParams)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib, which is missing; pip install bayesify\[plots\]"):
        plots.temperature_curve(FITTED)


@pytest.mark.parametrize("module", [bayesify.quality.plots, bayesify.quality.report])
def test_examples_in_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
