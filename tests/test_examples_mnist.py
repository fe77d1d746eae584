"""The MNIST example and the reproduction of the paper's tables, on a handful of made-up images."""

import gzip
import importlib
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parent.parent / "examples"
SCORES = {"error", "nll", "ece", "mce", "ece_pooled", "mce_pooled"}


@pytest.fixture
def mnist(monkeypatch):
    return example(monkeypatch, "mnist")


@pytest.fixture
def small(mnist, monkeypatch):
    """Give the example a network that trains in no time."""
    monkeypatch.setattr(mnist, "network", lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
    return mnist


@pytest.fixture
def reproduce(mnist, monkeypatch, tmp_path):
    module = example(monkeypatch, "reproduce")
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    return module


def example(monkeypatch, name):
    """Import an example afresh, and forget it after the test."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def data_root(tmp_path):
    """Return a folder in torchvision's layout: ten noisy patterns in place of the digits."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 256, (10, 28, 28))
    for part, count in (("train", 240), ("t10k", 90)):
        labels = generator.integers(0, 10, count).astype(np.uint8)
        images = (0.7 * patterns[labels] + 0.3 * generator.integers(0, 256, (count, 28, 28))).astype(np.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path / "data"


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(head + array.tobytes()))


def arguments(mnist, data_root, log_dir, *more):
    places = ["--data_root", str(data_root), "--log_dir", str(log_dir)]
    return mnist.parse([*places, "--epochs", "3", "--batch_size", "20", "--lr", "0.02", *more])


def test_the_flags_of_the_paper(mnist):
    flags = (
        "--method vi --hparams prior_sig=1.0,kld=1e-3,bias=informative,nst=5 --epochs 100 --lr 1e-2 --batch_size 128 "
        "--momentum 0.5 --val_heldout 0.5"
    )
    args = mnist.parse(shlex.split(flags))
    assert args.hparams == {"prior_sig": 1.0, "kld": 1e-3, "bias": "informative", "nst": 5}
    assert isinstance(args.hparams["nst"], int)
    assert (args.method, args.epochs, args.lr, args.momentum) == ("vi", 100, 0.01, 0.5)


@pytest.mark.parametrize("flags", ["--val_heldout 0", "--val_heldout 1", "--hparams burnin=3 --epochs 3"])
def test_flags_that_cannot_work(mnist, flags, capsys):
    with pytest.raises(SystemExit):
        mnist.parse(flags.split())
    assert "must be" in capsys.readouterr().err


def test_data_root_comes_from_the_environment(mnist, monkeypatch):
    monkeypatch.setenv("BAYESIFY_DATA", "somewhere")
    assert mnist.parse([]).data_root == Path("somewhere")


@pytest.mark.parametrize("heldout", [0.5, 0.1])
def test_the_split_is_proper(mnist, heldout):
    train, val = mnist.split(1001, heldout, seed=3)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(1001))
    assert len(val) == round(1001 * heldout)
    assert torch.equal(train, mnist.split(1001, heldout, seed=3)[0])
    assert not torch.equal(train, mnist.split(1001, heldout, seed=4)[0])


