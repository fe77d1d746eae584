"""Batches of every kind (tensors, tuples, dicts, Hugging Face encodings), outputs, and labels that fit the outputs.

Nothing is broadcast, guessed or repaired.
"""

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from bayesify.core import ranks
from bayesify.prediction.view import views

LABELS = "labels"
IGNORED = -100  # the label of what does not count, as in cross_entropy
FIXES = {
    "ndarray": "pass torch.from_numpy(array).float()",
    "int": "rows of numbers need a DataLoader, whose collate_fn makes tensors of them",
    "str": "tokenize the texts first, and pass what the tokenizer returns with return_tensors='pt'",
}


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into inputs and labels (None where there are none)."""
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
    try:
        if isinstance(inputs, Mapping):
            needs_labels = labels is not None and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
            return model(**inputs, **({LABELS: labels} if needs_labels else {}))
        return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    except Exception as error:
        if isinstance(error, TypeError) and isinstance(inputs, Mapping) and "'label'" in str(error):
            raise TypeError("the model takes no 'label', which the batches hold; call their labels 'labels'") from error
        leaves = list(_leaves(inputs))
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            raise
        # A model may well take strings or arrays: they are to blame only where it did not.
        kind = type(leaves[0]).__name__ if leaves else type(inputs).__name__
        fix = FIXES.get(kind, "pass a tensor, a dict of tensors, or (inputs, labels) with tensors")
        raise TypeError(f"the model failed on inputs without a tensor, of {kind}; {fix}") from error


def _leaves(inputs: Any) -> Iterator[Any]:
    """Yield what nested inputs are made of."""
    if isinstance(inputs, (Mapping, tuple, list)):
        for entry in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _leaves(entry)
    else:
        yield inputs


def logits_of(output: Any) -> Tensor:
    """Find the tensor of logits, or of a regression's outputs, in what a model returned."""
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
    """Copy a nested batch to a device: a model may write to its inputs, and the next sample needs them as they were."""
    if isinstance(batch, Tensor):
        return batch.detach().to(device, copy=True)
    if isinstance(batch, Mapping):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        moved = [to_device(v, device) for v in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    try:
        return copy.deepcopy(batch)
    except (TypeError, RuntimeError):  # a handle, a lock: nothing that a model writes to
        return batch


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def run_through(model: nn.Module, batches: Iterable[Any]) -> bool:
    """Run a model on batches; return whether there are any."""
    device, some = device_of(model), False
    for batch in batches:
        call_model(model, *(to_device(part, device) for part in split_batch(batch)))
        some = True
    return some


def is_one_batch(data: Any) -> bool:
    """Return whether data is one batch (a tensor, an array, a mapping), not an iterable of batches."""
    return isinstance(data, (Tensor, Mapping, np.ndarray, str))


def as_batches(data: Any) -> Iterable[Any]:
    """Return data as an iterable of batches; two tensors that may be (inputs, labels) or two batches are an error."""
    if is_one_batch(data):
        return [data]
    rows = hasattr(data, "column_names")  # of Hugging Face's data sets, which are no batches
    if hasattr(data, "to_numpy") or rows or not isinstance(data, Iterable):
        fix = "; wrap it in a DataLoader" if hasattr(data, "__getitem__") else ""
        if hasattr(data, "to_numpy"):
            fix = "; pass torch.tensor(frame.to_numpy()).float(), with labels as [(inputs, labels)]"
        raise TypeError(f"data must be a batch or an iterable of batches, got {type(data).__name__}{fix}")
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(d, (Tensor, np.ndarray)) for d in data):
        a, b = data
        differ = isinstance(data, tuple) or len(a.shape) != len(b.shape) or a.dtype != b.dtype
        if differ and a.shape[:1] == b.shape[:1]:
            raise ValueError(
                f"data is a {type(data).__name__} of two tensors of one length, which reads as two batches; pass "
                "[(inputs, labels)] for one batch with its labels, or a list of two alike tensors for two batches"
            )
    batches: Iterable[Any] = data
    return batches


def rereadable(batches: Iterable[Any]) -> bool:
    """Return whether every pass over the data gives the same batches."""
    if isinstance(batches, DataLoader):
        if isinstance(batches.dataset, IterableDataset):
            return False
        order = _order_of(batches)  # any other batch sampler may shuffle, whatever it is built on
        return isinstance(order.sampler if order.__class__ is BatchSampler else order, SequentialSampler)
    return isinstance(batches, (list, tuple, Readings))


