"""Likelihoods against torch.distributions and brute force, in float64; what is found from data; the fit with each."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal

from bayesify import bayesify, fit_laplace, load, named_posteriors, save
from bayesify.prediction import likelihoods
from bayesify.prediction import likelihoods as roots
from bayesify.prediction.likelihoods import (
    IGNORED,
    Classification,
    Given,
    Heteroscedastic,
    Multilabel,
    Regression,
    found_likelihood,
    likelihood_of,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_labels(*shape, classes=3):
    labels = torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))
    labels.view(-1)[::3] = IGNORED
    return labels


def brute_tokens(outputs, labels):
    """Return the summed -log p of each sequence, position by position."""
    total = torch.zeros(len(outputs), dtype=torch.float64)
    for n, row in enumerate(labels):
        for t, y in enumerate(row.tolist()):
            if y != IGNORED:
                total[n] -= Categorical(logits=outputs[n, t]).log_prob(torch.tensor(y))
    return total


CASES = {
    "classification": (
        Classification(),
        randn(5, 3),
        torch.tensor([0, 2, 1, 1, 0]),
        lambda f, y: -Categorical(logits=f).log_prob(y),
    ),
    "tokens": (Classification(), randn(4, 5, 3), token_labels(4, 5), brute_tokens),
    "pixels": (
        Classification(),
        randn(2, 3, 2, 2),
        token_labels(2, 2, 2),
        lambda f, y: brute_tokens(f.movedim(1, -1).flatten(1, 2), y.flatten(1)),
    ),
    "regression": (
        Regression(0.3),
        randn(5, 2),
        randn(5, 2, seed=1),
        lambda f, y: -Normal(f, 0.3**0.5).log_prob(y).sum(1),
    ),
    "heteroscedastic": (
        Heteroscedastic(),
        randn(5, 4),
        randn(5, 2, seed=1),
        lambda f, y: -Normal(f[:, :2], (f[:, 2:] / 2).exp()).log_prob(y).sum(1),
    ),
    "multilabel": (
        Multilabel(),
        randn(5, 4),
        (randn(5, 4, seed=1) > 0).double(),
        lambda f, y: -Bernoulli(logits=f).log_prob(y).sum(1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_torch_distributions(name):
    likelihood, outputs, target, expected = CASES[name]
    torch.testing.assert_close(likelihood.losses(outputs, target), expected(outputs, target), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("few", [10**6, 1])
@pytest.mark.parametrize("name", CASES)
def test_roots_square_to_the_hessian(name, few, monkeypatch):
    """Exactly for few outputs, else in expectation; the heteroscedastic Hessian is the Fisher information."""
    likelihood, outputs, target, expected = CASES[name]
    monkeypatch.setattr(roots, "FEW_OUTPUTS", few)
    monkeypatch.setattr(roots, "DRAWS", 4000)
    found = torch.stack(likelihood.roots(outputs, target, torch.Generator().manual_seed(0))).flatten(2)
    for n in range(len(outputs)):
        if name == "heteroscedastic":
            hessian = torch.cat([(-outputs[n, 2:]).exp(), torch.full((2,), 0.5, dtype=torch.float64)]).diag()
        else:
            at = outputs[n].clone()
            hessian = torch.autograd.functional.hessian(lambda f, n=n: expected(f[None], target[n : n + 1]).sum(), at)
            hessian = hessian.reshape(outputs[n].numel(), -1)
        squares = torch.einsum("ki,kj->ij", found[:, n], found[:, n])
        if few > 1:
            torch.testing.assert_close(squares, hessian, rtol=1e-10, atol=1e-12)
        else:
            products = torch.einsum("ki,kj->kij", found[:, n], found[:, n]) * len(found)
            error = products.std(0) / len(found) ** 0.5
            assert ((products.mean(0) - hessian).abs() <= 5 * error + 1e-12).all()


def test_fisher_of_heteroscedastic_noise_is_the_expected_hessian():
    outputs, likelihood = randn(1, 2), Heteroscedastic()
    scale = float((outputs[0, 1] / 2).exp())
    nodes, weights = (torch.as_tensor(v) for v in np.polynomial.hermite_e.hermegauss(20))
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for z, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        y = torch.tensor([[float(outputs[0, 0]) + scale * z]], dtype=torch.float64)
        hessian = torch.autograd.functional.hessian(lambda f, y=y: likelihood.losses(f, y).sum(), outputs)
        expected += weight * hessian.reshape(2, 2)
    found = torch.stack(likelihood.roots(outputs, outputs[:, :1], torch.Generator())).flatten(1)
    torch.testing.assert_close(found.T @ found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_mixture_nll_is_a_loop_over_items(name):
    likelihood, outputs, target, _ = CASES[name]
    samples = torch.stack([outputs, outputs * 0.5, outputs + 1, -outputs])
    found = likelihood.mixture_nll(samples, target)
    each = [likelihood.item_losses(s, target).reshape(len(outputs), -1) for s in samples]
    expected = torch.zeros(len(outputs), dtype=torch.float64)
    for n in range(len(outputs)):
        rows = [e[n] for e in each]
        for i in range(len(rows[0])):
            expected[n] -= math.log(sum(math.exp(-float(r[i])) for r in rows) / len(rows))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_soft_labels_are_cross_entropy():
    outputs, target = randn(4, 3), randn(4, 3, seed=2).softmax(-1)
    expected = nn.functional.cross_entropy(outputs, target, reduction="none")
    torch.testing.assert_close(Classification().losses(outputs, target), expected)


F8, I8 = torch.randn(8, generator=torch.Generator().manual_seed(0)), torch.arange(8)


@pytest.mark.parametrize(
    ("outputs", "target", "kind"),
    [
        (torch.zeros(8, 9), I8, Classification),
        (torch.zeros(2, 4, 9), I8.view(2, 4), Classification),
        (torch.zeros(2, 9, 2, 2), I8.view(2, 2, 2), Classification),
        (torch.zeros(8, 1), F8, Regression),
        (torch.zeros(8), F8[:, None], Regression),
        (torch.zeros(4, 2), F8.view(4, 2), Regression),
        (torch.zeros(8, 2), F8, Heteroscedastic),
        (torch.zeros(4, 4), F8.view(4, 2), Heteroscedastic),
        (torch.zeros(4, 2), F8.view(4, 2) > 0, Multilabel),
    ],
)
def test_the_likelihood_is_found_where_there_is_no_choice(outputs, target, kind):
    assert type(found_likelihood(outputs, target)) is kind


@pytest.mark.parametrize(
    ("outputs", "target", "named"),
    [
        (torch.zeros(8, 1), I8, ["'multilabel'", "'regression' with targets.float()"]),
        (torch.zeros(8), I8 % 2, ["'multilabel'", "'regression'"]),
        (torch.zeros(8, 1), (I8 % 2).float(), ["'regression'", "'multilabel'"]),
        (torch.zeros(4, 2), (I8 % 2).float().view(4, 2), ["'regression'", "'multilabel'", "'classification'"]),
        (torch.zeros(4, 2), (I8 % 2).view(4, 2), ["'multilabel'"]),
        (torch.zeros(8, 2), (I8 % 2).float(), ["labels.long()"]),
        (torch.zeros(8, 5), F8, ["loss= of your own"]),
        (torch.zeros(8, 5), None, ["gives no labels"]),
    ],
)
def test_a_choice_is_an_error_that_names_it(outputs, target, named):
    with pytest.raises(ValueError, match=r"likelihood=|no labels") as error:
        found_likelihood(outputs, target)
    assert all(name in str(error.value) for name in named)


def test_fit_laplace_never_takes_cross_entropy_in_silence():
    model = bayesify(nn.Linear(3, 1), "la")
    with pytest.raises(ValueError, match="give likelihood=: 'multilabel'"):
        fit_laplace(model, [(torch.randn(8, 3), torch.randint(2, (8,)))])
    with pytest.raises(ValueError, match="at least two logits"):
        fit_laplace(model, [(torch.randn(8, 3), torch.randint(2, (8,)))], likelihood="classification")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: likelihood_of("poisson"), ValueError, "likelihood must be one of"),
        (lambda: likelihood_of(3), TypeError, "function of"),
        (lambda: likelihood_of("regression", len), ValueError, "not both"),
        (lambda: Regression(0.0), ValueError, "noise_var must be finite and > 0"),
        (lambda: Regression().losses(F8, I8), ValueError, r"targets\.float\(\)"),
        (lambda: Regression().losses(F8, F8[:4]), ValueError, r"must be of shape \(8,\)"),
        (lambda: Heteroscedastic().losses(F8[:, None], F8), ValueError, "even last dimension"),
        (lambda: Multilabel().losses(F8, I8), ValueError, r"must be in 0\.\.1, got 0\.\.7"),
        (lambda: Classification().losses(torch.zeros(2, 2, 3), torch.full((2, 2), -1)), ValueError, r"got -1\.\.-1"),
        (lambda: Regression().settle("ef"), ValueError, "all residuals are 0"),
        (lambda: Regression().losses(F8 * math.nan, F8), ValueError, "not finite"),
    ],
)
def test_errors_name_the_way_out(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_names_and_functions():
    assert {name: type(likelihood_of(name)).__name__ for name in likelihoods.NAMES} == {
        "classification": "Classification",
        "tokens": "Classification",
        "regression": "Regression",
        "heteroscedastic": "Heteroscedastic",
        "multilabel": "Multilabel",
    }
    assert isinstance(likelihood_of(lambda f, y: f.sum(1)), Given)
    assert likelihood_of(None) is None


def test_regression_takes_its_noise_from_the_residuals():
    """Gauss-Newton and noise: v = 1/(1/sigma^2 + sum_n x_n^2/s); ef has g^2/s^2; s = RSS/(N - gamma - 2)."""
    x, y = randn(40, 3), randn(40, seed=1)
    for likelihood in (None, "regression"):
        for curvature in ("ggn", "ef"):
            model = bayesify(nn.Linear(3, 1).double(), "la", prior_sig=0.7)
            residual = model(x).detach().squeeze(1) - y
            fit_laplace(model, [(x[:25], y[:25]), (x[25:], y[25:])], curvature=curvature, likelihood=likelihood)
            noise = model._bayesify_scope.method.noise_var
            terms = x.square() / noise if curvature == "ggn" else (x * residual[:, None] / noise).square()
            std = dict(named_posteriors(model))["weight"].std.squeeze(0)
            torch.testing.assert_close(std, (1 / 0.7**2 + terms.sum(0)).rsqrt(), rtol=1e-8, atol=0)
            ones = torch.ones(40, 1) if curvature == "ggn" else residual[:, None]
            h = torch.cat([terms.sum(0), (ones.square() / noise ** (1 if curvature == "ggn" else 2)).sum(0)])
            gamma = float((h / (h + 1 / 0.7**2)).sum())
            assert noise == pytest.approx(float(residual.square().sum()) / (40 - gamma - 2), rel=1e-3)


def test_the_noise_is_saved_with_the_model(tmp_path):
    x, y = randn(10, 3), randn(10, seed=1)
    model = fit_laplace(bayesify(nn.Linear(3, 1).double(), "la"), [(x, y)], likelihood=Regression(0.25))
    save(model, tmp_path)
    assert load(nn.Linear(3, 1).double(), tmp_path)._bayesify_scope.method.noise_var == 0.25
    fit_laplace(model, [(x, y)], likelihood=lambda f, y: (f.squeeze(1) - y).square())
    assert model._bayesify_scope.method.noise_var is None


@pytest.mark.filterwarnings("ignore:no batched rule")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("curvature", ["ef", "ggn"])
def test_a_fit_by_name_is_the_fit_by_a_function(name, curvature):
    """A linear model that adds a learned shift to known outputs, so that brute force is the function given."""
    likelihood, outputs, target, expected = CASES[name]
    if name == "heteroscedastic" and curvature == "ggn":
        return  # a function is differentiated twice, which is not the Fisher information

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(outputs.shape[1:], dtype=torch.float64))

        def forward(self, f):
            return f + self.shift

    stds = []
    for given in ({"likelihood": likelihood}, {"loss": expected}):
        model = bayesify(Shift(), "la", prior_sig=1.0)
        fit_laplace(model, [(outputs, target)], curvature=curvature, **given)
        stds.append(dict(named_posteriors(model))["shift"].std)
    torch.testing.assert_close(*stds, rtol=1e-8, atol=1e-10)


def test_label_tokens_are_what_num_data_counts():
    outputs, labels = randn(4, 5, 3), token_labels(4, 5)
    counted = int((labels != IGNORED).sum())
    model = nn.Linear(3, 3).double()
    fits = [fit_laplace(bayesify(model, "la"), [(outputs, labels)])]
    first = dict(named_posteriors(fits[0]))["weight"].std.clone()
    fit_laplace(fits[0], [(outputs, labels)], num_data=counted)
    torch.testing.assert_close(dict(named_posteriors(fits[0]))["weight"].std, first, rtol=1e-12, atol=0)
