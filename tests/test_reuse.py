"""What no draw touches is computed once per batch, and nobody can tell by the results."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from bayesify import bayesify, fit_laplace, predict, samples
from bayesify.core import reuse
from bayesify.core import wrap as wrapping
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
            patch.setattr(predicting, "reusing", lambda model, **_: nullcontext())
            slow = predict(model, data, samples=3, seed=0)
        assert torch.equal(found.logits, slow.logits), pattern
        assert (slow.logits[0] != slow.logits[1]).any()
        assert not any("forward" in m.__dict__ for m in model.modules())


class Counted(nn.Module):
    """Counts its calls, and squares so that its input matters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0

    def forward(self, x, *rest, **kwargs):
        self.calls += 1
        return x**2 * self.scale


def counted(first=None):
    torch.manual_seed(0)
    model = nn.Sequential(first or Counted(), nn.ReLU(inplace=True), nn.Linear(4, 3))
    return bayesify(model, "vi", include="2.*").eval()


def test_the_part_without_posteriors_runs_once_per_batch():
    model = counted()
    batches = [torch.randn(2, 4) for _ in range(3)]
    predict(model, batches, samples=5)
    assert model[0].calls == 3
    with torch.no_grad():
        for _ in samples(model, 5):
            model(batches[0])
    assert model[0].calls == 4


def test_what_lies_behind_the_draws_gives_up():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 4), Counted()), "vi", include="0.*").eval()
    x = torch.randn(2, 4)
    out = []
    with torch.no_grad():
        for _ in samples(model, 40):
            out.append(model(x))
            forward = model[1].__dict__["forward"]
    assert forward.off
    assert not forward.calls
    assert model[1].calls == 40
    assert len({float(o.sum()) for o in out}) == 40


def test_in_train_mode_and_with_gradients_everything_runs():
    model = counted()
    x = torch.randn(2, 4)
    for _ in samples(model, 3):
        model(x).sum().backward()
    assert model[0].calls == 3
    with torch.no_grad():
        model.train()
        for _ in samples(model, 3):
            model(x)
    assert model[0].calls == 6


class Noisy(Counted):
    """Draws in eval mode too."""

    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Counting(Counted):
    """Changes a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) + self.seen


class InPlace(Counted):
    """Changes its input."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class SameThing(Counted):
    """Returns its input."""

    def forward(self, x):
        super().forward(x)
        return x


@pytest.mark.parametrize("kind", [Noisy, Counting, InPlace, SameThing])
def test_what_is_no_function_of_its_inputs_runs_every_time(kind, monkeypatch):
    x = torch.randn(2, 4)

    def run():
        torch.manual_seed(1)
        model = counted(kind())
        given, out = x.clone(), []
        with torch.no_grad():
            for _ in samples(model, 4, seed=0):
                out.append(model(given))
        return model[0].calls, torch.stack(out), given

    calls, found, given = run()
    monkeypatch.setattr(wrapping, "reusing", lambda model, **_: nullcontext())
    _, slow, slow_given = run()
    assert calls == 4
    assert torch.equal(found, slow)
    assert torch.equal(given, slow_given)


def test_other_inputs_weights_and_precisions_are_other_calls():
    model = counted()
    x = torch.randn(2, 4)
    with torch.no_grad():
        loop = samples(model, 9)
        next(loop)
        model(x)
        model(x.clone())
        assert model[0].calls == 1
        model(x + 1)
        assert model[0].calls == 2
        model(x.T.contiguous().T)
        assert model[0].calls == 3
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        assert model[0].calls == 4
        model[0].scale.add_(1)
        expected = (x**2 * 3).relu()
        assert torch.equal(model[1](model[0](x)), expected)
        assert model[0].calls == 5
        model[0].scale.data.add_(1)  # hidden from the version
        assert torch.equal(model[1](model[0](x)), (x**2 * 4).relu())
        assert model[0].calls == 6
        loop.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_buffers_of_any_type_are_looked_at(dtype):
    model = counted()
    model[0].register_buffer("table", torch.ones(3, dtype=dtype))
    with torch.no_grad():
        for _ in samples(model, 3):
            model(torch.ones(2, 4))
    assert model[0].calls == 1


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


def test_nothing_is_kept_after_the_call_or_a_break_or_an_error():
    model = counted()
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in samples(model, 3):
            memory = weakref.ref(model[0].__dict__["forward"].memory)
            model(x)
            break
    gc.collect()
    assert memory() is None
    with pytest.raises(ValueError, match="not now"):
        _fail(model)
    predict(model, x, samples=2)
    gc.collect()
    kinds = {reuse.Memory, reuse.Remembered, reuse.Watched}
    assert not any(type(o) in kinds for o in gc.get_objects())
    assert not any("forward" in m.__dict__ for m in model.modules())


def _fail(model):
    for _ in samples(model, 2):
        raise ValueError("not now")


def test_a_forward_of_the_modules_own_comes_back_and_copies_are_plain():
    model = counted()
    own = model[0].forward
    model[0].forward = own
    with torch.no_grad():
        for _ in samples(model, 2):
            assert isinstance(model[0].forward, reuse.Remembered)
            other = copy.deepcopy(model)
            predict(model, torch.randn(2, 4), samples=2)  # one inside the other
    assert model[0].forward is own
    assert not isinstance(other[0].__dict__.get("forward"), reuse.Replacement)
    assert other[0].forward.__self__ is other[0]


def test_a_restricted_fit_of_a_whole_model_reuses_its_body():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(Counted(), nn.Linear(4, 4), nn.Linear(4, 3)), "la")
    data = [(torch.randn(6, 4), torch.randint(3, (6,)))]
    fit_laplace(model, data, include="2.*")
    before = model[0].calls
    predict(model, data, samples=10)
    assert model[0].calls == before + 1


def test_thetas_that_do_not_fit_keep_the_samples_outside(monkeypatch):
    monkeypatch.setattr(predicting, "THETAS", 0)
    model = counted()
    batches = [torch.randn(2, 4) for _ in range(3)]
    predict(model, batches, samples=5)
    assert model[0].calls == 15
