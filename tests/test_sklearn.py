"""The estimators keep scikit-learn's conventions, and their doubt grows away from the data."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.datasets import load_diabetes, load_iris  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from bayesify.integrations.sklearn import BayesClassifier, BayesRegressor  # noqa: E402

RATES = {"vi": 0.02, "mc_dropout": 0.02, "sgld": 0.3, "la": 0.02, "vanilla": 0.02}


@pytest.mark.parametrize("estimator", [BayesClassifier, BayesRegressor])
@pytest.mark.filterwarnings("ignore:Can't check dok sparse matrix:UserWarning")
def test_scikit_learns_own_checks(estimator):
    found = check_estimator(estimator(hidden=(20,), steps=40, lr=0.08, random_state=0), on_skip=None, on_fail=None)
    assert [(c["check_name"], repr(c["exception"])) for c in found if c["status"] == "failed"] == []
    assert sum(c["status"] == "passed" for c in found) >= 50


@pytest.mark.parametrize(("method", "lr"), RATES.items())
def test_every_method_classifies(method, lr):
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = BayesClassifier(method, steps=150, lr=lr, random_state=0).fit(x, names)
    assert model.score(x, names) > 0.9
    probs = model.predict_proba(x)
    assert probs.shape == (150, 3) and probs.sum(1) == pytest.approx(1)
    assert (model.classes_[probs.argmax(1)] == model.predict(x)).all()


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "la", "vanilla"])
def test_numbers_come_with_their_spread(method):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 1))
    y = 100 + 10 * (np.sin(3 * x[:, 0]) + 0.2 * rng.normal(size=200))
    model = BayesRegressor(method, steps=200, lr=0.02, random_state=0).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    assert model.score(x, y) > 0.8
    assert std == pytest.approx(model.predict_std(x))
    assert 0.85 < np.mean(np.abs(y - mean) < 1.96 * std) <= 1  # honest in the targets' own unit
    assert 1.4 < np.median(std) < 5  # the noise alone is 2


def test_doubt_grows_away_from_the_data():
    x = np.linspace(-1, 1, 60)[:, None]
    model = BayesRegressor(random_state=0).fit(x, np.sin(3 * x[:, 0]))
    near, far = model.predict_std([[0.0], [8.0]])
    assert far > 1.5 * near


def deeper(features, outputs):
    return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, outputs))


@pytest.mark.parametrize("method", ["vi", "la", "sgld"])
@pytest.mark.parametrize("module", [None, deeper], ids=["default", "own"])
def test_pickles_predict_the_same(method, module):
    x, y = load_iris(return_X_y=True)
    model = BayesClassifier(method, steps=20, module=module, random_state=0).fit(x, y)
    state = torch.get_rng_state()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert (again.predict_proba(x) == model.predict_proba(x)).all()
    assert (clone(model).fit(x, y).predict_proba(x) == model.predict_proba(x)).all()
    assert pickle.loads(pickle.dumps(BayesClassifier("vi"))).method == "vi"


def test_several_targets_and_a_pipeline():
    x, y = load_diabetes(return_X_y=True)
    both = np.stack([y, -3 * y], 1)
    model = BayesRegressor(steps=200, random_state=0).fit(x, both)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == both.shape
    assert std[:, 1] == pytest.approx(3 * std[:, 0], rel=0.3)
    scores = cross_val_score(make_pipeline(StandardScaler(), BayesRegressor(steps=200, random_state=0)), x, y, cv=3)
    assert scores.mean() > 0.3


def test_the_global_generator_is_left_alone():
    x, y = load_iris(return_X_y=True)
    state = torch.get_rng_state()
    BayesClassifier("vi", steps=3, random_state=0).fit(x, y).predict(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_mistakes_are_named():
    x, y = load_iris(return_X_y=True)
    with pytest.raises(NotFittedError):
        BayesClassifier().predict(x)
    with pytest.raises(ValueError, match="two classes or more, got one class"):
        BayesClassifier().fit(x, np.zeros(150))
    with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
        BayesClassifier(steps=0).fit(x, y)
    with pytest.raises(ValueError, match="unknown option 'sigma'"):
        BayesClassifier(options={"sigma": 1}).fit(x, y)


def waves(rows=80):
    generator = np.random.RandomState(0)
    x = generator.uniform(-2, 2, (rows, 1))
    return x, np.sin(2 * x[:, 0]) + 0.1 * generator.randn(rows)


def test_units_do_not_matter():
    x, y = waves()
    regressor = BayesRegressor(steps=60, random_state=0)
    mean, std = regressor.fit(x, y).predict(x, return_std=True)
    for in_x, in_y in ((1.0, 1e-13), (1e-13, 1.0), (1e9, 1e9)):
        found, spread = regressor.fit(x * in_x, y * in_y).predict(x * in_x, return_std=True)
        np.testing.assert_allclose(found / in_y, mean, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(spread / in_y, std, rtol=1e-3)


def test_copies_of_a_target_are_predicted_alike_and_outputs_have_their_own_noise():
    x, y = waves()
    copies = BayesRegressor(steps=500, random_state=0).fit(x, np.stack([y] * 10, 1))
    out = copies.predictive(x)
    alone = BayesRegressor(steps=500, random_state=0).fit(x, y).predictive(x)
    assert abs(float((out.epistemic.mean() / alone.epistemic.mean()).log())) < 0.3
    rough = np.random.RandomState(1).randn(80)
    both = BayesRegressor(steps=300, lr=0.03, random_state=0).fit(x, np.stack([y, rough], 1))
    noise = both.predictive(x).aleatoric[0]
    assert float(noise[1]) > 2 * float(noise[0])


def test_the_noise_is_that_of_held_out_rows():
    """Residuals of rows that a network was trained on are too small: their intervals would hold 58 % of new targets."""
    x = np.random.RandomState(0).rand(600, 5) * 2 - 1
    y = np.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2
    regressor = BayesRegressor(steps=600, options={"prior_sig": 1.0}, random_state=0).fit(x[:100], y[:100])
    mean, std = regressor.predict(x[100:], return_std=True)
    assert np.std(y[:100] - regressor.predict(x[:100])) < 0.5 * np.std(y[100:] - mean)
    assert 0.92 < float((np.abs(y[100:] - mean) < 1.96 * std).mean()) < 0.99


def test_training_goes_on_until_held_out_rows_say_stop(monkeypatch):
    from bayesify.integrations import sklearn as estimators

    monkeypatch.setattr(estimators, "STAGES", (5, 40, 80))
    x, y = waves()
    found = BayesRegressor(random_state=0).fit(x, y)
    assert found.steps_ > 5 and BayesRegressor(random_state=0).fit(x, y).steps_ == found.steps_
    assert BayesRegressor(random_state=0).fit(x[:40], y[:40]).steps_ == 5
