"""Natural steps: the spread follows the curvature, whichever optimizer, and stops where the noise costs enough."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, mean, named_posteriors, param_groups, penalty, sample
from bayesify.core.scales import TOLERANCE
from bayesify.engine import fusion
from bayesify.methods.natural import LARGEST, MEMORY


def quadratic(curvature, n=400):
    """Return a model theta -> loss 1/2 sum h theta^2, whose posterior is known."""
    model = nn.Module()
    model.theta = nn.Parameter(torch.ones(n) * 0.1)
    model.forward = lambda: (curvature * model.theta.square()).sum() / 2
    return model


@pytest.mark.parametrize("loops", [True, False])
def test_the_natural_gradient_is_its_formula(loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(fusion, "fused", lambda *tensors: False)
    torch.manual_seed(0)
    model = bayesify(nn.Linear(6, 4).double(), "vi", init_sig=0.2, prior_mean="zero")
    optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=0.1)
    x, y = torch.randn(20, 6).double(), torch.randint(4, (20,))
    F.cross_entropy(model(x), y).backward()
    data = {n: (q.original.grad.clone(), q.rho.grad.clone()) for n, q in named_posteriors(model)}
    optimizer.zero_grad()
    with sample(model, seed=0):
        pass
    kappa = model._bayesify_scope.method.scale(100)
    model._bayesify_scope.penalty_scale = kappa
    for name, q in named_posteriors(model):
        q.original.grad, q.rho.grad = (g.clone() for g in data[name])
        q.original.grad += kappa * q.original.detach() / q.prior_sig**2
        q.rho.grad += kappa * (q.std**2 / q.prior_sig**2 - 1) / (q.std / torch.sigmoid(q.rho.detach()))
    before = {n: q.rho.detach().clone() for n, q in named_posteriors(model)}
    pairs = {n: (data[n], q) for n, q in named_posteriors(model)}
    cost = sum(float((rho * q.std / torch.sigmoid(q.rho.detach())).sum()) for (_, rho), q in pairs.values())
    power = sum(float((g * q.std).square().sum()) for (g, _), q in pairs.values())
    r = cost / power
    exact = {n: r * (g * q.std) ** 2 / kappa + q.std**2 / q.prior_sig**2 - 1 for n, ((g, _), q) in pairs.items()}
    assert r > 0  # else the squares would have no part in it
    assert any((e > LARGEST).any() and (e < LARGEST).any() for e in exact.values())
    optimizer.step()
    for name, q in named_posteriors(model):
        unit = torch.nn.functional.softplus(before[name]) / torch.sigmoid(before[name])
        torch.testing.assert_close(q.rho.detach(), before[name] - 0.05 * exact[name].clamp(max=LARGEST) * unit)
    assert MEMORY * power == pytest.approx(sum(float(q.power) for _, q in named_posteriors(model)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_spread_reaches_the_optimum_of_the_tempered_posterior(optimizer):
    torch.manual_seed(0)
    h = torch.logspace(-1, 2, 400)
    model = bayesify(quadratic(h), "vi", prior_mean="zero")
    (q,) = (q for _, q in named_posteriors(model))
    used = optimizer(param_groups(model, 1e-3), lr=1e-3)
    model.train()
    start = q.std.clone()
    for _ in range(400):
        used.zero_grad()
        with torch.no_grad():
            noise = torch.randn(400)  # gradients of a minibatch scatter around the mean with the curvature as variance
        theta = model.theta
        loss = (h * theta.square()).sum() / 2 + (theta * (h / 32).sqrt() * noise).sum()
        (loss + penalty(model, 10)).backward()
        used.step()
    kappa = model._bayesify_scope.method.scale(10)
    exact = (1 / (h / kappa + 1 / q.prior_sig**2)).sqrt()
    ratio = (q.std / exact).log()
    assert abs(float(ratio.mean())) < 0.5
    assert float(ratio.std()) < 0.6
    ranks = [t.argsort().argsort().double() for t in (q.std / start, h)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) < -0.7
    assert float((h * q.std**2).sum() / 2) < 3 * TOLERANCE


def test_a_first_loss_is_near_the_plain_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    x, y = torch.rand(100, 64), torch.randint(10, (100,))
    plain = F.cross_entropy(model(x), y).item()
    bayesify(model)
    first = (F.cross_entropy(model(x), y) + penalty(model, 1200)).item()
    assert plain < first < 1.2 * plain


def test_numbers_keep_the_plain_gradient():
    model = bayesify(nn.Linear(3, 2), "vi", prior_sig=1.0)
    assert not model._bayesify_scope.method.natural
    with mean(model):
        penalty(model, 10).backward()
    grads = {n: q.rho.grad.clone() for n, q in named_posteriors(model)}
    torch.optim.SGD(param_groups(model, 1e-9), lr=1e-9).step()
    for name, q in named_posteriors(model):
        assert torch.equal(q.rho.grad, grads[name])


def test_the_clamped_link_takes_no_natural_steps():
    assert not bayesify(nn.Linear(3, 2), "vi", link="clamp")._bayesify_scope.method.natural
    with pytest.raises(ValueError, match="use 'exp' or 'softplus'"):
        bayesify(nn.Linear(3, 2), "vi", link="clamp", natural=True)
