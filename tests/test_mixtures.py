"""Mixtures: several posteriors as one model, one prediction and one file."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import (
    bayesify,
    components,
    fit_laplace,
    load,
    mean,
    metrics,
    mix,
    named_posteriors,
    penalty,
    predict,
    sample,
    samples,
    save,
    summary,
    unbayesify,
)
from bayesify.core import checkpoint
from bayesify.core.checkpoint import POSTERIOR_FILE, CheckpointError
from bayesify.core.mixture import Mixture, shared_copy
from bayesify.prediction.predictive import Predictive

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


class Net(nn.Module):
    """A frozen trunk with a table, BatchNorm and a head."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 50).requires_grad_(False)
        self.norm = nn.BatchNorm1d(50)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 50), persistent=False)
        self.head = nn.Linear(50, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.trunk(x))) * self.table)


def net(seed, base=100):
    """Return a model of which only head and BatchNorm statistics follow from the seed."""
    torch.manual_seed(base)
    model = Net()
    torch.manual_seed(seed)
    nn.init.normal_(model.head.weight)
    model.norm.running_mean.normal_()
    return model.eval()


def member(seed, method="vanilla", **options):
    model = bayesify(net(seed), method, prior_sig=0.5, **options)
    if method == "la":
        fit_laplace(model, [(X, Y)], include="head.*")
    return model.eval()


def ensemble(count=5, method="vanilla", **options):
    return mix(member(seed, method, **options) for seed in range(count))


def plain_logits(models):
    with torch.no_grad():
        return torch.stack([model(X) for model in models])


