"""The pull to the prior mean: its formula, where it ends, that it holds nobody at the start, who has it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, bayesify, load, named_posteriors, param_groups, penalty, save
from bayesify.core.pull import MEMORY, NEAREST, SHARE
from bayesify.core.scales import PULL

METHODS = ("vi", "mc_dropout", "sgld", "la", "ivon", "swag")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(40) % 3


def moved(model, by=0.1):
    """Move every weight away from its prior mean, each by its own distance."""
    with torch.no_grad():
        for i, (_, q) in enumerate(named_posteriors(model)):
            noise = torch.randn(q.original.shape, generator=torch.Generator().manual_seed(i))
            q.original.add_(noise.to(q.original), alpha=by)
    return model


def seen(model, optimizer):
    """Return the gradients with which an optimizer makes a step, before and after what acts in between."""
    optimizer.zero_grad()
    (F.cross_entropy(model(X.to(next(model.parameters()).dtype)), Y) + penalty(model, 40)).backward()
    before = {n: q.original.grad.clone() for n, q in named_posteriors(model)}
    optimizer.step()
    return before, {n: q.original.grad.clone() for n, q in named_posteriors(model)}


def sums(model, grads):
    """Return the gain per e-fold of the distance, and the squared relative distance."""
    away = {n: q.original.detach() - q.prior_mean for n, q in named_posteriors(model)}
    gain = -sum(float((grads[n] * away[n]).sum()) for n in away)
    return gain, sum(float((away[n] / q.prior_sig).square().sum()) for n, q in named_posteriors(model)), away


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_pull_is_its_formula(dtype):
    model = moved(bayesify(net().to(dtype), "la", pull=1e9))  # c is then never the smaller one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    most = mean = 0.0
    for step in range(3):
        before, after = seen(model, optimizer)
        gain, distance, away = sums(model, before)
        mean += MEMORY * (gain - mean)
        most = max(most, mean)
        factor = SHARE * most / max(distance, NEAREST * 53)
        for name, q in named_posteriors(model):
            exact = before[name] + factor * away[name] / q.prior_sig**2
            torch.testing.assert_close(after[name], exact, msg=f"step {step}")
        with torch.no_grad():
            for name, q in named_posteriors(model):  # along the gradient, where a step further gains
                q.original.copy_(q.prior_mean - (0.3 + step) * before[name])
    assert most > 0


def test_a_small_strength_is_a_gradient_of_the_logarithm():
    model = moved(bayesify(net(), "la", pull=1e-6))
    for _, q in named_posteriors(model):
        q.original.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        for _, q in named_posteriors(model):  # against the gradient: a step further gains
            q.original.copy_(q.prior_mean)
    F.cross_entropy(model(X), Y).backward()
    with torch.no_grad():
        for _, q in named_posteriors(model):
            q.original.sub_(q.original.grad, alpha=0.1)
    before, after = seen(model, optimizer)
    means = {n: q.original for n, q in named_posteriors(model)}
    distance = sum((means[n] - q.prior_mean).square().sum() / q.prior_sig**2 for n, q in named_posteriors(model))
    exact = torch.autograd.grad(1e-6 / 2 * distance.log(), list(means.values()))
    for name, grad in zip(means, exact, strict=True):
        torch.testing.assert_close(after[name] - before[name], grad, rtol=1e-6, atol=1e-15)


def test_training_ends_where_going_further_gains_less_than_the_strength():
    """Loss exp(-a), a the way from the start: the gain per e-fold a exp(-a) falls to c at a known place."""
    model = nn.Module()
    model.theta = nn.Parameter(torch.ones(4, dtype=torch.float64))
    model.forward = lambda: torch.exp(1 - model.theta.mean())
    bayesify(model, "la", pull=0.1)
    (q,) = (q for _, q in named_posteriors(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    for _ in range(3000):
        optimizer.zero_grad()
        (model() + 0 * penalty(model, 10)).backward()
        optimizer.step()
    a = float(q.mean.mean()) - 1
    assert a * math.exp(-a) == pytest.approx(0.1, rel=1e-3)
    assert a > 1  # on the far side of the largest gain


def test_the_start_holds_nobody():
    """However strong, the pull is at most half of what the gradients promise: the model leaves its start."""
    model = bayesify(net(), "la", pull=1e6)
    plain, start = net(), F.cross_entropy(net()(X), Y)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(50):
            optimizer.zero_grad()
            loss = F.cross_entropy(one(X), Y)
            (loss if one is plain else loss + penalty(one, 40)).backward()
            optimizer.step()
    with torch.no_grad():
        gains = [float(start - F.cross_entropy(one.eval()(X), Y)) for one in (model, plain)]
    assert gains[0] > gains[1] / 4


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_it_where_nothing_was_chosen(method):
    def pulled(**options):
        model = moved(bayesify(net(), method, **options))
        if method == "sgld":
            optimizer = SGLD(model, 1e-9, num_data=40)
        elif method == "ivon":
            optimizer = IVON(model, 1e-9, num_data=40)
        else:
            optimizer = torch.optim.SGD(param_groups(model, 1e-9), lr=1e-9)
        for _, q in named_posteriors(model):
            q.most_gain = 1.0
        before, after = seen(model, optimizer)
        return sum(float((after[n] - before[n]).abs().sum()) for n in before)

    factor = {"vi": "kld", "mc_dropout": "kld"}.get(method, "Ninflate")
    assert pulled() > 0
    assert pulled(pull=2 * PULL) == pytest.approx(2 * pulled())
    assert pulled(pull=0.0) == pulled(prior_sig=0.1) == pulled(**{factor: 1.0}) == 0


def test_vanilla_and_training_without_a_penalty_have_none():
    for method, prior in (("vanilla", True), ("la", False)):
        model = moved(bayesify(net(), method))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (F.cross_entropy(model(X), Y) + (penalty(model, 40) if prior else 0)).backward()
        optimizer.step()
        assert all(q.gain == 0 for _, q in named_posteriors(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_leaves_no_trace(value):
    model = moved(bayesify(net(), "la"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen(model, optimizer)
    before = [(q.gain, q.most_gain) for _, q in named_posteriors(model)]
    (F.cross_entropy(model(X), Y) + penalty(model, 40)).backward()
    next(q.original for _, q in named_posteriors(model)).grad[0] = value
    optimizer.step()
    assert [(q.gain, q.most_gain) for _, q in named_posteriors(model)] == before


def test_parameters_of_another_optimizer_are_left_alone():
    model = moved(bayesify(net(), "la"))
    body = torch.optim.SGD(model[0].parameters(), lr=0.0)
    for _, q in named_posteriors(model):
        q.most_gain = 1.0
    (F.cross_entropy(model(X), Y) + penalty(model, 40)).backward()
    before = {n: q.original.grad.clone() for n, q in named_posteriors(model)}
    body.step()
    changed = {n for n, q in named_posteriors(model) if not torch.equal(before[n], q.original.grad)}
    assert changed == {"0.weight", "0.bias"}


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    model = bayesify(net(), "la", pull=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        seen(model, optimizer)
    assert next(q.most_gain for _, q in named_posteriors(model)) > 0
    for _, q in named_posteriors(model):
        q.gain = -0.1  # as it is beyond the optimum
    twin = bayesify(net(), "la", pull=0.01)
    twin.load_state_dict(model.state_dict())
    save(model, tmp_path)
    loaded = load(net(), tmp_path)
    for one in (twin, loaded, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(5):
            seen(one, optimizer)
    for copied in (twin, loaded):
        for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(copied), strict=True):
            assert torch.equal(a.mean, b.mean)
