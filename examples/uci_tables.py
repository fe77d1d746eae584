"""The UCI tables of the page on regression, beside published numbers.

    BAYESIFY_DATA=... python examples/uci_tables.py [--methods vi la]   # rows without a result yet; then the page
    BAYESIFY_DATA=... python examples/uci_tables.py --rerun             # all rows anew
    python examples/uci_tables.py --page                                # the page's section from the results alone

The results are in `docs/results/uci.json`.
"""

import argparse
import json
import statistics
from pathlib import Path

import uci
from evidence.tables import apart_of
from sections import write_section

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/uci.json"
PAGE = ROOT / "docs/regression.md"
PUBLISHED = {  # MC-dropout: RMSE and log-likelihood with their standard errors, the mean over the same 20 splits
    "concrete": ((4.82, 0.16), (-2.93, 0.02)),
    "energy": ((0.54, 0.06), (-1.21, 0.01)),
    "wine-quality-red": ((0.62, 0.01), (-0.93, 0.01)),
    "yacht": ((0.67, 0.05), (-1.25, 0.01)),
}
TEXT = """\
One hidden layer of 50 units, the 20 standard splits, mean and standard error over the splits; the log-likelihood is
that of the target in its own unit. Settings are chosen and the noise is fitted on a fifth of each training split, by no
test row (`examples/uci.py`). The published numbers are those of MC-dropout with its own search.
"vanilla" is the plain network with the same noise, "mix" the mixture of five of them from different starting points.
The coverage is that of the 95% intervals, all splits together. The held-out likelihood of each split
chooses between 1,000 and 4,000 steps on 128 rows each, for every method. Differences of the
log-likelihood to vanilla's are paired by split; the splits overlap, so the variance of their mean is taken as
s^2 (1/20 + 1/9), as Nadeau and Bengio (2003) correct it; all others are the standard errors that the field reports.

Test scores had been seen before some of this was decided, so that the figures are optimistic. A first run held the
noise fixed while it trained on the whole split; it was worse, on held-out rows too, and here the noise is learned in
both trainings. The other rows were known when "mix" was added; that it is five plain networks, and for how long they
train, was decided by held-out rows alone (of concrete; those of wine were looked at too, and changed nothing). That
all others may train as long as a mixture was decided last, so that it is compared with what its members are.
mc_dropout's second rate, 0.005, was added after its intervals on yacht and energy had been seen; held-out rows choose
between the two there, and the other tables have the rate 0.02 alone.

"""
ESTIMATOR = """\
"BayesRegressor" is one call of `fit` at the estimator's defaults: two hidden layers of 50 units; steps, prior and noise
by held-out rows of the training split.

"""
TEST_OVER_TRAIN = 1 / 9
POINTS = 3  # of percent: how near to 95 % intervals have to be


def rounded(found):
    """Return nested results with five digits after the point."""
    if isinstance(found, dict):
        return {k: rounded(v) for k, v in found.items()}
    if isinstance(found, list):
        return [rounded(v) for v in found]
    return round(found, 5) if isinstance(found, float) else found


def cell(values, digits):
    """Write a mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def apart(rows, vanilla):
    """Write the mean difference of the log-likelihood, with the standard error of overlapping splits."""
    return apart_of([r["ll"] - v["ll"] for r, v in zip(rows, vanilla, strict=True)], TEST_OVER_TRAIN).shown(2)


def inside(rows):
    """Return how many percent of the targets are in their intervals."""
    return 100 * sum(r["inside"] for r in rows) / sum(r["rows"] for r in rows)


def verdict(results):
    """Say where the best method is above the published one, and whose intervals hold what they promise."""
    found = {True: [], False: []}
    for name, methods in results.items():
        best = max(statistics.mean(r["ll"] for r in rows) for rows in methods.values())
        found[best > PUBLISHED[name][1][0]].append(name)
    near = [m for m in uci.SETTINGS if all(abs(inside(rows[m]) - 95) <= POINTS for rows in results.values())]
    return (
        f"The best method is above the published log-likelihood on {listed(found[True])}, and not on "
        f"{listed(found[False])}. On all tables the intervals of {listed(near)} are within {POINTS} points of 95%.\n"
    )


def listed(names):
    return ", ".join(names) or "none"


def tables():
    """Return the page's section with all results."""
    results = json.loads(RESULTS.read_text())
    known = any(uci.REGRESSOR in methods for methods in results.values())
    lines = [TEXT + (ESTIMATOR if known else "") + verdict(results)]
    for name, methods in results.items():
        (rmse, rmse_error), (ll, ll_error) = PUBLISHED[name]
        head = "| | RMSE | log-likelihood | minus vanilla's | CRPS | 95% intervals hold |"
        lines += [f"### {name}\n", head, "|---" * 6 + "|"]
        for method, rows in methods.items():
            scores = [cell([r[key] for r in rows], digits) for key, digits in (("rmse", 2), ("ll", 2), ("crps", 3))]
            scores.insert(2, "" if method == "vanilla" else apart(rows, methods["vanilla"]))
            lines.append(f"| {method} | {' | '.join(scores)} | {inside(rows):.1f} % |")
        lines.append(f"| MC-dropout, published | {rmse} ± {rmse_error} | {ll} ± {ll_error} | | | |\n")
    return "\n".join(lines)


def main():
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=[*uci.SETTINGS, uci.REGRESSOR])
    parser.add_argument("--tables", nargs="+", default=list(uci.TABLES))
    parser.add_argument("--rerun", action="store_true", help="also the rows that there are")
    parser.add_argument("--page", action="store_true", help="only write the section, from the results that there are")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if args.page else args.tables:
        missing = [m for m in args.methods if args.rerun or m not in results.get(name, {})]
        if missing:
            results.setdefault(name, {}).update(uci.run(name, missing))
            RESULTS.write_text(json.dumps(rounded(results)) + "\n")
    write_section(PAGE, "uci", tables())


if __name__ == "__main__":
    main()
