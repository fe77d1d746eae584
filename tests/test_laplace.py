"""Laplace: exact posteriors of linear models, the loop over examples, tuning, and fits that fail."""

import copy
import logging
import math
import warnings
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bayesify import (
    bayesify,
    fit_laplace,
    load,
    mean,
    metrics,
    named_posteriors,
    penalty,
    predict,
    sample,
    save,
    summary,
)
from bayesify.methods.laplace import tuning
from bayesify.model.selection import SelectionError
from bayesify.prediction import likelihoods, roots


def half_square(output, target):
    return (output - target).square().sum(-1) / 2


def inputs(columns, count=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator, dtype=torch.float64)


def batches(x, y, size=7):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def classifier(method="la", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return bayesify(model, method, **{"prior_sig": 0.5, **options})


def labelled(count=30, seed=0):
    x = inputs(4, count, seed)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def curvature_of(posterior, sig):
    return posterior.std.double() ** -2 - 1 / sig**2


@pytest.fixture(scope="module")
def trained():
    model = classifier(prior_sig=1.0)
    x, y = labelled(60)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + penalty(model, num_data=60)
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


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


# -- what the variances mean ---------------------------------------------------------------------------------


def test_num_data_defaults_to_what_was_seen():
    x, y = labelled()
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    seen, double = fit_laplace(classifier(), data), fit_laplace(classifier(), data, num_data=60)
    for (_, a), (_, b) in zip(named_posteriors(seen), named_posteriors(double), strict=True):
        torch.testing.assert_close(2 * curvature_of(a, 0.5), curvature_of(b, 0.5))


def test_what_has_no_gradient_and_what_has_none_anywhere():
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 4, padding_idx=1), "unused": nn.Linear(2, 2), "head": nn.Linear(4, 3)}
    )
    model.forward = lambda ids: model["head"](model["table"](ids).mean(1))
    bayesify(model, "la", prior_sig=0.3)
    fit_laplace(model, [(torch.tensor([[0, 1], [2, 1]]), torch.tensor([0, 1]))])
    std = {name: p.std for name, p in named_posteriors(model)}
    assert (std["unused.weight"] == 0).all()
    assert (std["unused.bias"] == 0).all()
    assert (std["table.weight"][1] == 0).all()
    torch.testing.assert_close(std["table.weight"][3:], torch.full((2, 4), 0.3))
    assert (std["table.weight"][[0, 2]] < 0.3).all()
    assert "no variance" in str(summary(model))
    with sample(model, seed=0):
        assert torch.equal(model["unused"].weight, model["unused"].parametrizations.weight.original)


