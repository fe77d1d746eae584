"""Make a mixture of models, and take it apart."""

from collections.abc import Iterable

from torch import nn

from bayesify.core.checkpoint import root_of
from bayesify.core.mixture import Mixture, mixture_in, posteriors_in
from bayesify.core.posterior import Posterior
from bayesify.core.selection import plain_tensors
from bayesify.core.wrap import check_module


def mix(models: Iterable[nn.Module]) -> Mixture:
    """Make one model of several, whose posterior is the mixture of theirs with equal weights.

    A draw picks a member and draws from it, and `predict` spreads its samples evenly. Five "vanilla" models are a deep
    ensemble; any methods may be mixed, and the members may have made different parameters Bayesian. In mean mode the
    mixture is its first member, since averaged weights of different models are no model.

    Nothing is copied: the members are the models themselves, which stay as usable as they were. Frozen weights, tables
    and prior means that are equal are kept in memory once, so that whoever writes to them writes to all. The statistics
    of normalization layers belong to their member.

    Args:
        models: Bayesified models of one architecture.

    Returns:
        A module that calls like its members.

    Raises:
        ValueError: There are none, or they are not of one architecture, or not bayesified, or mixtures themselves.
        TypeError: One of them is not a module.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, mix, predict
        >>> ensemble = mix(bayesify(torch.nn.Linear(3, 2), "vanilla") for _ in range(5))
        >>> predict(ensemble, torch.ones(4, 3))
        Predictive(4 examples, 2 classes, 5 samples)
    """
    if isinstance(models, nn.Module):
        raise TypeError(f"mix takes a list of models, got one {type(models).__name__}; pass [model, ...]")
    members = list(models)
    if not members:
        raise ValueError("there is nothing to mix; pass a list of bayesified models")
    for i, member in enumerate(members):
        check_module(member)
        if any(isinstance(m, Mixture) for m in member.modules()):
            raise ValueError(f"models[{i}] is a mixture itself; mix its members: [*components(mixture), ...]")
        if any(p.particles for p in posteriors_in(member)):
            raise ValueError(f"models[{i}] is an ensemble itself; mix its members: [*components(models[{i}]), ...]")
        if not any(isinstance(m, Posterior) for m in member.modules()):
            raise ValueError(f"models[{i}] has no posterior; a point is one too: bayesify(model, 'vanilla')")
        twin = next((k for k, other in enumerate(members[:i]) if other is member), None)
        if twin is not None:
            raise ValueError(f"models[{i}] is models[{twin}]; a member counts once, pass copies to count it twice")
    expected = _shapes(members[0])
    for i, member in enumerate(members):
        found = _shapes(member)
        if found != expected:
            name = next(n for n in (*expected, *found) if found.get(n) != expected.get(n))
            raise ValueError(
                f"models[{i}] is of another architecture than models[0]: {name!r} has shape {found.get(name)}, not "
                f"{expected.get(name)}; mix models that were built alike"
            )
    return Mixture(members)


def components(model: nn.Module) -> list[nn.Module]:
    """Return the members of a mixture, the very models that were mixed; of another model, itself alone.

    Of a model of method "ensemble" each member is a copy, of method "vanilla", whose frozen weights are in memory once.

    Args:
        model: A model, or a module that contains a mixture.

    Returns:
        The members, in their order.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, components, mix
        >>> models = [bayesify(torch.nn.Linear(3, 2), "vanilla") for _ in range(2)]
        >>> components(mix(models)) == models, components(models[0]) == [models[0]]
        (True, True)
    """
    check_module(model)
    mixture = mixture_in(model)
    if mixture is not None:
        return list(mixture.members)
    if any(p.particles for p in posteriors_in(model)):
        root, scope = root_of(model)
        return scope.method.split(root, scope)
    return [model]


def _shapes(member: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters and lasting buffers, by plain name."""
    root, scope = root_of(member)
    names = {id(p.original): p.name for p in scope.posteriors}
    return {names.get(id(tensor), name): tuple(tensor.shape) for name, tensor in plain_tensors(root)}
