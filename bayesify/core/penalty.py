"""The penalty: what a method adds to the loss, and what a prior of unknown scale adds where no scale was chosen.

A Gaussian prior is right for one number of data and one size of steps, and nobody knows its scale beforehand. Where
`prior_sig` is None, the penalty also has the logarithm of a prior whose common scale is unknown,

    c/2 log(1 + D/D0),  D = sum ((m - theta0)/sigma)^2,

in units of the mean loss, over all weights with a relative prior: going e times further from the pretrained weights
must gain c nats. c is the option `pull`, D0 is `bayesify.core.prior.nearest`. The optimizer IVON has it in its step.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.distributed import over_processes, part, part_of
from bayesify.core.draws import known_by
from bayesify.core.posterior import Posterior, Step, check_versions, holding
from bayesify.core.prior import Part, host, nearest, quadratic_energy, step_size, summed, wide
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_num_data, scopes_of
from bayesify.engine.dispatch import Job, functional, run_all, transformed


def penalty(model: nn.Module, num_data: float) -> Tensor:
    """Return what is added to the mean minibatch loss: the prior's term of the method, over the number of data.

    Closed form, differentiable.

    Args:
        model: A bayesified model, or a module that contains one.
        num_data: N, the number of training items that the loss is a mean over.

    Returns:
        A 0-dim tensor.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, penalty
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi", prior_sig=1.0)
        >>> penalty(model, num_data=100).shape
        torch.Size([])
    """
    check_num_data(num_data)
    scopes = scopes_of(model)
    inside = {m for m in model.modules() if isinstance(m, Posterior)}
    first = scopes[0].posteriors[0].original
    total = torch.zeros((), dtype=wide(first), device=first.device)
    for scope in scopes:
        scope.penalized = True
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            scope.warn_in_eval()
        found = [p for p in scope.posteriors if p in inside and not p.flat]
        if found:
            total = total + _of_scope(Terms.of(scope, found, num_data)).to(total)
    return total.to(torch.promote_types(first.dtype, torch.float32))


class Terms(NamedTuple):
    """The penalty of one model.

    Attributes:
        posteriors: Those that have a prior.
        scale: kappa, the factor of their energies.
        strength: c.
        floor: D0.
    """

    posteriors: list[Posterior]
    scale: float
    strength: float
    floor: float

    @classmethod
    def of(cls, scope: Scope, posteriors: list[Posterior], num_data: float) -> "Terms":
        """Return the penalty of some posteriors of a model."""
        strength, floor = pull_of(scope, posteriors)
        return cls(posteriors, scope.method.scale(num_data), strength, floor)


def pull_of(scope: Scope, posteriors: Iterable[Posterior]) -> tuple[float, float]:
    """Return c and D0 for those of the posteriors that have a relative prior."""
    weights = sum(p.shape.numel() for p in posteriors if p.relative)
    return scope.method.pull_strength if weights else 0.0, nearest(weights)


def distance(posterior: Posterior, mean: Tensor) -> Tensor:
    """Return sum ((m - theta0)/sigma)^2 of one posterior."""
    return quadratic_energy(mean, posterior, 1 / posterior.prior_sig**2, 2.0)


def _of_scope(terms: Terms) -> Tensor:
    """Return the penalty of one model, with a gradient in closed form where that can be."""
    if functional() or (torch.compiler.is_compiling() and any(p.layout is not None for p in terms.posteriors)):
        return _combined(_total(terms, [p.original for p in terms.posteriors]), terms)
    tensors = [t for p in terms.posteriors for t in _tensors(p)]
    result: Tensor
    if torch.compiler.is_compiling():
        numbers = [p._number for p in terms.posteriors]
        result = _penalty(numbers, terms.scale, terms.strength, terms.floor, tensors)
    else:
        result = Penalty.apply(terms, *tensors)
    return result


def _tensors(posterior: Posterior) -> tuple[Tensor, ...]:
    """Return what a posterior's energy is a function of; its parts where it is sharded, be it whole now or not."""
    if posterior.layout is None:
        return (posterior.original, *posterior.learnable())
    names = {id(p): name for name, p in posterior._parameters.items()}
    return tuple(posterior._shards[n] for n in ("original", *(names[id(p)] for p in posterior.learnable())))