def _order_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


class VariedError(Exception):
    """Two readings of the data differ."""


class Readings:
    """A loader that is read several times, and raises a `VariedError` where a batch is not the same again.

    Random augmentation makes it so: the samples would see other inputs, and their differences count as epistemic.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.marks: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self.loader):
            tensors = [leaf.detach().cpu().contiguous() for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
            mark = [zlib.crc32(t.flatten().view(torch.uint8).numpy().tobytes()) for t in tensors if t.numel()]
            if self.marks.setdefault(i, mark) != mark:
                raise VariedError
            yield batch


def own_places(data: Any) -> list[int] | None:
    """Return which items of the data set this process reads, or None where it reads all, or nobody knows which.

    It reads a part by a DataLoader with torch's DistributedSampler, or one in order that Accelerate has prepared.
    """
    if not reads_a_part(data):
        return None
    order = _order_of(data)
    if not isinstance(getattr(order, "sampler", order), DistributedSampler):
        whole = getattr(order, "batch_sampler", None)  # Accelerate's BatchSamplerShard is built on that of all
        if not isinstance(getattr(whole, "sampler", None), SequentialSampler):
            return None
    return list(order if data.batch_sampler is None else chain.from_iterable(order))


def reads_a_part(data: Any) -> bool:
    """Return whether a DataLoader gives this process a part of the data, by a sampler of torch's or Accelerate's."""
    if not ranks.several() or not isinstance(data, DataLoader):
        return False
    order = _order_of(data)
    inner = getattr(order, "sampler", order)
    count = inner.num_replicas if isinstance(inner, DistributedSampler) else getattr(order, "num_processes", 1)
    return int(count) > 1


def joined(pieces: Sequence[Tensor], what: str = "outputs", dim: int = 0) -> Tensor:
    """Concatenate the tensors of all batches along the dimension of the examples."""
    shapes = {tuple(p.shape[dim + 1 :]) for p in pieces}
    if len(shapes) > 1:
        raise ValueError(
            f"batches give {what} of different shapes {sorted(shapes)}; pad the inputs to one length, "
            "or predict the batches one by one"
        )
    return torch.cat(list(pieces), dim)


def joined_labels(labels: Sequence[Any], count: int) -> Tensor | None:
    """Concatenate the labels of all batches, for so many examples; None where no batch has any."""
    missing = sum(value is None for value in labels)
    if missing == len(labels):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(labels)} batches have no labels; give them to all batches, or to none")
    try:
        tensors = [torch.as_tensor(value).detach().cpu() for value in labels]
    except (ValueError, TypeError, RuntimeError) as error:
        fix = "pass class numbers as torch.tensor([...])"
        raise TypeError(f"labels must be numbers, got {labels[0]!r:.60}; {fix}") from error
    found = joined(tensors, "labels")
    if len(found) != count:
        raise ValueError(f"there are {len(found)} labels for {count} examples; pass (inputs, labels) of one length")
    return found


def as_target(target: Any, outputs: Tensor) -> Tensor:
    """Return targets as a tensor, an array's on the outputs' device."""
    if isinstance(target, np.ndarray):
        return torch.as_tensor(target, device=outputs.device)
    if not isinstance(target, Tensor):
        raise ValueError("the loader gives no labels; yield (inputs, labels), or a dict with 'labels'")
    return target


def same_shape(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether two shapes are equal, up to a last dimension of one."""
    return shape == wanted or (*shape, 1) == wanted or shape == (*wanted, 1)


def values_like(outputs: Tensor, target: Any) -> Tensor:
    """Return floating-point targets of the outputs' shape, up to a last dimension of one."""
    values = as_target(target, outputs)
    if not values.is_floating_point():
        raise ValueError(f"targets must be floats, got {values.dtype}; use targets.float()")
    if not same_shape(tuple(values.shape), tuple(outputs.shape)):
        raise ValueError(f"targets must be of shape {tuple(outputs.shape)}, got {tuple(values.shape)}")
    return values.view_as(outputs).to(outputs.dtype)


