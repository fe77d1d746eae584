"""What is not a batch, or could be read in two ways, is told in words that name the fix."""

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import bayesify, metrics, predict
from bayesify.prediction.batches import as_batches

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 2
AMBIGUOUS = {
    "float labels of the inputs' shape": (X, X.clone()),
    "integer labels": (X, Y),
    "float labels": (X, Y.float()),
    "a column of labels": (X, torch.ones(4, 1)),
    "arrays": (X.numpy(), Y.numpy()),
    "a list of inputs and labels": [X, Y],
    "a list of inputs and float labels": [X, Y.float()],
    "nothing": (X[:0], Y[:0]),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return bayesify(nn.Linear(3, 3), "vi")


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("data", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_two_tensors_of_one_length_are_not_guessed_at(model, data, task):
    with pytest.raises(ValueError, match=r"two tensors of one length.*pass \[\(inputs, labels\)\]"):
        predict(model, data, task=task)


def test_what_can_be_read_in_one_way_only_is_read(model):
    assert len(predict(model, [(X, X)], task="regression")) == 4
    assert len(predict(model, [X, X])) == 8
    assert len(predict(model, (X, X[:2]))) == 6
    assert len(predict(model, (X, X, X))) == 12
    assert len(as_batches({"x": X})) == len(as_batches(X)) == len(as_batches("text")) == 1


WRONG = {
    "an array": (X.numpy(), "of ndarray; pass torch.from_numpy"),
    "arrays in a list": ([X.numpy()], "of ndarray; pass torch.from_numpy"),
    "arrays with labels": ([(X.numpy(), Y)], "of ndarray; pass torch.from_numpy"),
    "arrays in a dict": ({"input": X.numpy()}, "of ndarray; pass torch.from_numpy"),
    "texts": (["a", "b"], "of str; tokenize the texts"),
    "a text": ("a", "of str; tokenize the texts"),
    "texts with labels": ([(["a", "b"], Y[:2])], "of str; tokenize the texts"),
    "numbers": ([1.0, 2.0], "of float; pass a tensor"),
    "None": ([None], "of NoneType; pass a tensor"),
    "names as labels": ([(X, ["cat"] * 4)], "labels must be numbers, got .'cat'"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_arrays_and_texts_say_how_they_are_passed(model, data, message):
    with pytest.raises(TypeError, match=message):
        predict(model, data)


def test_a_model_that_takes_texts_gets_them():
    class Reader(nn.Linear):
        def forward(self, text):
            return super().forward(torch.full((1, 3), float(len(text))))

    assert len(predict(bayesify(Reader(3, 2)), ["a", "bcd"])) == 2


def test_an_error_inside_the_model_stays_what_it_is(model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        predict(model, torch.ones(4, 5))


def test_labels_that_some_batches_lack_are_not_dropped(model):
    with pytest.raises(ValueError, match="1 of 2 batches have no labels"):
        predict(model, [(X, Y), X])
    assert predict(model, [(X, Y.numpy()), (X, Y.tolist())]).labels.tolist() == [*Y.tolist(), *Y.tolist()]


def test_metrics_say_what_is_missing(model):
    found = predict(model, X)
    with pytest.raises(TypeError, match=r"labels must be a tensor.*got NoneType; the data had none: give predict"):
        metrics.nll(found.probs, found.labels)
    with pytest.raises(TypeError, match=r"targets must be a tensor.*the data had none"):
        metrics.gaussian_nll(found.probs, found.probs, None)
    with pytest.raises(TypeError, match="got list; number the classes"):
        metrics.error(found.probs, ["cat"] * 4)
    with pytest.raises(TypeError, match="must be integers, got dtype <U3"):
        metrics.error(found.probs, np.array(["cat"] * 4))
