"""`prior`: reads the prior mean and the buffers of the start, nests, restores, and is saved with the model."""

import copy

import pytest
import torch
from cases import MLP
from thetas import X
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesify as by
from bayesify import bayesify, mean, mix, named_posteriors, prior, sample, unbayesify

METHODS = ["vi", "vanilla", "mc_dropout", "sgld", "la", "ivon", "swag"]
IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def mlp(method):
    torch.manual_seed(0)
    return bayesify(MLP().double(), method)


def move(model):
    """Move every mean away from the prior mean."""
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.add_(0.5)
    return model


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_effect_and_restoration(method: str, training: bool):
    model = mlp("vanilla")
    pretrained = unbayesify(model)(X)
    bayesify(model, method)
    move(model)
    model.eval()
    moved = model(X)
    model.train(training)
    with prior(model):
        assert torch.equal(model(X), pretrained)
        assert torch.equal(model.inp.weight, model.inp.parametrizations.weight[0].prior_mean)
    assert torch.equal(model.eval()(X), moved)
    assert not torch.equal(moved, pretrained)


def test_restoration_after_an_exception():
    model = move(bayesify(convolutions(), "vi")).eval()
    moved, statistics = model(IMAGES), model[1].running_mean
    with pytest.raises(KeyError), prior(model):
        raise KeyError
    assert model[1].running_mean is statistics
    assert torch.equal(model(IMAGES), moved)


def test_nesting_with_mean_and_sample():
    model = bayesify(convolutions(), "vi")
    with mean(model):
        first = model.eval()(IMAGES)
    model.train()(IMAGES + 3)
    move(model).eval()
    now = model(IMAGES)
    with sample(model, seed=1):
        one = model(IMAGES)
    with prior(model):
        assert torch.equal(model(IMAGES), first)
        with mean(model):
            assert torch.equal(model(IMAGES), now)
            with prior(model):
                assert torch.equal(model(IMAGES), first)
            assert torch.equal(model(IMAGES), now)
        with sample(model, seed=1):
            assert torch.equal(model(IMAGES), one)
        assert torch.equal(model(IMAGES), first)
    with sample(model, seed=1):
        with prior(model):
            assert torch.equal(model(IMAGES), first)
        assert torch.equal(model(IMAGES), one)
    assert torch.equal(model(IMAGES), now)


def test_batch_norm_reads_the_statistics_of_the_start_and_leaves_both():
    model = bayesify(convolutions(), "vi")
    model.train()(IMAGES + 3)
    statistics = model[1].running_mean.clone()
    with prior(model):
        assert torch.equal(model[1].running_mean, torch.zeros(4))
        model(IMAGES)  # in train mode it would move them
        assert not torch.equal(model[1].running_mean, torch.zeros(4))
    assert torch.equal(model[1].running_mean, statistics)
    with prior(model):
        assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_a_prior_mean_from_elsewhere_brings_its_statistics():
    pretrained, model = convolutions(), convolutions()
    pretrained.train()(IMAGES - 2)
    pretrained.eval()
    expected = pretrained(IMAGES)
    for given in (pretrained, pretrained.state_dict(), {"3.*": pretrained, "*": pretrained.state_dict()}):
        bayesify(model, "vi", prior_mean=given).eval()
        with prior(model):
            assert torch.equal(model(IMAGES), expected)
        unbayesify(model)
    state = {**pretrained.state_dict(), "1.running_mean": torch.zeros(5)}
    with pytest.raises(ValueError, match="running_mean"):
        bayesify(model, "vi", prior_mean=state)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.table(x))

    torch.manual_seed(0)
    model, x = Tied(), torch.arange(5)
    expected = model(x)
    move(bayesify(model, "vi"))
    with prior(model):
        assert torch.equal(model(x), expected)
        assert torch.equal(model.head.weight, model.table.weight)


@pytest.mark.parametrize("into", ["plain", "bayesified"])
def test_save_and_load(into: str, tmp_path):
    model = bayesify(convolutions(), "vi")
    model.train()(IMAGES + 3)
    move(model).eval()
    with prior(model):
        expected = model(IMAGES)
        by.save(model, tmp_path)  # inside of the block: what is saved is the model, not what is read
    other = convolutions()
    other.train()(IMAGES - 5)
    loaded = by.load(other if into == "plain" else bayesify(other, "vi"), tmp_path).eval()
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    with prior(loaded):
        assert torch.equal(loaded(IMAGES), expected)


def test_state_dicts_and_copies():
    model = bayesify(convolutions(), "vi")
    model.train()(IMAGES + 3)
    move(model).eval()
    now = model(IMAGES)
    with prior(model):
        expected, state, twin = model(IMAGES), model.state_dict(), copy.deepcopy(model)
    other = convolutions()
    other.train()(IMAGES - 5)
    bayesify(other, "vi").load_state_dict(state)
    for loaded in (other.eval(), twin):
        assert torch.equal(loaded(IMAGES), now)
        with prior(loaded):
            assert torch.equal(loaded(IMAGES), expected)


def test_unbayesify_leaves_no_trace():
    model, plain = bayesify(convolutions(), "vi"), convolutions()
    unbayesify(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert vars(model[1]).keys() == vars(plain[1]).keys()


def test_a_mixture_reads_the_prior_of_its_first_member():
    torch.manual_seed(0)
    members = [move(mlp("vanilla")).eval() for _ in range(2)]
    with prior(members[0]):
        expected = members[0](X)
    mixture = mix(members)
    with prior(mixture):
        assert torch.equal(mixture(X), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_reads_the_prior_mean(reentrant: bool):
    model = mlp("vi")
    x = X.clone().requires_grad_()

    def gradient(run):
        with prior(model):
            out = run(x)
        return torch.autograd.grad(out.sum(), x)[0] if not reentrant else (out.sum().backward(), x.grad)[1].clone()

    expected = gradient(model)
    x.grad = None
    assert torch.equal(gradient(lambda x: checkpoint(model, x, use_reentrant=reentrant)), expected)


def test_compiled_code_reads_it():
    model = bayesify(convolutions(), "vi")
    model.train()(IMAGES + 3)
    move(model).eval()
    compiled = torch.compile(model, backend="eager")
    with prior(model):
        expected = model(IMAGES)
        assert torch.equal(compiled(IMAGES), expected)
    assert torch.equal(compiled(IMAGES), model(IMAGES))
    with prior(model):
        assert torch.equal(compiled(IMAGES), expected)
