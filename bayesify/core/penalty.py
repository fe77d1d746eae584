"""What is added to a loss: the penalty of the posteriors, and the learned noise of a regression.

A Gaussian prior is right for one number of data and one size of steps, and nobody knows its scale beforehand. Where
`prior_sig` is None, the penalty also has the logarithm of a prior whose common scale is unknown,

    c/2 log(1 + D/D0),  D = sum ((m - theta0)/sigma)^2,

in units of the mean loss, over all weights with a relative prior: going e times further from the pretrained weights
must gain c nats. c is the option `pull`, D0 is `bayesify.core.prior.nearest`. The optimizer IVON has it in its step.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.compiled import known_by
from bayesify.core.distributed import over_processes, part, part_of
from bayesify.core.posterior import Posterior, Step
from bayesify.core.prior import Energy, Part, host, nearest, scaled, squares, state_dtype, step_size, sums, wide
from bayesify.core.reading import Scope
from bayesify.core.sampling import Sought, check_versions, pulled_back
from bayesify.core.scopes import NOISE, check_num_data, scopes_of, warn_in_eval
from bayesify.core.stored import holding
from bayesify.engine.dispatch import functional, transformed


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
    first, total = scopes[0].posteriors[0].original, None
    for scope in scopes:
        scope.penalized = True
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            warn_in_eval(scope)
        found = [p for p in scope.posteriors if p in inside and not p.flat]
        if found:
            terms = Terms(found, scope.method.scale(num_data), *pull_of(scope, found))
            value = _of_scope(terms, scope)
            total = value if total is None else total + value.to(total)
    dtype = torch.promote_types(first.dtype, torch.float32)
    return first.new_zeros((), dtype=dtype) if total is None else total.to(first.device, dtype)


class Terms(NamedTuple):
    """The penalty of one model."""

    posteriors: list[Posterior]  # those that have a prior
    scale: float  # kappa, the factor of their energies
    strength: float  # c
    floor: float  # D0


def pull_of(scope: Scope, posteriors: Iterable[Posterior]) -> tuple[float, float]:
    """Return c and D0 for those of the posteriors that have a relative prior."""
    weights = sum(p.shape.numel() for p in posteriors if p.relative)
    return scope.method.pull_strength if weights else 0.0, nearest(weights)


def _of_scope(terms: Terms, scope: Scope) -> Tensor:
    """Return the penalty of one model, with a gradient in closed form where that can be."""
    compiling, posteriors = torch.compiler.is_compiling(), terms.posteriors
    if functional() or (compiling and any(p.layout is not None for p in posteriors)):
        return _combined(_numbers(terms, [p.original for p in posteriors]), terms)
    tensors = [_tensors(p) for p in posteriors]
    if compiling:
        found: Tensor = _penalty([p._number for p in posteriors], *terms[1:], [t for own in tensors for t in own])
        return found
    wanted, handles = set(posteriors), []
    for samples, handle in scope.now.nodes if torch.is_grad_enabled() else ():
        if samples.carries(wanted):
            handles.append(handle)
            wanted.difference_update(samples.posteriors)
    rest = [i for i, p in enumerate(posteriors) if p in wanted]
    of_rest = [t for i in rest for t in tensors[i]]
    value: Tensor = Penalty.apply(terms, tensors, rest, len(handles), *handles, *of_rest)
    return value


def _tensors(posterior: Posterior) -> tuple[Tensor, ...]:
    """Return what a posterior's energy is a function of; its parts where it is sharded, be it whole now or not."""
    if posterior.layout is None:
        return (posterior.original, *posterior.learnable())
    names = {id(p): name for name, p in posterior._parameters.items()}
    return tuple(posterior._shards[n] for n in ("original", *(names[id(p)] for p in posterior.learnable())))


