"""`Cycles` as a scheduler, with "swag": rates, the places where iterates are collected, and resumption."""

import copy
import math

import pytest
import torch
from swags import net, train
from torch import nn

from bayesify import Cycles, bayesify, named_posteriors, penalty


def noting_rates(optimizer):
    """Return a list that gets the learning rate of each step."""
    taken = []
    optimizer.register_step_pre_hook(lambda one, *_: taken.append(one.param_groups[0]["lr"]))
    return taken


def start(rate=0.1, **options):
    torch.manual_seed(0)
    model = bayesify(net(), "swag", **options)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def test_it_is_a_scheduler_of_torch():
    model, optimizer = start()
    cycles = Cycles(optimizer, model, steps=20)
    assert isinstance(cycles, torch.optim.lr_scheduler.LRScheduler)
    train(model, optimizer, 1, cycles)
    assert cycles.get_last_lr() == [0.1]


@pytest.mark.parametrize("inside", [True, False])
def test_the_last_quarter_of_training_runs_in_cycles_and_collects_their_ends(inside):
    """Whether the other scheduler is stepped by `Cycles` or before it."""
    model, optimizer = start()
    taken = noting_rates(optimizer)
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1.5 - step / 100))
    cycles = Cycles(optimizer, model, steps=80, high=2.0, low=0.5, before=other if inside else None)
    seen = []
    for _ in range(80):
        seen.append(train(model, optimizer, 1)[0])
        if not inside:
            other.step()
        cycles.step()
    own = [0.1 * min((step + 1) / 5, 1.5 - step / 100) for step in range(60)]
    assert taken[:60] == pytest.approx(own)
    assert taken[60:] == pytest.approx([max(own) * f for f in (2.0, 1.25)] * 10)
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, torch.stack(seen)[61::2].mean(0), rtol=0, atol=1e-12)
    assert [int(p.count) for _, p in named_posteriors(model)] == [10, 10, 10]


def test_a_cycle_is_a_cosine_from_high_to_low():
    model, optimizer = start()
    taken = noting_rates(optimizer)
    train(model, optimizer, 30, Cycles(optimizer, model, steps=30, start=10, cycles=4, high=1.0, low=0.2))
    cycle = [0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * k / 5)) / 2) for k in range(5)]
    assert taken == pytest.approx([0.1] * 10 + cycle * 4)


def test_tensor_rates_stay_the_same_tensor():
    model, _ = start()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    rate, cycles = optimizer.param_groups[0]["lr"], Cycles(optimizer, model, steps=4, start=0, cycles=2, low=0.5)
    train(model, optimizer, 1, cycles)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.075)


def test_groups_that_are_added_later_follow():
    model = bayesify(net(), "swag")
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    cycles = Cycles(optimizer, model, steps=4, start=0, cycles=2, low=0.5)
    train(model, optimizer, 1, cycles)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
    train(model, optimizer, 3, cycles)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.01])
    assert [int(p.count) for _, p in named_posteriors(model)] == [2, 2, 2]


def test_a_schedule_goes_on_after_a_stop_bit_for_bit(tmp_path):
    def begin():
        model, optimizer = start()
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return model, optimizer, Cycles(optimizer, model, steps=20, low=0.5, before=cosine)

    whole, first, second = begin(), begin(), begin()
    train(*whole[:2], 20, whole[2])
    train(*first[:2], 17, first[2])
    for part, other in zip(second, first, strict=True):
        torch.save(other.state_dict(), tmp_path / "part")
        part.load_state_dict(torch.load(tmp_path / "part", weights_only=True))
    train(*second[:2], 3, second[2])
    for (_, a), (_, b) in zip(named_posteriors(whole[0]), named_posteriors(second[0]), strict=True):
        assert torch.equal(a.iterates, b.iterates)
        assert torch.equal(a.original, b.original)


def test_the_state_of_another_schedule_is_refused():
    model, optimizer = start()
    state = Cycles(optimizer, model, steps=20).state_dict()
    with pytest.raises(ValueError, match=r"the state of another schedule: \{'steps': 20"):
        Cycles(optimizer, model, steps=40).load_state_dict(state)


def test_steps_beyond_the_last_are_told_once():
    model, optimizer = start()
    cycles = Cycles(optimizer, model, steps=4, low=0.5)
    train(model, optimizer, 4, cycles)
    with pytest.warns(UserWarning, match="training goes on after the 4 steps of Cycles"):
        train(model, optimizer, 1, cycles)
    train(model, optimizer, 1, cycles)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert [int(p.count) for _, p in named_posteriors(model)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 8, "cycles": 1}, "cycles must be an integer between 2 and the 2 steps from start on, got 1"),
        ({"steps": 8, "start": 8}, "start must be an integer >= 0 and below steps = 8, got 8"),
        ({"steps": 8, "start": 0, "cycles": 9}, "cycles must be an integer between 2 and the 8 steps"),
        ({"steps": 1}, "cycles must be an integer between 2 and the 1 steps from start on, got 2"),
        ({"steps": 8, "low": 1.5}, "low between 0 and high, got high=1.0, low=1.5"),
        ({"steps": 8, "beta": 0.5}, "beta is not for method 'swag'"),
    ],
)
def test_options_out_of_range_are_told(options, message):
    model, optimizer = start()
    with pytest.raises(ValueError, match=message):
        Cycles(optimizer, model, **options)


def test_what_cannot_be_cycled_is_told():
    model, optimizer = start()
    with pytest.raises(TypeError, match="Cycles takes the optimizer first"):
        Cycles(model, optimizer, steps=8)
    with pytest.raises(ValueError, match="the optimizer moves no Bayesian parameter of the model"):
        Cycles(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), model, steps=8)
    with pytest.raises(ValueError, match="collect into the model itself"):
        Cycles(optimizer, model, steps=8).mixture()
    with pytest.raises(ValueError, match="counts the steps by itself"):
        Cycles(optimizer, model, steps=8).step(3)


def test_the_defaults_work_on_digits():
    """The samples' validation NLL is not above the mean's, to 0.001: the schedule's iterates do not only drift.

    Draws come in pairs mu + d, mu - d, or their chance lean to one side of the path would be all that is seen.
    """
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    torch.manual_seed(0)
    order = torch.randperm(len(images))[:600]
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    plain = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model = bayesify(copy.deepcopy(plain), "swag")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cycles = Cycles(optimizer, model, steps=600, before=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600))
    for step in range(600):
        if step % 6 == 0:
            rows = torch.randperm(200)
        batch = rows[step % 6 * 32 :][:32]
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[batch]), y[batch]) + penalty(model, 200)).backward()
        optimizer.step()
        cycles.step()
    posteriors = dict(named_posteriors(model))
    means = {name: p.mean for name, p in posteriors.items()}

    def nll(thetas):
        with torch.no_grad():
            probs = torch.stack([torch.func.functional_call(plain, t, x[200:]).softmax(-1) for t in thetas]).mean(0)
        return float(-probs.log().gather(1, y[200:, None]).mean())

    draws = [{name: p.noise_of(seed) for name, p in posteriors.items()} for seed in range(60)]
    pairs = [{name: means[name] + sign * d[name] for name in means} for d in draws for sign in (1, -1)]
    alone = nll([means])
    assert alone < 0.4
    assert nll(pairs) < alone + 1e-3
