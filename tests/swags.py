"""A small network for SWAG, and how it is trained."""

import torch
from torch import nn

from bayesify import named_posteriors, penalty, samples

X = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)).double()


def flat(model):
    return torch.cat([p.original.detach().flatten() for _, p in named_posteriors(model)])


def train(model, optimizer, steps, cycles=None):
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X).square().mean() + penalty(model, 7)).backward()
        optimizer.step()
        if cycles is not None:
            cycles.step()
        seen.append(flat(model))
    return torch.stack(seen)


def thetas(model, count):
    found = []
    for _ in samples(model, count, seed=4):
        with torch.no_grad():
            found.append(torch.cat([w.flatten() for w in (model[0].weight, model[0].bias, model[2].weight)]))
    return torch.stack(found)
