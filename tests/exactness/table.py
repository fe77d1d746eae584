"""The table of methods, and the distances between what each computes and what its mathematics says.

A method joins by one `Entry`: its options, what its posterior should be on a problem, and how it gets there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributions import Normal, kl_divergence

import bayesify
from bayesify.core.prior import RELATIVE_SIG, TOLERANCE
from bayesify.methods.swag import collect

from .problems import D, Moments, Problem, hessian, newton

DRAWS = 4096
ROUNDING = "relative error"
SAMPLING = "standard errors"
BOUNDS = {ROUNDING: 1e-9, SAMPLING: 4.0}
EMPTY = torch.zeros(2, 2, dtype=torch.float64)


class Target(NamedTuple):
    """What a method should arrive at on a problem.

    Attributes:
        point: Where its parameter lies when the gradient of loss and penalty is zero, (D,).
        mean: The mean of its draws, and of `.mean`, (D,).
        cov: The covariance of its draws over all copies, (D, D).
        within: The same for one copy, whose diagonal is the square of `.std`: chains differ between the copies.
    """

    point: torch.Tensor
    mean: torch.Tensor
    cov: torch.Tensor
    within: torch.Tensor


def gaussian(moments):
    """Return the target of a method that is a Gaussian around its optimum."""
    return Target(moments.mean, moments.mean, moments.cov, moments.cov)


class Distance(NamedTuple):
    """How far one quantity is from its exact value, the largest over its elements."""

    quantity: str
    distance: float
    unit: str


@dataclass(frozen=True)
class Entry:
    """A method.

    Attributes:
        label: Its name on the page.
        method: Its name for `bayesify`.
        target: What it should arrive at.
        options: Its options on a problem.
        prior: The penalty at the target, times N, for one copy; -log of the prior's density without its constant.
        place: Put the model's own parameters beside the mean at the optimum.
        reach: Get from there to the posterior, by the method's own means.
        in_step: The gradient of the prior, where an optimizer's step has it and the penalty has not.
        also: Yield distances of the method's own kind, at the optimum.
        copies: How many copies of the problem the model holds.
        relative: Whether the prior's scale and temperature are left to the package.
        random: Whether `reach` is random, so that its results have standard errors.
    """

    label: str
    method: str
    target: Callable[[Problem], Target]
    options: Callable[[Problem], dict] = lambda problem: {}
    prior: Callable[[Problem, Target], torch.Tensor] = lambda problem, target: problem.prior(target.point)
    place: Callable[[torch.nn.Module, Target, Problem], None] = lambda model, target, problem: None
    reach: Callable[[torch.nn.Module, Problem], None] = lambda model, problem: None
    in_step: Callable[[torch.nn.Module], torch.Tensor | float] = lambda model: 0.0
    also: Callable[[torch.nn.Module, Problem], Iterable[Distance]] = lambda model, problem: ()
    copies: int = DRAWS
    relative: bool = False
    random: bool = False

    def posed(self, problem):
        """Return the problem that the method is given: its own, or with the prior that the package chooses.

        sigma is the root mean square of theta0, at which the weights start; the penalty's factor on a mean loss is
        kappa = min(1/N, 2 TOLERANCE/W) for W weights, so that each of N observations counts 1/(kappa N) times.
        """
        if not self.relative:
            return problem
        kappa = min(1 / problem.count, 2 * TOLERANCE / (self.copies * D))
        start = problem.theta0.expand(self.copies, D).float()  # a scale is rounded to float32
        sig = RELATIVE_SIG * float(start.square().mean().sqrt())
        return problem.scaled(sig, 1 / (kappa * problem.count))


# -- variational inference -----------------------------------------------------------------------------------------

LINKS = {"softplus": lambda s: s.expm1().log(), "exp": torch.log, "clamp": lambda s: s}  # rho of s


def place_rho(link):
    def place(model, target, problem):
        rho = next(p for n, p in model.named_parameters() if n.endswith("rho"))
        rho.copy_(LINKS[link](target.cov.diagonal().sqrt()).expand_as(rho))

    return place


def kl(problem, target):
    q = Normal(target.mean, target.cov.diagonal().sqrt())
    return kl_divergence(q, Normal(problem.theta0, problem.sig)).sum()


def vi(link, label="", **more):
    return Entry(
        label or f"vi, {link}",
        "vi",
        lambda problem: gaussian(problem.mean_field),
        options=lambda problem: {"link": link},
        prior=kl,
        place=place_rho(link),
        **more,
    )


# -- IVON: the same optimum, with the spread in the curvature and the prior in the step ---------------------------


def place_h(model, target, problem):
    ((_, posterior),) = bayesify.named_posteriors(model)
    posterior.begin(float(problem.count))
    posterior.h.copy_(1 / (problem.count * target.cov.diagonal()) - posterior.delta)


def prior_in_step(model):
    ((_, posterior),) = bayesify.named_posteriors(model)
    return posterior.delta * (posterior.mean - posterior.prior_mean)


# -- MC-dropout: every expectation is a sum over all masks ---------------------------------------------------------

P_DROP = 0.25


def dropout(problem):
    def objective(m):
        return problem.over_masks(m, P_DROP, problem.potential)

    point = newton(objective, problem.map)
    mean = problem.over_masks(point, P_DROP, lambda theta: theta)
    cov = problem.over_masks(point, P_DROP, lambda theta: torch.outer(theta - mean, theta - mean))
    return Target(point, mean, cov, cov)


# -- SGLD: stationary, from the first step -------------------------------------------------------------------------

THIN, STATES = 4, 10


def rate(problem):
    """Return a step that is large (0.4 over the largest curvature), so that the discretisation shows."""
    return 0.4 * problem.count / float(torch.linalg.eigvalsh(problem.hessian).max())


def sgld(problem):
    """Return the moments that n states of a stationary chain have on average.

    Of their average: Cov = 1/n^2 sum_jk Gamma(thin |j - k|); of the sample variance: n/(n-1) (Sigma - Cov).
    """
    chain, n = problem.chain(rate(problem)), STATES
    found, gamma = chain.moments, chain.autocovariances(THIN, n)
    of_average = found.cov / n + sum((n - k) / n**2 * (gamma[k] + gamma[k].T) for k in range(1, n))
    within = torch.diag(((found.cov - of_average) * n / (n - 1)).diagonal())
    return Target(problem.map, found.mean, within + of_average, within)


def run_chains(model, problem):
    start = problem.chain(rate(problem)).draw(DRAWS)
    chain = bayesify.SGLD(model, rate(problem), num_data=problem.count)
    for _, posterior in bayesify.named_posteriors(model):
        posterior.original.data.copy_(start)
    for _ in range(THIN * STATES):
        chain.zero_grad()
        (problem.loss(model(problem.x), problem.y).mean() + bayesify.penalty(model, problem.count)).backward()
        chain.step()


def one_step(model, problem):
    """Yield the moments of what a step adds to the optimum, where the gradient is zero: N(0, 2 lr/N)."""
    ((_, posterior),) = bayesify.named_posteriors(model)
    before = posterior.original.detach().clone()
    chain = bayesify.SGLD(model, rate(problem), num_data=problem.count)
    (problem.loss(model(problem.x), problem.y).mean() + bayesify.penalty(model, problem.count)).backward()
    chain.step()
    noise = posterior.original.detach() - before
    variance = 2 * rate(problem) / problem.count
    yield sampled("noise of a step, mean", noise, torch.zeros_like(noise[0]))
    yield sampled("noise of a step, variance", noise.square(), torch.full_like(noise[0], variance))


# -- SWAG: iterates with a known covariance ------------------------------------------------------------------------

WALKERS = 16  # copies, each with iterates of its own: the low-rank noise of a draw is shared by all of them


def swag(problem):
    """Return mu = MAP and (diag(S) + S)/2 for iterates with the exact posterior's covariance S."""
    cov = (problem.posterior.cov + torch.diag(problem.posterior.cov.diagonal())) / 2
    return Target(problem.map, problem.map, cov, cov)


