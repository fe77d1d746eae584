"""The page: one table and one picture per task, and what they say, from the result files alone."""

import math
import statistics

from . import claims, files, grid, pictures, summary
from .rows import METHODS, ROWS, SAMPLES, TUNABLE, WORDS
from .tables import BAR, Table
from .texts import TASKS

PAGE = files.tasks.ROOT / "docs/evidence.md"

HEAD = (
    "| | prediction | NLL | minus plain + temperature | lower in | minus chosen plain + temperature | error % | "
    "Brier | ECE % | debiased | own errors | OOD, entropy | OOD, MI | shifted NLL | training | prediction | memory |"
)


def page(results):
    """Return the page."""
    tables = tables_of(results)
    if not tables:
        return f"{TEXT}\nNo runs yet.\n"
    lines = [TEXT, *summary.sentences(tables), "## What holds, and what does not", "", claims.failures(tables), ""]
    lines += [*folded("Every claim, task by task", claims.checks(tables)), "", METHOD, "## Task by task", ""]
    for name, table in tables.items():
        lines += [f"### {name}", "", f"{TASKS[name].about[0].upper()}{TASKS[name].about[1:]}.", ""]
        lines += [
            *claims.of_task(table),
            f"![NLL against cost, and error against coverage](results/evidence/{name}.svg)",
        ]
        lines += ["", *folded(f"All rows of {name}", [*table_of(table), "", *notes(name, table)]), ""]
    return "\n".join([*lines, END])


def folded(title, lines):
    """Return lines that a reader unfolds."""
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def tables_of(results):
    """Return the tables of all tasks whose baseline was run."""
    return {name: table_of_task(name, results[name]) for name in TASKS if name in results and BAR[0] in results[name]}


def table_of_task(name, rows):
    """Return a task's results as a table."""
    return Table(rows, overlap=TASKS[name].overlap)


def words(row):
    """Return a row's name for people."""
    name = row.removesuffix("_tuned")
    return WORDS.get(name, name) + (", chosen setting" if name != row else "")


def table_of(table, rows=None):
    """Return the table of one task: all rows, or some."""
    order = [r for r in (*ROWS, *(f"{t}_tuned" for t in TUNABLE)) if r in table.rows and (rows is None or r in rows)]
    lines = [HEAD, "|---" * 17 + "|"]
    for row in order:
        for kind in table.kinds(row):
            lines.append(f"| {words(row)} | {kind} | " + " | ".join(cells(table, row, kind)) + " |")
    return lines


def cells(table, row, kind):
    """Return the cells of one row and one way to predict."""
    get = table.mean
    apart = table.against((row, kind))
    chosen = table.paired((row, kind), claims.CHOSEN, "nll")
    low, high = (100 * statistics.mean(v[i] for v in table.values(row, kind, "ece_interval")) for i in (0, 1))
    same = (row, kind) == BAR
    return [
        f"{get(row, kind, 'nll'):.4f}",
        "" if same or math.isnan(apart.mean) else apart.shown(),
        "" if same or not apart.count else f"{apart.lower} of {apart.count} (p {apart.sign_test:.2f})",
        "" if math.isnan(chosen.mean) else chosen.shown(),
        f"{100 * get(row, kind, 'error'):.1f}",
        f"{get(row, kind, 'brier'):.3f}",
        f"{100 * get(row, kind, 'ece'):.1f} ({low:.1f} to {high:.1f})",
        f"{100 * get(row, kind, 'ece_debiased'):.1f}",
        shown(get(row, kind, "errors_auroc")),
        shown(get(row, kind, "ood_entropy")),
        shown(get(row, kind, "ood_mi")),
        f"{get(row, kind, 'shift_nll'):.3f}",
        f"{table.over_plain(row, 'train_seconds') + fitted(table, row, kind):.1f}",
        f"{get(row, kind, 'cost'):.2f}",
        f"{table.over_plain(row, 'bytes'):.1f}",
    ]


def fitted(table, row, kind):
    """Return what `calibrate` took, over plain training, for the way to predict that needs it."""
    return table.note(row, "calibrate_seconds") / table.top(BAR[0], "train_seconds") if kind == "calibrated" else 0.0


def shown(value):
    return "" if math.isnan(value) else f"{value:.3f}"


