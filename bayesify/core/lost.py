"""What a bayesified model loses without a word: modules that were replaced, and writes to a sample.

Both are looked for where it costs next to nothing, and told once.
"""

import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from bayesify.core.quadratics import wide
from bayesify.core.stored import Stored

if TYPE_CHECKING:
    from bayesify.core.posterior import Posterior
    from bayesify.core.reading import Scope

OURS = (ParametrizationList, Stored)  # no modules of the model's own
ROUNDING = 1e-6  # of a norm, on other numbers of threads


class Link(NamedTuple):
    """A place in the model's tree of modules."""

    children: dict[str, nn.Module | None]
    name: str
    child: nn.Module


class Tree:
    """The modules of a model as they were, to see whether one was replaced.

    A glance is a lookup for each link; only where one is broken the tree is walked again.
    """

    def __init__(self, root: nn.Module) -> None:
        self.links = [
            Link(module._modules, name, child)
            for module in root.modules()
            for name, child in module._modules.items()
            if child is not None and not isinstance(child, OURS) and not isinstance(module, OURS)
        ]

    def unchanged(self) -> bool:
        """Tell whether every module is where it was."""
        return all(children.get(name) is child for children, name, child in self.links)


def look_for_replaced(scope: "Scope") -> None:
    """Warn, once, where a forward finds that a module with posteriors has been replaced."""
    if scope.root is None or "replaced" in scope.told or (scope.tree is not None and scope.tree.unchanged()):
        return
    scope.tree = Tree(scope.root)
    warn_of_replaced(scope, scope.root.modules())


def warn_of_replaced(scope: "Scope", modules: Iterable[nn.Module]) -> None:
    """Warn, once, where a module with posteriors is not among those that the model has now."""
    if "replaced" not in scope.told and (why := replaced(scope, modules)):
        _tell(scope, "replaced", why)


def replaced(scope: "Scope", modules: Iterable[nn.Module]) -> str | None:
    """Say what is wrong where a module was replaced after `bayesify`; `modules` are those that the model has now."""
    present = set(map(id, modules))
    if id(scope.root) not in present:
        return None  # a part of the model
    gone = [s for s in scope.sites if id(s.module) not in present]
    if not gone:
        return None
    kept: Any = gone[0].module.parametrizations
    return (
        f"{kept[gone[0].attribute][0].name!r} was made Bayesian, and its module is no longer in the model; "
        "what has taken its place is not Bayesian. Replace modules first: unbayesify(model), replace, bayesify"
    )


class BareRead(NamedTuple):
    """A theta that was read outside of a forward, and what it was then: a write to it would be lost.

    `.data` hides a write from the version, so that the norm is looked at too.
    """

    posterior: "Posterior"
    theta: Tensor
    version: int
    norm: Tensor

    @classmethod
    def of(cls, posterior: "Posterior", theta: Tensor) -> "BareRead":
        """Remember a read."""
        return cls(posterior, theta.detach(), theta._version, _norm(theta))

    def written(self) -> bool:
        """Tell whether the theta is another now."""
        same_version = self.theta._version == self.version
        return not (same_version and torch.allclose(_norm(self.theta), self.norm, rtol=ROUNDING, equal_nan=True))


def _norm(theta: Tensor) -> Tensor:
    """Return what hardly any write leaves as it is."""
    norm: Tensor = torch.linalg.vector_norm(theta.detach(), dtype=wide(theta))
    return norm


def look_for_written(scope: "Scope", bare: BareRead | None) -> None:
    """Warn, once, where a weight that was read outside of a forward has been written to: it was a sample."""
    if bare is None or "write" in scope.told or not bare.written():
        return
    _tell(
        scope,
        "write",
        f"{bare.posterior.name!r} was written to, but what was read is a sample or a moment, not the model's own "
        "weight, and the write is lost; initialize before bayesify, or write to the posterior's `original` "
        "(bayesify.named_posteriors)",
    )


def _tell(scope: "Scope", what: str, why: str) -> None:
    """Warn, and remember it; the warning points at the line that is neither ours nor torch's."""
    scope.told.add(what)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("bayesify", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(why, stacklevel=level)
