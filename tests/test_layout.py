"""The folders show the architecture: imports go one way, and the package shows its public names only."""

import ast
from pathlib import Path

import pytest

import bayesify

ORDER = ("engine", "core", "quality", "prediction", "methods", "cli", "integrations", "examples")
ROOT = Path(__file__).parent.parent
SOURCES = [p for top in ("bayesify", "integrations") for p in sorted((ROOT / top).rglob("*.py"))]


def room(parts):
    """Return the folder that a dotted name below `bayesify` lies in, or None for the package itself."""
    return next((part for part in parts if part in ORDER), None)


def imported(path):
    """Yield the dotted names of bayesify's own modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bayesify":
            yield from ([*node.module.split("."), alias.name] for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".") for a in node.names if a.name.split(".")[0] == "bayesify")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = room(path.relative_to(ROOT).parts)
    if own is None:
        return  # the package's own front door imports all the rooms
    later = [".".join(name) for name in imported(path) if (r := room(name)) and ORDER.index(r) > ORDER.index(own)]
    assert not later, f"{own} comes before what it imports"


def test_the_package_shows_its_public_names_only():
    assert sorted(dir(bayesify)) == sorted([*bayesify.__all__, "__version__"])
