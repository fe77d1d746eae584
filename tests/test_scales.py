"""Scales that need no choice: relative priors, tempering, and what the noise may cost."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from bayesify import bayesify, load, named_posteriors, penalty, save
from bayesify.core import prior


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()


def test_the_prior_is_of_each_tensors_own_size():
    model = net()
    sizes = {name: float(p.detach().square().mean().sqrt()) for name, p in model.named_parameters()}
    bayesify(model)
    assert {n: q.prior_sig for n, q in named_posteriors(model)} == pytest.approx(sizes)


@pytest.mark.parametrize(("name", "fan_in"), [("0.bias", 6), ("0.weight", 6), ("2.weight", 5)])
def test_a_tensor_of_zeros_gets_a_scale_by_its_fan_in(name, fan_in):
    model = net()
    nn.init.zeros_(dict(model.named_parameters())[name])
    found = {n: q.prior_sig for n, q in named_posteriors(bayesify(model))}
    assert found[name] == pytest.approx(0.1 / math.sqrt(fan_in))


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "sgld", "la"])
@pytest.mark.parametrize("num_data", [10, 10**6])
def test_the_penalty_is_tempered_by_the_number_of_weights_and_never_hotter_than_bayes(method, num_data):
    absolute = {n: q.prior_sig for n, q in named_posteriors(bayesify(net(), method))}
    start = {"init_sig": 0.01} if method == "vi" else {}
    plain = bayesify(net(), method, prior_sig=absolute, **start)
    relative = bayesify(net(), method, pull=0.0, **start)
    with torch.no_grad():
        for model in (plain, relative):
            for _, q in named_posteriors(model):
                q.original.add_(0.1)
    factor = min(1.0, 2 * prior.TOLERANCE * num_data / 50)
    torch.testing.assert_close(penalty(relative, num_data), factor * penalty(plain, num_data))


def test_numbers_are_as_in_the_paper():
    model = bayesify(net(), "vi", prior_sig=0.1)
    for _, q in named_posteriors(model):
        torch.testing.assert_close(q.std, torch.full_like(q.std, 1e-3))
    exact = sum(
        kl_divergence(Normal(q.mean, q.std), Normal(q.prior_mean, q.prior_sig)).sum()
        for _, q in named_posteriors(model)
    )
    torch.testing.assert_close(penalty(model, 7), exact / 7)


def test_given_factors_are_kept_under_a_relative_prior():
    torch.testing.assert_close(
        penalty(bayesify(net(), "vi", kld=0.5, init_sig=0.01), 10),
        penalty(bayesify(net(), "vi", kld=1.0, init_sig=0.01), 10) / 2,
    )


def test_the_noise_at_the_optimum_costs_the_tolerance():
    """Where h s^2 = kappa for every weight, the loss rises by 1/2 sum h s^2 = kappa W/2."""
    h = torch.rand(1000, dtype=torch.float64) + 0.1
    s2 = prior.tempered_scale(10, 1000) / h
    assert float((h * s2).sum() / 2) == pytest.approx(prior.TOLERANCE)


def test_relative_scales_go_with_state_dicts_and_files(tmp_path):
    model, other = bayesify(net(0)), bayesify(net(1))
    other.load_state_dict(model.state_dict())
    save(model, tmp_path)
    for copied in (other, load(net(2), tmp_path)):
        assert {n: q.prior_sig for n, q in named_posteriors(copied)} == {
            n: q.prior_sig for n, q in named_posteriors(model)
        }
        torch.testing.assert_close(penalty(copied, 9), penalty(model, 9))
