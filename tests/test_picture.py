"""The picture that everybody draws first: error bars of a noisy sine, with a gap, that grow where there is no data."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, penalty, predict

GRID = torch.linspace(-4, 4, 161).unsqueeze(1)
TRUTHS = {"sine": lambda x: torch.sin(2 * x), "hump": lambda x: torch.exp(-(x**2)) + 0.3 * x}
NOISE = 0.1


def data(truth, seed):
    """Return 180 points in [-2, -0.4] and [0.6, 2]."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.rand(90, 1, generator=generator) * 1.6 - 2, torch.rand(90, 1, generator=generator) * 1.4 + 0.6
    x = torch.cat([left, right])
    return x, TRUTHS[truth](x) + NOISE * torch.randn(180, 1, generator=generator)


def trained(x, y, seed):
    """Train a network of method "la" for 300 epochs of Adam, everything at its defaults."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = bayesify(net, "la")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(300):
        for rows in torch.randperm(180).split(60):
            optimizer.zero_grad()
            (F.mse_loss(model(x[rows]), y[rows]) + penalty(model, num_data=180)).backward()
            optimizer.step()
    return model


def check(out, truth):
    """Return the epistemic std in the gap and at both ends over that on the data, and how much of the truth is held."""
    at, std = GRID[:, 0], out.epistemic[:, 0]
    on_data = std[((at > -2) & (at < -0.4)) | ((at > 0.6) & (at < 2))].mean()
    low, high = out.interval(0.95)
    held = ((low <= TRUTHS[truth](GRID)) & (TRUTHS[truth](GRID) <= high)).double().mean()
    gap = std[(at > -0.4) & (at < 0.6)].max()
    return [float(v) for v in (gap / on_data, std[0] / on_data, std[-1] / on_data, held)]


def test_error_bars_of_laplace_grow_where_there_is_no_data():
    found = {}
    for seed in range(5):
        x, y = data("sine", seed)
        model = trained(x, y, seed)
        for name, include in (("all weights", None), ("last layer", "4.*")):
            fit_laplace(model, [(x, y)], structure="kron", likelihood="regression", include=include)
            found[name, seed] = check(predict(model, GRID), "sine")
    for key, (gap, left, right, held) in found.items():
        assert gap >= 2 and left >= 3 and right >= 3 and held >= 0.95, (key, found)


def test_error_bars_of_a_smoother_function_grow_too():
    x, y = data("hump", 0)
    model = trained(x, y, 0)
    for include, least in ((None, 1.5), ("4.*", 2)):  # the gap is narrow for so smooth a function
        fit_laplace(model, [(x, y)], structure="kron", likelihood="regression", include=include)
        gap, left, right, held = check(predict(model, GRID), "hump")
        assert gap >= least and left >= 3 and right >= 3 and held >= 0.95


def test_error_bars_of_the_regressor_grow_where_there_is_no_data():
    sklearn = pytest.importorskip("bayesify.integrations.sklearn")
    x, y = data("sine", 0)
    model = sklearn.BayesRegressor(steps=800, random_state=0).fit(x.numpy(), y[:, 0].numpy())
    gap, left, right, _ = check(model.predictive(np.asarray(GRID)), "sine")
    assert gap >= 2 and left >= 3 and right >= 3
