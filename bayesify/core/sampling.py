"""One theta of a model, and its gradient, which comes together with the penalty's in one pass over the weights.

`Sampled` is the node of the thetas that one draw gives some posteriors: of one on a CPU, whose theta is then in the
cache; of many on an accelerator, in a launch. Its noise is not kept: backward makes it again from the seed. One more
output of the node is a handle. The penalty is a function of it, and what comes back through it are the factors of the
penalty's gradient, so that this and the samples' are written together.
"""

from collections.abc import Sequence
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesify.core import distributed as shards
from bayesify.core.compiled import draw, in_one_operation
from bayesify.core.prior import host, wide
from bayesify.core.stored import holding
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import Job, run_all, transformed
from bayesify.engine.writing import Formula, noise_of, several

Posterior = Any  # bayesify.core.posterior.Posterior, which imports this file
Found = tuple[Tensor | None, ...]


@torch.no_grad()
def draw_all(posteriors: Sequence[Posterior], means: Sequence[Tensor], seed: Any) -> list[Tensor]:
    """Return the thetas of a draw, before any calibration; formulas run together where the device likes that."""
    thetas, jobs = [], []
    for posterior, mean in zip(posteriors, means, strict=True):
        given = posterior.drawing(mean)
        if given is None:
            thetas.append(posterior.theta(mean, posterior.noise_of(seed)))
            continue
        thetas.append(torch.empty_like(mean, requires_grad=False))
        jobs.append(Job(given[0], posterior.stream(seed), given[1], (thetas[-1],), posterior.p_drop))
    run_all(jobs)
    of = {id(job.outputs[0]): job.inputs[0] for job in jobs}
    for posterior, theta in zip(posteriors, thetas, strict=True):
        if posterior.fixed_row is not None and id(theta) in of:
            theta[posterior.fixed_row] = of[id(theta)][posterior.fixed_row]
    return thetas


NODE = 32  # posteriors of an accelerator that share a node of autograd, so that their gradients take one launch


class Draw:
    """One theta of the whole model, given by its seed."""

    def __init__(self, seed: Any, *, pinned: bool = False, fresh: bool = False, keep: bool = False) -> None:
        self.seed = seed  # in compiled code a tensor
        self.traced = seed if isinstance(seed, Tensor) else torch.tensor(noises.signed(seed))  # so one graph serves all
        self.pinned = pinned  # outlives a forward, as in a `sample` block
        self.fresh = fresh  # the forward that reads it took the seed from the global generator
        self.keep = keep  # keeps thetas without gradient; whoever asks for it knows that no weight changes meanwhile
        self.agreed = False
        self.kept: dict[Posterior, Tensor] = {}
        self.parts: dict[int, Draw] = {}

    def part(self, i: int) -> "Draw":
        """Return the draw for the i-th of several models: parameters of one name need noise of their own."""
        if not i:
            return self
        return self.parts.setdefault(i, Draw(noises.mix(self.seed, i), pinned=self.pinned, keep=self.keep))

    def forget(self) -> None:
        """Drop the thetas that were kept."""
        self.kept.clear()
        self.parts.clear()

    def theta(
        self, posterior: Posterior, original: Tensor, nodes: "list[tuple[Samples, Tensor]] | None" = None
    ) -> Tensor:
        """Return this draw's theta of one posterior."""
        tensors = (original, *posterior.learnable())
        if transformed():
            compiling = torch.compiler.is_compiling()
            if compiling and in_one_operation(posterior, original):
                drawn: Tensor = draw(posterior._number, self.traced, list(tensors))
                return drawn
            seed: Any = self.traced if compiling else self.seed
            plain: Tensor = posterior.calibrated(original, posterior.theta(original, posterior.noise_of(seed)))
            return plain
        return self.thetas([posterior], [original], [] if nodes is None else nodes)[0]

    def thetas(
        self, posteriors: Sequence[Posterior], originals: Sequence[Tensor], nodes: "list[tuple[Samples, Tensor]]"
    ) -> list[Tensor]:
        """Return this draw's thetas of several posteriors; autograd's nodes, with their handles, join `nodes`."""
        pairs, grad = list(zip(posteriors, originals, strict=True)), torch.is_grad_enabled()
        wanted = [i for i, (p, o) in enumerate(pairs) if grad and any(t.requires_grad for t in (o, *p.learnable()))]
        new = [i for i, p in enumerate(posteriors) if p not in self.kept or i in wanted]
        found: list[Any] = [self.kept.get(p) for p in posteriors]
        for i, theta in zip(new, self._drawn([pairs[i] for i in new]), strict=True):
            found[i] = theta
            if self.keep and i not in wanted and posteriors[i].layout is None:  # a sharded model does not fit
                self.kept[posteriors[i]] = theta
        zeros = torch.zeros(2, dtype=wide(originals[0]), device=originals[0].device) if wanted else None
        for first in range(0, len(wanted), NODE):
            chunk = wanted[first : first + NODE]
            samples = Samples([posteriors[i] for i in chunk], [originals[i] for i in chunk], self.seed)
            *thetas, handle = Sampled.apply(samples, [found[i] for i in chunk], zeros, *samples.flat())
            nodes.append((samples, handle))
            for i, theta in zip(chunk, thetas, strict=True):
                found[i] = theta
        return found

    @torch.no_grad()
    def _drawn(self, pairs: Sequence[tuple[Posterior, Tensor]]) -> list[Tensor]:
        """Return thetas as a forward reads them: calibrated, and whole."""
        if any(p.layout is not None for p, _ in pairs):
            return [p.drawn(original, self.seed) for p, original in pairs]
        thetas = draw_all([p for p, _ in pairs], [original for _, original in pairs], self.seed)
        return [p.calibrated(original, theta) for (p, original), theta in zip(pairs, thetas, strict=True)]


