"""Try the whole zoo, a few models per process, and write the table.

Resumes where it was: what `docs/results/zoo.json` has a verdict for is not tried again.
"""

import argparse
import fnmatch
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .worker import FULL, MARK

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/zoo.json"
TABLE = ROOT / "docs/zoo.md"
LIBRARIES = ("torchvision", "timm", "transformers")
PATIENCE = 20  # times the processor time that a model may take, before its process is given up
CHUNK = 24  # models per process: importing the libraries takes longer than many a model
VERDICTS = ("ok", "fails", "not run")

Row = dict[str, Any]


def names_of(library: str) -> list[str]:
    """List what is to be tried of a library."""
    if library == "transformers":
        from .huggingface import transformers_names

        return transformers_names()
    from .vision import timm_names, torchvision_names

    return timm_names() if library == "timm" else torchvision_names()


def run(library: str, names: list[str], *, timeout: float, memory: float) -> Iterator[Row]:
    """Yield a verdict for each name; a model that hangs or crashes ends its process, not the sweep."""
    waiting = list(names)
    while waiting:
        chunk = waiting[:CHUNK]
        for row in _run_process(library, chunk, timeout=timeout, memory=memory):
            waiting.remove(row["name"])
            yield row


def command_of(*arguments: str) -> list[str]:
    """Return the command that tries a few models in a process of their own."""
    return [sys.executable, "-m", "tests.zoo.worker", *arguments]


def _run_process(library: str, names: list[str], *, timeout: float, memory: float) -> Iterator[Row]:
    """Yield the verdicts of one process; the last one may be that it crashed or took too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command_of(library, str(memory), str(timeout), *names),
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_pump, args=(process, lines), daemon=True)
    reader.start()
    left = list(names)
    try:
        while left:
            try:
                line = lines.get(timeout=PATIENCE * timeout)
            except queue.Empty:
                yield _lost(library, left[0], f"hangs: no verdict within {PATIENCE * timeout:.0f} s")
                return
            if line is None and len(left) < len(names) and process.wait() == FULL:
                return
            if line is None:
                yield _lost(library, left[0], f"the process ended with code {process.wait()}, perhaps out of memory")
                return
            if line.startswith(MARK):
                left.pop(0)
                yield json.loads(line.removeprefix(MARK))
    finally:
        process.kill()
        process.wait()
        reader.join()


def _pump(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)
    lines.put(None)


def _lost(library: str, name: str, reason: str) -> Row:
    return {
        "library": library, "name": name, "model": name, "parameters": None, "verdict": "not run", "reason": reason
    }  # fmt: skip


def read_rows() -> dict[tuple[str, str], Row]:
    """Return the verdicts so far."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    return {(row["library"], row["name"]): row for row in rows}


def write_rows(rows: dict[tuple[str, str], Row], counts: dict[str, int] | None = None) -> None:
    """Write the verdicts, and how many models there are of each library; a kill leaves the old file."""
    kept = json.loads(RESULTS.read_text()).get("counts", {}) if RESULTS.exists() else {}
    order = sorted(rows.values(), key=lambda row: (LIBRARIES.index(row["library"]), row["name"]))
    versions = {name: version(name) for name in ("torch", *LIBRARIES)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    temporary = RESULTS.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(
        json.dumps({"versions": versions, "counts": kept | (counts or {}), "rows": order}, indent=0) + "\n"
    )
    temporary.replace(RESULTS)


def table() -> str:
    """Return the page: figures first, then what does not work, then everything."""
    data = json.loads(RESULTS.read_text())
    rows: list[Row] = data["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    lines = [INTRODUCTION.format(versions=versions), "| library | models | tried | ok | fails | plain model not run |"]
    lines.append("|---|---|---|---|---|---|")
    for library in LIBRARIES:
        count = Counter(row["verdict"] for row in rows if row["library"] == library)
        lines.append(
            f"| {library} | {data['counts'].get(library, '')} | {count.total()} | "
            + " | ".join(str(count[v]) for v in VERDICTS)
            + " |"
        )
    for title, chosen in (
        ("What does not hold", [r for r in rows if r["verdict"] == "fails"]),
        ("Plain models that do not run here", [r for r in rows if r["verdict"] == "not run"]),
    ):
        lines += ["", f"## {title}", ""]
        lines += ["| library | name | reason |", "|---|---|---|"] if chosen else ["Nothing."]
        lines += [f"| {r['library']} | {r['name']} | {r['reason']} |" for r in chosen]
    for library in LIBRARIES:
        lines += ["", f"## {library}", "", "| name | model | parameters | verdict |", "|---|---|---|---|"]
        for row in rows:
            if row["library"] == library:
                count_text = "" if row["parameters"] is None else f"{row['parameters']:,}"
                lines.append(f"| {row['name']} | {row['model']} | {count_text} | {row['verdict']} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# The zoo

Every classification, segmentation, detection, video and optical-flow builder of torchvision, the smallest model of
every timm family (a family is a module's models whose names begin with the same word), and every model type of
Transformers that has a model class with a forward, from a small config; with fresh weights, method "vi". Written by
`make zoo` with {versions}, which goes on where it was stopped: what was not tried yet has no row.

*ok* means that all of this holds on the model:

- the output in eval mode is the same bit for bit after `bayesify`, and again after `unbayesify`, which leaves
  classes, names, order and identity of the parameters and hooks as they were;
- in train mode a draw changes the output; with zero spread output is the plain model's bit for bit, and gradients are
  its gradients;
- mean and spread have a gradient exactly where the plain model has one;
- the output of a draw equals the output of the plain model with that draw copied into its weights, bit for bit: no
  read of a weight bypasses the draw;
- a fresh model that loads what was saved gives the same output, for the mean and for a draw.
"""


def main() -> None:
    """Try what has no verdict yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--match", default="*", help="glob over names")
    parser.add_argument("--again", nargs="*", choices=VERDICTS, default=[], help="try these verdicts again")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of processor time per model")
    parser.add_argument("--memory", type=float, default=16.0, help="GB per process")
    options = parser.parse_args()
    for library in options.library:
        known = {key for key, row in read_rows().items() if row["verdict"] not in options.again}
        names = names_of(library)
        kept = {key: row for key, row in read_rows().items() if key[0] != library or key[1] in names}
        write_rows(kept, {library: len(names)})
        wanted = [n for n in names if fnmatch.fnmatch(n, options.match) and (library, n) not in known]
        verdicts = run(library, wanted, timeout=options.timeout, memory=options.memory)
        for row in (bar := tqdm(verdicts, total=len(wanted), desc=library)):
            bar.write(f"{library} {row['name']}: {row['verdict']} {row['reason']}")
            write_rows({**read_rows(), (library, row["name"]): row})
    TABLE.write_text(table())


if __name__ == "__main__":
    main()
