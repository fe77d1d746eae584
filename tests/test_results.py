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


def test_only_pages_that_a_command_writes_have_measured_figures():
    written = {"evidence", "exactness", "benchmarks", "regression", "reproduction", "zoo"}
    kept_by_hand = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in {*written, "api"}]
    assert len(kept_by_hand) > 10
    assert not [page.name for page in kept_by_hand if "±" in page.read_text()]


def test_the_reproduction(example):
    assert committed("docs/reproduction.md") == example("reproduce").page()


def test_evidence(example):
    assert committed("docs/evidence.md") == example("evidence.page").page(example("evidence.files").read_all())


def test_regression(example):
    assert example("uci_tables").tables().strip() in committed("docs/regression.md")


def test_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import pages

    results = json.loads(committed("docs/results/benchmarks.json"))
    assert committed("docs/benchmarks.md") == pages.page(results)
    readme = committed("README.md")  # shows costs alone until the evidence is written into it
    assert readme in (pages.with_table(readme, results), pages.with_table(readme, results, {}))


def test_the_costs_of_mixtures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import mixtures

    results = json.loads(committed("docs/results/mixtures.json"))
    assert set(results["rows"]) == {f"{w.name} | {row}" for w in mixtures.WORKS for row in mixtures.rows_of(w)}
    assert mixtures.table(results) in committed("docs/mixtures.md")


def test_the_zoo():
    from zoo import __main__ as sweep

    assert committed("docs/zoo.md") == sweep.table()
