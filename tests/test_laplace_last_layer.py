"""The closed-form prediction of a last layer under Laplace, and the prior that is tuned by it."""

import copy
import math

import pytest
import torch
from laplaces import batches, covariance, data, fitted, head
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, metrics, named_posteriors, predict, summary
from bayesify.core.scopes import scopes_of
from bayesify.methods.laplace import evidence

# -- the closed form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_closed_form_is_that_of_a_hundred_thousand_draws(classes, structure):
    model = fitted(classes, structure)
    x, _ = data(4, seed=1)
    found = predict(model, x)
    assert found.closed_form
    assert found.num_samples == 0
    form = scopes_of(model)[0].method.closed_form(scopes_of(model)[0])
    with torch.no_grad():
        z = model.eval()[1](model[0](x))
        exact = form.logits(z, model[2](z))
    assert torch.equal(found.logits[0], exact.mean)
    count = 100_000
    generator = torch.Generator().manual_seed(0)
    posteriors = dict(named_posteriors(model))
    if structure == "kron":
        chol = torch.linalg.cholesky(covariance(model, "2.weight", "2.bias"))
    else:
        chol = torch.diag(torch.cat([posteriors[n].std.flatten() for n in ("2.weight", "2.bias")]))
    mean = torch.cat([posteriors[n].mean.flatten() for n in ("2.weight", "2.bias")])
    draws = mean + torch.randn(count, len(mean), generator=generator, dtype=torch.float64) @ chol.T
    weight, bias = draws[:, : 5 * classes].view(count, classes, 5), draws[:, 5 * classes :]
    logits = torch.einsum("ski,ni->nsk", weight, z) + bias
    basis = torch.eye(classes).double() if exact.basis is None else exact.basis
    for n in range(len(x)):
        cov = basis @ torch.diag(exact.q[n]) @ basis.T
        scale = cov.diagonal().sqrt()
        assert ((logits[n].mean(0) - exact.mean[n]).abs() < 4 * scale / math.sqrt(count)).all()
        away = logits[n] - exact.mean[n]
        error = (torch.outer(scale, scale) ** 2 + cov**2).sqrt() / math.sqrt(count)
        assert ((away.T @ away / count - cov).abs() < 4 * error).all()
        torch.testing.assert_close(exact.variance()[n], cov.diagonal())
        centring = torch.eye(classes).double() - 1 / classes
        torch.testing.assert_close(exact.centred_variance()[n], (centring @ cov @ centring).diagonal())
    truth = logits.softmax(-1)
    assert (found.probs - truth.mean(1)).abs().max() < 0.02
    entropy = -(truth * truth.log()).sum(-1).mean(1)
    information = -(truth.mean(1) * truth.mean(1).log()).sum(-1) - entropy
    torch.testing.assert_close(found.mutual_information, information, rtol=0.1, atol=2e-3)


def test_draws_of_the_model_have_the_closed_forms_moments():
    model, (x, _) = fitted(), data(3, seed=1)
    drawn = predict(model, x, samples=3000, seed=0).logits
    found = predict(model, x, task="regression")
    assert found.closed_form
    error = found.std / math.sqrt(3000)
    assert ((drawn.mean(0) - found.mean).abs() < 4.5 * error).all()
    assert ((drawn.std(0) / found.std - 1).abs() < 4.5 / math.sqrt(6000)).all()


def test_two_classes_are_the_sigmoids_probit():
    model, (x, _) = fitted(2), data(3, seed=1)
    found = predict(model, x)
    form = scopes_of(model)[0].method.closed_form(scopes_of(model)[0])
    with torch.no_grad():
        z = model.eval()[1](model[0](x))
        exact = form.logits(z, model[2](z))
    difference = torch.tensor([1.0, -1.0]).double()
    cov = exact.basis @ torch.diag_embed(exact.q) @ exact.basis.T
    variance = difference @ cov @ difference
    kappa = (1 + math.pi * variance / 8).rsqrt()
    torch.testing.assert_close(found.probs[:, 0], torch.sigmoid(kappa * (exact.mean @ difference)))


def test_no_random_number_is_taken_and_batches_do_not_matter():
    model, (x, y) = fitted(), data()
    state = torch.get_rng_state()
    whole = predict(model, [(x, y)])
    assert torch.equal(torch.get_rng_state(), state)
    parts = predict(model, iter(batches(x, y)), seed=7)
    torch.testing.assert_close(parts.probs, whole.probs)
    torch.testing.assert_close(parts.mutual_information, whole.mutual_information)
    torch.testing.assert_close(whole.entropy, whole.expected_entropy + whole.mutual_information)
    assert whole[2:4].logits.shape == (1, 2, 3)
    assert "closed form" in repr(whole)
    assert predict(model, x, samples=4).num_samples == 4


class Doubled(nn.Sequential):
    """The linear layer is not the last."""

    def forward(self, x):
        return 2 * super().forward(x)


class Upcast(nn.Sequential):
    """The model's output is its last layer's, in another precision."""

    def forward(self, x):
        return super().forward(x).double()


def test_only_a_last_layer_has_a_closed_form():
    torch.manual_seed(0)
    x, y = data()
    model = bayesify(Doubled(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), "la", include="2.*")
    fit_laplace(model, batches(x, y), structure="kron")
    for read_once in (False, True):
        found = predict(model, iter(batches(x, y)) if read_once else batches(x, y), seed=0)
        assert (found.num_samples, len(found)) == (5, 30)
    assert predict(fitted(include=None), x).num_samples == 5
    upcast = bayesify(Upcast(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), "la", include="2.*")
    fit_laplace(upcast, [(x.float(), y)], structure="kron")
    assert predict(upcast, x.float()).closed_form


