"""The benchmarks' page and the README's table, from the results alone."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"


def with_table(readme, results):
    """Return the README with its table of training steps."""
    marks = r"(<!-- benchmark -->\n).*?(<!-- /benchmark -->)"
    return re.sub(marks, lambda m: m[1] + training(results) + m[2], readme, flags=re.DOTALL)


def split(results, group):
    """Return the rows of one group as {work: {what: numbers}}."""
    out = {}
    for key, numbers in results["rows"].items():
        row_group, work, what = key.split(" | ")
        if row_group == group:
            out.setdefault(work, {})[what] = numbers
    return out


def training(results):
    """Return the README's part: the training step of each method over plain SGD."""
    steps, memory = split(results, "training step"), split(results, "peak memory")
    works = list(steps)
    methods = list(dict.fromkeys(m for row in steps.values() for m in row))
    lines = [
        "One training step over a step of plain SGD with momentum, same model and batch, measured side by side "
        f"(best of several; {results['machine']}; {results['date']}):",
        "",
        "| | " + " | ".join(works) + " |",
        "|---" * (len(works) + 1) + "|",
    ]
    for method in methods:
        cells = [f"{steps[w][method]['wall']:.2f}" if method in steps[w] else "" for w in works]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    evaluation = split(results, "evaluation over a plain pass")
    if evaluation:
        cells = [f"{evaluation[w]['eval']['wall']:.2f}" if w in evaluation else "" for w in works]
        lines.append("| evaluation at the posterior mean, over a plain pass | " + " | ".join(cells) + " |")
    if memory:
        cells = [", ".join(f"{k} {v['gigabytes']:.1f}" for k, v in memory.get(w, {}).items()) for w in works]
        lines.append("| peak memory, GB | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n[docs/benchmarks.md](docs/benchmarks.md) has the rest.\n"


def page(results):
    """Return the whole page."""
    lines = [
        "# Benchmarks",
        "",
        f"{results['machine']}, {results['date']}. Ratios are of the best of several runs taken in turn, on the "
        "clock (wall) and of all cores (cpu). Rows are replaced when they are measured again, so they may be of "
        "different runs; the machine is shared, and a small model's ratios vary by a fifth. `make bench` measures the "
        "small models, `make bench-full` all.",
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
        lines.append("")
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
