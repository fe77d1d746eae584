"""The code in the documents runs, and the package is what it says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

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
    "Cycles",
    "deploy",
    "fit_novelty",
    "prior",
]


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
    assert found == set(find_packages(str(ROOT), include=settings["tool"]["setuptools"]["packages"]["find"]["include"]))
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
    assert min(float(run(clock)) for _ in range(3)) < 1.2


def test_the_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {bayesify.__version__}" in lines and "license: Apache-2.0" in lines


@pytest.mark.parametrize(
    "path", [ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))], ids=lambda p: p.name
)
def test_yaml_can_be_read(path):
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(path.read_text()), dict)
