"""What a newcomer gets: every method at its defaults on the core tasks, beside plain training with temperature scaling.

    python examples/defaults.py [--tasks digits mnist] [--methods vi la] [--seeds 5] [--minutes 60]
    python examples/defaults.py --page          # only show the tables, from the results alone

These are rows of `python -m examples.evidence`, whose result files (docs/results/evidence) hold their results too. Runs
that have a result are not made again.
"""

import argparse

from evidence import __main__ as runner
from evidence import files, page
from evidence.rows import METHODS
from evidence.tables import BAR
from evidence.texts import CORE, TASKS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(CORE))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=runner.SEEDS)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    rows = [BAR[0], *args.methods]
    if not args.page:
        seeds = [str(seed) for seed in range(args.seeds)]
        runner.main(["--tasks", *args.tasks, "--rows", *rows, "--seeds", *seeds, "--minutes", str(args.minutes)])
    results = files.read_all()
    for name in (name for name in args.tasks if BAR[0] in results.get(name, {})):
        print(f"\n{name}: {TASKS[name].about}\n")
        print("\n".join(page.table_of(page.table_of_task(name, results[name]), rows)))


if __name__ == "__main__":
    main()