def test_a_restricted_fit_of_a_whole_model_has_a_closed_form():
    x, y = data()
    model = fit_laplace(head(include=None), batches(x, y), structure="kron", include="2.*")
    torch.testing.assert_close(predict(model, x).probs, predict(fitted(), x).probs)


def test_a_bias_on_its_own_is_left_to_samples():
    x, y = data()
    model = fit_laplace(head(), batches(x, y), include="2.bias")
    assert predict(model, x).num_samples == 5


# -- tuning --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sure():
    """A model that has learned wrong labels by heart, and data that it has not seen."""
    x, y = data(60, classes=2)
    y = (x[:, 0] > 0).long()
    y[::5] = 1 - y[::5]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    new, _ = data(200, seed=1)
    return model, (x, y), (new, (new[:, 0] > 0).long())


def test_validation_chooses_the_best_scale_of_the_closed_form(sure):
    model, train, validation = sure
    model = bayesify(copy.deepcopy(model), "la", include="2.*", prior_sig=1.0)
    plain = metrics.nll(predict(model, [validation], samples=0).probs, validation[1])
    fit_laplace(model, [train], structure="kron", tune=batches(*validation, 64))
    found = predict(model, [validation]).scores["nll"]
    assert found < plain / 2
    posterior = dict(named_posteriors(model))["2.weight"]
    chosen = posterior.fitted_sig
    assert posterior.prior_sig == 1.0
    for factor in (0.7, 1.4):
        other = copy.deepcopy(model)
        for _, p in named_posteriors(other):
            p.fitted_sig = chosen * factor
        assert predict(other, [validation]).scores["nll"] > found


def test_a_second_fit_starts_from_the_prior_of_training(sure):
    model, train, validation = sure
    model = bayesify(copy.deepcopy(model), "la", include="2.*", prior_sig=1.0)
    fit_laplace(model, [train], structure="kron")
    first = predict(model, validation[0]).probs
    fit_laplace(model, [train], structure="kron", tune=[validation])
    tuned = predict(model, validation[0]).probs
    assert not torch.allclose(tuned, first)
    again = bayesify(copy.deepcopy(sure[0]), "la", include="2.*", prior_sig=1.0)
    fit_laplace(again, [train], structure="kron", tune=[validation])
    torch.testing.assert_close(predict(again, validation[0]).probs, tuned)
    fit_laplace(model, [train], structure="kron")
    torch.testing.assert_close(predict(model, validation[0]).probs, first)


def test_by_itself_the_cost_is_a_tenth_of_a_nat(sure):
    model, train, _ = sure
    model = bayesify(copy.deepcopy(model), "la", include="2.*", prior_sig=1.0)
    fit_laplace(model, iter([train]), structure="kron", tune="self")
    before, after = predict(model, train[0], samples=0), predict(model, train[0])
    own = before.prediction
    assert metrics.nll(after.probs, own) - metrics.nll(before.probs, own) == pytest.approx(0.1, abs=0.005)
    assert "by itself" in str(summary(model))
    with pytest.raises(ValueError, match="give validation batches"):
        fit_laplace(fitted(include=None), batches(*data()), structure="kron", tune="self")


def test_the_evidence_of_factors_is_that_of_their_gaussian(sure):
    model, train, _ = sure
    model = bayesify(copy.deepcopy(model), "la", include="2.*", prior_sig=1.0, prior_mean="zero")
    fit_laplace(model, [train], structure="kron")
    posteriors = dict(named_posteriors(model))
    weight, bias = posteriors["2.weight"], posteriors["2.bias"]
    fitted = [evidence.Fitted(weight, weight.kron), evidence.Fitted(bias, bias.kron, weight)]
    for factor in (0.3, 2.0):
        curvature = torch.linalg.inv(covariance(model, "2.weight", "2.bias")) - torch.eye(82).double()
        theta = torch.cat([weight.mean.flatten(), bias.mean.flatten()])
        exact = -theta.square().sum() / (2 * factor**2)
        exact -= torch.linalg.slogdet(torch.eye(82).double() + factor**2 * curvature)[1] / 2
        assert evidence.log_evidence(fitted, factor) == pytest.approx(float(exact), rel=1e-6)
    chosen = fit_laplace(model, [train], structure="kron", tune="marglik")
    assert dict(named_posteriors(chosen))["2.weight"].fitted_sig != 1.0


def test_a_regression_is_tuned_by_its_gaussian():
    x, _ = data(40)
    y = x[:, :1] + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.manual_seed(0)
    model = bayesify(nn.Linear(4, 1).double(), "la")
    with torch.no_grad():
        model.parametrizations.weight.original.copy_(torch.linalg.lstsq(x, y).solution.T)
        model.parametrizations.bias.original.zero_()
    fit_laplace(model, [(x, y)], structure="kron", tune=[(x, y)])
    found = predict(model, [(x, y)], task="regression")
    assert found.closed_form
    noise = scopes_of(model)[0].method.noise_var
    precision = F.pad(x, (0, 1), value=1.0)
    precision = precision.T @ precision / noise
    sig = dict(named_posteriors(model))["weight"].fitted_sig
    cov = torch.linalg.inv(precision + torch.eye(5).double() / sig**2)
    z = F.pad(x, (0, 1), value=1.0)
    torch.testing.assert_close(found.epistemic.squeeze(1), (z @ cov * z).sum(1).sqrt())
