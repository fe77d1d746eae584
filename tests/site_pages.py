"""Run the Python blocks of the site's pages, one after the other, and keep what they print beside them.

    python -m tests.site_pages               # write what was printed into every page
    python -m tests.site_pages deploy scales ../README

A ```text block that follows a ```python block is its output. The names that a page takes for granted are those of
"Get started": a network trained on 200 digits, and loaders.
"""

import ast
import contextlib
import copy
import io
import os
import re
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from bayesify.cli.demo import digits, trained

DOCS = Path(__file__).parent.parent / "docs"
PAGES = (
    "../README",
    "get_started",
    "train",
    "which_method",
    *(f"methods/{page.stem}" for page in sorted((DOCS / "methods").glob("*.md"))),
    "scales",
    "classification",
    "regression",
    "lora",
    "abstaining",
    "active_learning",
    "deploy",
    "frameworks",
    "add_a_method",
    "how_it_works",
    "gotchas",
)
LONG = ("mixtures",)  # a test of its own runs it, for fewer steps
HIDDEN = {"torch.onnx": "onnxscript", "to_pandas": "pandas", "plots.": "matplotlib"}  # that no import tells
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", flags=re.DOTALL)
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


@cache
def start():
    """Return a network that was trained on 200 digits, and the digits."""
    train, validation, test = digits(seed=0)
    return trained(train, seed=0), train, validation, test


def given():
    """Return what "Get started" made, new for every page."""
    model, train, validation, test = start()
    loaders = {"train_loader": train, "validation_loader": validation, "test_loader": test}
    return {
        "model": copy.deepcopy(model),
        **{name: DataLoader(data, 100) for name, data in loaders.items()},
        "noise": torch.rand(500, 64, generator=torch.Generator().manual_seed(0)),
    }


def missing(code):
    """Return the libraries that a block needs and this environment lacks."""
    nodes = [*ast.walk(ast.parse(code))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names |= {library for word, library in HIDDEN.items() if word in code}
    return {root for name in names if find_spec(root := name.partition(".")[0]) is None}


def run(text):
    """Run a page's blocks in a folder of their own; yield each with what it printed.

    A block whose libraries are not installed is left out; what others need of it stands in them too.
    """
    space, home = given(), os.getcwd()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in (b for b in BLOCK.finditer(text) if not missing(b["code"])):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(block["code"], "page", "exec"), space)
                yield block, printed.getvalue()
        finally:
            os.chdir(home)


def close(shown, printed, tolerance=0.1):
    """Return whether two outputs say the same: equal words, and numbers within the tolerance.

    What a summary says of a method's options is left out: every new option would change it.
    """
    shown, printed = (re.sub(r"^method: .*", "method:", text, flags=re.MULTILINE) for text in (shown, printed))
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 + tolerance * max(abs(float(a)), abs(float(b))) for a, b in pairs)


def written(text):
    """Return a page with what its blocks print now."""
    parts, end = [], 0
    for block, printed in run(text):
        parts.append(text[end : block.start()])
        keep = block["output"] is not None
        parts.append(f"```python\n{block['code']}```\n" + (f"\n```text\n{printed.rstrip()}\n```\n" if keep else ""))
        end = block.end()
    return "".join(parts) + text[end:]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*PAGES, *LONG):
        path = DOCS / f"{name}.md"
        path.write_text(written(path.read_text()))
        print(path.name)
