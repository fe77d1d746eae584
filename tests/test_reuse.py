"""What no draw touches is computed once per batch, and nobody can tell by the results."""

from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from bayesify import bayesify, fit_laplace, predict, samples
from bayesify.prediction import predict as predicting

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def images(count=4, size=64):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def words(count=4, length=7):
    ids = torch.randint(1, 50, (count, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[: count // 2, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def vit():
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, embed_dim=24, num_heads=3, num_classes=3)


def gpt2():
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, num_labels=3, pad_token_id=0)
    return transformers.GPT2ForSequenceClassification(config)


def distilbert():
    config = transformers.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=50, num_labels=3)
    return transformers.DistilBertForSequenceClassification(config)


ZOO = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=3), images, ["fc.*", "layer4.*", "*bn*"]),
    "mobilenet": (
        lambda: torchvision.models.mobilenet_v3_small(num_classes=3),
        images,
        ["classifier.*", "features.9.*"],
    ),
    "densenet": (lambda: timm.create_model("densenet121", num_classes=3), images, ["classifier.*"]),
    "vit": (vit, images, ["head.*", "blocks.2.*", "blocks.1.attn.*"]),
    "convnext": (lambda: timm.create_model("convnext_atto", num_classes=3), images, ["head.*", "stages.3.*"]),
    "efficientnet": (lambda: timm.create_model("tf_efficientnet_lite0", num_classes=3), images, ["classifier.*"]),
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=3)),
        words,
        ["classifier.*", "bert.encoder.layer.1.*", "bert.embeddings.*"],
    ),
    "albert": (
        lambda: transformers.AlbertForSequenceClassification(
            transformers.AlbertConfig(**TINY, embedding_size=16, num_labels=3)
        ),
        words,
        ["classifier.*", "albert.embeddings.*"],
    ),
    "gpt2": (gpt2, words, ["score.*", "transformer.h.1.*"]),
    "distilbert": (distilbert, words, ["classifier.*", "distilbert.transformer.layer.1.*"]),
}


@pytest.mark.parametrize("name", ZOO)
def test_ten_models_of_the_zoo_predict_as_without_reuse_bit_by_bit(name, monkeypatch):
    build, batch, patterns = ZOO[name]
    data = [batch(4), batch(3)]
    for pattern in patterns:
        torch.manual_seed(0)
        model = bayesify(build(), "vi", include=pattern, init_sig=0.05)
        found = predict(model, data, samples=3, seed=0)
        with monkeypatch.context() as patch:
            patch.setattr(predicting, "reusing", lambda model, views: nullcontext())
            slow = predict(model, data, samples=3, seed=0)
        assert torch.equal(found.logits, slow.logits), pattern
        assert (slow.logits[0] != slow.logits[1]).any()
        assert not any("forward" in m.__dict__ for m in model.modules())


class Counter:
    """What a view of a module shares with it: an object that is neither a tensor nor a container."""

    calls = 0


class Counted(nn.Module):
    """Counts its calls outside of itself, and squares so that its input matters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.counter = Counter()

    @property
    def calls(self):
        """How many calls there were, in views of the module too."""
        return self.counter.calls

    def forward(self, x, *rest, **kwargs):
        self.counter.calls += 1
        return x**2 * self.scale


def counted(first=None):
    torch.manual_seed(0)
    model = nn.Sequential(first or Counted(), nn.ReLU(inplace=True), nn.Linear(4, 3))
    return bayesify(model, "vi", include="2.*").eval()


def test_the_part_without_posteriors_runs_once_per_batch_and_once_to_prove_itself():
    model = counted()
    predict(model, [torch.randn(2, 4) for _ in range(3)], samples=5)
    assert model[0].calls == 3 + 1


def test_samples_run_everything():
    """Whoever loops over samples may change the model meanwhile."""
    model = counted()
    model[0].factor = 1.0
    own = model[0].forward
    model[0].forward = lambda x: own(x) * model[0].factor
    with torch.no_grad():
        found = []
        for i in samples(model, 3):
            model[0].factor = float(i)
            found.append(model[0](torch.ones(1, 4)).sum().item())
    assert found == [0.0, 8.0, 16.0]
    assert model[0].calls == 3


def test_what_lies_behind_the_draws_gives_up():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 4), Counted()), "vi", include="0.*").eval()
    logits = predict(model, torch.randn(2, 4), samples=40).logits
    assert model[1].calls == 40 + 1
    assert len({float(o.sum()) for o in logits}) == 40


class Noisy(Counted):
    """Draws in eval mode too."""

    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Numpy(Counted):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        return super().forward(x) + float(self.generator.normal())


class Counting(Counted):
    """Changes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) + self.seen


