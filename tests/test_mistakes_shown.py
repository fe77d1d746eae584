"""Mistakes in training are named by `predict`, `save` and `summary`, once per model, and not where there are none."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bayesify import IVON, SGLD, bayesify, load, named_posteriors, param_groups, penalty, predict, save, summary

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model, optimizer=None, *, steps=3, prior=True):
    optimizer = optimizer or torch.optim.SGD(param_groups(model, 0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        (loss + penalty(model, 8) if prior else loss).backward()
        optimizer.step()
    return model


def told(model, call=lambda model: predict(model, X, samples=2, seed=0)) -> list[str]:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(model)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("method", "why"),
    [("vi", "s is what it was at first"), ("mc_dropout", "the weights are the prior mean"), ("ivon", "bayesify.IVON")],
)
def test_a_spread_that_was_never_trained(method, why, tmp_path):
    model = bayesify(net(), method)
    assert any("never trained" in note and why in note for note in summary(model).notes)
    (message,) = told(model)
    assert message.startswith("the spread of the posterior was never trained") and why in message
    assert told(model) == told(model, lambda m: save(m, tmp_path)) == []  # once
    assert told(bayesify(net(), method), lambda m: predict(m, X, samples=0)) == []
    assert len(told(bayesify(net(), method), lambda m: save(m, tmp_path))) == 1


def test_a_warning_points_at_the_call():
    with pytest.warns(UserWarning, match="never trained") as found:
        predict(bayesify(net(), "vi"), X, samples=2)
    assert found[0].filename == __file__


@pytest.mark.parametrize("method", ["vi", "mc_dropout", "ivon", "vanilla"])
def test_nothing_is_said_of_a_trained_model(method, tmp_path):
    model = bayesify(net(), method)
    train(model, IVON(model, 0.1, num_data=8) if method == "ivon" else None, steps=13)
    assert told(model) == []
    assert summary(model).notes == ()
    save(model, tmp_path)
    assert told(load(net(), tmp_path)) == []
    other = bayesify(net(), method)
    other.load_state_dict(model.state_dict())
    assert told(other) == []


def test_a_spread_that_a_plain_optimizer_hardly_moved():
    model = bayesify(net(), "vi")
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert any("param_groups" in message for message in told(model))


def test_training_without_a_penalty():
    for method in ("vi", "la"):
        model = train(bayesify(net(), method), prior=False, steps=1)
        model.zero_grad()
        assert any("no penalty was ever computed" in note for note in summary(model).notes)
        assert any("bayesify.penalty(model, num_data)" in m for m in told(model, lambda m: predict(m, X, samples=0)))
    assert told(train(bayesify(net(), "vanilla", wd=0.0), prior=False)) == []
    assert told(copy.deepcopy(model), lambda m: predict(m, X, samples=0)) == []


def test_parameters_unfrozen_after_bayesify():
    model = net()
    model[0].requires_grad_(False)
    train(bayesify(model, "vi"))
    assert told(model) == []
    model[0].requires_grad_(True)
    (message,) = told(model)
    assert message.startswith("'0.weight' and 1 others were frozen when bayesify was called")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value):
    model = train(bayesify(net(), "vi"))
    assert not any("finite" in note for note in summary(model).notes)
    with torch.no_grad():
        next(q.original for n, q in named_posteriors(model) if n == "2.weight")[0, 0] = value
    (note,) = summary(model).notes
    assert note.startswith("the weights are not finite, '2.weight' first") and "lower the learning rate" in note


def test_a_chain_moved_by_another_optimizer():
    model = train(bayesify(net(), "sgld"), torch.optim.SGD(bayesify(net(), "sgld").parameters(), 0.1))
    with pytest.raises(ValueError, match=r"no moments; step bayesify\.SGLD"):
        predict(model, X)


@pytest.mark.parametrize("method", ["ivon", "sgld", "swag"])
def test_an_average_of_parameters_lacks_what_training_collects(method):
    model = bayesify(net(), method)
    average = AveragedModel(model)
    with pytest.raises(ValueError, match=f"averages parameters alone: what method '{method}' collects"):
        predict(average, X)


def test_an_average_of_parameters_is_right_where_the_posterior_is_parameters():
    model = bayesify(net(), "vi")
    average = AveragedModel(model, avg_fn=lambda old, new, n: 0.5 * old + 0.5 * new)
    optimizer = torch.optim.SGD(param_groups(model, 0.1))
    rho = next(q for _, q in named_posteriors(model)).rho
    exact = rho.detach().clone()
    for step in range(4):
        train(model, optimizer, steps=1)
        average.update_parameters(model)
        exact = rho.detach().clone() if step == 0 else 0.5 * exact + 0.5 * rho.detach()
    found = next(q for _, q in named_posteriors(average))
    torch.testing.assert_close(found.std, torch.nn.functional.softplus(exact))
    assert told(average) == []


def test_the_sampler_still_says_that_nothing_was_collected():
    model = bayesify(net(), "sgld", thin=100)
    train(model, SGLD(model, 0.01, num_data=8))
    with pytest.raises(ValueError, match="no moments"):
        predict(model, X)
