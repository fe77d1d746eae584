"""What the results say: the best rows in words, and every claim with its figure, whether it holds or not."""

import math
import statistics

from .rows import METHODS, WORDS
from .tables import BAR

RECOMMENDED = ("la_last_kron", "closed")
ENSEMBLE = ("ensemble5", "temperature")
MIXTURE = ("mix5_la_last_kron", "closed")
PLAIN = ("plain", "mean")
CHEAP = 1.1
RULE = (
    "Comparisons hold if the paired mean difference is within one standard error of the claim. What is best of many "
    "rows was found on the test data, which flatters it a little; all rows are below."
)
BASELINES = ("plain", "ensemble5", "ivon_point")


def named(way):
    """Return a (row, kind) for people."""
    row, kind = way
    return f"{WORDS.get(row, row)} ({kind})"


def bayesian(table):
    """Return all (row, kind) of bayesify's methods at their defaults."""
    rows = [r for r in table.rows if r not in BASELINES and not r.endswith("_tuned")]
    return [(row, kind) for row in rows for kind in table.kinds(row)]


def best(table, ways, score="nll"):
    """Return the (row, kind) with the lowest mean."""
    return min(ways, key=lambda way: table.mean(*way, score))


def summary(tables):
    """Return a few lines: on each task what is best, for one pass and at any cost, and what does not pay."""
    lines = ["## In short", "", *choices(tables)]
    for name, table in tables.items():
        ways = bayesian(table)
        if not ways:
            continue
        top = best(table, ways)
        cheap = [w for w in ways if table.mean(*w, "cost") <= CHEAP or w == RECOMMENDED or w[1].endswith("mean")]
        one = best(table, cheap)
        below = [w for w in ways if table.paired(w, BAR, "nll").mean < -table.paired(w, BAR, "nll").error]
        lines.append(
            f"- **{name}**: plain + temperature has NLL {table.mean(*BAR, 'nll'):.4f}; the best Bayesian row is "
            f"{named(top)} with {table.paired(top, BAR, 'nll').shown()} against it, of one pass {named(one)} with "
            f"{table.paired(one, BAR, 'nll').shown()}; {len(below)} of {len(ways)} rows are below it by more "
            "than a standard error."
        )
    return lines


def choices(tables):
    """Return what to choose for what, by means over the tasks, and where one model's posterior does not pay."""

    def over(one, other, score="nll", other_score=None):
        both = [t for t in tables.values() if t.has(one) and t.has(other)]
        found = [t.paired(one, other, score, other_score).mean for t in both]
        return statistics.mean(found) if found else math.nan

    def each(ways, *args, better=1):
        known = [(way, over(way, *args)) for way in ways if any(t.has(way) for t in tables.values())]
        return ", ".join(
            f"{WORDS.get(way[0], way[0])} {value:+.3f}"
            for way, value in sorted(known, key=lambda pair: better * pair[1])
        )

    def ways(kind):
        return [(method, kind) for method in METHODS]

    single = [("la_last_kron", "closed"), *ways("samples")]
    spreads = [*single, ("la_last_self", "closed"), ("mix5_la_last_kron", "closed"), ("ensemble5", "samples")]
    idle = [name for name, t in tables.items() if not any(below(t, w) for w in bayesian(t) if w[0] != MIXTURE[0])]
    return [
        f"- **A trained model, one pass**: the last layer's NLL is {over(RECOMMENDED, PLAIN):+.3f} against plain in "
        f"the mean of the tasks, and {over(RECOMMENDED, BAR):+.3f} against temperature scaling.",
        f"- **A training of your own**: samples' NLL against plain: {each(single[1:], PLAIN)}.",
        f"- **The same with held-out data**, against plain + temperature: the mean with a temperature, in one pass: "
        f"{each(ways('tempered mean'), BAR)}; samples with a temperature: {each(ways('tempered samples'), BAR)}; "
        f"samples without one: {each(single[1:], BAR)}.",
        f"- **Five trainings**: the mixture of five last layers has {over(MIXTURE, ENSEMBLE):+.3f} against an ensemble "
        f"with temperature scaling, and {over(MIXTURE, BAR):+.3f} against one such network.",
        "- **To notice what was never seen**: AUROC by mutual information minus that of plain's entropy: "
        f"{each(spreads, PLAIN, 'ood_mi', 'ood_entropy', better=-1)}.",
        "- **Where it does not pay**: temperature scaling of one plain network is as good as every posterior of one "
        f"model, in NLL and within a standard error, on: {', '.join(idle) or 'none of the tasks'}.",
    ]


def below(table, way):
    """Tell whether a way to predict is below plain + temperature by more than a standard error."""
    apart = table.paired(way, BAR, "nll")
    return apart.mean < -(0.0 if math.isnan(apart.error) else apart.error)


def checks(tables):
    """Return a table of claims by task; what does not hold says so."""
    lines = ["## What holds, and what does not", "", "| claim | " + " | ".join(tables) + " |"]
    lines.append("|---" * (len(tables) + 1) + "|")
    for words, check in CLAIMS:
        found = [check(table) for table in tables.values()]
        marked = ["" if f is None else f"{'yes' if f[0] else '**no**'}: {f[1]}" for f in found]
        lines.append(f"| {words} | " + " | ".join(marked) + " |")
    return [*lines, "", RULE]


