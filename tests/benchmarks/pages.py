"""The benchmarks' page and the README's table, from the results alone."""

import json
import statistics
from pathlib import Path

from examples.evidence.files import read_all
from examples.evidence.page import table_of_task
from examples.sections import with_section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
COSTS = {"mlp, batch 128": "MLP", "vit_b_32, batch 8": "ViT-B/32", "resnet50, batch 8": "ResNet-50"}
METHODS = {  # by the evidence's row: what a weight is, and how the method is used
    "la_last_kron": ("Gaussian by the curvature, in the last layer", "the three lines; one pass at prediction"),
    "mix5_la_last_kron": ("of one of five models", "`mix(models)` of five such, trained apart"),
    "vi": ("`m + eps * s`, both trained", "the default of a training"),
    "ivon": ("`m + eps * s`, `s` by the optimizer", "`IVON(model, lr, num_data=N)` is the optimizer"),
    "mc_dropout": ("trained, or with probability p the prior mean", 'as `"vi"`'),
    "sgld": ("Gaussian of a Langevin chain", "`SGLD(model, lr, num_data=N)` is the optimizer"),
    "swag": ("Gaussian of the optimizer's iterates", '`bayesify(model, "swag")`, any optimizer, `Cycles`'),
    "la": ("Gaussian by the curvature", "`fit_laplace(model, loader)` after training"),
    "vanilla": ("the trained value", "the baseline, and members of `mix`"),
}
NAMES = {"la_last_kron": '`"la"`, last layer', "mix5_la_last_kron": "five of them"}
NOTES = {
    "peak memory": "Plain SGD with momentum holds three arrays of the weights' size: weights, gradients and momentum. "
    "VI holds eight: mean, rho, the prior's mean, theta until its backward pass, two gradients and two momenta. None "
    "is noise, which is made again where it is needed.",
}
QUALITY = {  # a column: what it is minus, and the ways to predict that may be compared with it
    "NLL": (("plain", "mean"), ("samples",)),
    "NLL, held-out data": (("plain", "temperature"), ("closed", "tempered closed", "tempered samples")),
}


def with_table(readme, results, found=None):
    """Return the README with its table of methods; with the quality that the evidence found, unless told otherwise."""
    return with_section(readme, "methods", methods(results, evidence() if found is None else found))


def split(results, group):
    """Return the rows of one group as {work: {what: numbers}}."""
    out = {}
    for key, numbers in results["rows"].items():
        row_group, work, what = key.split(" | ")
        if row_group == group:
            out.setdefault(work, {})[what] = numbers
    return out


def methods(results, found):
    """Return the README's table: what each method is, what a training step costs and what it brought."""
    steps = split(results, "training step")
    works = [work for work in COSTS if work in steps]
    columns = [*(f"step, {COSTS[work]}" for work in works), *found]
    lines = ["| method | a weight is | use | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for row, (words, use) in METHODS.items():
        cells = [f"{steps[w][row]['wall']:.2f}" if row in steps[w] else "" for w in works]
        cells += [f"{by_row[row]:+.3f}" if row in by_row else "" for by_row in found.values()]
        lines.append(
            f"| {NAMES.get(row, f'`{row!r}`'.replace(chr(39), chr(34)))} | {words} | {use} | "
            + " | ".join(cells)
            + " |"
        )
    cost = f"A step is over one of plain SGD with momentum, side by side ({results['machine']}; {results['date']})."
    if not found:
        return "\n".join([*lines, "", cost, ""])
    quality = (
        "NLL is that of test data at the defaults minus that of plain training; with held-out data for a temperature "
        "(or for the last layer's prior), minus that of plain training with a temperature: below zero is better "
        f"(the mean of {', '.join(sorted(read_all()))}: [evidence](docs/evidence.md))."
    )
    return "\n".join([*lines, "", f"{cost} {quality}", ""])


def evidence():
    """Return {column: {row: the NLL minus that of plain training, the mean of all seeds and tasks}}."""
    tables, out = [table_of_task(*item) for item in read_all().items()], {}
    for column, (plain, kinds) in QUALITY.items():
        for way in ((row, kind) for row in METHODS for kind in kinds):
            if all(table.has(way) for table in tables):
                apart = [table.against(way, plain).mean for table in tables]
                out.setdefault(column, {})[way[0]] = statistics.mean(apart)
    return out


def page(results):
    """Return the whole page."""
    lines = [
        "# Benchmarks",
        "",
        f"{results['machine']}, {results['date']}. Ratios are of the best of several runs taken in turn, on the "
        "clock (wall) and of all cores (cpu). `make bench-full` measures all of it in one run, `make bench` the small "
        "models alone, whose rows it replaces. Training steps are at a method's defaults unless it says otherwise. The "
        "machine is shared, and a small model's ratios vary by a fifth.",
        "",
        "[Launches, bytes and waits on a GPU](benchmarks_gpu.md) have a page of their own.",
        "",
        "```{toctree}",
        ":hidden:",
        "",
        "benchmarks_gpu",
        "```",
        "",
    ]
    groups = dict.fromkeys(key.split(" | ")[0] for key in results["rows"])
    for group in groups:
        lines += [f"## {group.capitalize()}", ""]
        rows = split(results, group)
        columns = list(dict.fromkeys(c for row in rows.values() for numbers in row.values() for c in numbers))
        lines += ["| model | what | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
        for work, row in rows.items():
            for what, numbers in row.items():
                cells = [f"{numbers[c]:g}" if c in numbers else "" for c in columns]
                lines.append(f"| {work} | {what} | " + " | ".join(cells) + " |")
        lines += ["", *([NOTES[group], ""] if group in NOTES else [])]
    picture = RESULTS.with_name("scaling.svg")
    if picture.exists():
        lines += ["![Seconds of a draw and of the penalty over the number of parameters](results/scaling.svg)", ""]
    return "\n".join([*lines, *peers()])


def peers():
    """Return the lines about other libraries, which `make bench-peers` measures."""
    path = RESULTS.with_name("peers.json")
    if not path.exists():
        return []
    lines = [
        "## Other libraries",
        "",
        "Measured beside bayesify in one run by `make bench-peers`; ratios on the clock.",
        "",
    ]
    lines += ["| what | library | ratio |", "|---|---|---|"]
    for group, rows in json.loads(path.read_text()).items():
        for library, found in rows.items():
            lines.append(
                f"| {group} | {library} | {found if isinstance(found, str) else format(found['wall'], '.2f')} |"
            )
    return [*lines, ""]


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), json.loads(RESULTS.read_text())))