# -- gradients ---------------------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """A formula of gradients with respect to the mean and what else is learnable of a posterior."""

    formula: Formula | None = None
    inputs: tuple[Any, ...] = ()  # of a sample's: theta's gradient first
    targets: tuple[int, ...] = ()  # whose gradients the first results are, 0 for the mean; further ones are summed
    passes: bool = False  # whether theta's gradient is added to the mean's as it is
    stream: Any = None
    p_drop: float = 0.0


Row = tuple[Posterior, Sequence[Tensor], Recipe | None, Recipe | None]  # the recipes of a sample and of the penalty


def gradients(rows: Sequence[Row]) -> list[Found]:
    """Return for each posterior and its tensors the sum of the gradients of a sample and of the penalty."""
    plans = [_planned(*row) for row in rows]
    jobs = [job for _, job, _ in plans if job is not None]
    sums = run_all(jobs)
    if sums is not None:
        seen = [posterior for (posterior, *_), (_, job, _) in zip(rows, plans, strict=True) if job is not None]
        seen[0].observe(seen, sums)
    for (posterior, *_), (found, job, whole) in zip(rows, plans, strict=True):
        row = posterior.fixed_row
        if row is None or job is None:
            continue
        if whole is not None and found[0] is not None and found[0] is not whole:  # a fixed row of theta is the mean's
            found[0][row] += whole[row]
        for other in found[1:]:
            if other is not None:
                other[row] = 0
    return [tuple(found) for found, _, _ in plans]


def _planned(
    posterior: Posterior, tensors: Sequence[Tensor], pull: Recipe | None, energy: Recipe | None
) -> tuple[list[Tensor | None], Job | None, Tensor | None]:
    """Return where the gradients will be, the job that writes them, and theta's gradient."""
    found: list[Tensor | None] = [None] * len(tensors)
    whole: Tensor | None = None
    if pull is not None:
        whole = pull.inputs[0]
        if pull.passes:
            found[0] = whole
        if posterior.fixed_row is not None and pull.formula is not None:  # which has no noise
            cut = pull.inputs[0].clone()
            cut[posterior.fixed_row] = 0
            pull = pull._replace(inputs=(cut, *pull.inputs[1:]))
    recipe = pull if energy is None or energy.formula is None else energy if pull is None else _together(pull, energy)
    if recipe is None or recipe.formula is None:
        return found, None, whole
    for target in recipe.targets:
        found[target] = torch.empty_like(tensors[target], requires_grad=False)
    outputs = [found[target] for target in recipe.targets]
    return found, Job(recipe.formula, recipe.stream, recipe.inputs, outputs, recipe.p_drop), whole  # type: ignore[arg-type]


def _together(pull: Recipe, energy: Recipe) -> Recipe:
    """Return one recipe for the sum of two."""
    inputs, places = list(pull.inputs), []
    for x in energy.inputs:
        same = (i for i, y in enumerate(pull.inputs) if y is x and isinstance(x, Tensor) and x.dim())
        place = next(same, len(inputs))
        inputs += [x] if place == len(inputs) else []
        places.append(place)
    own = pull.targets if pull.formula is not None else ()
    formula = added(pull.formula, energy.formula, len(pull.inputs), tuple(places), own, energy.targets, pull.passes)
    targets = tuple(sorted({*own, *energy.targets, *((0,) if pull.passes else ())}))
    return Recipe(formula, tuple(inputs), targets, False, pull.stream, pull.p_drop)


