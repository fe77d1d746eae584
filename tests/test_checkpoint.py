"""Save and load: everything comes back exactly, into a model that fits; any other is told what differs."""

import os

import pytest
import torch
from checkpoints import IDS, LABELS, SETTINGS, net, trained
from safetensors.torch import load_model
from torch import nn

import bayesify as library
from bayesify import bayesify, load, mean, named_posteriors, penalty, predict, save, summary, unbayesify
from bayesify.core import checkpoint, fileformat
from bayesify.core.checkpoint import POSTERIOR_FILE, CheckpointError

OPTIONS = [
    ("vi", {}),
    ("vi", {"link": "exp", "bias": "uninformative", "kld": 0.1, "nst": 3, "init_sig": 0.01}),
    ("vi", {"link": "clamp"}),
    ("mc_dropout", {}),
    ("mc_dropout", {"p_drop": 0.4, "bias": "gaussian", "mean": "expected"}),
    ("mc_dropout", {"bias": "ignore"}),
    ("vanilla", {"wd": 0.1, "bias": "ignore"}),
    ("sgld", {"Ninflate": 10.0, "nd": 0.5, "thin": 2, "burnin": 1}),
    ("la", {"Ninflate": 10.0, "damping": 0.1, "bias": "uninformative"}),
]


@pytest.mark.parametrize(("method", "options"), OPTIONS, ids=[f"{m}-{i}" for i, (m, _) in enumerate(OPTIONS)])
@pytest.mark.filterwarnings("ignore:.*slower:UserWarning")
def test_round_trip_is_exact(method, options, tmp_path):
    model = trained(method, options)
    save(model, tmp_path)
    targets = [net(1), bayesify(net(2), method, **SETTINGS, **options), bayesify(net(3), method, exclude="token")]
    for target in targets:
        identity = {name: id(p) for name, p in target.named_parameters()}
        restored = load(target, tmp_path)
        assert restored is target
        before, after = dict(named_posteriors(model)), dict(named_posteriors(restored))
        assert list(before) == list(after)
        for name, posterior in before.items():
            other = after[name]
            assert torch.equal(posterior.mean, other.mean), name
            assert torch.equal(posterior.std, other.std), name
            assert torch.equal(posterior.prior_mean, other.prior_mean), name
            assert posterior.prior_sig == other.prior_sig
        assert torch.equal(penalty(model, 10), penalty(restored, 10))
        expected = predict(model, IDS, seed=0)
        assert expected.num_samples == predict(restored, IDS, seed=0).num_samples
        assert torch.equal(expected.logits, predict(restored, IDS, seed=0).logits)
        assert torch.equal(restored.norm.running_mean, model.norm.running_mean)
        assert restored.norm.num_batches_tracked == model.norm.num_batches_tracked
        assert str(summary(model)) == str(summary(restored))
        if target is not targets[0]:
            assert {name: id(p) for name, p in restored.named_parameters()} == identity


def test_training_goes_on_after_load(tmp_path):
    model = trained("vi", {})
    save(model, tmp_path)
    restored = load(net(1), tmp_path)
    assert restored.training
    for m in (model, restored):
        m.zero_grad()
        torch.manual_seed(5)
        (m(IDS).square().mean() + penalty(m, 10)).backward()
    for (name, a), (_, b) in zip(named_posteriors(model), named_posteriors(restored), strict=True):
        torch.testing.assert_close(a.original.grad, b.original.grad, msg=name)
        torch.testing.assert_close(a.rho.grad, b.rho.grad, msg=name)


def test_the_mean_is_readable_without_bayesify(tmp_path):
    model = trained("mc_dropout", {"mean": "expected"})
    save(model, tmp_path)
    plain = net(1)
    missing, unexpected = load_model(plain, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    model.eval()
    with mean(model):
        torch.testing.assert_close(plain.eval()(IDS), model(IDS), rtol=0, atol=0)


def test_load_reads_one_file_only(tmp_path):
    save(trained("vi", {}), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    load(net(1), tmp_path)
    assert sorted(os.listdir(tmp_path)) == [POSTERIOR_FILE]


def test_a_tuned_prior_is_known_after_load(tmp_path):
    model = library.fit_laplace(bayesify(net(), "la", **SETTINGS), [(IDS, LABELS)], tune=[(IDS, LABELS)])
    save(model, tmp_path)
    assert " by validation" in str(summary(model))
    assert str(summary(load(net(1), tmp_path))) == str(summary(model))


def test_a_file_can_hold_several_models(tmp_path):
    models = {str(i): trained("vi", {}, steps=i) for i in range(2)}
    members = {name: checkpoint.root_of(model) for name, model in models.items()}
    fileformat.write(tmp_path, {POSTERIOR_FILE: checkpoint.contents(members)})
    files = checkpoint.read(tmp_path / POSTERIOR_FILE)
    for name, model in models.items():
        for of, posterior in named_posteriors(model):
            assert torch.equal(files[name].means[of], posterior.mean)
            assert torch.equal(files[name].states[of]["rho"], posterior.rho)
    with pytest.raises(CheckpointError, match="holds a mixture of 2, this is one model"):
        load(models["0"], tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: bayesify(net(1), "mc_dropout"), "of method 'vi', the model is bayesified with 'mc_dropout'"),
        (lambda: bayesify(net(1), "vi"), "Bayesian parameters differ.*only in the model: .*token"),
        (lambda: net(1, width=5), r"has shape .* in the model"),
        (lambda: nn.Linear(2, 2), "does not fit the model"),
    ],
)
def test_models_that_do_not_fit(target, message, tmp_path):
    save(trained("vi", {}), tmp_path)
    model = target()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load(model, tmp_path)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) and len(state) == len(
        model.state_dict()
    )


def test_a_wrapper_around_the_model(tmp_path):
    model = trained("vi", {})
    wrapper = nn.Sequential(model)
    save(wrapper, tmp_path)
    restored = load(net(1), tmp_path)
    assert torch.equal(predict(restored, IDS, seed=0).logits, predict(wrapper, IDS, seed=0).logits)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="call bayesify"):
        save(net(), tmp_path)
    both = nn.Sequential(bayesify(nn.Linear(2, 2)), bayesify(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="2 parts of the model"):
        save(both, tmp_path)


def test_unbayesify_after_load(tmp_path):
    model = trained("vi", {})
    save(model, tmp_path)
    names = [n for n, _ in net().named_parameters()]
    plain = unbayesify(load(net(1), tmp_path))
    assert [n for n, _ in plain.named_parameters()] == names
    assert torch.equal(plain.eval()(IDS), model.eval()(IDS))


@pytest.mark.parametrize(("saved", "loaded"), [("float32", "float64"), ("float64", "float32"), ("float32", "bfloat16")])
def test_loading_into_another_dtype(tmp_path, saved, loaded):
    save(bayesify(nn.Linear(3, 2).to(getattr(torch, saved)), "mc_dropout", mean="expected", p_drop=0.5), tmp_path)
    dtype = getattr(torch, loaded)
    model = load(nn.Linear(3, 2).to(dtype), tmp_path / "posterior.safetensors")
    x = torch.ones(1, 3, dtype=dtype)
    assert model(x).dtype == model.eval()(x).dtype == dtype


def test_weights_that_share_memory(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    bayesify(model, "vi")
    save(model, tmp_path)
    restored = load(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path)
    for (_, a), (_, b) in zip(named_posteriors(model), named_posteriors(restored), strict=True):
        assert torch.equal(a.mean, b.mean)
