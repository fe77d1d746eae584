"""Calibration: one factor on the spread, found by predictions, in every draw and every file."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bayesify import (
    SGLD,
    bayesify,
    calibrate,
    fit_laplace,
    load,
    named_posteriors,
    penalty,
    predict,
    sample,
    save,
    summary,
)
from bayesify.core.ranks import draw_seeds
from bayesify.prediction import calibrate as calibration
from bayesify.prediction import likelihoods

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + 0.8 * torch.randn(60, generator=torch.Generator().manual_seed(1)) > 0).long()


def trained(method, **options):
    """Return a model that is far too sure of itself, with some spread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    if method == "mc_dropout":
        options = {"prior_mean": "zero", **options}
    bayesify(model, method, **options)
    if method == "sgld":
        optimizer = SGLD(model, 0.3, num_data=40)
    else:
        optimizer = torch.optim.SGD([q.original for _, q in named_posteriors(model)], lr=0.5, momentum=0.9)
    for _ in range(120):
        optimizer.zero_grad()
        (F.cross_entropy(model(X[:40]), Y[:40]) + penalty(model, 40)).backward()
        optimizer.step()
    if method == "la":
        fit_laplace(model, [(X[:40], Y[:40])])
    return model


@pytest.mark.parametrize("labelled", [True, False])
def test_data_in_another_order_each_time_is_judged_as_in_one(labelled):
    data = TensorDataset(X[40:], Y[40:]) if labelled else X[40:]
    factors = []
    for order in ({"shuffle": False}, {"shuffle": True, "generator": torch.Generator().manual_seed(0)}):
        model = nn.Linear(4, 2)
        model.weight.data, model.bias.data = torch.tensor([[4.0, 0, 0, 0], [-4.0, 0, 0, 0]]), torch.zeros(2)
        bayesify(model, "vi", prior_sig=1.0, init_sig=0.1)
        calibrate(model, DataLoader(data, batch_size=5, **order), progress=False)
        factors.append(next(q.calibration for _, q in named_posteriors(model)))
    assert factors[0] == factors[1] > 1


FITTED = [("vi", {"init_sig": 0.02, "natural": False}), ("mc_dropout", {"p_drop": 0.2}), ("la", {}), ("sgld", {})]


@pytest.mark.filterwarnings("ignore:the spread of")
@pytest.mark.parametrize(("method", "options"), FITTED)
def test_the_factor_has_the_lowest_nll_of_all_that_were_tried(method, options):
    model = trained(method, **options)
    held_out = [(X[40:], Y[40:])]
    before = predict(model, held_out, samples=10, seed=0).scores["nll"]
    assert calibrate(model, held_out, progress=False) is model
    (factor,) = {q.calibration for _, q in named_posteriors(model)}
    found = predict(model, held_out, samples=10, seed=0).scores["nll"]
    mean_nll = predict(model, held_out, samples=0).scores["nll"]
    assert found <= before + 1e-6
    assert found <= mean_nll + 1e-6
    if factor:
        for other in (factor / 2, factor * 2):
            for _, q in named_posteriors(model):
                q.calibration = other
            assert predict(model, held_out, samples=10, seed=0).scores["nll"] >= found - 1e-6


@pytest.mark.filterwarnings("ignore:the spread of")
@pytest.mark.parametrize(("method", "options"), FITTED)
def test_without_labels_the_cost_on_the_models_own_predictions_is_within_the_target(method, options):
    model = trained(method, **options)
    calibrate(model, X[40:], target=0.05, progress=False)
    p = predict(model, X[40:], samples=0).probs
    q = predict(model, X[40:], samples=10, seed=0).probs
    cost = float((p * (p.log() - q.log())).sum(-1).mean())
    assert cost <= 0.05 + 1e-6
    for _, posterior in named_posteriors(model):
        posterior.calibration *= 2**0.5
    q = predict(model, X[40:], samples=10, seed=0).probs
    assert float((p * (p.log() - q.log())).sum(-1).mean()) > 0.05


