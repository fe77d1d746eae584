"""Files that are damaged, cut or of another kind are refused, and the model stays as it was."""

import json
import os

import pytest
import torch
from checkpoints import net, trained
from safetensors.torch import load_file, save_file

from bayesify import bayesify, load, named_posteriors, save
from bayesify.core import fileformat
from bayesify.core.checkpoint import POSTERIOR_FILE, CheckpointError


def test_a_crash_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = trained("vi", {})
    save(model, tmp_path)
    old = load_file(tmp_path / POSTERIOR_FILE)
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.original.add_(1)

    def dies(*args, **kwargs):
        raise OSError("disk full")

    for victim in ("os.fsync", "bayesify.core.fileformat.save_file", "os.replace"):
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


BAD = {
    "no file": (lambda p: p.unlink(), "there is no"),
    "cut at the end": (lambda p: p.write_bytes(p.read_bytes()[:-100]), "is damaged"),
    "cut in the header": (lambda p: p.write_bytes(p.read_bytes()[:50]), "is damaged"),
    "empty": (lambda p: p.write_bytes(b""), "is damaged"),
    "other": (lambda p: save_file({"weight": torch.ones(2)}, p), "was not written by bayesify"),
    "a bit of a tensor": (lambda p: flip(p, -9), "damaged.*checksum"),
    "version 99": (metadata(version="99"), "version 99.*upgrade"),
    "version 1": (metadata(version="1"), "format version 1, this bayesify reads 2; save the model again"),
    "version x": (metadata(version="x"), "is damaged"),
    "deep JSON": (metadata(models="[" * 100_000 + "]" * 100_000), "damaged.*Recursion"),
    "a list": (metadata(models="[1]"), "is damaged"),
    "no models": (metadata(models="{}"), "holds a mixture of 0, this is one model"),
    "unknown method": (put("method", "from_elsewhere"), "import the module that defines"),
    "method is a list": (put("method", ["vi"]), "is damaged"),
    "unknown option": (option("nonsense", 1), "damaged.*nonsense"),
    "a negative nst": (option("nst", -1), "damaged.*nst must be"),
    "kld is a string": (option("kld", "1"), "damaged.*kld must be"),
    "link is a list": (option("link", ["exp"]), "is damaged"),
    "no prior_sig": (put("priors", {"embed.weight": {}}), "is damaged|does not fit the model"),
    "prior_sig inf": (prior("prior_sig", 1e999), "damaged"),
    "prior_sig nan": (prior("prior_sig", float("nan")), "damaged.*prior_sig"),
    **{f"prior_sig {v!r}": (prior("prior_sig", v), "damaged.*prior_sig") for v in (True, -1.0, 0.0, "0.1", None, [1])},
    **{f"fixed_row {v!r}": (prior("fixed_row", v), "damaged.*fixed_row") for v in (99, -1, [0, 1], True, "0", 1.5)},
    "results are a list": (prior("results", [1]), "damaged.*'embed.weight'"),
    "no mean": (without(MEAN), "does not fit the model.*only in the model: .*conv.weight"),
    "no rho": (without(RHO), "damaged.*'conv.weight': rho is missing"),
    "no center": (without(CENTER), "damaged.*prior_center"),
    "no frozen weight": (without("rest:frozen.weight"), "does not fit the model.*only in the model: .*frozen.weight"),
    "rho misshapen": (tensor(RHO, torch.zeros(1, 7)), "damaged.*rho has shape"),
    "center misshapen": (tensor(CENTER, torch.zeros(1, 7)), "damaged.*prior_center has shape"),
    "unknown kind": (
        lambda p: rewrite(p, lambda m, t: t.update({"gamma:conv.weight": torch.ones(1)})),
        "gamma is noth",
    ),
    "unknown name": (lambda p: rewrite(p, lambda m, t: t.update({"rho:conv.x": torch.ones(1)})), "is damaged"),
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
