"""SWAG: the Gaussian of collected iterates, correlated across layers, and the batch statistics of its draws."""

import copy

import pytest
import torch
from swags import X, flat, net, thetas, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bayesify import (
    Cycles,
    bayesify,
    calibrate,
    components,
    load,
    mean,
    mix,
    named_posteriors,
    penalty,
    predict,
    sample,
    samples,
    save,
    summary,
)
from bayesify.integrations.vision import update_bn
from bayesify.methods.swag import collect


def walked(count, rank=20):
    """Return a model that has collected random iterates, and these."""
    model = bayesify(net(), "swag", rank=rank)
    iterates = []
    for _ in range(count):
        with torch.no_grad():
            for _, posterior in named_posteriors(model):
                posterior.original.normal_()
        collect(model)
        iterates.append(flat(model))
    return model, torch.stack(iterates)


def drawn_covariance(model):
    """Return the covariance of a draw of all weights: theta - mu is linear in eps1 and eps2."""
    posteriors = [p for _, p in named_posteriors(model)]
    own = torch.cat([p._diagonal_std().flatten() for p in posteriors])
    units = torch.eye(len(posteriors[0].iterates), dtype=torch.float64)
    shared = torch.stack([torch.cat([p._low_rank(eps).flatten() for p in posteriors]) for eps in units])
    return torch.diag(own.square()) + shared.T @ shared


@pytest.mark.parametrize(("count", "rank"), [(6, 20), (9, 9), (9, 4)])
def test_mean_and_covariance_are_those_of_the_iterates(count, rank):
    model, iterates = walked(count, rank)
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, iterates.mean(0), rtol=0, atol=1e-12)
    last = iterates[-rank:] - iterates.mean(0)
    exact = (torch.diag(iterates.var(0)) + last.T @ last / (len(last) - 1)) / 2
    torch.testing.assert_close(drawn_covariance(model), exact, rtol=0, atol=1e-12)
    std = torch.cat([p.std.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(std, exact.diagonal().sqrt(), rtol=0, atol=1e-12)
    if rank >= count:  # all of them are kept: every weight's variance is that of its iterates
        torch.testing.assert_close(std, iterates.std(0), rtol=0, atol=1e-12)


def test_a_draw_makes_nothing_much_larger_than_the_weights():
    class Largest(TorchDispatchMode):
        """Knows the most elements that an operation has returned in a tensor of its own."""

        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            new = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            own = [t.numel() for t in new if t.untyped_storage().data_ptr() not in given]
            self.found = max(self.found, *own, 0)
            return out

    model = bayesify(nn.Linear(128, 128, bias=False), "swag")
    for _ in range(9):
        collect(model)
    (q,) = (p for _, p in named_posteriors(model))
    with Largest() as largest:
        q.draw(q.original.detach(), 3)
        q.own_std  # noqa: B018
    assert q.shape.numel() <= largest.found < 2 * q.shape.numel() < q.iterates.numel()


def test_draws_have_this_covariance_across_layers_too():
    model, iterates = walked(4)
    count = 3000
    away = thetas(model, count) - iterates.mean(0)
    products = torch.einsum("ni,nj->nij", away, away)
    error = products.std(0) / count**0.5
    exact = (torch.diag(iterates.var(0)) + torch.cov(iterates.T)) / 2
    assert ((products.mean(0) - exact) / error).abs().max() < 5
    # Draws that were independent between the layers would have no covariance there.
    between = (exact / error)[:6, 9:].abs().max()
    assert between > 10
    assert (away.mean(0) / (away.std(0) / count**0.5)).abs().max() < 4


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_any_optimizer_collects_at_the_ends_of_cycles(cls):
    model = bayesify(net(), "swag")
    optimizer = cls(model.parameters(), lr=0.05)
    seen = train(model, optimizer, 11, Cycles(optimizer, model, steps=11, start=3, cycles=4))
    kept = seen[[4, 6, 8, 10]]  # after steps 5, 7, 9 and 11
    for _, posterior in named_posteriors(model):
        assert int(posterior.count) == 4
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, kept.mean(0), rtol=0, atol=1e-12)
    assert "4 iterates" in str(summary(model))


def test_training_reads_the_parameter_and_eval_the_mean():
    model, iterates = walked(3)
    assert torch.equal(model.train()[2].weight.flatten(), flat(model)[-3:])
    torch.testing.assert_close(model.eval()[2].weight.flatten(), iterates.mean(0)[-3:])
    with mean(model.train()):
        torch.testing.assert_close(model[2].weight.flatten(), iterates.mean(0)[-3:])


def test_there_is_nothing_to_sample_before_two_iterates():
    model = bayesify(net(), "swag")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"SWAG needs two iterates; train with .* bayesify.Cycles\("):
            predict(model, X, task="regression")
        with pytest.raises(ValueError, match=r"call bayesify.methods.swag.collect\(model\)"), sample(model):
            pass
        collect(model)
    assert predict(model, X, task="regression").num_samples == 30