@pytest.mark.parametrize("largest", [0.05, 0.9, 1.0, 30.0, 2000.0, 30000.0])
def test_a_spread_of_any_size_is_found_in_few_passes(largest):
    tried = []

    def cost(factor):
        tried.append(factor)
        return 0.1 * (factor / largest) ** 2

    found = calibration._largest_within(cost, 0.1)
    assert largest / calibration.FINE <= found <= largest
    assert len(tried) <= 11


def test_spreads_out_of_reach(caplog):
    assert calibration._largest_within(lambda factor: 1.0, 0.1) == 0
    assert calibration._largest_within(lambda factor: 0.0, 0.1) == calibration.WIDEST
    assert "costs less than 0.1 nats" in caplog.text


@pytest.mark.filterwarnings("ignore:the spread of")
def test_the_divergence_is_that_of_the_mean_from_the_samples():
    model = trained("vi", **dict(FITTED)["vi"])
    spreads = [p for _, p in named_posteriors(model)]
    trial = calibration.Trial(model, spreads, [X[40:]], 10, lambda: None)
    for factor in (1.0, 30.0):
        found = trial.divergence(factor)
        p, q = predict(model, X[40:], samples=0).probs, predict(model, X[40:], samples=10, seed=0).probs
        assert found == pytest.approx(float((p * (p.log() - q.log())).sum(-1).mean()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:the spread of")
@pytest.mark.parametrize(("method", "options"), FITTED)
def test_every_draw_and_std_have_the_factor_and_the_penalty_has_not(method, options, tmp_path):
    model = trained(method, **options)
    term, stds = penalty(model, 40), {n: q.std for n, q in named_posteriors(model)}
    with sample(model, seed=3), torch.no_grad():
        thetas = {n: q(q.original) for n, q in named_posteriors(model)}
    cores = {n: q.core(q.original.detach()) for n, q in named_posteriors(model)}
    for _, q in named_posteriors(model):
        q.calibration = 2.5
    torch.testing.assert_close(penalty(model, 40), term)
    save(model, tmp_path)
    plain = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
    for one in (model, copy.deepcopy(model), load(plain, tmp_path)):
        assert "spread times 2.5" in str(summary(one))
        with sample(one, seed=3), torch.no_grad():
            for name, q in named_posteriors(one):
                torch.testing.assert_close(q.std, 2.5 * stds[name])
                exact = cores[name] + 2.5 * (thetas[name] - cores[name])
                torch.testing.assert_close(q(q.original), exact, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_a_calibrated_draw_has_the_gradient_of_its_formula(method):
    options = {"init_sig": 0.1} if method == "vi" else {"prior_mean": "zero", "p_drop": 0.3}
    model = bayesify(nn.Linear(4, 3).double(), method, prior_sig=1.0, **options)
    for _, q in named_posteriors(model):
        q.calibration = 0.4
    x = torch.randn(5, 4, dtype=torch.float64)
    with sample(model, seed=1):
        model(x).square().sum().backward()
    for _, q in named_posteriors(model):
        inputs = [q.original, *q.learnable()]
        noise = q.noise_of(draw_seeds(1, 1)[0])
        theta = q.original + 0.4 * (q.theta(q.original, noise) - q.original)
        grads = [p.grad.clone() for p in inputs]
        weight = theta if theta.dim() == 2 else None
        # The same loss with this theta in place of the sample.
        with sample(model, seed=1), torch.no_grad():
            others = {n: p(p.original) for n, p in named_posteriors(model)}
        w, b = (theta, others["bias"]) if weight is not None else (others["weight"], theta)
        exact = torch.autograd.grad((x @ w.T + b).square().sum(), inputs)
        for g, e in zip(grads, exact, strict=True):
            torch.testing.assert_close(g, e)


def test_a_regression_is_calibrated_by_its_gaussian():
    torch.manual_seed(0)
    model = bayesify(nn.Linear(4, 1), "vi", prior_sig=1.0, init_sig=1e-3)
    with torch.no_grad():
        q = dict(named_posteriors(model))["weight"]
        q.original.copy_(torch.tensor([[1.0, 0, 0, 0]]))
    target = X @ torch.tensor([[1.0], [0.3], [0.0], [0.0]])
    calibrate(model, [(X, target)], progress=False)
    assert q.calibration > 1


@pytest.mark.filterwarnings("ignore:the spread of")
@pytest.mark.parametrize("likelihood", ["multilabel", "heteroscedastic", "regression"])
def test_the_likelihood_can_be_named_where_labels_leave_a_choice(likelihood):
    model = trained("vi", **dict(FITTED)["vi"])
    labels = torch.rand(20, 1 if likelihood == "heteroscedastic" else 2, generator=torch.Generator().manual_seed(0))
    if likelihood != "heteroscedastic":
        with pytest.raises(ValueError, match="give likelihood=: 'regression'"):
            calibrate(model, [(X[40:], labels)], progress=False)
    calibrate(model, [(X[40:], labels)], samples=4, likelihood=likelihood, progress=False)
    spreads = [p for _, p in named_posteriors(model)]
    factor = spreads[0].calibration
    given = likelihoods.likelihood_of(likelihood)
    trial = calibration.Trial(model, spreads, [(X[40:], labels)], 4, lambda: None, given)
    best = trial.nll(trial.outputs(factor)) if factor else trial.nll(trial.point)
    assert all(best <= trial.nll(trial.outputs(f)) + 1e-3 for f in calibration.FACTORS)


def test_it_says_when_samples_are_of_no_use(caplog):
    torch.manual_seed(0)
    model = bayesify(nn.Linear(4, 2), "vi", init_sig=0.5)
    with torch.no_grad():
        for _, q in named_posteriors(model):
            q.original.zero_()
    y = torch.arange(60) % 2
    with caplog.at_level(logging.WARNING, "bayesify"):
        calibrate(model, [(X, y)], progress=False)
    assert "of no use" in caplog.text
    assert {q.calibration for _, q in named_posteriors(model)} == {0.0}
    assert predict(model, X, samples=3, seed=0).mutual_information.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("vanilla", {}, "no spread to calibrate; use a method that samples"),
        ("vi", {"target": 0.0}, "target must be a positive number of nats, got 0.0"),
        ("vi", {"samples": 1}, "samples must be an integer >= 2, got 1"),
        ("la", {}, "Laplace has not been fitted"),
    ],
)
def test_what_cannot_be_calibrated_is_said_and_changes_nothing(method, options, message):
    model = bayesify(nn.Linear(4, 2), method)
    with pytest.raises(ValueError, match=message):
        calibrate(model, [(X, Y)], progress=False, **options)
    assert all(q.calibration == 1 for _, q in named_posteriors(model))
    with pytest.raises(ValueError, match="give labels"):
        calibrate(bayesify(nn.Linear(4, 1), "vi"), X, progress=False)


def test_a_factor_of_zero_is_saved_and_loaded(tmp_path):
    model = bayesify(torch.nn.Linear(3, 2), "vi")
    for _, q in named_posteriors(model):
        q.calibration = 0.0
    save(model, tmp_path)
    loaded = load(torch.nn.Linear(3, 2), tmp_path)
    assert all(q.calibration == 0 and not q.std.any() for _, q in named_posteriors(loaded))


@pytest.mark.filterwarnings("error")
def test_a_spread_that_calibrate_finds_is_not_called_untrained():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), "vi").eval()
    x = torch.randn(60, 4)
    calibrate(model, [x], progress=False)
    assert predict(model, x, 5, seed=0).num_samples == 5 and "never trained" not in str(summary(model))