class Stateful(Counted):
    """Keeps a hidden state, as a streaming model does."""

    def __init__(self):
        super().__init__()
        self.hidden, self.history = None, []

    def forward(self, x):
        self.hidden = x if self.hidden is None else self.hidden + x
        self.history.append(1)
        return super().forward(x) + self.hidden + len(self.history)


class InPlace(Counted):
    """Changes its input."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class SameThing(Counted):
    """Returns its input."""

    def forward(self, x):
        super().forward(x)
        return x


@pytest.mark.parametrize("kind", [Noisy, Numpy, Counting, Stateful, InPlace, SameThing])
def test_what_is_no_function_of_its_inputs_runs_every_time(kind):
    model, x = counted(kind()), torch.randn(2, 4)
    given = x.clone()
    predict(model, x, samples=4, seed=0)
    assert model[0].calls >= 4
    assert torch.equal(x, given)


@pytest.mark.parametrize("kind", [Counting, Stateful])
def test_no_sample_sees_the_state_that_another_left(kind):
    """Two batches: each sample begins where the model is, and goes on with its own state; the model keeps its own."""
    batches = [torch.randn(2, 4) for _ in range(2)]
    model = counted(kind())
    found = predict(model, batches, samples=3, seed=0).logits
    for sample, logits in enumerate(found):
        alone = counted(kind())
        with torch.no_grad():
            for i, _ in enumerate(samples(alone, 3, seed=0)):
                if i == sample:
                    own = torch.cat([alone(x) for x in batches])
        torch.testing.assert_close(logits, own)
    assert getattr(model[0], "hidden", None) is None
    assert float(getattr(model[0], "seen", 0)) == 0


class Borrower(Counted):
    """Reads a weight that lives in another module."""

    def __init__(self, other):
        super().__init__()
        self.other = (other,)

    def forward(self, x):
        return super().forward(x) + self.other[0].weight.sum()


def test_a_module_that_reads_somebody_elses_posterior_is_not_remembered():
    torch.manual_seed(0)
    last = nn.Linear(4, 3)
    model = bayesify(nn.Sequential(Borrower(last), last), "vi", include="1.*").eval()
    predict(model, torch.randn(2, 4), samples=3)
    assert model[0].calls == 3


def test_hooks_of_others_still_see_every_call():
    model = counted(nn.Sequential(Counted()))
    seen = []
    model[0][0].register_forward_hook(lambda *a: seen.append(1))
    predict(model, torch.randn(2, 4), samples=3)
    assert len(seen) == 3


def test_a_forward_of_the_modules_own_is_left_alone():
    model = counted()
    own = model[0].forward
    model[0].forward = own
    predict(model, torch.randn(2, 4), samples=2)
    assert model[0].forward is own


def test_a_restricted_fit_of_a_whole_model_reuses_its_body():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(Counted(), nn.Linear(4, 4), nn.Linear(4, 3)), "la")
    data = [(torch.randn(6, 4), torch.randint(3, (6,)))]
    fit_laplace(model, data, include="2.*")
    before = model[0].calls
    predict(model, data, samples=10)
    assert model[0].calls == before + 2


def test_thetas_that_do_not_fit_keep_the_samples_outside(monkeypatch):
    monkeypatch.setattr(predicting, "THETAS", 0)
    model = counted()
    predict(model, [torch.randn(2, 4) for _ in range(3)], samples=5)
    assert model[0].calls == 15
