"""Pictures and the report of a regression, the toy with a gap, and the table of promises."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesify import bayesify, plots, predict

ROOT = Path(__file__).parent.parent


@pytest.fixture
def out():
    torch.manual_seed(0)
    model = bayesify(nn.Linear(1, 1), "vi", prior_sig=1.0, init_sig=0.1)
    x = torch.linspace(-1, 1, 40).unsqueeze(1).flip(0)
    return x, predict(model, [(x, torch.randn(40, 1))], samples=10, seed=0, task="regression").with_noise(1.0)


def test_the_band_has_data_mean_and_two_shades(out):
    x, prediction = out
    (ax,) = plots.regression_band(x, prediction, data=(x, prediction.labels), title="toy").axes
    assert len(ax.collections) == 2 and len(ax.lines) == 2
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["95%", "Epistemic", "Mean", "Data"]
    line = ax.lines[0].get_xdata()
    assert (line[1:] > line[:-1]).all()
    low, high = prediction.interval(0.95)
    bounds = ax.collections[0].get_datalim(ax.transData)
    assert bounds.y0 == pytest.approx(float(low.min())) and bounds.y1 == pytest.approx(float(high.max()))
    with pytest.raises(ValueError, match="40 predictions"):
        plots.regression_band(x[:3], prediction)


def test_the_calibration_curve_is_the_coverage_of_every_level(out):
    _, prediction = out
    (ax,) = plots.calibration_curve(prediction).axes
    line = next(line for line in ax.lines if line.get_label() == "Observed")
    for level in (0.25, 0.5, 0.95):
        low, high = prediction.interval(level)
        inside = ((low <= prediction.targets()) & (prediction.targets() <= high)).double().mean()
        assert float(line.get_ydata()[round(level * 200)]) == pytest.approx(float(inside))
    assert f"{prediction.scores['coverage']:.1%}" in ax.texts[0].get_text()


def test_the_report_takes_a_regression(out, tmp_path):
    _, prediction = out
    page = plots.report(prediction, tmp_path / "r.html").read_text()
    assert "method vi · 10 posterior samples" in page
    for word in ("RMSE", "CRPS", "Coverage", "Epistemic", "Aleatoric", "data:image/svg"):
        assert word in page
    without = plots.report(replace(prediction, labels=None), tmp_path / "s.html")
    assert "no targets" in without.read_text()


def test_the_report_says_how_much_can_be_answered(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(600, 2)
    model = bayesify(nn.Linear(2, 2), "vi", prior_sig=1.0, init_sig=0.01)
    labels = torch.distributions.Categorical(logits=4 * model.eval()(x)).sample()
    page = plots.report(predict(model, [(x, labels)], samples=3, seed=0), tmp_path / "r.html").read_text()
    assert "Error at most 5%" in page and "answer " in page


@pytest.mark.parametrize("method", ["la", "vi"])
def test_the_band_widens_where_there_are_no_data(method, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("regression")
    model, _ = example.train(method, *example.sine(60, seed=0), steps=500, seed=0)
    grid = torch.linspace(-2.5, 2.5, 201).unsqueeze(1)
    samples = None if method == "la" else 50
    prediction = predict(model, grid, samples, seed=0, task="regression")
    gap = prediction.epistemic[(grid.abs() < 0.35).squeeze(1)].mean()
    known = prediction.epistemic[((grid.abs() > 0.9) & (grid.abs() < 1.8)).squeeze(1)].mean()
    assert float(gap / known) > 1.2
