"""The page of distances, from the committed results alone."""

import datetime
import json
from pathlib import Path

import torch

from .problems import PROBLEMS
from .table import BOUNDS, DRAWS, ROUNDING, SAMPLING, TABLE, distances

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "exactness.json"
PAGE = ROOT / "docs" / "exactness.md"

ABOUT = f"""# Exactness

What every method computes on problems whose answer is known, against that answer. `make exactness` writes this page;
the tests in `tests/exactness/` measure the same distances in every run. A method joins by one entry in
`tests/exactness/table.py`.

The problems have two correlated parameters, a Gaussian prior, and run in float64: linear regression with Gaussian
noise (closed form) and logistic regression (quadrature). What a method should arrive at is its own optimum: for "vi"
and "ivon" the best Gaussian with diagonal covariance, for "la" the curvature at the MAP (Kronecker factors of a linear
regression are exact), for "mc_dropout" the minimum of the loss averaged over all masks, for "sgld" the stationary
distribution of its *discretised* chain, by the powers of its transition density; its step is large on purpose (0.4
over the largest curvature), so that the discretisation shows. "swag" is given iterates with the posterior's
covariance, of which its formula keeps the variances and half of the correlation.
The model holds up to {DRAWS} copies of the problem, so that one forward is as many independent draws. Under a "relative
prior" the package chooses the prior's scale and, by the number of weights, its temperature: the answer is then that of
the tempered problem.
"""


def measure():
    """Return everything that the page shows."""
    rows = [
        {"method": entry.label, "problem": problem.name, **d._asdict()}
        for entry in TABLE
        for problem in PROBLEMS
        for d in distances(entry, problem)
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__.split("+")[0],
        "rows": rows,
        "approximation": [
            approximation(entry, problem) for entry in TABLE if not entry.relative for problem in PROBLEMS
        ],
    }


def approximation(entry, problem):
    """Compare what a method should arrive at with the exact posterior."""
    target, exact = entry.target(problem), problem.posterior
    std = exact.cov.diagonal().sqrt()
    widths = target.cov.diagonal().sqrt()
    return {
        "method": entry.label,
        "problem": problem.name,
        "shift": float(((target.mean - exact.mean) / std).abs().max()),
        "ratio": (widths / std).tolist(),
        "correlation": round(float(target.cov[0, 1] / widths.prod()), 9) + 0.0 if widths.all() else 0.0,
        "exact_correlation": float(exact.cov[0, 1] / std.prod()),
    }


def write(path, results):
    path.write_text(json.dumps(results, indent=1) + "\n")


def page():
    """Return the page."""
    results = json.loads(RESULTS.read_text())
    names = [problem.name for problem in PROBLEMS]
    cells = {(r["method"], r["quantity"], r["problem"]): r for r in results["rows"]}
    lines = [
        ABOUT,
        f"Measured on {results['date']} with torch {results['torch']}.",
        "",
        "## From the code to its own mathematics",
        "",
        f"The largest distance over the elements: the relative error where the answer is not random (at most "
        f"{BOUNDS[ROUNDING]:g}), else in standard errors, marked se (at most {BOUNDS[SAMPLING]:g}).",
        "",
        "| method | quantity | " + " | ".join(names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for method, quantity in dict.fromkeys((m, q) for m, q, _ in cells):
        found = [words(cells.get((method, quantity, name))) for name in names]
        lines.append(f"| {method} | {quantity} | " + " | ".join(found) + " |")
    lines += [
        "",
        "## From the mathematics to the posterior",
        "",
        "How good the method itself is, however well it is computed: the shift of the mean in posterior standard "
        "deviations, the two standard deviations over the posterior's, and the correlation of the two parameters.",
        "",
        "| method | problem | shift | std / exact | correlation (exact) |",
        "|---|---|---|---|---|",
    ]
    for r in results["approximation"]:
        ratio = ", ".join(f"{x:.3f}" for x in r["ratio"])
        lines.append(
            f"| {r['method']} | {r['problem']} | {r['shift']:.3f} | {ratio} | "
            f"{r['correlation']:.2f} ({r['exact_correlation']:.2f}) |"
        )
    return "\n".join(lines) + "\n"


def words(row):
    """Write one distance."""
    if row is None:
        return ""
    return f"{row['distance']:.1e}" if row["unit"] == ROUNDING else f"{row['distance']:.1f} se"
