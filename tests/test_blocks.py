"""`mean`, `sample` and `samples`: what they pin, what they follow, and that they leave no trace."""

import copy

import pytest
import torch
from cases import MLP, tensor
from thetas import X, all_equal, assert_same_gradients, by_data_attribute, by_vector, gradients, mlp
from torch import nn
from torch.nn.utils import parametrize

from bayesify import bayesify, mean, predict, sample, samples


def test_mean_effect_and_restoration():
    model = mlp()
    with mean(model):
        inside = model(X)
        assert torch.equal(inside, model(X))
        assert model.inp.weight is model.inp.parametrizations.weight.original
    assert not torch.equal(model(X), model(X))
    assert torch.equal(model.eval()(X), inside)


@pytest.mark.parametrize("training", [True, False])
def test_sample_effect_and_restoration(training: bool):
    model = mlp().train(training)
    with sample(model, seed=3):
        one = model(X)
        assert torch.equal(one, model(X))
    with sample(model, seed=4):
        assert not torch.equal(one, model(X))
    with sample(model, seed=3):
        assert torch.equal(one, model(X))
    assert torch.equal(model(X), model(X)) is not training


@pytest.mark.parametrize("block", [mean, lambda m: sample(m, seed=1), lambda m: sample(m)])
def test_blocks_restore_after_an_exception(block):
    model = mlp()
    with pytest.raises(KeyError), block(model):
        raise KeyError
    assert not torch.equal(model(X), model(X))


def test_blocks_nest():
    model = mlp()
    with sample(model, seed=1):
        one = model(X)
        with mean(model):
            middle = model(X)
            with sample(model, seed=2):
                two = model(X)
            assert torch.equal(model(X), middle)
        assert torch.equal(model(X), one)
    assert len({float(v.detach().sum()) for v in (one, two, middle)}) == 3


def test_sample_without_a_seed_follows_the_global_generator():
    model = mlp()
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        with sample(model):
            found.append(model(X))
    with sample(model):
        found.append(model(X))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_samples_are_the_same_draws_whatever_is_run():
    model = mlp()
    first = [model(X) for _ in samples(model, 3, seed=5)]
    second = []
    for i in samples(model, 3, seed=5):
        torch.rand(i + 1)
        model.inp(X[:1])
        second.append(torch.cat([model(X[:2]), model(X[2:])]))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    assert len({float(v.detach().sum()) for v in first}) == 3
    longer = [model(X) for _ in samples(model, 4, seed=5)]
    assert all_equal(first, longer[:3])


def test_samples_restore_at_the_end_on_break_and_on_exception():
    model = mlp()
    for _ in samples(model, 2):
        assert torch.equal(model(X), model(X))
    assert not torch.equal(model(X), model(X))
    for _ in samples(model, 2):
        break
    assert not torch.equal(model(X), model(X))
    try:
        for _ in samples(model, 2):
            raise KeyError
    except KeyError:
        pass
    assert not torch.equal(model(X), model(X))
    assert list(samples(model, 0)) == []


def test_a_pinned_theta_follows_the_parameters():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sample(model, seed=3):
        before = model(X)
        model(X).square().sum().backward()
        optimizer.step()
        after = model(X)
        copied = copy.deepcopy(model)
    assert not torch.equal(before, after)
    with sample(copied, seed=3):
        assert torch.equal(after, copied(X))


def test_a_pinned_theta_follows_functional_calls():
    model = mlp()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with sample(model, seed=3):
        found = [
            torch.func.functional_call(model, {n: (1 + i) * p for n, p in parameters.items()}, (X,)) for i in range(3)
        ]
    assert len({float(f.detach().sum()) for f in found}) == 3


def test_two_models_in_one_block_have_noise_of_their_own():
    pair = nn.ModuleList([bayesify(nn.Linear(4, 4), prior_mean="zero", init_sig=0.3) for _ in range(2)])
    with sample(pair, seed=1):
        left, right = ((m.weight - m.parametrizations.weight.original).detach() for m in pair)
    assert (left - right).abs().min() > 1e-6
    with sample(pair[0], seed=1):  # the first is the same as alone
        assert torch.equal((pair[0].weight - pair[0].parametrizations.weight.original).detach(), left)


def test_each_forward_of_a_pinned_theta_has_its_own_backward():
    model = mlp()
    found = []
    with sample(model, seed=3):
        for _ in range(2):
            model.zero_grad()
            model(X).square().sum().backward()
            found.append(gradients(model))
        with torch.no_grad():
            value = model(X)
        with torch.inference_mode():
            assert torch.equal(model(X), value)
        model.zero_grad()
        model(X).square().sum().backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0])
    assert_same_gradients(found[2], found[0])


def test_inference_mode_first():
    model = bayesify(nn.Linear(600, 600), init_sig=0.1)
    x = tensor(1, 600)
    with sample(model, seed=3):
        with torch.inference_mode():
            one = model(x).clone()
        two = model(x)
    assert torch.equal(one, two)
    two.sum().backward()


@pytest.mark.parametrize("write", [by_data_attribute, by_vector])
@pytest.mark.parametrize("with_grad", [True, False])
def test_a_pinned_theta_follows_writes_that_autograd_does_not_count(write, with_grad: bool):
    models = [mlp(), mlp()]
    with sample(models[0], seed=3), torch.set_grad_enabled(with_grad):
        models[0](X)
        write(list(models[0].parameters()))
        found = models[0](X)
    write(list(models[1].parameters()))
    with sample(models[1], seed=3):
        assert torch.equal(found, models[1](X))


@pytest.mark.parametrize("method", ["vi", "vanilla"])
def test_cached_parametrizations_are_refused(method: str):
    model = bayesify(MLP().double(), method).eval()
    message = r"is read inside torch.nn.utils.parametrize.cached\(\).*leave cached\(\) out"
    with parametrize.cached(), pytest.raises(RuntimeError, match=message):
        model(X)
    with parametrize.cached(), pytest.raises(RuntimeError, match=message):
        predict(model, X, samples=3)
    model(X)
