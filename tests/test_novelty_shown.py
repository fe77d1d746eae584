"""Novelty where people meet it: reports, active learning, scikit-learn, pipelines, the Trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import active, bayesify, fit_novelty, plots, predict

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) + 2
Y = (X[:, 0] > 2).long()
FAR = torch.randn(30, 3, generator=torch.Generator().manual_seed(1)) - 9


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    return fit_novelty(bayesify(net, "vi"), [(X[:100], Y[:100])], held_out=X[100:])


def test_a_report_says_how_many_are_flagged(tmp_path):
    pytest.importorskip("matplotlib")
    found, ood = predict(model(), [(X, Y)]), predict(model(), FAR)
    page = plots.report(found, tmp_path / "r.html", ood=ood).read_text()
    assert ">Novelty<" in page
    assert f"The alarm for 5.0% false alarms flags {found.alarm().double().mean():.1%} of the in-dist" in page
    torch.manual_seed(0)
    line = fit_novelty(nn.Linear(3, 1), X[:100], held_out=X[100:])
    out = predict(line, X, task="regression")
    page = plots.report(out, tmp_path / "r.html").read_text()
    assert f"for 5.0% false alarms flags {out.alarm().double().mean():.1%} of the examples" in page


def test_what_is_strange_and_uncertain_is_labelled_first():
    found = predict(model(), X[:20], samples=10, seed=0)
    p = torch.ones(20, dtype=torch.float64)
    p[[3, 7]] = 0.01
    found = replace(found, novelty_pvalue=p)
    weighed = active.information(found) * (1 - p)
    assert (
        active.select(found, 3, diverse=False, strange=True).tolist()
        == weighed.argsort(descending=True, stable=True).tolist()[:3]
    )
    assert set(active.select(found, 2, strange=True).tolist()) == {3, 7}
    with pytest.raises(ValueError, match="strange=True needs novelty"):
        active.select(replace(found, novelty_pvalue=None), 2, strange=True)


def test_a_scikit_learn_estimator_has_an_alarm():
    pytest.importorskip("sklearn")
    import pickle

    from bayesify.integrations.sklearn import BayesClassifier, BayesRegressor

    x, names = X.double().numpy(), np.array(["no", "yes"])[Y.numpy()]
    classifier = BayesClassifier(steps=100, random_state=0).fit(x[:100], names[:100])
    classifier.fit_novelty(x[:100], names[:100], held_out=x[100:])
    assert classifier.model_.novelty.at == "mean" and len(classifier.model_.novelty.scales) == 2
    alarms = classifier.alarm(FAR.double().numpy())
    assert alarms.dtype == bool and alarms.mean() > 0.9
    assert (pickle.loads(pickle.dumps(classifier)).alarm(x) == classifier.alarm(x)).all()
    regressor = BayesRegressor(steps=50, random_state=0).fit(x[:100], x[:100, 0])
    assert regressor.fit_novelty(x[:100], held_out=x[100:], false_alarms=0.1).alarm(x[:7]).shape == (7,)


def test_a_pipeline_says_how_strange_an_input_is():
    pytest.importorskip("transformers")
    from test_huggingface_pipeline import TEXTS, build, tokenizer

    from bayesify.integrations.huggingface import pipeline

    texts = dict(tokenizer()(TEXTS * 20, padding=True, return_tensors="pt"))
    other = {name: t.clone() for name, t in texts.items()}
    other["input_ids"][:, 1:-1] = torch.randint(
        4, 15, other["input_ids"][:, 1:-1].shape, generator=torch.Generator().manual_seed(0)
    )
    net = fit_novelty(build(), [{**texts, "labels": torch.arange(60) % 3}], held_out=other)
    classify = pipeline("text-classification", net, samples=3, seed=4, tokenizer=tokenizer(), device="cpu")
    wanted = predict(net, dict(tokenizer()(TEXTS, padding=True, return_tensors="pt")), 3).novelty_pvalue
    assert [one["novelty_pvalue"] for one in classify(TEXTS)] == pytest.approx(wanted.tolist())


def test_an_evaluation_counts_alarms(tmp_path):
    pytest.importorskip("transformers")
    from trainers import arguments, classifier, sentences

    from bayesify.integrations.huggingface import BayesTrainer

    data = sentences(40)
    batch = {name: torch.stack([row[name] for row in data]) for name in ("input_ids", "labels")}
    net = fit_novelty(bayesify(classifier(), "vi"), [batch], held_out=[batch])
    found = BayesTrainer(net, arguments(tmp_path), eval_dataset=data).evaluate()
    assert found["eval_alarms"] == pytest.approx(float(predict(net, [batch]).alarm().double().mean()))
