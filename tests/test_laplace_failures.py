"""Fits that fail, and options that make no sense, leave the posterior as it was."""

import copy
import math

import pytest
import torch
from laplaces import batches, classifier, labelled
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, named_posteriors, predict, sample, summary


def broken(batches, at):
    for i, batch in enumerate(batches):
        if i == at:
            raise OSError("the disk is gone")
        yield batch


X, Y = labelled()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loader": []}, ValueError, "no batches"),
        ({"loader": [(X, Y + 1)]}, ValueError, r"labels must be in 0..2 for 3 logits, got 1..3"),
        ({"loader": [(X, Y - 1)]}, ValueError, r"got -1..1"),
        ({"loader": [(X,)]}, ValueError, "gives no labels"),
        ({"loader": [(X, Y[:, None])]}, ValueError, r"labels must be of shape \(30,\)"),
        ({"loader": [(X, Y.double())]}, ValueError, r"labels\.long\(\)"),
        ({"loader": [(X, Y), (X * math.nan, Y)]}, ValueError, "loss is not finite"),
        ({"loader": broken([(X, Y)] * 3, 2)}, OSError, "disk"),
        ({"loader": 3}, TypeError, "iterable of batches"),
        ({"loss": F.cross_entropy}, ValueError, "one value per example"),
        ({"loss": "mse"}, TypeError, "loss must be a function"),
        ({"curvature": "kfac"}, ValueError, "curvature must be one of"),
        ({"num_data": 0}, ValueError, "num_data must be a positive number"),
        ({"tune": "grid"}, ValueError, "tune must be one of"),
        ({"tune": [(X,)]}, ValueError, "needs data with labels"),
        ({"tune": [(X, Y + 1)]}, ValueError, "labels must be in"),
    ],
)
@pytest.mark.parametrize("fitted", [False, True])
def test_a_failed_fit_leaves_the_posterior_as_it_was(arguments, error, message, fitted):
    model = classifier()
    if fitted:
        fit_laplace(model, batches(X, Y))
    before = copy.deepcopy(model.state_dict())
    if callable(getattr(arguments.get("loader"), "__next__", None)):
        arguments = {"loader": broken([(X, Y)] * 3, 2)}
    with pytest.raises(error, match=message):
        fit_laplace(model, **{"loader": batches(X, Y), **arguments})
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert {p.prior_sig for _, p in named_posteriors(model)} == {0.5}
    assert model.training
    assert model[0].weight is model[0].parametrizations.weight.original


def test_gauss_newton_needs_a_convex_loss_of_few_outputs():
    model = classifier()
    with pytest.raises(ValueError, match="convex"):
        fit_laplace(model, batches(X, Y), lambda o, t: -o.square().sum(1), curvature="ggn")
    wide = bayesify(nn.Linear(4, 2000).double(), "la")
    with pytest.raises(ValueError, match="at most 1024 outputs"):
        fit_laplace(wide, batches(X, Y), lambda o, t: o.square().sum(1), curvature="ggn")
    linear = fit_laplace(model, batches(X, Y), lambda o, t: o.sum(1), curvature="ggn")
    assert all((p.std == 0.5).all() for _, p in named_posteriors(linear))


def test_sampling_before_the_fit_is_an_error():
    model = classifier()
    with pytest.raises(RuntimeError, match=r"call bayesify\.fit_laplace"):
        predict(model, X, samples=2)
    with pytest.raises(RuntimeError, match="not been fitted"), sample(model):
        pass
    predict(model, X, samples=0)
    assert "not fitted" in str(summary(model))


def test_a_model_of_another_method_is_an_error():
    with pytest.raises(ValueError, match="this one is 'vi'"):
        fit_laplace(classifier("vi"), batches(X, Y))
    with pytest.raises(ValueError, match="no posteriors"):
        fit_laplace(nn.Linear(4, 3), batches(X, Y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -1.0}, "damping must be a finite number >= 0"),
        ({"Ninflate": 0.0}, "Ninflate must be a finite number > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        classifier(**options)


def test_a_state_dict_of_something_else_leaves_the_fit():
    model = classifier()
    fit_laplace(model, batches(*labelled()))
    before = {name: posterior.std for name, posterior in named_posteriors(model)}
    model.load_state_dict({}, strict=False)
    for name, posterior in named_posteriors(model):
        assert torch.equal(posterior.std, before[name])
