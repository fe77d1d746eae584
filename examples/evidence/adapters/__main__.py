"""Run what has no result yet, and write the table."""

import argparse
import json
import logging
import time

import torch

from ..tasks import ROOT
from . import __doc__ as about
from . import page, rows, settings
from .tasks import TASKS

RESULTS = ROOT / "docs/results/adapters"
SEEDS = 3


def parser():
    out = argparse.ArgumentParser(
        prog="python -m examples.evidence.adapters",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    out.add_argument("--rows", nargs="+", choices=list(rows.ROWS), default=list(rows.ROWS))
    out.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    out.add_argument("--minutes", type=float, default=1e9, help="no new run begins after these")
    out.add_argument("--tune", action="store_true", help="choose settings on validation data of an unreported seed")
    out.add_argument("--page", action="store_true", help="only write the table")
    out.add_argument("--list", action="store_true", help="only tell what there is and what is left")
    return out


def path_of(task, row, seed):
    """Return where a result belongs."""
    return RESULTS / task / f"{row}-{seed}.json"


def left(args):
    """Return the runs that have no result: seed by seed, so that a stop leaves whole comparisons."""
    runs = [(seed, name, row) for seed in args.seeds for name in args.tasks for row in args.rows]
    return [run for run in runs if not path_of(run[1], run[2], run[0]).is_file()]


def score(task, row):
    """Train a row, score it on the test data and write the result."""
    begin, setting = time.process_time(), settings.setting_of(row, RESULTS / "settings.json")
    kinds, notes, seconds = rows.made(task, row, setting)
    test = task.test()
    found = {kind: rows.scored(predicted, *test) for kind, predicted in kinds.items()}
    spent = time.process_time() - begin
    result = {"setting": setting, "train_seconds": round(seconds, 1), "seconds": round(spent, 1), "notes": notes}
    path = path_of(task.name, row, task.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps({**result, "predictions": found}, indent=1) + "\n")
    path.with_suffix(".tmp").replace(path)
    cells = [f"{kind} {s['nll']:.4f} ({100 * s['error']:.1f} %)" for kind, s in found.items()]
    print(f"{task.name}/{row}/{task.seed}: {', '.join(cells)}, training {seconds:.0f} s, all {spent:.0f} s", flush=True)


def collect(args):
    """Make the runs that are left, within the time."""
    until, runs, task = time.monotonic() + 60 * args.minutes, left(args), None
    for i, (seed, name, row) in enumerate(runs):
        if time.monotonic() > until:
            print(f"time is up, {len(runs) - i} runs are left; run again to go on")
            return
        if task is None or (task.name, task.seed) != (name, seed):
            task = TASKS[name](seed)
        score(task, row)


def main(arguments=None):
    args = parser().parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("bayesify").setLevel(logging.ERROR)
    if args.list:
        for name, task in TASKS.items():
            print(f"{name}: {task.about}")
        print("rows:", *rows.ROWS)
        print(f"{len(left(args))} runs are left of the chosen ones")
    elif args.tune:
        settings.tune(RESULTS / "settings.json", args.tasks, args.minutes)
    else:
        if not args.page:
            collect(args)
        page.write(RESULTS)


if __name__ == "__main__":
    main()
