"""What the page begins with: five points, one picture and one table of means over the tasks, from the results."""

import json
import math
import statistics
from typing import NamedTuple

from . import claims, files
from .pictures import COLORS
from .rows import WORDS
from .tables import BAR

NOVELTY = files.tasks.ROOT / "docs/results/novelty/test"
PICTURE = "overview.svg"
CLOSED, SAMPLES = ("closed", "tempered closed"), ("samples", "tempered samples")
WAYS = {  # by row: a way to predict with nothing held out, and one with a temperature or a prior from held-out data
    "la_last_self": (CLOSED[0], None),
    "la_last_kron": (None, CLOSED[1]),
    **dict.fromkeys(("vi", "ivon", "mc_dropout", "sgld", "swag", "la"), SAMPLES),
    "one_budget": ("samples", "temperature"),
    "two_budgets": ("samples", "temperature"),
    "ensemble5": ("samples", "temperature"),
    "mix5_la_last_kron": (None, "closed"),
}
ONE_MODEL = ("vi", "ivon", "mc_dropout", "sgld", "swag", "la")


class Over(NamedTuple):
    """A difference over the tasks: its mean, on how many it is better, of how many."""

    mean: float
    better: int
    count: int

    @property
    def shown(self):
        """The mean, and in brackets on how many tasks it is better."""
        return f"{self.mean:+.3f} ({self.better} of {self.count})" if self.count else ""


def over(tables, way, rival, score="nll", rival_score=None, *, higher=False):
    """Return a way's score minus its rival's over the tasks that have both."""
    has = [t for t in tables.values() if None not in way and t.has(way) and t.has(rival)]
    found = [t.against(way, rival, score, rival_score).mean for t in has]
    found = [v for v in found if not math.isnan(v)]
    better = sum(v > 0 if higher else v < 0 for v in found)
    return Over(statistics.mean(found) if found else math.nan, better, len(found))


def gains(tables):
    """Return {row: (nothing held out, held-out data, out of distribution)}, for the rows that were run."""
    out = {}
    for row, (alone, held_out) in WAYS.items():
        if any(row in table.rows for table in tables.values()):
            sampled = alone or CLOSED[0]
            out[row] = (
                over(tables, (row, alone), claims.PLAIN),
                over(tables, (row, held_out), BAR),
                over(tables, (row, sampled), claims.PLAIN, "ood_mi", "ood_entropy", higher=True),
            )
    return out


def alarms():
    """Return the AUROC of `fit_novelty` minus that of plain's entropy, over its tasks."""
    found = {}
    for path in NOVELTY.glob("*.json"):
        result = json.loads(path.read_text())
        found.setdefault(path.stem.rpartition("-")[0], []).append(result["auroc"] - result["entropy"])
    means = [statistics.mean(v) for v in found.values()]
    return Over(statistics.mean(means) if means else math.nan, sum(v > 0 for v in means), len(means))


def moved(difference):
    """Return what happens to an NLL, in words."""
    by = f"{abs(difference.mean):.3f}"
    way = "lowers" if difference.mean < 0 else "raises"
    change = "leaves the NLL as it is" if float(by) == 0 else f"{way} the NLL by {by}"
    return f"{change} (better on {difference.better} of {difference.count} tasks)"