def walk(model, problem):
    """Collect iterates at which one copy is away from the MAP: by +- a c and +- a d for the columns of S = C C^T.

    With K iterates in all, 2 a^2 (c c^T + d d^T)/(K-1) = S for a = sqrt((K-1)/2).
    """
    ((_, posterior),) = bayesify.named_posteriors(model)
    columns = torch.linalg.cholesky(problem.posterior.cov).T
    size = ((4 * WALKERS - 1) / 2) ** 0.5
    for copy in range(WALKERS):
        for away in (*columns, *-columns):
            with torch.no_grad():
                posterior.original.copy_(problem.map.expand_as(posterior.original))
                posterior.original[copy] += size * away
            collect(model)


# -- Laplace -------------------------------------------------------------------------------------------------------


def gauss_newton(problem):
    return gaussian(Moments(problem.map, torch.diag(1 / problem.hessian.diagonal())))


def empirical_fisher(problem):
    def losses(theta):
        return problem.each(problem.x @ theta, problem.y)

    squares = problem.inflate * torch.func.jacrev(losses)(problem.map).square().sum(0)
    return gaussian(Moments(problem.map, torch.diag(1 / (squares + problem.sig**-2))))


def kronecker(problem):
    """Return the Gaussian of precision inflate A mean(h) + I/sigma^2: A = X^T X, h the losses' curvatures.

    Gaussian losses have one curvature, 1/noise^2, so that this is the exact posterior of a linear regression.
    """
    h = hessian(lambda predictor: problem.each(predictor, problem.y).sum(), problem.x @ problem.map).diagonal()
    precision = problem.inflate * h.mean() * problem.x.T @ problem.x + torch.eye(D, dtype=h.dtype) / problem.sig**2
    return gaussian(Moments(problem.map, torch.linalg.inv(precision)))


