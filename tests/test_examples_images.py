"""The image classification example, on a few synthetic photos."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from torch import nn
from torchvision import datasets

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import image_classification as example

FLAGS = "--data photos --model test_resnet --size 32 --epochs 2 --batch_size 4 --lr 1e-2 --lr_head 2e-2"
METHODS = {
    "vanilla": "",
    "vi": "--hparams prior_sig=0.1,nst=2 --lr_sig 1e-3",
    "mc_dropout": "--hparams p_drop=0.2,nst=2 --schedule cosine",
    "sgld": "--hparams Ninflate=1000,burnin=1,thin=1,nst=2 --update_bn 0",
    "la": "--hparams prior_sig=0.1,nst=2 --tune --update_bn 2",
    "swag": "--hparams nst=2",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Reddish and greenish noise, 10 photos of each for training and 4 for the test."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for channel, name in enumerate(("red", "green")):
            (folder / "photos" / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 120, (40, 48, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / "photos" / part / name / f"{i}.png")
    return folder


def arguments(root, out, method="vi", more=""):
    return example.parse([*f"{FLAGS} --root {root} --method {method} {METHODS[method]} {more} --out {out}".split()])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_reports(root, tmp_path, method):
    result = example.run(arguments(root, tmp_path, method))
    assert result["images"] == {"train": 16, "val": 4, "test": 8}
    assert set(result["test"]) == {"mean", "samples"}
    assert all(np.isfinite(value) for found in result["test"].values() for value in found.values())
    assert "test_resnet" in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_stopped_run_goes_on_as_if_it_had_not_been(root, tmp_path, monkeypatch):
    whole = example.run(arguments(root, tmp_path / "whole"))
    real, calls = example.train_epoch, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(example, "train_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        example.run(arguments(root, tmp_path / "stopped"))
    monkeypatch.setattr(example, "train_epoch", real)
    assert example.run(arguments(root, tmp_path / "stopped")) == whole


def test_members_are_trained_on_one_split_and_mixed(root, tmp_path, monkeypatch):
    flags = "--members 3"
    result = example.run(arguments(root, tmp_path / "whole", "vanilla", flags))
    assert len(result["members"]) == 3
    assert result["images"] == {"train": 16, "val": 4, "test": 8}
    assert result["test"]["mean"] != result["test"]["samples"]
    assert {m["val_loss"] for m in result["members"]} != {result["members"][0]["val_loss"]}
    assert (tmp_path / "whole" / "best" / "posterior.safetensors").exists()
    real, calls = example.train_epoch, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 4:  # in the second member
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(example, "train_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        example.run(arguments(root, tmp_path / "stopped", "vanilla", flags))
    calls.clear()
    monkeypatch.setattr(example, "train_epoch", lambda *args: calls.append(1) or real(*args))
    assert example.run(arguments(root, tmp_path / "stopped", "vanilla", flags)) == result
    assert len(calls) == 3


def test_a_finished_run_is_not_repeated_and_other_settings_are_refused(root, tmp_path, monkeypatch):
    result = example.run(arguments(root, tmp_path))
    monkeypatch.setattr(example, "open_data", None)
    assert example.run(arguments(root, tmp_path)) == result
    with pytest.raises(SystemExit, match=r"other settings \(epochs\)"):
        example.run(arguments(root, tmp_path, more="--epochs 3"))


def test_the_table_is_printed(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x", *f"{FLAGS} --root {root} --method vanilla --out {tmp_path}".split()])
    example.main()
    assert "error" in capsys.readouterr().out


def test_splits_are_disjoint_and_stratified():
    labels = [0] * 10 + [1] * 30
    train, val = example.split(labels, 0.2, seed=0)
    assert sorted(train + val) == list(range(40))
    assert [labels[i] for i in val].count(0) == 2
    assert [labels[i] for i in val].count(1) == 6
    assert example.split(labels, 0.2, seed=1) != (train, val)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--val_heldout 1.0", "must be between 0 and 1"),
        ("--hparams burnin=10", "burnin must be less than --epochs"),
        ("--members 0", "--members must be at least 1"),
    ],
)
def test_flags_that_cannot_be(flags, message, capsys):
    with pytest.raises(SystemExit):
        example.parse(flags.split())
    assert message in capsys.readouterr().err


def test_folders_that_do_not_fit(root, tmp_path):
    (tmp_path / "half" / "train").mkdir(parents=True)
    for data, message in (("nothing", "no nothing/train"), ("half", "neither test/ nor val/")):
        with pytest.raises(SystemExit, match=message):
            example.open_data(example.parse(["--root", str(tmp_path), "--data", data]))
    with pytest.raises(SystemExit, match="less than one batch"):
        example.run(arguments(root, tmp_path / "out", more="--batch_size 64"))


def test_pets_and_flowers_are_torchvisions(monkeypatch):
    class Fake(list):
        def __init__(self, root, part, download):
            super().__init__([("image", len(part))])
            self.classes, self._labels = ["a", "b"], [len(part)]

    monkeypatch.setattr(datasets, "OxfordIIITPet", Fake)
    monkeypatch.setattr(datasets, "Flowers102", Fake)
    train, test, classes = example.open_data(example.parse(["--data", "pets"]))
    assert (example.labels_of(train), example.labels_of(test), classes) == ([8], [4], ["a", "b"])
    train, test, classes = example.open_data(example.parse(["--data", "flowers"]))
    assert (example.labels_of(train), example.labels_of(test), len(classes)) == ([5, 3], [4], 102)


def test_the_papers_models_get_their_heads(monkeypatch):
    asked = {}

    def create_bayesian(*names, **options):
        asked[names] = options
        return SimpleNamespace(model=nn.Linear(1, 1))

    monkeypatch.setattr(example, "create_bayesian", create_bayesian)
    for name in ("torchvision/resnet101", "torchvision/vit_l_32"):
        example.build(example.parse(["--model", name, "--pretrained", "--hparams", "burnin=2,prior_sig=0.01"]), "ab", 7)
        assert asked[name, "vi"] == {"num_classes": 2, "pretrained": True, "burnin": 14, "prior_sig": 0.01}
