"""R-hat and effective sample sizes, against brute force and chains whose answer is known."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from bayesify import diagnostics


def chains(count, draws, phi, seed=0):
    """Return stationary AR(1) chains with unit variance."""
    noise = torch.randn(count, draws, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = [noise[:, 0]]
    for t in range(1, draws):
        x.append(phi * x[-1] + math.sqrt(1 - phi**2) * noise[:, t])
    return torch.stack(x, 1)


def halves_of(x):
    n = x.shape[1] // 2
    return np.concatenate([x[:, :n], x[:, -n:]])


def scores(halves):
    """Return the normal scores of the ranks."""
    ranks = stats.rankdata(halves, method="average").reshape(halves.shape)
    return stats.norm.ppf((ranks - 3 / 8) / (halves.size + 1 / 4))


def brute_force(halves):
    """Return R-hat and ESS of one quantity, sum by sum."""
    n = halves.shape[1]
    within = np.mean([sum((v - h.mean()) ** 2 for v in h) / (n - 1) for h in halves])
    means = [h.mean() for h in halves]
    between = sum((m - np.mean(means)) ** 2 for m in means) / (len(means) - 1)
    total = (n - 1) / n * within + between

    def rho(t):
        each = [sum((h[i] - h.mean()) * (h[i + t] - h.mean()) for i in range(n - t)) / n for h in halves]
        return 1 - (within - np.mean(each)) / total

    tau, least = -1.0, math.inf
    for k in range(n // 2):
        pair = (1 if k == 0 else rho(2 * k)) + rho(2 * k + 1)
        if pair <= 0:
            break
        least = min(least, pair)
        tau += 2 * least
    size = len(halves) * n
    return math.sqrt(total / within), size / max(tau, 1 / math.log10(size))


@pytest.mark.parametrize(("count", "draws", "phi"), [(3, 40, 0.7), (1, 31, 0.0), (2, 30, -0.5), (4, 25, 0.95)])
def test_both_are_the_sums_that_their_formulas_say(count, draws, phi):
    x = chains(count, draws, phi)
    expected = brute_force(halves_of(x.numpy()))
    torch.testing.assert_close(float(diagnostics._ratio(diagnostics._halves(x))), expected[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(float(diagnostics._size(diagnostics._halves(x))), expected[1], rtol=1e-9, atol=0)


@pytest.mark.parametrize(("count", "draws", "phi"), [(3, 40, 0.7), (1, 31, 0.0), (4, 25, 0.95)])
def test_ranks_folding_and_tails_are_as_in_vehtari_et_al(count, draws, phi):
    x = chains(count, draws, phi)
    x = (x**3).round(decimals=1)  # heavy tails, and ties
    halves = halves_of(x.numpy())
    folded = np.abs(halves - np.median(halves))
    bulk, spread = brute_force(scores(halves)), brute_force(scores(folded))
    tails = [brute_force(halves_of(x.numpy() <= np.quantile(x.numpy(), q)).astype(float))[1] for q in (0.05, 0.95)]
    assert float(diagnostics.rhat(x)) == pytest.approx(max(bulk[0], spread[0]), rel=1e-9)
    assert float(diagnostics.ess(x)) == pytest.approx(bulk[1], rel=1e-9)
    assert float(diagnostics.ess(x, kind="tail")) == pytest.approx(min(tails), rel=1e-9)


def test_chains_of_other_scales_or_heavy_tails_are_noticed():
    scales = chains(4, 1000, 0.0) * torch.tensor([1.0, 1.0, 1.0, 10.0]).view(4, 1)
    cauchy = stats.cauchy.rvs(size=(4, 1000), random_state=0) + np.array([[0.0], [0.0], [0.0], [3.0]])
    for x in (scales, torch.from_numpy(cauchy)):
        assert float(diagnostics._ratio(diagnostics._halves(x))) < 1.01
        assert float(diagnostics.rhat(x)) > 1.05
        assert not diagnostics.diagnose(x).good
    assert diagnostics.diagnose(stats.cauchy.rvs(size=(4, 1000), random_state=0)).good


def test_an_unknown_kind_is_told():
    with pytest.raises(ValueError, match="kind must be 'bulk' or 'tail'"):
        diagnostics.ess(torch.zeros(2, 10), kind="other")


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_an_autoregressive_chain_has_its_known_size(phi):
    """ESS = N (1 - phi)/(1 + phi)."""
    x = chains(8, 4000, phi)
    found = float(diagnostics.ess(x))
    assert found == pytest.approx(32000 * (1 - phi) / (1 + phi), rel=0.1)
    assert float(diagnostics.rhat(x)) < 1.02


def test_chains_in_different_places_are_noticed():
    x = chains(4, 500, 0.3)
    assert diagnostics.diagnose(x).good
    apart = x + torch.tensor([0.0, 0.0, 0.0, 5.0]).view(4, 1)
    assert float(diagnostics.rhat(apart)) > 1.5
    assert float(diagnostics.ess(apart)) < 20
    assert "not mixed" in str(diagnostics.diagnose(apart))


def test_a_single_chain_that_drifts_is_noticed():
    drifting = chains(1, 500, 0.3) + torch.linspace(0, 5, 500, dtype=torch.float64)
    assert float(diagnostics.rhat(drifting)) > 1.5


def test_every_quantity_is_measured_by_itself():
    x = torch.stack([chains(3, 60, 0.2, seed) for seed in range(4)], -1).view(3, 60, 2, 2)
    assert diagnostics.rhat(x).shape == (2, 2)
    torch.testing.assert_close(diagnostics.ess(x)[1, 0], diagnostics.ess(x[..., 1, 0]))
    found = diagnostics.diagnose(x.numpy())
    assert (found.rhat, found.ess) == (float(diagnostics.rhat(x).max()), float(diagnostics.ess(x).min()))


def test_chains_that_stand_still():
    still = torch.zeros(2, 10, 2, dtype=torch.float64)
    still[1, :, 1] = 3
    assert diagnostics.rhat(still).tolist() == [1.0, math.inf]
    assert diagnostics.ess(still).tolist() == [20.0, 1.0]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0, 10)])
def test_what_are_no_chains_is_told(shape):
    with pytest.raises(ValueError, match=r"\(chains, draws, \.\.\.\) with 4 draws"):
        diagnostics.rhat(torch.zeros(shape))


def test_a_chain_that_diverged_is_told():
    with pytest.raises(ValueError, match="a chain has diverged"):
        diagnostics.ess(torch.full((2, 10), math.nan))
