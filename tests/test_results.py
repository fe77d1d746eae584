"""Every page with figures is what its command writes from the committed result files."""

import importlib
import json
import re
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


def results(name):
    return json.loads(committed(f"docs/results/{name}.json"))


def by_hand(page):
    """Return what a person wrote: no blocks of code or output, no part that a command writes, no code in a line."""
    text = re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", "", page, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))  # targets of links
    return re.sub(r"`[^`]*`", "", text)


FIGURE = re.compile(r"\d+\.\d+|\d+ ?%|\d+ times|±")
CHOSEN = {  # figures that nobody measured: versions, settings, definitions
    "CHANGELOG": {"0.1", "0.2"},
    "CONTRIBUTING": {"2.13", "2.15", "2.6", "2.7", "3.11", "3.12", "3.13", "3.14"},
    "README": {"2.0", "2.13", "3.11", "5 %"},
    "abstaining": {"95 %", "0.5"},
    "already_trained": {"0.1", "0.02"},  # the latter is asserted in test_laplace_last_layer
    "comparison": {"0.1", "0.21", "0.4"},  # of versions
    "gotchas": {"0.69"},  # softplus(0)
    "huggingface": {"4.50"},
    "install": {"2.13", "2.15", "3.11"},
    "lora": {"90 %", "0.1"},
    "regression": {"0.1", "95 %"},
    "scales": {"0.001", "0.05", "0.1"},
    "scaling": {"2.13", "2.15"},
    "which_method": {"0.05", "0.5", "0.9"},  # rates
}


def test_figures_of_prose_were_chosen_and_not_measured():
    whole = {"evidence", "exactness", "benchmarks", "reproduction", "zoo", "api"}  # pages that a command writes
    pages = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if page.stem not in whole)]
    assert len(pages) > 20
    found = {page.stem: set(FIGURE.findall(by_hand(page.read_text()))) - CHOSEN.get(page.stem, set()) for page in pages}
    assert not {page: figures for page, figures in found.items() if figures}


def test_what_a_person_wrote_is_told_from_what_a_command_writes():
    text = "0.5\n```text\n0.1\n```\n<!-- a -->\n0.2\n<!-- /a -->\n`x=0.3` 5 % and 0.4\n"
    assert FIGURE.findall(by_hand(text)) == ["0.5", "5 %", "0.4"]


def test_a_part_of_a_page_is_replaced(example):
    sections = example("sections")
    page = "before\n<!-- x -->\nold\n<!-- /x -->\nafter\n"
    assert sections.with_section(page, "x", r"new \1") == "before\n<!-- x -->\nnew \\1\n<!-- /x -->\nafter\n"
    with pytest.raises(ValueError, match="has 0 parts <!-- y -->"):
        sections.with_section(page, "y", "new")


def test_the_reproduction(example):
    assert committed("docs/reproduction.md") == example("reproduce").page()


def test_evidence(example):
    assert committed("docs/evidence.md") == example("evidence.page").page(example("evidence.files").read_all())


def test_the_pages_of_methods(example):
    tables = example("evidence.page").tables_of(example("evidence.files").read_all())
    pages = example("method_pages")
    assert set(pages.WAYS) == {page.stem for page in (ROOT / "docs/methods").glob("*.md")}
    stale = [
        name for name in pages.WAYS if not has(example, f"docs/methods/{name}.md", name, pages.section(name, tables))
    ]
    assert not stale, f"{stale}: python examples/method_pages.py writes them"


def test_benchmarks_of_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import gpu

    assert committed("docs/benchmarks_gpu.md") == gpu.page(gpu.read(gpu.COUNTS), gpu.read(gpu.MEASURED))


def test_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import pages

    found = results("benchmarks")
    assert committed("docs/benchmarks.md") == pages.page(found)
    readme = committed("README.md")
    assert readme == pages.with_table(readme, found)


def test_the_zoo():
    from zoo import __main__ as sweep

    assert committed("docs/zoo.md") == sweep.table()


def has(example, page, name, text):
    """Return whether a part of a page is what its command writes."""
    return committed(page) == example("sections").with_section(committed(page), name, text)


def test_regression(example):
    assert has(example, "docs/regression.md", "uci", example("uci_tables").tables())


def test_other_libraries(example):
    found = results("libraries")
    assert all(len(cells) == len(found["libraries"]) for cells in found["rows"].values())
    assert has(example, "docs/comparison.md", "libraries", example("libraries").table(found))


def test_the_sine(example):
    assert has(example, "docs/regression.md", "sine", example("sine").table(results("sine")))


def test_novelty(example):
    assert has(example, "docs/abstaining.md", "novelty", example("novelty").section())


def test_the_bytes_of_a_process(example):
    assert has(example, "docs/scaling.md", "bytes", example("bytes_per_process").table(results("bytes")))


def test_the_costs_of_mixtures_and_of_compiled_steps(example, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import compiled, deployed, mixtures

    assert has(example, "docs/deploy.md", "latency", deployed.section(results("deployed")))

    costs = results("mixtures")
    assert set(costs["rows"]) == {f"{w.name} | {row}" for w in mixtures.WORKS for row in mixtures.rows_of(w)}
    assert has(example, "docs/mixtures.md", "costs", mixtures.table(costs))
    assert set(results("compiled")) == {str(work) for work in compiled.WORKS.values()}
    assert has(example, "docs/scaling.md", "compiled", compiled.table(results("compiled")))


def test_what_examples_print(example, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests import printed

    for name, page in printed.PAGES.items():
        assert has(example, str(page.relative_to(ROOT)), name, printed.section(name))
