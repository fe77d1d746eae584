import json
import os

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import bayesify as library
from bayesify import bayesify, load, mean, named_posteriors, param_groups, penalty, predict, save, summary, unbayesify
from bayesify.checkpoint import POSTERIOR_FILE, CheckpointError


class Net(nn.Module):
    """Convolution, BatchNorm, a tied pair, an embedding with padding, a frozen layer and bare parameters."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(10, width, padding_idx=0)
        self.conv = nn.Conv1d(width, width, 1)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.token = nn.Parameter(torch.randn(1, width, 1))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.norm(self.conv(self.embed(ids).transpose(1, 2)) + self.token)
        return self.head(self.frozen(x.mean(-1)))


def net(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Net(**kwargs)


IDS = torch.arange(40).view(10, 4) % 10
LABELS = torch.arange(10)
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
SETTINGS = {"prior_sig": {"head.*": 0.5, "*": 0.1}, "prior_mean": {"conv.*": "zero"}, "exclude": "token"}


def trained(method, options, steps=4):
    model = bayesify(net(), method, **SETTINGS, **options)
    groups = param_groups(model, 0.05)
    optimizer = library.SGLD(model, groups, num_data=10) if method == "sgld" else torch.optim.SGD(groups)
    for _ in range(steps):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(IDS), LABELS) + penalty(model, 10)).backward()
        optimizer.step()
    if method == "la":
        library.fit_laplace(model, [(IDS, LABELS)])
    return model


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


def test_a_crash_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = trained("vi", {})
    save(model, tmp_path)
    old = load_file(tmp_path / POSTERIOR_FILE)
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.add_(1)

    def dies(*args, **kwargs):
        raise OSError("disk full")

    for victim in ("os.fsync", "bayesify.checkpoint.save_file", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(victim, dies)
            with pytest.raises(OSError, match="disk full"):
                save(model, tmp_path)
        for name, tensor in load_file(tmp_path / POSTERIOR_FILE).items():
            assert torch.equal(tensor, old[name])
        load(net(1), tmp_path)


def snapshot(model):
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        type(model.conv),
        [n for n, _ in model.named_modules()],
    )


def rewrite(path, change):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(about, tensors)
    save_file(tensors, path, metadata=about)


def set_version(about, tensors):
    about["version"] = "99"


def unknown_method(about, tensors):
    about["method"] = "from_elsewhere"


def bad_options(about, tensors):
    about["options"] = json.dumps({"nonsense": 1})


def drop_a_tensor(about, tensors):
    del tensors["rest:frozen.weight"]


def without(kind):
    return lambda about, tensors: tensors.pop(next(name for name in tensors if name.startswith(kind)))


def misshapen(kind):
    return lambda about, tensors: tensors.update(
        {next(name for name in tensors if name.startswith(kind)): torch.zeros(1, 7)}
    )


def prior_without_a_scale(about, tensors):
    about["priors"] = about["priors"].replace("prior_sig", "prior")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        *((lambda p, k=k: rewrite(p, without(k)), "is not whole") for k in ("mean:", "rho:", "prior_center:")),
        *((lambda p, k=k: rewrite(p, misshapen(k)), "is not whole") for k in ("rho:", "prior_center:")),
        (lambda p: rewrite(p, prior_without_a_scale), "is not whole"),
        (lambda p: p.unlink(), "there is no"),
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:50]), "is damaged"),
        (lambda p: p.write_bytes(b""), "is damaged"),
        (lambda p: save_file({"weight": torch.ones(2)}, p), "was not written by bayesify"),
        (lambda p: rewrite(p, set_version), "version 99.*upgrade"),
        (lambda p: rewrite(p, unknown_method), "import the module that defines"),
        (lambda p: rewrite(p, bad_options), "is damaged"),
        (lambda p: rewrite(p, drop_a_tensor), "does not fit the model.*only in the model: .*frozen.weight"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_bad_files_change_nothing(spoil, message, wrapped, tmp_path):
    save(trained("vi", {}), tmp_path)
    spoil(tmp_path / POSTERIOR_FILE)
    target = bayesify(net(1), "vi", exclude="token") if wrapped else net(1)
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=message):
        load(target, tmp_path)
    after = snapshot(target)
    assert before[1:] == after[1:]
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: bayesify(net(1), "mc_dropout"), "of method 'vi', the model is bayesified with 'mc_dropout'"),
        (lambda: bayesify(net(1), "vi"), "Bayesian parameters differ.*only in the model: .*token"),
        (lambda: net(1, width=5), "has shape"),
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
