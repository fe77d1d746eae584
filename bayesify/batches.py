"""Read what people call a batch: tensors, tuples, dicts, Hugging Face encodings and outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LABELS = "labels"


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and labels (None where there are none).

    A tuple or list is (inputs,) or (inputs, labels); a mapping may hold "labels"; anything else is inputs.

    Raises:
        ValueError: A tuple of another length.
    """
    if isinstance(batch, (tuple, list)):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch given as a {type(batch).__name__} is (inputs,) or (inputs, labels), got {len(batch)} items; "
                "pass several inputs as a dict, or as ((first, second), labels)"
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    if isinstance(batch, Mapping):
        return {k: v for k, v in batch.items() if k != LABELS}, batch.get(LABELS)
    return batch, None


def call_model(model: nn.Module, inputs: Any, labels: Any = None) -> Any:
    """Call a model on inputs of any kind; encoder-decoders get their labels too, without which they cannot run."""
    if isinstance(inputs, Mapping):
        needs_labels = labels is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        return model(**inputs, **({LABELS: labels} if needs_labels else {}))
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def logits_of(output: Any) -> Tensor:
    """Find the tensor of logits (or of regression outputs) in what a model returned.

    Raises:
        TypeError: There is none to be found.
    """
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, Mapping):
        found = next((output[k] for k in ("logits", "out") if k in output), None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            f"no logits found in a {type(output).__name__}; the model must return a tensor, an object with `.logits`, "
            "or a dict with 'logits' or 'out': wrap it in a module that does"
        )
    return found


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a nested batch to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        moved = [to_device(v, device) for v in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def is_one_batch(data: Any) -> bool:
    """Tell one batch (a tensor or a mapping) from an iterable of batches."""
    return isinstance(data, (Tensor, Mapping))
