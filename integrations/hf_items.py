"""What a training loss averages over: how many items a batch holds, and whether the loss divides by their number.

The Trainer sums the losses of several batches before one optimizer step. Where the loss takes the number of items of
the whole step it is divided by that; many models accept the number and ignore it, so it is tried out, once.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bayesify.core.mixture import Mixture
from bayesify.core.wrap import mean
from bayesify.prediction.targets import IGNORED

LABELS, SHIFTED = "labels", "shift_labels"
EQUAL = 1e-6  # relative difference of two losses that are the same


class Counting(NamedTuple):
    """How a loss counts its items.

    Attributes:
        divides: Whether the loss divides by the number that it is given, instead of by its own batch's.
        shifts: Whether the first label of a sequence has no prediction, as in causal language models.
    """

    divides: bool
    shifts: bool


def items(batch: Mapping[str, Any], *, shifts: bool) -> Tensor:
    """Return the number of items of each example: its labels that are not ignored, or 1 where it has none."""
    labels = batch.get(SHIFTED)
    if labels is None:
        labels = batch.get(LABELS)
        if shifts and isinstance(labels, Tensor):
            labels = labels[..., 1:]
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        size = next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), 1)
        return torch.ones(size, dtype=torch.long)
    return labels.ne(IGNORED).reshape(len(labels), -1).sum(1)


def is_causal(model: nn.Module) -> bool:
    """Tell by its class whether a model shifts its labels by itself."""
    if isinstance(model, Mixture):
        model = model.members[0]
    plain = getattr(model, "get_base_model", lambda: model)()
    name = type(plain).__name__.removeprefix("Parametrized")
    decodes_only = not getattr(getattr(plain, "config", None), "is_encoder_decoder", False)
    return decodes_only and (name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "ForCausalLM" in name)


def try_out(
    model: nn.Module, loss: Callable[[dict[str, Any], Tensor | None], Tensor], batch: Mapping[str, Any]
) -> Counting | None:
    """Find out how a loss counts, by three forwards at the posterior mean, in eval mode and without gradients.

    Args:
        model: The model in the loss.
        loss: The loss of a batch, given the number of items to divide by (or None).
        batch: A batch.

    Returns:
        How it counts; None where this batch does not tell, because its loss is zero or not finite.
    """
    counts = {shifts: float(items(batch, shifts=shifts).sum()) for shifts in (False, True)}
    given = torch.tensor(2.0 * max(counts[False], 1.0)).to(find_device(batch))
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), mean(model):
            own, once, half = (float(loss(dict(batch), count)) for count in (None, given, 2 * given))
    finally:
        for module, training in flags:
            module.training = training
    if not all(math.isfinite(x) and x != 0 for x in (own, once, half)):
        return None
    if math.isclose(once, half, rel_tol=EQUAL):
        return Counting(divides=False, shifts=is_causal(model))
    # Both losses are the same sum, over different numbers: `own` divides by how many there are in the loss's eyes.
    seen = float(given) * once / own
    if counts[False] == counts[True]:
        return Counting(divides=True, shifts=is_causal(model))
    return Counting(divides=True, shifts=abs(seen - counts[True]) < abs(seen - counts[False]))


def find_device(batch: Mapping[str, Any]) -> torch.device:
    """Return the device of a batch's first tensor."""
    return next((v.device for v in batch.values() if isinstance(v, Tensor)), torch.device("cpu"))


def count_all(batches: Iterable[Mapping[str, Any]], *, shifts: bool) -> int:
    """Return the number of items in all the data."""
    return sum(int(items(batch, shifts=shifts).sum()) for batch in batches)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave Python's, numpy's and torch's generators as they were, so that looking at data changes no run."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
