"""A stream's alarm: its wealth is the formula, and a stream that does not change has few alarms, however long."""

import math

import pytest
import torch

from bayesify import metrics
from bayesify.quality.conformal import BETS, _independent, conformal_pvalues


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_wealth_is_the_mean_of_bets():
    p = torch.rand(30, generator=rng(), dtype=torch.float64)
    found = metrics.drift(p, 0.05)
    for t in (0, 10, 29):
        bets = [math.prod(float(e) * float(q) ** (float(e) - 1) for q in p[: t + 1]) for e in BETS]
        assert float(found.wealth[t]) == pytest.approx(sum(bets) / len(bets))
    assert found.threshold == 20 and not found.alarm and found.at is None
    assert repr(found).startswith("Drift(30 p-values, no alarm, wealth ")


def streams(count, held_out, length, seed=0):
    """Yield the p-values of streams that do not change, each with held-out data of its own."""
    generator = rng(seed)
    for _ in range(count):
        held = torch.randn(held_out, generator=generator).sort().values
        yield conformal_pvalues(torch.randn(length, generator=generator), held)


def test_values_are_uniform_and_independent():
    held_out, length = 9, 12
    found = torch.stack([_independent(p, held_out, i) for i, p in enumerate(streams(4000, held_out, length))])
    assert found.shape == (4000, length)
    error = math.sqrt(1 / 12 / 4000)
    assert bool(((found.mean(0) - 0.5).abs() < 4 * error).all())
    assert bool(((found < 0.1).double().mean(0) - 0.1).abs().max() < 4 * math.sqrt(0.09 / 4000))
    correlations = torch.corrcoef(found.T) - torch.eye(length, dtype=torch.float64)
    assert float(correlations.abs().max()) < 5 / math.sqrt(4000)


def test_false_alarms_over_all_time_are_as_promised():
    repetitions, level = 2000, 0.1
    alarms = [
        metrics.drift(p, level, held_out=30, seed=i).alarm for i, p in enumerate(streams(repetitions, 30, 300, seed=1))
    ]
    rate = sum(alarms) / repetitions
    assert 0.01 < rate < level + 4 * math.sqrt(level * (1 - level) / repetitions)


def test_a_change_is_seen_soon():
    generator = rng(3)
    held = torch.randn(500, generator=generator).sort().values
    stream = torch.cat([torch.randn(200, generator=generator), 2 + torch.randn(100, generator=generator)])
    found = metrics.drift(conformal_pvalues(stream, held), held_out=500)
    assert found.alarm and 200 < found.at < 240


@pytest.mark.parametrize(
    ("p", "options", "message"),
    [
        (torch.tensor([0.0, 0.5]), {}, r"pvalues must be in \(0, 1\], got 0 to 0.5"),
        (torch.tensor([0.5]), {"false_alarms": 1.0}, "false_alarms must be between 0 and 1, got 1.0"),
        (torch.tensor([0.5]), {"held_out": 0}, "held_out must be a number of examples, got 0"),
    ],
)
def test_what_cannot_be(p, options, message):
    with pytest.raises(ValueError, match=message):
        metrics.drift(p, **options)