def sentences(tables):
    """Return five points: what to expect of a trained model, a training, an ensemble and an alarm, and what fails."""
    found = gains(tables)
    lines = ["All numbers are means over the tasks, at the defaults.", ""]
    if "la_last_kron" in found:
        lines.append(
            "1. **A trained model**: a Laplace posterior of the last layer "
            f"{moved(over(tables, claims.RECOMMENDED, claims.PLAIN))}; against temperature scaling with the same "
            f"held-out data, and a temperature on both, it {moved(found['la_last_kron'][1])}."
        )
    if rows := [row for row in ONE_MODEL if row in found]:
        by = [sorted(rows, key=lambda row, i=i: found[row][i].mean) for i in (0, 1)]
        best, worst = zip(*((row[0], row[-1]) for row in by), strict=True)
        lines.append(
            f"2. **One training**: of six methods, {words(best[0])} {moved(found[best[0]][0])} with nothing held out, "
            f"and {words(worst[0])} {moved(found[worst[0]][0])}; with a temperature on both sides {words(best[1])} "
            f"{moved(found[best[1]][1])}, and {words(worst[1])} {moved(found[worst[1]][1])}."
        )
    if several := [row for row in ("ensemble5", "mix5_la_last_kron", "two_budgets", "one_budget") if row in found]:
        cells = "; ".join(f"{WORDS[row]} {moved(found[row][1])}" for row in several)
        lines.append(f"3. **Several models**, against one network with temperature scaling: {cells}.")
    alarm, spreads = alarms(), {row: cells[2] for row, cells in found.items() if cells[2].count}
    if spreads:
        top = max(spreads, key=lambda row: spreads[row].mean)
        lines.append(
            "4. **Unfamiliar inputs**: beside the entropy of the plain network, the AUROC of `fit_novelty` is "
            f"{alarm.shown} ([tasks of its own](abstaining.md)); that of mutual information is {spreads[top].shown} at "
            f"best, for {words(top)}."
        )
    lines.append(f"5. **What does not hold**: {claims.idle(tables)} {claims.averaged(tables)}")
    return [*lines, "", f"![What each row gains, against what it costs](results/evidence/{PICTURE})", "", *table(found)]


def words(row):
    return WORDS.get(row, f"`{row}`")


def table(found):
    """Return the table of what a user gains."""
    lines = [
        "## What you gain",
        "",
        "Differences from a plain network that was trained with the same optimizer, and in brackets on how many tasks "
        "a row is better: the NLL with nothing held out; the NLL where held-out data gives both a temperature (or the "
        "last layer its prior); the AUROC of mutual information on out-of-distribution data, against the plain "
        "network's entropy.",
        "",
        "| | NLL, nothing held out | NLL, held-out data | OOD AUROC |",
        "|---|---|---|---|",
    ]
    lines += [f"| {words(row)} | " + " | ".join(cell.shown for cell in cells) + " |" for row, cells in found.items()]
    if alarms().count:
        lines.append(f"| `fit_novelty`, any model | | | {alarms().shown} |")
    return [*lines, ""]


def draw(path, tables):
    """Draw what each row gains against what it costs: NLL over training, and AUROC over prediction."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = gains(tables)
    with rc_context({"svg.hashsalt": path.stem, "font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.2, 3.6))
        figure.subplots_adjust(left=0.09, right=0.7, bottom=0.13, top=0.97, wspace=0.32)
        left, right = figure.subplots(1, 2)
        for row, (_, nll, ood) in found.items():
            have = [t for t in tables.values() if row in t.rows]
            kind = WAYS[row][0] or CLOSED[0]
            training = statistics.median(t.over_plain(row, "train_seconds") for t in have)
            passes = statistics.median(t.mean(row, kind, "cost") for t in have)
            whole = len(have) == len(tables)
            label = WORDS.get(row, row).replace("`", "") + ("" if whole else f" ({len(have)} of {len(tables)} tasks)")
            style = {"color": COLORS[row], "markersize": 6, "fillstyle": "full" if whole else "none"}
            left.plot([], [], "o", label=label, **style)
            if nll.count:
                left.plot(training, nll.mean, "o", **style)
            if ood.count:
                right.plot(passes, ood.mean, "o", **style)
        for ax, words_x, words_y in (
            (left, "training, in plain trainings", "NLL minus plain + temperature (lower is better)"),
            (right, "prediction, in plain passes", "OOD AUROC minus plain's entropy (higher is better)"),
        ):
            ax.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            ax.set_xscale("log")
            ax.set_xticks([1, 2, 5, 10, 20] if ax is right else [1, 2, 5])
            ax.minorticks_off()
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_xlabel(words_x)
            ax.set_ylabel(words_y)
            ax.spines[["top", "right"]].set_visible(False)
        if left.get_legend_handles_labels()[0]:
            figure.legend(loc="center left", bbox_to_anchor=(0.71, 0.5), frameon=False, fontsize=7, handletextpad=0.2)
        figure.savefig(path, metadata={"Date": None})