def test_a_flat_prior_has_no_precision_of_its_own():
    x = inputs(4)
    model = bayesify(nn.Linear(4, 2).double(), "la", prior_sig=0.5, bias="uninformative")
    target = torch.zeros(30, 2, dtype=torch.float64)

    def first_output_only(output, target):
        return half_square(output[:, :1], target[:, :1])

    fit_laplace(model, batches(x, target), first_output_only, curvature="ggn")
    bias, weight = dict(named_posteriors(model))["bias"], dict(named_posteriors(model))["weight"]
    torch.testing.assert_close(bias.std, torch.tensor([30**-0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(weight.std[1], torch.full((4,), 0.5, dtype=torch.float64))
    assert "1 without variance" in str(summary(model))
    torch.testing.assert_close(penalty(model, num_data=30).item(), 0.0)
    with torch.no_grad():
        bias.original.add_(1)
    assert penalty(model, num_data=30) == 0


@pytest.mark.parametrize(
    ("strength", "options"), [(1.0, {}), (1e-6, {"damping": 1.0}), (1e-6, {"bias": "informative"})]
)
def test_a_flat_prior_warns_only_where_almost_nothing_is_known(strength: float, options: dict):
    def weak(output, target):
        return strength * half_square(output, target)

    def fit(**options):
        model = bayesify(nn.Linear(4, 2).double(), "la", prior_sig=0.5, **options)
        return fit_laplace(model, batches(inputs(4), torch.zeros(30, 2, dtype=torch.float64)), weak, curvature="ggn")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(**{"bias": "uninformative"} | options)
    strength = 1e-6
    with pytest.warns(UserWarning, match=r"2 of 2 elements under a flat prior.*up to 183"):  # (30e-6)**-0.5
        fit(bias="uninformative")


def test_the_mean_is_the_trained_parameter_and_samples_have_the_spread(trained):
    model = fit_laplace(copy.deepcopy(trained), batches(*labelled()))
    weight = dict(named_posteriors(model))["0.weight"]
    assert weight.mean.data_ptr() == weight.original.data_ptr()
    draws = []
    for seed in range(400):
        with sample(model, seed=seed):
            draws.append(((model[0].weight - weight.mean) / weight.std).detach())
    z = torch.stack(draws)
    assert (z.mean(0).abs() < 4.5 / 20).all()
    assert abs(float(z.var()) - 1) < 4 * math.sqrt(2 / z.numel())
    x, _ = labelled()
    with sample(model, seed=0):
        model(x).sum().backward()
    assert weight.original.grad.abs().sum() > 0


def test_include_restricts_the_posterior():
    x, y = labelled()
    everything = fit_laplace(classifier(), batches(x, y))
    last = fit_laplace(classifier(), batches(x, y), include="2.*")
    for (name, a), (_, b) in zip(named_posteriors(everything), named_posteriors(last), strict=True):
        if name.startswith("2."):
            torch.testing.assert_close(a.std, b.std)
        else:
            assert (b.std == 0).all()
    weights = fit_laplace(classifier(), batches(x, y), include=lambda name, param: param.dim() == 2)
    assert {name for name, p in named_posteriors(weights) if p.std.any()} == {"0.weight", "2.weight"}
    with pytest.raises(SelectionError, match="matched no parameter"):
        fit_laplace(classifier(), batches(x, y), include="head.*")


def test_frozen_parameters_have_no_variance():
    model = classifier()
    model[0].parametrizations.weight.original.requires_grad_(False)
    fit_laplace(model, batches(*labelled()))
    std = {name: p.std for name, p in named_posteriors(model)}
    assert (std["0.weight"] == 0).all()
    assert (std["0.bias"] > 0).all()


def test_dropout_is_off_and_modes_and_random_numbers_are_as_before():
    layers = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3), nn.Dropout(0.5)
    model = bayesify(nn.Sequential(*layers).double(), "la")
    model[3].eval()
    x, y = labelled()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fit_laplace(model, batches(x, y))
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in model] == [True, True, True, False]
    again = [p.std.clone() for _, p in named_posteriors(model)]
    fit_laplace(model, batches(x, y, 30))
    for old, (_, posterior) in zip(again, named_posteriors(model), strict=True):
        torch.testing.assert_close(posterior.std, old)
    with torch.no_grad(), mean(model):
        fit_laplace(model, batches(x, y))
    assert all(p.original.grad is None for _, p in named_posteriors(model))


def test_a_refit_changes_the_samples_of_an_open_block():
    model = fit_laplace(classifier(), batches(*labelled()))
    with sample(model, seed=0):
        before = model[0].weight.clone()
        fit_laplace(model, batches(*labelled()), num_data=1e6)
        after = model[0].weight
    weight = dict(named_posteriors(model))["0.weight"]
    assert not torch.equal(before, after)
    assert ((after - weight.mean).abs() <= 6 * weight.std).all()


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


def test_save_and_load_keep_the_fit_and_the_chosen_prior(tmp_path, trained):
    model = fit_laplace(copy.deepcopy(trained), batches(*labelled()), tune="marglik")
    save(model, tmp_path)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loaded = load(plain, tmp_path)
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(loaded), strict=True):
        assert torch.equal(a.std, b.std)
        assert a.prior_sig == b.prior_sig == 1.0
        assert a.fitted_sig == b.fitted_sig != 1.0
    x, _ = labelled()
    assert torch.equal(predict(model, x, samples=3, seed=0).probs, predict(loaded, x, samples=3, seed=0).probs)


# -- tuning --------------------------------------------------------------------------------------------------


def test_the_evidence_is_that_of_the_gaussian_integral():
    """For a linear-Gaussian model with orthogonal columns the Laplace evidence is exact, up to a constant."""
    x = torch.linalg.qr(inputs(4))[0] * 3
    y = x @ torch.tensor([1.0, -2, 0.5, 0], dtype=x.dtype)
    model = bayesify(nn.Linear(4, 1, bias=False).double(), "la", prior_sig=0.7, prior_mean="zero")
    values = []
    for factor in (0.3, 1.0, 4.0):
        sig = 0.7 * factor
        weights = torch.linalg.solve(x.T @ x + torch.eye(4, dtype=x.dtype) / sig**2, x.T @ y)
        with torch.no_grad():
            model.parametrizations.weight.original.copy_(weights)
        ((_, posterior),) = named_posteriors(model)
        h = (x**2).sum(0)[None]
        found = tuning.log_evidence([tuning.Fitted(posterior, h)], factor)
        found -= float((y - x @ weights).square().sum()) / 2
        covariance = torch.eye(30, dtype=x.dtype) + sig**2 * x @ x.T
        exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=x.dtype), covariance).log_prob(y)
        values.append(float(exact) - found)
    assert values == pytest.approx([values[0]] * 3, abs=1e-9)


