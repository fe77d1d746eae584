"""The prior's scale, chosen by the evidence, by validation data, or by what the samples cost."""

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from laplaces import batches, classifier, curvature_of, inputs, labelled
from torch import nn
from torch.nn import functional as F

from bayesify import (
    bayesify,
    fit_laplace,
    load,
    metrics,
    named_posteriors,
    penalty,
    predict,
    save,
    summary,
    unbayesify,
)
from bayesify.core.prior import TOLERANCE
from bayesify.methods.laplace import curvature, evidence, tuning
from bayesify.prediction import likelihoods


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


def by_evidence(model, data, **options):
    """Tune the last layer, whose prediction is a closed form."""
    return fit_laplace(model, data, tune="marglik", include="2.*", curvature="ggn", **options)


def test_save_and_load_keep_the_fit_and_the_chosen_prior(tmp_path, trained):
    model = by_evidence(copy.deepcopy(trained), batches(*labelled()))
    save(model, tmp_path)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    loaded = load(plain, tmp_path)
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(loaded), strict=True):
        assert torch.equal(a.std, b.std)
        assert a.prior_sig == b.prior_sig == 1.0
        assert a.fitted_sig == b.fitted_sig != 1.0
    x, _ = labelled()
    assert torch.equal(predict(model, x, samples=3, seed=0).probs, predict(loaded, x, samples=3, seed=0).probs)


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
        found = evidence.log_evidence([evidence.Fitted(posterior, h)], factor)
        found -= float((y - x @ weights).square().sum()) / 2
        covariance = torch.eye(30, dtype=x.dtype) + sig**2 * x @ x.T
        exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=x.dtype), covariance).log_prob(y)
        values.append(float(exact) - found)
    assert values == pytest.approx([values[0]] * 3, abs=1e-9)


def test_the_chosen_prior_has_the_largest_evidence(trained, caplog):
    model = copy.deepcopy(trained)
    with caplog.at_level(logging.INFO, "bayesify"):
        by_evidence(model, batches(*labelled(60)))
    posteriors = [p for name, p in named_posteriors(model) if name.startswith("2.")]
    sig = posteriors[0].fitted_sig
    assert {p.fitted_sig for p in posteriors} == {sig}
    assert {p.prior_sig for p in posteriors} == {1.0}
    assert f"{sig:.4g}" in caplog.text
    assert f"spread with prior_sig {sig:.4g} by evidence" in str(summary(model))
    fitted = [evidence.Fitted(p, curvature_of(p, sig)) for p in posteriors]
    best = evidence.log_evidence(fitted, sig)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert evidence.log_evidence(fitted, factor * sig) < best
    plain = fit_laplace(copy.deepcopy(trained), batches(*labelled(60)), curvature="ggn", include="2.*")
    for a, b in zip(posteriors, [p for name, p in named_posteriors(plain) if name.startswith("2.")], strict=True):
        torch.testing.assert_close(curvature_of(a, sig), curvature_of(b, 1.0), rtol=1e-6, atol=1e-6)


def test_mapped_priors_keep_their_ratio(trained):
    model = classifier(prior_sig={"2.bias": 1.0, "2.weight": 4.0, "0.*": 1.0})
    tensors = {k: v for k, v in trained.state_dict().items() if not k.endswith("_extra_state")}
    model.load_state_dict(tensors, strict=False)  # of another prior, on purpose
    by_evidence(model, batches(*labelled(60)))
    sigs = {name: p.fitted_sig for name, p in named_posteriors(model)}
    assert sigs["2.weight"] / sigs["2.bias"] == pytest.approx(4.0)


def test_the_typical_scale_is_the_geometric_mean_over_curved_parameters():
    fitted = [SimpleNamespace(sig=sig, h=h) for sig, h in ((1.0, 1), (4.0, 1), (100.0, None))]
    assert evidence.typical_sig(fitted) == pytest.approx(2.0)
    assert evidence.typical_sig(fitted[2:]) == pytest.approx(100.0)


