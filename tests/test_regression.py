"""Regression as a task: scores of Gaussian mixtures against scipy and brute force, intervals, noise."""

import math

import pytest
import torch
from scipy import integrate, optimize, stats
from torch import nn

from bayesify import bayesify, fit_laplace, metrics, penalty, predict
from bayesify.prediction.likelihoods import Regression
from bayesify.quality import regression as gaussians


def mixture(samples=4, count=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(samples, count, generator=generator, dtype=torch.float64) * 2
    stds = torch.rand(samples, count, generator=generator, dtype=torch.float64) + 0.2
    return means, stds, torch.randn(count, generator=generator, dtype=torch.float64) * 2


def test_the_mixtures_crps_is_the_integral():
    means, stds, targets = mixture()
    total = 0.0
    for m, s, y in zip(means.T.numpy(), stds.T.numpy(), targets.tolist(), strict=True):

        def cdf(x, m=m, s=s):
            return stats.norm.cdf(x, m, s).mean()

        below = integrate.quad(lambda x: cdf(x) ** 2, -30, y, epsabs=1e-12, limit=500)[0]
        above = integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, 30, epsabs=1e-12, limit=500)[0]
        total += below + above
    assert metrics.crps(means, stds, targets) == pytest.approx(total / len(targets), abs=1e-8)


def test_crps_of_one_gaussian_and_of_points():
    means, stds, targets = mixture(1)
    z = ((targets - means[0]) / stds[0]).numpy()
    each = stds[0].numpy() * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert metrics.crps(means[0], stds[0], targets) == pytest.approx(each.mean(), abs=1e-12)
    points = gaussians.mixture_crps(means, torch.zeros_like(means), targets)
    torch.testing.assert_close(points, (targets - means[0]).abs())


def test_the_mixtures_nll_is_scipys():
    means, stds, targets = mixture()
    densities = [stats.norm.pdf(y, m, s).mean() for m, s, y in zip(means.T, stds.T, targets, strict=True)]
    expected = -sum(math.log(d) for d in densities) / len(targets)
    assert metrics.gaussian_nll(means, stds, targets) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("probability", [0.025, 0.5, 0.975])
def test_the_mixtures_quantiles_are_scipys(probability):
    means, stds, _ = mixture()
    found = gaussians.mixture_quantile(means, stds, probability)
    for m, s, q in zip(means.T.numpy(), stds.T.numpy(), found.tolist(), strict=True):
        root = optimize.brentq(lambda x, m=m, s=s: stats.norm.cdf(x, m, s).mean() - probability, -30, 30, xtol=1e-13)
        assert q == pytest.approx(root, abs=1e-8)


def test_interval_coverage_agrees_with_a_loop():
    means, stds, targets = mixture(count=50)
    low, high = (gaussians.mixture_quantile(means, stds, p).tolist() for p in (0.1, 0.9))
    inside = sum(a <= y <= b for a, b, y in zip(low, high, targets.tolist(), strict=True))
    assert metrics.interval_coverage(means, stds, targets, level=0.8) == inside / 50


def test_fitted_noise_maximizes_the_likelihood():
    means, _, targets = mixture(5, 40)
    found = metrics.fit_noise(means, targets)

    def nll(v):
        return metrics.gaussian_nll(means, torch.full_like(means, v**0.5), targets)

    assert nll(found) <= min(nll(found * f) for f in (0.999, 1.001)) + 1e-12
    exact = float((targets - means[0]).square().mean())
    assert metrics.fit_noise(means[0], targets) == pytest.approx(exact, rel=1e-6)
    with pytest.raises(ValueError, match="no noise to fit"):
        metrics.fit_noise(targets, targets)
    with pytest.raises(ValueError, match="samples in front"):
        metrics.fit_noise(means[:, :3], targets)


def linear(seed=0, count=200):
    torch.manual_seed(seed)
    x = torch.randn(count, 3)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(count)


@pytest.fixture
def fitted():
    x, y = linear()
    net = nn.Linear(3, 1)
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y).solution
        net.weight.copy_(solution[None, :3])
        net.bias.copy_(solution[3:])
    return fit_laplace(bayesify(net, "la", prior_sig=1.0), [(x, y)], curvature="ggn")


def test_a_regression_has_intervals_scores_and_both_kinds_of_doubt(fitted):
    x, y = linear(1, 2000)
    out = predict(fitted, [(x, y)], samples=30, seed=0, task="regression")
    assert set(out.scores) == {"rmse", "nll", "crps", "coverage", "width"}
    assert out.std.shape == out.epistemic.shape == out.aleatoric.shape == (2000, 1)
    torch.testing.assert_close(out.std, (out.epistemic**2 + out.aleatoric**2).sqrt())
    assert float(out.aleatoric[0]) == pytest.approx(0.3, abs=0.05)
    assert 0 < float(out.epistemic.mean()) < 0.1
    assert out.scores["coverage"] == pytest.approx(0.95, abs=4 * (0.05 * 0.95 / 2000) ** 0.5 + 0.01)
    means, stds = out.components
    assert out.scores["crps"] == pytest.approx(metrics.crps(means, stds, out.targets()), abs=1e-12)
    assert out.scores["nll"] == pytest.approx(metrics.gaussian_nll(means, stds, out.targets()), abs=1e-12)
    assert out.scores["coverage"] == metrics.interval_coverage(means, stds, out.targets())
    low, high = out.interval(0.95)
    assert out.scores["width"] == pytest.approx(float((high - low).mean()))
    ranks = stats.norm.cdf(out.targets().numpy(), means.numpy(), stds.numpy()).mean(0)
    torch.testing.assert_close(out.ranks, torch.from_numpy(ranks), rtol=0, atol=1e-12)
    assert "rmse" in repr(out) and "coverage" in repr(out)


