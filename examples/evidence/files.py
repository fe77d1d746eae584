"""Result files: one per task, row and seed, each written once."""

import json
from functools import partial

from bayesify import predict

from . import tasks
from .scores import cost, rounded, scored

RESULTS = tasks.ROOT / "docs/results/evidence"
VERSION = 1
ONE_PASS = ("mean", "temperature", "tempered mean", "closed", "tempered closed")


class WrittenError(RuntimeError):
    """A result is there already."""


def path_of(task, row, seed):
    """Return where a result belongs."""
    return RESULTS / task / f"{row}-{seed}.json"


def read_all():
    """Return all results: {task: {row: {seed: result}}}."""
    out = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        row, _, seed = path.stem.rpartition("-")
        out.setdefault(path.parent.name, {}).setdefault(row, {})[int(seed)] = json.loads(path.read_text())
    return out


def result_of(task, outcome, parts):
    """Return the scores of all of a row's ways to predict."""
    plain, timed = partial(predict, task.model().eval()), task.held_out.batches()[:2]
    found = {}
    for kind, way in outcome.predictions.items():
        found[kind] = scored(way, parts, cost(way, plain, timed, kind in ONE_PASS))
    kept = {"train_seconds": outcome.seconds, "first_loss": outcome.first_loss, "bytes": outcome.bytes}
    return {"version": VERSION, **rounded(kept), "notes": rounded(outcome.notes), "predictions": found}


def score_once(task, row, outcome, *, setting=None, rerun=False):
    """Score a row on the test data and write its result; the only place where test data is read.

    Args:
        task: With its seed.
        row: The row's name.
        outcome: What its training gave.
        setting: That was chosen on validation data, if any; it is kept in the file.
        rerun: Whether a result may be replaced; the file says how often that was.

    Raises:
        WrittenError: There is a result, and no `rerun`.
    """
    path = path_of(task.name, row, task.seed)
    before = json.loads(path.read_text()) if path.is_file() else None
    if before is not None and not rerun:
        raise WrittenError(f"{path} is written already; --rerun replaces it, and says so in the file")
    result = result_of(task, outcome, task.test())
    result["setting"] = setting or {}
    result["reruns"] = 0 if before is None else before["reruns"] + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)
    return result
