"""Predict with the posterior: the same few models on all the data, averaged.

Samples are the outer loop, so that n draws cost n draws; data that can be read only once, or comes in another order
each time, is read once, each batch under the same pinned draws.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from tqdm.auto import tqdm

from bayesify.batches import call_model, device_of, is_one_batch, logits_of, split_batch, to_device
from bayesify.core import draw_seeds, is_whole, scopes_of
from bayesify.draws import MEAN, Draw, Mode
from bayesify.predictive import ClassificationTally, Predictive, RegressionPredictive, RegressionTally
from bayesify.scopes import override

TALLIES: dict[str, type[ClassificationTally] | type[RegressionTally]] = {
    "classification": ClassificationTally,
    "regression": RegressionTally,
}


@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["classification"] = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
) -> Predictive: ...
@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["regression"],
    progress: bool = ...,
    keep_samples: bool = ...,
) -> RegressionPredictive: ...
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = None,
    *,
    seed: int | None = None,
    task: str = "classification",
    progress: bool = False,
    keep_samples: bool = True,
) -> Predictive | RegressionPredictive:
    """Average a model's predictions over posterior samples, in eval mode and without gradients.

    Args:
        model: A bayesified model, or a module that contains one.
        data: One batch (a tensor, a dict, an HF BatchEncoding) or an iterable of batches, in which a tuple or list is
            (inputs,) or (inputs, labels), and a dict may hold "labels". Outputs are compared with labels place by
            place: shift those of a causal language model, whose outputs are about the next token.
        samples: How many posterior samples; 0 is the posterior mean, None the method's `nst`.
        seed: Which samples; the same as `samples(model, n, seed)`. None takes one number from torch's global generator,
            where there is anything to sample.
        task: "classification" or "regression". The classes are the last dimension of outputs (N, K) and (N, T, K), as
            token classifiers give them, and the second of outputs with more dimensions, as segmentation gives them.
        progress: Whether to show a progress bar.
        keep_samples: Whether to keep the outputs of every sample; False needs less memory.

    Returns:
        The predictive distribution, on the CPU.

    Raises:
        ValueError: The data is empty, or an argument is out of range.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi")
        >>> predict(model, torch.ones(4, 3), samples=5, seed=0)
        Predictive(4 examples, 2 classes, 5 samples)
    """
    if task not in TALLIES:
        raise ValueError(f"task must be one of {list(TALLIES)}, got {task!r}")
    scopes = scopes_of(model)
    if samples is None:
        samples = max(scope.method.nst for scope in scopes)
    if not is_whole(samples) or samples < 0:
        raise ValueError(f"samples must be an integer >= 0, or None, got {samples!r}")
    modes = [Mode(draw=Draw(s, pinned=True)) for s in draw_seeds(samples, seed)] if samples else [Mode(*MEAN)]
    batches = _batches(data)
    tally: ClassificationTally | RegressionTally = TALLIES[task](keep=keep_samples)
    labels: dict[int, Any] = {}
    device = device_of(model)
    with evaluation(model), _bar(batches, len(modes), progress) as bar:
        for sample, batch_index, batch, mode in _turns(batches, modes):
            inputs, target = split_batch(batch)
            labels[batch_index] = target
            with override(scopes, mode):
                output = call_model(model, to_device(inputs, device), to_device(target, device))
            tally.add(sample, batch_index, logits_of(output))
            bar.update()
    if not labels:
        raise ValueError("the data has no batches; pass a non-empty loader or tensor")
    return tally.finish(samples, [labels[i] for i in sorted(labels)])


def _batches(data: Any) -> Iterable[Any]:
    """Return the data as an iterable of batches."""
    if is_one_batch(data):
        return [data]
    if not isinstance(data, Iterable):
        hint = "; wrap it in a DataLoader" if hasattr(data, "__getitem__") else ""
        raise TypeError(f"data must be a batch or an iterable of batches, got {type(data).__name__}{hint}")
    match data:
        case (torch.Tensor() as inputs, torch.Tensor() as labels) if len(inputs) == len(labels) != 0:
            if isinstance(data, tuple) and labels.dim() < inputs.dim() and not labels.is_floating_point():
                raise ValueError("data is a tuple of two tensors, which reads as two batches; pass [(inputs, labels)]")
    batches: Iterable[Any] = data
    return batches


def _rereadable(batches: Iterable[Any]) -> bool:
    """Tell whether every pass over the data gives the same batches."""
    if isinstance(batches, DataLoader):
        if isinstance(batches.dataset, IterableDataset):
            return False
        order = batches.sampler if batches.batch_sampler is None else batches.batch_sampler
        # A batch sampler of somebody's own may shuffle, whatever it is built on.
        return isinstance(order.sampler if order.__class__ is BatchSampler else order, SequentialSampler)
    return isinstance(batches, (list, tuple))


def _turns(batches: Iterable[Any], modes: list[Mode]) -> Iterator[tuple[int, int, Any, Mode]]:
    """Yield (sample number, batch number, batch, mode) in the order that costs least."""
    if _rereadable(batches):
        for sample, mode in enumerate(modes):
            for i, batch in enumerate(batches):
                yield sample, i, batch, mode
            if mode.draw is not None:
                mode.draw.values.clear()
    else:
        for i, batch in enumerate(batches):
            for sample, mode in enumerate(modes):
                yield sample, i, batch, mode


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; training flags and torch's global generator are as before afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    state = torch.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
        torch.set_rng_state(state)


def _bar(batches: Iterable[Any], samples: int, progress: bool) -> Any:
    """Return a progress bar over all the forwards."""
    try:
        total = len(batches) * samples  # type: ignore[arg-type]
    except TypeError:
        total = None
    return tqdm(total=total, desc="predict", unit="batch", disable=not progress)