def test_a_parameter_that_nobody_moves_stays_a_point():
    model = bayesify(net(), "swag")
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    train(model, optimizer, 3, Cycles(optimizer, model, steps=3, start=0))
    before = model[0].weight.detach().clone()
    with sample(model, seed=0):
        assert torch.equal(model[0].weight, before)
    assert model[2].parametrizations.weight[0].std.min() > 0


def test_two_optimizers_each_collect_their_own():
    model = bayesify(net(), "swag")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    schedules = [Cycles(optimizer, model, steps=4, start=0, cycles=2) for optimizer in optimizers]
    for _ in range(4):
        (model(X).square().mean() + penalty(model, 7)).backward()
        for optimizer, cycles in zip(optimizers, schedules, strict=True):
            optimizer.step()
            cycles.step()
    assert [int(p.count) for _, p in named_posteriors(model)] == [2, 2, 2]


class Sharp(torch.optim.Optimizer):
    """SAM: an optimizer whose step makes two steps of another one, at the gradients of two places."""

    def __init__(self, params, lr):
        super().__init__(list(params), {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure):
        start = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.base.step()
        closure()
        with torch.no_grad():
            for p, old in zip((p for group in self.param_groups for p in group["params"]), start, strict=True):
                p.copy_(old)
        self.base.step()


def test_an_optimizer_that_calls_another_counts_once():
    model = bayesify(net(), "swag")
    optimizer = Sharp(model.parameters(), 0.1)
    cycles, seen, rates = Cycles(optimizer, model, steps=12), [], []

    def closure():
        optimizer.zero_grad()
        (model(X).square().mean() + penalty(model, 7)).backward()

    for _ in range(12):
        closure()
        optimizer.step(closure)
        seen.append(flat(model))
        rates.append(optimizer.param_groups[0]["lr"])
        cycles.step()
    assert rates == [0.1] * 12
    assert [int(p.count) for _, p in named_posteriors(model)] == [3, 3, 3]
    std = torch.cat([p.std.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(std, torch.stack(seen)[9:].std(0), rtol=0, atol=1e-12)


def test_an_average_that_was_made_before_follows_the_weights():
    model = bayesify(net(), "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    cycles, expected = Cycles(optimizer, model, steps=8), None
    for _ in range(8):
        now = train(model, optimizer, 1, cycles)[0]
        averaged.update_parameters(model)
        expected = now if expected is None else (expected + now) / 2
    assert [int(p.count) for _, p in named_posteriors(model)] == [2, 2, 2]
    found = torch.cat([p.mean.flatten() for _, p in named_posteriors(averaged.eval())])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(averaged(X), averaged.module.train()(X))


def test_files_and_state_dicts_keep_the_path(tmp_path):
    model = bayesify(net(), "swag", rank=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycles = Cycles(optimizer, model, steps=9, start=0, cycles=3)
    train(model, optimizer, 7, cycles)
    save(model, tmp_path)
    other = bayesify(net(), "swag", rank=2)
    collect(other)
    other.load_state_dict(model.state_dict())
    for copied in (load(net(), tmp_path), other):
        for task in range(2):
            a, b = (predict(m, X, 3, seed=task, task="regression") for m in (model, copied))
            assert torch.equal(a.outputs, b.outputs)
    resumed = torch.optim.SGD(other.parameters(), lr=0.1)
    again = Cycles(resumed, other, steps=9, start=0, cycles=3)
    again.load_state_dict(cycles.state_dict())
    train(model, optimizer, 2, cycles)
    train(other, resumed, 2, again)
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(other), strict=True):
        assert int(b.count) == 3
        assert torch.equal(a.iterates, b.iterates)


def test_collecting_goes_on_after_a_reload():
    model, iterates = walked(3)
    other = bayesify(net(), "swag")
    other.load_state_dict(model.state_dict())
    collect(other)
    for _, posterior in named_posteriors(other):
        assert int(posterior.count) == 4
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(other)])
    torch.testing.assert_close(mu, torch.cat([iterates, iterates[-1:]]).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "change"), [("iterates", lambda t: t[:, :1]), ("average", lambda t: t[:1])])
def test_a_state_of_another_shape_is_refused(name, change):
    model, _ = walked(3)
    posterior = next(p for _, p in named_posteriors(model))
    state = posterior.state()
    posterior.check_state(state)
    with pytest.raises(ValueError, match=f"{name} has shape"):
        posterior.check_state({**state, name: change(state[name])})


def test_the_padding_row_has_no_noise():
    model = bayesify(nn.Embedding(5, 3, padding_idx=2), "swag")
    for _ in range(3):
        with torch.no_grad():
            next(p for _, p in named_posteriors(model)).original.normal_()
        collect(model)
    with sample(model, seed=1):
        drawn = model.weight.detach().clone()
    ((_, posterior),) = named_posteriors(model)
    assert torch.equal(drawn[2], posterior.mean[2])
    assert not torch.equal(drawn[1], posterior.mean[1])
    assert float(posterior.std[2].max()) == 0


def test_swag_models_mix_and_are_calibrated():
    model = mix(walked(4)[0] for _ in range(3))
    assert predict(model, X, task="regression").num_samples == 15
    single = next(p for _, p in named_posteriors(model))
    before, labels = single.std.clone(), torch.randn(7, 1, dtype=torch.float64)
    calibrate(model, [(X, labels)], samples=4, progress=False)
    torch.testing.assert_close(single.std, before * single.calibration)
    with sample(model, seed=2):
        drawn = model.members[0][0].weight.detach()
    single.calibration = 1.0
    with sample(model, seed=2):
        full = model.members[0][0].weight.detach()
    factor = next(p for _, p in named_posteriors(components(model)[1])).calibration
    torch.testing.assert_close(drawn - single.mean, factor * (full - single.mean))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "rank must be an integer >= 2, got 1"),
        ({"rank": 2.5}, "rank must be an integer >= 2, got 2.5"),
    ],
)
def test_options_out_of_range_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        bayesify(net(), "swag", **options)


