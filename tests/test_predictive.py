"""What a prediction holds: labels, classes and examples of every shape, and ensembles made by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from bayesify import bayesify, fit_laplace, metrics, predict
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.predictive import Predictive


def test_double_outputs_stay_double():
    model, x = bayesify(nn.Linear(3, 2).double(), "vi"), torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        wanted = model.eval()(x)
    assert torch.equal(predict(model, x, samples=0).logits[0], wanted)
    assert torch.equal(predict(model, x, samples=0, task="regression").outputs[0], wanted)


def test_labels_of_other_classes_can_be_printed():
    model = bayesify(nn.Linear(3, 2))
    out = predict(model, [(torch.randn(4, 3), torch.tensor([0, 1, 2, 7]))], samples=2)
    assert "labels that do not fit" in repr(out)


def test_regression_errors_for_labels_without_the_last_dimension():
    out = predict(bayesify(nn.Linear(3, 1)), [(torch.randn(4, 3), torch.randn(4))], samples=2, task="regression")
    assert "rmse" in repr(out)


def test_a_dataset_is_not_a_loader():
    class Rows:
        def __getitem__(self, i):
            return i

        __iter__ = None

    with pytest.raises(TypeError, match="got Rows; wrap it in a DataLoader"):
        predict(bayesify(nn.Linear(3, 1)), Rows())


class Given(nn.Module):
    """Return its input, as if it were the model's output."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.fixture
def given():
    return bayesify(Given(), "vi", init_sig=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_output_that_is_no_number_is_not_certain(given, value):
    outputs = torch.randn(4, 3)
    outputs[0, 1] = value
    out = predict(given, [(outputs, torch.zeros(4, dtype=torch.long))], samples=2, seed=0)
    assert out.entropy.isnan().tolist() == [True, False, False, False]
    assert out.mutual_information[0].isnan()
    assert "outputs that are not finite" in repr(out)
    assert repr(out[1:]).count("nll") == 1


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 3, 5, 6), (2, 4, 4, 4, 4)])
def test_classes_come_second_in_images_and_volumes(given, shape):
    outputs = torch.randn(shape)
    labels = torch.randint(4, (shape[0], *shape[2:]))
    out = predict(given, [(outputs, labels)], samples=0)
    assert out.scores["nll"] == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_of_any_integer_type(given, dtype):
    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    expected = predict(given, [(outputs, labels)], samples=0).scores
    assert predict(given, [(outputs, labels.to(dtype))], samples=0).scores == expected


@pytest.mark.parametrize("index", [2, -3, torch.tensor(2), np.int64(2), np.array(2)])
def test_one_example_keeps_its_dimension(given, index):
    for task in ("classification", "regression"):
        out = predict(given, [(torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0]))], samples=0, task=task)
        one = out[index]
        assert len(one) == 1 and one.labels.tolist() == [2]


def test_a_mask_of_examples(given):
    out = predict(given, [(torch.randn(3, 2), torch.tensor([0, 1, 1]))], samples=0)
    mask = torch.tensor([True, False, True])
    assert len(out[mask]) == len(out[mask.numpy()]) == len(out[[0, 2]]) == 2


def test_labels_are_as_many_as_examples(given):
    with pytest.raises(ValueError, match="there are 3 labels for 4 examples"):
        predict(given, [(torch.randn(4, 2), torch.zeros(3, dtype=torch.long))], samples=0)
    different = [(torch.randn(2, 2), torch.zeros(2, 3)), (torch.randn(2, 2), torch.zeros(2, 4))]
    with pytest.raises(ValueError, match="batches give labels of different shapes"):
        predict(given, different, samples=0)


