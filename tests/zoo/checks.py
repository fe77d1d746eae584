"""What must hold on any model; the first thing that does not is the verdict.

Every comparison is of one model with itself, under the same seed and with its buffers put back, so that dropout and
batch statistics are the same on both sides and only the weights can differ.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import bayesify, load, named_posteriors, sample, save, unbayesify
from bayesify.engine.noise import global_seed

SPREAD = 0.02  # large beside freshly initialized weights, small enough that deep nets do not overflow
NO_SPREAD = -1e4  # softplus of it is exactly zero
GRADIENT_TOLERANCE = 1e-3
TINY = 1e-30  # a spread of zero is 1e-38 in compiled loops


class PlainModelError(Exception):
    """The plain model does not run here, whatever bayesify does."""


class Violation(Exception):  # noqa: N818
    """Something that bayesify promises does not hold."""


@dataclass
class Case:
    """One model of the zoo.

    Attributes:
        model: The name of the model.
        build: Makes the model; called twice, the second time to load into.
        inputs: The arguments of its forward, positional and by name, for a model and its training flag.
    """

    model: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module, bool], tuple[tuple[Any, ...], dict[str, Any]]]


def check(case: Case) -> int:
    """Check everything on one model.

    Returns:
        The number of its parameters.

    Raises:
        PlainModelError: The plain model cannot be built or run.
        Violation: Something does not hold.
    """
    model, plain = _plain(case)
    shape = _shape(model)
    bayesify(model, "vi", prior_sig=1.0, init_sig=SPREAD)
    if _differ(plain.eval, _eval(case, model)):
        _check_reproducible(case)
        raise Violation("the output in eval mode is another one after bayesify")
    _check_training(case, model, plain)
    with torch.no_grad(), sample(model, seed=7):
        drawn = _eval(case, model)
        thetas = [(p.original, p(p.original).clone()) for _, p in named_posteriors(model)]
    if not _differ(drawn, plain.eval):
        raise Violation("a draw in eval mode leaves the output unchanged")
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        unbayesify(model)
        if _shape(model) != shape:
            raise Violation("unbayesify leaves other modules, parameters, names or hooks behind")
        _same("eval output after unbayesify", plain.eval, _eval(case, model))
        with torch.no_grad():
            for parameter, theta in thetas:
                parameter.copy_(theta)
        model.train()  # forgets what the model itself keeps in eval mode (LeViT's attention biases)
        model.requires_grad_(False)  # as a draw under no_grad; F.linear may round in another way for a trainable weight
        _same("output of a draw, against the plain model with that draw as its weights", _eval(case, model), drawn)
        count = sum(p.numel() for p in model.parameters())
        del model, thetas, parameter, theta  # a large model is not in memory twice
        _check_loading(case, folder, plain.eval, drawn)
    return count


@dataclass
class _Plain:
    """What the plain model gives: outputs in both modes, and the fingerprint of each gradient."""

    eval: list[Tensor]
    train: list[Tensor]
    grads: dict[int, Tensor]


def _plain(case: Case) -> tuple[nn.Module, _Plain]:
    """Build the plain model and run it; what fails here is no fault of bayesify."""
    try:
        torch.manual_seed(0)
        model = case.build().eval()
        outputs = _Plain(_eval(case, model), _train(case, model, draws=False), {})
    except Exception as error:
        raise PlainModelError(f"{type(error).__name__}: {error}") from error
    outputs.grads = {id(p): _fingerprint(p.grad) for p in model.parameters() if p.grad is not None}
    if not outputs.grads:
        raise PlainModelError("no output has a gradient for any weight")
    return model, outputs


def _check_reproducible(case: Case) -> None:
    """Raise if the plain model gives another output the second time."""
    model = case.build().eval()
    if _differ(_eval(case, model), _eval(case, model)):
        raise PlainModelError("two passes of the plain model in eval mode, with the same seed, differ")


def _check_state(case: Case) -> None:
    """Raise if the plain model's state dict does not hold all that its output depends on."""
    models = [case.build().eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    if _differ(*(_eval(case, model) for model in models)):
        raise PlainModelError("a plain model that loads the state dict of another gives another output")


def _check_training(case: Case, model: nn.Module, plain: _Plain) -> None:
    """Check sampling and gradients in train mode, with large spread and with none."""
    spread = next(p.rho.flatten()[0].item() for _, p in named_posteriors(model))
    noisy = _train(case, model, draws=True)
    _set_spread(model, NO_SPREAD)
    quiet = _train(case, model, draws=True)
    if not _differ(noisy, quiet):
        raise Violation("a draw in train mode leaves the output unchanged")
    _same("train output with zero spread", plain.train, quiet)
    for name, posterior in named_posteriors(model):  # with spread, a router may choose other experts
        expected = id(posterior.original) in plain.grads
        for what, parameter in (("mean", posterior.original), ("spread", posterior.rho)):
            if (parameter.grad is not None) != expected:
                has = "has a" if expected else "has no"
                raise Violation(f"the plain model {has} gradient for {name!r}, unlike the {what} of its posterior")
    for name, posterior in named_posteriors(model):
        if id(posterior.original) in plain.grads:
            found, wanted = _fingerprint(posterior.original.grad), plain.grads[id(posterior.original)]
            if not torch.allclose(
                found, wanted, rtol=0, atol=GRADIENT_TOLERANCE * float(wanted[0]) + TINY, equal_nan=True
            ):
                raise Violation(f"the gradient of {name!r} with zero spread is not the plain model's")
    _set_spread(model, spread)
    model.zero_grad(set_to_none=True)


def _set_spread(model: nn.Module, rho: float) -> None:
    with torch.no_grad():
        for _, posterior in named_posteriors(model):
            posterior.rho.fill_(rho)


def _check_loading(case: Case, folder: str, mean: list[Tensor], drawn: list[Tensor]) -> None:
    """Check that a saved posterior gives the same model again."""
    torch.manual_seed(1)
    other = load(case.build().eval(), folder)
    loaded = _eval(case, other)
    if _differ(mean, loaded):
        _check_state(case)
    _same("eval output after save and load", mean, loaded)
    with sample(other, seed=7):
        _same("a draw after save and load", drawn, _eval(case, other))


def _shape(model: nn.Module) -> list[Any]:
    """Return what unbayesify has to restore: classes, parameters by name, order and identity, hooks."""
    modules = [
        (n, type(m), len(m._forward_hooks), len(m._forward_pre_hooks), sorted(k for k in vars(m) if k[0] != "_"))
        for n, m in model.named_modules()
    ]
    return [modules, [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]]


def _eval(case: Case, model: nn.Module) -> list[Tensor]:
    """Return the outputs in eval mode."""
    model.eval()
    with _buffers_kept(model), torch.no_grad():
        args, kwargs = case.inputs(model, False)
        _seed()
        return [t.clone() for t in tensors(model(*args, **kwargs))]


def _train(case: Case, model: nn.Module, *, draws: bool) -> list[Tensor]:
    """Return the outputs in train mode that have gradients, after their backward pass."""
    model.train()
    model.zero_grad(set_to_none=True)
    with _buffers_kept(model):
        args, kwargs = case.inputs(model, True)
        _seed()
        if not draws:
            global_seed()  # what a draw takes from the generator, so that dropout is the same with and without
        outputs = [t for t in tensors(model(*args, **kwargs)) if t.requires_grad]
        if outputs:
            torch.stack([t.float().square().mean() for t in outputs]).sum().backward()
    return [t.detach().clone() for t in outputs]


def _seed() -> None:
    """Make the randomness of a forward pass the same each time (Transformers masks audio by numpy)."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


class _buffers_kept:  # noqa: N801
    """Put the buffers back afterwards (batch statistics, counters)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.saved = {id(b): b.detach().clone() for b in self.model.buffers()}

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for buffer in self.model.buffers():
                if id(buffer) in self.saved and buffer.shape == self.saved[id(buffer)].shape:
                    buffer.copy_(self.saved[id(buffer)])


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of any output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from tensors(value)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from tensors(getattr(output, field.name))


def _fingerprint(grad: Tensor | None) -> Tensor:
    """Return three numbers that stand for a gradient: its norm, its sum and the sum of every third element, scaled."""
    assert grad is not None
    flat = (grad.to_dense() if grad.is_sparse else grad).detach().flatten()
    return torch.stack([flat.norm(), flat.sum() / len(flat) ** 0.5, flat[::3].sum() / len(flat) ** 0.5]).double()


def _same(what: str, wanted: list[Tensor], found: list[Tensor]) -> None:
    """Raise unless two outputs are equal, bit for bit."""
    if _differ(wanted, found):
        gaps = [
            float((a - b).abs().max()) for a, b in zip(wanted, found, strict=False) if a.shape == b.shape and a.numel()
        ]
        raise Violation(f"{what} is not the same (largest difference {max(gaps, default=float('nan')):.2g})")


def _differ(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two outputs differ anywhere; NaN equals NaN."""
    if [t.shape for t in some] != [t.shape for t in others]:
        return True
    return any(not bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in zip(some, others, strict=True))
