"""`unbayesify` gives the plain model back, and what other tools put on its modules survives."""

import copy
import warnings

import pytest
import torch
from cases import MLP, Bare, Tied, tensor, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from bayesify import bayesify, named_posteriors, sample, unbayesify

X = tensor(5, 4)


def test_unbayesify_to_a_sample():
    model = bayesify(Tied(), init_sig=0.3).eval()
    ids, before = tokens(2, 5, vocabulary=11), None
    torch.manual_seed(3)
    with sample(model):
        before = model(ids)
    torch.manual_seed(3)
    original = model.embed.parametrizations.weight.original
    unbayesify(model, to="sample")
    assert torch.equal(model(ids), before)
    assert model.embed.weight is original
    assert model.head.weight is original


def test_unbayesify_bakes_the_expected_mean():
    model = bayesify(MLP(), "mc_dropout", p_drop=0.4, prior_mean="zero", mean="expected").eval()
    output = model(X)
    assert torch.equal(unbayesify(model)(X), output)


@pytest.mark.parametrize("to", ["mode", None])
def test_unbayesify_refuses_other_targets(to):
    model = bayesify(MLP())
    with pytest.raises(ValueError, match="to must be 'mean' or 'sample'"):
        unbayesify(model, to=to)
    assert dict(named_posteriors(model))


def test_a_parametrization_on_top_is_removed_first():
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = bayesify(MLP())
    parametrize.register_parametrization(model.inp, "weight", Double(), unsafe=True)
    with pytest.raises(ValueError, match=r"inp.weight|Linear.weight has a parametrization that was registered after"):
        unbayesify(model)
    assert len(dict(named_posteriors(model))) == 7


def test_a_part_is_not_unwrapped_alone():
    model = bayesify(MLP())
    with pytest.raises(ValueError, match=r"this .*Linear is a part of the bayesified model; unbayesify the whole"):
        unbayesify(model.inp)


def test_own_hooks_and_their_order_survive():
    model, calls = MLP(), []
    for i in range(2):
        model.register_forward_hook(lambda m, a, o, i=i: calls.append(i))
        model.register_forward_pre_hook(lambda m, a, i=i: calls.append(-i - 1))
    bayesify(model)
    late = model.register_forward_hook(lambda m, a, o: calls.append("late"))
    model(X)
    assert calls == [-1, -2, 0, 1, "late"]
    unbayesify(model)
    calls.clear()
    model(X)
    assert calls == [-1, -2, 0, 1, "late"]
    late.remove()
    assert len(model._forward_hooks) == 2


def test_modules_go_by_the_name_of_their_class():
    layer = nn.Linear(3, 2)
    bayesify(layer)
    assert type(layer) is not nn.Linear
    assert isinstance(layer, nn.Linear)
    assert (type(layer).__name__, str(type(layer))) == ("Linear", str(nn.Linear))


def test_wrapping_again_after_unwrapping():
    model = bayesify(unbayesify(bayesify(MLP(), "vi")), "mc_dropout", prior_mean="zero")
    assert not torch.equal(model(X), model(X))
    unbayesify(model)
    assert type(model.inp) is nn.Linear


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_normalized_weights_stay_normalized(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = norm(nn.Linear(4, 3)).eval()
    twin = copy.deepcopy(model)
    kind, output = type(model), model(X)
    bayesify(model, init_sig=0.3)
    assert torch.equal(twin(X), output), "a copy shares the class, and must not notice"
    assert torch.equal(model(X), output)
    assert not torch.equal(model.train()(X), model(X))
    unbayesify(model)
    assert type(model) is kind
    if norm is parametrizations.weight_norm:  # the others move their buffers in training
        assert torch.equal(copy.deepcopy(model).eval()(X), output)


def test_parameters_in_lists_dictionaries_and_several_modules():
    model = bayesify(Bare(), init_sig=0.3)
    assert [n for n, _ in named_posteriors(model)] == [
        "scales.0", "scales.1", "shifts.a", "first.weight", "first.bias", "other.weight",
    ]  # fmt: skip
    seen = []
    model.other.register_forward_pre_hook(lambda m, a: seen.append((m.bias, model.first.bias, model.again.bias)))
    model(X).sum().backward()
    assert seen[0][0] is seen[0][1]
    assert seen[0][0] is seen[0][2]
    assert all(q.rho.grad is not None for _, q in named_posteriors(model))


def test_unbayesify_refuses_parameters_that_were_parametrized_later():
    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    model = bayesify(nn.Linear(4, 2), include="weight")
    parametrize.register_parametrization(model, "bias", Twice())
    with pytest.raises(ValueError, match="bias has a parametrization that was registered after bayesify"):
        unbayesify(model)
    parametrize.remove_parametrizations(model, "bias")
    assert type(unbayesify(model)) is nn.Linear
