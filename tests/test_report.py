"""What the page of a report contains, and what it needs: nothing outside of itself."""

import base64
import copy
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from pictured import FITTED, LABELS, LOGITS, PROBS

import bayesify.quality.plots
import bayesify.quality.report
from bayesify import bayesify as make_bayesian
from bayesify import fit_laplace, metrics, mix, plots, predict
from bayesify.prediction.predictive import Predictive

pytest.importorskip("matplotlib")


def predictive(logits, labels=None, *, keep=True):
    out = Predictive.from_logits(logits, labels)
    return out if keep else replace(out, logits=None)


class Reader(HTMLParser):
    """Collects the text, the images and the nesting of a page."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, page):
        super().__init__()
        self.source = page
        self.text, self.images, self.open, self.tags = [], [], [], set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())

    def values_of(self, name):
        """The cells after the name of a row and its explanation."""
        cells = [text for text in self.text if text]
        start = cells.index(name) + 2
        return [float(cell) for cell in cells[start : start + 2] if re.fullmatch(r"[\d.]+", cell)]


TITLE = "<script>alert('x')</script> & \"more\""


def read(tmp_path, *args, **kwargs):
    path = plots.report(*args, tmp_path / "report.html", **kwargs)
    assert list(tmp_path.iterdir()) == [path]
    return Reader(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def inside():
    return predictive(LOGITS, LABELS)


@pytest.fixture(scope="module")
def outside():
    return predictive(LOGITS[:, :200] / 4)


@pytest.fixture(scope="module")
def page(tmp_path_factory, inside, outside):
    return read(tmp_path_factory.mktemp("page"), inside, ood=outside, title=TITLE)


def test_report_has_the_numbers_before_and_after(page):
    after = FITTED.apply(LOGITS)
    scores = {
        "Error": metrics.error, "NLL": metrics.nll, "Brier score": metrics.brier, "ECE, top label": metrics.ece,
        "MCE, top label": metrics.mce, "AURC": metrics.aurc,
        "ECE, pooled": lambda p, y: metrics.ece(p, y, kind="pooled"),
        "MCE, pooled": lambda p, y: metrics.mce(p, y, kind="pooled"),
    }  # fmt: skip
    for name, score in scores.items():
        expected = [score(PROBS, LABELS), score(after, LABELS)]
        assert page.values_of(name) == pytest.approx(expected, abs=5.1e-5), name
    assert any("fitted on these labels (optimistic)" in text for text in page.text)
    assert "300 examples · 4 classes · 3 posterior samples · 200 out-of-distribution examples" in page.text


def test_report_is_self_contained_and_its_pictures_are_images(page):
    assert not re.search(r"https?:|@import|url\(", page.source)
    assert page.tags.isdisjoint({"script", "link", "iframe"})
    assert [image["alt"] for image in page.images] == [
        "Top label: the highest probability of each example",
        "Pooled: the probabilities of all classes",
        f"Top label at T = {float(FITTED):.3f}",
        "Likelihood by temperature",
        "Error rate when the uncertain examples are refused",
        "Entropy of right and wrong predictions",
        "Entropy",
        "Mutual information",
    ]
    for image in page.images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"</svg>" in base64.b64decode(data)


def test_report_measures_detection(page, inside, outside):
    names = "entropy", "mutual_information"
    pairs = [(getattr(inside, name), getattr(outside, name)) for name in names]
    assert page.values_of("AUROC") == pytest.approx([metrics.auroc(*pair) for pair in pairs], abs=5.1e-5)
    assert page.values_of("FPR95") == pytest.approx([metrics.fpr95(*pair) for pair in pairs], abs=5.1e-5)
    means = [value.expected_entropy.mean().item() for value in (inside, outside)]
    assert page.values_of("Expected entropy") == pytest.approx(means, abs=5.1e-5)


def test_report_says_by_which_method(tmp_path):
    x, plain = torch.randn(8, 3), torch.nn.Linear(3, 2)
    one = make_bayesian(copy.deepcopy(plain), "vi", init_sig=0.1)
    several = mix([one, make_bayesian(copy.deepcopy(plain), "vanilla")])
    fitted = fit_laplace(make_bayesian(copy.deepcopy(plain), "la"), [(x, torch.arange(8) % 2)], structure="kron")
    for model, said in {
        plain: "8 examples · 2 classes · no samples",
        one: "8 examples · 2 classes · method vi · 5 posterior samples",
        several: "8 examples · 2 classes · method mixture of 2: vi, vanilla · 6 posterior samples",
        fitted: "8 examples · 2 classes · method la · in closed form",
    }.items():
        page = plots.report(predict(model, x, seed=0)[:8], tmp_path / "method.html").read_text(encoding="utf-8")
        assert f"<p>{said}</p>" in page


def test_report_writes_small_numbers_with_three_digits(tmp_path):
    probs = torch.tensor([[1 - 2e-4, 2e-4]] * 10, dtype=torch.float64)
    page = read(tmp_path, predictive(probs.log()[None], torch.zeros(10, dtype=torch.long)))
    assert "8e-08" in page.text  # the Brier score 2 * (2e-4)^2
    assert page.values_of("Error") == [0.0]


def test_report_escapes_the_title(page):
    assert "script" not in page.tags
    assert page.text.count(TITLE) == 2


@pytest.mark.parametrize("temperature", [2.0, FITTED])
def test_report_takes_a_temperature_from_elsewhere(tmp_path, temperature):
    page = read(tmp_path, predictive(LOGITS, LABELS), temperature=temperature)
    assert f"T = {float(temperature):.4f} was fitted on other data." in page.text
    assert not any("optimistic" in text for text in page.text)
    shown = metrics.nll(metrics.Temperature(float(temperature), 0, 0, ()).apply(LOGITS), LABELS)
    assert page.values_of("NLL")[1] == pytest.approx(shown, abs=5.1e-5)


def test_report_says_why_there_is_no_temperature(tmp_path):
    streamed = read(tmp_path, predictive(LOGITS, LABELS, keep=False))
    assert any("needs the logits of each sample" in text for text in streamed.text)
    separable = 9 * torch.eye(3)[torch.arange(30) % 3]
    perfect = read(tmp_path, predictive(separable[None], torch.arange(30) % 3))
    assert any(text.startswith("No temperature scaling: the likelihood is best at the lower") for text in perfect.text)
    assert perfect.values_of("Error") == [0.0]
    assert "Entropy of right and wrong predictions" not in [image["alt"] for image in perfect.images]


def test_report_leaves_out_the_information_of_a_single_sample(tmp_path):
    page = read(tmp_path, predictive(LOGITS[:1], LABELS), ood=predictive(LOGITS[:1] / 4))
    assert any(text.startswith("Mutual information is left out") for text in page.text)
    assert len(page.values_of("AUROC")) == 1


def test_report_without_labels_shows_the_uncertainties(tmp_path):
    page = read(tmp_path, predictive(LOGITS))
    assert any(text.startswith("The data has no labels") for text in page.text)
    assert page.values_of("Mutual information") == pytest.approx(
        [metrics.mutual_information(LOGITS.softmax(-1)).mean().item()], abs=5.1e-5
    )
    assert page.images == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SimpleNamespace(probs=None), None), "predictive must hold class probabilities, got SimpleNamespace"),
        ((predictive(LOGITS, LABELS), object()), "ood must hold class probabilities, got object; pass what predict"),
    ],
)
def test_report_is_for_classification(tmp_path, arguments, message):
    subject, ood = arguments
    with pytest.raises(TypeError, match=message):
        plots.report(subject, tmp_path / "report.html", ood=ood)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_report_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr(bayesify.quality.report.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        plots.report(predictive(LOGITS), path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_report_of_tokens_leaves_padding_out(tmp_path):
    model = make_bayesian(torch.nn.Linear(3, 4), "vi", init_sig=0.3)
    labels = torch.randint(4, (5, 6))
    labels[:, 4:] = -100
    out = predict(model, [(torch.randn(5, 6, 3), labels)], samples=3, seed=0)
    assert out.flat().logits.shape == (3, 20, 4)
    page = plots.report(out, tmp_path / "new" / "report.html").read_text()
    assert "20 examples" in page


def test_the_report_says_when_and_by_what_it_was_made(tmp_path):
    page = plots.report(Predictive.from_logits(LOGITS, LABELS), tmp_path / "report.html").read_text()
    assert "Made on 20" in page and "by bayesify" in page


def test_the_largest_gap_is_told_with_its_count(tmp_path):
    table = metrics.reliability(PROBS, LABELS)
    columns = zip(table.accuracy, table.confidence, table.counts, strict=True)
    gaps = [float((a - c).abs()) if n else -1.0 for a, c, n in columns]
    count = int(table.counts[gaps.index(max(gaps))])
    assert f"that of {count} examples" in plots.report(predictive(LOGITS, LABELS), tmp_path / "r.html").read_text()


def window(scale, seed, count=300):
    """The prediction of a model with novelty for data of some scale."""
    novelty = scale * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    out = Predictive.from_logits(LOGITS[:, :count] / scale, LABELS[:count])
    return replace(out, novelty=novelty, novelty_pvalue=(1 - novelty).clamp_min(0.01))


def test_a_window_of_production_data_is_compared_with_the_validation_set(tmp_path):
    validation, same, other = window(1, 0), window(1, 1), window(3, 2)
    numbers = {}
    for name, found in {"same": same, "other": other}.items():
        path = plots.report(found, tmp_path / f"{name}.json", validation=validation, threshold=0.6)
        numbers[name] = json.loads(path.read_text())["Compared with the validation set"]
    table = numbers["other"]
    shares = {
        k: float((v.confidence < 0.6).double().mean()) for k, v in {"Validation": validation, "Window": other}.items()
    }
    assert table["Abstention rate"] == pytest.approx(shares)
    assert table["Alarms"]["Window"] == pytest.approx(float(other.alarm().double().mean()))
    assert table["Confidence"]["Validation"] == pytest.approx(float(validation.confidence.mean()))
    assert table["Novelty p-value"]["Window"] == pytest.approx(float(other.novelty_pvalue.median()))
    assert numbers["same"]["Drift: novelty"]["First alarm"] is None
    assert table["Drift: novelty"]["First alarm"] > 0
    assert numbers["same"]["notes"][0].startswith("No drift") and "novelty is higher" in table["notes"][0]
    page = Reader(plots.report(other, tmp_path / "page.html", validation=validation).read_text())
    assert "Compared with the validation set" in page.text and "Validation" in page.text
    assert page.values_of("Alarms") == pytest.approx(list(table["Alarms"].values()), abs=1e-4)


def test_a_window_of_a_regression_is_compared(tmp_path):
    model = make_bayesian(torch.nn.Linear(3, 1), "vi", prior_sig=1.0, init_sig=0.1)
    near, far = (predict(model, s * torch.randn(200, 3), samples=5, seed=0, task="regression") for s in (1, 5))
    path = plots.report(far.with_noise(0.1), tmp_path / "r.json", validation=near.with_noise(0.1))
    table = json.loads(path.read_text())["Compared with the validation set"]
    assert table["Drift: standard deviation"]["First alarm"] is not None
    assert table["Epistemic"]["Window"] > table["Epistemic"]["Validation"]
    with pytest.raises(TypeError, match="validation must hold a regression"):
        plots.report(far, tmp_path / "r.json", validation=Predictive.from_logits(LOGITS))


def test_tokens_of_an_example_are_no_independent_evidence_of_drift(tmp_path):
    def tokens(seed):
        g = torch.Generator().manual_seed(seed)
        each = torch.randn(40, 1, 3, generator=g).expand(40, 30, 3)  # all tokens of an example alike
        return predict(torch.nn.Identity(), each.contiguous(), task="tokens")

    plots.report(tokens(0), tmp_path / "r.json", validation=tokens(1))
    found = json.loads((tmp_path / "r.json").read_text())["Compared with the validation set"]
    assert found["Examples"]["Window"] == 1200 and found["Drift: entropy"]["First alarm"] is None


def test_labels_that_do_not_exclude_each_other(tmp_path):
    out = predict(torch.nn.Identity(), [(torch.randn(30, 4), torch.rand(30, 4) > 0.5)], task="multilabel")
    plots.report(out, tmp_path / "r.json", validation=out)
    found = json.loads((tmp_path / "r.json").read_text())
    assert next(iter(found["Scores"]["Error"].values())) == pytest.approx(out.scores["error"])
