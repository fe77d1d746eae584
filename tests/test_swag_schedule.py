"""SWAG's schedule: cycles of the learning rate, the iterates at their ends, and how many are kept."""

import copy
import math

import pytest
import torch
from swags import net, train
from torch import nn

from bayesify import bayesify, named_posteriors, penalty
from bayesify.methods.swag import collect


def noting_rates(optimizer):
    """Return a list that gets the learning rate of each step."""
    taken = []
    optimizer.register_step_pre_hook(lambda one, *_: taken.append(one.param_groups[0]["lr"]))
    return taken


def test_the_last_quarter_of_training_runs_in_cycles_and_collects_their_ends():
    model = bayesify(net(), "swag", steps=80, high=2.0, low=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = noting_rates(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 5, 1 - step / 100))
    seen, own = [], []
    for _ in range(80):
        own.append(optimizer.param_groups[0]["lr"])
        seen.append(train(model, optimizer, 1)[0])
        assert optimizer.param_groups[0]["lr"] == own[-1]  # a scheduler finds what it left
        scheduler.step()
    assert taken[:60] == own[:60]
    assert taken[60:] == pytest.approx([max(own) * f for f in (2.0, 0.5)] * 10)
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, torch.stack(seen)[61::2].mean(0), rtol=0, atol=1e-12)
    assert [int(p.count) for _, p in named_posteriors(model)] == [10, 10, 10]


def test_a_cycle_is_a_cosine_from_high_to_low():
    model = bayesify(net(), "swag", steps=30, start=10, every=5, high=1.0, low=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = noting_rates(optimizer)
    train(model, optimizer, 30)
    cycle = [0.1 * (0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2) for k in range(5)]
    assert taken == pytest.approx([0.1] * 10 + cycle * 4)


def test_a_schedule_goes_on_after_a_stop(tmp_path):
    def start():
        torch.manual_seed(0)
        model = bayesify(net(), "swag", steps=20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def run(parts, steps):
        for _ in range(steps):
            train(parts[0], parts[1], 1)
            parts[2].step()

    whole = start()
    run(whole, 20)
    first, second = start(), start()
    run(first, 13)
    for part, other in zip(second, first, strict=True):
        torch.save(other.state_dict(), tmp_path / "part")
        part.load_state_dict(torch.load(tmp_path / "part"))
    run(second, 7)
    for (_, a), (_, b) in zip(named_posteriors(whole[0]), named_posteriors(second[0]), strict=True):
        assert torch.equal(a.iterates, b.iterates)


def test_a_step_that_fails_gives_its_rate_back():
    class Fails(torch.optim.SGD):
        def step(self):
            raise KeyboardInterrupt

    model = bayesify(net(), "swag", steps=4, start=0, every=1, high=3.0, low=3.0)
    optimizer = Fails(model.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    torch.optim.SGD.step(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("rank", [20, 3])
@pytest.mark.parametrize("length", [3, 20, 21, 22, 57, 150])
def test_by_default_the_latter_half_of_the_path_is_kept(length, rank):
    model = bayesify(net(), "swag", rank=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = noting_rates(optimizer)
    seen = train(model, optimizer, length)
    assert taken == [0.1] * length
    paces = {s: next(p for p in (1, 2, 4, 8, 16, 32) if s <= 2 * p * min(rank, 10)) for s in range(1, length + 1)}
    last, pace = [(step, pace) for step, pace in paces.items() if step % pace == 0][-1]
    kept = [step for step in range(1, last + 1) if step % pace == 0 and step > last // 2]
    assert 2 <= len(kept) <= min(rank, 10)
    iterates = seen[[step - 1 for step in kept]]
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, iterates.mean(0), rtol=0, atol=1e-12)
    std = torch.cat([p.std.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(std, iterates.std(0), rtol=0, atol=1e-12)
    for _, posterior in named_posteriors(model):
        posterior.check_state(posterior.state())


def test_collecting_by_hand_ends_what_is_collected_by_default():
    model = bayesify(net(), "swag")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 5)
    own = []
    for _ in range(3):
        own.append(train(model, optimizer, 2)[-1])
        collect(model)
    mu = torch.cat([p.mean.flatten() for _, p in named_posteriors(model)])
    torch.testing.assert_close(mu, torch.stack(own).mean(0), rtol=0, atol=1e-12)


def test_the_defaults_work_on_digits():
    """The samples' validation NLL is not above the mean's, to 0.001: the schedule's iterates do not only drift.

    Draws come in pairs mu + d, mu - d, or their chance lean to one side of the path would be all that is seen.
    """
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    torch.manual_seed(0)
    order = torch.randperm(len(images))[:600]
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    plain = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    model = bayesify(copy.deepcopy(plain), "swag", steps=600)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for step in range(600):
        if step % 6 == 0:
            rows = torch.randperm(200)
        batch = rows[step % 6 * 32 :][:32]
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[batch]), y[batch]) + penalty(model, 200)).backward()
        optimizer.step()
        scheduler.step()
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
