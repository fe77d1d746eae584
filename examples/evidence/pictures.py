"""One picture per task: NLL against the cost of a prediction, and error against coverage."""

import statistics

from .scores import COVERAGES

CURVES = (
    ("plain", "mean"),
    ("ensemble5", "samples"),
    ("la_last_kron", "closed"),
    ("mix5_la_last_kron", "closed"),
    ("vi", "samples"),
    ("ivon", "samples"),
)
COLORS = ("#4d4d4d", "#b03a2e", "#1f4e79", "#7fa8d1", "#2e7d32", "#b8860b")
MARKS = {"mean": "o", "temperature": "s", "samples": "^", "calibrated": "v", "closed": "D"}


def draw(path, table, words):
    """Draw a task's picture.

    Args:
        path: Of the SVG.
        table: The task's results.
        words: From a row's name to what people read.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": path.stem, "font.size": 7, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        points(left, table, words)
        curves(right, table, words)
        figure.savefig(path, metadata={"Date": None})


def points(ax, table, words):
    """Draw the NLL of every row against what its prediction costs."""
    rows = [row for row in table.rows if not row.endswith("_tuned")]
    colors = dict(zip(rows, [f"C{i % 10}" for i in range(len(rows))], strict=True))
    found = [(row, kind) for row in rows for kind in table.kinds(row)]
    for row, kind in found:
        x, y = table.mean(row, kind, "cost"), table.mean(row, kind, "nll")
        ax.plot(x, y, MARKS[kind], color=colors[row], markersize=4, alpha=0.8)
    for row in rows:
        ax.plot([], [], "o", color=colors[row], markersize=3, label=words(row))
    for kind, mark in MARKS.items():
        ax.plot([], [], mark, color="0.5", markersize=3, label=kind)
    nlls = sorted(table.mean(row, kind, "nll") for row, kind in found)
    middle = statistics.median(nlls)
    ax.set_ylim(nlls[0] - 0.1 * (middle - nlls[0]) - 1e-3, min(nlls[-1], middle + 3 * (middle - nlls[0])) * 1.02)
    ax.set_xscale("log")
    ax.set_xlabel("processor time of a prediction over a plain one's")
    ax.set_ylabel("test NLL (far ones are cut off)")
    ax.legend(fontsize=5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.spines[["top", "right"]].set_visible(False)


def curves(ax, table, words):
    """Draw the error of the most confident answers, for some rows."""
    for way, color in zip(CURVES, COLORS, strict=True):
        if way[0] in table.rows:
            risks = zip(*table.values(*way, "risk"), strict=True)
            ax.plot(COVERAGES, [100 * statistics.mean(r) for r in risks], color=color, label=words(way[0]), linewidth=1)
    ax.set_xlabel("coverage: the most confident part that is answered")
    ax.set_ylabel("error % of it")
    ax.legend(fontsize=6, frameon=False, loc="upper left")
    ax.spines[["top", "right"]].set_visible(False)
