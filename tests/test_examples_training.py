"""What the training examples share: the schedule, early stopping, and the pages."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import training


def test_early_stopping():
    args = SimpleNamespace(epochs=50, patience=3)
    losses = [0.5, 0.3, 0.4, 0.35, 0.31]
    history = [{"epoch": i + 1, "val_loss": loss} for i, loss in enumerate(losses)]
    assert [training.finished(history[:n], args) for n in range(6)] == [False] * 5 + [True]
    assert training.best_of(history)["epoch"] == 2
    assert training.is_best({"val_loss": 0.29}, history)
    assert not training.is_best({"val_loss": 0.3}, history)
    assert training.finished([{"epoch": i + 1} for i in range(50)], args)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_schedule_scales_every_group_and_puts_it_back(schedule):
    args = SimpleNamespace(epochs=2, schedule=schedule)
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": body.parameters(), "lr": 1.0}, {"params": head.parameters(), "lr": 3.0}])
    rates = []
    for epoch in range(2):
        for _ in training.scheduled(optimizer, args, epoch, 2):
            rates.append([group["lr"] for group in optimizer.param_groups])
        assert [group["lr"] for group in optimizer.param_groups] == [1.0, 3.0]
    wanted = (1 + torch.cos(torch.arange(4) / 4 * torch.pi)) / 2 if schedule == "cosine" else torch.ones(4)
    torch.testing.assert_close(torch.tensor(rates), wanted.unsqueeze(1) * torch.tensor([1.0, 3.0]))


def test_settings_leave_out_where_a_run_happens(tmp_path):
    args = SimpleNamespace(lr=0.1, weights=Path("a.safetensors"), out=tmp_path, workers=2)
    assert training.settings_of(args) == {"lr": 0.1, "weights": "a.safetensors"}
    training.check_settings(tmp_path, {"lr": 0.1, "weights": "a.safetensors"}, args)
    with pytest.raises(SystemExit, match=r"other settings \(lr\)"):
        training.check_settings(tmp_path, {"lr": 0.2, "weights": "a.safetensors"}, args)
