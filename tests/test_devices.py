"""Other devices than the CPU: no float64 there, which not all of them have, and no waiting for a number in training."""

import pytest
import torch
from accelerator import NAME, Accelerator
from torch import nn
from torch.nn import functional as F

from bayesify import (
    IVON,
    SGLD,
    bayesify,
    calibrate,
    fit_laplace,
    fit_novelty,
    load,
    mean,
    mix,
    named_posteriors,
    param_groups,
    penalty,
    predict,
    save,
    unbayesify,
)
from bayesify.cli.check import Counting

WORDS = torch.tensor([0, 1, 2, 3, 4, 2, 1])
LABELS = torch.tensor([0, 1, 2, 3, 0, 2, 1])
VALUES = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
OPTIMIZERS = {
    "sgld": lambda m: SGLD(m, 0.01, num_data=10, momentum=0.5),
    "ivon": lambda m: IVON(m, 0.01, num_data=10),
}


@pytest.fixture
def accelerator():
    with Accelerator():
        yield


def words_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 4))


class Image(nn.Module):
    """A convolution, a normalization and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Linear(12, 4)

    def forward(self, x):
        """Return four outputs."""
        return self.head(self.norm(self.conv(x)).flatten(1))


def on_it(model: nn.Module, method: str, **options) -> nn.Module:
    return bayesify(model, method, **options).to(NAME)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, words, labels, steps: int = 3) -> nn.Module:
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(words), labels) + penalty(model, 10)).backward()
        optimizer.step()
    return model


@pytest.mark.usefixtures("accelerator")
def test_the_accelerator_has_numbers_and_no_float64():
    ones = torch.ones(3, 2, device=NAME)
    assert ones.is_meta
    assert (ones + 1).sum().item() == 12
    assert ones[0].cpu().tolist() == [1, 1]
    with pytest.raises(AssertionError, match="off the CPU"):
        ones.double()
    with pytest.raises(RuntimeError, match="two devices"):
        ones + torch.ones(2)


@pytest.mark.parametrize("prior_mean", [None, "zero"])
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla", "sgld", "la", "swag"])
def test_training_waits_for_nothing(method, prior_mean):
    # The true device "meta" has no numbers, and raises where one is asked for.
    model = on_it(words_model(), method, prior_sig=0.1, prior_mean=prior_mean)
    (model(WORDS.to(NAME)).sum() + penalty(model, 10)).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("prior_sig", [None, 0.1])
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla", "sgld", "swag", "ivon"])
def test_training_and_prediction_make_no_float64_off_the_cpu_and_agree_with_the_cpu(method, prior_sig):
    options = {"prior_sig": prior_sig, **({"thin": 1} if method == "sgld" else {})}
    found = []
    for device in ("cpu", NAME):
        torch.manual_seed(0)
        model = bayesify(words_model(), method, **options).to(device)
        optimizer = OPTIMIZERS.get(method, lambda m: torch.optim.SGD(param_groups(m, 0.01), lr=0.01))(model)
        trained(model, optimizer, WORDS.to(device), LABELS.to(device))
        ready = method not in ("vanilla", "swag")
        found.append(predict(model, WORDS.to(device), 3 if ready else 0, seed=0).probs)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


class Split(nn.Module):
    """A network whose second half lies on another device."""

    def __init__(self, other: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.other = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 4), other

    def forward(self, words):
        """Return four outputs."""
        return self.head(self.words(words).to(self.other))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("method", ["vi", "mc_dropout", "vanilla", "sgld", "la", "swag", "ivon"])
def test_a_model_on_two_devices_trains_as_on_one(method):
    found = []
    for other in ("cpu", NAME):
        model = bayesify(Split(other), method)
        model.head.to(other)
        optimizer = OPTIMIZERS.get(method, lambda m: torch.optim.SGD(param_groups(m, 0.01), lr=0.01))(model)
        torch.manual_seed(1)
        trained(model, optimizer, WORDS, LABELS.to(other))
        found.append({n: q.mean.cpu() for n, q in named_posteriors(model)})
        found[-1].update({n + ".std": q.std.cpu() for n, q in named_posteriors(model)})
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("task", ["classification", "regression", "heteroscedastic", "multilabel"])
def test_predict_makes_no_float64_off_the_cpu(task, samples):
    model = on_it(words_model(), "vi")
    assert len(predict(model, WORDS.to(NAME), samples, task=task)) == 7


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("strange", [False, True])
@pytest.mark.parametrize(("method", "samples"), [("vi", 0), ("vi", 5), ("mc_dropout", 5), ("la", None)])
def test_a_prediction_waits_for_the_outputs_of_all_its_small_batches_at_once(method, samples, strange):
    words = WORDS.to(NAME)
    model = on_it(words_model(), method)
    if method == "la":
        fit_laplace(model, [(words, LABELS.to(NAME))], include="1.*")
    if strange:
        fit_novelty(model, [words], held_out=[words] * 3)
    predict(model, words, samples)  # says once what it has to say
    waits = []
    for batches in ([words], [words] * 3):
        with Counting() as count:
            predict(model, batches, samples, seed=0)
        waits.append(count.syncs)
    # The outputs, whether weights are finite and a tensor of Laplace's has a spread; for novelty the weights' sum.
    assert waits[0] <= 2 + 3 * (method == "la") + 2 * strange
    assert waits[1] - waits[0] == 2 * strange  # a batch's features


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("method", ["vi", "mc_dropout"])
def test_calibrate_makes_no_float64_off_the_cpu(method, labels):
    model, words = on_it(words_model(), method), WORDS.to(NAME)
    calibrate(model, [(words, LABELS.to(NAME))] if labels else [words], samples=2, progress=False)
    assert all(p.std.is_meta for _, p in named_posteriors(model))


FITS = {
    "diag": {},
    "ggn": {"curvature": "ggn"},
    "kron": {"structure": "kron"},
    "last layer": {"structure": "kron", "include": "*1.*"},
    "diagonal last layer": {"include": "*1.*"},
    "evidence, last layer": {"tune": "marglik", "structure": "kron", "include": "*1.*"},
    "evidence, last layer, diagonal": {"tune": "marglik", "include": "*1.*"},
    "by itself": {"tune": "self", "structure": "kron", "include": "*1.*"},
}


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("fit", FITS)
def test_laplace_makes_no_float64_off_the_cpu_and_agrees_with_the_cpu(fit):
    found = []
    for device in ("cpu", NAME):
        model = bayesify(words_model(), "la", prior_sig=1.0, prior_mean="zero").to(device)
        data = [(WORDS.to(device), LABELS.to(device))]
        fit_laplace(model, data, **FITS[fit])
        found.append(predict(model, data, None if "1.*" in str(FITS[fit]) else 3, seed=0).probs)
        calibrate(model, data, samples=2, progress=False)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-3)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_laplace_of_images_and_validation_make_no_float64_off_the_cpu(structure):
    images, labels = torch.randn(7, 1, 4, 4).to(NAME), LABELS.to(NAME)
    model = on_it(Image(), "la", prior_sig=1.0)
    fit_laplace(model, [(images, labels)], structure=structure)
    assert len(predict(model, images, 2)) == 7
    fit_laplace(model, [(images, labels)], structure=structure, include="head.*", tune=[(images, labels)])
    assert predict(model, images).mutual_information.shape == (7,)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("likelihood", ["regression", "heteroscedastic", "multilabel"])
def test_other_likelihoods_make_no_float64_off_the_cpu(likelihood):
    values = VALUES[:, :2] if likelihood == "heteroscedastic" else VALUES.sigmoid()
    data = [(WORDS.to(NAME), values.to(NAME))]
    model = on_it(words_model(), "la", prior_sig=1.0)
    fit_laplace(model, data, likelihood=likelihood)
    assert len(predict(model, data, 2, task=likelihood)) == 7
    fit_laplace(model, data, likelihood=likelihood, structure="kron", include="1.*", curvature="ggn")
    assert len(predict(model, data, task=likelihood)) == 7


@pytest.mark.usefixtures("accelerator")
def test_a_loss_of_ones_own_makes_no_float64_off_the_cpu():
    model = on_it(words_model(), "la", prior_sig=1.0)
    loss = lambda output, target: F.cross_entropy(output, target, reduction="none")  # noqa: E731
    fit_laplace(model, [(WORDS.to(NAME), LABELS.to(NAME))], loss, curvature="ggn")
    assert all(p.std.is_meta for _, p in named_posteriors(model))


@pytest.mark.usefixtures("accelerator")
def test_mixtures_files_and_baking_make_no_float64_off_the_cpu(tmp_path):
    model, words = mix([on_it(words_model(), "vi"), on_it(words_model(), "mc_dropout")]), WORDS.to(NAME)
    save(model, tmp_path)
    again = predict(load(words_model().to(NAME), tmp_path), words, 4, seed=0)
    torch.testing.assert_close(again.probs, predict(model, words, 4, seed=0).probs)
    with mean(model):
        unbayesify(on_it(words_model(), "vi"), to="sample")(words)
    assert all(p.std.is_meta for _, p in named_posteriors(model))
