"""Natural steps: the spread follows the curvature, whichever optimizer, and stops where the noise costs enough."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, mean, named_posteriors, param_groups, penalty, sample
from bayesify.core.prior import RATE, TOLERANCE, step_size
from bayesify.core.ranks import draw_seeds
from bayesify.methods import vi
from bayesify.methods.vi import LARGEST, MEMORY

X, Y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 4


def linear(**options):
    torch.manual_seed(0)
    return bayesify(nn.Linear(6, 4).double(), "vi", **{"init_sig": 0.2, "prior_mean": "zero", **options})


def quadratic(curvature, n=400):
    """Return a model theta -> loss 1/2 sum h theta^2, whose posterior is known."""
    model = nn.Module()
    model.theta = nn.Parameter(torch.ones(n) * 0.1)
    model.forward = lambda: (curvature * model.theta.square()).sum() / 2
    return model


def grads(model, *, seed=0, factor=1.0, parts=1, apart=False):
    """Return the gradients of rho of a step, whose loss is scaled and whose batch is divided as wanted."""
    model.zero_grad()
    with sample(model, seed=seed):
        for rows in torch.arange(20).chunk(parts):
            loss = F.cross_entropy(model(X[rows]), Y[rows]) / parts
            if not apart:
                loss = loss + penalty(model, 100) / parts
            (factor * loss).backward()
        if apart:
            (factor * penalty(model, 100)).backward()
    return {n: q.rho.grad.clone() for n, q in named_posteriors(model)}


@pytest.mark.parametrize("loops", [True, False])
def test_the_natural_gradient_is_its_formula(loops, monkeypatch):
    if not loops:
        monkeypatch.setenv("BAYESIFY_ENGINE", "torch")
    model = linear()
    kappa, size = model._bayesify_scope.method.scale(100), step_size(28)
    cost = power = 0.0
    for seed in range(8):
        with sample(model, seed=seed):
            thetas = [getattr(model, n) for n, _ in named_posteriors(model)]
            data = torch.autograd.grad(F.cross_entropy(F.linear(X, *thetas), Y), thetas)
        r = max(cost, 0) / power if power else 0.0
        found = grads(model, seed=seed)
        for g, (name, q) in zip(data, named_posteriors(model), strict=True):
            unit = q.std / torch.sigmoid(q.rho.detach())
            exact = (r * (g * q.std) ** 2 / kappa).clamp(max=LARGEST) + q.std**2 / q.prior_sig**2 - 1
            torch.testing.assert_close(found[name], size * exact * unit)
        pairs = zip(data, named_posteriors(model), strict=True)
        noise = torch.cat([(g * q.std * q.noise_of(draw_seeds(1, seed)[0])).flatten() for g, (_, q) in pairs])
        cost += MEMORY * (float(noise.sum()) - cost)
        power += MEMORY * (float(noise.square().sum()) - power)
    assert r > 0  # else the squares would have had no part in it
    assert sum(float(q.observed[1]) for _, q in named_posteriors(model)) == pytest.approx(power)


def trained(**how):
    """Return a model with running means, and the gradients of its next step."""
    model = linear()
    for seed in range(6):
        grads(model, seed=seed, factor=how.get("factor", 1.0))
    return model, grads(model, seed=7, **how)


def test_scales_and_accumulation_do_to_them_what_they_do_to_gradients():
    _, plain = trained()
    _, scaled = trained(factor=2.0**16)
    for name in plain:
        torch.testing.assert_close(scaled[name], 2.0**16 * plain[name])


def test_the_penalty_may_be_added_to_the_loss_or_on_its_own(monkeypatch):
    found = []
    for apart in (False, True):
        model, _ = trained()
        monkeypatch.setattr(vi, "MEMORY", 0.0)
        grads(model, seed=6, apart=apart)
        found.append(grads(model, seed=7, apart=apart))
        monkeypatch.undo()
    torch.testing.assert_close(*found)


def test_parts_of_a_batch_add_up_to_the_mean_of_their_estimates():
    """With the gradient of every part the same, K parts of weight 1/K give what one batch gives."""
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = bayesify(quadratic(1e-4, 50).double(), "vi", init_sig=0.2)
        for _ in range(200):
            model.zero_grad()
            for _ in range(parts):
                with sample(model, seed=3):
                    (model() / parts).backward()
            penalty(model, 100).backward()
        found.append(next(q.rho.grad for _, q in named_posteriors(model)).clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_no_trace(value):
    model, _ = trained()
    before = {n: q.observed.clone() for n, q in named_posteriors(model)}
    model.zero_grad()
    (value * model(X).sum() + penalty(model, 100)).backward()
    assert all(torch.equal(q.observed, before[n]) for n, q in named_posteriors(model))


def test_the_norm_of_all_gradients_is_that_of_the_means():
    model, _ = trained()
    both = [
        [p.grad for p in part] for part in zip(*((q.original, q.rho) for _, q in named_posteriors(model)), strict=True)
    ]
    means, spreads = (float(nn.utils.get_total_norm(g)) for g in both)
    assert spreads < 0.1 * means


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_every_optimizer_makes_natural_steps(optimizer):
    model, steps = trained()
    used = optimizer(param_groups(model, 0.1), lr=0.1)
    before = {n: q.rho.detach().clone() for n, q in named_posteriors(model)}
    used.step()
    memory = {torch.optim.RMSprop: 1.0}.get(optimizer, 1.0)
    for name, q in named_posteriors(model):
        exact = -memory * RATE / step_size(28) * steps[name]
        torch.testing.assert_close(q.rho.detach() - before[name], exact, rtol=0.02, atol=1e-9)


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
    model = bayesify(nn.Linear(3, 2).double(), "vi", prior_sig=1.0)
    assert not model._bayesify_scope.method.natural
    with mean(model):
        value = penalty(model, 10)
    value.backward()
    for _, q in named_posteriors(model):
        s = q.std
        torch.testing.assert_close(q.rho.grad, (s - 1 / s) / 10 * torch.sigmoid(q.rho.detach()))


def test_groups_added_later_take_natural_steps_too():
    """A spread whose optimizer comes later has seen the same backward passes."""
    model, steps = trained()
    later = torch.optim.SGD([model.parametrizations.weight.original], lr=0.1)
    later.add_param_group({"params": [model.parametrizations.weight[0].rho], "lr": RATE / step_size(28)})
    before = model.parametrizations.weight[0].rho.detach().clone()
    later.step()
    moved = model.parametrizations.weight[0].rho.detach() - before
    torch.testing.assert_close(moved, -RATE / step_size(28) * steps["weight"])


def test_the_clamped_link_takes_no_natural_steps():
    assert not bayesify(nn.Linear(3, 2), "vi", link="clamp")._bayesify_scope.method.natural
    with pytest.raises(ValueError, match="use 'exp' or 'softplus'"):
        bayesify(nn.Linear(3, 2), "vi", link="clamp", natural=True)
