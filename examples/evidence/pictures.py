"""One picture per task: NLL against the cost of a prediction, and error against coverage."""

import statistics

from .scores import COVERAGES

CURVES = (
    ("plain", "mean"),
    ("plain_sgd", "mean"),
    ("ensemble5", "samples"),
    ("la_last_kron", "closed"),
    ("mix5_la_last_kron", "closed"),
    ("vi", "samples"),
    ("ivon", "samples"),
)
COLORS = {  # told apart also where they are small
    "plain": "#4d4d4d",
    "plain_sgd": "#a6a6a6",
    "ensemble5": "#b03a2e",
    "ensemble5_sgd": "#e6a49c",
    "la_last_kron": "#1f4e79",
    "la_last_self": "#6a3d9a",
    "mix5_la_last_kron": "#7fa8d1",
    "vi": "#2e7d32",
    "mc_dropout": "#e377c2",
    "sgld": "#17becf",
    "la": "#ff7f0e",
    "ivon": "#b8860b",
    "ivon_point": "#8c564b",
    "swag": "#bcbd22",
    "one_budget": "#d62728",
    "two_budgets": "#ff9896",
    "one_cycle": "#9e9e9e",
}
MARKS = {
    "mean": "o",
    "temperature": "s",
    "tempered mean": "P",
    "samples": "^",
    "tempered samples": "X",
    "calibrated": "v",
    "closed": "D",
    "tempered closed": "d",
}
LEGEND = {"fontsize": 6, "title_fontsize": 6, "alignment": "left", "frameon": False}


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
        figure = Figure(figsize=(9.5, 4.2))
        figure.subplots_adjust(left=0.075, right=0.99, bottom=0.11, top=0.98, wspace=0.6)  # legends stand in between
        left, right = figure.subplots(1, 2)
        points(left, table, words)
        curves(right, table, words)
        figure.savefig(path, metadata={"Date": None})


def points(ax, table, words):
    """Draw the NLL of every row against what its prediction costs."""
    rows = [row for row in COLORS if row in table.rows]
    found = [(row, kind) for row in rows for kind in table.kinds(row)]
    for row, kind in found:
        x, y = table.mean(row, kind, "cost"), table.mean(row, kind, "nll")
        ax.plot(x, y, MARKS[kind], color=COLORS[row], markersize=4, alpha=0.8)
    names = [ax.plot([], [], "o", color=COLORS[r], markersize=4, label=words(r).replace("`", ""))[0] for r in rows]
    kinds = [ax.plot([], [], mark, color="0.4", markersize=4, label=kind)[0] for kind, mark in MARKS.items()]
    nlls = sorted(table.mean(row, kind, "nll") for row, kind in found)
    middle = statistics.median(nlls)
    ax.set_ylim(nlls[0] - 0.1 * (middle - nlls[0]) - 1e-3, min(nlls[-1], middle + 3 * (middle - nlls[0])) * 1.02)
    ax.set_xscale("log")
    ax.set_xlabel("processor time of a prediction over a plain one's")
    ax.set_ylabel("test NLL (far ones are cut off)")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.add_artist(ax.legend(handles=names, title="row", loc="upper left", bbox_to_anchor=(1.0, 1.0), **LEGEND))
    ax.legend(handles=kinds, title="prediction", loc="lower left", bbox_to_anchor=(1.0, 0.0), **LEGEND)
    ax.spines[["top", "right"]].set_visible(False)


def curves(ax, table, words):
    """Draw the error of the most confident answers, for some rows."""
    for way in CURVES:
        if way[0] in table.rows:
            color = COLORS[way[0]]
            risks = zip(*table.values(*way, "risk"), strict=True)
            ax.plot(COVERAGES, [100 * statistics.mean(r) for r in risks], color=color, label=words(way[0]), linewidth=1)
    ax.set_xlabel("coverage: the most confident part that is answered")
    ax.set_ylabel("error % of it")
    ax.legend(fontsize=6, frameon=False, loc="upper left")
    ax.spines[["top", "right"]].set_visible(False)
