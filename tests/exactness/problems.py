"""Two problems whose posterior is known: Gaussian linear regression in closed form, logistic regression by quadrature.

Both have two parameters theta, a prior N(theta0, sig^2 I) and N observations, all in float64. What a method should
arrive at is computed here without the package: by closed forms, Newton's method and quadrature.
"""

import copy
import itertools
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

D = 2
GRID = 41  # points per axis of the quadrature
WIDTH = 7.0  # standard deviations to either side
DOUBLE = {"dtype": torch.float64}


class Moments(NamedTuple):
    """Mean (D,) and covariance (D, D) of a distribution of theta."""

    mean: torch.Tensor
    cov: torch.Tensor


class Problem:
    """A likelihood with one linear predictor x^T theta per example."""

    name: str
    sig = 0.8
    inflate = 1.0  # how many times each observation counts

    def __init__(self):
        g = torch.Generator().manual_seed(3)
        mixing = torch.tensor([[1.0, 0.0], [0.6, 0.9]], **DOUBLE)
        self.x = torch.randn(self.count, D, generator=g, **DOUBLE) @ mixing.T
        self.theta0 = torch.tensor([0.3, -0.2], **DOUBLE)
        self.y = self.observe(self.x @ torch.tensor([0.9, -1.1], **DOUBLE), g)
        self.new_x = torch.tensor([[1.0, 0.5], [-0.7, 1.2]], **DOUBLE)

    def scaled(self, sig, inflate):
        """Return the same observations under another prior scale, each of them counted `inflate` times."""
        other = copy.copy(self)
        other.__dict__ = {k: v for k, v in vars(self).items() if not isinstance(vars(Problem).get(k), cached_property)}
        other.sig, other.inflate = sig, inflate
        return other

    def model(self, copies):
        """Return a linear model with `copies` rows: one forward is that many independent draws of the same problem."""
        model = nn.Linear(D, copies, bias=False, **DOUBLE)
        with torch.no_grad():
            model.weight.copy_(self.theta0.expand(copies, D))
        return model

    def loss(self, output, target):
        """Return -log p(y|x) of each example up to a constant, summed over the copies."""
        return self.each(output, target.unsqueeze(-1)).sum(-1)

    def potential(self, theta):
        """Return -log p(theta, y) up to a constant, for theta (..., D)."""
        return self.inflate * self.each(theta @ self.x.T, self.y).sum(-1) + self.prior(theta)

    def prior(self, theta):
        """Return |theta - theta0|^2 / (2 sig^2)."""
        return (theta - self.theta0).square().sum(-1) / (2 * self.sig**2)

    @cached_property
    def map(self):
        """The minimum of the potential, by Newton's method."""
        return newton(self.potential, self.theta0)

    @cached_property
    def hessian(self):
        """The potential's Hessian at its minimum."""
        return hessian(self.potential, self.map)

    @cached_property
    def grid(self):
        """Points (GRID^2, D) around the minimum, and the area of a cell."""
        std = torch.linalg.inv(self.hessian).diagonal().sqrt()
        axes = [torch.linspace(-WIDTH, WIDTH, GRID, **DOUBLE) * s + m for s, m in zip(std, self.map, strict=True)]
        cell = float((2 * WIDTH / (GRID - 1)) ** 2 * std.prod())
        return torch.cartesian_prod(*axes), cell

    @cached_property
    def posterior(self):
        """The exact posterior's moments, by the trapezoidal rule."""
        points, _ = self.grid
        return moments_of(points, (-self.potential(points)).softmax(0))

    @cached_property
    def mean_field(self):
        """The minimum of KL(q || posterior) over Gaussians q with diagonal covariance."""
        free = newton(self.free_energy, torch.cat([self.map, -self.hessian.diagonal().log() / 2]))
        return Moments(free[:D], torch.diag((2 * free[D:]).exp()))

    def free_energy(self, free):
        """Return E_q[-log p(y|theta)] + KL(q || prior) up to a constant, q given by its mean and log std."""
        mean, std = free[:D], free[D:].exp()
        nodes, weights = hermite()
        predictor = self.x @ mean + nodes[:, None] * (self.x.square() @ std.square()).sqrt()
        data = self.inflate * (weights[:, None] * self.each(predictor, self.y)).sum()
        return data + self.prior(mean) + std.square().sum() / (2 * self.sig**2) - free[D:].sum()

    def masks(self, p_drop):
        """Yield every mask z with its probability under Bernoulli(1 - p_drop)."""
        for z in itertools.product([0.0, 1.0], repeat=D):
            yield torch.tensor(z, **DOUBLE), (1 - p_drop) ** sum(z) * p_drop ** (D - sum(z))

    def over_masks(self, mean, p_drop, function):
        """Return E_z[function(z mean + (1-z) theta0)]."""
        return sum(p * function(z * mean + (1 - z) * self.theta0) for z, p in self.masks(p_drop))

    @cache  # noqa: B019 (a handful of problems live as long as the tests)
    def chain(self, lr):
        """Return the stationary `Chain` of theta <- theta - lr grad U/N + sqrt(2 lr/N) xi.

        The transition density is integrated on the grid, and the power iteration ends in the stationary density.
        """
        points, cell = self.grid
        step = lr / self.count
        ahead = points - step * torch.func.vmap(torch.func.grad(self.potential))(points)
        # The square of a distance by its parts: a matrix product instead of an array of all pairs and axes.
        square = ahead.square().sum(1)[:, None] - 2 * ahead @ points.T + points.square().sum(1)
        kernel = (-square / (4 * step)).exp() * cell / (4 * torch.pi * step)
        density = (-self.potential(points)).softmax(0)
        for _ in range(1000):
            after = density @ kernel
            change, density = (after - density).abs().sum(), after / after.sum()
            if change < 1e-13:
                break
        return Chain(points, ahead, kernel, density, (2 * step) ** 0.5)


