"""Fused optimizers: what they write is noticed."""

import pytest
import torch

from bayesify import bayesify, sample


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
def test_a_pinned_theta_follows_a_fused_optimizer(cls):
    models = [bayesify(torch.nn.Linear(3, 2), "vi") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, after = torch.ones(4, 3), []
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = cls(model.parameters(), lr=0.1, fused=fused)
        with sample(model, seed=0):
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            after.append(model(x))
    torch.testing.assert_close(after[0], after[1])
