"""The UCI tables of the page on regression, beside published numbers.

    BAYESIFY_DATA=... python examples/uci_tables.py [--methods vi la]   # tables without a result yet; then the page
    python examples/uci_tables.py --page                                # the page's section from the results alone

The results are in `docs/results/uci.json`.
"""

import argparse
import json
import statistics
from pathlib import Path

import training
import uci

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
that of the target in its own unit. Settings are chosen and the noise is fitted on a fifth of each training split
(`examples/uci.py`); no test row was looked at. The published numbers are those of MC-dropout with its own search.
"vanilla" is the plain network with the same noise, "mix" the mixture of five of them from different starting points.
The coverage is that of the 95% intervals, all splits together. Training is short, 1,000 steps on 128 rows each; for
"mix" the held-out likelihood of each split chooses between 1,000 and 4,000. The best method is above the published
log-likelihood on concrete, energy and yacht, and below it on wine-quality-red. The intervals of vi, sgld and mix are
within 3 points of 95%.

Test scores had been seen before some of this was decided, so that the figures are optimistic. A first run held the
noise fixed while it trained on the whole split; it was worse, on held-out rows too (energy, plain network: RMSE 0.56
against 0.45), and here the noise is learned in both trainings. The other rows were known when "mix" was added; that it
is five plain networks, and for how long they train, was decided by held-out rows alone (of concrete; those of wine were
looked at too, and changed nothing).

"""


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


def tables():
    """Return the page's section with all results."""
    results = json.loads(RESULTS.read_text())
    lines = [TEXT]
    for name, methods in results.items():
        (rmse, rmse_error), (ll, ll_error) = PUBLISHED[name]
        lines += [f"### {name}\n", "| | RMSE | log-likelihood | CRPS | 95% intervals hold |", "|---|---|---|---|---|"]
        for method, rows in methods.items():
            held = 100 * sum(r["inside"] for r in rows) / sum(r["rows"] for r in rows)
            scores = [cell([r[key] for r in rows], digits) for key, digits in (("rmse", 2), ("ll", 2), ("crps", 3))]
            lines.append(f"| {method} | {' | '.join(scores)} | {held:.1f} % |")
        lines.append(f"| MC-dropout, published | {rmse} ± {rmse_error} | {ll} ± {ll_error} | | |\n")
    return "\n".join(lines)


def main():
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(uci.SETTINGS))
    parser.add_argument("--tables", nargs="+", default=list(uci.TABLES))
    parser.add_argument("--page", action="store_true", help="only write the section, from the results that there are")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if args.page else args.tables:
        missing = [m for m in args.methods if m not in results.get(name, {})]
        if missing:
            results.setdefault(name, {}).update(uci.run(name, missing))
            RESULTS.write_text(json.dumps(rounded(results)) + "\n")
    training.write_section(PAGE, "uci", tables())


if __name__ == "__main__":
    main()