@contextmanager
def _holding(terms: Terms, tensors: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    """Give the posteriors the tensors that a node was made of; yield the means among them."""
    with ExitStack() as stack:
        for posterior, (_, *learned) in zip(terms.posteriors, tensors, strict=True):
            if posterior.layout is None:
                stack.enter_context(holding(posterior, learned))
        yield [own[0] for own in tensors]


def _numbers(terms: Terms, means: Sequence[Tensor]) -> Tensor:
    """Return energy and D/D0 of all posteriors on all processes, and the running sums of natural steps."""
    groups: dict[Any, list[tuple[Posterior, Tensor]]] = {}
    for posterior, mean in zip(terms.posteriors, means, strict=True):
        group = None if posterior.layout is None else posterior.layout.group
        groups.setdefault((group, mean.device), []).append((posterior, mean))
    return over_processes((members[0][0], _on_device(terms, members)) for members in groups.values())


def _on_device(terms: Terms, members: list[tuple[Posterior, Tensor]]) -> Tensor:
    """Return the `_numbers` of posteriors on one device, of what this process has of them."""
    first = part(members[0][1])
    jobs: dict[int, list[tuple[Part, float]]] = {}  # by the number of sums: parts, and the first sum's weight in D
    constant, apart = 0.0, []
    for posterior, mean in members:
        own, mean = part_of(posterior), mean if posterior.layout is None else part(mean)
        energy = own.terms(mean, terms.scale)
        if energy is None:
            apart.append(own.energy(mean, terms.scale))
            energy = Energy((), unit=math.inf)
        far = bool(terms.strength) and own.relative
        parts, unit = energy.parts, (energy.unit / own.prior_sig) ** 2 / terms.floor if far else 0.0
        if unit == math.inf:  # there is no sum from which D follows
            inverse, unit = 1 / own.prior_sig, 1.0 / terms.floor
            parts = (Part(squares, (*scaled((mean, own.center), inverse), inverse), (0.0,)), *parts)
        for i, one in enumerate(parts):
            jobs.setdefault(len(one.weights), []).append((one, 0.0 if i else unit))
        constant += energy.constant
    total = _sent((constant, 0.0), wide(first), first)
    for found in jobs.values():  # both numbers are weighted sums of sums
        weights = [
            [w for p, _ in found for w in p.weights],
            [w for p, unit in found for w in (unit, *(0.0 for _ in p.weights[1:]))],
        ]
        flat = sums([p for p, _ in found]).flatten().to(total)
        total = torch.addmv(total, _sent(tuple(map(tuple, weights)), flat.dtype, first), flat)
    if apart:
        total = total + torch.nn.functional.pad(torch.stack([e.to(total) for e in apart]).sum(0, keepdim=True), (0, 1))
    # Each process has observed all rows of a sharded posterior: its share counts.
    observed = [
        p.observed if p.layout is None else p.observed / p.layout.size for p, _ in members if p.observed is not None
    ]
    seen = torch.stack(observed).sum(0, dtype=total.dtype) if observed else _sent((0.0, 0.0), total.dtype, first)
    return torch.cat([total, seen])


def _sent(numbers: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return numbers as a tensor where another is; those of a step are mostly those of the last one."""
    if transformed() or like.is_meta:  # what is made there belongs to one graph
        return _copied(torch.tensor(numbers, dtype=dtype), like)
    return _kept(numbers, dtype, like.device)


@lru_cache(maxsize=64)
def _kept(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return _copied(torch.tensor(numbers, dtype=dtype), torch.empty(0, device=device))


def _copied(numbers: Tensor, like: Tensor) -> Tensor:
    """Return a copy on another device, for which nothing waits."""
    return like.new_empty(numbers.shape, dtype=numbers.dtype).copy_(numbers, non_blocking=True)


def _combined(numbers: Tensor, terms: Terms) -> Tensor:
    """Return the sum of the energies plus c/2 log(1 + D/D0)."""
    return numbers[0] if not terms.strength else torch.add(numbers[0], numbers[1].log1p(), alpha=terms.strength / 2)


class Penalty(torch.autograd.Function):
    """The autograd node of the penalty: a function of the handles of samples, and of the rest of the tensors."""

    @staticmethod
    def forward(
        ctx: Any, terms: Terms, tensors: list[tuple[Tensor, ...]], rest: list[int], count: int, *given: Tensor
    ) -> Tensor:
        """Return the value."""
        ctx.terms, ctx.tensors, ctx.rest, ctx.handles = terms, tensors, rest, given[:count]
        ctx.versions = [[t._version for t in own] for own in tensors]
        with _holding(terms, tensors) as means:
            ctx.numbers = _numbers(terms, means)
        return _combined(ctx.numbers, terms)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the factors of the gradients, and those of the rest of the tensors as they were."""
        terms, tensors, again = ctx.terms, ctx.tensors, torch.is_grad_enabled()
        for posterior, own, versions in zip(terms.posteriors, tensors, ctx.versions, strict=True):
            check_versions(posterior, own, versions, "penalty and its")
        with _holding(terms, tensors) as means:
            numbers = _numbers(terms, means) if again else ctx.numbers
            factors = _factors(terms, grad, numbers)
            found = _of_rest([(terms.posteriors[i], means[i]) for i in ctx.rest], factors)
        both = torch.stack(factors)
        return (None,) * 4 + (*(both.to(handle) for handle in ctx.handles), *found)


def _factors(terms: Terms, grad: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return grad times the factors of the energies and of |(m - theta0)/sigma|^2/2; natural steps take note of it."""
    pull = grad * (terms.strength / terms.floor) / (numbers[1] + 1)
    natural = [p for p in getattr(terms.posteriors[0].reader, "posteriors", terms.posteriors) if p.natural]
    if natural:
        with torch.no_grad():
            size, (cost, power) = step_size(sum(p.shape.numel() for p in natural)), numbers[2:].to(grad)
            inverse = torch.where(grad != 0, 1 / grad, 0.0)  # times 0 asks for no step
            ratio = torch.where(power > 0, cost.clamp(min=0) / power, 0.0)  # 0 before anything was observed
            each = 1 / terms.scale if terms.scale else 0.0
            scalars = torch.stack([ratio * inverse * inverse * each, size * grad, inverse, inverse * inverse])
            sent = [scalars.to(d, t) for d, t in {p.original.device: wide(p.original) for p in natural}.items()]
            steps = {s.device: Step(host(s[0]), host(s[1]), s[2:], size * each) for s in sent}
            for posterior in natural:
                posterior.step = steps[posterior.original.device]
    return grad * terms.scale, pull


def _of_rest(rest: Sequence[tuple[Posterior, Tensor]], factors: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """Return the penalty's gradients of posteriors whose samples do not carry them."""
    sought: list[Sought] = []
    for posterior, mean in rest:
        own = part_of(posterior)
        original = mean if posterior.layout is None else own.original
        coef, pull = (f.to(original.device, wide(original)) for f in factors)
        sought.append((own, (original, *own.learnable()), None, None, (coef, pull)))
    found = zip((p.layout for p, _ in rest), pulled_back(sought), strict=True)
    return [g if layout is None or g is None else layout.joined(g) for layout, own in found for g in own]


# -- in compiled code: one operation, which no compiler looks into -----------------------------------------------------


def _known(
    numbers: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]
) -> tuple[Terms, list[tuple[Tensor, ...]]]:
    """Return the penalty of posteriors that are known by number, and the tensors of each."""
    terms, rest = Terms([known_by(p) for p in numbers], scale, strength, floor), iter(tensors)
    return terms, [tuple(next(rest) for _ in _tensors(p)) for p in terms.posteriors]


@torch.library.custom_op(
    "bayesify::penalty",
    mutates_args=(),
    schema="(Tensor[] posteriors, float scale, float strength, float floor, Tensor[] tensors) -> Tensor",
)
def _penalty(posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]) -> Tensor:
    """Return the penalty of one model."""
    terms, own = _known(posteriors, scale, strength, floor, tensors)
    with torch.no_grad(), _holding(terms, own) as means:
        return _combined(_numbers(terms, means), terms).to(wide(tensors[0]))


@_penalty.register_fake
def _(posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=wide(tensors[0]))


@torch.library.custom_op(
    "bayesify::penalty_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] posteriors, float scale, float strength, float floor, Tensor[] tensors) -> Tensor[]",
)
def _penalty_gradients(
    grad: Tensor, posteriors: list[Tensor], scale: float, strength: float, floor: float, tensors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of the penalty of one model."""
    terms, own = _known(posteriors, scale, strength, floor, tensors)
    with torch.no_grad(), _holding(terms, own) as means:
        factors = _factors(terms, grad, _numbers(terms, means))
        found = _of_rest(list(zip(terms.posteriors, means, strict=True)), factors)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@_penalty_gradients.register_fake
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
    return [None] * ctx.count, None, None, None, _penalty_gradients(grad, posteriors, *ctx.numbers, tensors)


_penalty.register_autograd(_backward, setup_context=_keep)


# -- the noise of a regression -----------------------------------------------------------------------------------------


class GaussianNoise(nn.Module):
    """Gaussian noise of one variance per output, whose logarithm is a parameter.

    It begins with the mean squared residual of the first batch that it sees.
    """

    begun: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    @property
    def variance(self) -> Tensor:
        """The variance of each output."""
        return self.log_var.detach().exp()

    def forward(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the Gaussian's NLL: 1/2 ((y - f)^2/v + log(2 pi v)), summed over outputs, its mean over examples.

        Args:
            outputs: The model's, (N,) or (N, ...).
            targets: Of the same shape. Without any, the outputs are returned: an `nn.Sequential` calls all its parts.
        """
        if targets is None:
            return outputs
        count = self.log_var.numel()
        if outputs.shape != targets.shape or outputs.numel() != len(outputs) * count:
            raise ValueError(
                f"outputs and targets must have one shape with {count} values per example, got {tuple(outputs.shape)} "
                f"and {tuple(targets.shape)}; nothing is broadcast: use squeeze or view, or noise(model, outputs=)"
            )
        squares = (targets - outputs).square().reshape(len(outputs), count)
        if not bool(self.begun) and torch.is_grad_enabled() and len(squares):
            with torch.no_grad():
                self.log_var.copy_(squares.mean(0).clamp_min(torch.finfo(self.log_var.dtype).tiny).log())
                self.begun.fill_(True)
        each = squares * torch.exp(-self.log_var) + self.log_var + math.log(2 * math.pi)
        return each.sum(1).mean() / 2


def noise(model: nn.Module, outputs: int = 1) -> GaussianNoise:
    """Give a regression model noise that is learned in training, and return its loss.

    The noise is a part of the model: `param_groups` has it, `save` and `load` keep it, `predict` and `fit_laplace` use
    it, and `unbayesify` removes it.

    Args:
        model: A bayesified model.
        outputs: How many outputs an example has, each of which gets a variance.

    Returns:
        A module: call it with outputs and targets for the mean Gaussian NLL. Of a model that has noise already, that.

    Raises:
        ValueError: The model is not bayesified, or more than one part of it is; outputs is no positive integer.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, methods, penalty
        >>> model = bayesify(torch.nn.Linear(3, 1), "vi")
        >>> noise = methods.noise(model)
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> loss = noise(model(x), y) + penalty(model, num_data=20)
    """
    roots = [scope.root for scope in scopes_of(model)]
    if len(roots) != 1 or roots[0] is None:
        raise ValueError(f"{len(roots)} parts of the model were bayesified on their own; give noise to one of them")
    if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
        raise ValueError(f"outputs must be a positive integer, got {outputs!r}")
    found = roots[0]._modules.get(NOISE)
    if found is None:
        first = next(roots[0].parameters())
        found = GaussianNoise(outputs).to(first.device, state_dtype(first))
        roots[0].add_module(NOISE, found)
    if not isinstance(found, GaussianNoise) or found.log_var.numel() != outputs:
        raise ValueError(f"the model has noise already, not for {outputs} outputs; unbayesify(model) removes it")
    return found


def noise_in(model: nn.Module) -> GaussianNoise | None:
    """Return the noise that was learned beside a model, or None."""
    return next((module for module in model.modules() if isinstance(module, GaussianNoise)), None)