def test_the_chosen_prior_has_the_largest_evidence(trained, caplog):
    model = copy.deepcopy(trained)
    with caplog.at_level(logging.INFO, "bayesify"):
        fit_laplace(model, batches(*labelled(60)), tune="marglik", curvature="ggn")
    posteriors = [p for _, p in named_posteriors(model)]
    sig = posteriors[0].fitted_sig
    assert {p.fitted_sig for p in posteriors} == {sig}
    assert {p.prior_sig for p in posteriors} == {1.0}
    assert f"{sig:.4g}" in caplog.text
    assert f"spread with prior_sig {sig:.4g} by evidence" in str(summary(model))
    fitted = [tuning.Fitted(p, curvature_of(p, sig)) for p in posteriors]
    best = tuning.log_evidence(fitted, sig)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert tuning.log_evidence(fitted, factor * sig) < best
    plain = fit_laplace(copy.deepcopy(trained), batches(*labelled(60)), curvature="ggn")
    for a, (_, b) in zip(posteriors, named_posteriors(plain), strict=True):
        torch.testing.assert_close(curvature_of(a, sig), curvature_of(b, 1.0), rtol=1e-6, atol=1e-6)


def test_mapped_priors_keep_their_ratio(trained):
    model = classifier(prior_sig={"0.*": 1.0, "2.*": 4.0})
    tensors = {k: v for k, v in trained.state_dict().items() if not k.endswith("_extra_state")}
    model.load_state_dict(tensors, strict=False)  # of another prior, on purpose
    fit_laplace(model, batches(*labelled(60)), tune="marglik")
    sigs = {name: p.fitted_sig for name, p in named_posteriors(model)}
    assert sigs["2.weight"] / sigs["0.weight"] == pytest.approx(4.0)


def test_the_typical_scale_is_the_geometric_mean_over_curved_parameters():
    fitted = [SimpleNamespace(sig=sig, h=h) for sig, h in ((1.0, 1), (4.0, 1), (100.0, None))]
    assert tuning.typical_sig(fitted) == pytest.approx(2.0)
    assert tuning.typical_sig(fitted[2:]) == pytest.approx(100.0)


def test_an_untrained_model_has_no_evidence_for_any_scale(caplog):
    with caplog.at_level(logging.WARNING, "bayesify"):
        fit_laplace(classifier(), batches(*labelled()), tune="marglik")
    assert "is the model trained?" in caplog.text


def test_validation_chooses_the_scale_with_the_lowest_nll(caplog):
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3)).double(), "la", prior_sig=10.0)
    x, y = labelled(40)
    y[::5] = (y[::5] + 1) % 3  # wrong labels, which the model learns by heart
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(300):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + penalty(model, num_data=40)).backward()
        optimizer.step()
    validation = batches(*labelled(200, seed=1), 50)
    with caplog.at_level(logging.INFO, "bayesify"):
        fit_laplace(model, batches(x, y), tune=validation)
    chosen = {p.fitted_sig for _, p in named_posteriors(model)}.pop()
    assert f"{chosen:.4g} has the lowest validation NLL" in caplog.text
    assert f"spread with prior_sig {chosen:.4g} by validation" in str(summary(model))
    found = predict(model, validation, samples=5, seed=0)
    nll = metrics.nll(found.probs, found.labels)
    total, count = tuning.validation_nll(model, validation, likelihoods.Classification())
    assert total / count == pytest.approx(nll)
    assert nll < metrics.nll(predict(model, validation, samples=0).probs, found.labels)
    for factor in (1 / 3, 3.0):
        other = copy.deepcopy(model)
        for _, posterior in named_posteriors(other):
            posterior.prior_sig = chosen * factor
        fit_laplace(other, batches(x, y))
        assert metrics.nll(predict(other, validation, samples=5, seed=0).probs, found.labels) > nll


def test_validation_may_find_that_no_spread_is_best(trained):
    fit_laplace(model := copy.deepcopy(trained), batches(*labelled(60)), tune=batches(*labelled(200, seed=1), 50))
    assert [p.fitted_sig for _, p in named_posteriors(model)] == pytest.approx([1e-4] * 4)


# -- failures ------------------------------------------------------------------------------------------------


def broken(batches, at):
    for i, batch in enumerate(batches):
        if i == at:
            raise OSError("the disk is gone")
        yield batch


