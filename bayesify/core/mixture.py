"""One model whose posterior is the mixture of its members' posteriors.

A forward is that of one member: the one that the block around it names, or the first. The members are the models that
were mixed, not copies of them; equal frozen weights and tables are in memory once.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bayesify.core.distributed import is_sharded
from bayesify.core.modes import block_of
from bayesify.core.posterior import Posterior
from bayesify.core.scopes import check_module, root_of
from bayesify.core.selection import plain_tensors
from bayesify.core.stored import CENTER

M = TypeVar("M", bound=nn.Module)


class Mixture(nn.Module):
    """Several bayesified models of one architecture, of which every forward runs one.

    In eval mode and under `mean` this is the first member; under `sample` the draw picks one, and `samples` takes them
    in turn. A mixture is not trained itself: its members are.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.training = any(member.training for member in members)
        self.scores: dict[str, float] = {}  # of an evaluation, for the model card
        if hasattr(members[0], "config"):
            self.config = members[0].config  # Hugging Face's, which tells how to call the model
        self.share()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the member that the block around the forward names, or the first."""
        block = next((block_of(p.reader) for p in posteriors_in(self)), None)
        if block is not None:
            return self.member(block.mode.member)(*args, **kwargs)
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "a mixture is run inside a backward pass, which does not say which member is meant; keep the mean "
                "or sample block open until backward() is done, or checkpoint parts of the members"
            )
        if self.training and torch.is_grad_enabled():
            raise RuntimeError(
                "a mixture is not trained as a whole; train its members, bayesify.components(model), one by one, or "
                "call model.eval() for predictions"
            )
        return self.members[0](*args, **kwargs)

    def member(self, number: int) -> nn.Module:
        """Return a member by its number, modulo how many there are."""
        return self.members[number % len(self.members)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Mixture":
        """Move or cast the members, and let them share again what they shared before."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.share()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mixture":
        """Copy the members; torch copies every parameter, so that the copies have to share again."""
        copied = Mixture.__new__(Mixture)
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied.share()
        return copied

    def share(self) -> None:
        """Keep equal frozen weights, tables and prior means of the members in memory once."""
        known: dict[str, list[Tensor]] = {}
        for member in self.members:
            for name, owner, key, tensor in _sharable(member):
                twins = known.setdefault(name, [])
                twin = next((t for t in twins if _same(t, tensor)), None)
                if twin is None:
                    twins.append(tensor)
                elif not isinstance(tensor, nn.Parameter):
                    setattr(owner, key, twin)
                else:  # the parameter stays the object that it was: optimizers and ties know it
                    tensor.data = twin.data


def shared_copy(model: M, *, apart: Collection[int] = ()) -> M:
    """Copy a model whose frozen weights stay in memory once, such as the base of an adapter.

    The copy has parameters of its own, which read the same memory. `apart` are ids of parameters to copy all the same.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and type(p) is nn.Parameter and id(p) not in apart]
    return copy.deepcopy(model, {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen})


def posteriors_in(model: nn.Module) -> Iterator[Posterior]:
    """Yield the posteriors inside a module."""
    return (m for m in model.modules() if isinstance(m, Posterior) and m.reader is not None)


def mixture_in(model: nn.Module) -> Mixture | None:
    """Return the mixture inside a module, or None; a ValueError if there are several."""
    found = [m for m in model.modules() if isinstance(m, Mixture)]
    if len(found) > 1:
        raise ValueError(f"the model holds {len(found)} mixtures; pass one of them")
    return found[0] if found else None


def member_count(model: nn.Module) -> int:
    """Return how many members the largest mixture inside a module has; 1 without one."""
    return max((len(m.members) for m in model.modules() if isinstance(m, Mixture)), default=1)


def member_scopes(model: nn.Module, scopes: Sequence[Any]) -> list[list[Any]]:
    """Return the scopes that a forward of each member reads, of all scopes of a model."""
    mixtures = [m for m in model.modules() if isinstance(m, Mixture)]
    out = []
    for number in range(member_count(model)):
        idle = [m for mixture in mixtures for m in mixture.members if m is not mixture.member(number)]
        resting = {id(p.reader) for member in idle for p in posteriors_in(member)}
        out.append([scope for scope in scopes if id(scope) not in resting])
    return out


def _sharable(member: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (name, module, attribute, tensor) of all that no forward changes: frozen weights, tables, prior means.

    A table is a buffer that no state dict holds, or one of whole numbers. Others may be running statistics, and single
    numbers may count: they belong to their member.
    """
    for path, module in member.named_modules():
        if isinstance(module, Posterior):
            yield f"{path}.{CENTER}", module, CENTER, module.prior_center
            continue
        frozen = {n: p for n, p in module._parameters.items() if p is not None and not p.requires_grad}
        fleeting = set() if "parametrizations." in path else module._non_persistent_buffers_set
        tables = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dim() and (name in fleeting or not buffer.is_floating_point())
        }
        for name, tensor in (*frozen.items(), *tables.items()):
            yield f"{path}.{name}", module, name, tensor


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal in values, type and device, so that they can share memory."""
    alike = (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    if not alike or first.device.type == "meta" or is_sharded(first) or is_sharded(second):
        return False
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


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
        if (twin := next(k for k, other in enumerate(members) if other is member)) != i:
            raise ValueError(f"models[{i}] is models[{twin}]; a member counts once, pass copies to count it twice")
    expected = _shapes(members[0])
    for i, found in enumerate(map(_shapes, members)):
        if differ := [n for n in (*expected, *found) if found.get(n) != expected.get(n)]:
            name = differ[0]
            raise ValueError(
                f"models[{i}] is of another architecture than models[0]: {name!r} has shape {found.get(name)}, not "
                f"{expected.get(name)}; mix models that were built alike"
            )
    return Mixture(members)


def components(model: nn.Module) -> list[nn.Module]:
    """Return the members of a mixture, which are the models that were mixed; for another model, itself alone.

    For method "ensemble" each member is a copy, of method "vanilla", and frozen weights are in memory once.

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
    if (mixture := mixture_in(model)) is not None:
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