@cache
def added(
    pull: Formula | None,
    energy: Formula,
    count: int,
    places: tuple[int, ...],
    own: tuple[int, ...],
    more: tuple[int, ...],
    passes: bool,
) -> Formula:
    """Return the formula of the sum of two: its first `count` inputs are the first one's, `places` the second one's."""

    def both(*given: Any) -> Any:
        noise, inputs = (given[:1], given[1:]) if pull is not None and noise_of(pull) else ((), given)
        first = () if pull is None else several(pull(*noise, *inputs[:count]))
        second = several(energy(*(inputs[i] for i in places)))
        found = {0: inputs[0]} if passes else {}
        for target, value in (*zip(own, first, strict=False), *zip(more, second, strict=True)):
            found[target] = found[target] + value if target in found else value
        return (*(found[target] for target in sorted(found)), *first[len(own) :])

    return both if pull is None else wraps(pull)(both)  # which shows the noise that it takes


def autograd_gradients(
    values: Sequence[Tensor], tensors: Sequence[Tensor], grads: Sequence[Any], *, create_graph: bool = False
) -> Found:
    """Return the gradients of values, given what comes back to each; None for tensors that need none."""
    wanted = [t for t in tensors if t.requires_grad]
    given = [g if isinstance(g, Tensor) else torch.full_like(v, g) for v, g in zip(values, grads, strict=True)]
    found = torch.autograd.grad(values, wanted, given, create_graph=create_graph, allow_unused=True)
    by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return tuple(by_id.get(id(t)) for t in tensors)


def autograd_pullback(posterior: Posterior, mean: Tensor, seed: int, grad: Tensor, *, create_graph: bool) -> Found:
    """Compute `Posterior.pullback` by autograd: always right, twice differentiable, slower."""
    with torch.enable_grad():
        theta = posterior.calibrated(mean, posterior.theta(mean, posterior.noise_of(seed)))
        found = autograd_gradients([theta], [mean, *posterior.learnable()], [grad], create_graph=create_graph)
    if create_graph and posterior.natural:  # natural steps of the spread, which are no gradient
        with torch.no_grad():
            found = (found[0], *posterior.calibrated_pullback(mean, seed, grad)[1:])
    return found


def autograd_energy_pull(
    posterior: Posterior, mean: Tensor, coef: Any, pull: Any, *, create_graph: bool = False
) -> Found:
    """Compute `Posterior.energy_pull` by autograd: always right, twice differentiable, slower."""
    with torch.enable_grad():
        energy = posterior.energy(mean, 1.0)
        away = ((mean.to(energy.dtype) - posterior.prior_center) / posterior.prior_sig).square().sum() / 2
        factors = [f.to(energy) if isinstance(f, Tensor) else f for f in (coef, pull)]
        tensors = [mean, *posterior.learnable()]
        found = autograd_gradients([energy, away], tensors, factors, create_graph=create_graph)
    if create_graph and posterior.natural:
        with torch.no_grad():
            found = (
                found[0],
                *posterior.energy_pull(mean, *(host(f) if isinstance(f, Tensor) else f for f in factors))[1:],
            )
    return found


def plus(a: Found, b: Found) -> Found:
    """Return the sums of gradients, of which some may be missing."""
    return tuple(y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True))


# -- the node ----------------------------------------------------------------------------------------------------------


class Samples:
    """The posteriors of a node, and their tensors as they were."""

    def __init__(self, posteriors: Sequence[Posterior], originals: Sequence[Tensor], seed: Any) -> None:
        self.posteriors, self.seed = posteriors, seed
        self.tensors = [(o, *p.learnable()) for p, o in zip(posteriors, originals, strict=True)]
        self.versions = [[t._version for t in tensors] for tensors in self.tensors]
        self.trained = [t.requires_grad for t in self.flat()]

    def flat(self) -> list[Tensor]:
        """Return all tensors, one after the other."""
        return [t for tensors in self.tensors for t in tensors]

    def carries(self, wanted: set[Posterior]) -> bool:
        """Return whether the penalty of some posteriors may come with these samples' gradients."""
        now = [t for p in self.posteriors for t in (p.original, *p.learnable())]
        return (
            all((p.flat or p in wanted) and p.layout is None for p in self.posteriors)
            and all(a is b for a, b in zip(self.flat(), now, strict=True))
            and [t._version for t in now] == [v for versions in self.versions for v in versions]
            and self.trained == [t.requires_grad for t in now]
        )


