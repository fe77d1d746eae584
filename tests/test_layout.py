"""The folders show the architecture: imports go one way, in no circle, and walks through the files are short."""

import ast
import sys
from pathlib import Path

import layout_map
import pytest
import torch
from torch import nn

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


def module_of(path):
    """Return a source file's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(("bayesify", *parts) if parts[0] == "integrations" else parts)
    return dotted.removesuffix(".__init__")


def needed(path, modules):
    """Return the modules that must be there before a file can be read, or its types be checked."""
    own, found = module_of(path), set()
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    later = {
        (n.lineno, n.col_offset) for function in functions for n in ast.walk(function) if isinstance(n, ast.ImportFrom)
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.lineno, node.col_offset) not in later:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
    return (found & modules) - {own}


def test_no_import_goes_in_a_circle():
    """Type-only imports count; those inside of functions, which wait until somebody calls, do not."""
    modules = {module_of(path) for path in SOURCES}
    rest = {module_of(path): needed(path, modules) for path in SOURCES}
    while free := {name for name, wanted in rest.items() if not wanted & rest.keys()}:
        rest = {name: wanted for name, wanted in rest.items() if name not in free}
    inside = {name for name in rest if any(name in wanted for wanted in rest.values())}
    assert not inside, f"import each other: {sorted(inside)}"


def test_the_map_of_folders_names_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert layout_map.table() in text, "run python -m tests.layout_map"


def walked(run):
    """Return the files of the package that a call passes through, by folder and name."""
    package, found = str(Path(bayesify.__file__).parent) + "/", set()

    def look(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found.add(frame.f_code.co_filename.removeprefix(package).removesuffix(".py"))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.filterwarnings("ignore:the spread of the posterior was never trained")
def test_a_read_and_a_prediction_pass_through_the_files_that_the_page_names():
    torch.manual_seed(0)
    model, x = bayesify.bayesify(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), "vi"), torch.ones(5, 4)
    model(x)
    found = []
    model[2].register_forward_pre_hook(lambda module, args: found.append(walked(lambda: module.weight)))
    model(x)
    read = {name for name in found[0] if not name.startswith("engine/")}
    predicted = walked(lambda: bayesify.predict(model, x, samples=2, seed=0))
    own = {name for name in predicted if name.startswith("prediction/")}
    assert len(read) <= 6
    assert len(own) <= 12
    page = (ROOT / "docs" / "how_it_works.md").read_text().partition("## Two walks")[2]
    first, _, second = page.partition("`predict`")
    assert all(f"`{name}`" in first for name in read)
    assert all(f"`{name}`" in second for name in own)
