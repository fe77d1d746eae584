"""`predict`: averages over draws, any order and size of batches, every kind of output."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from bayesify import bayesify, metrics, predict, sample, samples
from bayesify.core import sampling


@pytest.fixture
def model():
    torch.manual_seed(0)
    return bayesify(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)), "vi", init_sig=0.3)


@pytest.fixture
def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(23, 4), torch.randint(3, (23,)))


def logits_by_hand(model, x, n, seed):
    model.eval()
    with torch.no_grad():
        return torch.stack([model(x) for _ in samples(model, n, seed)])


def test_average_is_of_probabilities(model, data):
    x, y = data.tensors
    out = predict(model, [(x, y)], samples=7, seed=3)
    logits = logits_by_hand(model, x, 7, 3)
    probs = logits.double().softmax(-1)
    torch.testing.assert_close(out.logits, logits, rtol=0, atol=0)
    torch.testing.assert_close(out.probs, probs.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.expected_entropy, -(probs * probs.log()).sum(-1).mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.confidence, probs.mean(0).amax(-1))
    assert out.scores["nll"] == pytest.approx(metrics.nll(out.probs, y), rel=1e-9)
    assert torch.equal(out.labels, y)


def test_averages_survive_logits_that_underflow(model):
    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2000.0, 0.0]))

        def forward(self, x):
            return x * self.scale

    out = predict(
        bayesify(Sure(), "vi", prior_sig=1.0), [(torch.ones(3, 1), torch.tensor([1, 1, 1]))], samples=4, seed=0
    )
    assert out.scores["nll"] == pytest.approx(2000, rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 5, 23])
def test_the_same_models_at_any_batch_size(model, data, batch_size):
    x, _ = data.tensors
    out = predict(model, DataLoader(data, batch_size=batch_size), samples=5, seed=0)
    torch.testing.assert_close(out.logits, logits_by_hand(model, x, 5, 0), rtol=1e-5, atol=1e-5)


class OncePerExample(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize(
    "loader",
    [
        lambda d: DataLoader(d, batch_size=5, shuffle=True),
        lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 5, False)),
        lambda d: DataLoader(OncePerExample(d), batch_size=5),
        lambda d: (b for b in DataLoader(d, batch_size=5)),
        lambda d: iter(DataLoader(d, batch_size=5)),
    ],
    ids=["shuffle", "random batch sampler", "iterable dataset", "generator", "iterator"],
)
def test_data_in_random_order_or_readable_once(model, data, loader):
    ordered = predict(model, DataLoader(data, batch_size=23), samples=5, seed=0)
    out = predict(model, loader(data), samples=5, seed=0)
    assert out.scores == pytest.approx(ordered.scores, rel=1e-5)
    torch.testing.assert_close(out.entropy.sort().values, ordered.entropy.sort().values, rtol=1e-4, atol=1e-6)


def test_draws_are_made_once_per_sample(model, data, monkeypatch):
    made, draw = [], sampling.draw_all
    monkeypatch.setattr(
        sampling, "draw_all", lambda some, *rest: made.extend(p.name for p in some) or draw(some, *rest)
    )
    predict(model, DataLoader(data, batch_size=2), samples=5, seed=0)
    assert len(made) == 5 * 4


def test_zero_samples_is_the_mean_and_none_is_nst(model, data):
    x, _ = data.tensors
    mean = predict(model, x, samples=0)
    torch.testing.assert_close(mean.logits[0], model.eval()(x).detach())
    assert (mean.mutual_information == 0).all()
    assert predict(model, x).num_samples == 5
    assert predict(bayesify(nn.Linear(4, 3), "vanilla"), x).num_samples == 0


def test_uncertainty_adds_up(model, data):
    for n in (1, 2, 9):
        out = predict(model, data.tensors[0], samples=n, seed=2)
        total = out.expected_entropy + out.mutual_information
        torch.testing.assert_close(out.entropy, total, rtol=0, atol=1e-6)
        assert (out.mutual_information >= 0).all()
    assert predict(model, data.tensors[0], samples=1).mutual_information.max() < 1e-6


def test_streaming_gives_the_same_without_the_samples(model, data):
    kept = predict(model, data.tensors[0], samples=5, seed=0)
    streamed = predict(model, data.tensors[0], samples=5, seed=0, keep_samples=False)
    assert streamed.logits is None
    torch.testing.assert_close(streamed.probs, kept.probs)
    torch.testing.assert_close(streamed.mutual_information, kept.mutual_information)


def test_modes_and_generator_are_restored(model, data):
    model.train()
    model[0].eval()
    loader = DataLoader(data, batch_size=5, shuffle=True, generator=torch.Generator())  # else it moves the global one
    state = torch.get_rng_state()
    predict(model, loader, samples=3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model[0].training and model[2].training
    predict(model, loader, samples=3)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randint(2**62, ())
    assert torch.equal(torch.get_rng_state(), after), "an unseeded prediction takes exactly one number"
    with contextlib.suppress(RuntimeError):
        predict(model, torch.ones(2, 9), samples=3)
    assert model.training and not model[0].training


def test_an_outer_block_comes_back(model, data):
    x = data.tensors[0]
    model.eval()
    with sample(model, seed=1), torch.no_grad():
        before = model(x)
        predict(model, x, samples=2, seed=0)
        assert torch.equal(model(x), before)


class Dicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features, scale=1.0):
        return {"logits": self.linear(features) * scale}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, first, second):
        return self.linear(first + second), None


def test_dicts_tuples_and_outputs(data):
    x, y = data.tensors
    out = predict(
        bayesify(Dicts(), "vi"), [{"features": x, "labels": y}, {"features": x[:2], "labels": y[:2]}], samples=2
    )
    assert len(out) == 25 and torch.equal(out.labels, torch.cat([y, y[:2]]))
    assert len(predict(bayesify(Dicts(), "vi"), {"features": x}, samples=2)) == 23
    assert predict(bayesify(Pair(), "vi"), [((x, x), y)], samples=2).labels is not None


def test_segmentation_has_its_classes_second():
    model = bayesify(nn.Conv2d(3, 5, 1), "vi")
    labels = torch.randint(5, (2, 4, 4))
    labels[0, 0] = -100
    out = predict(model, [(torch.randn(2, 3, 4, 4), labels)], samples=2)
    assert out.probs.shape == (2, 4, 4, 5)
    assert 0 <= out.scores["error"] <= 1


def test_regression_moments(data):
    model = bayesify(nn.Linear(4, 2), "vi", init_sig=0.5)
    x = data.tensors[0]
    out = predict(model, [(x, torch.zeros(23, 2))], samples=6, seed=0, task="regression")
    stacked = logits_by_hand(model, x, 6, 0).double()
    torch.testing.assert_close(out.mean, stacked.mean(0))
    torch.testing.assert_close(out.epistemic, stacked.std(0))
    torch.testing.assert_close(out.std, out.epistemic)
    torch.testing.assert_close(out.with_noise(0.25).std, (stacked.var(0) + 0.25).sqrt())
    assert "rmse" in repr(out) and len(out[:3]) == 3
    assert set(out.numpy()) == {"mean", "std", "epistemic", "aleatoric", "outputs", "labels"}
    assert float(predict(model, x, samples=1, task="regression").std.max()) == 0
    with pytest.raises(ValueError, match="noise_var must be"):
        out.with_noise(-1.0)


def test_slicing_numpy_and_repr(model, data):
    out = predict(model, DataLoader(data, batch_size=5), samples=2, seed=0)
    part = out[3:7]
    assert len(part) == 4 and part.logits.shape == (2, 4, 3) and torch.equal(part.labels, out.labels[3:7])
    assert len(out[-1]) == 1 and torch.equal(out[-1].probs, out.probs[-1:])
    assert len(out[out.entropy > out.entropy.median()]) < len(out)
    assert out.numpy()["probs"].shape == (23, 3)
    assert "error" in repr(out) and "nll" in repr(out) and "ece" in repr(out)
    assert "error" not in repr(predict(model, data.tensors[0], samples=2))


def test_progress_bar(model, data, capsys):
    predict(model, DataLoader(data, batch_size=5), samples=2, progress=True)
    assert "10/10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: predict(m, []), ValueError, "no batches"),
        (lambda m: predict(m, 3), TypeError, "data must be a batch"),
        (lambda m: predict(m, torch.ones(2, 4), samples=-1), ValueError, "samples must be"),
        (lambda m: predict(m, torch.ones(2, 4), samples=2, seed="x"), TypeError, "seed must be"),
        (lambda m: predict(m, torch.ones(2, 4), task="ranking"), ValueError, "task must be one of"),
        (lambda m: predict(m, [(1, 2, 3)]), ValueError, r"\(inputs,\) or \(inputs, labels\)"),
        (lambda m: predict(m, (torch.ones(2, 4), torch.zeros(2).long())), ValueError, r"pass \[\(inputs, labels\)\]"),
        (lambda m: predict(bayesify(nn.Linear(4, 1)), torch.ones(2, 4)), ValueError, "at least two logits"),
        (
            lambda m: predict(bayesify(nn.LSTM(4, 2)), [torch.ones(2, 4, 4), torch.ones(2, 3, 4)]),
            ValueError,
            "different shapes",
        ),
    ],
)
def test_errors(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


def test_output_without_logits():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return {"nothing": x * self.w}

    with pytest.raises(TypeError, match="no logits found"):
        predict(bayesify(Odd()), torch.ones(2, 2))


def test_examples_end(model, data):
    out = predict(model, data.tensors[0], samples=2, seed=0)
    assert len(list(out)) == len(out)
    assert len(out[-1]) == 1
    with pytest.raises(IndexError, match=f"index {len(out)} is out of bounds .* size {len(out)}"):
        out[len(out)]


def test_integers_of_numpy_are_integers(model, data):
    x, _ = data.tensors
    expected = predict(model, x, samples=3, seed=1).logits
    assert torch.equal(predict(model, x, samples=np.int64(3), seed=np.int64(1)).logits, expected)


def test_the_posterior_of_a_plain_model_is_a_point(data):
    x, y = data.tensors
    plain = nn.Linear(4, 3).train()
    found = predict(plain, [(x, y)])
    assert found.num_samples == 0
    assert plain.training
    with torch.no_grad():
        torch.testing.assert_close(found.logits[0], plain(x))
    assert float(found.mutual_information.max()) == pytest.approx(0, abs=1e-12)
    assert torch.equal(predict(plain, x, samples=5).probs, found.probs)
    assert predict(plain, x, task="regression").mean.shape == (len(x), 3)


def test_a_temperature_is_fitted_to_a_prediction(data):
    x, y = data.tensors
    plain = nn.Linear(4, 3)
    found = predict(plain, [(x, y)])
    by_hand = metrics.fit_temperature(found.logits, found.labels)
    assert metrics.fit_temperature(found) == by_hand
    assert metrics.fit_temperature(found, found.labels) == by_hand
    with pytest.raises(ValueError, match="keep_samples=True"):
        metrics.fit_temperature(predict(plain, [(x, y)], keep_samples=False))
    with pytest.raises(ValueError, match="fitted to labels"):
        metrics.fit_temperature(predict(plain, x))
