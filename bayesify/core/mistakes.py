"""Mistakes that a model shows, which `predict`, `save` and `summary` name in one line each, once per model."""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bayesify.core.distributed import part
from bayesify.core.posterior import Posterior
from bayesify.core.quadratics import wide
from bayesify.core.reading import Scope


def mistakes(scope: Scope, *, spread: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the kind of each mistake that a model shows, and what to do about it.

    Args:
        scope: The model's.
        spread: Whether the spread is of interest, as for samples.
    """
    posteriors, root = scope.posteriors, scope.root
    if (name := _not_finite(scope)) is not None:
        yield (
            "finite",
            (
                f"the weights are not finite, {name!r} first: training diverged; lower the learning rate and train "
                "again from finite weights"
            ),
        )
        return
    if spread and posteriors and all(p.untrained for p in posteriors):
        yield (
            "spread",
            (
                f"the spread of the posterior was never trained: {posteriors[0].untrained}, so samples hardly "
                "differ from the mean, or say nothing about the data"
            ),
        )
    if not scope.penalized and any(_trained(p, scope) for p in posteriors):
        yield (
            "penalty",
            (
                "no penalty was ever computed, though the model was trained: add bayesify.penalty(model, num_data) to "
                "the loss (with Hugging Face's Trainer use bayesify.integrations.huggingface.BayesTrainer, which does)"
            ),
        )
    params = {} if root is None else dict(root.named_parameters())
    if thawed := [name for name in scope.frozen if name in params and params[name].requires_grad]:
        yield (
            "thawed",
            (
                f"{thawed[0]!r} and {len(thawed) - 1} others were frozen when bayesify was called and train now: they "
                "have no posterior; unfreeze first, or pass include= to bayesify"
            ),
        )


def warn_of_mistakes(scopes: Sequence[Scope], *, spread: bool = True, stacklevel: int = 3) -> None:
    """Warn of the mistakes that models show, of each kind once per model."""
    for scope in scopes:
        for kind, text in mistakes(scope, spread=spread):
            if kind not in scope.told:
                scope.told.add(kind)
                warnings.warn(text, stacklevel=stacklevel)


def check_averaged(model: nn.Module) -> None:
    """Raise where a posterior's state has not followed an average of the parameters.

    Raises:
        ValueError: The model is inside an `AveragedModel`, and its spread is what training collects.
    """
    for averaged in (m for m in model.modules() if isinstance(m, AveragedModel)):
        for scope in {p.reader for p in averaged.modules() if isinstance(p, Posterior) and isinstance(p.reader, Scope)}:
            if scope.method.optimizer or scope.method.stages is not None:
                raise ValueError(
                    f"AveragedModel averages parameters alone: what method {scope.method.name!r} collects in training "
                    "stays what it was when the average began; average a model of another method ('vi', 'mc_dropout', "
                    "or 'la', fitted after), use 'swag', which is an average itself, or predict with the model"
                )


def _trained(posterior: Posterior, scope: Scope) -> bool:
    """Return whether the mean has left the prior mean that it started at."""
    mean, center = part(posterior.original), part(posterior.prior_center)
    return scope.starts_at_prior and center.shape == mean.shape and not torch.equal(mean, center)


def _not_finite(scope: Scope) -> str | None:
    """Return the plain name of the first parameter that is not finite."""
    tensors = [(p.name, part(t)) for p in scope.posteriors for t in (p.original, *p.learnable())]
    others = () if scope.root is None else scope.root.named_parameters()
    tensors += [(name, part(t)) for name, t in others if "parametrizations." not in name]
    sums = [t.sum(dtype=wide(t)) for _, t in tensors]
    if bool(torch.stack([s.to(sums[0]) for s in sums]).isfinite().all()):
        return None
    return next((name for name, t in tensors if not bool(t.isfinite().all())), None)
