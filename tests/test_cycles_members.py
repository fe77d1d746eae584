"""Cycles of any method: each ends in a copy of the model, with a posterior of its own, and their mixture predicts."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import (
    IVON,
    Cycles,
    bayesify,
    components,
    fit_laplace,
    load,
    mix,
    named_posteriors,
    param_groups,
    penalty,
    predict,
    save,
)

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)) + 1
Y = (X[:, 0] > 1).long() + (X[:, 1] > 1.5).long()
METHODS = ("vi", "ivon", "la", "mc_dropout", "vanilla", "swag")


def net(method):
    torch.manual_seed(0)
    norm = nn.Identity() if method == "swag" else nn.BatchNorm1d(6)  # whose statistics SWAG takes from a loader
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3))


def begin(method, steps=48, restart="first", **options):
    torch.manual_seed(1)
    model = bayesify(net(method), method)
    groups = param_groups(model, 1e-2)
    optimizer = IVON(model, groups, num_data=24) if method == "ivon" else torch.optim.Adam(groups, lr=1e-2)
    return model, optimizer, Cycles(optimizer, model, steps=steps, restart=restart, seed=5, **options)


def go(parts, steps):
    model, optimizer, cycles = parts
    for _ in range(steps):
        optimizer.zero_grad()
        rows = torch.randint(24, (12,))
        (F.cross_entropy(model.train()(X[rows]), Y[rows]) + penalty(model, 24)).backward()
        optimizer.step()
        cycles.step()


def state(model):
    found = {f"{name} mean": p.original.detach().clone() for name, p in named_posteriors(model)}
    return found | {f"{name} std": p.std.clone() for name, p in named_posteriors(model) if p.p_drop == 0}


def ready(mixture, method):
    return mix([fit_laplace(m, [(X, Y)]) for m in components(mixture)]) if method == "la" else mixture


@pytest.mark.parametrize("method", METHODS)
def test_every_cycle_ends_in_a_member_with_a_posterior_of_its_own(method, tmp_path):
    parts = begin(method)
    go(parts, 24)
    first = state(parts[0])
    if method != "swag":  # whose moments start anew at once
        torch.testing.assert_close(state(components(parts[2].mixture())[0]), first, rtol=0, atol=0)
    go(parts, 24)
    mixture = ready(parts[2].mixture(), method)
    members = components(mixture)
    assert len(members) == 3
    assert [m._bayesify_scope.method.name for m in members] == [method] * 3
    weights = [dict(named_posteriors(m))["3.weight"].original for m in members]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert method == "swag" or not torch.equal(members[0][1].running_mean, members[1][1].running_mean)
    centers = {p.prior_center.data_ptr() for m in members for n, p in named_posteriors(m) if n == "3.weight"}
    assert len(centers) == 1  # in memory once
    save(mixture, tmp_path)
    again = load(net(method), tmp_path)
    a, b = (predict(m, X, seed=3).log_probs for m in (mixture, again))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("restart", ["first", "prior", "fresh"])
def test_cycles_start_where_they_say(method, restart):
    model = begin(method, restart=restart)[0]
    start = state(model)
    parts = begin(method, restart=restart)
    go(parts, 24 if restart == "first" else 16)
    member, now = state(components(parts[2].mixture())[0]), state(parts[0])
    expected = {"first": member, "prior": start, "fresh": None}[restart]
    kept = dict(now)
    if restart == "prior":
        for name in ("3.weight", "3.bias"):  # the last linear layer starts anew
            assert not torch.equal(now.pop(f"{name} mean"), start[f"{name} mean"])
    if expected is not None:
        for name, value in now.items():
            if method != "swag" or name.endswith("mean"):
                torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    else:
        names = [n for n in now if n.endswith("weight mean") and n[0] != "1"]  # a normalization starts at 1 as it did
        assert all(not torch.equal(now[n], start[n]) and not torch.equal(now[n], member[n]) for n in names)
        assert all(torch.equal(kept[n], start[n]) for n in kept if n.endswith("std"))
    norm = parts[0][1]
    if method != "swag" and restart == "first":
        assert torch.equal(norm.running_mean, components(parts[2].mixture())[0][1].running_mean)
    elif method != "swag":
        assert not bool(norm.running_mean.any())
    assert not parts[1].state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [5, 16, 29])
def test_a_run_goes_on_bit_for_bit(method, stop, tmp_path):
    whole, first, second = (begin(method, restart="prior") for _ in range(3))
    torch.manual_seed(7)
    go(whole, 48)
    torch.manual_seed(7)
    go(first, stop)
    generator = torch.get_rng_state()
    for part, other in zip(second, first, strict=True):
        torch.save(other.state_dict(), tmp_path / "part")
        part.load_state_dict(torch.load(tmp_path / "part", weights_only=True))
    torch.set_rng_state(generator)
    go(second, 48 - stop)
    for ours, theirs in zip(components(second[2].mixture()), components(whole[2].mixture()), strict=True):
        torch.testing.assert_close(state(ours), state(theirs), rtol=0, atol=0)
    a, b = (predict(ready(copy.deepcopy(parts[2].mixture()), method), X, seed=0) for parts in (whole, second))
    assert torch.equal(a.log_probs, b.log_probs)


def test_cycles_of_swag_have_ten_iterates_of_their_last_quarter():
    model, optimizer, cycles = begin("swag", steps=240, restart="fresh")
    seen = []
    for _ in range(240):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        assert optimizer.param_groups[0]["lr"] == 1e-2
        optimizer.step()
        seen.append(model[3].parametrizations.weight.original.detach().clone())
        cycles.step()
    for number, member in enumerate(components(cycles.mixture())):
        posterior = dict(named_posteriors(member))["3.weight"]
        expected = torch.stack(seen[80 * number + 61 : 80 * (number + 1) : 2])
        assert posterior.collected == 10
        torch.testing.assert_close(posterior.mean, expected.mean(0))
    assert predict(cycles.mixture(), X).num_samples == 15


def test_what_cannot_be_cycled_is_told(monkeypatch):
    with pytest.raises(ValueError, match="at least 8 steps, got 5"):
        begin("swag", steps=15, restart="fresh")
    with pytest.raises(ValueError, match="no cycle has ended yet: 0 steps of 24"):
        begin("vi")[2].mixture()
    with pytest.raises(ValueError, match=r"restart must be one of \['prior', 'fresh', 'first'\], got 'last'"):
        begin("vi", restart="last")
    with pytest.raises(ValueError, match="beta is not for method 'vi'"):
        begin("vi", beta=0.5)
    parts = begin("vi")
    with pytest.raises(ValueError, match="restart was 'prior' when the state was saved"):
        parts[2].load_state_dict(begin("vi", restart="prior")[2].state_dict() | {"plan": parts[2].state_dict()["plan"]})
    swag = begin("swag")
    monkeypatch.setattr("bayesify.methods.stages.shards", SimpleNamespace(is_sharded=lambda tensor: True))
    with pytest.raises(ValueError, match="a sharded model has none; take method 'ensemble'"):
        Cycles(parts[1], parts[0], steps=8)
    assert len(Cycles(swag[1], swag[0], steps=80).ends) == 10  # iterates, which the model itself collects
