"""The table of docs/lora.md: means over seeds, and differences to LoRA with a temperature, paired by seed."""

import json
import math

from examples.sections import write_section

from ..tables import BAR, Table
from ..tasks import ROOT
from .rows import ROWS
from .tasks import TASKS

PAGE, MARK = ROOT / "docs/lora.md", "adapters"
WORDS = {
    "base": "no training",
    "plain": "LoRA",
    "vi": "vi",
    "ivon": "ivon",
    "sgld": "sgld",
    "la_last": "la, last layer",
    "la_adapters": "la, adapters",
    "existing": "LoRA, then a spread by `calibrate`",
    "existing_directions": "LoRA, then a spread s/d by direction",
    "one_budget": "ensemble for one training",
    "ensemble5": "ensemble of 5",
    "novelty": "LoRA and `fit_novelty`",
}
SINGLE = ("vi", "ivon", "sgld", "la_last", "la_adapters", "existing", "existing_directions")  # have one adapter


def read(results):
    """Return all results as tables: {task: Table}."""
    out = {}
    for path in sorted(results.glob("*/*.json")):
        row, _, seed = path.stem.rpartition("-")
        out.setdefault(path.parent.name, {}).setdefault(row, {})[int(seed)] = json.loads(path.read_text())
    return {name: Table(rows) for name, rows in out.items()}


def own(table, row):
    """Return a row's way to predict without a temperature."""
    return next(kind for kind in table.kinds(row) if kind != "temperature")


def known(table, row, kind, score):
    """Return the mean of a score over seeds; NaN where the row has none."""
    found = [result["predictions"][kind].get(score) for result in table.rows[row].values()]
    return math.nan if None in found else sum(found) / len(found)


def cell(value, digits=3, scale=1.0):
    return "" if math.isnan(value) else f"{scale * value:.{digits}f}"


def line(table, row):
    """Return a row of the table."""
    kind, tempered = own(table, row), "temperature" in table.kinds(row)
    last = "temperature" if tempered else kind
    against = ["", ""]
    if tempered and "plain" in table.rows:
        against = [table.paired((row, k), BAR, "nll").shown(3) for k in (kind, last)]
        against = [against[0], "0" if row == BAR[0] else against[1]]
    cells = [
        WORDS[row],
        cell(table.mean(row, kind, "nll")),
        cell(table.mean(row, last, "nll")) if tempered else "",
        *against,
        cell(table.mean(row, kind, "error"), 1, 100) + " %",
        cell(table.mean(row, kind, "error_half"), 1, 100) + " %",
        cell(table.mean(row, kind, "ece")),
        cell(table.mean(row, kind, "aurc")),
        *(cell(known(table, row, kind, f"ood_{score}")) for score in ("entropy", "mi", "novelty")),
        cell(table.top(row, "train_seconds"), 0),
        str(len(table.rows[row])),
    ]
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "NLL",
    "+ temperature",
    "NLL less LoRA + temperature's",
    "the same, + temperature",
    "error",
    "of the surer half",
    "ECE",
    "AURC",
    "OOD: entropy",
    "mutual information",
    "novelty",
    "seconds of training",
    "seeds",
)
HEAD = f"| | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}"


def better(tables):
    """Return what the table says in words, of NLL."""
    out = []
    for name, table in tables.items():
        if "plain" not in table.rows:
            continue
        bar = table.mean(*BAR, "nll")
        choices = TASKS[name].choices
        chance = bar > math.log(choices) - 0.05
        below, above = [], []
        for row in (*SINGLE, "one_budget", "ensemble5"):
            if row in table.rows:
                gains = {k: table.paired((row, k), BAR, "nll").mean for k in (own(table, row), "temperature")}
                without, with_ = gains.values()
                text = WORDS[row] + ("" if without <= 0 else " + temperature")
                (below if min(without, with_) <= 0 else above).append(text if min(without, with_) <= 0 else WORDS[row])
        out.append(
            f"- **{name}** ({TASKS[name].about}; chance is {math.log(choices):.3f}"
            + (", and these weights are at chance" if chance else "")
            + f"). Mean NLL at or below LoRA + temperature: {'; '.join(below) or 'none'}. "
            + f"Above it, with a temperature too: {'; '.join(above) or 'none'}."
        )
    return "\n".join(out)


def text(tables):
    """Return the part of the page."""
    tables = {name: tables[name] for name in TASKS if name in tables}
    parts = [better(tables)]
    for name, table in tables.items():
        parts.append(f"**{name}**\n\n{HEAD}\n" + "\n".join(line(table, row) for row in ROWS if row in table.rows))
    return "\n\n".join(parts)


def write(results):
    """Write the table into the page, if there are results."""
    if found := read(results):
        write_section(PAGE, MARK, text(found))
