"""The penalty: what a method adds to the loss, with its gradient folded into that of the samples."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.compile import energy_of
from bayesify.core.distributed import Layout, part, part_of
from bayesify.core.posterior import Posterior, autograd_pullback, holding
from bayesify.core.quadratics import wide
from bayesify.core.wrap import check_num_data, scopes_of
from bayesify.engine.fusion import transformed


def penalty(model: nn.Module, num_data: float) -> Tensor:
    """Return what is added to the mean minibatch loss: the prior's term of the method, over the number of data.

    Closed form, differentiable. Its gradient is computed together with that of the samples of the last forward, which
    costs less than a pass of its own.

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
    by_hand = not transformed()
    terms: list[Term] = []
    tensors: list[tuple[Tensor, ...]] = []
    sharded: dict[Layout, Tensor] = {}
    for scope in scopes:
        scope.warned = True  # of a missing penalty: no need to
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            scope.warn_in_eval()
        scale = scope.penalty_scale = scope.method.scale(num_data)
        for posterior in scope.posteriors:
            layout, own = posterior.layout, part_of(posterior)
            handle = scope.take_handle(posterior) if by_hand and layout is None else None
            traced = scope.take_traced_handle(posterior) if torch.compiler.is_compiling() else None
            if posterior in inside and not posterior.flat:
                if traced is not None:
                    total = total + energy_of(posterior, scale, traced)
                    continue
                with torch.set_grad_enabled(torch.is_grad_enabled() and not by_hand):
                    energy = own.energy(own.original, scale).to(total)
                if layout is None:
                    total = total + energy
                else:
                    sharded[layout.group] = sharded.get(layout.group, torch.zeros_like(total)) + energy
                terms.append(Term(posterior, scale, handle is not None))
                tensors.append(_tensors(posterior) if handle is None else (handle,))
    for layout, sums in sharded.items():
        total = total + layout.summed(sums)
    value = total.to(torch.promote_types(first.dtype, torch.float32))
    if not by_hand:
        return value  # torch.func, forward mode and compilers differentiate the operations themselves
    result: Tensor = Penalty.apply(value, terms, *(t for inputs in tensors for t in inputs))
    return result


def _tensors(posterior: Posterior) -> tuple[Tensor, ...]:
    """Return what a posterior's energy is a function of; its parts where it is sharded, be it whole now or not."""
    if posterior.layout is None:
        return (posterior.original, *posterior.learnable())
    names = {id(p): name for name, p in posterior._parameters.items()}
    return tuple(posterior._shards[n] for n in ("original", *(names[id(p)] for p in posterior.learnable())))


class Term(NamedTuple):
    """One posterior's part of the penalty; by its energy handle, or directly through the tensors that it is made of."""

    posterior: Posterior
    scale: float
    by_handle: bool


class Penalty(torch.autograd.Function):
    """The autograd node of the penalty: a known value, whose gradient the posteriors know in closed form."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, terms: list[Term], *tensors: Tensor) -> Tensor:
        """Return the value."""
        ctx.terms, ctx.tensors = terms, tensors
        ctx.versions = [t._version for t in tensors]
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send each posterior its coefficient, or return the gradients with respect to its tensors as they were."""
        out: list[Tensor | None] = []
        for posterior, scale, by_handle in ctx.terms:
            size = 1 if by_handle else 1 + len(posterior.learnable())
            own = slice(len(out), len(out) + size)
            mean, *learned = ctx.tensors[own]
            coef = grad.to(mean.device, wide(mean)) * scale
            if by_handle:
                out.append(coef)
                continue
            if [t._version for t in ctx.tensors[own]] != ctx.versions[own]:
                raise RuntimeError(
                    f"the posterior of {posterior.name!r} was modified between penalty and its backward pass; call "
                    "optimizer.step() (or load) only after backward()"
                )
            if posterior.layout is not None:
                found = part_of(posterior).pullback(part(mean), 0, None, coef)
                out += [None if g is None else posterior.layout.joined(g) for g in found]
                continue
            with holding(posterior, tuple(learned)):
                if torch.is_grad_enabled():
                    out += autograd_pullback(posterior, mean, 0, None, coef, create_graph=True)
                else:
                    out += posterior.pullback(mean, 0, None, coef)
        return (None, None, *out)