def _held_numbers(terms: Terms, every: list[tuple[Tensor, ...]]) -> Tensor:
    """Return the numbers of `_of_posteriors`, computed from the tensors that a node was made of."""
    with ExitStack() as stack:
        for posterior, (_, *learned) in zip(terms.posteriors, every, strict=True):
            if posterior.layout is None and learned:
                stack.enter_context(holding(posterior, tuple(learned)))
        return _total(terms, [mean for mean, *_ in every])


def _total(terms: Terms, means: list[Tensor]) -> Tensor:
    """Add up the numbers of all posteriors on all devices and processes."""
    groups: dict[Any, list[tuple[Posterior, Tensor]]] = {}
    for posterior, mean in zip(terms.posteriors, means, strict=True):
        group = None if posterior.layout is None else posterior.layout.group
        groups.setdefault((group, mean.device), []).append((posterior, mean))
    return over_processes((members[0][0], _of_posteriors(terms, members)) for members in groups.values())


def _of_posteriors(terms: Terms, members: list[tuple[Posterior, Tensor]]) -> Tensor:
    """Return energy and distance of posteriors on one device, and the running sums of natural steps."""
    first = part(members[0][1])
    total, constant, jobs = first.new_zeros(4, dtype=wide(first)), 0.0, []
    for posterior, mean in members:
        own, mean = part_of(posterior), mean if posterior.layout is None else part(mean)
        far = bool(terms.strength) and own.relative
        energy = own.terms(mean, terms.scale)
        if energy is None or (far and energy.unit == math.inf):
            numbers = [own.energy(mean, terms.scale).to(total)]
            numbers.append(distance(own, mean).to(total) if far else torch.zeros_like(numbers[0]))
            total = total + torch.nn.functional.pad(torch.stack(numbers), (0, 2))
            continue
        constant += energy.constant
        units = [(energy.unit / own.prior_sig) ** 2 * far, *(0.0 for _ in energy.parts[1:])]
        jobs += list(zip(energy.parts, units, strict=True))
    for parts in _of_one_length(jobs):
        values = torch.tensor([[float(w) for w in (*p.weights, unit)] for p, unit in parts], dtype=total.dtype)
        weights = total.new_empty(values.shape).copy_(values, non_blocking=True)
        rows = torch.stack([summed(p) for p, _ in parts]) if _differentiable(parts) else _rows(parts).to(total)
        now = [(rows * weights[:, :-1]).sum(), (rows[:, 0] * weights[:, -1]).sum()]
        total = total + torch.nn.functional.pad(torch.stack(now), (0, 2))
    if observed := [_share(p, p.observed) for p, _ in members if p.observed is not None]:
        total = total + torch.nn.functional.pad(torch.stack(observed).sum(0).to(total), (2, 0))
    return total + torch.nn.functional.pad(total.new_full((1,), constant), (0, 3)) if constant else total


def _share(posterior: Posterior, observed: Tensor) -> Tensor:
    """Return this process's share of what it has observed on all rows of a posterior, sharded or not."""
    return observed if posterior.layout is None else observed / posterior.layout.size


def _of_one_length(jobs: list[tuple[Part, float]]) -> Iterable[list[tuple[Part, float]]]:
    """Sort parts by how many sums they have."""
    found: dict[int, list[tuple[Part, float]]] = {}
    for job in jobs:
        found.setdefault(len(job[0].weights), []).append(job)
    return found.values()


def _differentiable(parts: list[tuple[Part, float]]) -> bool:
    """Return whether a gradient of the sums is wanted."""
    inputs = [x for p, _ in parts for x in p.inputs if isinstance(x, Tensor)]
    return transformed() or (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))


def _rows(parts: list[tuple[Part, float]]) -> Tensor:
    """Return the sums of parts without their weights."""
    rows = run_all([Job(p.formula, None, p.inputs) for p, _ in parts])
    assert rows is not None
    return rows


def _combined(numbers: Tensor, terms: Terms) -> Tensor:
    """Return the sum of the energies plus c/2 log(1 + D/D0)."""
    if not terms.strength:
        return numbers[0]
    return numbers[0] + terms.strength / 2 * (numbers[1] / terms.floor).log1p()