def test_evidence_that_says_nothing_is_refused(trained):
    """Weights that are their own prior mean, and sampled predictions of all weights."""
    data = batches(*labelled())
    own = bayesify(unbayesify(copy.deepcopy(trained)), "la", prior_sig=1.0)
    with pytest.raises(ValueError, match="prior_mean='zero'"):
        by_evidence(own, data)
    with pytest.raises(ValueError, match="give validation batches"):
        fit_laplace(copy.deepcopy(trained), data, tune="marglik")
    assert not any(p.ready for _, p in named_posteriors(own))
    y = labelled()[0] @ torch.ones(4, 3, dtype=torch.float64)
    fit_laplace(copy.deepcopy(trained), [(labelled()[0], y)], likelihood="regression", structure="kron", tune="marglik")


def test_an_untrained_model_has_no_evidence_for_any_scale(caplog):
    model = classifier()
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.mul_(1 + 1e-12)
    with caplog.at_level(logging.WARNING, "bayesify"):
        by_evidence(model, batches(*labelled()))
    assert "is the model trained?" in caplog.text


def test_a_model_that_is_not_over_confident_is_sent_to_a_temperature(caplog):
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    data = [(x, (x[:, 0] > 0).long())]
    model = nn.Linear(2, 2)
    with torch.no_grad():  # right in all cases, and never sure
        model.weight.copy_(torch.tensor([[-0.1, 0.0], [0.1, 0.0]]))
        model.bias.zero_()
    with caplog.at_level(logging.WARNING, "bayesify"):
        fit_laplace(bayesify(model, "la"), data, structure="kron", tune=data)
    assert "not over-confident" in caplog.text and "metrics.fit_temperature" in caplog.text


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
    assert max(p.fitted_sig for _, p in named_posteriors(model)) < 1e-3


def test_validation_data_that_can_be_read_once():
    models = classifier(), classifier()
    data = batches(*labelled())
    fit_laplace(models[0], data, tune=data)
    fit_laplace(models[1], data, tune=iter(data))
    for (name, a), (_, b) in zip(*map(named_posteriors, models), strict=True):
        assert torch.equal(a.std, b.std), name


# -- what an untuned spread may cost -------------------------------------------------------------------------


def overfitted(outputs=3):
    """Return a network that fits its data almost exactly, so that there is little curvature, with the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
    x, y = labelled(40)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def cost_of_samples(model, x):
    """KL(p || q), averaged over the inputs, of the mean's prediction p and that q of ten samples."""
    p, q = (predict(model, x, samples=n, seed=0, task="classification").log_probs for n in (0, 10))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_an_untuned_spread_is_the_largest_whose_samples_cost_no_more_than_the_tolerance(monkeypatch):
    plain, x, y = overfitted()
    monkeypatch.setattr(tuning, "BOUND_LEAST", len(x))
    model = fit_laplace(bayesify(copy.deepcopy(plain), "la", nst=10), batches(x, y))
    (power,) = {round(math.log10(q.fitted_sig / q.prior_sig), 6) for _, q in named_posteriors(model)}
    tempered = {"Ninflate": model._bayesify_scope.method.inflation(len(x))}
    costs = []
    for wider in (0, 0.25, 2):  # 0.25 is the next that is tried; priors that are given as numbers are used as they are
        sigs = {name: q.prior_sig * 10 ** (power + wider) for name, q in named_posteriors(model)}
        given = fit_laplace(bayesify(copy.deepcopy(plain), "la", prior_sig=sigs, **tempered), batches(x, y))
        assert all(q.fitted_sig == q.prior_sig for _, q in named_posteriors(given))
        costs.append(cost_of_samples(given, x))
    assert power < 0
    assert costs[0] == pytest.approx(cost_of_samples(model, x))
    assert costs[0] <= TOLERANCE < costs[1] < costs[2]


