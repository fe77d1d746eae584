"""Run what has no result yet, and write the page."""

import argparse
import time

from . import __doc__ as about
from . import files, grid, page
from .rows import ROWS
from .runs import RunError, apart, outcome_of, quiet, score, show
from .texts import CORE, TASKS

SEEDS = 5


def parser():
    out = argparse.ArgumentParser(
        prog="python -m examples.evidence", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(CORE))
    out.add_argument("--rows", nargs="+", choices=[*ROWS, *grid.tuned_rows()], default=list(ROWS))
    out.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    out.add_argument("--minutes", type=float, default=1e9, help="no new run begins after these")
    out.add_argument("--rerun", action="store_true", help="replace results that are there; the files say so")
    out.add_argument("--dry", action="store_true", help="score validation data of one seed and write nothing")
    out.add_argument("--tune", action="store_true", help="choose settings on validation data of seeds from 100 on")
    out.add_argument("--page", action="store_true", help="only write the page")
    out.add_argument("--list", action="store_true", help="only tell what there is and what is left")
    return out


def left(args):
    """Return the runs that have no result: seed by seed, so that a stop leaves whole comparisons."""
    runs = [(seed, name, row) for seed in args.seeds for name in args.tasks for row in args.rows]
    runs = [run for run in runs if grid.is_known(run[2], run[1])]
    return [run for run in runs if args.rerun or not files.path_of(run[1], run[2], run[0]).is_file()]


def collect(args):
    """Make the runs that are left, within the time; return those that failed."""
    until, runs, failed = time.monotonic() + 60 * args.minutes, left(args), []
    for i, (seed, name, row) in enumerate(runs):
        if time.monotonic() > until:
            print(f"time is up, {len(runs) - i} runs are left; run again to go on")
            break
        print(f"[{i + 1} of {len(runs)}] ", end="", flush=True)
        try:
            apart(score, name, row, seed, args.rerun)
        except RunError as error:
            failed.append(f"{name}/{row}/{seed} {error}")
            print(failed[-1], flush=True)
    return failed


def dry(args):
    """Score one seed on validation data, and tell what all seeds take."""
    spent, (seed, *_) = 0.0, args.seeds
    for name in args.tasks:
        begin = time.process_time()
        task = TASKS[name](seed)
        for row in args.rows:
            if not grid.is_known(row, name):
                continue
            start = time.process_time()
            outcome, _ = outcome_of(task, row)
            show(f"{name}/{row}/{seed}", files.result_of(task, outcome, task.validation()), time.process_time() - start)
        spent += time.process_time() - begin
        print(f"{name}: {(time.process_time() - begin) / 60:.1f} minutes a seed", flush=True)
    print(f"about {spent * SEEDS / 60:.0f} minutes of one core for {SEEDS} seeds")


def main(arguments=None):
    args = parser().parse_args(arguments)
    quiet()
    if args.list:
        for name, task in TASKS.items():
            print(f"{name}{' (core)' if name in CORE else ''}: {task.about}")
        print("rows:", *ROWS, *grid.tuned_rows())
        print(f"{len(left(args))} runs are left of the chosen ones")
        return
    if args.tune:
        grid.tune(args.tasks, args.rows, args.minutes)
        return
    if args.dry:
        dry(args)
        return
    failed = [] if args.page else collect(args)
    page.write()
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {'; '.join(failed)}; run again to try them once more")


if __name__ == "__main__":
    main()
