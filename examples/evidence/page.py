"""The page: one table and one picture per task, and what they say, from the result files alone."""

import math
import statistics

from . import claims, files, pictures
from .rows import METHODS, ROWS, SAMPLES, TUNABLE, WORDS
from .tables import BAR, Table
from .texts import TASKS

PAGE = files.tasks.ROOT / "docs/evidence.md"

HEAD = (
    "| | prediction | NLL | minus plain + temperature | lower in | error % | Brier | ECE % | debiased | own errors | "
    "OOD, entropy | OOD, MI | shifted NLL | training | prediction | memory |"
)


def page(results):
    """Return the page."""
    tables = {name: Table(results[name]) for name in TASKS if name in results and BAR[0] in results[name]}
    if not tables:
        return f"{TEXT}\nNo runs yet.\n"
    lines = [TEXT, *claims.summary(tables), "", *claims.checks(tables), ""]
    for name, table in tables.items():
        lines += [f"## {name}", "", f"{TASKS[name].about[0].upper()}{TASKS[name].about[1:]}.", ""]
        lines += [*table_of(table), "", f"![NLL against cost, and error against coverage](results/evidence/{name}.svg)"]
        lines += ["", *notes(name, table), ""]
    return "\n".join([*lines, END])


def words(row):
    """Return a row's name for people."""
    name = row.removesuffix("_tuned")
    return WORDS.get(name, name) + (", chosen setting" if name != row else "")


def table_of(table, rows=None):
    """Return the table of one task: all rows, or some."""
    order = [r for r in (*ROWS, *(f"{t}_tuned" for t in TUNABLE)) if r in table.rows and (rows is None or r in rows)]
    lines = [HEAD, "|---" * 16 + "|"]
    for row in order:
        for kind in table.kinds(row):
            lines.append(f"| {words(row)} | {kind} | " + " | ".join(cells(table, row, kind)) + " |")
    return lines


def cells(table, row, kind):
    """Return the cells of one row and one way to predict."""
    get = table.mean
    apart = table.paired((row, kind), BAR, "nll")
    low, high = (100 * statistics.mean(v[i] for v in table.values(row, kind, "ece_interval")) for i in (0, 1))
    same = (row, kind) == BAR
    return [
        f"{get(row, kind, 'nll'):.4f}",
        "" if same else apart.shown(),
        "" if same else f"{apart.lower} of {apart.count} (p {apart.sign_test:.2f})",
        f"{100 * get(row, kind, 'error'):.1f}",
        f"{get(row, kind, 'brier'):.3f}",
        f"{100 * get(row, kind, 'ece'):.1f} ({low:.1f} to {high:.1f})",
        f"{100 * get(row, kind, 'ece_debiased'):.1f}",
        shown(get(row, kind, "errors_auroc")),
        shown(get(row, kind, "ood_entropy")),
        shown(get(row, kind, "ood_mi")),
        f"{get(row, kind, 'shift_nll'):.3f}",
        f"{table.over_plain(row, 'train_seconds'):.1f}",
        f"{get(row, kind, 'cost'):.2f}",
        f"{table.over_plain(row, 'bytes'):.1f}",
    ]


def shown(value):
    return "" if math.isnan(value) else f"{value:.3f}"


def notes(name, table):
    """Return what the columns have no place for."""
    reference = table.rows[BAR[0]]
    seconds = statistics.mean(r["train_seconds"] for r in reference.values())
    task = TASKS[name]
    steps = f"{task.epochs} epochs in batches of {task.batch}"
    lines = [f"{len(reference)} seeds; {steps}; plain training takes {seconds:.1f} s of one core."]
    first = statistics.mean(r["first_loss"] for r in reference.values())
    losses = [f"{words(r)} {table.top(r, 'first_loss'):.3g}" for r in METHODS if r in table.rows]
    if losses:
        lines.append(f"The first loss is {first:.3g} for plain, and with its penalty: {', '.join(losses)}.")
    for row in ("vi", "ivon"):
        if row in table.rows:
            lines.append(
                f"{row}: the rank correlation of the spread over its start with the Fisher diagonal, within tensors, "
                f"is {table.note(row, 'follows'):.2f}."
            )
    factors = [f"{r} {table.note(r, 'factor'):.2g}" for r in METHODS if r in table.rows]
    if factors:
        lines.append(f"Mean of the factors that `calibrate` found: {', '.join(factors)}.")
    if "la_last_kron" in table.rows:
        part = 100 * table.note("la_last_kron", "fit_over_training")
        lines.append(f"The fit of the last layer with its tuning takes {part:.1f} % of plain training.")
    levels = [statistics.mean(v[i] for v in table.values(*BAR, "shift_levels")) for i in range(5)]
    lines.append(
        "NLL of plain + temperature at the shift's five levels: " + ", ".join(f"{v:.2f}" for v in levels) + "."
    )
    settings = {row: next(iter(table.rows[row].values()))["setting"] for row in table.rows if row.endswith("_tuned")}
    if settings:
        cells = ", ".join(f"{words(row).split(',')[0]} {setting or 'the default'}" for row, setting in settings.items())
        lines.append(f"Chosen settings (lr and epochs are factors): {cells}.")
    again = sum(r["reruns"] for rows in table.rows.values() for r in rows.values())
    lines.append(f"Results that were replaced by a second run: {again}.")
    return ["\n".join(f"- {line}" for line in lines)]


TEXT = f"""# Evidence

Every method at its defaults (`bayesify(model, method)`, nothing chosen) beside what it must beat: a plain network with
temperature scaling, and an ensemble of five. A fifth of the training data is held out of every run; temperatures,
`calibrate`'s factor and the last layer's prior are found on it. "Mean" is the plain model that `unbayesify` makes of a
posterior, "tempered" is with a temperature as plain training has it. The test data is read once per run, by one
function, after training; settings for the rows with a chosen setting come from validation data of seeds that are not
reported. The library's own defaults were chosen on validation data too: for MNIST and the sentences it is apart
from the test data, while splits of the digits and the photos come from one small set and overlap. Test scores of
earlier defaults were known when the present ones (the pull, the tolerance, SGLD's weights, IVON's curvature) were
sought, and showed where to look; so were those of the default rows when `pull` joined the grids of the chosen settings,
and when the tempered ways to predict joined the table, in which nothing is chosen.
Written by `python -m examples.evidence` from `docs/results/evidence`.

Differences are paired by seed, with standard errors; "lower in" counts seeds, with a two-sided sign test. The ECE is
that of the top label in 15 bins, with the mean of the seeds' 95 % bootstrap intervals; the debiased one is without what
noise alone adds. "Own errors" and "OOD" are AUROCs: telling wrong answers by confidence, and unknown data by entropy or
mutual information (MI). Shifted data is damaged at five levels. Training and prediction are processor time over the
plain network's, on one thread, memory is that of all tensors; samples are {SAMPLES}. UCI regression has
[a page of its own](regression.md).
"""

END = """## How to read it

Splits of the photos are random, so the validation photos of one seed may be test photos of another; all other test data
is apart from everything that a setting was chosen on. On the digits the network is so small (7,500 weights) that the
time of a prediction is that of its bookkeeping. The standard errors are over seeds: other training data, another start,
another order, but (except for the photos) the same test data.
"""


def write():
    """Write the page and its pictures."""
    results = files.read_all()
    for name, rows in results.items():
        if BAR[0] in rows:
            pictures.draw(files.RESULTS / f"{name}.svg", Table(rows), words)
    PAGE.write_text(page(results))
