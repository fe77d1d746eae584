"""SGLD: the exact Gaussian posterior, the step's formula, the moments, and a chain that survives interruption."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from chains import chained, linear_gaussian, run
from torch import nn
from torch.nn import functional as F

from bayesify import SGLD, bayesify, load, mean, named_posteriors, penalty, predict, sample, save, summary
from bayesify.core.wrap import unbayesify
from bayesify.engine import noise as noises
from bayesify.methods.sgld import FADE, FEW


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("inflate", [1.0, 3.0])
def test_the_moments_are_those_of_the_exact_posterior(momentum, inflate):
    columns, chains, sig, lr = 3, 400, 0.5, 0.3 * (1 - momentum)
    x, y = linear_gaussian(columns, chains)
    torch.manual_seed(1)
    model = nn.Linear(columns, chains, bias=False).double()
    bayesify(model, "sgld", prior_sig=sig, prior_mean="zero", burnin=300, thin=7, Ninflate=inflate)
    run(model, SGLD(model, lr, num_data=len(x), momentum=momentum), x, y, 300 + 7 * 200)
    precision = inflate * x.T @ x + torch.eye(columns, dtype=x.dtype) / sig**2
    exact_mean = torch.linalg.solve(precision, inflate * x.T @ y[:, 0])
    # The discretisation widens each eigendirection of the mean loss's curvature by a known factor.
    values, vectors = torch.linalg.eigh(precision)
    curvature = values / (len(x) * inflate)
    widened = 1 / values / (1 - lr * curvature / (2 * (1 + momentum)))
    exact_var = ((vectors * widened) @ vectors.T).diagonal()
    ((_, posterior),) = named_posteriors(model)
    for found, exact in ((posterior.mean, exact_mean), (posterior.std**2, exact_var)):
        # The chains are independent, so that their spread has the autocorrelation in it.
        error = found.std(0) / math.sqrt(chains)
        assert ((found.mean(0) - exact).abs() < 4 * error).all()
        assert (error < 0.03 * exact_var.sqrt().max()).all()


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_the_step_is_the_formula(momentum):
    model, chain = chained(momentum=momentum, lr=0.05, Ninflate=2.0, nd=0.5)
    seed = chain.state_dict()["param_groups"][0]["chain"]["seed"]
    params = dict(named_posteriors(model))
    expected = {name: p.original.detach().clone() for name, p in params.items()}
    velocity = {name: torch.zeros_like(t) for name, t in expected.items()}
    for step in range(1, 4):
        for name, posterior in params.items():
            posterior.original.grad = torch.full_like(posterior.original, float(step))
            draw = (noises.mix(seed, 0) + step) % 2**64
            xi = noises.Stream(draw, noises.name_key(name), posterior.shape, posterior.original.dtype).normal()
            velocity[name] = momentum * velocity[name] - 0.05 * step
            velocity[name] += 0.5 * math.sqrt(2 * 0.05 * (1 - momentum) / (40 * 2.0)) * xi
            expected[name] = expected[name] + velocity[name]
        chain.step()
    for name, posterior in params.items():
        torch.testing.assert_close(posterior.original.detach(), expected[name], rtol=1e-12, atol=1e-14)


def test_the_moments_are_those_of_the_collected_states():
    model, chain = chained(burnin=3, thin=2)
    x, y = linear_gaussian(3, 2)
    states = []
    for step in range(1, 12):
        run(model, chain, x, y, 1)
        if step in (5, 7, 9, 11):
            states.append({name: p.original.detach().clone() for name, p in named_posteriors(model)})
        assert all(p.ready == (step >= 5) for _, p in named_posteriors(model))
    for name, posterior in named_posteriors(model):
        stacked = torch.stack([s[name] for s in states])
        assert int(posterior.count) == 4
        torch.testing.assert_close(posterior.mean, stacked.mean(0), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(posterior.std, stacked.std(0), rtol=1e-10, atol=1e-14)
    assert "4 states" in str(summary(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fade", [0.0, 1.0, 3.0])
def test_later_states_weigh_more(fade, dtype):
    model = bayesify(nn.Linear(30, 40, bias=False, dtype=dtype), "sgld", thin=1, fade=fade)
    ((_, posterior),) = named_posteriors(model)
    states = torch.randn(9, 40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for state in states:
        with torch.no_grad():
            posterior.original.copy_(state)
        posterior.collect()
    n = torch.arange(1, 10, dtype=torch.float64)
    weights = torch.lgamma(n + fade).sub(torch.lgamma(n)).exp()  # n (n+1) ... (n+fade-1)
    weights = (weights / weights.sum()).view(-1, 1, 1)
    average = (weights * states).sum(0)
    variance = (weights * (states - average).square()).sum(0) / (1 - weights.square().sum())
    torch.testing.assert_close(posterior.mean, average.to(dtype))
    torch.testing.assert_close(posterior.std, variance.sqrt().to(dtype))


def test_the_way_to_the_posterior_is_forgotten_where_nothing_was_chosen():
    faded = {n: q.fade for n, q in named_posteriors(bayesify(nn.Linear(2, 2), "sgld"))}
    assert set(faded.values()) == {FADE}
    for options in ({"prior_sig": 0.1}, {"fade": 0.0}):
        assert all(q.fade == 0 for _, q in named_posteriors(bayesify(nn.Linear(2, 2), "sgld", **options)))


def test_a_small_spread_around_a_large_mean_is_not_lost():
    model = bayesify(nn.Linear(1, 1000, bias=False), "sgld", thin=1, prior_sig=1.0)
    ((_, posterior),) = named_posteriors(model)
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(500):
        with torch.no_grad():
            posterior.original.copy_(1 + 1e-4 * torch.randn(1000, 1, generator=generator))
        posterior.collect()
        states.append(posterior.original.detach().double())
    exact = torch.stack(states).std(0)
    torch.testing.assert_close(posterior.std.double(), exact, rtol=1e-2, atol=0)


def test_training_reads_the_chain_and_evaluation_the_moments():
    model, chain = chained(thin=1)
    x, y = linear_gaussian(3, 2)
    run(model, chain, x, y, 5)
    posterior = dict(named_posteriors(model))["weight"]
    assert model.train().weight is posterior.original
    torch.testing.assert_close(model.eval().weight, posterior.average, rtol=0, atol=0)
    torch.testing.assert_close(model(x), x @ posterior.mean.T + dict(named_posteriors(model))["bias"].mean)
    with sample(model.train(), seed=3):
        drawn = model.weight
    assert ((drawn - posterior.mean).abs() > 0).all()
    assert ((drawn - posterior.mean).abs() < 6 * posterior.std).all()


def test_samples_have_the_moments_spread():
    model, chain = chained(columns=100, outputs=100, thin=1)
    run(model, chain, *linear_gaussian(100, 100), 4)
    posterior = dict(named_posteriors(model))["weight"]
    with sample(model, seed=0):
        z = (model.weight.detach() - posterior.mean) / posterior.std
    assert abs(z.mean()) < 4 / 100
    assert abs(z.var() - 1) < 4 * math.sqrt(2) / 100


def test_gradients_in_mean_and_sample_mode_reach_the_parameter():
    model, chain = chained(thin=1)
    x, y = linear_gaussian(3, 2)
    run(model, chain, x, y, 3)
    for block in (mean(model), sample(model, seed=0)):
        chain.zero_grad()
        with block:
            model(x).sum().backward()
        torch.testing.assert_close(model.parametrizations.weight.original.grad, x.sum(0).expand(2, 3))


def test_before_there_are_moments_the_mean_is_the_chain_and_sampling_is_an_error():
    model, chain = chained(burnin=2, thin=2)
    x, y = linear_gaussian(3, 2)
    run(model, chain, x, y, 3)
    model.eval()
    assert model.weight is model.parametrizations.weight.original
    assert (dict(named_posteriors(model))["weight"].std == 0).all()
    predict(model, x, samples=0)
    with pytest.raises(RuntimeError, match=r"burnin \+ thin"):
        predict(model, x, samples=2)
    with pytest.raises(RuntimeError, match="no moments"), sample(model):
        pass
    assert "no moments yet" in str(summary(model))
    run(model.train(), chain, x, y, 1)
    predict(model, x, samples=2)


@pytest.mark.parametrize(("steps", "words"), [(1, "1 state, which has no spread"), (FEW - 1, f"{FEW - 1} states")])
def test_too_few_states_are_warned_about(steps, words):
    model, chain = chained(thin=1)
    x, y = linear_gaussian(3, 2)
    run(model, chain, x, y, steps)
    with pytest.warns(UserWarning, match=words):
        predict(model, x, samples=2, task="regression")
    run(model, chain, x, y, FEW - steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(model, x, samples=2, task="regression")


def test_what_is_not_bayesian_and_the_padding_row_move_without_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Linear(3, 2))
    bayesify(model, "sgld", exclude="1.bias", thin=1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    chain = SGLD(model, 0.1, num_data=10, momentum=0.5)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(2):
        chain.step()
    moved = {n: model.state_dict()[n] - t for n, t in before.items()}
    torch.testing.assert_close(moved["1.bias"], torch.full((2,), -0.1 - 0.15))
    embedding = moved["0.parametrizations.weight.original"]
    torch.testing.assert_close(embedding[1], torch.full((3,), -0.1 - 0.15))
    assert (embedding[0] + 0.25).abs().min() > 1e-6
    posterior = dict(named_posteriors(model))["0.weight"]
    assert (posterior.std[1] == 0).all()
    assert (posterior.std[0] > 0).all()


def test_an_uninformative_bias_has_no_prior_but_moves_and_is_sampled():
    model, chain = chained(bias="uninformative", thin=1)
    bias = dict(named_posteriors(model))["bias"]
    with torch.no_grad():
        bias.original.add_(10)
    run(model, chain, *linear_gaussian(3, 2), 3)
    assert (bias.std > 0).all()
    alone = penalty(model, num_data=40)
    weight = dict(named_posteriors(model))["weight"]
    exact = ((weight.original - weight.prior_mean) ** 2).sum() / (2 * 0.25 * 40)
    torch.testing.assert_close(alone, exact)


def test_a_channels_last_weight_takes_the_same_noise():
    changes = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = bayesify(nn.Conv2d(3, 4, 3).to(memory_format=layout), "sgld")
        chain = SGLD(model, 0.1, num_data=10)
        weight = dict(named_posteriors(model))["weight"].original
        weight.grad = torch.zeros_like(weight)
        chain.step()
        changes.append(weight.detach().contiguous())
    torch.testing.assert_close(*changes)


CONTINUE = """
import sys, torch
from torch import nn
sys.path.insert(0, sys.argv[2])
from bayesify import SGLD, load
from chains import linear_gaussian, run
model = load(nn.Linear(3, 2).double(), sys.argv[1])
chain = SGLD(model, 0.1, num_data=40, momentum=0.9)
chain.load_state_dict(torch.load(sys.argv[1] + "/chain.pt"))
run(model, chain, *linear_gaussian(3, 2), 5)
torch.save((model.state_dict(), chain.state_dict()), sys.argv[1] + "/after.pt")
"""


@pytest.mark.parametrize("stop", [1, 4])
def test_a_chain_goes_on_in_another_process_as_if_never_stopped(tmp_path, stop):
    model, chain = chained(momentum=0.9, burnin=2, thin=2)
    run(model, chain, *linear_gaussian(3, 2), stop)
    save(model, tmp_path)
    torch.save(chain.state_dict(), tmp_path / "chain.pt")
    run(model, chain, *linear_gaussian(3, 2), 5)
    here = __file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", CONTINUE, str(tmp_path), here], check=True)
    weights, state = torch.load(tmp_path / "after.pt")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    own = chain.state_dict()
    assert own["param_groups"][0]["chain"] == state["param_groups"][0]["chain"]
    assert all(torch.equal(v["velocity"], state["state"][i]["velocity"]) for i, v in own["state"].items())


def test_moments_survive_state_dicts_copies_and_load(tmp_path):
    model, chain = chained(thin=1)
    fresh, _ = chained(thin=1)
    save(fresh, tmp_path)
    run(model, chain, *linear_gaussian(3, 2), 3)
    other, _ = chained(thin=1)
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    for twin in (other, copied):
        for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(twin), strict=True):
            assert torch.equal(a.mean, b.mean)
            assert torch.equal(a.std, b.std)
            assert int(b.count) == 3
    other.load_state_dict(fresh.state_dict())
    load(model, tmp_path)
    for twin in (other, model):
        assert all(not p.ready for _, p in named_posteriors(twin))


def test_unbayesify_leaves_the_mean_of_the_chain():
    model, chain = chained(thin=1)
    run(model, chain, *linear_gaussian(3, 2), 3)
    expected = dict(named_posteriors(model))["weight"].mean.clone()
    assert torch.equal(unbayesify(model).weight, expected)


def test_a_state_dict_is_not_changed_by_later_steps():
    model, chain = chained()
    x, y = linear_gaussian(3, 2)
    saved = chain.state_dict()
    run(model, chain, x, y, 2)
    assert saved["param_groups"][0]["chain"]["step"] == 0


def test_a_wrapper_is_as_good_as_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(bayesify(nn.Linear(3, 3), "sgld", thin=1), nn.Linear(3, 2))
    chain = SGLD(model, 0.1, num_data=10)
    assert len(chain.param_groups[0]["params"]) == 4
    F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 2)).backward()
    chain.step()
    assert all(p.ready for _, p in named_posteriors(model))


def test_two_bayesian_parts_with_equal_names_have_their_own_noise():
    torch.manual_seed(0)
    model = nn.ModuleList([bayesify(nn.Linear(3, 3), "sgld"), bayesify(nn.Linear(3, 3), "sgld")])
    chain = SGLD(model, 0.1, num_data=10)
    before = [p.original.detach().clone() for _, p in named_posteriors(model)]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    chain.step()
    kicks = [p.original.detach() - b for (_, p), b in zip(named_posteriors(model), before, strict=True)]
    assert not torch.allclose(kicks[0], kicks[2])


def test_replicas_share_the_seed():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(bayesify(nn.Linear(3, 2), "sgld"))
        torch.manual_seed(0)
        seed = SGLD(model, 0.1, num_data=10).state_dict()["param_groups"][0]["chain"]["seed"]
        torch.manual_seed(0)
        assert seed == noises.global_seed()
    finally:
        torch.distributed.destroy_process_group()


def test_a_chain_takes_over_loaded_options(tmp_path):
    save(bayesify(nn.Linear(3, 2), "sgld", Ninflate=1e8, thin=1), tmp_path)
    model = bayesify(nn.Linear(3, 2), "sgld", thin=10)
    chain = SGLD(model, 1e-2, num_data=10)
    load(model, tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    chain.step()
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(before, model.parameters(), strict=True))
    assert all(int(q.count) == 1 for _, q in named_posteriors(model))
    assert "1 state, no spread yet" in str(summary(model))


def test_scratch_memory_stays_on_the_cpu():
    model = bayesify(nn.Linear(3, 2), "sgld")
    chain = SGLD(model, 1e-2, num_data=1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.set_default_device("meta")
    try:
        chain.step()
    finally:
        torch.set_default_device(None)
    assert all((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
