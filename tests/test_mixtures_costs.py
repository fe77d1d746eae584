"""The command that measures what mixtures cost runs, and counts what it says it counts."""

from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent


def small(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def batch(generator):
    return torch.randn(8, 64, generator=generator), torch.randint(10, (8,), generator=generator)


def test_every_row_has_its_costs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tests.benchmarks import mixtures

    work = mixtures.Work("small", small, batch, "2.*", "zero")
    rows = mixtures.rows_of(work)
    assert rows == [row for row in mixtures.ROWS if "LoRA" not in row]
    found = {row: mixtures.measure(work, row, rounds=1) for row in rows}
    assert all(cost > 0.9 for costs in found.values() for cost in costs.values())
    ensemble, swag = found["five plain models"], found["SWAG"]
    assert ensemble["file"] == pytest.approx(5, rel=0.2)  # five means, and what the file says about them
    assert swag["file"] == pytest.approx(1 + 2 + 10, rel=0.2)  # the weights; mean and scatter; ten iterates
    assert swag["memory"] == pytest.approx(1 + 2 + 10, rel=0.2)
