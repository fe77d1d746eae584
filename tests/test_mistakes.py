"""What newcomers do wrong: one line each, which says what was wrong, what was got, and the way out."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayesify import SGLD, bayesify, fit_laplace, load, metrics, param_groups, penalty, plots, predict, save

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def vi():
    return bayesify(network(), "vi")


def prediction():
    return predict(vi(), [(X, Y)], samples=2, seed=0)


def into_another_model(folder):
    save(vi(), folder)
    load(nn.Linear(4, 3), folder)


# mistake: (what is called with a temporary folder, what was wrong, what was got, the way out)
MISTAKES = {
    "a method by its long name": (
        lambda _: bayesify(network(), "laplace"), "unknown method", "'laplace'", "did you mean 'la'?"),
    "an option by another name": (
        lambda _: bayesify(network(), "vi", prior_sigma=0.1), "unknown option", "'prior_sigma'",
        "did you mean 'prior_sig'?"),
    "a layer that the model does not have": (
        lambda _: bayesify(network(), "vi", include="fc.*"), "matched no parameter", "'fc.*'", "closest: ['0.weight'"),
    "bayesify twice": (
        lambda _: bayesify(vi(), "vi"), "bayesified", "already", "call unbayesify(model) first"),
    "the class for the model": (
        lambda _: bayesify(nn.Linear, "vi"), "must be a torch.nn.Module", "got the class Linear",
        "pass the model itself"),
    "everything frozen": (
        lambda _: bayesify(network().requires_grad_(False), "vi"), "no parameter is left", "(frozen)",
        "requires_grad_(True)"),
    "the penalty of a plain model": (
        lambda _: penalty(network(), 10), "no posteriors", "Sequential", "call bayesify(model, ...) first"),
    "the loader for the number of data": (
        lambda _: penalty(vi(), DataLoader(TensorDataset(X), 4)), "num_data must be a positive number",
        "got a DataLoader", "pass len(loader.dataset), 6"),
    "the head's rate without a head": (
        lambda _: param_groups(vi(), 0.1, lr_head=1.0), "lr_head needs head=", "lr_head", "the module that it is for"),
    "the sampler on another method": (
        lambda _: SGLD(vi(), 0.1, num_data=6), "SGLD samples models of method 'sgld'", "this one is 'vi'",
        "bayesify(model, 'sgld')"),
    "samples before the fit": (
        lambda _: predict(bayesify(network(), "la"), X), "cannot be sampled yet", "has not been fitted",
        "call bayesify.fit_laplace(model, loader)"),
    "samples before the chain": (
        lambda _: predict(bayesify(network(), "sgld"), X), "cannot be sampled yet", "no moments",
        "step bayesify.SGLD beyond"),
    "a fit without labels": (
        lambda _: fit_laplace(bayesify(network(), "la"), [X]), "no labels", "the loader gives",
        "yield (inputs, labels)"),
    "tuning without labels": (
        lambda _: fit_laplace(bayesify(network(), "la"), [(X, Y)], tune=[X]), "tune= needs data with labels",
        "got inputs alone", "pass batches of (inputs, labels)"),
    "an array for a tensor": (
        lambda _: predict(vi(), X.numpy()), "without a tensor", "of ndarray", "torch.from_numpy(array).float()"),
    "texts for tokens": (
        lambda _: predict(vi(), ["a text"]), "without a tensor", "of str", "tokenize the texts first"),
    "a dataset for a loader": (
        lambda _: predict(vi(), TensorDataset(X, Y)), "must be a batch or an iterable of batches", "got TensorDataset",
        "wrap it in a DataLoader"),
    "inputs and labels as a bare pair": (
        lambda _: predict(vi(), (X, Y)), "reads as two batches", "a tuple of two tensors", "pass [(inputs, labels)]"),
    "one logit for two classes": (
        lambda _: predict(bayesify(nn.Linear(4, 1), "vi"), X), "at least two logits", "shape (6, 1)",
        "task='multilabel' for a yes or no"),
    "logits for probabilities": (
        lambda _: metrics.nll(prediction().logits[0], Y), "must lie in [0, 1]", "got values from", "softmax first"),
    "probabilities for logits": (
        lambda _: metrics.fit_temperature(prediction().probs, Y), "logits must be", "got rows between 0 and",
        "pass the .logits"),
    "one-hot labels": (
        lambda _: metrics.ece(prediction().probs, torch.eye(3)[Y]), "labels must be integers",
        "got dtype torch.float32", "argmax(1)"),
    "no labels at all": (
        lambda _: metrics.ece(prediction().probs, None), "labels must be a tensor", "got NoneType",
        "give predict batches of (inputs, labels)"),
    "the prediction for its probabilities": (
        lambda _: plots.reliability_diagram(prediction(), Y), "probs must be a tensor", "got Predictive",
        "pass its .probs"),
    "pickle": (
        lambda _: pickle.dumps(vi()), "cannot be pickled", "a bayesified model", "bayesify.save and load"),
    "a plain state dict": (
        lambda _: vi().load_state_dict(network().state_dict()), "the state dict of a plain model", "it has '0.weight'",
        "load it before bayesify(model)"),
    "another architecture": (
        into_another_model, "does not fit the model", "only in the file: ['0.bias'",
        "build the model as it was when it was saved"),
    "a folder that is not there": (
        lambda folder: load(network(), folder / "no"), "there is no", "posterior.safetensors",
        "give the folder that bayesify.save wrote"),
    "an assigned weight": (
        lambda _: setattr(vi()[0], "weight", nn.Parameter(torch.zeros(8, 4))), "cannot be assigned", "'weight'",
        "original.copy_(value)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_with_the_way_out(mistake, tmp_path):
    call, wrong, got, way_out = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError)) as caught:
        call(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in (wrong, got, way_out)), message
    assert "\n" not in message
