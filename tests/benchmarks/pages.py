"""The benchmarks' page and the README's table, from the results alone."""

import json
from pathlib import Path

from examples.evidence import claims, summary
from examples.evidence.files import read_all
from examples.evidence.page import table_of_task
from examples.sections import with_section

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
SINE = RESULTS.with_name("sine.json")
VIT = "vit_b_32, batch 8"
GAINS = {  # by the evidence's row: what you have, the call, whose training it costs, and what it gives
    "la_last_kron": ("a trained classifier", "`fit_laplace`, last layer", "one pass over the data"),
    "vi": ("a training", '`"vi"`', "{step} times a plain step (ViT-B/32, CPU)"),
    "one_budget": ("a training", '`"ensemble"`', "nothing: several short trainings in place of one"),
    "mix5_la_last_kron": ("five trainings", "`mix`, each with its last layer", "five trainings"),
}
EXPLAINED = """NLL, the negative log-likelihood of test labels, counts errors and misplaced confidence; lower is better.
AUROC is the chance that an unfamiliar input outscores a familiar one. Means [over tasks](docs/evidence.md)."""
NOTES = {
    "peak memory": "Plain SGD with momentum holds three arrays of the weights' size: weights, gradients and momentum. "
    "VI holds eight: mean, rho, the prior's mean, theta until its backward pass, two gradients and two momenta. None "
    "is noise, which is made again where it is needed.",
}


def with_table(readme, results):
    """Return the README with its table of what each way brings and costs."""
    return with_section(readme, "gains", gains(results))


def split(results, group):
    """Return the rows of one group as {work: {what: numbers}}."""
    out = {}
    for key, numbers in results["rows"].items():
        row_group, work, what = key.split(" | ")
        if row_group == group:
            out.setdefault(work, {})[what] = numbers
    return out


def gains(results):
    """Return the README's table: what you have, what you call, what it costs and what it brought."""
    tables = {name: table_of_task(name, found) for name, found in read_all().items()}
    found, alarm = summary.gains(tables), summary.alarms()
    steps = split(results, "training step")[VIT]
    lines = [
        "| You have | You call | It costs | against plain training | temperature scaling on both |",
        "|---" * 5 + "|",
    ]
    for row, (have, call, cost) in GAINS.items():
        words = cost.format(step=f"{steps[row]['wall']:.2f}" if row in steps else "")
        alone, held_out = (over.shown for over in (against_plain(tables, row), found[row][1]))
        lines.append(f"| {have} | {call} | {words} | NLL {alone} | NLL {held_out} |")
    lines += [
        f"| any model | `fit_novelty` | one pass over the data | AUROC {alarm.mean:+.2f} over the network's entropy "
        f"({alarm.better} of {alarm.count}) | |",
        f"| a table of numbers | `BayesRegressor` | seconds | {error_bars()} | |",
    ]
    return "\n".join([*lines, "", EXPLAINED])


def against_plain(tables, row):
    """Return the NLL of a row's own prediction minus that of plain training without a temperature."""
    kind = "closed" if "la_last" in row else "samples"
    return summary.over(tables, (row, kind), claims.PLAIN)


def error_bars():
    """Return how the regressor's error bars grow away from the data, on the sine of docs/regression.md."""
    found = json.loads(SINE.read_text())["`BayesRegressor`"]
    wider = found["0.1, gap"] / max(found["-1.2, data"], found["1.2, data"])
    return f"[error bars](docs/regression.md) {wider:.0f} times wider in a gap of the data"


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