def test_images_are_read_as_they_were_written(mnist, data_root):
    data = mnist.load_mnist(data_root)
    assert data["train"][0].shape == (240, 784) and data["test"][1].shape == (90,)
    raw = gzip.decompress((data_root / "MNIST/raw/t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(90, 784) / 255
    torch.testing.assert_close(data["test"][0], (pixels - 0.1307) / 0.3081)


def test_a_file_that_is_not_idx(mnist, tmp_path):
    (tmp_path / "broken").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not an idx file"):
        mnist.read_idx(tmp_path / "broken")


def test_network(mnist):
    sizes = [tuple(p.shape) for p in mnist.network().parameters() if p.dim() == 2]
    assert sizes == [(1000, 784), (1000, 1000), (1000, 1000), (10, 1000)]


@pytest.mark.parametrize(
    ("method", "hparams"),
    [
        ("vanilla", "wd=1e-4,bias=ignore"),
        ("vi", "prior_sig=1.0,kld=1e-5,bias=informative,nst=5"),
        ("mc_dropout", "p_drop=0.1,kld=1e-3,bias=gaussian,nst=3"),
        ("sgld", "Ninflate=1e3,burnin=1,thin=1,nst=5"),
        ("la", "prior_sig=0.01,Ninflate=1e3,nst=5"),
    ],
)
def test_a_run_from_end_to_end(small, data_root, tmp_path, method, hparams):
    args = arguments(small, data_root, tmp_path / "log", "--method", method, "--hparams", hparams)
    result = small.run(args)
    assert result == json.loads((tmp_path / "log/result.json").read_text()) == small.run(args)
    assert result["images"] == {"train": 120, "val": 120, "test": 90}
    for part in ("val", "test"):
        assert {"nst0", "nst5"} <= set(result[part])
        for found in result[part].values():
            assert set(found) >= SCORES and all(math.isfinite(v) for v in found.values())
    assert result["test"]["nst0"]["error"] < 0.8
    assert 1 <= result["best_epoch"] <= result["epochs"] <= 3
    assert result["settings"]["hparams"] == args.hparams and result["settings"]["seed"] == 0
    assert len((tmp_path / "log/log.jsonl").read_text().splitlines()) == result["epochs"]
    assert (tmp_path / "log/best/posterior.safetensors").is_file()
    for name in result["temperature"]:
        assert (tmp_path / f"log/reliability_{name}.png").is_file()
        assert (tmp_path / f"log/temperature_{name}.png").is_file()


def test_the_paper_starts_vi_narrow(mnist):
    model, _ = mnist.build(mnist.parse(["--method", "vi"]), num_data=100)
    posterior = model[0].parametrizations.weight[0]
    assert posterior.link == "clamp"
    torch.testing.assert_close(posterior.std, torch.full_like(posterior.std, 1e-6))
    assert not posterior.prior_mean.any()


def test_burnin_is_in_epochs(mnist):
    args = mnist.parse(["--method", "sgld", "--hparams", "burnin=2", "--batch_size", "40"])
    model, _ = mnist.build(args, num_data=100)
    assert model._bayesify_scope.method.burnin == 6


class KilledError(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize(("method", "hparams"), [("vi", "kld=1e-5,nst=5"), ("sgld", "burnin=1,thin=2,nst=5")])
def test_a_killed_run_goes_on_where_it_was(small, data_root, tmp_path, monkeypatch, method, hparams):
    flags = "--method", method, "--hparams", hparams, "--schedule", "cosine"
    whole = small.run(arguments(small, data_root, tmp_path / "whole", *flags))
    epochs = []

    def die_in_the_second(*args):
        epochs.append(train_epoch(*args))
        if len(epochs) == 2:
            raise KilledError
        return epochs[-1]

    train_epoch = small.train_epoch
    broken = arguments(small, data_root, tmp_path / "broken", *flags)
    with monkeypatch.context() as patch:
        patch.setattr(small, "train_epoch", die_in_the_second)
        with pytest.raises(KilledError):
            small.run(broken)
    torch.manual_seed(123)
    resumed = small.run(broken)
    assert resumed["test"] == whole["test"] and resumed["val"] == whole["val"]


def test_a_log_folder_of_another_run(small, data_root, tmp_path):
    args = arguments(small, data_root, tmp_path / "log", "--method", "vanilla")
    assert small.run(args, deadline=0) is None
    small.run(args)
    with pytest.raises(SystemExit, match=r"other settings \(lr\)"):
        small.run(arguments(small, data_root, tmp_path / "log", "--method", "vanilla", "--lr", "0.01"))
    (tmp_path / "log/result.json").unlink()
    with pytest.raises(SystemExit, match=r"other settings \(seed\)"):
        small.run(arguments(small, data_root, tmp_path / "log", "--method", "vanilla", "--seed", "1"))


def test_every_row_is_a_valid_command(small, reproduce):
    for run in reproduce.RUNS:
        small.build(small.parse(run.flags.split()), num_data=100)
    assert len({run.name for run in reproduce.RUNS}) == len(reproduce.RUNS)


def test_jobs_are_headline_rows_first_then_more_seeds(reproduce):
    order = [(run.name, seed) for run, seed in reproduce.jobs("*")]
    headline = [run.name for run in reproduce.HEADLINE]
    assert [name for name, _ in order[:5]] == headline
    assert [seed for _, seed in order] == sorted(seed for _, seed in order)
    assert all((name, seed) in order for name in headline for seed in range(3))
    assert {run.name for run, _ in reproduce.jobs("vi*")} == {"vi", "vi-narrow", "vi-uninformative"}


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_result_is_of_the_epoch_to_keep(small, data_root, tmp_path, monkeypatch, keep):
    loaded = []
    monkeypatch.setattr(small, "load", lambda model, folder: loaded.append(folder.name))
    flags = (
        f"--method vanilla --epochs 2 --batch_size 40 --keep {keep} --data_root {data_root} --log_dir {tmp_path / keep}"
    )
    assert small.run(small.parse(shlex.split(flags)))["epochs"] == 2
    assert loaded == (["best"] if keep == "best" else [])


def test_without_images_it_says_where_they_belong(mnist, tmp_path, monkeypatch):
    def fail(root, download):
        raise RuntimeError("no network")

    monkeypatch.setattr("torchvision.datasets.MNIST", fail)
    with pytest.raises(
        SystemExit, match=r"raw and could not be downloaded; put train-images-idx3-ubyte.gz, (.|\n)*no network"
    ):
        mnist.load_mnist(tmp_path)


def test_the_page_says_what_was_not_run(reproduce):
    page = reproduce.page()
    assert "not run" in page and "| vanilla, wd=0 | 2.52 | not run |" in page


def test_reproduce_runs_what_is_missing_and_writes_the_page(small, reproduce, data_root, monkeypatch):
    flags = "--method vanilla --epochs 2 --batch_size 40"
    run = replace(reproduce.HEADLINE[1], flags=flags, seeds=2)
    monkeypatch.setattr(reproduce, "HEADLINE", [run])
    monkeypatch.setattr(reproduce, "RUNS", reproduce.HEADLINE)
    reproduce.reproduce("*", data_root, deadline=0)
    assert not list(reproduce.RESULTS.glob("*"))
    reproduce.reproduce("*", data_root, deadline=math.inf)
    files = sorted(reproduce.RESULTS.glob("*.json"))
    assert [f.name for f in files] == ["vanilla-seed0.json", "vanilla-seed1.json"]
    errors = [100 * json.loads(f.read_text())["test"]["nst0"]["error"] for f in files]
    mean, standard_error = sum(errors) / 2, abs(errors[0] - errors[1]) / 2
    assert f"| vanilla, wd=0 | 2.52 | {mean:.2f} ± {standard_error:.2f} |" in reproduce.PAGE.read_text()


def test_the_page_says_how_long_a_run_on_two_threads_takes(small, reproduce, data_root, monkeypatch):
    run = replace(reproduce.HEADLINE[0], flags="--method vi --epochs 2 --batch_size 40", seeds=1)
    monkeypatch.setattr(reproduce, "HEADLINE", [run])
    monkeypatch.setattr(reproduce, "RUNS", [run])
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    reproduce.reproduce("*", data_root, deadline=math.inf)
    assert "minutes:" not in reproduce.PAGE.read_text()
    target = reproduce.RESULTS / "vi-seed0.json"
    target.write_text(target.read_text().replace('"threads": 1', '"threads": 2'))
    assert "- 2 epochs of VI in under 20 minutes: yes (0.0, on 2 threads; 0.0 of processor time)." in reproduce.page()
    monkeypatch.setattr(reproduce, "LONGEST", 0)
    assert "- 2 epochs of VI in under 0 minutes: no (0.0, on 2 threads" in reproduce.page()