def test_unknown_noise_is_zero_and_known_noise_scores():
    x, y = linear()
    model = bayesify(nn.Linear(3, 1), "vi", prior_sig=1.0, init_sig=0.1)
    out = predict(model, [(x, y)], samples=4, seed=0, task="regression")
    assert float(out.aleatoric.max()) == 0 and not out.noise_known
    low, high = out.interval(0.9, noise=False)
    torch.testing.assert_close(low, out.outputs.double().amin(0))
    torch.testing.assert_close(high, out.outputs.double().amax(0))
    known = out.with_noise(metrics.fit_noise(out.outputs, out.targets()))
    assert math.isfinite(known.scores["nll"]) and known[3:5].components[0].shape == (4, 2, 1)
    assert predict(model, x, samples=2, task="regression").scores == {}


def test_without_the_samples_a_gaussian_of_the_same_moments(fitted):
    x, y = linear()
    whole = predict(fitted, [(x, y)], samples=7, seed=0, task="regression")
    brief = predict(fitted, [(x, y)], samples=7, seed=0, task="regression", keep_samples=False)
    torch.testing.assert_close(brief.std, whole.std)
    low, high = brief.interval(0.95)
    torch.testing.assert_close((high - low) / 2, 1.959963984540054 * brief.std)


def test_heteroscedastic_noise_is_recovered():
    """y = sin(2x) + (0.1 + 0.4 |x|) eps: the NLL of the fit is within 0.05 of the truth's."""
    torch.manual_seed(0)
    x = torch.rand(2000, 1) * 4 - 2
    truth = torch.sin(2 * x), 0.1 + 0.4 * x.abs()
    y = truth[0] + truth[1] * torch.randn(2000, 1)
    model = bayesify(nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 2)), "la", prior_sig=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for _ in range(600):
        optimizer.zero_grad()
        m, w = model(x).chunk(2, -1)
        (nn.functional.gaussian_nll_loss(m, y, w.exp()) + penalty(model, num_data=2000)).backward()
        optimizer.step()
        schedule.step()
    fit_laplace(model, [(x, y)])  # found from (N, 2) outputs and (N, 1) targets
    new = torch.rand(2000, 1) * 4 - 2
    mean, std = torch.sin(2 * new), 0.1 + 0.4 * new.abs()
    target = mean + std * torch.randn(2000, 1)
    out = predict(model, [(new, target)], samples=20, seed=0, task="heteroscedastic")
    assert out.scores["nll"] == pytest.approx(metrics.gaussian_nll(mean, std, target), abs=0.05)
    assert float((out.aleatoric / std.double()).log().abs().mean()) < 0.15
    assert out.noise_var.shape == (20, 2000, 1) and out[:5].components[1].shape == (20, 5, 1)
    brief = predict(model, [(new, target)], samples=20, seed=0, task="heteroscedastic", keep_samples=False)
    torch.testing.assert_close(brief.aleatoric, out.aleatoric)


def test_multilabel_predictions_average_sigmoids():
    torch.manual_seed(0)
    model = bayesify(nn.Linear(3, 4), "vi", prior_sig=1.0, init_sig=0.5)
    x, y = torch.randn(9, 3), torch.rand(9, 4) > 0.5
    out = predict(model, [(x[:5], y[:5]), (x[5:], y[5:])], samples=6, seed=0, task="multilabel")
    each = out.logits.double().sigmoid()
    torch.testing.assert_close(out.probs, each.mean(0))
    stacked = torch.stack([1 - each, each], -1)
    both = metrics.mutual_information(stacked.flatten(1, 2)).view(9, 4)
    torch.testing.assert_close(out.mutual_information, both)
    assert out.scores["error"] == pytest.approx(float(((each.mean(0) > 0.5) != y).double().mean()))
    nll = -torch.where(y, each.mean(0), 1 - each.mean(0)).log().mean()
    assert out.scores["nll"] == pytest.approx(float(nll))
    assert len(out[2:4]) == 2 and "4 labels" in repr(out) and out.numpy()["probs"].shape == (9, 4)


def test_targets_that_do_not_fit_are_an_error(fitted):
    out = predict(fitted, [(torch.randn(4, 3), torch.randint(2, (4,)))], samples=2, task="regression")
    with pytest.raises(ValueError, match="must be floats"):
        out.targets()
    assert "do not fit" in repr(out)
    with pytest.raises(ValueError, match="no targets"):
        predict(fitted, torch.randn(4, 3), samples=2, task="regression").targets()
    with pytest.raises(ValueError, match="level must be"):
        out.interval(95)
    with pytest.raises(ValueError, match="task must be one of"):
        predict(fitted, torch.randn(4, 3), task="poisson")


def test_a_given_noise_is_the_predictions(fitted):
    x, y = linear()
    fit_laplace(fitted, [(x, y)], likelihood=Regression(0.5))
    assert float(predict(fitted, x, samples=2, task="regression").aleatoric[0]) == pytest.approx(0.5**0.5)


def test_a_closed_form_is_one_gaussian(fitted):
    x, y = linear()
    fit_laplace(fitted, [(x, y)], structure="kron")
    out = predict(fitted, [(x, y)], task="regression")
    assert out.closed_form and float(out.epistemic.min()) > 0
    expected = metrics.gaussian_nll(out.mean, out.std, out.targets())
    assert out.scores["nll"] == pytest.approx(expected, abs=1e-12)
    low, high = out.interval(0.95)
    torch.testing.assert_close((high - low) / 2, 1.959963984540054 * out.std)
