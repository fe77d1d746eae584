"""The site's API reference has every public name, and its index every page."""

import re
import runpy
import types
from pathlib import Path

import pytest

import bayesify

RETURNED = {"Diagnosis", "ConformalQuantile", "Drift", "Reliability", "RiskCoverage", "Temperature", "TemperatureError"}
DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    return runpy.run_path(str(DOCS / "conf.py"))["reference"]()


def test_every_public_name_is_in_the_reference(reference):
    documented = set(re.findall(r":: bayesify\.([\w.]+)", reference))
    for name in bayesify.__all__:
        value = getattr(bayesify, name)
        if not isinstance(value, types.ModuleType):
            assert name in documented
            continue
        path = value.__name__.removeprefix("bayesify.")
        public = [n for n in getattr(value, "__all__", ()) if callable(getattr(value, n))]
        assert {f"{path}.{n}" for n in public} <= documented
        assert any(entry.startswith(f"{path}.") for entry in documented), name
    wanted = {"huggingface.BayesTrainer", "huggingface.generate", "vision.create_bayesian", "sklearn.BayesRegressor"}
    assert {f"integrations.{name}" for name in wanted} <= documented


def public():
    """Yield every public function and class with its path."""
    for name in bayesify.__all__:
        value = getattr(bayesify, name)
        if not isinstance(value, types.ModuleType):
            yield name, value
            continue
        names = getattr(value, "__all__", [n for n in vars(value) if n[0] != "_"])
        yield from ((f"{name}.{n}", getattr(value, n)) for n in names if callable(getattr(value, n)))


def test_every_public_name_has_an_example():
    """A doctest of its own, or a place in the code of a page or of the README."""
    shown = "".join(page.read_text() for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"))
    code = "".join(re.findall(r"```python\n(.*?)```", shown, flags=re.DOTALL))
    without = [
        path
        for path, value in public()
        if str(getattr(value, "__module__", "")).startswith("bayesify")
        and path.rpartition(".")[2] not in RETURNED  # by functions that have examples
        and ">>>" not in (value.__doc__ or "")
        and not re.search(rf"\b{path.rpartition('.')[2]}\b", code)
    ]
    assert not without, " ".join(without)


def contents(page):
    """Return the entries of a page's table of contents."""
    tables = re.findall(r"```{toctree}\n(?::\w+:[^\n]*\n)*\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [re.sub(r".*<(.*)>", r"\1", line) for table in tables for line in table.split("\n") if line]


def test_every_page_is_in_a_table_of_contents():
    listed = [entry for page in DOCS.rglob("*.md") for entry in contents(page)]
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} | {"api", "self"}
    assert sorted(listed) == sorted(pages - {"index"})


def test_the_sidebar_is_short():
    assert len(contents(DOCS / "index.md")) == 8
