"""Modules that were replaced after `bayesify` are noticed, once, wherever it matters."""

import copy

import pytest
from cases import MLP, Tied, tensor
from torch import nn

from bayesify import bayesify, mean, named_posteriors, penalty, predict, samples, save, unbayesify

X = tensor(5, 4)


@pytest.mark.parametrize(
    "then",
    [
        lambda m: m(X),
        lambda m: nn.Sequential(m)(X),
        lambda m: penalty(m, 10),
        lambda m: predict(m, X, samples=2),
        mean,
        lambda m: samples(nn.Sequential(m), 2),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_replaced_module_is_noticed_once(then, used):
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2))))
    if used:
        model(X)
    model[1] = nn.Sequential(nn.Linear(3, 5))
    with pytest.warns(UserWarning, match=r"'1.0.weight' was made Bayesian, and its module is no longer") as warned:
        then(model)
    assert len([w for w in warned if "was made Bayesian" in str(w.message)]) == 1
    then(model)
    unbayesify(model)
    assert [n for n, _ in named_posteriors(bayesify(model))] == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    then(model)


def test_the_warning_of_a_replaced_module_points_at_the_forward():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model[1] = nn.Linear(3, 5)
    with pytest.warns(UserWarning, match="no longer in the model") as warned:
        model(X)
    assert warned[0].filename == __file__


def test_a_module_that_moved_is_not_taken_for_replaced():
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model(X)
    model[0] = nn.Sequential(model[0], nn.Tanh())  # as a wrapper for checkpointing does
    model(X)
    copied = copy.deepcopy(model)
    model[0] = nn.Linear(4, 3)
    copied(X)
    with pytest.warns(UserWarning, match="'0.weight' was made Bayesian"):
        model(X)


def test_one_end_of_a_tied_weight_that_was_replaced_is_noticed():
    model = bayesify(Tied())
    model.head = nn.Linear(4, 11)
    with pytest.warns(UserWarning, match="is no longer in the model"):
        penalty(model, 10)


def test_parts_and_wrappers_are_not_taken_for_replacements(recwarn):
    model = bayesify(MLP())
    penalty(model.inp, 10)
    penalty(nn.Sequential(model), 10)
    other = copy.deepcopy(model.inp)
    penalty(other, 10)
    assert not recwarn.list


def test_a_model_with_a_replaced_module_is_not_saved(tmp_path):
    model = bayesify(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model[1] = nn.Linear(3, 5)
    with pytest.raises(ValueError, match=r"'1.weight' was made Bayesian.*Replace modules first: unbayesify\(model\)"):
        save(model, tmp_path)
    assert not list(tmp_path.iterdir())
