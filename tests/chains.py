"""Linear models with exact posteriors for SGLD, and how a chain runs."""

import torch
from torch import nn
from torch.nn import functional as F

from bayesify import SGLD, bayesify, penalty


def linear_gaussian(columns, chains=1, seed=0):
    """Inputs and targets of a linear model with unit noise; every output is a chain of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, columns, generator=generator, dtype=torch.float64)
    y = x @ torch.linspace(-1, 1, columns, dtype=torch.float64) + torch.randn(
        40, generator=generator, dtype=torch.float64
    )
    return x, y[:, None].expand(-1, chains)


def run(model, chain, x, y, steps):
    for _ in range(steps):
        chain.zero_grad()
        loss = F.mse_loss(model(x), y, reduction="none").mean(0).sum() / 2 + penalty(model, num_data=len(x))
        loss.backward()
        chain.step()
    return model


def chained(columns=3, outputs=2, momentum=0.0, lr=0.1, data=40, **options):
    torch.manual_seed(0)
    model = bayesify(nn.Linear(columns, outputs).double(), "sgld", prior_sig=0.5, **options)
    return model, SGLD(model, lr, num_data=data, momentum=momentum)