def test_collect_needs_a_swag_model():
    with pytest.raises(ValueError, match="no posterior of method 'swag'"):
        collect(bayesify(net(), "vi"))


# -- BatchNorm ------------------------------------------------------------------------------------------------------


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def by_hand(model, data):
    """Return the outputs with the average statistics of the batches under the theta in force."""
    with torch.no_grad():
        hidden = [model[0](x) for x in data]
        center, variance = (torch.stack([f(h, 0) for h in hidden]).mean(0) for f in (torch.mean, torch.var))
        scaled = (model[0](X) - center) / (variance + model[1].eps).sqrt()
        return model[2](scaled * model[1].weight + model[1].bias)


def test_statistics_are_computed_for_every_sample_at_prediction():
    model = bayesify(with_norm(), "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train(model, optimizer, 6, Cycles(optimizer, model, steps=6, start=0))
    data = [X[:4], X[4:]]
    kept = copy.deepcopy(model[1].state_dict())
    with pytest.warns(UserWarning, match="BatchNorm statistics are those of its last iterate"):
        before = predict(model, X, 3, seed=1).logits
    for given in (data, iter(data)):
        found = predict(model, [X[:3], X[3:]], 3, seed=1, update_bn=given).logits
        expected = [by_hand(model, data) for _ in samples(model, 3, seed=1)]
        torch.testing.assert_close(found, torch.stack(expected))
        assert not torch.allclose(found, before)
    for name, tensor in model[1].state_dict().items():
        assert torch.equal(tensor, kept[name])


def test_statistics_that_were_computed_are_not_warned_of():
    model = bayesify(with_norm(), "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train(model, optimizer, 6, Cycles(optimizer, model, steps=6, start=0))
    update_bn(model, [X])
    alone = predict(model, X, 0).logits
    torch.testing.assert_close(alone, predict(model, X, 0, update_bn=[X]).logits)
    with mean(model):
        torch.testing.assert_close(alone[0], by_hand(model, [X]))


def test_every_member_of_a_mixture_gets_its_own_statistics():
    members = []
    for seed in range(3):
        members.append(bayesify(with_norm(), "swag"))
        torch.manual_seed(seed)
        for _, posterior in named_posteriors(members[-1]):
            nn.init.normal_(posterior.original)
        optimizer = torch.optim.SGD(members[-1].parameters(), lr=0.1)
        train(members[-1], optimizer, 4, Cycles(optimizer, members[-1], steps=4, start=0))
    model = update_bn(mix(members), [X])
    for member in components(model):
        with mean(member):
            torch.testing.assert_close(member.eval()(X), by_hand(member, [X]))
    found = predict(model, X, 3, seed=0, update_bn=[X])
    for k, _ in enumerate(samples(model, 3, seed=0)):
        torch.testing.assert_close(found.logits[k], by_hand(members[k], [X]))
    with sample(members[1], seed=3):
        update_bn(members[1], [X], samples=None)
        torch.testing.assert_close(members[1](X), by_hand(members[1], [X]))


def test_statistics_need_batches():
    model = bayesify(with_norm(), "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    train(model, optimizer, 3, Cycles(optimizer, model, steps=3, start=0))
    kept = copy.deepcopy(model[1].state_dict())
    with pytest.raises(ValueError, match="update_bn has no batches"):
        predict(model, X, 2, update_bn=[])
    assert all(torch.equal(t, kept[n]) for n, t in model[1].state_dict().items())


def test_a_path_goes_on_after_a_reload():
    first, _ = walked(5, 3)
    second, _ = walked(2, 3)
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        collect(model)
    for (_, a), (_, b) in zip(named_posteriors(first), named_posteriors(second), strict=True):
        assert a.collected == b.collected == 6
        assert torch.equal(a.iterates, b.iterates)
        assert torch.equal(a.std, b.std)
