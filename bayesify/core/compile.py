"""What compiled code leaves to operations that no compiler looks into.

The seed of a forward comes from its scope when the code runs. In a CPU's memory a draw is one operation, and so is its
gradient: the loops of eager mode, which no compiler finds by itself. They know scopes and posteriors by numbers that
are tensors, so that one graph serves equal models, equal blocks and all draws.
"""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from bayesify.core.posterior import Posterior, holding
from bayesify.core.ranks import draw_seeds
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import functional


class Seeding(Protocol):
    """Who knows the seed of a forward (`bayesify.core.reading.Scope`)."""

    def compiled_seed(self, *, whole: bool) -> int:
        """Return the seed of a training forward; `whole` tells the model's from that of a part of it."""


_numbers = itertools.count()
_scopes: "weakref.WeakValueDictionary[int, Seeding]" = weakref.WeakValueDictionary()
_posteriors: "weakref.WeakValueDictionary[int, Posterior]" = weakref.WeakValueDictionary()


def posterior_of(number: Tensor) -> Posterior:
    """Return the posterior of a number."""
    return _posteriors[int(number)]


def enroll(scope: Seeding, posteriors: list[Posterior]) -> Tensor:
    """Give numbers to a scope, whose own is returned, and to its posteriors."""
    for posterior in posteriors:
        number = next(_numbers)
        _posteriors[number] = posterior
        posterior._number = torch.tensor(number)
    number = next(_numbers)
    _scopes[number] = scope
    return torch.tensor(number)


def graph() -> str:
    """Return the name of the graph that a compiler is making; inside of its subgraphs another one each time.

    What was made in the same graph the compiler knows, and it costs nothing to hand it from one place to another.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        main = InstructionTranslator.current_tx().output.current_tracer.parent is None
    except AttributeError:  # not torch.compile, but torch.export, which runs the code itself
        main = False
    return str(torch._guards.CompileContext.current_compile_id() if main else next(_numbers))


graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the public decorator would import the compiler


# Without this tag a compiler might merge the seeds of two forwards. `custom_op` of older releases takes no tags.
SEEDED = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)

torch.library.define("bayesify::training_seed", "(Tensor scope, bool whole) -> Tensor", tags=SEEDED)
training_seed_of = torch.ops.bayesify.training_seed.default


@torch.library.impl("bayesify::training_seed", "default")
def _(scope: Tensor, whole: bool) -> Tensor:
    """Take the seed of a training forward when compiled code runs, as eager code does."""
    return torch.tensor(noises.signed(_scopes[int(scope)].compiled_seed(whole=whole)))


@torch.library.register_fake("bayesify::training_seed")  # type: ignore[untyped-decorator]
def _(scope: Tensor, whole: bool) -> Tensor:
    return torch.empty((), dtype=torch.int64)


torch.library.define("bayesify::sample_seed", "(SymInt? seed) -> Tensor", tags=SEEDED)
sample_seed = torch.ops.bayesify.sample_seed.default


@torch.library.impl("bayesify::sample_seed", "default")
def _(seed: int | None) -> Tensor:
    """Find the seed of a `sample` block inside compiled code."""
    return torch.tensor(noises.signed(draw_seeds(1, seed)[0]))


@torch.library.register_fake("bayesify::sample_seed")  # type: ignore[untyped-decorator]
def _(seed: int | None) -> Tensor:
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op("bayesify::part_seed", mutates_args=())
def part_seed(seed: Tensor, i: int) -> Tensor:
    """Find the seed of the i-th of several models."""
    return torch.tensor(noises.signed(noises.mix(int(seed), i)))


@part_seed.register_fake
def _(seed: Tensor, i: int) -> Tensor:
    return torch.empty((), dtype=torch.int64)


# -- draws -------------------------------------------------------------------------------------------------------------


def in_one_operation(posterior: Posterior, original: Tensor) -> bool:
    """Tell whether the loops of eager mode can draw a posterior, and are better at it than what a compiler makes.

    Natural steps of a spread, which are no gradient of what a compiler sees, need them.
    """
    return (
        posterior.pulls_by_hand
        and posterior.layout is None
        and not noises.is_exporting()
        and not functional()
        and (posterior.natural or all(_plain(t, original.dtype) for t in (original, *posterior.learnable())))
    )


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and dtype in (torch.float32, torch.float64)
        and tensor.is_contiguous()
    )


@torch.library.custom_op(
    "bayesify::draw",
    mutates_args=(),
    schema="(Tensor posterior, Tensor seed, Tensor[] tensors) -> Tensor",
)
def draw(posterior: Tensor, seed: Tensor, tensors: list[Tensor]) -> Tensor:
    """Draw theta, of the mean and what else is learnable (see `Sampled`)."""
    own, (mean, *learned) = posterior_of(posterior), tensors
    with torch.no_grad(), holding(own, tuple(learned)):
        theta = own.drawn(mean, int(seed))
    return theta.clone() if theta is mean else theta.contiguous()


@draw.register_fake
def _(posterior: Tensor, seed: Tensor, tensors: list[Tensor]) -> Tensor:
    return torch.empty_like(tensors[0])


@torch.library.custom_op(
    "bayesify::pull",
    mutates_args=(),
    schema="(Tensor posterior, Tensor seed, Tensor grad, Tensor[] tensors) -> Tensor[]",
)
def pull(posterior: Tensor, seed: Tensor, grad: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Pull the gradient of theta back to the mean and what else is learnable."""
    own, (mean, *learned) = posterior_of(posterior), tensors
    with torch.no_grad(), holding(own, tuple(learned)):
        found = own.calibrated_pullback(mean, int(seed), grad)
    return [
        torch.zeros_like(t) if g is None else g.clone(memory_format=torch.contiguous_format) if g is grad else g
        for t, g in zip(tensors, found, strict=True)
    ]


@pull.register_fake
def _(posterior: Tensor, seed: Tensor, grad: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    number, seed, tensors = inputs
    ctx.save_for_backward(number, seed, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, None, list[Tensor]]:
    number, seed, *tensors = ctx.saved_tensors
    return None, None, pull(number, seed, grad, tensors)


draw.register_autograd(_backward, setup_context=_keep)
