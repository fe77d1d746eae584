"""The code in the documents runs, and the package is what it says."""

import copy
import re
import subprocess
import sys
import tomllib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify

ROOT = Path(__file__).parent.parent
PUBLIC = [
    "bayesify",
    "unbayesify",
    "mean",
    "sample",
    "samples",
    "penalty",
    "predict",
    "named_posteriors",
    "SGLD",
    "IVON",
    "calibrate",
    "fit_laplace",
    "param_groups",
    "save",
    "load",
    "summary",
    "metrics",
    "plots",
    "methods",
    "active",
    "mix",
    "components",
    "diagnostics",
]


def blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)


@pytest.fixture
def names():
    """Return what the README's snippets take for granted."""
    torch.manual_seed(0)
    x = torch.randn(192, 64)
    y = (x[:, :10] + 0.3 * torch.randn(192, 10)).argmax(1)
    train, test = (DataLoader(TensorDataset(x[rows], y[rows]), 32) for rows in (slice(96), slice(96, None)))
    space = {
        "train_loader": train,
        "test_loader": test,
        "validation_loader": test,
        "other_data": torch.randn(9, 64),
    }
    exec("from bayesify import *", space)
    return space


def test_first_screen_of_the_readme(names):
    lines = (ROOT / "README.md").read_text().splitlines()
    assert any("bayesify(" in line for line in lines[:10])
    loop = blocks("README.md")[1]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 15
    exec(loop, names)
    assert names["out"].scores["error"] < 0.9
    assert names["out"].mutual_information.shape == (96,)


def test_the_other_snippets_of_the_readme(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, loop, three_lines, modes, several, measure, keep, integrations = blocks("README.md")
    body = nn.Sequential(nn.Linear(64, 8), nn.ReLU())
    exec(three_lines, {**names, "trained_model": nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 10)))})
    exec(loop, names)
    names["validation"] = names["out"]
    names["other_model"] = copy.deepcopy(names["model"])
    for snippet in (modes, several, measure):
        exec(snippet, names)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    names["plain_model"] = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    exec(keep, names)
    assert [n for n, _ in names["model"].named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    exec(integrations, names)


def test_the_method_of_the_contributing_guide():
    space = {}
    exec(blocks("CONTRIBUTING.md")[0], space)
    model = bayesify.bayesify(nn.Linear(3, 2), "uniform", width=0.5, prior_sig=0.1)
    before = model.weight
    assert (before - model.parametrizations.weight.original).abs().max() <= 0.5
    (model(torch.ones(1, 3)).sum() + bayesify.penalty(model, 10)).backward()
    assert model.parametrizations.weight.original.grad is not None


def test_public_names():
    assert sorted(bayesify.__all__) == sorted(PUBLIC)
    assert all(hasattr(bayesify, name) for name in PUBLIC)


def test_every_package_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {"bayesify": ROOT / "bayesify", "bayesify.integrations": ROOT / "integrations"}
    found = set()
    for name, folder in folders.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(folder).parts]))
    assert found == set(settings["tool"]["setuptools"]["packages"])
    assert settings["project"]["version"] == bayesify.__version__
    core = {re.split(r"[<>=]", d)[0] for d in settings["project"]["dependencies"]}
    assert core == {"torch", "numpy", "numba", "safetensors", "tqdm"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_optional():
    loaded = run("import bayesify, sys; print(*{m.split('.')[0] for m in sys.modules})").split()
    optional = {
        "matplotlib",
        "transformers",
        "timm",
        "torchvision",
        "sklearn",
        "pandas",
        "accelerate",
        "peft",
        "scipy",
        "numba",
    }
    assert not optional & set(loaded)


def test_import_time():
    clock = """
import time
a = time.process_time()
import torch
b = time.process_time()
import bayesify
print((time.process_time() - a) / (b - a))
"""
    assert min(float(run(clock)) for _ in range(3)) < 1.15


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {bayesify.__version__}" in lines and "license: Apache-2.0" in lines


@pytest.mark.parametrize(
    "path", [ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))], ids=lambda p: p.name
)
def test_yaml_can_be_read(path):
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text()), dict)