class Penalty(torch.autograd.Function):
    """The autograd node of the penalty, whose gradient the posteriors know in closed form."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, *tensors: Tensor) -> Tensor:
        """Return the value."""
        ctx.terms, ctx.tensors = terms, tensors
        ctx.versions = [t._version for t in tensors]
        ctx.numbers = _held_numbers(terms, _split(terms, tensors))
        return _combined(ctx.numbers, terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the tensors as they were."""
        terms, every = ctx.terms, _split(ctx.terms, ctx.tensors)
        start = 0
        for posterior, tensors in zip(terms.posteriors, every, strict=True):
            check_versions(posterior, tensors, ctx.versions[start : start + len(tensors)], "penalty and its")
            start += len(tensors)
        with torch.no_grad():
            found = gradients(terms, every, grad, ctx.numbers)
        if torch.is_grad_enabled():
            wanted = [t for t in ctx.tensors if t.requires_grad]
            value = _combined(_held_numbers(terms, every), terms)
            exact = torch.autograd.grad(value, wanted, grad.to(value), create_graph=True, allow_unused=True)
            by_id = {id(t): g for t, g in zip(wanted, exact, strict=True)}
            natural = [own for p, own in zip(terms.posteriors, every, strict=True) if p.natural]
            spread = {id(t) for _, *learned in natural for t in learned}
            found = [g if id(t) in spread else by_id.get(id(t)) for t, g in zip(ctx.tensors, found, strict=True)]
        return (None, *found)


def gradients(terms: Terms, every: list[tuple[Tensor, ...]], grad: Tensor, numbers: Tensor) -> list[Tensor | None]:
    """Return grad times the penalty's gradients, in closed form; natural steps take note of it."""
    value = host(grad)
    pull = value * terms.strength / (terms.floor + host(numbers[1])) if terms.strength else 0.0
    natural = [p for p in getattr(terms.posteriors[0].reader, "posteriors", terms.posteriors) if p.natural]
    if natural:
        size, ratio = step_size(sum(p.shape.numel() for p in natural)), host(_ratio(numbers[2], numbers[3]))
        for posterior in natural:
            posterior.step = Step(terms.scale, value, ratio, size)
    out: list[Tensor | None] = []
    for posterior, (mean, *learned) in zip(terms.posteriors, every, strict=True):
        here = [f.to(mean.device) if isinstance(f, Tensor) else f for f in (value * terms.scale, pull)]
        coef, own_pull = here[0], here[1] if posterior.relative else 0.0
        if posterior.layout is not None:
            found = part_of(posterior).energy_pull(part(mean), coef, own_pull)
            out += [None if g is None else posterior.layout.joined(g) for g in found]
            continue
        with holding(posterior, tuple(learned)):
            out += posterior.energy_pull(mean, coef, own_pull)
    return out


def _ratio(cost: Tensor, power: Tensor) -> Tensor:
    """Return r = cost/power, at least 0, and 0 before anything was observed."""
    return torch.where(power > 0, cost.clamp(min=0) / power, torch.zeros_like(power))


def _split(terms: Terms, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return the tensors of each posterior."""
    rest = iter(tensors)
    return [tuple(next(rest) for _ in range(1 + len(p.learnable()))) for p in terms.posteriors]


# -- in compiled code: one operation, which no compiler looks into -----------------------------------------------------


@torch.library.custom_op(
    "bayesify::penalty",
    mutates_args=(),
    schema="(Tensor[] posteriors, float scale, float strength, float floor, Tensor[] tensors) -> Tensor",
)
def _penalty(posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]) -> Tensor:
    """Return the penalty of one model."""
    terms = Terms([known_by(p) for p in posteriors], scale, strength, floor)
    with torch.no_grad():
        return _combined(_held_numbers(terms, _split(terms, tuple(tensors))), terms).to(wide(tensors[0]))


@_penalty.register_fake
def _(posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=wide(tensors[0]))


@torch.library.custom_op(
    "bayesify::penalty_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] posteriors, float scale, float strength, float floor, Tensor[] tensors) -> Tensor[]",
)
def _gradients(
    grad: Tensor, posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of the penalty of one model."""
    terms = Terms([known_by(p) for p in posteriors], scale, strength, floor)
    every = _split(terms, tuple(tensors))
    with torch.no_grad():
        found = gradients(terms, every, grad, _held_numbers(terms, every))
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@_gradients.register_fake
def _(
    grad: Tensor, posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    posteriors, *ctx.numbers, tensors = inputs
    ctx.count = len(posteriors)
    ctx.save_for_backward(*posteriors, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    posteriors, tensors = list(ctx.saved_tensors[: ctx.count]), list(ctx.saved_tensors[ctx.count :])
    return [None] * ctx.count, None, None, None, _gradients(grad, posteriors, *ctx.numbers, tensors)


_penalty.register_autograd(_backward, setup_context=_keep)
