"""The prior of unknown scale: its closed form and gradient, who has it, and where training ends."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, bayesify, named_posteriors, param_groups, penalty
from bayesify.core.prior import PULL, SHARE, nearest

METHODS = ("vi", "mc_dropout", "sgld", "la", "ivon", "swag")


def net(seed=0, wide=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, wide), nn.ReLU(), nn.Linear(wide, 3)).double()


X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(40) % 3


def moved(model, by=0.1):
    """Move every weight away from its prior mean, each by its own distance."""
    with torch.no_grad():
        for i, (_, q) in enumerate(named_posteriors(model)):
            noise = torch.randn(q.original.shape, generator=torch.Generator().manual_seed(i))
            q.original.add_(noise.to(q.original), alpha=by)
    return model


def prior(model, c=PULL):
    """Return c/2 log(1 + D/D0) by plain operations."""
    away = [(q.original - q.prior_mean) / q.prior_sig for _, q in named_posteriors(model)]
    weights = sum(a.numel() for a in away)
    return c / 2 * torch.log1p(sum(a.double().square().sum() for a in away) / max(SHARE**2 * weights, 1))


@pytest.mark.parametrize("method", METHODS)
def test_the_penalty_has_it_where_nothing_was_chosen(method):
    def value(**options):
        model = moved(bayesify(net(), method, **options))
        return penalty(model, 40).detach(), model

    whole, model = value()
    without, _ = value(pull=0.0)
    torch.testing.assert_close(whole - without, prior(model).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value(pull=0.3)[0] - without, prior(model, 0.3).detach(), rtol=1e-12, atol=1e-12)
    factor = {"vi": "kld", "mc_dropout": "kld"}.get(method, "Ninflate")
    for chosen in ({"prior_sig": 0.1}, {factor: 1.0}):
        assert value(**chosen)[0] == value(**chosen, pull=0.0)[0]


def test_only_weights_with_a_relative_prior_have_it():
    model = moved(bayesify(net(), "la", prior_sig={"0.*": 0.1}))
    other = moved(bayesify(net(), "la", prior_sig={"0.*": 0.1}, pull=0.0))
    near = [(q.original - q.prior_mean) / q.prior_sig for n, q in named_posteriors(model) if n.startswith("2")]
    exact = PULL / 2 * torch.log1p(sum(a.square().sum() for a in near) / 1.0)
    torch.testing.assert_close(penalty(model, 40) - penalty(other, 40), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "la"])
def test_its_gradient_is_that_of_the_closed_form(method, dtype):
    grads = []
    for c in (PULL, 0.0):
        model = moved(bayesify(net().to(dtype), method, pull=c, **({"init_sig": 0.1} if method == "vi" else {})))
        penalty(model, 40).backward()
        grads.append({n: q.original.grad for n, q in named_posteriors(model)})
    means = {n: q.original for n, q in named_posteriors(model)}
    exact = torch.autograd.grad(prior(model), list(means.values()))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for (name, grad), wanted in zip(grads[0].items(), exact, strict=True):
        torch.testing.assert_close(grad - grads[1][name], wanted.to(dtype), rtol=tolerance, atol=tolerance)


def test_the_penalty_is_twice_differentiable():
    model = moved(bayesify(net(), "la"))
    means = [q.original for _, q in named_posteriors(model)]
    grads = torch.autograd.grad(penalty(model, 40), means, create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in grads), means)
    kappa = model._bayesify_scope.method.scale(40)
    away = [
        ((m - q.prior_mean) / q.prior_sig).square().sum()
        for m, (_, q) in zip(means, named_posteriors(model), strict=True)
    ]
    grads = torch.autograd.grad(kappa / 2 * sum(away) + prior(model), means, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(sum(g.square().sum() for g in grads), means))


def test_d0_is_a_share_of_the_scale_but_not_below_one():
    assert nearest(18) == nearest(99) == 1.0
    assert nearest(10**8) == pytest.approx(SHARE**2 * 1e8)


@pytest.mark.parametrize("second", [None, 0.99])
def test_ivon_has_it_in_its_step(second):
    """One step from the same state with and without: the difference is lr p (m - theta0), preconditioned with b2."""
    after = []
    for c in (PULL, 0.0):
        model = moved(bayesify(net(), "ivon", pull=c))
        optimizer = IVON(model, 0.1, num_data=40, betas=(0.9, second))
        torch.manual_seed(3)
        optimizer.run = {**optimizer.run, "seed": 5}
        optimizer._announce()
        before = {n: (q.original.detach().clone(), q.h.clone()) for n, q in named_posteriors(model)}
        (F.cross_entropy(model(X), Y) + penalty(model, 40)).backward()
        away = sum(
            ((m - q.prior_mean) / q.prior_sig).square().sum()
            for (m, _), (_, q) in zip(before.values(), named_posteriors(model), strict=True)
        )
        optimizer.step()
        after.append(dict(named_posteriors(model)))
    for name, (mean, h) in before.items():
        pulled, free = (a[name] for a in after)
        exact = -0.1 * PULL / (1 + away) / free.prior_sig**2 * (mean - free.prior_mean)
        exact *= 0.1 if second is None else (h.mean() + free.delta) / (free.h + free.delta)  # the warm-up's first step
        torch.testing.assert_close(pulled.original.detach() - free.original.detach(), exact)


# -- a convex problem has one optimum, however it is reached -----------------------------------------------------------

INPUTS = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)).double()
LABELS = (INPUTS[:, 0] - INPUTS[:, 1] + 0.5 * INPUTS[:, 2] > 0).long()


def logistic():
    torch.manual_seed(0)
    return bayesify(nn.Linear(5, 3).double(), "la")  # 18 weights


def loss_of(model, rows=slice(None)):
    return F.cross_entropy(model(INPUTS[rows]), LABELS[rows])


def by(make, steps, *, clip=None, logging=False, accumulate=1):
    """Train by the optimizers of `make`; return the squared relative distance from the prior mean."""
    model = logistic()
    optimizers = make(model)
    for _ in range(steps):
        model.zero_grad()
        for rows in torch.arange(60).chunk(accumulate):
            ((loss_of(model, rows) + penalty(model, 60)) / accumulate).backward()
        if logging:
            penalty(model, 60)
            penalty(model, 7).detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return distance_of(model)


def distance_of(model):
    return float(sum(((q.mean - q.prior_mean) / q.prior_sig).square().sum() for _, q in named_posteriors(model)))


def lbfgs():
    model = logistic()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model) + penalty(model, 60)
        loss.backward()
        return loss

    optimizer.step(closure)
    return distance_of(model)


def sgd(lr):
    return lambda model: [torch.optim.SGD(model.parameters(), lr, momentum=0.9)]


def test_a_convex_problem_ends_at_one_point():
    exact = lbfgs()
    assert exact > 1
    ends = {
        "lr .05": by(sgd(0.05), 1500),
        "lr .5": by(sgd(0.5), 400),
        "lr 2": by(sgd(2.0), 200),
        "two optimizers": by(lambda m: [torch.optim.SGD([p], 0.5, momentum=0.9) for p in m.parameters()], 400),
        "clipped": by(sgd(0.5), 400, clip=0.05),
        "logged": by(sgd(0.5), 400, logging=True),
        "accumulated": by(sgd(0.5), 400, accumulate=2),
        "groups": by(lambda m: [torch.optim.SGD(param_groups(m, 0.5), momentum=0.9)], 400),
    }
    assert ends == {name: pytest.approx(exact, rel=0.01) for name in ends}


def test_nothing_is_registered_with_optimizers_in_general():
    from torch.optim import optimizer as general

    by(sgd(0.5), 2)
    for hooks in (general._global_optimizer_pre_hooks, general._global_optimizer_post_hooks):
        assert not [h for h in hooks.values() if h.__module__.startswith("bayesify")]


def test_a_network_leaves_its_start_by_sgd():
    """Near the start the prior is a quadratic, whose curvature common rates must stand, in biases too."""
    torch.manual_seed(0)
    model = bayesify(
        nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3)), "la"
    )
    curvature = max(PULL / q.prior_sig**2 for _, q in named_posteriors(model)) / nearest(11_103)
    assert 0.1 * curvature < 2 * (1 + 0.9)  # lr .1, momentum .9
    labels = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    optimizer = torch.optim.SGD(param_groups(model, 0.1), momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X.float()), labels)
        (loss + penalty(model, 40)).backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3
