"""IVON: its step by hand, its fixed point, one theta per step, files, and what it refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from bayesify import IVON, bayesify, load, named_posteriors, param_groups, penalty, predict, save
from bayesify.methods.ivon import WARM
from bayesify.methods.vi import MEMORY

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def one_step(model, optimizer, x=X, y=Y, n=40):
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) + penalty(model, n)).backward()
    optimizer.step()


def test_a_step_is_its_formula():
    model = bayesify(net(), "ivon", prior_sig=0.5, init_sig=0.05, Ninflate=3.0)
    optimizer = IVON(model, 0.2, num_data=40, betas=(0.8, 0.9))
    lam = 120.0
    qs = dict(named_posteriors(model))
    m = {n: q.mean.clone() for n, q in qs.items()}
    h = {n: q.h.clone() for n, q in qs.items()}
    start, g = {n: float(v.mean()) for n, v in h.items()}, {n: torch.zeros_like(v) for n, v in m.items()}
    delta = 1 / (lam * 0.25)
    for t in range(1, 4):
        eps = {n: q.noise_of(model._bayesify_scope.step_draw.seed) for n, q in qs.items()}
        s = {n: (lam * (h[n] + delta)).rsqrt() for n in qs}
        theta = {n: (m[n] + s[n] * eps[n]).requires_grad_() for n in qs}
        plain = net()
        grads = torch.autograd.grad(
            F.cross_entropy(torch.func.functional_call(plain, theta, (X,)), Y), list(theta.values())
        )
        one_step(model, optimizer)
        for (n, q), grad in zip(qs.items(), grads, strict=True):
            hat = grad * (theta[n].detach() - m[n]) / s[n] ** 2
            g[n] = 0.8 * g[n] + 0.2 * grad
            h[n] = 0.9 * h[n] + 0.1 * hat + 0.1**2 * (h[n] - hat) ** 2 / (2 * (h[n] + delta))
            away = m[n] - q.prior_mean
            m[n] = m[n] - 0.2 * (start[n] + delta) * (g[n] / (1 - 0.8**t) + delta * away) / (h[n] + delta)
            torch.testing.assert_close(q.mean, m[n])
            torch.testing.assert_close(q.h, h[n])
            torch.testing.assert_close(q.std, (lam * (h[n] + delta)).rsqrt())


def test_the_fixed_point_is_the_mean_field_optimum():
    """Gaussian likelihood: h is the diagonal of X^T X / N, and m the exact posterior mean."""
    torch.manual_seed(0)
    x = torch.randn(200, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5])
    y = x @ torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(200, 1).double()
    model = bayesify(nn.Linear(3, 1, bias=False).double(), "ivon", prior_mean="zero", prior_sig=1.0, init_sig=0.05)
    optimizer = IVON(model, 0.05, num_data=200, betas=(0.9, 0.999))
    total = 0
    for i in range(6000):
        optimizer.zero_grad()
        ((model(x) - y).square().mean() / 2 + penalty(model, 200)).backward()
        optimizer.step()
        (q,) = (q for _, q in named_posteriors(model))
        if i >= 3000:
            total = total + torch.stack([q.mean, q.std]) / 3000
    precision = x.T @ x + torch.eye(3)
    exact = torch.linalg.solve(precision, x.T @ y).T
    torch.testing.assert_close(total[0], exact, atol=0.01, rtol=0.02)
    torch.testing.assert_close(total[1], precision.diagonal().rsqrt()[None], atol=0, rtol=0.05)


def test_one_theta_serves_a_whole_step():
    model = bayesify(net(), "ivon", init_sig=0.1)
    optimizer = IVON(model, 0.1, num_data=40)
    first = model(X)
    assert torch.equal(first, model(X)), "every batch of a step sees one theta"
    one_step(model, optimizer)
    assert not torch.equal(first, model(X))
    whole, parts = (copy.deepcopy(model) for _ in range(2))
    for one, cuts in ((whole, 1), (parts, 4)):
        torch.manual_seed(5)
        used = IVON(one, 0.1, num_data=40)
        used.zero_grad()
        for x, y in zip(X.chunk(cuts), Y.chunk(cuts), strict=True):
            (F.cross_entropy(one(x), y) / cuts).backward()
        used.step()
    for (_, a), (_, b) in zip(named_posteriors(whole), named_posteriors(parts), strict=True):
        torch.testing.assert_close(a.mean, b.mean)


@pytest.mark.parametrize("fused", [True, False])
def test_the_penalty_is_the_kl_without_a_gradient(fused, monkeypatch):
    if not fused:
        monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    model = bayesify(net(), "ivon", prior_sig=0.3, init_sig=0.02)
    exact = sum(
        kl_divergence(Normal(q.mean, q.std), Normal(q.prior_mean, 0.3)).sum() for _, q in named_posteriors(model)
    )
    IVON(model, 0.1, num_data=40)
    term = penalty(model, 40)
    torch.testing.assert_close(term, exact / 40)
    (term + 0 * F.cross_entropy(model(X), Y)).backward()
    assert all(not q.original.grad.any() for _, q in named_posteriors(model))
    with pytest.raises(ValueError, match="give both the same num_data"):
        penalty(model, 41)


def test_the_defaults_find_a_curvature_and_train():
    torch.manual_seed(0)
    model = bayesify(net().float(), "ivon", pull=0.0)  # the labels have nothing to do with the data
    optimizer = IVON(model, param_groups(model, 0.5), num_data=40)
    losses = []
    for _ in range(5 * WARM):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X.float()), Y)
        losses.append(float(loss.detach()))
        (loss + penalty(model, 40)).backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    assert all(q.h.min() >= 0 for _, q in named_posteriors(model))


@pytest.mark.parametrize("fused", [True, False])
def test_without_b2_the_curvature_is_its_formula_and_the_mean_moves_as_by_sgd(fused, monkeypatch):
    if not fused:
        monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    model = bayesify(net(), "ivon", prior_sig=0.3, init_sig=0.05)
    optimizer = IVON(model, 0.1, num_data=40)
    cost = power = 0.0
    average = {n: torch.zeros_like(q.mean) for n, q in named_posteriors(model)}
    for step in range(1, WARM + 4):
        before = {n: (q.mean.clone(), q.std.clone(), q.h.clone()) for n, q in named_posteriors(model)}
        seed = model._bayesify_scope.step_draw.seed
        noise = {n: q.noise_of(seed) for n, q in named_posteriors(model)}
        one_step(model, optimizer)
        grads = {n: q.original.grad for n, q in named_posteriors(model)}
        now = [sum(float((grads[n] * noise[n] * before[n][1]).sum()) for n in grads)]
        now.append(sum(float((grads[n] * before[n][1]).square().sum()) for n in grads))
        cost, power = cost + MEMORY * (now[0] - cost), power + MEMORY * (now[1] - power)
        for name, q in named_posteriors(model):
            m, _, h = before[name]
            found = h if step <= WARM else h + MEMORY * (max(cost, 0) / power * grads[name] ** 2 - h)
            average[name] = 0.9 * average[name] + 0.1 * grads[name]
            pull = (m - q.prior_mean) / (40 * 0.3**2)
            torch.testing.assert_close(q.h, found)
            torch.testing.assert_close(q.std, (1 / (40 * found + 1 / 0.3**2)).sqrt())
            step_size = 0.1 * min(1.0, step / WARM)
            torch.testing.assert_close(q.mean, m - step_size * (average[name] / (1 - 0.9**step) + pull))


def test_the_spread_follows_the_curvature_within_a_short_training():
    torch.manual_seed(0)
    h = torch.logspace(-1, 2, 400)
    model = nn.Module()
    model.theta = nn.Parameter(torch.ones(400) * 0.1)
    model.forward = lambda: (
        (h * model.theta.square()).sum() / 2 + (model.theta * (h / 32).sqrt() * torch.randn(400)).sum()
    )
    bayesify(model, "ivon", prior_mean="zero")
    (q,) = (q for _, q in named_posteriors(model))
    optimizer = IVON(model, 1e-3, num_data=10)
    model.train()
    for _ in range(400):
        optimizer.zero_grad()
        (model() + penalty(model, 10)).backward()
        optimizer.step()
    exact = (1 / (h * q.strength + 1 / q.prior_sig**2)).sqrt()
    ratio = (q.std / exact).log()
    assert abs(float(ratio.mean())) < 0.5
    ranks = [t.argsort().argsort().double() for t in (q.std, h)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) < -0.7


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    model = bayesify(net(), "ivon")
    optimizer = IVON(model, 0.1, num_data=40)
    for _ in range(3):
        one_step(model, optimizer)
    save(model, tmp_path)
    other = load(net(), tmp_path)
    resumed = IVON(other, 0.1, num_data=40)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin = bayesify(net(), "ivon")
    again = IVON(twin, 0.1, num_data=40)
    twin.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, used in ((model, optimizer), (other, resumed), (twin, again)):
        for _ in range(2 * WARM):
            one_step(one, used)
    for (_, a), (_, b), (_, c) in zip(*(named_posteriors(one) for one in (model, other, twin)), strict=True):
        assert torch.equal(a.mean, b.mean)
        assert torch.equal(a.std, b.std)
        assert torch.equal(a.mean, c.mean)


def test_the_padding_row_stays_without_noise():
    model = bayesify(nn.Embedding(5, 3, padding_idx=2), "ivon", init_sig=0.1)
    optimizer = IVON(model, 0.1, num_data=5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
    (q,) = (q for _, q in named_posteriors(model))
    assert not q.std[2].any()
    assert q.std[[0, 1, 3, 4]].all()
    before = q.std.clone()
    IVON(model, 0.1, num_data=50)  # more data, with which training goes on from the same spread
    assert q.h.isfinite().all()
    torch.testing.assert_close(q.std, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"num_data": 0}, "num_data must be a positive number"),
        ({"betas": (1.0, 0.9)}, "betas must be two numbers"),
    ],
)
def test_bad_arguments(options, message):
    model = bayesify(net(), "ivon")
    with pytest.raises(ValueError, match=message):
        IVON(model, **{"lr": 0.1, "num_data": 10, **options})


def test_other_methods_are_refused():
    with pytest.raises(ValueError, match="IVON trains models of method 'ivon', this one is 'vi'"):
        IVON(bayesify(net(), "vi"), 0.1, num_data=10)


def test_predictions_sample():
    model = bayesify(net(), "ivon", init_sig=0.3)
    assert predict(model, X, samples=5, seed=0).mutual_information.max() > 0
