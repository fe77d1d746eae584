"""Cyclical SGLD: what a cycle does at which place, and the mixture that comes of it."""

import math

import pytest
import torch
from torch import nn

from bayesify import SGLD, Cycles, bayesify, components, diagnostics, named_posteriors, penalty, predict

X = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)


def start(thin=1, **options):
    torch.manual_seed(0)
    return bayesify(nn.Linear(3, 1).double(), "sgld", prior_sig=1.0, thin=thin, **options)


def backward(model, optimizer):
    optimizer.zero_grad()
    ((model(X) - Y).square().mean() + penalty(model, 20)).backward()


def flat(model):
    return torch.cat([p.original.detach().flatten() for _, p in named_posteriors(model)])


def run(model, steps, **options):
    chain = SGLD(model, lr=0.05, num_data=20)
    cycles = Cycles(chain, model, steps=steps, **options)
    states, rates = [], []
    for _ in range(steps):
        backward(model, chain)
        rates.append(chain.param_groups[0]["lr"])
        chain.step()
        cycles.step()
        states.append(flat(model))
    return cycles, torch.stack(states), rates


def test_the_rate_is_a_cosine_of_the_place_in_the_cycle():
    _, _, rates = run(start(), 20, cycles=2, beta=0.5)
    expected = [0.05 / 2 * (math.cos(math.pi * (k % 10) / 10) + 1) for k in range(20)]
    assert rates == pytest.approx(expected)


def test_below_beta_the_chain_is_plain_descent_and_collects_nothing():
    model = start()
    chain = SGLD(model, lr=0.05, num_data=20)
    cycles = Cycles(chain, model, steps=10, cycles=1, beta=0.6)
    for k in range(8):
        before = flat(model)
        backward(model, chain)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        descent = before - chain.param_groups[0]["lr"] * gradient
        chain.step()
        cycles.step()
        away = (flat(model) - descent).abs().max()
        assert (away < 1e-12) == (k < 6)
        assert [p.count is None for _, p in named_posteriors(model)] == [k < 6] * 2
    assert all(int(p.count) == 2 for _, p in named_posteriors(model))


@pytest.mark.parametrize(("thin", "kept"), [(1, [5, 6, 7, 8, 9]), (2, [6, 8])])
def test_every_cycle_gives_a_member_with_the_moments_of_its_own_states(thin, kept):
    model = start(thin)
    options = model._bayesify_scope.method
    cycles, states, _ = run(model, 30, cycles=3, beta=0.5)
    assert len(components(cycles.mixture())) == 3
    for number, member in enumerate(components(cycles.mixture())):
        own = states[[10 * number + k for k in kept]]
        mean = torch.cat([p.mean.flatten() for _, p in named_posteriors(member)])
        std = torch.cat([p.std.flatten() for _, p in named_posteriors(member)])
        torch.testing.assert_close(mean, own.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(std, own.std(0), rtol=0, atol=1e-12)
        assert member._bayesify_scope.method == options
        assert type(member._bayesify_scope.method) is type(options)
    assert predict(cycles.mixture(), X, task="regression").num_samples == 15


def test_function_values_of_chains_with_seeds_can_be_diagnosed():
    values = []
    for seed in range(3):
        model = start()
        torch.manual_seed(seed)
        _, states, _ = run(model, 200, cycles=1, beta=0.5)
        values.append(states[100:, :3] @ X[:4].T)
    found = diagnostics.diagnose(torch.stack(values))
    assert (found.chains, found.draws) == (3, 100)
    assert found.rhat >= 0.99
    assert not torch.equal(values[0], values[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 20, "cycles": 2, "beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"steps": 2, "cycles": 3}, "cycles must be an integer between 1 and the 2 steps"),
        ({"steps": 10, "cycles": 2, "beta": 0.8}, "fewer than two states"),
    ],
)
def test_cycles_that_collect_nothing_are_told(options, message):
    model = start()
    with pytest.raises(ValueError, match=message):
        Cycles(SGLD(model, lr=0.05, num_data=20), model, **options)


def test_there_is_no_mixture_before_the_first_cycle_ends():
    model = start()
    cycles = Cycles(SGLD(model, lr=0.05, num_data=20), model, steps=20, cycles=2, beta=0.5)
    with pytest.raises(ValueError, match="no cycle has ended yet"):
        cycles.mixture()


def test_a_chain_goes_on_after_a_stop_bit_for_bit(tmp_path):
    def begin():
        model = start()
        chain = SGLD(model, lr=0.05, num_data=20, momentum=0.5)
        return model, chain, Cycles(chain, model, steps=20, cycles=2, beta=0.5)

    def go(parts, steps):
        for _ in range(steps):
            backward(*parts[:2])
            parts[1].step()
            parts[2].step()

    whole, first, second = begin(), begin(), begin()
    go(whole, 20)
    go(first, 17)
    for part, other in zip(second, first, strict=True):
        torch.save(other.state_dict(), tmp_path / "part")
        part.load_state_dict(torch.load(tmp_path / "part", weights_only=True))
    go(second, 3)
    a, b = (predict(parts[2].mixture(), X, seed=0, task="regression").outputs for parts in (whole, second))
    assert torch.equal(a, b)


def test_without_cycles_the_chain_collects_by_itself():
    model = start()
    chain = SGLD(model, lr=0.05, num_data=20)
    for _ in range(3):
        backward(model, chain)
        chain.step()
    assert [int(p.count) for _, p in named_posteriors(model)] == [3, 3]