class Sampled(torch.autograd.Function):
    """The autograd node of thetas and their handle.

    What backward needs is kept outside autograd's saved tensors, since activation checkpointing must not count it.
    """

    @staticmethod
    def forward(
        ctx: Any, samples: Samples, thetas: Sequence[Tensor], zeros: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return thetas that were drawn, and a handle."""
        ctx.set_materialize_grads(False)
        ctx.samples = samples
        return (*thetas, zeros.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the means and what else is learnable."""
        samples, given = ctx.samples, grads[-1]
        factors = None if given is None else (given[0], given[1])
        for posterior, tensors, versions in zip(samples.posteriors, samples.tensors, samples.versions, strict=True):
            check_versions(posterior, tensors, versions, "the forward pass and its")
        each = zip(samples.posteriors, samples.tensors, grads[:-1], strict=True)
        found = pulled_back([(p, tensors, samples.seed, grad, factors) for p, tensors, grad in each])
        return (None, None, None, *(g for one in found for g in one))


Sought = tuple[Posterior, Sequence[Tensor], Any, Tensor | None, tuple[Any, Any] | None]


def pulled_back(sought: Sequence[Sought]) -> list[Found]:
    """Return the sums of the gradients of samples and of the penalty, of many posteriors in a launch.

    Of each posterior: its tensors, the seed and theta's gradient, and the factors of the energy and of
    |(m - theta0)/sigma|^2/2 in the penalty.
    """
    found: list[Found] = []
    rows: dict[int, Row] = {}
    for i, (posterior, tensors, seed, grad, given) in enumerate(sought):
        found.append((None,) * len(tensors))
        if grad is None and given is None:
            continue
        factors = None
        if given is not None:
            kept = given if torch.is_grad_enabled() else tuple(map(host, given))
            factors = kept[0], kept[1] if posterior.relative else 0.0
        with holding(posterior, tensors[1:]):
            recipes = None if torch.is_grad_enabled() else _recipes(posterior, tensors[0], seed, grad, factors)
            if recipes is None:
                found[i] = _apart(posterior, tensors, seed, grad, factors)
            else:
                rows[i] = posterior, tensors, *recipes
    with torch.no_grad():
        for i, one in zip(rows, gradients(list(rows.values())), strict=True):
            found[i] = one
    return found


def _recipes(
    posterior: Posterior, mean: Tensor, seed: Any, grad: Tensor | None, factors: tuple[Any, Any] | None
) -> tuple[Recipe | None, Recipe | None] | None:
    """Return the recipes of a sample's gradient and of the penalty's, or None where one of them is not a formula."""
    if posterior.layout is not None or (grad is not None and posterior.calibration != 1):
        return None
    pull = None if grad is None else posterior.pulling(mean, seed, grad)
    energy = None if factors is None else posterior.energy_pulling(mean, *factors)
    missing = (grad is not None and pull is None) or (factors is not None and energy is None)
    return None if missing else (pull, energy)


def _apart(
    posterior: Posterior, tensors: Sequence[Tensor], seed: Any, grad: Tensor | None, factors: tuple[Any, Any] | None
) -> Found:
    """Return the gradients of a posterior without recipes, or with a graph of their own."""
    mean, again = tensors[0], torch.is_grad_enabled()
    found: Found = (None,) * len(tensors)
    if grad is not None:
        if posterior.layout is not None:
            found = shards.pulled(posterior, mean, seed, grad)
        elif again:
            found = autograd_pullback(posterior, mean, seed, grad, create_graph=True)
        else:
            found = posterior.calibrated_pullback(mean, seed, grad)
    if factors is None:
        return found
    recipe = posterior.energy_pulling(mean, *factors)
    if again and (recipe is None or recipe.formula is not None):
        return plus(found, autograd_energy_pull(posterior, mean, *factors, create_graph=True))
    return plus(found, posterior.energy_pull(mean, *factors))


def check_versions(posterior: Posterior, tensors: Sequence[Tensor], versions: Sequence[int], between: str) -> None:
    """Raise if a backward pass comes after a change of the posterior that it would need."""
    if [t._version for t in tensors] != list(versions):
        raise RuntimeError(
            f"the posterior of {posterior.name!r} was modified between {between} backward pass; call optimizer.step() "
            "(or load) only after backward()"
        )