def test_an_ensemble_made_by_hand_is_the_average_of_its_members():
    logits = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    out = Predictive.from_logits(list(logits.numpy()), labels.numpy())
    torch.testing.assert_close(out.probs, logits.double().softmax(-1).mean(0))
    each = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(out.expected_entropy, each.entropy().mean(0))
    assert out.num_samples == 4 and set(out.scores) == {"error", "nll", "ece"}
    assert Predictive.from_logits(logits[0]).num_samples == 0
    torch.testing.assert_close(Predictive.from_logits(out.logits).log_probs, out.log_probs)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(4), None, "stack equal shapes, classes last"),
        (torch.zeros(2, 3, 1), None, "two classes or more"),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], None, r"got \[\(3, 2\), \(4, 2\)\]"),
        ([], None, "or \\(N, K\\) of one model"),
        (torch.zeros(2, 3, 2), [0, 1], "2 labels for 3 examples"),
    ],
)
def test_what_is_no_ensemble(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        Predictive.from_logits(logits, labels)


def test_a_temperature_divides_every_samples_logits():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 50, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (50,), generator=generator)
    found = Predictive.from_logits(logits, labels)
    temperature = metrics.fit_temperature(found)
    tempered = found.tempered(temperature)
    each = torch.softmax(logits / float(temperature), -1)
    torch.testing.assert_close(tempered.probs, each.mean(0))
    torch.testing.assert_close(tempered.expected_entropy, torch.distributions.Categorical(each).entropy().mean(0))
    assert tempered.scores["nll"] == pytest.approx(temperature.nll) and temperature.nll < found.scores["nll"]
    assert tempered.num_samples == 4 and torch.equal(tempered.labels, labels)
    torch.testing.assert_close(found.tempered(1.0).log_probs, found.log_probs)


def test_a_temperature_for_tokens_and_for_the_mean():
    model = bayesify(nn.Linear(3, 2), "vi")
    found = predict(model, torch.randn(4, 5, 3), samples=0, task="tokens")
    tempered = found.tempered(2.0)
    assert tempered.num_samples == 0 and tempered.method == "vi" and tempered.log_probs.shape == (4, 5, 2)
    torch.testing.assert_close(tempered.log_probs, torch.log_softmax(found.logits[0].double() / 2, -1))


def test_what_cannot_be_tempered():
    model, x = bayesify(nn.Linear(3, 2), "la"), torch.randn(20, 3)
    with pytest.raises(ValueError, match="keep_samples=True"):
        predict(bayesify(nn.Linear(3, 2), "vi"), x, samples=2, keep_samples=False).tempered(2.0)
    fit_laplace(model, [(x, torch.arange(20) % 2)])
    with pytest.raises(ValueError, match="predict with samples="):
        predict(model, x).tempered(2.0)
    with pytest.raises(ValueError, match="positive and finite, got -1"):
        predict(model, x, samples=2).tempered(-1.0)


@pytest.mark.parametrize(("classes", "spread"), [(2, 25.0), (10, 4.0), (1000, 400.0)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_information_of_gaussian_logits_is_that_of_many_draws(classes, spread, turned):
    """Of 100,000, or 20,000 of 1,000 classes, where 8 draws would give log 8 = 2.08 for 5.8 and 6.6."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(1, classes, generator=generator)
    q = 2 * spread * torch.rand(1, classes, generator=generator)
    basis = torch.linalg.qr(torch.randn(classes, classes, generator=generator))[0] if turned else None
    total, entropy, count = torch.zeros(classes, dtype=torch.float64), 0.0, 20_000 if classes == 1000 else 100_000
    for _ in range(count // 10_000):
        away = q.sqrt() * torch.randn(10_000, classes, generator=generator)
        p = (mean + (away if basis is None else away @ basis.T)).softmax(-1)
        total += p.double().sum(0)
        entropy -= float(torch.special.xlogy(p, p).double().sum())
    average = total / count
    exact = float(-torch.special.xlogy(average, average).sum()) - entropy / count
    found = float(GaussianLogits(mean, q, basis).mutual_information())
    assert found == pytest.approx(exact, rel=0.04 if classes == 1000 else 0.01)
