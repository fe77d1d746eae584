"""The fit against closed forms, and against the loop over single examples in small models of many kinds."""

import copy
import math

import pytest
import timm
import torch
import torchvision
import transformers
from laplaces import batches, classifier, curvature_of, half_square, inputs, labelled
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bayesify import bayesify, fit_laplace, named_posteriors, predict
from bayesify.prediction import likelihoods as roots

# -- the linear-Gaussian model -------------------------------------------------------------------------------


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("inflate", [1.0, 2.5])
def test_exact_gauss_newton_is_the_posterior_of_a_linear_model(orthogonal, inflate):
    x = inputs(4)
    if orthogonal:
        x = torch.linalg.qr(x)[0] * torch.tensor([1.0, 2, 3, 4], dtype=x.dtype)
    model = bayesify(nn.Linear(4, 1, bias=False).double(), "la", prior_sig=0.7, Ninflate=inflate)
    fit_laplace(model, batches(x, x.sum(1, keepdim=True)), half_square, curvature="ggn")
    precision = inflate * x.T @ x + torch.eye(4, dtype=x.dtype) / 0.7**2
    exact = torch.linalg.inv(precision).diagonal() if orthogonal else 1 / precision.diagonal()
    ((_, posterior),) = named_posteriors(model)
    torch.testing.assert_close(posterior.std.squeeze(0) ** 2, exact, rtol=1e-8, atol=0)


def test_monte_carlo_gauss_newton_is_unbiased(monkeypatch):
    x, y = labelled(6)
    exact = fit_laplace(classifier(), batches(x, y), curvature="ggn")
    exact = [curvature_of(p, 0.5) for _, p in named_posteriors(exact)]
    monkeypatch.setattr(roots, "FEW_OUTPUTS", 1)
    monkeypatch.setattr(roots, "DRAWS", 2)
    for loss in (None, lambda o, t: F.cross_entropy(o, t, reduction="none")):
        torch.manual_seed(1)
        draws = [fit_laplace(classifier_at, batches(x, y), loss, curvature="ggn") for classifier_at in _models(40)]
        for i, truth in enumerate(exact):
            found = torch.stack([curvature_of(list(named_posteriors(m))[i][1], 0.5) for m in draws])
            error = found.std(0) / math.sqrt(len(draws))
            assert ((found.mean(0) - truth).abs() < 4 * error + 1e-12).all()
            assert (error > 0).any()


def _models(count):
    state = torch.get_rng_state()
    models = [classifier() for _ in range(count)]
    torch.set_rng_state(state)
    return models


def test_gauss_newton_of_a_softmax_is_the_sum_over_the_outputs():
    x, y = labelled(9)
    model = classifier()
    params = [p.original for _, p in named_posteriors(model)]
    model.eval()
    truth = [torch.zeros_like(p) for p in params]
    for row in x:
        logits = model(row[None])[0]
        p = logits.softmax(0).detach()
        jacobian = [torch.autograd.grad(z, params, retain_graph=True) for z in logits]
        hessian = torch.diag(p) - torch.outer(p, p)
        for i, total in enumerate(truth):
            j = torch.stack([g[i] for g in jacobian])
            total += torch.einsum("k...,kl,l...->...", j, hessian, j)
    for loss in (None, lambda o, t: F.cross_entropy(o, t, reduction="none")):
        fit_laplace(model, batches(x, y, 4), loss, curvature="ggn")
        for (_, posterior), total in zip(named_posteriors(model), truth, strict=True):
            torch.testing.assert_close(curvature_of(posterior, 0.5), total, rtol=1e-8, atol=1e-12)


def test_gauss_newton_is_the_fisher_with_the_models_own_labels():
    """For a perfectly calibrated model the empirical Fisher agrees with it on average; away from it, it need not."""
    x, _ = labelled(4000)
    model = classifier()
    with torch.no_grad():
        own = torch.multinomial(model.eval()(x).softmax(-1), 1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    found = []
    for labels, kind in ((own, "ef"), (own, "ggn"), (torch.zeros_like(own), "ef"), (torch.zeros_like(own), "ggn")):
        fit_laplace(model, batches(x, labels, 500), curvature=kind)
        found.append(curvature_of(dict(named_posteriors(model))["2.bias"], 0.5))
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0)
    torch.testing.assert_close(found[1], found[3])
    assert not torch.allclose(found[2], found[3], rtol=0.1)


# -- the loop over the examples ------------------------------------------------------------------------------


def small_vit():
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 12, 16, num_classes=3)
    nn.init.normal_(model.heads.head.weight)
    return model


def small_swin():
    return torchvision.models.SwinTransformer([4, 4], 8, [2, 1], [2, 2], [4, 4], num_classes=3)


def small_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    model[1].running_mean.normal_()
    return model


SMALL = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
}


def small_bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **SMALL))


