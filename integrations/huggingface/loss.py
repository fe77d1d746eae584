"""The loss of an optimizer step: the mean over all its items, plus the penalty, once.

However the step is cut into batches, whatever the loss makes of `num_items_in_batch`: the gradient is that of
1/n sum_i loss_i + penalty(model, N), where n is the number of items in the step and N that in the training set. Many
models accept the number of items of the whole step and ignore it, so this is tried out, once.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bayesify.core.mixture import Mixture
from bayesify.core.penalty import penalty
from bayesify.core.scopes import mean
from bayesify.prediction.batches import IGNORED

LABELS, SHIFTED = "labels", "shift_labels"
EQUAL = 1e-6  # relative difference of two losses that are the same
Host: Any = object  # what the mixins stand before: a Trainer
TRIALS = 8  # batches to try before giving up on finding out how the loss counts


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
    """Return whether a model of this class shifts its labels by itself."""
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


class LossMixin(Host):  # type: ignore[misc]
    """Scale a Trainer's losses, add the penalty to the last batch of a step, and log both parts."""

    loss_is_scaled_for_ga: bool | None

    def __init__(self, *args: Any, num_data: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_data = self._given_num_data = num_data
        self._counting: Counting | None = None
        self._parts: dict[str, Any] = {"nll": 0.0, "penalty": 0.0}
        self._steps = 0

    @property
    def num_data(self) -> float:
        """N, the number of items in the training set."""
        if self._num_data is None:
            self._num_data = float(self._count_data())
        return self._num_data

    def _count_data(self) -> int:
        """Count the items of the training set; a pass over its labels where examples have several."""
        dataset = self.train_dataset
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                "the number of training items cannot be counted on a dataset without a length; pass num_data=, "
                "the number of training examples (label tokens for a language model)"
            )
        with random_state_kept():
            batches = self._plain_loader()
            first = items(next(iter(batches)), shifts=self.counting.shifts)
            if bool((first == 1).all()):
                return len(dataset)
            return max(count_all(batches, shifts=self.counting.shifts), 1)

    @property
    def counting(self) -> Counting:
        """How the loss counts its items; found out on the first batches, without a trace."""
        if self._counting is None:
            with random_state_kept():
                tried = (
                    try_out(self.model, self._loss_given, self._prepare_inputs(batch))
                    for batch in islice(self._plain_loader(), TRIALS)
                )
                self._counting = next((c for c in tried if c is not None), Counting(divides=True, shifts=False))
            # The losses come out scaled for the whole step; this keeps the Trainer from dividing them once more.
            self.loss_is_scaled_for_ga = True
            if not self._counting.divides:
                self.model_accepts_loss_kwargs = True
        return self._counting

    def _loss_given(self, inputs: dict[str, Any], count: Tensor | None) -> Tensor:
        """Return the Trainer's own loss, divided by a count."""
        with self.compute_loss_context_manager():
            loss: Tensor = super().compute_loss(self.model, inputs, num_items_in_batch=count)
        if count is not None and self._averages_over_ranks():
            # The Trainer multiplies what it believes to be divided by the count of all processes.
            believed = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            loss = loss / self.accelerator.num_processes if believed else loss
        return loss

    def _plain_loader(self) -> Any:
        """Return the training data in order, every process all of it."""
        if self.train_dataset is None:
            return self.get_train_dataloader()
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, collate_fn=collate)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any) -> tuple[list[Any], Any]:
        """Take the batches of one optimizer step and count their items."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, *args)
        if batches and isinstance(batches[0], Mapping):
            shifts = self.counting.shifts
            count = torch.stack([items(b, shifts=shifts).sum().to(self.args.device) for b in batches]).sum()
            if self._averages_over_ranks():
                count = self.accelerator.gather(count).sum()
        return batches, count

    def _averages_over_ranks(self) -> bool:
        return self.args.world_size > 1 and bool(getattr(self.args, "average_tokens_across_devices", False))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the batch's part of the step's mean loss: sum over its items / number of items in the step."""
        if not model.training:
            num_items_in_batch = None
        if num_items_in_batch is None or self.counting.divides:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        share = items(inputs, shifts=self.counting.shifts).sum() / num_items_in_batch
        if self._averages_over_ranks():
            share = share * self.accelerator.num_processes
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss * share.to(loss.device)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Backpropagate one batch, the last of an optimizer step together with the penalty."""
        added: list[Tensor] = []
        with self._backward_with(lambda loss: self._add_penalty(loss, added)):
            nll: Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._parts["nll"] += nll
        for term in added:
            self._parts["penalty"] += term
            self._steps += 1
        return torch.stack([nll, *added]).sum()

    def _add_penalty(self, loss: Tensor, added: list[Tensor]) -> Tensor:
        """Add the penalty where the gradients of an optimizer step become complete."""
        if not self.accelerator.sync_gradients:
            return loss
        term = penalty(self.model, self.num_data).to(loss.device)
        added.append(term.detach())
        return loss + term

    @contextmanager
    def _backward_with(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Change the loss at the last moment, when every scaling of it has been done."""
        backward = self.accelerator.backward
        self.accelerator.backward = lambda loss, **kwargs: backward(change(loss), **kwargs)
        try:
            yield
        finally:
            del self.accelerator.backward

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the two parts of the training loss before it: the likelihood's (nll) and the prior's (penalty).

        The loss itself is large at first, with the prior's part; nll is what a plain model's loss can be compared with.
        """
        if "loss" in logs and self._steps:
            parts = {}
            for name, total in self._parts.items():
                value = torch.as_tensor(total).to(self.args.device, torch.float32)
                parts[name] = float(self.accelerator.gather(value).mean()) / self._steps
            self._parts, self._steps = dict.fromkeys(self._parts, 0.0), 0
            logs = {**parts, **logs}
        super().log(logs, *args, **kwargs)
