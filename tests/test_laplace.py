"""What the variances of a fit mean, and what a fit leaves as it was."""

import math
import warnings

import pytest
import torch
from laplaces import batches, classifier, curvature_of, half_square, inputs, labelled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import bayesify, fit_laplace, mean, named_posteriors, penalty, sample, summary
from bayesify.core.selection import SelectionError


def test_num_data_defaults_to_what_was_seen():
    x, y = labelled()
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    seen, double = fit_laplace(classifier(), data), fit_laplace(classifier(), data, num_data=60)
    for (_, a), (_, b) in zip(named_posteriors(seen), named_posteriors(double), strict=True):
        torch.testing.assert_close(2 * curvature_of(a, 0.5), curvature_of(b, 0.5))


def test_what_has_no_gradient_and_what_has_none_anywhere():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 4, padding_idx=1), "unused": nn.Linear(2, 2), "head": nn.Linear(4, 3)}
    )
    model.forward = lambda ids: model["head"](model["table"](ids).mean(1))
    bayesify(model, "la", prior_sig=0.3)
    fit_laplace(model, [(torch.tensor([[0, 1], [2, 1]]), torch.tensor([0, 1]))])
    std = {name: p.std for name, p in named_posteriors(model)}
    assert (std["unused.weight"] == 0).all()
    assert (std["unused.bias"] == 0).all()
    assert (std["table.weight"][1] == 0).all()
    torch.testing.assert_close(std["table.weight"][3:], torch.full((2, 4), 0.3))
    assert (std["table.weight"][[0, 2]] < 0.3).all()
    assert "no variance" in str(summary(model))
    with sample(model, seed=0):
        assert torch.equal(model["unused"].weight, model["unused"].parametrizations.weight.original)


def test_a_flat_prior_has_no_precision_of_its_own():
    x = inputs(4)
    model = bayesify(nn.Linear(4, 2).double(), "la", prior_sig=0.5, bias="uninformative")
    target = torch.zeros(30, 2, dtype=torch.float64)

    def first_output_only(output, target):
        return half_square(output[:, :1], target[:, :1])

    fit_laplace(model, batches(x, target), first_output_only, curvature="ggn")
    bias, weight = dict(named_posteriors(model))["bias"], dict(named_posteriors(model))["weight"]
    torch.testing.assert_close(bias.std, torch.tensor([30**-0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(weight.std[1], torch.full((4,), 0.5, dtype=torch.float64))
    assert "1 without variance" in str(summary(model))
    torch.testing.assert_close(penalty(model, num_data=30).item(), 0.0)
    with torch.no_grad():
        bias.original.add_(1)
    assert penalty(model, num_data=30) == 0


@pytest.mark.parametrize(
    ("strength", "options"), [(1.0, {}), (1e-6, {"damping": 1.0}), (1e-6, {"bias": "informative"})]
)
def test_a_flat_prior_warns_only_where_almost_nothing_is_known(strength: float, options: dict):
    def weak(output, target):
        return strength * half_square(output, target)

    def fit(**options):
        model = bayesify(nn.Linear(4, 2).double(), "la", prior_sig=0.5, **options)
        return fit_laplace(model, batches(inputs(4), torch.zeros(30, 2, dtype=torch.float64)), weak, curvature="ggn")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(**{"bias": "uninformative"} | options)
    strength = 1e-6
    with pytest.warns(UserWarning, match=r"2 of 2 elements under a flat prior.*up to 183"):  # (30e-6)**-0.5
        fit(bias="uninformative")


def test_the_mean_is_the_trained_parameter_and_samples_have_the_spread():
    model = fit_laplace(classifier(prior_sig=1.0), batches(*labelled()))
    weight = dict(named_posteriors(model))["0.weight"]
    assert weight.mean.data_ptr() == weight.original.data_ptr()
    draws = []
    for seed in range(400):
        with sample(model, seed=seed):
            draws.append(((model[0].weight - weight.mean) / weight.std).detach())
    z = torch.stack(draws)
    assert (z.mean(0).abs() < 4.5 / 20).all()
    assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / z.numel())
    x, _ = labelled()
    with sample(model, seed=0):
        model(x).sum().backward()
    assert weight.original.grad.abs().sum() > 0


def test_include_restricts_the_posterior():
    x, y = labelled()
    everything = fit_laplace(classifier(), batches(x, y))
    last = fit_laplace(classifier(), batches(x, y), include="2.*")
    for (name, a), (_, b) in zip(named_posteriors(everything), named_posteriors(last), strict=True):
        if name.startswith("2."):
            torch.testing.assert_close(a.std, b.std)
        else:
            assert (b.std == 0).all()
    weights = fit_laplace(classifier(), batches(x, y), include=lambda name, param: param.dim() == 2)
    assert {name for name, p in named_posteriors(weights) if p.std.any()} == {"0.weight", "2.weight"}
    with pytest.raises(SelectionError, match="matched no parameter"):
        fit_laplace(classifier(), batches(x, y), include="head.*")


def test_frozen_parameters_have_no_variance():
    model = classifier()
    model[0].parametrizations.weight.original.requires_grad_(False)
    fit_laplace(model, batches(*labelled()))
    std = {name: p.std for name, p in named_posteriors(model)}
    assert (std["0.weight"] == 0).all()
    assert (std["0.bias"] > 0).all()


def test_dropout_is_off_and_modes_and_random_numbers_are_as_before():
    layers = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.Dropout(0.5)
    model = bayesify(nn.Sequential(*layers).double(), "la")
    model[3].eval()
    x, y = labelled()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fit_laplace(model, batches(x, y))
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model] == [True, True, True, False]
    again = [p.std.clone() for _, p in named_posteriors(model)]
    fit_laplace(model, batches(x, y, 30))
    for old, (_, posterior) in zip(again, named_posteriors(model), strict=True):
        torch.testing.assert_close(posterior.std, old)
    with torch.no_grad(), mean(model):
        fit_laplace(model, batches(x, y))
    assert all(p.original.grad is None for _, p in named_posteriors(model))


def test_a_refit_changes_the_samples_of_an_open_block():
    model = fit_laplace(classifier(), batches(*labelled()))
    with sample(model, seed=0):
        before = model[0].weight.clone()
        fit_laplace(model, batches(*labelled()), num_data=1e6)
        after = model[0].weight
    weight = dict(named_posteriors(model))["0.weight"]
    assert not torch.equal(before, after)
    assert ((after - weight.mean).abs() <= 6 * weight.std).all()


X, Y = labelled()


def test_a_wrapper_is_as_good_as_the_model():
    inner, other = classifier(), classifier()
    model = nn.ModuleDict({"first": inner, "second": other})
    model.forward = lambda x: inner(x) + other(x)
    fit_laplace(model, batches(X, Y), include="second.*")
    assert not any(p.std.any() for _, p in named_posteriors(inner))
    assert all(p.std.all() for _, p in named_posteriors(other))
    fit_laplace(model, batches(X, Y), include="2.bias")
    assert [name for name, p in named_posteriors(model) if p.std.any()] == ["first.2.bias", "second.2.bias"]


def test_labels_of_numpy_and_batches_without_examples():
    model, (x, y) = classifier(), labelled()
    fit_laplace(model, batches(x, y))
    expected = {name: posterior.std for name, posterior in named_posteriors(model)}
    empty = (x[:0], y[:0])
    fit_laplace(model, [empty, *[(part, labels.numpy()) for part, labels in batches(x, y)], empty])
    for name, posterior in named_posteriors(model):
        torch.testing.assert_close(posterior.std, expected[name])
