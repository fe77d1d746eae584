"""What a prediction reads: inputs that a model writes to, labels that its own loss shifts, data that varies."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import active, bayesify, fit_novelty, mix, predict
from bayesify.prediction.batches import IGNORED

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Writes(nn.Module):
    """Scales its inputs in place, and what else it is given."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, cache=None):
        if cache is not None:
            cache.seen.append(1)
            x.add_(len(cache.seen) - 1)
        return self.head(x.mul_(2))


class Language(nn.Module):
    """A tiny language model: logits about the next token or about the same one, and a loss that says which."""

    def __init__(self, shifts):
        super().__init__()
        self.shifts = shifts
        self.embed, self.head = nn.Embedding(7, 8), nn.Linear(8, 7)

    def forward(self, input_ids, labels=None):
        logits, loss = self.head(self.embed(input_ids)), None
        if labels is not None:
            some, truth = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
            loss = F.cross_entropy(some.flatten(0, 1), truth.flatten(), ignore_index=IGNORED)
        return SimpleNamespace(logits=logits, loss=loss)


def wide(model):
    torch.manual_seed(0)
    return bayesify(model, "vi", prior_sig=1.0, init_sig=0.5)


@pytest.mark.parametrize("data", [X, [X], [X[:2], X[2:]], [{"x": X}], ((x,) for x in (X[:2], X[2:]))])
def test_every_sample_sees_the_inputs_as_they_were(data):
    kept, model = X.clone(), wide(Writes())
    found = predict(model, data, samples=5, seed=3)
    expected = predict(model.head, [2 * kept], samples=5, seed=3)
    assert torch.equal(X, kept)
    torch.testing.assert_close(found.logits, expected.logits)


def test_objects_in_a_batch_are_copied_too():
    model, cache = wide(Writes()), SimpleNamespace(seen=[])
    found = predict(model, {"x": X, "cache": cache}, samples=3, seed=0)
    assert not cache.seen
    torch.testing.assert_close(found.logits, predict(model, X, samples=3, seed=0).logits)


def test_features_leave_the_data_alone():
    kept = X.clone()
    active.features(wide(Writes()), [X])
    assert torch.equal(X, kept)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("samples", [0, 3])
def test_labels_stand_where_the_models_own_loss_puts_them(shifts, samples):
    model = wide(Language(shifts))
    ids = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.rand(5, 6, generator=torch.Generator().manual_seed(2)) < 0.3, IGNORED)
    found = predict(model, {"input_ids": ids, "labels": labels}, samples=samples, seed=0)
    p = found.probs[:, :-1].flatten(0, 1) if shifts else found.probs.flatten(0, 1)
    truth = (labels[:, 1:] if shifts else labels).flatten()
    exact = F.nll_loss(p.log(), truth, ignore_index=IGNORED)
    assert found.scores["nll"] == pytest.approx(float(exact), rel=1e-12)
    assert found.labels.shape == labels.shape


