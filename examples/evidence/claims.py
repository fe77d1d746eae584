"""What the results say: the best rows in words, and every claim with its figure, whether it holds or not."""

from .rows import METHODS, WORDS
from .tables import BAR

RECOMMENDED = ("la_last_kron", "closed")
TEMPERED = ("la_last_kron", "tempered closed")
ENSEMBLE = ("ensemble5", "temperature")
MIXTURE = ("mix5_la_last_kron", "closed")
ONE_BUDGET = ("one_budget", "temperature")
TWO_BUDGETS = ("two_budgets", "temperature")
PLAIN = ("plain", "mean")
CHOSEN = ("plain_tuned", "temperature")
CHEAP = 1.1
RULE = (
    "A comparison is a yes if the mean difference says so, within noise if it says the opposite by at most one "
    "standard error, and else a no. The best of many rows was picked on the test data, which flatters it; all rows "
    "are below. A mean is a single network: what it gains comes from the prior and its pull, not from a posterior. The "
    "mean of la is plain training with the prior and nothing else."
)
SURE = 2  # standard errors that count as a difference where nothing was claimed beforehand
BASELINES = ("plain", "plain_sgd", "ensemble5", "ensemble5_sgd", "ivon_point", "one_cycle")
NOISE = "within noise"
MARKS = {True: "yes", False: "**no**"}


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


def of_task(table):
    """Return a sentence: what is best on a task, for one pass and at any cost."""
    ways = bayesian(table)
    if not ways:
        return []
    top = best(table, ways)
    one = best(table, [way for way in ways if table.mean(*way, "cost") <= CHEAP] or ways)
    lower = [way for way in ways if below(table, way)]
    sgd = table.rival("sgld", BAR)
    other = "" if sgd == BAR else f" (by SGD {table.mean(*sgd, 'nll'):.4f})"
    return [
        f"Plain + temperature has NLL {table.mean(*BAR, 'nll'):.4f}{other}. Against it, the best Bayesian row is "
        f"{named(top)} with {table.against(top).shown()}, and the best of one pass {named(one)} with "
        f"{table.against(one).shown()}; {len(lower)} of {len(ways)} rows are below it by more than two standard "
        "errors.",
        "",
    ]


def failures(tables):
    """Return the chief claims that do not hold, and where."""
    wrong = []
    for words, check in CLAIMS[:CHIEF]:
        found = {name: check(table) for name, table in tables.items()}
        missed = [name for name, f in found.items() if f is not None and f[0] is False]
        if missed:
            wrong.append(f"{words} (not on {', '.join(missed)})")
    return f"Not on every task: {'; '.join(wrong)}." if wrong else "All chief claims hold on every task."


def idle(tables):
    """Return a sentence: where one model's posterior does not pay."""
    several = (MIXTURE[0], ONE_BUDGET[0], TWO_BUDGETS[0])
    names = [name for name, t in tables.items() if not any(below(t, w) for w in bayesian(t) if w[0] not in several)]
    return (
        "Temperature scaling of one plain network is as good as every posterior of one model, in NLL and within two "
        f"standard errors, on {', '.join(names) or 'none of the tasks'}."
    )


def averaged(tables):
    """Return a sentence: whether samples do better than the mean once both have a temperature."""
    both = [(t, (m, "tempered samples"), (m, "tempered mean")) for t in tables.values() for m in METHODS]
    found = [t.paired(one, other, "nll") for t, one, other in both if t.has(one) and t.has(other)]
    lower, higher = (sum(sign * a.mean < -SURE * a.or_none for a in found) for sign in (1, -1))
    return (
        "With a temperature on both, samples have a lower NLL than the posterior mean (by two standard errors) in "
        f"{lower} of {len(found)} pairs of a method and a task, and a higher one in {higher}."
    )


def below(table, way):
    """Return whether a way to predict is below plain + temperature by more than two standard errors."""
    apart = table.against(way)
    return apart.mean < -SURE * apart.or_none


def checks(tables):
    """Return a table of claims by task; what does not hold says so."""
    lines = ["| claim | " + " | ".join(tables) + " |"]
    lines.append("|---" * (len(tables) + 1) + "|")
    for words, check in CLAIMS:
        found = [check(table) for table in tables.values()]
        marked = ["" if f is None else f"{MARKS.get(f[0], f[0])}: {f[1]}" for f in found]
        lines.append(f"| {words} | " + " | ".join(marked) + " |")
    return [*lines, "", RULE]