def test_an_untuned_spread_is_left_alone_where_it_is_exact_or_no_classifiers():
    plain, x, y = overfitted()
    for include, data, options in (
        ("2.*", batches(x, y), {}),
        (None, batches(x, F.one_hot(y, 3).double()), {"likelihood": "multilabel"}),
    ):
        model = fit_laplace(bayesify(copy.deepcopy(plain), "la", Ninflate=1e-6), data, include=include, **options)
        ready = [q for _, q in named_posteriors(model) if q.std.any()]
        assert ready
        assert all(q.fitted_sig == q.prior_sig for q in ready)
    assert cost_of_samples(model, x) > TOLERANCE  # of what are taken for logits here


def test_an_untuned_spread_takes_batches_of_any_length():
    torch.manual_seed(0)
    model = bayesify(nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), "la")
    fit_laplace(model, [(torch.randint(11, (4, length)), torch.randint(3, (4, length))) for length in (5, 7)])
    assert all(q.std.gt(0).any() and 0 < q.fitted_sig <= q.prior_sig for _, q in named_posteriors(model))


# -- what a search costs -------------------------------------------------------------------------------------


def test_a_search_by_samples_takes_about_ten_scales_and_few_examples():
    tried = []
    best = tuning.least(lambda p: tried.append(p) or (p + 1.3) ** 2, tuning.SAMPLED_RANGE, tuning.SAMPLED)
    assert best == pytest.approx(-1.3, abs=0.3)
    assert len(tried) <= 11
    tried = []
    assert tuning.least(lambda p: tried.append(p) or 10 * (p + 4), (-4.0, 1.0), tuning.SAMPLED) == -4.0
    assert len(tried) <= 8  # larger scales are hopeless


def test_the_trial_is_a_few_examples_and_leaves_ragged_batches_whole():
    x, y = labelled(60)

    def trial(data, count):
        return tuning.first_examples(data, tuning.inputs_needed(None, count))

    sizes = [len(part) for _, part in trial(batches(x, y, 20), 320)]
    assert sizes == [10]
    assert [len(part) for _, part in trial(batches(x, y, 7), 320)] == [7, 3]
    assert sum(len(part) for _, part in trial(batches(x, y, 20), 10**6)) == 60
    ragged = {"x": torch.ones(11, 4), "owner": torch.arange(11) % 4, "labels": torch.arange(4)}
    assert trial([ragged], 32) == [ragged]
    (cut,) = trial([{"x": x, "labels": y}], 32)
    assert len(cut["x"]) == len(cut["labels"]) == 8


class Costs:
    """Counts forwards and backwards of a fit, in passes over the data."""

    def __init__(self, model, monkeypatch, examples):
        self.examples, self.forwards, self.backwards = examples, 0, 0
        model.register_forward_pre_hook(self.forward, with_kwargs=True)
        original = curvature._grads

        def grads(output, *args, **kwargs):
            self.backwards += len(output)
            return original(output, *args, **kwargs)

        monkeypatch.setattr(curvature, "_grads", grads)

    def forward(self, model, args, kwargs):
        self.forwards += len(args[0] if args else kwargs["input_ids"])

    @property
    def passes(self):
        """A pass is a forward and a backward, which costs two forwards."""
        return (self.forwards + 2 * self.backwards) / 3 / self.examples


@pytest.mark.parametrize(("options", "most"), [({}, 2), ({"structure": "kron"}, 4)])
def test_a_fit_of_a_small_bert_costs_few_passes_the_search_included(options, most, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=40,
        max_position_embeddings=16,
        num_labels=3,
    )
    model = bayesify(transformers.BertForSequenceClassification(config), "la")
    for _, posterior in named_posteriors(model):  # so that samples do harm, and the scale is searched for
        posterior.prior_sig *= 100
    ids, labels = torch.randint(1, 40, (300, 9)), torch.randint(3, (300,))
    data = [{"input_ids": i, "labels": y} for i, y in zip(ids.split(25), labels.split(25), strict=True)]
    costs = Costs(model, monkeypatch, 300)
    fit_laplace(model, data, **options)
    assert all(p.ready for _, p in named_posteriors(model))
    assert costs.passes <= most
    assert costs.forwards <= 2 * 300
