"""One pass in mean mode that keeps what a model's last layer saw: all that a closed-form prediction needs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.model.draws import MEAN, Mode
from bayesify.model.modes import override
from bayesify.model.scopes import Scope
from bayesify.prediction.batches import call_model, device_of, logits_of, split_batch, to_device


class NotLastError(Exception):
    """The layer is not the model's last: its outputs are not the model's."""


class Passed(NamedTuple):
    """A batch after its pass: the last layer's inputs, the model's outputs, and the labels."""

    features: Tensor
    output: Tensor
    target: Any


def passed(
    model: nn.Module, scopes: Sequence[Scope], head: nn.Module, batches: Iterable[Any], mode: Mode = MEAN
) -> Iterator[Passed]:
    """Yield the batches with the inputs of a layer, in mean mode; the model should be in evaluation mode.

    Of a mixture, `mode` names the member.

    Raises:
        NotLastError: The layer is used otherwise than once, for the model's outputs.
    """
    device = device_of(model)
    for batch in batches:
        inputs, target = split_batch(batch)
        with override(scopes, mode), _watching(head) as calls:
            output = logits_of(call_model(model, to_device(inputs, device), to_device(target, device)))
        if len(calls) != 1 or not _same(calls[0][1], output):
            raise NotLastError
        yield Passed(calls[0][0], output, target)


def _same(found: Any, output: Tensor) -> bool:
    """Tell whether a layer's output is the model's, perhaps in another precision."""
    if not isinstance(found, Tensor) or found.shape != output.shape:
        return False
    return found.data_ptr() == output.data_ptr() or torch.equal(found.to(output.dtype), output)


@contextmanager
def _watching(head: nn.Module) -> Iterator[list[tuple[Tensor, Any]]]:
    """Note the input and output of every call of a module."""
    calls: list[tuple[Tensor, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((args[0] if args else next(iter(kwargs.values())), output))

    handle = head.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
