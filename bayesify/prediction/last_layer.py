"""One pass in mean mode that keeps what a model's last layer saw: all that a closed-form prediction needs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesify.core.draws import MEAN, Mode
from bayesify.core.modes import override
from bayesify.core.reading import Scope
from bayesify.prediction.batches import call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.targets import LabelPlaces


class NotLastError(Exception):
    """There is no closed form; the message says what holds for other batches only."""


class Passed(NamedTuple):
    """A batch after its pass: the last layer's inputs, the model's outputs, the labels and the model's inputs."""

    features: Tensor
    output: Tensor
    target: Any
    inputs: Any


def passed(
    model: nn.Module, scopes: Sequence[Scope], head: nn.Module, batches: Iterable[Any], mode: Mode = MEAN
) -> Iterator[Passed]:
    """Yield the batches with the inputs of a layer, in mean mode; the model should be in evaluation mode.

    Of a mixture, `mode` names the member.

    Raises:
        NotLastError: The layer is used otherwise than once, for the model's outputs.
    """
    device, places = device_of(model), LabelPlaces(model)
    for batch in batches:
        inputs, target = split_batch(batch)
        with override(scopes, mode), watching({"": head}) as calls:
            output = logits_of(call_model(model, to_device(inputs, device), to_device(target, device)))
        if len(calls) != 1 or not same_output(calls[0].output, output):
            raise NotLastError("the layer with the spread is the model's last")
        with override(scopes, mode):
            target = places(batch, output)
        yield Passed(calls[0].inputs, output, target, inputs)


def same_output(found: Any, output: Tensor) -> bool:
    """Tell whether a layer's output is the model's, perhaps in another precision."""
    if not isinstance(found, Tensor) or found.shape != output.shape:
        return False
    return found.data_ptr() == output.data_ptr() or torch.equal(found.to(output.dtype), output)


class Call(NamedTuple):
    """A call of a layer: its name, what it took first, and what it gave."""

    name: str
    inputs: Tensor
    output: Any


@contextmanager
def watching(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Note every call of some layers."""
    calls: list[Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(Call(name, args[0] if args else next(iter(kwargs.values())), output))

        return hook

    handles = [layer.register_forward_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