def pair(one, other, score="nll", other_score=None, *, margin=0.0, higher=False):
    """Return a check that one way's score is at most another's (at least, if higher, plus a margin)."""

    def check(table):
        if not (table.has(one) and table.has(other)):
            return None
        apart = table.against(one, other, score, other_score)
        return holds(apart, margin, higher), apart.shown()

    return check


def holds(apart, margin=0.0, higher=False):
    """Return whether a difference is at most 0, or at least the margin; NOISE where it misses by one standard error."""
    missed = margin - apart.mean if higher else apart.mean
    return True if missed <= 0 else NOISE if missed <= apart.or_none else False


def best_bayesian(table):
    ways = bayesian(table)
    if not ways:
        return None
    top = best(table, ways)
    apart = table.against(top)
    return holds(apart), f"{named(top)} {apart.shown()}"


def best_of_chosen(table):
    ways = bayesian(table)
    if not ways or not table.has(CHOSEN):
        return None
    top = best(table, ways)
    apart = table.paired(top, CHOSEN, "nll")
    return holds(apart), f"{named(top)} {apart.shown()}"


def cheap_against_ensemble(table):
    ways = [w for w in bayesian(table) if table.mean(*w, "cost") <= CHEAP]
    if not ways or ENSEMBLE[0] not in table.rows:
        return None
    top = best(table, ways)
    apart = table.against(top, ENSEMBLE)
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
        beside = {m: PLAIN if other == "plain" else (m, other) for m in METHODS if table.has((m, one))}
        found = {m: table.against((m, one), way) for m, way in beside.items()}
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


CHIEF = 5  # of the claims: what the methods are for
CLAIMS = (
    ("the best Bayesian row at defaults is at or below plain + temperature in NLL", best_bayesian),
    (
        "the best Bayesian row at defaults is at or below plain + temperature with a chosen setting in NLL",
        best_of_chosen,
    ),
    ("a row of at most 1.1 plain passes is at or below ensemble of 5 + temperature in NLL", cheap_against_ensemble),
    ("mutual information of the last layer detects OOD data (AUROC above 0.5)", recommended_mi),
    ("the best OOD AUROC is at least 0.03 above that of plain's entropy", best_ood),
    ("every method: the NLL of samples is at most that of the mean", all_methods("samples", "mean")),
    ("the same with a temperature on both", all_methods("tempered samples", "tempered mean")),
    ("every method: the NLL of samples is at most that of plain training", all_methods("samples", "plain")),
    ("mutual information of vi, la and ivon detects OOD data (AUROC above 0.5)", methods_mi),
    ("the spread of vi and ivon follows the curvature (rank correlation below -0.1)", spread_follows),
    ("the first loss is within a factor of 3 of plain's", first_loss),
    ("last layer: the NLL is at most that of plain + temperature", pair(RECOMMENDED, BAR)),
    ("last layer with a temperature: the same", pair(TEMPERED, BAR)),
    (
        "last layer: OOD AUROC by mutual information at least plain's by entropy",
        pair(RECOMMENDED, PLAIN, "ood_mi", "ood_entropy", higher=True),
    ),
    (
        "last layer: OOD AUROC by entropy at least 0.03 above plain's",
        pair(RECOMMENDED, PLAIN, "ood_entropy", margin=0.03, higher=True),
    ),
    ("last layer: a prediction costs at most 1.05 of plain's, the fit at most 10 % of training", last_layer_cost),
    ("mix of 5 last layers: the NLL is at most that of ensemble of 5 + temperature", pair(MIXTURE, ENSEMBLE)),
    (
        "mix of 5 last layers: OOD AUROC by entropy at least the ensemble's",
        pair(MIXTURE, ("ensemble5", "samples"), "ood_entropy", higher=True),
    ),
    ("swag: the NLL of samples is at most that of the mean", pair(("swag", "samples"), ("swag", "mean"))),
    (
        "ivon: the NLL of samples is at most that of training without spread",
        pair(("ivon", "samples"), ("ivon_point", "mean")),
    ),
    (
        "ensemble for one training with a temperature: the NLL is at most that of plain + temperature",
        pair(ONE_BUDGET, BAR),
    ),
    (
        "ensemble for one training with a temperature: the NLL is at most that of its first cycle with one",
        pair(ONE_BUDGET, ("one_cycle", "temperature")),
    ),
    (
        "ensemble for one training: OOD AUROC by entropy at least plain's",
        pair(("one_budget", "samples"), PLAIN, "ood_entropy", higher=True),
    ),
    (
        "ensemble for two trainings with a temperature: the NLL is at most that of ensemble of 5 + temperature",
        pair(TWO_BUDGETS, ENSEMBLE),
    ),
)
