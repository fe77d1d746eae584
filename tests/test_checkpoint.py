import json
import os

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import bayesify as library
from bayesify import bayesify, load, mean, named_posteriors, param_groups, penalty, predict, save, summary, unbayesify
from bayesify.model import checkpoint, fileformat
from bayesify.model.checkpoint import POSTERIOR_FILE, CheckpointError


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

    for victim in ("os.fsync", "bayesify.model.fileformat.save_file", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(victim, dies)
            with pytest.raises(OSError, match="disk full"):
                save(model, tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["model.safetensors", POSTERIOR_FILE]
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
    """Change a file's tensors and what it says about its model, under a checksum that is right."""
    tensors, about = fileformat.read(path)
    models = json.loads(about["models"])
    change(models[""], tensors)
    about["models"] = json.dumps(models)
    about["checksum"] = fileformat.checksum(tensors, about)
    save_file(tensors, path, metadata=about)


def metadata(**changes):
    def spoil(path):
        tensors, about = fileformat.read(path)
        about |= changes
        about["checksum"] = fileformat.checksum(tensors, about)
        save_file(tensors, path, metadata=about)

    return spoil


def put(field, value):
    return lambda path: rewrite(path, lambda model, tensors: model.update({field: value}))


def option(name, value):
    return lambda path: rewrite(path, lambda model, tensors: model["options"].update({name: value}))


def prior(field, value):
    return lambda path: rewrite(path, lambda model, tensors: model["priors"]["embed.weight"].update({field: value}))


def without(key):
    return lambda path: rewrite(path, lambda model, tensors: tensors.pop(key))


def tensor(key, value):
    def change(model, tensors):
        tensors[key] = value(tensors[key]) if callable(value) else value

    return lambda path: rewrite(path, change)


def flip(path, where):
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)


RHO, MEAN, CENTER = "rho:conv.weight", "mean:conv.weight", "prior_center:embed.weight"
NAN = torch.tensor(float("nan"))
BAD = {
    "no file": (lambda p: p.unlink(), "there is no"),
    "cut at the end": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged"),
    "cut in the header": (lambda p: p.write_bytes(p.read_bytes()[:50]), "is damaged"),
    "empty": (lambda p: p.write_bytes(b""), "is damaged"),
    "other": (lambda p: save_file({"weight": torch.ones(2)}, p), "was not written by bayesify"),
    "a bit of a tensor": (lambda p: flip(p, -9), "damaged.*checksum"),
    "version 99": (metadata(version="99"), "version 99.*upgrade"),
    "version -5": (metadata(version="-5"), "damaged.*version -5"),
    "version x": (metadata(version="x"), "is damaged"),
    "deep JSON": (metadata(models="[" * 100_000 + "]" * 100_000), "damaged.*Recursion"),
    "a list": (metadata(models="[1]"), "is damaged"),
    "no models": (metadata(models="{}"), "is damaged"),
    "NaN": (metadata(models='{"": NaN}'), "damaged.*NaN is no number"),
    "unknown method": (put("method", "from_elsewhere"), "import the module that defines"),
    "method is a list": (put("method", ["vi"]), "is damaged"),
    "unknown option": (option("nonsense", 1), "damaged.*nonsense"),
    "nst of a billion": (option("nst", 10**9), "damaged.*nst must be"),
    "kld is a string": (option("kld", "1"), "damaged.*kld must be"),
    "link is a list": (option("link", ["exp"]), "is damaged"),
    "no prior_sig": (put("priors", {"embed.weight": {}}), "is damaged"),
    "prior_sig inf": (prior("prior_sig", 1e999), "damaged"),
    "prior_sig nan": (prior("prior_sig", float("nan")), "damaged.*NaN is no number"),
    **{f"prior_sig {v!r}": (prior("prior_sig", v), "damaged.*prior_sig") for v in (True, -1.0, 0.0, "0.1", None, [1])},
    **{f"fixed_row {v!r}": (prior("fixed_row", v), "damaged.*fixed_row") for v in (99, -1, [0, 1], True, "0", 1.5)},
    "is_bias 1": (prior("is_bias", 1), "damaged.*is_bias"),
    "results of nothing": (prior("results", {"forward": 1}), "damaged.*forward is nothing that a fit finds"),
    "deep results": (prior("results", {"tuned": [1]}), "damaged.*results"),
    "no mean": (without(MEAN), "damaged.*mean of 'conv.weight' is missing"),
    "no rho": (without(RHO), "damaged.*'conv.weight': rho is missing"),
    "no center": (without(CENTER), "damaged.*prior_center is missing"),
    "no frozen weight": (without("rest:frozen.weight"), "does not fit the model.*only in the model: .*frozen.weight"),
    "rho misshapen": (tensor(RHO, torch.zeros(1, 7)), "damaged.*rho has shape"),
    "center misshapen": (tensor(CENTER, torch.zeros(1, 7)), "damaged.*prior_center has shape"),
    "rho of integers": (tensor(RHO, lambda t: t.long()), "damaged.*rho is of dtype torch.int64"),
    "rho in half precision": (tensor(RHO, lambda t: t.half()), "damaged.*rho is of dtype torch.float16"),
    "rho NaN": (tensor(RHO, lambda t: t.where(t > t.min(), NAN)), "damaged.*rho is not finite"),
    "mean of integers": (tensor(MEAN, lambda t: t.long()), "damaged.*mean of 'conv.weight' is of dtype"),
    "unknown kind": (
        lambda p: rewrite(p, lambda m, t: t.update({"gamma:conv.weight": torch.ones(1)})),
        "gamma is noth",
    ),
    "unknown name": (lambda p: rewrite(p, lambda m, t: t.update({"rho:conv.x": torch.ones(1)})), "belongs to no post"),
    "unknown member": (lambda p: rewrite(p, lambda m, t: t.update({f"1/{RHO}": torch.ones(1)})), "is damaged"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD)
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


CHAIN = {
    "count 0": ("count", lambda t: t * 0, "count is not a positive integer"),
    "count of two": ("count", lambda t: t.repeat(2), "count is not a positive integer"),
    "count 1.5": ("count", lambda t: t + 0.5, "count is not a positive integer"),
    "negative scatter": ("scatter", lambda t: t - 1, "scatter is negative"),
    "no average": ("average", None, "average is missing"),
    "negative deviation": ("deviation", lambda t: -t, "deviation is negative"),
}


@pytest.mark.parametrize(("kind", "change", "message"), CHAIN.values(), ids=CHAIN)
def test_bad_moments_change_nothing(kind, change, message, tmp_path):
    method = "la" if kind == "deviation" else "sgld"
    save(trained(method, {"thin": 1} if method == "sgld" else {}), tmp_path)
    key = f"{kind}:conv.weight"
    (without(key) if change is None else tensor(key, change))(tmp_path / POSTERIOR_FILE)
    target = net(1)
    before = snapshot(target)
    with pytest.raises(CheckpointError, match=f"damaged.*{message}"):
        load(target, tmp_path)
    assert before[1:] == snapshot(target)[1:]
    assert all(torch.equal(t, target.state_dict()[k]) for k, t in before[0].items())


def test_no_bit_of_a_file_can_change_unnoticed(tmp_path):
    save(trained("vi", {}), tmp_path)
    path = tmp_path / POSTERIOR_FILE
    whole = path.read_bytes()
    for where in range(0, len(whole), max(1, len(whole) // 200)):
        flip(path, where)
        with pytest.raises(CheckpointError):
            load(net(1), tmp_path)
        path.write_bytes(whole)
    load(net(1), tmp_path)


def test_a_tuned_prior_is_known_after_load(tmp_path):
    model = library.fit_laplace(bayesify(net(), "la", **SETTINGS), [(IDS, LABELS)], tune="marglik")
    save(model, tmp_path)
    assert " by evidence" in str(summary(model))
    assert str(summary(load(net(1), tmp_path))) == str(summary(model))


def test_a_file_can_hold_several_models(tmp_path):
    models = {str(i): trained("vi", {}, steps=i) for i in range(2)}
    members = {name: checkpoint.root_of(model) for name, model in models.items()}
    fileformat.write(tmp_path, {POSTERIOR_FILE: checkpoint.contents(members)})
    files = checkpoint.read(tmp_path / POSTERIOR_FILE)
    for name, model in models.items():
        for of, posterior in named_posteriors(model):
            assert torch.equal(files[name].tensors["mean", of], posterior.mean)
            assert torch.equal(files[name].state(of)["rho"], posterior.rho)
    with pytest.raises(CheckpointError, match="holds a mixture of 2, this is one model"):
        load(models["0"], tmp_path)


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