def mean_and_log_var(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Split the last dimension into means and log variances."""
    if outputs.dim() < 2 or outputs.shape[-1] % 2:
        raise ValueError(
            "'heteroscedastic' needs outputs of an even last dimension, the means and then their log variances, "
            f"got shape {tuple(outputs.shape)}"
        )
    mean, log_var = outputs.chunk(2, -1)
    return mean, log_var


def classes_last(outputs: Tensor) -> Tensor:
    """Return logits with the classes last: they are the second of four dimensions and more."""
    return outputs.movedim(1, -1) if outputs.dim() >= 4 else outputs


def classes_at(outputs: Tensor, labels: Any, *, last: bool) -> int:
    """Return the dimension of the classes: the second of four and more, of three the last or what the labels lack."""
    if outputs.dim() != 3 or last:
        return 1 if outputs.dim() >= 4 else -1
    shape = tuple(labels.shape) if isinstance(labels, (Tensor, np.ndarray)) else None
    fits = [d for d in (1, 2) if shape == (*outputs.shape[:d], *outputs.shape[d + 1 :])]
    if len(fits) == 1 or (shape is not None and not fits):
        return fits[0] if fits else -1  # labels that fit neither have an error of their own
    raise ValueError(
        f"outputs of shape {tuple(outputs.shape)} may have their classes second, as Conv1d gives them, or last, as "
        "token classifiers do, and the labels do not tell; give task='tokens' if they are last, else let the model "
        "return outputs.movedim(1, -1)"
    )


def class_labels(logits: Tensor, target: Any) -> Tensor:
    """Return labels that fit logits (N, ..., K): integers (N, ...), or probabilities of the logits' shape."""
    labels = as_target(target, logits)
    if logits.dim() < 2 or logits.shape[-1] < 2:
        raise ValueError(
            f"'classification' takes at least two logits per item, got outputs of shape {tuple(logits.shape)}; "
            "likelihood='multilabel' takes one logit per label, likelihood='regression' one output per target"
        )
    if labels.is_floating_point():
        labels = classes_last(labels)
        if labels.shape != logits.shape:
            wanted = f"integers, or of the logits' shape {tuple(logits.shape)}"
            raise ValueError(f"labels must be {wanted}, got {labels.dtype}")
        return labels
    if labels.shape != logits.shape[:-1]:
        fix = "; a column of labels needs squeeze(1)" if same_shape(labels.shape, logits.shape[:-1]) else ""
        raise ValueError(f"labels must be of shape {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}{fix}")
    classes, counted = logits.shape[-1], labels if logits.dim() == 2 else labels[labels != IGNORED]
    low, high = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels must be in 0..{classes - 1} for {classes} logits, got {low}..{high}; number the classes from 0, "
            "or give the model more outputs"
        )
    return labels.long()


class LabelPlaces:
    """Put the labels of a run where the model's own loss compares them with its outputs.

    Causal language models of Hugging Face take labels equal to the input_ids and compare logits[:, :-1] with
    labels[:, 1:]. Whether a model does so is found by asking it once for its loss: on the first batch, in whatever
    mode the caller has put the model. Only the labels of mappings are moved; those of (inputs, labels) stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.next: bool | None = None  # whether an output is about the next label; None until a batch has shown it

    def __call__(self, batch: Any, output: Any) -> Any:
        """Return a batch's labels; those of shape (N, T) at the places that its output (N, T, K) is about."""
        inputs, labels = split_batch(batch)
        if self.next is False or not isinstance(batch, Mapping) or not isinstance(labels, Tensor):
            return labels
        logits = logits_of(output)
        if labels.is_floating_point() or labels.dim() != 2 or logits.shape[:-1] != labels.shape or labels.shape[1] < 2:
            return labels
        moved = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if self.next is None:
            self.next = self._asked(inputs, labels, moved, logits)
        return moved if self.next else labels

    def _asked(self, inputs: Mapping[str, Any], labels: Tensor, moved: Tensor, logits: Tensor) -> bool | None:
        """Return whether the model's own loss is nearer to that of the moved labels; None where none counts."""
        try:
            with views(self.model) as (view,):  # what the model remembers of its calls stays as it is
                own = view(**to_device({**inputs, LABELS: labels}, logits.device))
        except TypeError:  # it takes no labels
            return False
        loss = own.get("loss") if isinstance(own, Mapping) else getattr(own, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return False
        flat = logits.detach().flatten(0, 1).float()
        places = (y.flatten().to(flat.device) for y in (labels, moved))
        here, there = (F.cross_entropy(flat, y, ignore_index=IGNORED) for y in places)
        found = (there - loss).abs() < (here - loss).abs()
        return bool(found) if bool(torch.isfinite(here - there + loss)) else None