def notes(name, table):
    """Return what the columns have no place for."""
    reference = table.rows[BAR[0]]
    seconds = statistics.mean(r["train_seconds"] for r in reference.values())
    task = TASKS[name]
    steps = f"{task.epochs} epochs in batches of {task.batch}"
    lines = [f"{len(reference)} seeds; {steps}; plain training takes {seconds:.1f} s of one core."]
    if few := {row: len(found) for row, found in table.rows.items() if len(found) < len(reference)}:
        cells = ", ".join(f"{words(row)} {count}" for row, count in few.items())
        lines.append(f"Rows of fewer seeds, with which their differences are paired: {cells}.")
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
        budget = grid.read()["budget"].get(name, {})
        spent = [f"{row} {b['steps']:,} ({b['seconds']:.0f} s)" for row, b in budget.items()]
        lines += [f"Gradient steps of all trainings that chose them: {', '.join(spent)}."] if spent else []
    again = sum(r["reruns"] for rows in table.rows.values() for r in rows.values())
    lines.append(f"Results that were replaced by a second run: {again}.")
    return ["\n".join(f"- {line}" for line in lines)]


TEXT = """# Evidence

Does it pay? Every method at its defaults, beside what it must beat: a plain network with temperature scaling, and an
ensemble of five. NLL is the negative log-likelihood of test labels: lower is better, and both errors and wrong
confidence raise it. AUROC is the probability that an unfamiliar input gets a higher score than a familiar one: 0.5 is
chance.
"""

METHOD = f"""## How it was measured

A fifth of the training data, at most 2,000, is held out of every run; temperatures, `calibrate`'s factor and the last
layer's prior are found on it. "Mean" is the plain model that `unbayesify` makes of a posterior, "tempered" is with a
temperature as plain training has it. The test data is read once per run, by one function, after training.

Settings for the rows with a chosen setting come from validation data of seeds that are not reported: four settings and
one seed for every method, up to six and three for plain training, whose optimizer is chosen too. The library's own
defaults were chosen on validation data of digits, mnist, sentences and photos, which is apart from the test data but
for the photos, whose splits overlap. Of the others only trec chose one, the ensemble's. Test scores of earlier defaults
were known when the present ones (the pull, the tolerance, SGLD's weights, IVON's curvature) were sought, and showed
where to look; so were those of the default rows when `pull` joined the grids of the chosen settings, and when the
tempered ways to predict and plain training by SGD joined the table, in which nothing is chosen. Plain training's grid
was widened (to SGD, twice the epochs, three seeds) after its first chosen settings had been scored, which the present
ones replaced.

The ensemble for one training (`bayesify(model, "ensemble")` with `Cycles`) has its number of members, its rate and its
restart from validation data of two seeds of digits, mnist, sentences, photos and trec: the lowest mean of few settings,
one default for all. Two trainings and one cycle alone take the same. Test scores of an earlier default on digits and
mnist were known by then; those of the present one replaced them.

Plain training, vi, mc_dropout, la and swag step by the task's optimizer, which for sentences is AdamW; sgld and ivon
step by SGD's rule. Where the two differ, plain training by SGD and an ensemble of it have rows of their own, and sgld
and ivon are compared with these; rows with a chosen setting are compared with plain training that has one. A column
compares every row with that strongest plain network too: the optimizer alone may change more than any posterior.

Differences are paired by seed, with standard errors, which for the photos take into account that splits of the same
photos are not independent; "lower in" counts seeds that differ, with a two-sided sign test (of five it cannot be below
0.06). The ECE is that of the top label in 15 bins, with the mean of the seeds' 95 % bootstrap intervals, to which noise
adds as it does to the ECE; the debiased one is without that. "Own errors" and "OOD" are AUROCs: telling wrong answers
by confidence, and unknown data by entropy or mutual information (MI). Shifted data is damaged at five levels. Training
and prediction are processor time over the plain network's, on one thread, memory is that of all tensors; samples are
{SAMPLES}. UCI regression has [a page of its own](regression.md).
"""

END = """## How to read it

Written by `python -m examples.evidence` from `docs/results/evidence`. One seed of one row is run anew by
`python -m examples.evidence --tasks digits --rows vi --seeds 0 --rerun`; the digits come with scikit-learn, the other
data is read from the folder that `BAYESIFY_DATA` names.

Splits of the photos are random, so the validation photos of one seed may be test photos of another; all other test data
is apart from everything that a setting was chosen on. On the digits the network is so small (7,500 weights) that the
time of a prediction is that of its bookkeeping. The standard errors are over seeds: other training data, another start,
another order, but (except for the photos) the same test data.

```{toctree}
:hidden:

Exactness <exactness>
Benchmarks <benchmarks>
Reproduction of a paper <reproduction>
The zoo <zoo>
Other libraries <comparison>
```
"""


def write():
    """Write the page and its pictures."""
    results = files.read_all()
    for name, rows in results.items():
        if BAR[0] in rows:
            pictures.draw(files.RESULTS / f"{name}.svg", table_of_task(name, rows), words)
    if tables := tables_of(results):
        summary.draw(files.RESULTS / summary.PICTURE, tables)
    PAGE.write_text(page(results))
