"""Lightning on two processes: the example trains, and what it saves can be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bayesify import load, predict

EXAMPLE = Path(__file__).parent.parent / "examples" / "with_lightning.py"


@pytest.mark.parametrize("method", ["vi", "sgld", "la"])
def test_the_example_trains_on_two_processes(tmp_path, method: str):
    pytest.importorskip("lightning")
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), method, str(tmp_path)],
        env={**alone, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "512 examples" in done.stdout
    model = load(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), tmp_path)
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    out = predict(model, [(x, (x[:, :4].sum(1) > 0).long())], seed=0)
    assert out.scores["error"] < 0.2
