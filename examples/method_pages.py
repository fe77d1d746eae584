"""The part of each method's page that says what it costs and what it brought, from the result files alone.

    python examples/method_pages.py

The results are those of `python -m examples.evidence` and `make bench`.
"""

import json
import math

from evidence import claims, files
from evidence.page import tables_of
from evidence.rows import WORDS
from evidence.tables import BAR
from sections import write_section

PAGES = files.tasks.ROOT / "docs/methods"
BENCHMARKS = files.tasks.ROOT / "docs/results/benchmarks.json"
MODELS = {"mlp, batch 128": "an MLP", "vit_b_32, batch 8": "ViT-B/32", "resnet50, batch 8": "ResNet-50"}
SAMPLED = ("samples", "tempered samples")
WAYS = {  # by page: the rows that it shows, each with its way to predict as it is and with a temperature
    "vi": {"vi": SAMPLED},
    "ivon": {"ivon": SAMPLED},
    "mc_dropout": {"mc_dropout": SAMPLED},
    "sgld": {"sgld": SAMPLED},
    "swag": {"swag": SAMPLED},
    "laplace": {"la_last_kron": ("closed", "tempered closed"), "la": SAMPLED},
    "ensemble": {
        "one_budget": ("samples", "temperature"),
        "two_budgets": ("samples", "temperature"),
        "one_cycle": ("mean", "temperature"),
    },
    "vanilla": {"plain": ("mean", "temperature"), "ensemble5": ("samples", "temperature")},
}
BENCHMARKED = {"laplace": "la"}
HEAD = (
    "| row | task | NLL - plain | NLL - plain, both tempered | OOD AUROC | plain's | training | prediction | memory |"
)
NOTE = """- *NLL - plain*: test NLL minus that of plain training; *both tempered*: each with a temperature from held-out
  data. Below zero is better; the standard error is over seeds.
- *OOD AUROC*: how well mutual information (the entropy, for one model) ranks unfamiliar inputs above familiar ones;
  *plain's* is that of the plain network's entropy. 0.5 is chance.
- *training*, *prediction* and *memory* are multiples of the plain network's, in processor time and bytes.

All rows and how they were measured: [Evidence](../evidence.md)."""


def section(name, tables):
    """Return the part of a method's page.

    Args:
        name: Of the page.
        tables: The evidence's tables by task.
    """
    lines = [HEAD, "|---" * 9 + "|"]
    for row, kinds in WAYS[name].items():
        lines += [line(row, kinds, task, table) for task, table in tables.items() if row in table.rows]
    return "\n".join([*step(BENCHMARKED.get(name, name)), *lines, "", NOTE])


def step(row):
    """Return what a training step costs, where that was measured."""
    measured = json.loads(BENCHMARKS.read_text())["rows"]
    found = {words: measured.get(f"training step | {model} | {row}") for model, words in MODELS.items()}
    if not all(found.values()):
        return []
    costs = [f"{numbers['wall']:.2f} for {words}" for words, numbers in found.items()]
    return [
        "A training step takes this many times one of plain SGD with momentum: "
        f"{', '.join(costs)} ([Benchmarks](../benchmarks.md)).",
        "",
    ]


def line(row, kinds, task, table):
    """Return the line of one row on one task."""
    as_is, tempered = kinds
    ood = "ood_entropy" if math.isnan(table.mean(row, as_is, "ood_mi")) else "ood_mi"
    cells = [
        WORDS.get(row, row),
        task,
        apart(table, (row, as_is), claims.PLAIN),
        apart(table, (row, tempered), BAR),
        f"{table.mean(row, as_is, ood):.3f}",
        f"{table.mean(*claims.PLAIN, 'ood_entropy'):.3f}",
        f"{table.over_plain(row, 'train_seconds'):.1f}",
        f"{table.mean(row, as_is, 'cost'):.1f}",
        f"{table.over_plain(row, 'bytes'):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def apart(table, way, rival):
    """Return the difference from a baseline; nothing where they are the same or nothing was measured."""
    if way == rival or not table.has(way):
        return ""
    found = table.against(way, rival)
    return "" if math.isnan(found.mean) else found.shown()


if __name__ == "__main__":
    found = tables_of(files.read_all())
    for page in WAYS:
        write_section(PAGES / f"{page}.md", page, section(page, found))
