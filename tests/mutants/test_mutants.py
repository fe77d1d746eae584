"""The table of mutants fits the sources, and the machine that runs them tells the noticed from the survivors."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import bayesify

from .running import Mutant, StaleError, Workshop
from .table import MUTANTS

ROOT = Path(__file__).parents[2]


def test_every_mutant_fits_its_source_and_compiles():
    misfits = []
    for mutant in MUTANTS:
        try:
            path = mutant.source(ROOT)
            compile(mutant.applied(path.read_text()), path, "exec")
        except (StaleError, SyntaxError) as error:
            misfits.append(f"{mutant.name}: {error}")
    assert not misfits, "amend tests/mutants/table:\n" + "\n".join(misfits)


def test_names_are_unique_and_tests_exist():
    assert [name for name, n in Counter(m.name for m in MUTANTS).items() if n > 1] == []
    assert {t for m in MUTANTS for t in m.tests if not (ROOT / t).exists()} == set()


def test_every_method_metric_and_file_rule_is_covered():
    files = Counter(m.source(ROOT).relative_to(ROOT) for m in MUTANTS)
    rooms = Counter(path.parent.name for path in files.elements())
    assert len(MUTANTS) >= 200
    for name in bayesify.methods.__all__:
        module = getattr(bayesify.methods, name).__module__
        if name != "Method":
            assert files[Path(f"{module.replace('.', '/')}.py")] >= 2, f"no mutants of {module}"
    assert sum(files[Path(f"bayesify/core/{name}.py")] for name in ("checkpoint", "fileformat", "stored")) >= 20
    assert rooms["quality"] >= len(bayesify.metrics.__all__)


@pytest.fixture
def repository(tmp_path):
    """Make a small repository with a formula and its tests."""
    root = tmp_path / "repository"
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "formula.py").write_text("def twice(x):\n    return 2 * x\n\n\ndef unseen(x):\n    return x + 1\n")
    (root / "tests" / "test_formula.py").write_text(
        "import formula\n\n\ndef test_twice():\n    assert formula.twice(3) == 6\n\n\n"
        "def test_wrong():\n    assert formula.twice(3) == 7\n"
    )
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def mutant(name, fragment, replacement, select="twice"):
    return Mutant(name, "formula.py", fragment, replacement, ("tests/test_formula.py",), select)


def test_verdicts(repository, tmp_path):
    results = tmp_path / "build" / "mutants.json"
    source = (repository / "formula.py").read_text()
    with Workshop(repository, results) as workshop:
        noticed = workshop.verdict(mutant("seen", "2 * x", "3 * x"))
        assert noticed.word == "noticed"
        assert "test_twice" in noticed.why
        assert workshop.verdict(mutant("not seen", "x + 1", "x + 2")).word == "survived"
        assert workshop.verdict(mutant("gone", "4 * x", "5 * x")).word == "stale"
        assert workshop.verdict(mutant("everywhere", "x", "y")).word == "stale"
        assert workshop.verdict(mutant("its test fails anyway", "2 * x", "3 * x", "wrong")).word == "unsound"
        assert workshop.verdict(mutant("no test is called so", "2 * x", "3 * x", "nobody")).word == "unsound"
        assert workshop.verdict(mutant("not even Python", "return 2 * x", "return 2 *")).word == "unsound"
        copy = workshop.copy
        assert (copy / "formula.py").read_text() == source
    assert not copy.exists()
    assert (repository / "formula.py").read_text() == source


def test_a_verdict_is_remembered_until_a_test_changes(repository, tmp_path):
    results = tmp_path / "mutants.json"
    one = mutant("seen", "2 * x", "3 * x")
    with Workshop(repository, results) as workshop:
        workshop.verdict(one)
    kept = json.loads(results.read_text())
    kept["seen"]["verdict"]["why"] = "from the file"
    results.write_text(json.dumps(kept))
    with Workshop(repository, results) as workshop:
        assert workshop.verdict(one).why == "from the file"
    with Workshop(repository, results, again=True) as workshop:
        assert workshop.verdict(one).why != "from the file"
    results.write_text(json.dumps(kept))
    (repository / "tests" / "test_formula.py").write_text("def test_twice():\n    pass\n")
    with Workshop(repository, results) as workshop:
        assert workshop.verdict(one).word == "survived"