def small_gpt2():
    config = transformers.GPT2Config(
        n_embd=12, n_layer=2, n_head=2, vocab_size=20, n_positions=12, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def next_word(logits, ids):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 5), nn.ReLU(), nn.Linear(5, 3)),
    "cnn": small_cnn,
    "torchvision vit": small_vit,
    "torchvision swin": small_swin,
    "timm vit": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=12, depth=2, num_classes=3),
    "timm efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=3),
    "bert": small_bert,
    "gpt2": small_gpt2,
}


def zoo(name, count):
    torch.manual_seed(0)
    model = bayesify(MODELS[name]().double(), "la", prior_sig=100.0, Ninflate=2.0, damping=1e-3)
    if name in ("bert", "gpt2"):
        ids = torch.randint(1, 20, (count, 9))
        mask = torch.ones_like(ids)
        mask[: count // 2, 6:] = 0
        labels = torch.randint(3, (count,)) if name == "bert" else ids
        items = [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]
    else:
        images = torch.randn(count, 3, 32, 32, dtype=torch.float64)
        items = list(zip(images, torch.randint(3, (count,)), strict=True))
    return model, items, next_word if name == "gpt2" else None


@pytest.mark.parametrize("name", MODELS)
def test_the_fit_equals_the_loop_for_any_batches(name):
    model, items, loss = zoo(name, 5)
    # The truth, one example at a time through the bare model.
    params = {n: p.original for n, p in named_posteriors(model)}
    truth = {n: torch.zeros_like(p) for n, p in params.items()}
    model.eval()
    for batch in DataLoader(items, batch_size=1):
        if isinstance(batch, dict):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            labels = batch["labels"]
        else:
            logits, labels = model(batch[0]), batch[1]
        value = F.cross_entropy(logits, labels) if loss is None else loss(logits, labels)
        for (n, total), g in zip(truth.items(), torch.autograd.grad(value, list(params.values())), strict=True):
            total += g**2
            assert n in params
    model.train()
    before = {n: b.clone() for n, b in model.named_buffers()}
    for size in (1, 2, 5):
        fit_laplace(model, DataLoader(items, batch_size=size), loss, num_data=50)
        for n, posterior in named_posteriors(model):
            exact = 1 / (1 / 100.0**2 + 2.0 * 10 * truth[n] + 1e-3)
            if posterior.fixed_row is not None:
                exact[posterior.fixed_row] = 0
            torch.testing.assert_close(posterior.std**2, exact, rtol=1e-6, atol=0)
    assert model.training
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers() if n in before)


def test_losses_of_objects_take_the_object_or_its_logits():
    model, items, _ = zoo("bert", 6)
    data = DataLoader(items, batch_size=3)
    losses = (
        None,
        lambda logits, y: F.cross_entropy(logits, y, reduction="none"),
        lambda output, y: F.cross_entropy(output.logits, y, reduction="none"),
    )
    for curvature in ("ef", "ggn"):
        stds = []
        for loss in losses:
            fit_laplace(model, data, loss, curvature=curvature)
            stds.append(torch.cat([p.std.flatten() for _, p in named_posteriors(model)]))
        torch.testing.assert_close(stds[0], stds[1])
        torch.testing.assert_close(stds[0], stds[2])
    fit_laplace(model, data, losses[2], tune=data)


def test_a_dict_is_a_batch():
    model, items, _ = zoo("bert", 4)
    batch = next(iter(DataLoader(items, batch_size=4)))
    fit_laplace(model, batch, progress=True)
    assert len(predict(model, batch, samples=2)) == 4


def test_labels_of_a_causal_language_model_stand_as_in_its_own_loss():
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (6, 9))
    labels = ids.clone()
    labels[:3, 6:] = -100
    moved = F.pad(labels[:, 1:], (0, 1), value=-100)

    def given(logits, target):  # the caller's own, which takes labels as they are
        return F.cross_entropy(logits.transpose(1, 2), target, reduction="none").sum(1)

    plain = small_gpt2().double().eval()
    with torch.no_grad():
        output = plain(input_ids=ids, labels=labels)
    assert float(output.loss) == pytest.approx(float(given(output.logits, moved).sum() / (moved != -100).sum()))
    own, shifted = (bayesify(copy.deepcopy(plain), "la", prior_sig=1.0) for _ in range(2))
    fit_laplace(own, [{"input_ids": ids, "labels": labels}])
    fit_laplace(shifted, [{"input_ids": ids, "labels": moved}], given)
    for (name, a), (_, b) in zip(named_posteriors(own), named_posteriors(shifted), strict=True):
        torch.testing.assert_close(a.std, b.std, msg=name)
    fit_laplace(
        own, [{"input_ids": ids, "labels": labels}], structure="kron", tune=[{"input_ids": ids, "labels": labels}]
    )
