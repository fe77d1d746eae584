"""Error bars of a noisy sine with a gap, by six methods at their defaults: the picture and table of docs/regression.md.

python examples/sine.py    # under a minute; needs Matplotlib and scikit-learn
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, metrics, mix, penalty, predict

if __package__:
    from .sections import write_section
else:
    from sections import write_section

ROOT = Path(__file__).parents[1]
PICTURE, RESULTS, PAGE = (
    ROOT / "docs/images/regression.svg",
    ROOT / "docs/results/sine.json",
    ROOT / "docs/regression.md",
)
GRID = torch.linspace(-4, 4, 161).unsqueeze(1)
NOISE = 0.1
PLACES = {"-4": -4.0, "-1.2, data": -1.2, "0.1, gap": 0.1, "1.2, data": 1.2, "4": 4.0}


class Band(NamedTuple):
    """What a method says on the grid: a mean, its epistemic standard deviation, and a 95 % interval."""

    mean: Tensor
    epistemic: Tensor
    low: Tensor
    high: Tensor


def truth(x):
    return torch.sin(2 * x)


def band(out, center=0.0, scale=1.0):
    """Return the band of a prediction of (target - center)/scale."""
    low, high = out.interval(0.95)
    return Band(center + scale * out.mean, scale * out.epistemic, center + scale * low, center + scale * high)


def data(seed, truth=truth):
    """Return 180 noisy points in [-2, -0.4] and [0.6, 2]."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.rand(90, 1, generator=generator) * 1.6 - 2, torch.rand(90, 1, generator=generator) * 1.4 + 0.6
    x = torch.cat([left, right])
    return x, truth(x) + NOISE * torch.randn(180, 1, generator=generator)


def trained(x, y, seed, method="la"):
    """Train a network for 300 epochs of Adam on the squared error, with everything else at its defaults."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = bayesify(net, method)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        for rows in torch.randperm(180).split(60):
            optimizer.zero_grad()
            (F.mse_loss(model(x[rows]), y[rows]) + penalty(model, num_data=180)).backward()
            optimizer.step()
    return model


def with_noise(model, held):
    """Return the band of a method that has no noise of its own: that of held-out points is fitted."""
    x, y = held
    found = predict(model, x, seed=0, task="regression")
    noise = metrics.fit_noise(found.outputs, y)
    return band(predict(model, GRID, seed=0, task="regression").with_noise(noise))


def fitted(x, y, include):
    """Return the band of a Laplace approximation, which finds the noise by itself."""
    model = trained(x, y, 0)
    fit_laplace(model, [(x, y)], structure="kron", likelihood="regression", include=include)
    return band(predict(model, GRID))


def of_the_regressor(x, y, seed):
    """Return the band of scikit-learn's way, which standardizes the targets."""
    from bayesify.integrations.sklearn import BayesRegressor

    regressor = BayesRegressor(random_state=seed).fit(x.numpy(), y[:, 0].numpy())
    return band(regressor.predictive(GRID.numpy()), float(y.mean()), float(y.std(correction=0)))


def predictions(x, y, held):
    """Yield the name of each method and its band."""
    yield '"vi"', with_noise(trained(x, y, 0, "vi"), held)
    yield '"mc_dropout"', with_noise(trained(x, y, 0, "mc_dropout"), held)
    yield "five plain networks, `mix`", with_noise(mix(trained(x, y, seed, "vanilla") for seed in range(5)), held)
    yield '"la", last layer', fitted(x, y, "4.*")
    yield '"la", all weights', fitted(x, y, None)
    yield "`BayesRegressor`", of_the_regressor(x, y, 0)


def scores(found):
    """Return the epistemic standard deviation at some places, and the share of the grid whose truth the band holds."""
    held = ((found.low <= truth(GRID)) & (truth(GRID) <= found.high)).double().mean()
    at = {name: float(found.epistemic[(GRID[:, 0] - x).abs().argmin(), 0]) for name, x in PLACES.items()}
    return {name: round(value, 3) for name, value in {**at, "holds the truth": float(held)}.items()}


def draw(found, x, y):
    """Draw all predictions side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "bayesify"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 5.4), sharex=True, sharey=True, layout="constrained")
    for ax, (name, out) in zip(axes.flat, found.items(), strict=True):
        ax.fill_between(
            GRID[:, 0], out.low[:, 0], out.high[:, 0], color="tab:blue", alpha=0.25, linewidth=0, label="95 % band"
        )
        ax.plot(GRID[:, 0], out.mean[:, 0], color="tab:blue", label="mean")
        ax.plot(GRID[:, 0], truth(GRID)[:, 0], color="black", linestyle=":", label="truth")
        ax.scatter(x[:, 0], y[:, 0], s=4, color="tab:orange", label="data")
        ax.set(title=name.replace("`", ""), ylim=(-3, 3), xlim=(-4, 4))
    axes[0, 0].legend(loc="upper left", fontsize=8, ncols=2)
    figure.savefig(PICTURE, metadata={"Date": None})


def table(results):
    """Return the table of the page."""
    columns = next(iter(results.values()))
    lines = ["| x = | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, row in results.items():
        cells = [f"{v:.0%}" if c == "holds the truth" else f"{v:.2f}" for c, v in row.items()]
        lines.append(f"| {f'`{name}`' if name[0] == chr(34) and name[-1] == chr(34) else name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    (x, y), held = data(0), data(1)
    found = dict(predictions(x, y, held))
    results = {name: scores(out) for name, out in found.items()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    draw(found, x, y)
    write_section(PAGE, "sine", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