class Chain(NamedTuple):
    """A stationary Markov chain on the grid.

    Attributes:
        points: The grid.
        ahead: Where each point goes, but for the noise.
        kernel: The transition probabilities.
        density: The stationary distribution.
        noise: The standard deviation of a step's noise.
    """

    points: torch.Tensor
    ahead: torch.Tensor
    kernel: torch.Tensor
    density: torch.Tensor
    noise: float

    @property
    def moments(self):
        return moments_of(self.points, self.density)

    def autocovariances(self, thin, count):
        """Return Cov(theta_0, theta_k) for k = 0, thin, 2 thin, ..., by the kernel's powers on the identity."""
        away = expected = self.points - self.moments.mean
        out = []
        for _ in range(count):
            out.append((away * self.density[:, None]).T @ expected)
            for _ in range(thin):
                expected = self.kernel @ expected
        return out

    def draw(self, count):
        """Draw stationary states: a step from grid points drawn by the density."""
        at = torch.multinomial(self.density, count, replacement=True)
        return self.ahead[at] + self.noise * torch.randn(count, D, **DOUBLE)


class Linear(Problem):
    """y ~ N(x^T theta, noise^2): the posterior is Gaussian, with precision inflate X^T X / noise^2 + I / sig^2."""

    name = "linear regression"
    count = 14
    noise = 0.7

    def observe(self, predictor, g):
        return predictor + self.noise * torch.randn(self.count, generator=g, **DOUBLE)

    def each(self, predictor, y):
        return ((y - predictor) / self.noise).square() / 2

    @cached_property
    def posterior(self):
        data = self.inflate / self.noise**2
        precision = data * self.x.T @ self.x + torch.eye(D, **DOUBLE) / self.sig**2
        cov = torch.linalg.inv(precision)
        return Moments(cov @ (data * self.x.T @ self.y + self.theta0 / self.sig**2), cov)

    @cached_property
    def mean_field(self):
        precision = torch.linalg.inv(self.posterior.cov).diagonal()
        return Moments(self.posterior.mean, torch.diag(1 / precision))


class Logistic(Problem):
    """y = +-1 with p(y|x) = 1/(1 + exp(-y x^T theta)): the posterior is known by quadrature."""

    name = "logistic regression"
    count = 20

    def observe(self, predictor, g):
        return torch.where(torch.rand(self.count, generator=g, **DOUBLE) < predictor.sigmoid(), 1.0, -1.0).double()

    def each(self, predictor, y):
        return F.softplus(-y * predictor)


PROBLEMS = (Linear(), Logistic())


def hessian(function, x):
    """Return the matrix of second derivatives."""
    return torch.func.jacrev(torch.func.grad(function))(x)


def newton(function, start):
    """Return the minimum of a smooth function, by Newton's steps, halved until they go down."""
    x = start
    for _ in range(100):
        step = torch.linalg.solve(hessian(function, x), torch.func.grad(function)(x))
        size = 1.0
        while not function(x - size * step) <= function(x) and size > 1e-8:
            size /= 2
        x = x - size * step
        if step.abs().max() < 1e-14:
            break
    return x


def moments_of(points, weights):
    """Return mean and covariance of weighted points."""
    mean = weights @ points
    away = points - mean
    return Moments(mean, (away * weights[:, None]).T @ away)


def hermite(count=80):
    """Return nodes and weights of E[f(eps)], eps ~ N(0, 1), by the eigenvalues of the Jacobi matrix."""
    side = torch.arange(1, count, **DOUBLE).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(side, 1) + torch.diag(side, -1))
    return nodes, vectors[0].square()