def fit(**options):
    def reach(model, problem):
        bayesify.fit_laplace(model, [(problem.x, problem.y)], problem.loss, **options)

    return reach


TABLE = (
    Entry(
        "vanilla",
        "vanilla",
        lambda problem: Target(problem.map, problem.map, EMPTY, EMPTY),
        options=lambda problem: {"wd": 1 / (problem.count * problem.sig**2)},
        copies=4,
    ),
    *(vi(link) for link in LINKS),
    vi("softplus", "vi, relative prior", copies=256, relative=True),
    Entry(
        "ivon",
        "ivon",
        lambda problem: gaussian(problem.mean_field),
        prior=kl,
        place=place_h,
        in_step=prior_in_step,
    ),
    Entry(
        "mc_dropout",
        "mc_dropout",
        dropout,
        options=lambda problem: {"p_drop": P_DROP, "mean": "expected"},
        prior=lambda problem, target: problem.over_masks(target.point, P_DROP, problem.prior),
    ),
    Entry("sgld", "sgld", sgld, options=lambda problem: {"thin": THIN}, reach=run_chains, also=one_step, random=True),
    Entry(
        "swag",
        "swag",
        swag,
        options=lambda problem: {"rank": 4 * WALKERS},
        reach=walk,
        copies=WALKERS,
    ),
    Entry("la, ggn", "la", gauss_newton, reach=fit(curvature="ggn"), copies=16),
    Entry("la, ef", "la", empirical_fisher, reach=fit(curvature="ef"), copies=16),
    Entry("la, kron", "la", kronecker, reach=fit(structure="kron"), copies=16),
    Entry("la, relative prior", "la", gauss_newton, reach=fit(curvature="ggn"), copies=16, relative=True),
)


