"""Sphinx: the pages of this folder, and an API reference of every public name from its docstring.

furo, for one dependency, light and dark, a search box and nothing to configure; `make docs` treats warnings as errors.
"""

import re
import types
from pathlib import Path
from typing import Any

import bayesify
from bayesify.prediction.predictive import MultilabelPredictive, Predictive
from bayesify.prediction.regression import RegressionPredictive

HERE = Path(__file__).parent
INTEGRATIONS = ("huggingface", "vision", "sklearn")
SCIKIT_LEARNS = "set_score_request, set_predict_request, set_fit_request"  # it adds these to every estimator
FIRST = ("bayesify", "predict", "penalty", "param_groups", "fit_laplace", "calibrate", "summary", "save", "load", "mix")
RETURNED = (Predictive, RegressionPredictive, MultilabelPredictive)

project = "bayesify"
author = "the bayesify contributors"
release = version = bayesify.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["results"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_theme = "furo"
html_show_copyright = False
html_title = f"bayesify {release}"
default_role = "code"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
suppress_warnings = ["myst.strikethrough"]


def reference() -> str:
    """Return the page of the API reference, from what the package says is public."""
    order = [*FIRST, *(name for name in bayesify.__all__ if name not in FIRST)]
    names = [(name, getattr(bayesify, name)) for name in order]
    parts = ["# API reference", "Every public name, from its docstring.", "## Functions and classes"]
    parts += [_directive(f"bayesify.{name}", value) for name, value in names if not isinstance(value, types.ModuleType)]
    parts += ["## What `predict` returns"]
    parts += [_directive(f"{cls.__module__}.{cls.__qualname__}", cls, inherited=True) for cls in RETURNED]
    for module in (value for _, value in names if isinstance(value, types.ModuleType)):
        parts += [f"## {module.__name__.rpartition('.')[2]}", *_members(module)]
    for name in INTEGRATIONS:
        module = __import__(f"bayesify.integrations.{name}", fromlist=["x"])
        parts += [f"## integrations.{name}", *_members(module)]
    return "\n\n".join(parts) + "\n"


def _members(module: types.ModuleType) -> list[str]:
    """Return the directives of a module's public names."""
    public = getattr(module, "__all__", None)
    if public is None:
        public = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
    text = (module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    found = [(name, getattr(module, name)) for name in public]
    return [text, *(_directive(f"{module.__name__}.{name}", v) for name, v in found if callable(v))]


def _directive(path: str, value: object, *, inherited: bool = False) -> str:
    """Return the directive that documents one object."""
    kind = "autoclass" if isinstance(value, type) else "autofunction"
    options = f"\n   :members:\n   :exclude-members: {SCIKIT_LEARNS}" if kind == "autoclass" else ""
    options += "\n   :inherited-members:" if inherited else ""
    return f"```{{eval-rst}}\n.. {kind}:: {path}{options}\n```"


def as_plain_text(*about: Any) -> None:
    """Escape what a docstring's plain text would mean in reStructuredText; code in backticks and doctests stay."""
    lines = about[-1]
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            pieces = re.split(r"(`[^`]*`)", line)
            pieces[::2] = [re.sub(r"([|*]|_\b)", r"\\\1", piece) for piece in pieces[::2]]
            lines[i] = "".join(pieces)


def setup(app: Any) -> None:
    """Write the reference, and read docstrings as the plain text that they are."""
    (HERE / "api.md").write_text(reference())
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)