def test_five_points_predict_what_their_logits_do_bit_for_bit():
    model = ensemble()
    expected = Predictive.from_logits(plain_logits(components(model)), Y)
    for count in (None, 5):
        found = predict(model, [(X, Y)], samples=count)
        assert found.num_samples == 5
        for name in ("log_probs", "expected_entropy", "logits", "labels", "entropy"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
    softmax = plain_logits(components(model)).softmax(-1).mean(0)
    torch.testing.assert_close(found.probs.float(), softmax, atol=1e-6, rtol=0)


def test_predict_takes_the_draws_of_samples_and_spreads_them_evenly():
    model = ensemble(3, "vi", init_sig=0.3)
    found = predict(model, X, samples=7, seed=3)
    with torch.no_grad():
        each = torch.stack([model(X) for _ in samples(model, 7, seed=3)])
    torch.testing.assert_close(found.logits, each)
    # Draws 0, 3 and 6 are the first member's: each member weighs the same.
    by_member = torch.stack([each[k::3].softmax(-1).mean(0) for k in range(3)])
    torch.testing.assert_close(found.probs.float(), by_member.mean(0), atol=1e-6, rtol=0)


def test_a_draw_is_one_of_the_members_own():
    model = ensemble(3)
    alone = plain_logits(components(model))
    picked = []
    for seed in range(60):
        with sample(model, seed=seed), torch.no_grad():
            first, second = model(X), model(X)
        assert torch.equal(first, second)
        picked.append(next(k for k in range(3) if torch.equal(first, alone[k])))
    counts = torch.bincount(torch.tensor(picked), minlength=3)
    assert (counts - 20).abs().max() < 4 * (60 * 2 / 9) ** 0.5


def test_no_member_is_left_out():
    model = ensemble(5)
    with pytest.raises(ValueError, match=r"samples=3 leaves 2 of the mixture's 5 members out; give samples=5 or more"):
        predict(model, X, samples=3)
    assert predict(model, X, samples=5, seed=0).logits.shape[0] == 5
    assert predict(model, X, samples=0).num_samples == 0


@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_temperature_of_one_changes_nothing_whatever_the_rows_weigh(count):
    model = mix([member(0), member(1, "vi", init_sig=1.0), member(2, "vi", init_sig=2.0)])
    for out in (predict(model, [(X, Y)], samples=count, seed=0), predict(model, [(X, Y)], seed=0)):
        for name in ("log_probs", "expected_entropy"):
            torch.testing.assert_close(getattr(out.tempered(1.0), name), getattr(out, name), rtol=1e-12, atol=1e-12)
        out = replace(out, labels=(out.prediction + (torch.arange(12) % 4 == 0)) % 3)  # some of them wrong
        fitted = metrics.fit_temperature(out)
        assert fitted.nll_before == pytest.approx(out.scores["nll"], rel=1e-9)
        assert fitted.nll == pytest.approx(out.tempered(fitted).scores["nll"], rel=1e-9)
        assert out[2:5].tempered(2.0).probs.allclose(out.tempered(2.0).probs[2:5])


def test_a_closed_form_beside_samples_has_no_temperature():
    out = predict(mix([member(0, "la"), member(1, "vi", init_sig=1.0)]), X, seed=0)
    with pytest.raises(ValueError, match="a closed form of a member has no samples to temper"):
        out.tempered(1.0)


def test_none_is_five_per_sampled_member_and_one_per_point_each_with_the_same_weight():
    model = mix([member(0), member(1, "vi", init_sig=0.3)])
    found = predict(model, X, seed=0)
    assert found.num_samples == 6
    point, rest = found.logits[0], found.logits[1:]
    torch.testing.assert_close(found.probs.float(), (point.softmax(-1) + rest.softmax(-1).mean(0)) / 2)


def test_mean_mode_is_the_first_member():
    model = ensemble(3, "vi", init_sig=0.3)
    first = components(model)[0]
    with torch.no_grad():
        assert torch.equal(model(X), first(X))
        with mean(model.train()):
            assert torch.equal(model.members[0].eval()(X), first(X))
    model.eval()
    assert torch.equal(predict(model, X, samples=0).log_probs, predict(first, X, samples=0).log_probs)


def test_closed_forms_are_averaged_in_closed_form():
    models = [member(seed, "la") for seed in range(3)]
    alone = [predict(m, [(X, Y)]) for m in models]
    assert all(p.closed_form for p in alone)
    before = torch.get_rng_state()
    found = predict(mix(models), [(X, Y)])
    assert found.closed_form
    assert found.num_samples == 0
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(found.probs, torch.stack([p.probs for p in alone]).mean(0))
    torch.testing.assert_close(found.expected_entropy, torch.stack([p.expected_entropy for p in alone]).mean(0))


def test_data_that_is_read_once_gives_the_same():
    model = ensemble(3, "vi", init_sig=0.3)
    batches = [X[:5], X[5:]]
    once = predict(model, (x for x in batches), samples=6, seed=1)
    torch.testing.assert_close(once.log_probs, predict(model, batches, samples=6, seed=1).log_probs)


def test_a_regression_has_the_moments_of_the_mixture():
    models = [bayesify(nn.Linear(4, 1).double(), "vi", prior_sig=1.0, init_sig=0.2) for _ in range(3)]
    x = X.double()
    found = predict(mix(models), x, samples=12, seed=5, task="regression")
    outputs = found.outputs.view(4, 3, 12, 1)
    torch.testing.assert_close(found.mean, outputs.mean((0, 1)))
    variance = outputs.var(0).mean(0) + outputs.mean(0).var(0, correction=0)
    torch.testing.assert_close(found.epistemic, variance.sqrt())
    assert found.num_samples == 12


def test_a_multilabel_prediction_is_the_mean_of_the_members():
    model = ensemble(4)
    found = predict(model, X, task="multilabel")
    torch.testing.assert_close(found.probs.float(), plain_logits(components(model)).sigmoid().mean(0))


def storage_bytes(model):
    kept = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(kept.values())


def test_equal_frozen_weights_tables_and_prior_means_are_kept_once_and_statistics_per_member():
    models = [member(seed) for seed in range(5)]
    one = storage_bytes(models[0])
    identities = [id(p) for m in models for p in m.parameters()]
    model = mix(models)
    a, b = components(model)[:2]
    assert a is models[0]
    assert [id(p) for m in models for p in m.parameters()] == identities
    assert a.trunk.weight.data_ptr() == b.trunk.weight.data_ptr()
    assert a.table.data_ptr() == b.table.data_ptr()
    assert a.norm.running_mean.data_ptr() != b.norm.running_mean.data_ptr()
    assert a.norm.running_var.data_ptr() != b.norm.running_var.data_ptr()
    shared = a.trunk.weight.nbytes + a.trunk.bias.nbytes + a.table.nbytes
    assert storage_bytes(model) <= 5 * one - 4 * shared
    for moved in (copy.deepcopy(model), model.double()):
        first, second = components(moved)[:2]
        assert first.trunk.weight.data_ptr() == second.trunk.weight.data_ptr()
        assert moved(X.to(first.trunk.weight.dtype)).shape == (12, 3)


class Running(nn.Module):
    """A normalization of somebody's own, which torch's classes do not know."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.center.lerp_(x.mean(0), 0.5)
            self.count.add_(1)
        return x - self.center


def test_running_statistics_of_any_layer_belong_to_their_member():
    models = [bayesify(nn.Sequential(Running(), nn.Linear(4, 3)), "vanilla") for _ in range(2)]
    first, second = components(mix(models))
    first.train()(torch.ones(5, 4))
    assert float(second[0].center.abs().sum()) == int(second[0].count) == 0


def test_other_frozen_weights_stay_apart():
    first, second = bayesify(net(0), "vanilla"), bayesify(net(1, base=7), "vanilla")
    before = plain_logits([first, second])
    mix([first, second])
    assert torch.equal(plain_logits([first, second]), before)
    assert first.trunk.weight.data_ptr() != second.trunk.weight.data_ptr()


def test_inputs_stay_usable_and_can_be_trained():
    models = [bayesify(net(seed), "vi") for seed in range(2)]
    model = mix(models)
    optimizer = torch.optim.SGD(models[1].parameters(), 0.1)
    other = plain_logits([models[0].eval()])
    models[1].train()
    (F.cross_entropy(models[1](X), Y) + penalty(models[1], 12)).backward()
    optimizer.step()
    assert torch.equal(plain_logits([models[0]]), other)
    assert predict(model, X, samples=4).num_samples == 4


@pytest.mark.parametrize("methods", [("vanilla", "vanilla"), ("vi", "la", "mc_dropout"), ("vi", "vi")], ids=str)
def test_save_and_load_round_trip(methods, tmp_path):
    model = mix(member(seed, method) for seed, method in enumerate(methods))
    save(model, tmp_path)
    plain = net(9)
    restored = load(plain, tmp_path)
    assert isinstance(restored, Mixture)
    assert components(restored)[0] is plain
    other = mix(member(seed + 20, method) for seed, method in enumerate(methods))
    for target in (restored, load(other, tmp_path)):
        for a, b in zip(named_posteriors(model), named_posteriors(target), strict=True):
            assert a[0] == b[0]
            assert torch.equal(a[1].mean, b[1].mean)
            assert torch.equal(a[1].std, b[1].std)
        for count in (None, 0, 6):
            assert torch.equal(predict(model, X, count, seed=1).log_probs, predict(target, X, count, seed=1).log_probs)
    first, second = components(restored)[:2]
    assert first.trunk.weight.data_ptr() == second.trunk.weight.data_ptr()


def test_what_members_share_is_in_the_file_once_and_the_plain_file_is_the_first_member(tmp_path):
    from safetensors.torch import load_model

    model = ensemble(5)
    save(model, tmp_path / "five")
    save(components(model)[0], tmp_path / "one")
    five, one = ((tmp_path / n / POSTERIOR_FILE).stat().st_size for n in ("five", "one"))
    shared = sum(t.nbytes for t in (model.members[0].trunk.weight, model.members[0].trunk.bias, model.members[0].table))
    assert five <= 5 * one - 4 * shared
    plain = net(9)
    load_model(plain, tmp_path / "five" / "model.safetensors")
    assert torch.equal(plain_logits([plain])[0], plain_logits(components(model))[0])


def test_a_failed_load_changes_no_member(tmp_path):
    save(mix([member(0), member(1, "vi")]), tmp_path)
    target = mix([member(5), member(6, "mc_dropout")])
    before = plain_logits(components(target))
    with pytest.raises(CheckpointError, match="holds a posterior of method 'vi'"):
        load(target, tmp_path)
    assert torch.equal(plain_logits(components(target)), before)
    with pytest.raises(CheckpointError, match="holds a mixture of 2, this is a mixture of 3"):
        load(ensemble(3), tmp_path)
    with pytest.raises(CheckpointError, match="holds a mixture of 2, this is one model"):
        load(member(0), tmp_path)


def test_state_dicts_and_copies_hold_every_member():
    model, other = ensemble(2, "vi"), mix(member(seed, "vi") for seed in (7, 8))
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for posterior in (p for _, p in named_posteriors(model)):
            expected = predict(other, X, 4, seed=0).log_probs
            posterior.original.zero_()
    assert torch.equal(predict(copied, X, 4, seed=0).log_probs, expected)
    assert torch.equal(predict(other, X, 4, seed=0).log_probs, expected)
    assert not torch.equal(predict(model, X, 4, seed=0).log_probs, expected)


def test_a_container_of_a_mixture_works_too():
    model = ensemble(3, "vi", init_sig=0.3)
    container = nn.Sequential(model, nn.Identity()).eval()
    assert components(container) == components(model)
    assert torch.equal(predict(container, X, 6, seed=0).log_probs, predict(model, X, 6, seed=0).log_probs)


def test_unbayesify_gives_the_first_member_or_a_draw():
    model = ensemble(3)
    alone = plain_logits(components(model))
    torch.manual_seed(3)
    baked = unbayesify(copy.deepcopy(model), to="sample")
    assert any(torch.equal(plain_logits([baked])[0], one) for one in alone)
    plain = unbayesify(model)
    assert type(plain) is Net
    assert torch.equal(plain_logits([plain])[0], alone[0])


def test_summary_and_posteriors_name_every_member():
    model = mix([member(0), member(1, "vi")])
    names = [name for name, _ in named_posteriors(model)]
    assert names[0] == "members.0.norm.weight"
    assert names[-1] == "members.1.head.bias"
    assert "Vanilla(" in str(summary(model))
    assert "VI(" in str(summary(model))


def test_the_penalty_is_the_sum_of_the_members():
    model = mix([member(0), member(1, "mc_dropout")]).train()
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.add_(0.3)
    assert penalty(model, 10) > 0
    torch.testing.assert_close(penalty(model, 10), sum(penalty(m, 10) for m in components(model)))


def test_a_mixture_is_trained_member_by_member():
    model = ensemble(2).train()
    with pytest.raises(RuntimeError, match="train its members"):
        model(X)
    with torch.no_grad(), mean(model):
        assert model(X).shape == (12, 3)


def test_a_checkpoint_around_a_mixture_needs_its_block():
    model = ensemble(2)
    for backward_inside in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with sample(model, seed=1):
                loss = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False).sum()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                with pytest.raises(RuntimeError, match="keep the mean or sample block open"):
                    loss.backward()


def test_what_cannot_be_mixed_is_told():
    one = member(0)
    cases = [
        (lambda: mix(one), TypeError, "takes a list of models"),
        (lambda: mix([]), ValueError, "nothing to mix"),
        (lambda: mix([one, net(1)]), ValueError, r"models\[1\] has no posterior"),
        (lambda: mix([one, one]), ValueError, r"models\[1\] is models\[0\]"),
        (lambda: mix([one, mix([member(1)])]), ValueError, r"models\[1\] is a mixture itself"),
        (lambda: mix([one, bayesify(nn.Linear(4, 3), "vanilla")]), ValueError, "of another architecture"),
        (lambda: mix([one, 3]), TypeError, "must be a torch.nn.Module"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()


def test_a_member_that_is_not_ready_keeps_the_mixture_from_being_sampled():
    model = mix([member(0), bayesify(net(1), "la")])
    with pytest.raises(ValueError, match="has not been fitted"):
        predict(model, X)


def test_a_hugging_face_folder_holds_the_mixture_and_reads_as_its_first_member(tmp_path):
    transformers = pytest.importorskip("transformers")
    from bayesify.integrations.huggingface import from_pretrained, save_pretrained

    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(**small, vocab_size=9)
    models = [bayesify(transformers.BertForSequenceClassification(config), "vi").eval() for _ in range(2)]
    model = mix(models)
    inputs = {"input_ids": torch.arange(6).view(2, 3)}
    save_pretrained(model, tmp_path)
    restored = from_pretrained(tmp_path)
    assert len(components(restored)) == 2
    assert torch.equal(predict(restored, inputs, 4, seed=0).log_probs, predict(model, inputs, 4, seed=0).log_probs)
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs).logits, models[0](**inputs).logits)


def test_loading_copies_only_the_frozen_weights_that_differ(tmp_path, monkeypatch):
    same, other = [bayesify(net(seed), "vanilla") for seed in (0, 1)], bayesify(net(2, base=7), "vanilla")
    for name, models in (("same", same), ("other", [same[0], other])):
        save(mix(models), tmp_path / name)
        restored = load(net(9), tmp_path / name)
        assert torch.equal(plain_logits(components(restored)), plain_logits(models))
    plain = net(9)
    copied = shared_copy(plain)
    assert copied.trunk.weight is not plain.trunk.weight
    assert copied.trunk.weight.data_ptr() == plain.trunk.weight.data_ptr()
    assert copied.head.weight.data_ptr() != plain.head.weight.data_ptr()
    assert shared_copy(plain, apart={id(plain.trunk.weight)}).trunk.weight.data_ptr() != plain.trunk.weight.data_ptr()
    made = []
    monkeypatch.setattr(checkpoint, "shared_copy", lambda *a, **k: made.append(shared_copy(*a, **k)) or made[-1])
    load(plain, tmp_path / "same")
    assert made[0].trunk.weight.data_ptr() == plain.trunk.weight.data_ptr()
