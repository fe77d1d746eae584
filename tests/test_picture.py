"""The picture that everybody draws first: error bars of a noisy sine, with a gap, that grow where there is no data."""

import json

import pytest
import torch

from bayesify import fit_laplace, predict
from examples import sine
from examples.sine import GRID, data, trained

TRUTHS = {"sine": sine.truth, "step": lambda x: torch.tanh(2 * x) + 0.1 * x}


def check(band, truth="sine"):
    """Return the epistemic std in the gap and at both ends over that on the data, and how much of the truth is held."""
    at, std = GRID[:, 0], band.epistemic[:, 0]
    on_data = std[((at > -2) & (at < -0.4)) | ((at > 0.6) & (at < 2))].mean()
    held = ((band.low <= TRUTHS[truth](GRID)) & (TRUTHS[truth](GRID) <= band.high)).double().mean()
    gap = std[(at > -0.4) & (at < 0.6)].max()
    return [float(v) for v in (gap / on_data, std[0] / on_data, std[-1] / on_data, held)]


@pytest.mark.parametrize("truth", TRUTHS)
def test_error_bars_of_laplace_grow_where_there_is_no_data(truth):
    found = {}
    for seed in range(5):
        x, y = data(seed, TRUTHS[truth])
        model = trained(x, y, seed)
        for name, include in (("all weights", None), ("last layer", "4.*")):
            fit_laplace(model, [(x, y)], structure="kron", likelihood="regression", include=include)
            found[name, seed] = check(sine.band(predict(model, GRID)), truth)
    for key, (gap, left, right, held) in found.items():
        assert gap >= 2 and left >= 3 and right >= 3 and held >= 0.95, (key, found)


def test_error_bars_of_five_plain_networks_grow_less():
    found = json.loads(sine.RESULTS.read_text())["five plain networks, `mix`"]
    on_data = (found["-1.2, data"] + found["1.2, data"]) / 2
    assert found["0.1, gap"] >= 1.5 * on_data and (found["-4"] + found["4"]) / 2 >= 2 * on_data


def test_error_bars_of_the_regressor_grow_where_there_is_no_data():
    pytest.importorskip("sklearn")
    for seed in range(5):
        x, y = data(seed)
        gap, left, right, held = check(sine.of_the_regressor(x, y, seed))
        assert gap >= 2 and left >= 3 and right >= 3 and held >= 0.95, seed
