"""Means over seeds, and differences paired by seed."""

import math
import statistics
from typing import NamedTuple

BAR = ("plain", "temperature")  # what everything is compared with
BASES = ("plain", "ensemble5")  # which have rows by SGD where a task's optimizer is another
BY_SGD = ("sgld", "ivon", "ivon_point", "ensemble5_sgd")  # step by SGD's rule, whatever the task's optimizer is


class Apart(NamedTuple):
    """A difference over seeds: its mean and standard error, in how many seeds it is below zero, and of how many.

    Seeds where there is no difference at all are not counted: the sign test has nothing to learn from them.
    """

    mean: float
    error: float
    lower: int
    count: int

    @property
    def or_none(self):
        """The standard error, 0 where one seed has none."""
        return 0.0 if math.isnan(self.error) else self.error

    def shown(self, digits=4):
        """The mean with its standard error, which one seed does not have."""
        error = "(one seed)" if math.isnan(self.error) else f"± {self.error:.{digits}f}"
        return f"{self.mean:+.{digits}f} {error}"

    @property
    def sign_test(self):
        """The probability of a count at least as far from half, if both signs were equally likely."""
        far = abs(self.lower - self.count / 2)
        hits = sum(math.comb(self.count, k) for k in range(self.count + 1) if abs(k - self.count / 2) >= far)
        return hits / 2**self.count


def apart_of(found, overlap=0.0):
    """Return what differences of seeds or splits say; their mean has the variance s^2 (1/n + overlap).

    Args:
        found: The differences.
        overlap: Test items over training items, where all split the same data anew: they are then not independent
            (Nadeau and Bengio, 2003).
    """
    if not found:
        return Apart(math.nan, math.nan, 0, 0)
    spread = math.sqrt(1 / len(found) + overlap)
    error = statistics.stdev(found) * spread if len(found) > 1 else math.nan
    return Apart(statistics.mean(found), error, sum(v < 0 for v in found), sum(v != 0 for v in found))


class Table:
    """The results of one task.

    Args:
        rows: {row: {seed: result}}.
        overlap: As in `apart_of`.
    """

    def __init__(self, rows, overlap=0.0):
        self.rows, self.overlap = rows, overlap

    def kinds(self, row):
        """Return a row's ways to predict that all of its seeds have."""
        first, *others = (result["predictions"] for result in self.rows[row].values())
        return [kind for kind in first if all(kind in other for other in others)]

    def has(self, way):
        """Return whether there is such a row, and such a way to predict."""
        return way[0] in self.rows and way[1] in self.kinds(way[0])

    def values(self, row, kind, score):
        """Return a score of all seeds that have it."""
        found = [result["predictions"][kind][score] for result in self.rows[row].values()]
        return [value for value in found if value is not None]

    def mean(self, row, kind, score):
        """Return the mean over seeds."""
        values = self.values(row, kind, score)
        return statistics.mean(values) if values else math.nan

    def top(self, row, name):
        """Return the mean over seeds of what a row has once."""
        return statistics.mean(result[name] for result in self.rows[row].values())

    def note(self, row, name):
        """Return the mean over seeds of a note."""
        return statistics.mean(result["notes"][name] for result in self.rows[row].values())

    def rival(self, row, way):
        """Return a baseline as fair as the row: with a chosen setting if it has one, and by the same optimizer."""
        if way[0] == "plain" and row.endswith("_tuned"):
            return "plain_tuned", way[1]
        return (f"{way[0]}_sgd", way[1]) if row in BY_SGD and way[0] in BASES and "plain_sgd" in self.rows else way

    def against(self, way, other=BAR, score="nll", other_score=None):
        """Return a (row, kind)'s score minus that of its rival, paired by seed."""
        return self.paired(way, self.rival(way[0], other), score, other_score)

    def over_plain(self, row, name):
        """Return the mean of the ratios to plain training, paired by seed."""
        plain = self.rows[BAR[0]]
        seeds = [s for s in self.rows[row] if s in plain]
        return statistics.mean(self.rows[row][s][name] / plain[s][name] for s in seeds) if seeds else math.nan

    def paired(self, one, other, score, other_score=None):
        """Return one (row, kind)'s score minus another's, paired by seed."""
        found = []
        for seed, result in self.rows[one[0]].items():
            beside = self.rows.get(other[0], {}).get(seed)
            if beside is not None:
                a, b = result["predictions"][one[1]][score], beside["predictions"][other[1]][other_score or score]
                found += [] if a is None or b is None else [a - b]
        return apart_of(found, self.overlap)
