"""Objects show themselves: in a terminal, in a notebook and as a DataFrame."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from bayesify import bayesify, plots, predict, summary
from bayesify.core.summary import MOST_ROWS
from bayesify.prediction.predictive import Predictive

LOGITS = torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 3


class Cells(HTMLParser):
    """Collect the text of a page's rows; unbalanced tags are an error."""

    def __init__(self, page):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def deep(blocks):
    body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(blocks))
    return nn.ModuleDict({"small": nn.Linear(2, 2), "body": body, "large": nn.Linear(100, 100)})


def test_what_is_bayesian_comes_first_in_a_long_summary():
    layers = [nn.Linear(30, 30) for _ in range(MOST_ROWS)]
    model = bayesify(nn.Sequential(nn.Sequential(*layers), nn.Linear(30, 2)), "la", include="1.*")
    table = summary(model).table()
    assert table[0][0].startswith("1") and "laplace" in table[0][2]


def test_a_long_summary_is_collapsed_by_module_with_the_largest_first():
    model = bayesify(deep(20), "vi", prior_sig=0.1, exclude="small.*")
    found = summary(model)
    assert len(found.rows) == 84
    first, *rest = found.table()
    assert first[:3] == ("large.weight", "10,000 in 1", "vi, std 0.001")
    assert len(rest) + 1 == 20 + 2 + 2  # the two linear layers of a block are a level deeper, and would be 40
    assert ("body.3", "40 in 4", "vi, std 0.001", "N(theta0, 0.1^2)", "") in rest
    assert ("small.weight", "4 in 1", "-", "-", "1 not selected") in rest
    assert sum(int(row[1].split(" in ")[1]) for row in found.table()) == 84
    assert "body.11.1.bias" in found.text(full=True) and "body.11.1.bias" not in str(found)
    assert str(found).splitlines()[-2:] == found.totals[-2:]


def test_a_flat_model_of_many_tensors_ends_with_the_rest():
    model = bayesify(nn.ModuleDict({f"m{i}": nn.Linear(i + 1, 1) for i in range(60)}), "vi", prior_sig=0.1)
    table = summary(model).table()
    assert len(table) == MOST_ROWS + 1
    assert table[0][0] == "m59" and table[-1][0] == "20 more"
    assert table[-1][1] == f"{sum(i + 2 for i in range(20))} in 40"


def test_spreads_of_a_module_are_a_range():
    model = bayesify(deep(20), "vi", prior_sig={"body.0.0.*": 0.001, "*": 0.1})
    cells = {row[0]: row for row in summary(model).table()}
    assert cells["body.0"][2:4] == ("vi, std 0.0001 to 0.001", "2 priors")


def test_the_pages_of_all_objects():
    out = Predictive.from_logits(LOGITS, LABELS)
    rows = Cells(out._repr_html_()).rows
    worst = out.entropy.argsort(descending=True)[:5].tolist()
    assert [row[0] for row in rows[1:]] == [str(i) for i in worst]
    assert rows[0] == ["prediction", "labels", "confidence", "entropy", "mutual_information"]
    assert repr(out) in out._repr_html_()

    model, x = bayesify(nn.Linear(3, 2), "vi", init_sig=0.1, prior_sig=1.0), torch.randn(9, 3)
    regression = predict(model, [(x, torch.randn(9, 2))], task="regression", samples=4, seed=0).with_noise(0.1)
    assert Cells(regression._repr_html_()).rows[0] == ["mean", "std", "low", "high", "target"]
    misfit = predict(model, [(x, torch.randn(9, 3))], task="regression", samples=4, seed=0)
    assert "do not fit" in misfit._repr_html_()
    several = predict(model, x, task="multilabel", samples=4, seed=0)
    assert len(Cells(several._repr_html_()).rows) == 6
    assert Cells(summary(model)._repr_html_()).rows[1][:3] == ["weight", "2x3", "vi, std 0.1"]


def test_text_from_a_model_is_escaped():
    page = summary(bayesify(nn.ModuleDict({"<b>": nn.Linear(2, 2)}), "vi"))._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;.weight" in page


def test_a_classification_as_a_frame():
    pd = pytest.importorskip("pandas")
    out = Predictive.from_logits(LOGITS, LABELS)
    found = out.to_pandas()
    assert isinstance(found, pd.DataFrame) and len(found) == 30
    assert found["p_2"].to_numpy() == pytest.approx(out.probs[:, 2].numpy())
    assert (found["labels"] == LABELS.numpy()).all()
    tokens = Predictive.from_logits(LOGITS.view(4, 6, 5, 3)).to_pandas()
    assert tokens.loc[(5, 4), "entropy"] == pytest.approx(float(out.entropy[29]))
    assert "labels" not in tokens


def test_a_regression_as_a_frame():
    pytest.importorskip("pandas")
    model = bayesify(nn.Linear(3, 2), "vi", init_sig=0.1, prior_sig=1.0)
    out = predict(model, [(torch.randn(9, 3), torch.randn(9, 2))], task="regression", samples=4, seed=0)
    found = out.with_noise(0.1).to_pandas()
    assert found.shape == (18, 7)
    assert found.loc[(8, 1), "mean"] == float(out.mean[8, 1])
    assert (found["low"] < found["mean"]).all() and (found["mean"] < found["high"]).all()


def test_a_frame_without_pandas_says_the_pip_command():
    code = """
import sys
sys.modules["pandas"] = None
import torch
from bayesify.prediction.predictive import Predictive
Predictive.from_logits(torch.zeros(2, 3)).to_pandas()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install pandas" in found.stderr.splitlines()[-1]


def test_bins_of_few_items_are_marked():
    probs = torch.tensor([[0.9, 0.1]] * 40 + [[0.6, 0.4]] * 3)
    figure = plots.reliability_diagram(probs, torch.zeros(43, dtype=torch.long))
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "Under 10 items" in names
    observed = figure.axes[0].containers[0]
    assert {round(float(bar.get_x()), 2): bar.get_linestyle() for bar in observed} == {0.6: ":", 0.87: "solid"}
    steady = plots.reliability_diagram(probs[:40], torch.zeros(40, dtype=torch.long))
    assert len(steady.axes[0].get_legend().get_texts()) == 3
    assert figure.get_figwidth() * figure.dpi == 660
