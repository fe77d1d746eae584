"""The cost of a draw and of the penalty, from 1e5 to 3e8 parameters: it must grow in proportion."""

from pathlib import Path

import torch
from torch import nn

from bayesify import bayesify, penalty, sample
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import NUM_DATA

PICTURE = Path(__file__).parents[2] / "docs" / "results" / "scaling.svg"
SIDE = 1000


class Layers(nn.Module):
    """Square matrices with about `count` elements in all."""

    def __init__(self, count):
        super().__init__()
        side = min(SIDE, int(count**0.5))
        self.weights = nn.ParameterList(torch.zeros(side, side) for _ in range(max(1, count // side**2)))

    def forward(self):
        return sum(w[0, 0] for w in self.weights)


def test_cost_grows_in_proportion(table, benchmark, request):
    sizes = [10**5, 10**6, 10**7] + ([10**8, 3 * 10**8] if request.config.getoption("--full") else [])
    points = {"draw": [], "penalty": []}
    for size in sizes:
        model = bayesify(Layers(size), "vi", prior_sig=0.1)
        count = sum(w.numel() for w in model.weights)

        def draw(model=model):
            with sample(model), torch.no_grad():
                model()

        def prior(model=model):
            with torch.no_grad():
                penalty(model, NUM_DATA)

        for what, time in interleave({"draw": draw, "penalty": prior}, 3 if size > 10**7 else 10).items():
            points[what].append((count, time.wall))
            table.add(
                "scaling, nanoseconds per parameter", f"{count:.0e} parameters", what, wall=1e9 * time.wall / count
            )
    plot(points)
    for what, found in points.items():
        slow, fast = found[-1], found[1]
        assert slow[1] / fast[1] < 3 * slow[0] / fast[0], f"{what} grows faster than the model"
    benchmark.pedantic(lambda: None, rounds=1)


def plot(points):
    """Draw seconds over parameters on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for (what, found), marker in zip(points.items(), "os", strict=True):
        axes.loglog(*zip(*found, strict=True), marker=marker, label=what)
    axes.set(xlabel="parameters", ylabel="seconds", title="Cost of a posterior sample and of the penalty")
    axes.grid(alpha=0.3)
    axes.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
