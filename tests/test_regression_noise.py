"""The noise of a regression: learned with the model, or estimated from residuals with their degrees of freedom."""

import copy
import math

import pytest
import torch
from torch import nn

from bayesify import (
    bayesify,
    calibrate,
    fit_laplace,
    load,
    methods,
    metrics,
    mix,
    param_groups,
    penalty,
    predict,
    save,
    summary,
    unbayesify,
)
from bayesify.prediction.likelihoods import Regression
from bayesify.quality.regression import Residuals, sampled_nll


def line(rows, weights, outputs=1, noise=(0.5,), seed=0):
    """Return inputs, targets and their least-squares line as a layer."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, weights - 1, generator=generator, dtype=torch.float64)
    truth = torch.randn(weights, outputs, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    design = torch.cat([x, torch.ones(rows, 1)], 1)
    y = design @ truth + torch.randn(rows, outputs, generator=generator, dtype=torch.float64) * torch.tensor(noise)
    net = nn.Linear(weights - 1, outputs).double()
    solution = torch.linalg.lstsq(design, y).solution
    with torch.no_grad():
        net.weight.copy_(solution[:-1].T)
        net.bias.copy_(solution[-1])
    return x, y, net


def test_residuals_join_as_one():
    generator = torch.Generator().manual_seed(0)
    y, f = torch.randn(2, 50, 3, generator=generator, dtype=torch.float64) + 5
    whole = Residuals.of(y, f)
    parts = sum((Residuals.of(a, b) for a, b in zip(y.split(17), f.split(17), strict=True)), Residuals())
    assert parts.count == 50 and parts.outputs == 3
    torch.testing.assert_close(parts.squares, (y - f).square().sum(0))
    torch.testing.assert_close(parts.scatter / 50, y.var(0, correction=0))
    torch.testing.assert_close(whole.mean, y.mean(0))


def test_the_noise_has_the_degrees_of_freedom_of_the_weights():
    """With a wide prior every weight follows the data: the posterior mean is RSS/(N - P - 2)."""
    x, y, net = line(60, 20)
    expected = float((net(x) - y).detach().square().sum()) / (60 - 20 - 2)
    model = fit_laplace(bayesify(net, "la", prior_sig=1e4), [(x, y)], structure="kron", likelihood="regression")
    assert float(predict(model, x).aleatoric[0]) ** 2 == pytest.approx(expected, rel=1e-4)


def test_few_rows_and_many_weights_are_covered():
    """30 rows and 20 weights: new data is in 95% intervals."""
    inside = []
    for seed in range(40):
        x, y, net = line(30, 20, seed=seed)
        fit_laplace(bayesify(net, "la", prior_sig=1e3), [(x, y)], structure="kron", likelihood="regression")
        new = line(20, 20, seed=1000 + seed)
        out = predict(net, [(new[0], new[1])])
        inside.append(out.scores["coverage"])
    error = torch.tensor(inside).std() / math.sqrt(len(inside))
    assert abs(sum(inside) / len(inside) - 0.95) < 4 * float(error) + 0.005


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_every_output_has_its_noise(structure):
    x, y, net = line(400, 4, 3, (0.1, 1.0, 10.0))
    model = bayesify(nn.Sequential(net), "la", prior_sig=1e3)
    fit_laplace(model, [(x[:200], y[:200]), (x[200:], y[200:])], structure=structure, curvature="ggn")
    new = line(2000, 4, 3, (0.1, 1.0, 10.0), seed=1)
    out = predict(model, [(new[0], new[1])])
    torch.testing.assert_close(out.aleatoric[0], torch.tensor([0.1, 1.0, 10.0]).double(), rtol=0.15, atol=0)
    low, high = out.interval()
    inside = ((low <= new[1]) & (new[1] <= high)).double().mean(0)
    assert float((inside - 0.95).abs().max()) < 0.02
    design = torch.cat([x, torch.ones(400, 1)], 1)
    exact = torch.linalg.inv(design.T @ design)
    rows = torch.cat([new[0], torch.ones(2000, 1)], 1)
    if structure == "kron":  # exact for a linear model: x^T (X^T X)^-1 x v_k
        variance = ((rows @ exact) * rows).sum(1, keepdim=True) * out.aleatoric.square()
        torch.testing.assert_close(out.epistemic, variance.sqrt(), rtol=1e-3, atol=0)


def test_fit_noise_is_of_every_output():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(500, 2, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 3.0])
    found = metrics.fit_noise(torch.zeros(4, 500, 2), y)
    torch.testing.assert_close(found, y.square().mean(0), rtol=1e-5, atol=0)
    assert isinstance(metrics.fit_noise(torch.zeros(500, 1), y[:, :1]), float)
    assert Regression(found).noise_var == tuple(found.tolist())
    with pytest.raises(ValueError, match="2 variances"):
        Regression(found).item_losses(torch.zeros(5, 3), torch.zeros(5, 3))


def trained(method="vi", outputs=1, steps=400):
    x, y, net = line(200, 4, outputs, tuple(0.1 * 3**k for k in range(outputs)))
    model = bayesify(net.float(), method, prior_sig=10.0)
    noise = methods.noise(model, outputs)
    optimizer = torch.optim.Adam(param_groups(model, 0.03))
    for _ in range(steps):
        optimizer.zero_grad()
        (noise(model(x.float()), y.float()) + penalty(model, 200)).backward()
        optimizer.step()
    return model.eval(), x.float(), y.float()


def test_learned_noise_is_found_by_predict_and_kept_in_files(tmp_path):
    model, x, _y = trained("vi", 2)
    assert any(p is model.bayesify_noise.log_var for g in param_groups(model, 0.1) for p in g["params"])
    out = predict(model, x, samples=5, seed=0)
    assert type(out).__name__ == "RegressionPredictive"
    torch.testing.assert_close(out.aleatoric[0], model.bayesify_noise.variance.double().sqrt())
    torch.testing.assert_close(out.aleatoric[0], torch.tensor([0.1, 0.3]).double(), rtol=0.2, atol=0)
    save(model, tmp_path)
    again = load(nn.Linear(3, 2), tmp_path)
    torch.testing.assert_close(predict(again, x, samples=5, seed=0).std, out.std)
    assert load(model, tmp_path) is model and "noise of the data" in str(summary(model))
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}
    unbayesify(model)
    assert set(model.state_dict()) == {"weight", "bias"}


def test_a_fit_takes_the_learned_noise():
    model, x, y = trained("la")
    fit_laplace(model, [(x, y)], structure="kron")
    torch.testing.assert_close(predict(model, x).aleatoric[0], model.bayesify_noise.variance.double().sqrt())


def test_members_have_their_own_noise():
    members = [trained("vi", steps=5)[0], trained("vi", steps=20)[0]]
    x = torch.zeros(3, 3)
    found = predict(mix(members), x, samples=4, seed=0)
    mean = torch.stack([m.bayesify_noise.variance for m in members]).mean(0).double()
    torch.testing.assert_close(found.aleatoric[0].square(), mean)


def test_the_learned_loss_is_the_gaussians():
    model = bayesify(nn.Linear(3, 2).double(), "vi")
    noise = methods.noise(model, 2)
    f, y = torch.randn(2, 7, 2, dtype=torch.float64)
    noise(f, y)  # begins with the mean squares
    torch.testing.assert_close(noise.variance, (y - f).square().mean(0))
    expected = -torch.distributions.Normal(f, noise.variance.sqrt()).log_prob(y).sum(1).mean()
    torch.testing.assert_close(noise(f, y), expected)
    assert methods.noise(model, 2) is noise
    with pytest.raises(ValueError, match="not for 3 outputs"):
        methods.noise(model, 3)
    with pytest.raises(ValueError, match="positive integer"):
        methods.noise(model, 0)
    with pytest.raises(ValueError, match="nothing is broadcast"):
        noise(f, y[:, 0])


def test_intervals_without_noise_are_refused():
    x, y, net = line(50, 3)
    out = predict(bayesify(net, "vi", prior_sig=1.0, init_sig=0.1), [(x, y)], samples=4, seed=0, task="regression")
    for ask in (out.interval, lambda: out.ranks):
        with pytest.raises(ValueError, match=r"methods\.noise"):
            ask()
    assert set(out.scores) == {"rmse"} and "rmse" in repr(out) and "low" not in out.to_pandas()
    low, high = out.interval(0.9, noise=False)
    assert bool((low < high).all())
    with pytest.raises(ValueError, match="one for each output"):
        out.with_noise(torch.ones(7))


def test_calibrate_leaves_an_exact_posterior_as_it_is():
    """The conjugate posterior of a line, whose noise is known or not; before and after, intervals hold 95%."""
    kept = []
    for seed in range(6):
        x, y, net = line(40, 10, seed=seed)
        model = fit_laplace(bayesify(net, "la", prior_sig=1e3), [(x, y)], structure="kron", likelihood=Regression(0.25))
        held = line(100, 10, seed=50 + seed)[:2]
        calibrate(model, [held], progress=False)
        kept.append(next(p.calibration for p in model.modules() if hasattr(p, "calibration")))
    assert sum(abs(math.log(k)) < 0.05 for k in kept) >= 5, kept


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("samples", [6, 10])
def test_the_nll_of_few_draws_is_that_of_their_gaussian_in_expectation(samples, noise):
    """N(0.3, 1) is drawn from, whose log density with the noise is known."""
    generator = torch.Generator().manual_seed(0)
    f = 0.3 + torch.randn(samples, 40_000, generator=generator, dtype=torch.float64)
    y = torch.tensor([0.0, 1.0, 3.0]).double().repeat_interleave(40_000)
    found = sampled_nll(f.repeat(1, 3), torch.full((1, 1), noise**0.5).double(), y)
    exact = -torch.distributions.Normal(0.3, (1 + noise) ** 0.5).log_prob(y)
    error = float(found.std()) / len(y) ** 0.5
    assert abs(float((found - exact).mean())) < 4 * error + 1 / samples**2


@pytest.mark.parametrize("variance", [0.01, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_calibrate_leaves_an_exact_posterior_where_the_spread_counts(variance, known):
    """Means that are drawn from their posteriors N(m, s^2), of different s, and data with noise around each of them."""
    torch.manual_seed(0)
    model = bayesify(nn.Embedding(1000, 1).double(), "vi", prior_sig=10.0, link="exp")
    posterior = model.parametrizations.weight[0]
    with torch.no_grad():
        posterior.rho.copy_(torch.linspace(-2, 1, 1000).view(-1, 1))
    truth = posterior.mean + posterior.std * torch.randn(1000, 1).double()
    data = [(torch.arange(1000), truth + variance**0.5 * torch.randn(1000, 1).double())]
    calibrate(model, data, likelihood=Regression(variance if known else None), progress=False)
    assert posterior.calibration == pytest.approx(1.0, rel=0.05)


def test_calibrate_widens_a_spread_that_is_too_small():
    x, y, net = line(30, 20, noise=(1.0,))
    model = fit_laplace(bayesify(net, "la", prior_sig=1e3), [(x, y)], structure="kron", likelihood=Regression(1.0))
    for posterior in model.modules():
        if hasattr(posterior, "fitted_sig"):
            posterior.left_values = posterior.left_values * 16
    held = line(300, 20, noise=(1.0,), seed=7)[:2]
    calibrate(model, [held], progress=False)
    factor = next(p.calibration for p in model.modules() if hasattr(p, "calibration"))
    assert 2.5 < factor < 6


def test_a_sequential_model_can_learn_its_noise(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x, y, model = torch.randn(9, 3), torch.randn(9, 1), bayesify(copy.deepcopy(net), "vi").eval()
    before, noise = model(x), methods.noise(model)
    assert torch.equal(model(x), before)
    noise(model(x), y).backward()
    assert noise.log_var.grad is not None
    save(model, tmp_path)
    torch.testing.assert_close(load(net, tmp_path).eval()(x), before)
    torch.testing.assert_close(predict(model, x, samples=0).aleatoric[0], noise.variance.double().sqrt())
