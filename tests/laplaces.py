"""Small models and data for the Laplace approximation."""

import torch
from torch import nn

from bayesify import bayesify, fit_laplace, named_posteriors


def half_square(output, target):
    return (output - target).square().sum(-1) / 2


def inputs(columns, count=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator, dtype=torch.float64)


def batches(x, y, size=7):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def classifier(method="la", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return bayesify(model, method, **{"prior_sig": 0.5, **options})


def labelled(count=30, seed=0):
    x = inputs(4, count, seed)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def curvature_of(posterior, sig):
    return posterior.std.double() ** -2 - 1 / sig**2


def data(count=30, inputs=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def head(classes=3, *, include="2.*", bias=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes, bias=bias)).double()
    return bayesify(model, "la", include=include, **{"prior_sig": 0.7, **options})


def fitted(classes=3, structure="kron", **options):
    x, y = data(classes=classes)
    return fit_laplace(head(classes, **options), batches(x, y), structure=structure)


def covariance(model, weight, bias=None):
    """Return the covariance of weight and bias, written out, from the factors."""
    posteriors = dict(named_posteriors(model))
    bases = []
    for name in (weight, bias) if bias else (weight,):
        kron = posteriors[name].kron
        left = torch.eye(len(kron.left_values)).to(kron.left_values) if kron.left is None else kron.left
        right = torch.eye(len(kron.right_values)).to(kron.right_values) if kron.right is None else kron.right
        bases.append(torch.kron(left, right))
    basis = torch.cat(bases)
    return basis @ torch.diag(posteriors[weight].kron.variances(posteriors[weight].ridge).flatten()) @ basis.T
