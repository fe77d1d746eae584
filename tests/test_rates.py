"""Learning rates of the methods' own optimizers: SGD's transfer by a rule, AdamW's by `like`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import IVON, SGLD, bayesify, penalty

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(40) % 3


def net(method: str, **options) -> nn.Module:
    torch.manual_seed(0)
    return bayesify(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double(), method, **options)


def run(model, optimizer, steps, scale=1.0) -> list[torch.Tensor]:
    """Return how far each tensor has moved, by steps on a loss that is multiplied by a number."""
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(steps):
        optimizer.zero_grad()
        (scale * F.cross_entropy(model(X), Y)).backward()
        optimizer.step()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_step_of_adamws_rate_has_its_size_whatever_the_scale_of_the_loss(scale):
    model = net("sgld", nd=0.0)
    for moved in run(model, SGLD(model, 1e-3, num_data=40, like="adamw"), 1, scale):
        assert float(moved.square().mean().sqrt()) == pytest.approx(1e-3)


def test_sgld_at_adamws_rate_is_a_step_of_sgd_per_tensor():
    models = [net("sgld", nd=0.0) for _ in range(2)]
    chains = (
        SGLD(models[0], 1e-3, num_data=40, momentum=0.5, like="adamw"),
        SGLD(models[1], 1.0, num_data=40, momentum=0.5),
    )
    groups = [{**chains[1].param_groups[0], "params": [p]} for p in models[1].parameters()]
    chains[1].param_groups[:] = groups
    squares = [0.0 for _ in groups]
    for step in range(1, 6):
        for model in models:
            model.zero_grad()
            F.cross_entropy(model(X), Y).backward()
        for i, (group, p) in enumerate(zip(groups, models[1].parameters(), strict=True)):
            squares[i] += (float(p.grad.square().mean()) - squares[i]) / step
            group["lr"] = 0.5 * 1e-3 / squares[i] ** 0.5
        chains[1].run = {**chains[0].run}
        for chain in chains:
            chain.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_ivon_at_adamws_rate_moves_by_it():
    model = net("ivon", init_sig=1e-6, pull=0.0, prior_sig=1e3)
    optimizer = IVON(model, 1e-3, num_data=40, like="adamw")
    (moved, *_) = run(model, optimizer, 1)
    assert float(moved.square().mean().sqrt()) == pytest.approx(1e-4, rel=1e-3)  # the first of ten steps of warm-up


def test_sgds_rate_with_momentum_is_ivons_times_one_minus_it():
    """On a constant gradient both move by the same, once momentum has come up."""
    model = net("ivon", init_sig=1e-9, pull=0.0, prior_sig=1e6)
    optimizer = IVON(model, 0.1, num_data=40)
    plain = torch.zeros(1, requires_grad=True)
    sgd = torch.optim.SGD([plain], 0.1 * (1 - 0.9), momentum=0.9)
    for _ in range(300):
        for p in (*model.parameters(), plain):
            p.grad = torch.ones_like(p)
        before = model[0].parametrizations.weight.original.detach().clone(), plain.detach().clone()
        optimizer.step()
        sgd.step()
    moved = model[0].parametrizations.weight.original.detach() - before[0]
    torch.testing.assert_close(moved, (plain.detach() - before[1]).double().expand_as(moved), rtol=1e-4, atol=0)


def test_a_gradient_that_is_not_finite_and_one_that_is_zero():
    model = net("sgld")
    chain = SGLD(model, 1e-3, num_data=40, like="adamw")
    params = list(model.parameters())
    for value in (1.0, float("inf"), 0.0):
        for p in params:
            p.grad = torch.full_like(p, value)
        rate = [chain.rate(p, 1e-3) for p in params]
    assert rate == [pytest.approx(1e-3 * 2**0.5)] * len(params)
    still = SGLD(model, 1e-3, num_data=40, like="adamw")
    assert still.rate(params[0], 1e-3) == 0.0


def test_an_unknown_rate_is_refused():
    for cls, method in ((IVON, "ivon"), (SGLD, "sgld")):
        with pytest.raises(ValueError, match=r"like must be one of \['sgd', 'adamw'\], got 'lion'"):
            cls(net(method), 0.1, num_data=40, like="lion")


def test_the_penalty_is_in_the_step_as_before():
    model = net("sgld", nd=0.0)
    chain = SGLD(model, 1e-3, num_data=40, like="adamw")
    (F.cross_entropy(model(X), Y) + penalty(model, 40)).backward()
    chain.step()
    assert all(p.isfinite().all() for p in model.parameters())
