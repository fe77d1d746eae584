"""Every page with figures is what its command writes from the committed result files."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def example(monkeypatch):
    """Import examples by name."""
    pytest.importorskip("timm")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def committed(name):
    return (ROOT / name).read_text()


def test_the_reproduction(example):
    assert committed("docs/reproduction.md") == example("reproduce").page()


def test_out_of_distribution(example):
    assert committed("docs/out_of_distribution.md") == example("out_of_distribution").page(ROOT / "docs" / "results")


def test_evidence(example):
    assert committed("docs/evidence.md") == example("evidence.page").page(example("evidence.files").read_all())


def test_laplace(example):
    assert committed("docs/laplace.md") == example("laplace").page()


def test_regression(example):
    assert example("uci_tables").tables().strip() in committed("docs/regression.md")


def test_three_lines(example):
    results = json.loads(committed("docs/results/three_lines.json"))
    assert example("three_lines").table(results) in committed("docs/already_trained.md")


def test_hymenoptera(example):
    assert example("hymenoptera").page() in committed("docs/vision.md")


def test_sst2(example):
    rows = json.loads(committed("docs/results/sst2.json"))
    assert example("text_classification").table(rows) in committed("docs/huggingface.md")


def test_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import pages

    results = json.loads(committed("docs/results/benchmarks.json"))
    assert committed("docs/benchmarks.md") == pages.page(results)
    readme = committed("README.md")  # shows costs alone until the evidence is written into it
    assert readme in (pages.with_table(readme, results), pages.with_table(readme, results, {}))


def test_the_zoo():
    from zoo import __main__ as sweep

    assert committed("docs/zoo.md") == sweep.table()
