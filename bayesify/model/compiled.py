"""Seeds in compiled code: an operation that no compiler looks into, and that asks the scope when it runs."""

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from bayesify.engine import noise as noises


class Seeding(Protocol):
    """Who knows the seed of a forward (`bayesify.model.scopes.Scope`)."""

    def compiled_seed(self, *, whole: bool) -> int:
        """Return the seed of a training forward; `whole` tells the model's from that of a part of it."""


_numbers = itertools.count()
_known: "weakref.WeakValueDictionary[int, Seeding]" = weakref.WeakValueDictionary()


def enroll(scope: Seeding) -> Tensor:
    """Return a number for a scope, as a tensor: equal models then take one compiled graph."""
    number = next(_numbers)
    _known[number] = scope
    return torch.tensor(number)


@torch.library.custom_op("bayesify::training_seed", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def training_seed_of(scope: Tensor, whole: bool) -> Tensor:
    """Take the seed of a training forward when compiled code runs, as eager code does."""
    return torch.tensor(noises.signed(_known[int(scope)].compiled_seed(whole=whole)))


@training_seed_of.register_fake
def _(scope: Tensor, whole: bool) -> Tensor:
    return torch.empty((), dtype=torch.int64)
