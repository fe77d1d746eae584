"""A model with everything that a file has to keep, and how it is trained."""

import torch
from torch import nn

import bayesify as library
from bayesify import bayesify, param_groups, penalty


class Net(nn.Module):
    """Convolution, BatchNorm, a tied pair, an embedding with padding, a frozen layer and bare parameters."""

    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(10, width, padding_idx=0)
        self.conv = nn.Conv1d(width, width, 1)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.token = nn.Parameter(torch.randn(1, width, 1))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.norm(self.conv(self.embed(ids).transpose(1, 2)) + self.token)
        return self.head(self.frozen(x.mean(-1)))


def net(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Net(**kwargs)


IDS = torch.arange(40).view(10, 4) % 10
LABELS = torch.arange(10)
SETTINGS = {"prior_sig": {"head.*": 0.5, "*": 0.1}, "prior_mean": {"conv.*": "zero"}, "exclude": "token"}


def trained(method, options, steps=4):
    model = bayesify(net(), method, **SETTINGS, **options)
    groups = param_groups(model, 0.05)
    optimizer = library.SGLD(model, groups, num_data=10) if method == "sgld" else torch.optim.SGD(groups)
    for _ in range(steps):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(IDS), LABELS) + penalty(model, 10)).backward()
        optimizer.step()
    if method == "la":
        library.fit_laplace(model, [(IDS, LABELS)])
    return model