def distances(entry, problem):
    """Yield the distance of every quantity, for one method on one problem."""
    torch.manual_seed(0)
    problem = entry.posed(problem)
    target = entry.target(problem)
    prior_sig = None if entry.relative else problem.sig
    options = dict(entry.options(problem))
    if entry.relative:  # the Gaussian prior alone, and the gradients of the objective
        options |= {"pull": 0.0, "natural": False} if entry.method == "vi" else {"pull": 0.0}
    model = bayesify.bayesify(problem.model(entry.copies), entry.method, prior_sig=prior_sig, **options)
    ((_, posterior),) = bayesify.named_posteriors(model)
    with torch.no_grad():
        posterior.original.copy_(target.point.expand_as(posterior.original))
        entry.place(model, target, problem)
    penalty = bayesify.penalty(model, problem.count).detach() * problem.count * problem.inflate / entry.copies
    yield relative("penalty", penalty, entry.prior(problem, target))
    yield gradient(model, problem, target, entry)
    yield from entry.also(model, problem)
    entry.reach(model, problem)
    if entry.random:
        yield sampled("mean", posterior.mean, target.mean)
        yield sampled("std", posterior.std.square(), target.within.diagonal())
    else:
        yield relative("mean", posterior.mean, target.mean)
        yield relative("std", posterior.std, target.within.diagonal().sqrt())
    if target.within.any():
        yield from draws(model, target, entry.copies)
        yield from prediction(model, problem, target, entry.copies)


def gradient(model, problem, target, entry):
    """Compare the gradient of loss and penalty at the optimum with zero, element by element."""
    model.train()
    (problem.loss(model(problem.x), problem.y).mean() + bayesify.penalty(model, problem.count)).backward()
    found = torch.cat([p.grad for p in model.parameters()], dim=1) + entry.in_step(model)
    model.zero_grad()
    if rounds_to_one_row(found):
        slope = torch.func.grad(problem.prior)(target.point).abs().max() / (problem.count * problem.inflate)
        return Distance("gradient at the optimum", float(found.abs().max() / slope), ROUNDING)
    return sampled("gradient at the optimum", found, torch.zeros(found.shape[1], dtype=found.dtype))


def rounds_to_one_row(values):
    return bool((values - values[0]).abs().max() < 1e-12)


def draws(model, target, copies):
    """Compare the moments of draws with the target's."""
    thetas = []
    for _ in bayesify.samples(model, DRAWS // copies, seed=1):
        with torch.no_grad():
            thetas.append(model.weight.clone())
    theta = torch.cat(thetas)
    away = theta - target.mean
    yield sampled("draws, mean", theta, target.mean)
    products = torch.stack([away[:, 0] ** 2, away[:, 1] ** 2, away.prod(1)], 1)
    yield sampled("draws, covariance", products, target.cov[[0, 1, 0], [0, 1, 1]])


def prediction(model, problem, target, copies):
    """Compare the mean and the spread of `predict` with x^T mean and x^T cov x."""
    count = max(4, DRAWS // copies)
    found = bayesify.predict(model, problem.new_x, samples=count, seed=2, task="regression")
    x = problem.new_x
    yield sampled("prediction, mean", found.mean.T, x @ target.mean)
    variance = ((x @ target.within) * x).sum(1)
    yield sampled("prediction, variance", found.std.square().T, variance)
    exact = bayesify.predict(model, problem.new_x, seed=2, task="regression")
    if exact.closed_form:
        yield relative("closed form, mean", exact.mean.T, x @ target.mean)
        yield relative("closed form, variance", exact.std.square().T, variance)


def relative(quantity, found, exact):
    """Return the largest error over the largest exact value (1 where that is zero)."""
    scale = float(exact.abs().max()) or 1.0
    return Distance(quantity, float((found - exact).abs().max()) / scale, ROUNDING)


def sampled(quantity, values, exact):
    """Return the largest |mean - exact| in standard errors; the rows of `values` are independent."""
    error = values.std(0) / len(values) ** 0.5
    return Distance(quantity, float(((values.mean(0) - exact) / error).abs().max()), SAMPLING)
