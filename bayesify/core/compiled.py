"""What compiled code leaves to operations that no compiler looks into.

The seed of a forward comes from its scope when the code runs. In a CPU's memory a draw is one operation, and so is its
gradient: the loops of eager mode, which no compiler finds by itself. Scopes and posteriors are known there by numbers
that are tensors, so that one graph serves equal models, equal blocks and all draws.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bayesify.core.ranks import draw_seeds
from bayesify.core.stored import holding
from bayesify.engine import noise as noises
from bayesify.engine.dispatch import functional

Posterior = Any  # bayesify.core.posterior.Posterior, which imports this file

_counter = itertools.count()
_numbered: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def numbered(known: Any) -> Tensor:
    """Return a new number for a scope or a posterior, by which `known_by` finds it."""
    number = next(_counter)
    _numbered[number] = known
    return torch.tensor(number)


def known_by(number: Tensor) -> Any:
    """Return the scope or the posterior of a number."""
    return _numbered[int(number)]


def graph() -> str:
    """Return the name of the graph that a compiler is making; inside of its subgraphs another one each time.

    What was made in the same graph the compiler knows, and it costs nothing to hand it from one place to another.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        main = InstructionTranslator.current_tx().output.current_tracer.parent is None
    except AttributeError:  # not torch.compile, but torch.export, which runs the code itself
        main = False
    return str(torch._guards.CompileContext.current_compile_id() if main else next(_counter))


graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the public decorator would import the compiler


def _seeding(name: str, arguments: str, seed: Callable[..., int]) -> Any:
    """Define an operation that returns a seed when compiled code runs."""
    # Without the first tag a compiler might merge the seeds of two forwards.
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    torch.library.define(f"bayesify::{name}", f"({arguments}) -> Tensor", tags=tags)
    torch.library.impl(f"bayesify::{name}", "default")(lambda *given: torch.tensor(noises.signed(seed(*given))))
    torch.library.register_fake(f"bayesify::{name}")(lambda *_: torch.empty((), dtype=torch.int64))
    return getattr(torch.ops.bayesify, name).default


training_seed_of = _seeding(
    "training_seed", "Tensor scope, bool whole", lambda scope, whole: known_by(scope).compiled_seed(whole)
)
sample_seed = _seeding("sample_seed", "SymInt? seed", lambda seed: draw_seeds(1, seed)[0])


def in_one_operation(posterior: Posterior, original: Tensor) -> bool:
    """Return whether the loops of eager mode can draw a posterior, and are better at it than what a compiler makes.

    Natural steps of a spread, which are no gradient of what a compiler sees, need them.
    """

    def plain(tensor: Tensor) -> bool:
        exact = tensor.dtype == original.dtype and tensor.dtype in (torch.float32, torch.float64)
        return exact and tensor.device.type == "cpu" and tensor.is_contiguous()

    return (
        posterior.pulls_by_hand
        and posterior.layout is None
        and not noises.is_exporting()
        and not functional()
        and (posterior.natural or all(plain(t) for t in (original, *posterior.learnable())))
    )


@torch.library.custom_op(
    "bayesify::draw", mutates_args=(), schema="(Tensor posterior, Tensor seed, Tensor[] tensors) -> Tensor"
)
def draw(posterior: Tensor, seed: Tensor, tensors: list[Tensor]) -> Tensor:
    """Draw theta, of the mean and what else is learnable (see `Sampled`)."""
    own, (mean, *learned) = known_by(posterior), tensors
    with torch.no_grad(), holding(own, tuple(learned)):
        theta: Tensor = own.drawn(mean, int(seed))
    return theta.clone() if theta is mean else theta.contiguous()


@draw.register_fake
def _(posterior: Tensor, seed: Tensor, tensors: list[Tensor]) -> Tensor:
    return torch.empty_like(tensors[0])


@torch.library.custom_op(
    "bayesify::pull",
    mutates_args=(),
    schema="(Tensor posterior, Tensor seed, Tensor g, Tensor[] tensors) -> Tensor[]",
)
def pull(posterior: Tensor, seed: Tensor, g: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Pull the gradient of theta back to the mean and what else is learnable."""
    own, (mean, *learned) = known_by(posterior), tensors
    with torch.no_grad(), holding(own, tuple(learned)):
        found = own.calibrated_pullback(mean, int(seed), g)
    return [
        torch.zeros_like(t) if f is None else f.clone(memory_format=torch.contiguous_format) if f is g else f
        for t, f in zip(tensors, found, strict=True)
    ]


@pull.register_fake
def _(posterior: Tensor, seed: Tensor, g: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    number, seed, tensors = inputs
    ctx.save_for_backward(number, seed, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[None, None, list[Tensor]]:
    number, seed, *tensors = ctx.saved_tensors
    return None, None, pull(number, seed, grad, tensors)


draw.register_autograd(_backward, setup_context=_keep)
