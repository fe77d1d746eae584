"""What newcomers do wrong: one line each, which says what was wrong, what was got, and the way out."""

import pickle
import shutil
from pathlib import Path

import numpy
import pandas
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


class Rows(list):
    """Looks like Hugging Face's Dataset, which can be iterated over, row by row."""

    column_names = ("input_ids", "labels")


# mistake: (what is called with a temporary folder, what was wrong, what was got, the way out)
MISTAKES = {
    "a method by its long name": (
        lambda _: bayesify(network(), "laplace"), "unknown method", "'laplace'", "did you mean 'la'?"),
    "an ensemble by its name": (
        lambda _: bayesify(network(), "deep_ensemble"), "unknown method", "'deep_ensemble'",
        "did you mean 'ensemble'?"),
    "an option by another name": (
        lambda _: bayesify(network(), "vi", prior_sigma=0.1), "unknown option", "'prior_sigma'",
        "did you mean 'prior_sig'?"),
    "a layer that the model does not have": (
        lambda _: bayesify(network(), "vi", include="fc.*"), "matched no parameter", "'fc.*'", "closest: ['0.weight'"),
    "a layer's name without its star": (
        lambda _: bayesify(network(), "vi", include="2"), "matched no parameter", "'2'", "did you mean '2.*'?"),
    "a layer for its name": (
        lambda _: (lambda model: bayesify(model, "vi", include=model[2]))(network()), "include takes names",
        "got a Linear", "pass '2.*'"),
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
        lambda _: SGLD(vi(), 0.1, num_data=6), "SGLD trains models of method 'sgld'", "this one is 'vi'",
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
    "the loader before the model": (
        lambda _: fit_laplace([(X, Y)], bayesify(network(), "la")), "model must be a torch.nn.Module", "got list",
        "pass the model itself"),
    "a fit on a dataset": (
        lambda _: fit_laplace(bayesify(network(), "la"), TensorDataset(X, Y)), "must be a batch or an iterable",
        "got TensorDataset", "wrap it in a DataLoader"),
    "a fit on a bare pair": (
        lambda _: fit_laplace(bayesify(network(), "la"), (X, Y)), "reads as two batches", "a tuple of two tensors",
        "pass [(inputs, labels)]"),
    "classes that begin with one": (
        lambda _: fit_laplace(bayesify(network(), "la"), [(X, Y + 1)]), "labels must be in 0..2", "got 1..3",
        "number the classes from 0"),
    "a column of labels": (
        lambda _: fit_laplace(bayesify(network(), "la"), [(X, Y[:, None])]), "labels must be of shape (6,)",
        "got (6, 1)", "squeeze(1)"),
    "tuning without labels": (
        lambda _: fit_laplace(bayesify(network(), "la"), [(X, Y)], tune=[X]), "tune= needs data with labels",
        "got inputs alone", "pass batches of (inputs, labels)"),
    "an array for a tensor": (
        lambda _: predict(vi(), X.numpy()), "without a tensor", "of ndarray", "torch.from_numpy(array).float()"),
    "texts for tokens": (
        lambda _: predict(vi(), ["a text"]), "without a tensor", "of str", "tokenize the texts first"),
    "a data frame": (
        lambda _: predict(vi(), pandas.DataFrame(X.numpy())), "must be a batch or an iterable of batches",
        "got DataFrame", "torch.tensor(frame.to_numpy()).float()"),
    "rows of a Hugging Face dataset": (
        lambda _: predict(vi(), Rows()), "must be a batch or an iterable of batches", "got Rows",
        "wrap it in a DataLoader"),
    "token ids that are no tensors": (
        lambda _: predict(vi(), [{"input": [1, 2, 3, 4], "labels": 1}]), "without a tensor", "of int",
        "a DataLoader, whose collate_fn makes tensors"),
    "label for labels": (
        lambda _: predict(vi(), [{"input": X, "label": Y}]), "takes no 'label'", "which the batches hold",
        "call their labels 'labels'"),
    "labels beside the data": (
        lambda _: predict(vi(), X, Y), "samples must be an integer", "got a Tensor", "[(inputs, labels)]"),
    "one example without a batch": (
        lambda _: predict(vi(), X[0]), "at least two logits", "shape (3,)", "x.unsqueeze(0)"),
    "a dataset for a loader": (
        lambda _: predict(vi(), TensorDataset(X, Y)), "must be a batch or an iterable of batches", "got TensorDataset",
        "wrap it in a DataLoader"),
    "inputs and labels as a bare pair": (
        lambda _: predict(vi(), (X, Y)), "reads as two batches", "a tuple of two tensors", "pass [(inputs, labels)]"),
    "one logit for two classes": (
        lambda _: predict(bayesify(nn.Linear(4, 1), "vi"), X), "at least two logits", "shape (6, 1)",
        "task='multilabel' for a yes or no"),
    "probabilities out of the model": (
        lambda _: predict(nn.Sequential(network(), nn.Softmax(1)), X), "look like probabilities", "sum to one",
        "let the model return logits"),
    "the prediction for an array": (
        lambda _: numpy.asarray(prediction()), "is no array", "but several", "pass its .probs"),
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
    "percents for a risk": (
        lambda _: metrics.abstain_threshold(prediction().probs, Y, max_risk=10), "max_risk must be between 0 and 1",
        "got 10", "is 0.1"),
    "percents for a confidence": (
        lambda _: prediction().select(80), "threshold must be between 0 and 1", "got 80", "is 0.8"),
    "one prediction for two": (
        lambda _: plots.before_after(prediction(), prediction(), ood=prediction()), "ood must be a pair",
        "got Predictive", "predict with both"),
    "the prediction for its probabilities": (
        lambda _: plots.reliability_diagram(prediction(), Y), "probs must be a tensor", "got Predictive",
        "pass its .probs"),
    "pickle": (
        lambda _: pickle.dumps(vi()), "cannot be pickled", "a bayesified model", "bayesify.save and load"),
    "a plain state dict": (
        lambda _: vi().load_state_dict(network().state_dict()), "the state dict of a plain model", "it has '0.weight'",
        "load it before bayesify(model)"),
    "the folder before the model": (
        lambda folder: save(folder, vi()), "model must be a torch.nn.Module", "Path; ", "pass the model itself"),
    "a file for a folder": (
        lambda folder: save(vi(), Path(shutil.copy(__file__, folder))), "dir must be a folder", "got the file",
        "give the name of a folder"),
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
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError, UserWarning)) as caught:
        call(tmp_path)
    message = str(caught.value)
    assert all(part in message for part in (wrong, got, way_out)), message
    assert "\n" not in message