def pair(one, other, score="nll", other_score=None, *, margin=0.0, higher=False):
    """Return a check that one way's score is at most another's (at least, if higher, plus a margin)."""

    def check(table):
        if one[0] not in table.rows or other[0] not in table.rows:
            return None
        apart = table.paired(one, other, score, other_score)
        return holds(apart, margin, higher), apart.shown()

    return check


def holds(apart, margin=0.0, higher=False):
    """Tell whether a difference is at most 0, or at least the margin, within one standard error."""
    error = 0.0 if math.isnan(apart.error) else apart.error
    return apart.mean >= margin - error if higher else apart.mean <= error


def best_bayesian(table):
    ways = bayesian(table)
    if not ways:
        return None
    top = best(table, ways)
    apart = table.paired(top, BAR, "nll")
    return holds(apart), f"{named(top)} {apart.shown()}"


def cheap_against_ensemble(table):
    ways = [w for w in bayesian(table) if table.mean(*w, "cost") <= CHEAP]
    if not ways or ENSEMBLE[0] not in table.rows:
        return None
    top = best(table, ways)
    apart = table.paired(top, ENSEMBLE, "nll")
    return holds(apart), f"{named(top)} {apart.shown()}"


def recommended_mi(table):
    if RECOMMENDED[0] not in table.rows:
        return None
    value = table.mean(*RECOMMENDED, "ood_mi")
    return value > 0.5, f"{value:.3f}"


def best_ood(table):
    ways = [(w, s) for w in bayesian(table) for s in ("ood_entropy", "ood_mi") if table.values(*w, s)]
    if not ways:
        return None
    way, score = max(ways, key=lambda pair: table.mean(*pair[0], pair[1]))
    apart = table.paired(way, PLAIN, score, "ood_entropy")
    return apart.mean >= 0.03, f"{named(way)}, {score.removeprefix('ood_')}, {apart.shown(3)}"


def all_methods(one, other):
    """Return a check of all methods at once: their one kind at most their other kind, or plain's mean."""

    def check(table):
        beside = {m: PLAIN if other == "plain" else (m, other) for m in METHODS if m in table.rows}
        found = {m: table.paired((m, one), way, "nll") for m, way in beside.items()}
        wrong = [f", {m} {apart.shown()}" for m, apart in found.items() if not holds(apart)]
        return (not wrong, f"{len(found) - len(wrong)} of {len(found)}" + "".join(wrong)) if found else None

    return check


def methods_mi(table):
    found = {m: table.mean(m, "samples", "ood_mi") for m in ("vi", "la", "ivon") if m in table.rows}
    plain = table.mean(*PLAIN, "ood_entropy")
    cells = ", ".join(f"{m} {v:.3f}" for m, v in found.items())
    return None if not found else (all(v > 0.5 for v in found.values()), f"{cells} (plain's entropy {plain:.3f})")


def spread_follows(table):
    found = {m: table.note(m, "follows") for m in ("vi", "ivon") if m in table.rows}
    cells = ", ".join(f"{m} {v:.2f}" for m, v in found.items())
    return (all(v < -0.1 for v in found.values()), cells) if found else None


def first_loss(table):
    found = {m: table.over_plain(m, "first_loss") for m in METHODS if m in table.rows}
    wrong = [f"{m} {v:.1f}" for m, v in found.items() if not 1 / 3 <= v <= 3]
    return None if not found else (not wrong, f"at most {max(found.values()):.2f}" + "".join(f", {w}" for w in wrong))


def last_layer_cost(table):
    if RECOMMENDED[0] not in table.rows:
        return None
    cost, fit = table.mean(*RECOMMENDED, "cost"), table.note(RECOMMENDED[0], "fit_over_training")
    return cost <= 1.05 and fit <= 0.1, f"{cost:.2f}, {100 * fit:.1f} %"


CLAIMS = (
    ("the best Bayesian row at defaults is at or below plain + temperature in NLL", best_bayesian),
    ("a row of at most 1.1 plain passes is at or below ensemble of 5 + temperature in NLL", cheap_against_ensemble),
    ("the last layer's mutual information tells OOD data (AUROC above 0.5)", recommended_mi),
    ("the best OOD AUROC is at least 0.03 above that of plain's entropy", best_ood),
    ("every method: samples' NLL at most the mean's", all_methods("samples", "mean")),
    ("every method: samples' NLL at most plain's", all_methods("samples", "plain")),
    ("mutual information of vi, la and ivon tells OOD data (AUROC above 0.5)", methods_mi),
    ("the spread of vi and ivon follows the curvature (rank correlation below -0.1)", spread_follows),
    ("the first loss is within a factor of 3 of plain's", first_loss),
    ("last layer: NLL at most plain + temperature's", pair(RECOMMENDED, BAR)),
    (
        "last layer: OOD AUROC by entropy at least 0.03 above plain's",
        pair(RECOMMENDED, PLAIN, "ood_entropy", margin=0.03, higher=True),
    ),
    ("last layer: a prediction costs at most 1.05 of plain's, the fit at most 10 % of training", last_layer_cost),
    ("mix of 5 last layers: NLL at most ensemble of 5 + temperature's", pair(MIXTURE, ENSEMBLE)),
    (
        "mix of 5 last layers: OOD AUROC by entropy at least the ensemble's",
        pair(MIXTURE, ("ensemble5", "samples"), "ood_entropy", higher=True),
    ),
    ("swag: samples' NLL at most its mean's", pair(("swag", "samples"), ("swag", "mean"))),
    ("ivon: samples' NLL at most that of its mean without spread", pair(("ivon", "samples"), ("ivon_point", "mean"))),
)