X, Y = labelled()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loader": []}, ValueError, "no batches"),
        ({"loader": [(X, Y + 1)]}, ValueError, r"labels must be in 0..2 for 3 logits, got 1..3"),
        ({"loader": [(X, Y - 1)]}, ValueError, r"got -1..1"),
        ({"loader": [(X,)]}, ValueError, "gives no labels"),
        ({"loader": [(X, Y[:, None])]}, ValueError, r"labels must be of shape \(30,\)"),
        ({"loader": [(X, Y.double())]}, ValueError, r"labels\.long\(\)"),
        ({"loader": [(X, Y), (X * math.nan, Y)]}, ValueError, "loss is not finite"),
        ({"loader": broken([(X, Y)] * 3, 2)}, OSError, "disk"),
        ({"loader": 3}, TypeError, "iterable of batches"),
        ({"loss": F.cross_entropy}, ValueError, "one value per example"),
        ({"loss": "mse"}, TypeError, "loss must be a function"),
        ({"curvature": "kfac"}, ValueError, "curvature must be one of"),
        ({"num_data": 0}, ValueError, "num_data must be a positive number"),
        ({"tune": "grid"}, ValueError, "tune must be one of"),
        ({"tune": [(X,)]}, ValueError, "needs data with labels"),
        ({"tune": [(X, Y + 1)]}, ValueError, "labels must be in"),
    ],
)
@pytest.mark.parametrize("fitted", [False, True])
def test_a_failed_fit_leaves_the_posterior_as_it_was(arguments, error, message, fitted):
    model = classifier()
    if fitted:
        fit_laplace(model, batches(X, Y))
    before = copy.deepcopy(model.state_dict())
    if callable(getattr(arguments.get("loader"), "__next__", None)):
        arguments = {"loader": broken([(X, Y)] * 3, 2)}
    with pytest.raises(error, match=message):
        fit_laplace(model, **{"loader": batches(X, Y), **arguments})
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], t) for n, t in after.items())
    assert {p.prior_sig for _, p in named_posteriors(model)} == {0.5}
    assert model.training
    assert model[0].weight is model[0].parametrizations.weight.original


def test_gauss_newton_needs_a_convex_loss_of_few_outputs():
    model = classifier()
    with pytest.raises(ValueError, match="convex"):
        fit_laplace(model, batches(X, Y), lambda o, t: -o.square().sum(1), curvature="ggn")
    wide = bayesify(nn.Linear(4, 2000).double(), "la")
    with pytest.raises(ValueError, match="at most 1024 outputs"):
        fit_laplace(wide, batches(X, Y), lambda o, t: o.square().sum(1), curvature="ggn")
    linear = fit_laplace(model, batches(X, Y), lambda o, t: o.sum(1), curvature="ggn")
    assert all((p.std == 0.5).all() for _, p in named_posteriors(linear))


def test_sampling_before_the_fit_is_an_error():
    model = classifier()
    with pytest.raises(RuntimeError, match=r"call bayesify\.fit_laplace"):
        predict(model, X, samples=2)
    with pytest.raises(RuntimeError, match="not been fitted"), sample(model):
        pass
    predict(model, X, samples=0)
    assert "not fitted" in str(summary(model))


def test_a_model_of_another_method_is_an_error():
    with pytest.raises(ValueError, match="this one is 'vi'"):
        fit_laplace(classifier("vi"), batches(X, Y))
    with pytest.raises(ValueError, match="no posteriors"):
        fit_laplace(nn.Linear(4, 3), batches(X, Y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": -1.0}, "damping must be a finite number >= 0"),
        ({"Ninflate": 0.0}, "Ninflate must be a finite number > 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        classifier(**options)


def test_a_wrapper_is_as_good_as_the_model():
    inner, other = classifier(), classifier()
    model = nn.ModuleDict({"first": inner, "second": other})
    model.forward = lambda x: inner(x) + other(x)
    fit_laplace(model, batches(X, Y), include="second.*")
    assert not any(p.std.any() for _, p in named_posteriors(inner))
    assert all(p.std.all() for _, p in named_posteriors(other))
    fit_laplace(model, batches(X, Y), include="2.bias")
    assert [name for name, p in named_posteriors(model) if p.std.any()] == ["first.2.bias", "second.2.bias"]


def test_labels_of_numpy_and_batches_without_examples():
    model, (x, y) = classifier(), labelled()
    fit_laplace(model, batches(x, y))
    expected = {name: posterior.std for name, posterior in named_posteriors(model)}
    empty = (x[:0], y[:0])
    fit_laplace(model, [empty, *[(part, labels.numpy()) for part, labels in batches(x, y)], empty])
    for name, posterior in named_posteriors(model):
        torch.testing.assert_close(posterior.std, expected[name])


def test_validation_data_that_can_be_read_once():
    models = classifier(), classifier()
    data = batches(*labelled())
    fit_laplace(models[0], data, tune=data)
    fit_laplace(models[1], data, tune=iter(data))
    for (name, a), (_, b) in zip(*map(named_posteriors, models), strict=True):
        assert torch.equal(a.std, b.std), name


def test_a_state_dict_of_something_else_leaves_the_fit():
    model = classifier()
    fit_laplace(model, batches(*labelled()))
    before = {name: posterior.std for name, posterior in named_posteriors(model)}
    model.load_state_dict({}, strict=False)
    for name, posterior in named_posteriors(model):
        assert torch.equal(posterior.std, before[name])
