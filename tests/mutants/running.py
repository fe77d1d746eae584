"""Run one mutant after another in a copy of the repository, and remember the verdicts."""

import compileall
import contextlib
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PATIENCE = 600  # seconds; a mutant that makes a test hang is noticed too
FORKS = Path(__file__).with_name("forks.py")
FAILED, NOTHING_RAN = 1, 5  # pytest's exit codes


@dataclass(frozen=True)
class Mutant:
    """A small mistake, and where it should be noticed.

    Attributes:
        name: What is wrong then.
        place: The source or the folder of sources, from the repository's root.
        fragment: What it says there, exactly, in exactly one place.
        replacement: What it says instead.
        tests: The test files that should notice.
        select: Of these, the tests whose names match (pytest's -k); all if empty.
    """

    name: str
    place: str
    fragment: str
    replacement: str
    tests: tuple[str, ...]
    select: str = ""

    @property
    def command(self):
        """The arguments of pytest."""
        return " ".join([*self.tests, *(["-k", repr(self.select)] if self.select else [])])

    def source(self, root):
        """Return the file with the fragment.

        Raises:
            StaleError: The fragment is not there exactly once.
        """
        place = root / self.place
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []
        found = {path: path.read_text().count(self.fragment) for path in paths}
        if sum(found.values()) != 1:
            raise StaleError(f"the fragment occurs {sum(found.values())} times in {self.place}, not once")
        return next(path for path, count in found.items() if count)

    def applied(self, source):
        """Return the source with the mistake."""
        return source.replace(self.fragment, self.replacement)


class StaleError(ValueError):
    """A mutant that does not fit its source any more."""


class Verdict(NamedTuple):
    """What became of a mutant: noticed, survived, stale (does not fit), or unsound (its tests fail without it)."""

    word: str
    why: str = ""
    seconds: float = 0.0


class Workshop:
    """A copy of a repository in a temporary folder, in which sources are broken and mended."""

    def __init__(self, root, results, *, plugins=(), libraries=(), again=False):
        self.root, self.results = root, results
        self.libraries = libraries  # imported once for all; none of them may read the environment of a single run
        self.plugins = [word for plugin in plugins for word in ("-p", plugin)]
        self.known = json.loads(results.read_text()) if results.exists() and not again else {}
        self.sound = {}

    def __enter__(self):
        """Copy what git knows of the repository."""
        self.stack = contextlib.ExitStack()
        self.copy = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (self.root / name).is_file():
                (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.root / name, self.copy / name)
        integrations = self.copy / "bayesify" / "integrations"
        if (self.copy / "integrations").exists():
            # Where an installed package has them; else they would be those of the repository itself.
            integrations.symlink_to(self.copy / "integrations", target_is_directory=True)
        # Compiled files that know their source by its content: its age is told by the second, and a mutant takes less.
        compileall.compile_dir(self.copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        self.forks = self.stack.enter_context(
            subprocess.Popen(
                [sys.executable, FORKS, *self.libraries],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self

    def __exit__(self, *error):
        self.stack.close()

    def verdict(self, mutant):
        """Return what becomes of a mutant, now or in an earlier run on the same files."""
        try:
            path = mutant.source(self.copy)
        except StaleError as error:
            return Verdict("stale", str(error))
        source = path.read_text()
        key = self._key(mutant)
        if self.known.get(mutant.name, {}).get("key") == key:
            return Verdict(**self.known[mutant.name]["verdict"])
        start = time.monotonic()
        path.write_text(mutant.applied(source))
        try:
            code, said = self._pytest(mutant, broken=True)
        finally:
            path.write_text(source)
        found = self._judge(mutant, code, said)._replace(seconds=round(time.monotonic() - start, 1))
        self.known[mutant.name] = {"key": key, "verdict": found._asdict()}
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self.results.write_text(json.dumps(self.known, indent=1) + "\n")
        return found

    def _judge(self, mutant, code, said):
        """Tell a mutant that was noticed from tests that say nothing: those which fail anyway, or do not run."""
        if code == 0:
            return Verdict("survived", "its tests pass")
        if code not in (FAILED, NOTHING_RAN):
            return Verdict("unsound", f"its tests do not even run: {said}")
        if mutant.command not in self.sound:
            self.sound[mutant.command] = self._pytest(mutant, broken=False)
        clean, complaint = self.sound[mutant.command]
        if clean != 0:
            why = "select no test" if clean == NOTHING_RAN else f"fail without it: {complaint}"
            return Verdict("unsound", f"its tests {why}")
        return Verdict("noticed", said)

    def _pytest(self, mutant, *, broken):
        """Run a mutant's tests in the copy; return the exit code and the line that says most."""
        # Kernels are compiled once for all, but those that are broken for themselves alone.
        kernels = tempfile.mkdtemp(dir=self.copy) if broken and "engine" in mutant.place else self.copy / ".kernels"
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": str(self.copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # loading them takes longer than many a test
            "NUMBA_CACHE_DIR": str(kernels),
        }
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *self.plugins, *mutant.tests]
        arguments += ["-k", mutant.select] if mutant.select else []
        request = {"arguments": arguments, "folder": str(self.copy), "environment": environment, "patience": PATIENCE}
        print(json.dumps(request), file=self.forks.stdin, flush=True)
        code, said = json.loads(self.forks.stdout.readline())
        if code is None:
            return FAILED, f"no end after {PATIENCE} s"
        lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return code, lines[0][:200] if lines else ""

    def _key(self, mutant):
        """Return a hash of everything that a verdict depends on: all sources, the tests, the mutant."""
        digest = hashlib.blake2b(repr(mutant).encode(), digest_size=16)
        for folder in ("bayesify", "integrations"):
            for path in sorted((self.copy / folder).rglob("*.py")):
                digest.update(path.read_bytes())
        for name in mutant.tests:
            for path in sorted((self.copy / name).rglob("*.py")) or [self.copy / name]:
                digest.update(path.read_bytes())
        return digest.hexdigest()