def test_a_batch_without_labels_that_count_does_not_settle_the_places():
    model, ids = wide(Language(True)), torch.arange(6).view(1, 6)
    batches = [{"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}, {"input_ids": ids, "labels": ids}]
    found = predict(model, batches, samples=0)
    assert found.labels[1].tolist() == [1, 2, 3, 4, 5, IGNORED]


def test_labels_beside_the_inputs_stay_in_their_places():
    model, ids = wide(Language(True)), torch.arange(6).view(1, 6)
    for data in ([(ids, ids)], [({"input_ids": ids}, ids)]):
        assert torch.equal(predict(model, data, samples=0).labels, ids)


@pytest.mark.parametrize("task", ["classification", "regression", "multilabel"])
def test_weights_that_are_not_finite_are_named(task):
    model = bayesify(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "vi")
    with torch.no_grad():
        model[1].parametrizations.weight.original[0, 1] = float("nan")
    why = r"'1.weight' is the first parameter that is not finite.*lower learning rate"
    with pytest.warns(UserWarning, match="not finite, '1.weight' first"), pytest.raises(ValueError, match=why):
        predict(model, X, samples=2, task=task)


def test_the_package_itself_can_be_called():
    import bayesify as package

    model = nn.Linear(3, 2)
    assert package(model, "vi") is model
    assert package.samples is not None and "bayesify" in dir(package)


def test_a_frozen_adapters_error_names_is_trainable():
    model = nn.Module()
    model.lora_A = nn.Linear(3, 2).requires_grad_(False)
    wrapped = nn.ModuleDict({"base": model})
    with pytest.raises(ValueError, match="is_trainable=True"):
        bayesify(wrapped, "vi")


class Streams(nn.Module):
    """Adds what it has seen so far, as a buffer or as an attribute."""

    def __init__(self):
        super().__init__()
        self.head, self.seen = nn.Linear(3, 2), 0.0
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.seen = self.seen + x.mean()
        self.total.add_(x.mean(0))
        return self.head(x + self.seen + self.total)


@pytest.mark.parametrize("once", [False, True])
def test_no_sample_sees_what_a_model_remembers_of_another(once):
    model, batches = wide(Streams()), [X[:2], X[2:]]
    found = predict(model, iter(batches) if once else batches, samples=4, seed=2)
    expected, seen, total = [], 0.0, torch.zeros(3)
    for batch in batches:
        seen, total = seen + batch.mean(), total + batch.mean(0)
        expected.append(batch + seen + total)
    torch.testing.assert_close(found.logits, predict(model.head, expected, samples=4, seed=2).logits)
    assert model.seen == 0.0
    assert not model.total.any()


class Augmented(torch.utils.data.Dataset):
    """Examples with noise that is new at every reading."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)
        self.read = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.read += 1
        return (X[i] + torch.randn(3, generator=self.generator),)


@pytest.mark.parametrize("members", [1, 2])
def test_random_augmentation_is_no_epistemic_uncertainty(members):
    point = nn.Linear(3, 2)
    models = [bayesify(copy.deepcopy(point), "vi", init_sig=1e-7) for _ in range(members)]
    model = mix(models) if members > 1 else models[0]
    found = predict(model, torch.utils.data.DataLoader(Augmented(), batch_size=2), samples=4, seed=0)
    torch.testing.assert_close(found.logits, found.logits[:1].expand(4, 4, 2), atol=1e-4, rtol=0)


def test_random_augmentation_is_no_obstacle_to_novelty():
    model = fit_novelty(wide(nn.Linear(3, 2)), torch.randn(60, 3), held_out=torch.randn(40, 3))
    found = predict(model, torch.utils.data.DataLoader(Augmented(), batch_size=2), samples=0)
    assert found.novelty_pvalue.shape == (4,)


def test_data_that_stays_the_same_is_read_once_per_sample():
    model, loader = wide(nn.Linear(3, 2)), torch.utils.data.DataLoader([(x,) for x in X], batch_size=2)
    torch.testing.assert_close(predict(model, loader, 3, seed=1).logits, predict(model, X, 3, seed=1).logits)


def test_the_class_dimension_of_sequences_is_the_one_that_the_labels_lack():
    model, x = wide(nn.Conv1d(2, 3, 1)), torch.randn(4, 2, 20)
    labels = torch.randint(3, (4, 20))
    found = predict(model, [(x, labels)], samples=2, seed=0)
    assert found.probs.shape == (4, 20, 3)
    moved = predict(nn.Sequential(nn.Linear(20, 20)), [(torch.randn(4, 3, 20), torch.randint(20, (4, 3)))])
    assert moved.probs.shape == (4, 3, 20)
    for data in (x, [(torch.randn(4, 2, 3), torch.randint(3, (4, 3)))]):
        with pytest.raises(ValueError, match=r"may have their classes second.*task='tokens'"):
            predict(model, data, samples=2)
    assert predict(model, x, samples=2, task="tokens").probs.shape == (4, 3, 20)
