"""Method "ensemble": members at the ends of cycles, where cycles start, and everything that a posterior can do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import (
    Cycles,
    bayesify,
    calibrate,
    components,
    deploy,
    load,
    mean,
    mix,
    named_posteriors,
    param_groups,
    penalty,
    predict,
    sample,
    samples,
    save,
    summary,
    unbayesify,
)

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)) + 1
Y = (X[:, 0] > 1).long() + (X[:, 1] > 1.5).long()


def net(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 3))


def begin(model=None, *, steps=30, members=3, cycles=None, **options):
    """Return a bayesified model with its optimizer and schedule."""
    model = bayesify(net() if model is None else model, "ensemble", members=members, **options)
    optimizer = torch.optim.Adam(param_groups(model, 1e-2), lr=1e-2)
    cycles = {"restart": "prior", "high": 2.0, "seed": 5, **(cycles or {})}
    return model, optimizer, Cycles(optimizer, model, steps=steps, **cycles)


def go(parts, steps):
    """Train, and return the weights after every optimizer step."""
    model, optimizer, cycles = parts
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model.train()(X), Y) + penalty(model, 24)).backward()
        optimizer.step()
        seen.append({name: p.original.detach().clone() for name, p in named_posteriors(model)})
        cycles.step()
    return seen


def trained(norm=False, **options):
    parts = begin(net(norm), **options)
    go(parts, 30)
    return parts[0].eval()


def test_the_ends_of_cycles_are_the_members():
    parts = begin()
    seen = go(parts, 30)
    for name, posterior in named_posteriors(parts[0]):
        assert torch.equal(posterior.members, torch.stack([seen[k][name] for k in (9, 19, 29)]))
        torch.testing.assert_close(posterior.std, posterior.members.std(0))
        assert torch.equal(posterior.mean, seen[9][name])
    assert "3 of 3 members" in str(summary(parts[0]))


def test_a_cycle_is_a_training_of_its_own_from_the_prior_mean():
    """By hand: a new model of the same start with a new head, a new optimizer, and a cosine from twice the rate."""
    parts = begin()
    go(parts, 20)
    second = {n: p.members[1] for n, p in named_posteriors(parts[0])}
    twin = begin()
    go(twin, 10)
    start = {n: p.original.detach().clone() for n, p in named_posteriors(twin[0])}
    first = dict(net().named_parameters())
    assert torch.equal(start["0.weight"], first["0.weight"])
    assert not torch.equal(start["2.weight"], first["2.weight"])
    assert float(start["2.weight"].abs().max()) <= 1 / 6**0.5  # as Linear.reset_parameters does
    plain = bayesify(net(), "vanilla")
    with torch.no_grad():
        for name, posterior in named_posteriors(plain):
            posterior.original.copy_(start[name])
    optimizer = torch.optim.Adam(plain.parameters(), lr=2e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(10):
        optimizer.zero_grad()
        (F.cross_entropy(plain.train()(X), Y) + penalty(plain, 24)).backward()
        optimizer.step()
        cosine.step()
    for name, posterior in named_posteriors(plain):
        torch.testing.assert_close(posterior.original.detach(), second[name], rtol=1e-5, atol=1e-6)


def test_every_restart_has_its_start():
    start = dict(net().named_parameters())
    moved = {}
    for restart in ("prior", "fresh", "first"):
        parts = begin(cycles={"restart": restart})
        go(parts, parts[2].ends[0])
        moved[restart] = {n: p.original.detach().clone() for n, p in named_posteriors(parts[0])}
        member = {n: p.members[0] for n, p in named_posteriors(parts[0])}
    assert parts[2].ends == [15, 22, 30]  # "first": its cycle is twice as long
    assert all(torch.equal(moved["first"][n], member[n]) for n in start)
    assert all(not torch.equal(moved["fresh"][n], start[n]) for n in start)
    assert [torch.equal(moved["prior"][n], start[n]) for n in start] == [True, True, False, False]


def test_no_cycle_starts_at_zero():
    start = dict(net().named_parameters())
    parts = begin(prior_mean="zero", cycles={"restart": "fresh"})
    go(parts, 10)
    assert all(float(p.original.detach().abs().max()) > 0 for _, p in named_posteriors(parts[0]))
    assert all(not torch.equal(p.original, start[n]) for n, p in named_posteriors(parts[0]))
    with pytest.raises(ValueError, match=r"the prior mean of '0\.weight' is zero, from where no cycle can learn"):
        begin(prior_mean={"0.*": "zero"})
    begin(prior_mean={"2.*": "zero"})  # the head starts anew


def test_by_default_cycles_start_from_the_first_member_at_twice_the_rate():
    model = bayesify(net(), "ensemble")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycles = Cycles(optimizer, model, steps=40)
    assert (cycles.ends, cycles.stages.restart) == ([20, 30, 40], "first")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert Cycles(optimizer, model, steps=40, fresh="0.*").stages.restart == "prior"


def test_patterns_name_what_starts_anew():
    for fresh, names in (("0.*", ["0"]), ((), []), (["0.*", "2.bias"], ["0", "2"]), (None, ["2"])):
        parts = begin(cycles={"fresh": fresh})
        assert parts[2].state_dict()["stages"]["fresh"] == names


def test_neither_frozen_nor_tied_heads_nor_adapters_start_anew():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    frozen = net()
    frozen[2].requires_grad_(False)
    adapter = nn.Sequential()
    adapter.add_module("lora_B", nn.Linear(2, 2))
    for model in (Tied(), frozen, adapter):
        assert begin(model)[2].state_dict()["stages"]["fresh"] == []


def test_frozen_parameters_have_no_copies_and_keep_their_values():
    model = net()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].state_dict())
    parts = begin(model)
    go(parts, 30)
    kept = [t for p in parts[0]._bayesify_scope.posteriors for t in (p.members, p.statistics) if t is not None]
    assert sum(t.numel() for t in kept) == 3 * sum(p.numel() for p in model[2].parameters())
    assert all(torch.equal(t, before[n]) for n, t in model[0].state_dict().items() if n in before)
    one, other = components(parts[0])[:2]
    assert one[0].weight.data_ptr() == other[0].weight.data_ptr()


def test_a_prediction_takes_every_member_equally_often_and_is_that_of_their_mixture():
    model = trained(norm=True)
    found, mixed = predict(model, X), predict(mix(components(model)), X)
    assert found.num_samples == 3
    torch.testing.assert_close(found.logits, mixed.logits)
    assert float(found.mutual_information.mean()) > 0
    twice = predict(model, X, samples=6)
    torch.testing.assert_close(twice.log_probs, found.log_probs)
    assert [component(X).argmax(1).tolist() for component in components(model)] == found.logits.argmax(-1).tolist()


def test_draws_pick_members_and_mean_mode_is_the_first():
    model = trained()
    with torch.no_grad():
        outputs = [m.eval()(X) for m in components(model)]
        torch.testing.assert_close(model(X), outputs[0])
        for seed in range(6):
            with sample(model, seed=seed):
                assert sum(torch.equal(model(X), out) for out in outputs) == 1
        for i, _ in enumerate(samples(model, 4)):
            assert torch.equal(model(X), outputs[i % 3])
        with mean(model.train()):
            torch.testing.assert_close(model(X), outputs[0])


def test_the_soup_is_the_average_of_the_weights():
    model = trained(mean="soup", cycles={"restart": "first"})
    for _, posterior in named_posteriors(model):
        torch.testing.assert_close(posterior.mean, posterior.members.mean(0))
        torch.testing.assert_close(posterior.original.detach(), posterior.mean)


def test_gradients_of_a_member_pass_to_the_parameter():
    model = trained()
    model.zero_grad()
    with sample(model, seed=1):
        model(X).sum().backward()
        kept = [p.grad.clone() for p in model.parameters()]
        pinned = [w.detach().clone() for w in (model[0].weight, model[0].bias, model[2].weight, model[2].bias)]
    plain = net()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), pinned, strict=True):
            parameter.copy_(value)
    plain(X).sum().backward()
    for grad, parameter in zip(kept, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


# -- normalization layers --------------------------------------------------------------------------------------------


def test_statistics_belong_to_members():
    parts = begin(net(norm=True))
    kept = []
    for _ in range(3):
        go(parts, 9)
        optimizer, model = parts[1], parts[0]
        optimizer.zero_grad()
        F.cross_entropy(model.train()(X), Y).backward()
        optimizer.step()
        kept.append((model[1].running_mean.clone(), model[1].running_var.clone()))
        parts[2].step()
        if len(kept) < 3:  # where the next cycle starts
            assert torch.equal(model[1].running_mean, torch.zeros(6))
            assert int(model[1].num_batches_tracked) == 0
    model.eval()
    found = predict(model, X).logits
    for number, (center, variance) in enumerate(kept):
        alone = components(model)[number].eval()
        assert torch.equal(alone[1].running_mean, center)
        assert torch.equal(alone[1].running_var, variance)
        torch.testing.assert_close(found[number], alone(X).detach())
    assert torch.equal(model[1].running_mean, kept[0][0])  # those of the mean
    plain = unbayesify(copy.deepcopy(model))
    torch.testing.assert_close(plain.eval()(X), found[0])
    assert not plain[1]._forward_hooks
    assert not plain[1]._forward_pre_hooks


def test_statistics_come_back_after_an_error():
    model = trained(norm=True)
    own = model[1].running_mean
    with pytest.raises((RuntimeError, ValueError)), sample(model, seed=2):
        model[1](torch.ones(2, 3, 4, 5))
    assert model[1].running_mean is own


def test_unbayesify_in_the_middle_takes_the_statistics_along():
    parts = begin(net(norm=True))
    go(parts, 15)
    expected = components(parts[0])[0].eval()(X)
    torch.testing.assert_close(unbayesify(parts[0]).eval()(X), expected)


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stop", [10, 14])
def test_a_run_goes_on_bit_for_bit(tmp_path, stop, norm):
    whole, first = begin(net(norm)), begin(net(norm))
    go(whole, 30)
    go(first, stop)
    second = begin(net(norm))
    second[2].stages.seed = 0  # the state has the seed
    for part, other in zip(second, first, strict=True):
        torch.save(other.state_dict(), tmp_path / "part")
        part.load_state_dict(torch.load(tmp_path / "part", weights_only=True))
    go(second, 30 - stop)
    assert torch.equal(predict(whole[0], X).logits, predict(second[0], X).logits)


def test_saved_members_come_back(tmp_path):
    model = trained(norm=True)
    save(model, tmp_path)
    for again in (load(net(norm=True), tmp_path), copy.deepcopy(model)):
        assert torch.equal(predict(again, X).logits, predict(model, X).logits)
        assert torch.equal(again.eval()(X), model(X))


@pytest.mark.parametrize(("options", "dtype"), [({"dtype": "bfloat16"}, torch.bfloat16), ({"offload": True}, None)])
def test_members_can_be_kept_small_or_elsewhere(tmp_path, options, dtype):
    parts = begin(**options)
    seen = go(parts, 30)
    model = parts[0].eval()
    for name, posterior in named_posteriors(model):
        exact = torch.stack([seen[k][name] for k in (9, 19, 29)])
        assert torch.equal(posterior.members, exact if dtype is None else exact.to(dtype))
    save(model, tmp_path)
    again = load(net(), tmp_path)
    assert torch.equal(predict(again, X).logits, predict(model, X).logits)
    model.to(torch.float64)
    assert {p.members.dtype for _, p in named_posteriors(model)} == {dtype or torch.float32}
    with sample(model, seed=0):
        assert model[0].weight.dtype == torch.float64


def test_members_on_the_cpu_stay_there():
    model = trained(offload=True).to("meta")
    assert all(p.members.device.type == "cpu" for _, p in named_posteriors(model))


def test_calibrate_finds_a_factor_that_is_no_worse_than_the_members():
    model = trained()
    before = predict(model, [(X, Y)]).scores["nll"]
    calibrate(model, [(X, Y)], progress=False)
    assert predict(model, [(X, Y)]).scores["nll"] <= before + 1e-6


def test_a_training_that_ends_early_has_fewer_members():
    parts = begin()
    go(parts, 25)
    assert predict(parts[0].eval(), X).num_samples == 2
    assert len(components(parts[0])) == 2


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_there_is_nothing_to_sample_before_the_first_member():
    model, *_ = begin()
    with pytest.raises(ValueError, match=r"no member yet; train with cycles = bayesify.Cycles\("):
        predict(model, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restart": "last"}, r"restart must be one of \['prior', 'fresh', 'first'\], got 'last'"),
        ({"fresh": "head.*"}, "fresh pattern 'head.\\*' matched no parameter"),
        ({"fresh": "0.*", "restart": "first"}, "fresh is for restart='prior', got restart='first'"),
        ({"cycles": 4}, "4 cycles give more than the 3 members"),
        ({"seed": 0.5}, "seed must be an integer or None, got 0.5"),
        ({"beta": 0.5}, "beta is not for method 'ensemble'"),
    ],
)
def test_cycles_out_of_range_are_told(options, message):
    model = bayesify(net(), "ensemble", members=3)
    with pytest.raises(ValueError, match=message):
        Cycles(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=30, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members must be an integer >= 1, got 0"),
        ({"mean": "all"}, r"mean must be one of \['first', 'soup'\], got 'all'"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_options_out_of_range_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        bayesify(net(), "ensemble", **options)


def test_what_members_would_share_is_refused():
    model = bayesify(net(), "ensemble", exclude="0.bias")
    with pytest.raises(ValueError, match=r"'0\.bias' is trained but not Bayesian, so that all members would share"):
        Cycles(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=30)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_what_has_no_reset_parameters_cannot_start_anew():
    with pytest.raises(ValueError, match=r"'0' \(Own\) has no reset_parameters"):
        begin(nn.Sequential(Own()), cycles={"restart": "fresh"})


def test_an_ensemble_is_mixed_by_its_members():
    with pytest.raises(ValueError, match=r"models\[0\] is an ensemble itself; mix its members"):
        mix([trained()])


def test_the_state_of_another_start_is_refused():
    state = begin(cycles={"restart": "fresh"})[2].state_dict()
    with pytest.raises(ValueError, match="restart was 'fresh' when the state was saved"):
        begin()[2].load_state_dict(state)


def test_a_deployed_ensemble_predicts_the_same():
    model = trained(norm=True)
    with torch.no_grad():
        found = deploy(model)(X)["probs"]
    torch.testing.assert_close(found, predict(model, X).probs.to(found), rtol=1e-5, atol=1e-6)


class Counted(nn.Linear):
    """A layer that knows how often it ran."""

    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


def test_a_frozen_trunk_runs_once_per_batch_for_all_members():
    torch.manual_seed(0)
    trunk = nn.Sequential(Counted(4, 6), nn.Tanh()).requires_grad_(False)
    parts = begin(nn.Sequential(trunk, nn.Linear(6, 3)), members=5)
    go(parts, 30)
    Counted.calls = 0
    predict(parts[0], [X[:8], X[8:16], X[16:]])
    assert Counted.calls <= 3 + 1  # and once more, to see that it gives the same
