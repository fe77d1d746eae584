"""Average a Trainer's predictions over posterior samples, batch by batch, and score the average.

All the samples see a batch before the next one comes, so that nothing larger than a batch is kept: of each item only
its score, its confidence and its mutual information.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import metrics
from bayesify.model.draws import MEAN, Draw, Mode
from bayesify.model.mixture import member_count
from bayesify.model.modes import override
from bayesify.model.seeds import draw_seeds
from bayesify.model.wrapping import scopes_of
from bayesify.prediction.predicting import MOST
from bayesify.prediction.probabilities import entropy_of
from bayesify.prediction.targets import IGNORED

KEPT_BYTES = 1 << 31  # of sampled weights that stay in memory between batches; more are drawn anew for each
BIN_EDGES = (torch.arange(16, dtype=torch.float64) / 15).float().double()  # of `metrics.ece`, rounded as outputs are
COUNTED, NLL, WRONG, CONFIDENCE, INFORMATION = range(5)  # the columns of a row of scores


class Average:
    """The running average of one batch's outputs over the samples.

    The first output is averaged as its kind demands: "classes" as log 1/S sum_s softmax, "labels" (several at a time)
    as the logit of 1/S sum_s sigmoid, "values" as the mean. Further outputs are averaged as values; integers, such as
    generated tokens, are the first sample's.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self.sums: list[Tensor] = []
        self.entropies: Tensor | None = None
        self.center: Tensor | None = None
        self.squares: Tensor | None = None

    def add(self, output: Any) -> None:
        """Add the outputs of one sample: a tensor, or a tuple of tensors."""
        self.count += 1
        for i, tensor in enumerate(_flat(output)):
            term = self._first(tensor) if i == 0 and tensor.is_floating_point() else tensor
            if self.count == 1:
                self.sums.append(term)
            elif term.is_floating_point():
                merge = torch.logaddexp if i == 0 and self.kind == "classes" else torch.add
                self.sums[i] = merge(self.sums[i], term)

    def _first(self, output: Tensor) -> Tensor:
        """Turn the main output into what can be summed over samples."""
        output = output.float()
        if self.kind == "classes":
            output = F.log_softmax(output, -1)
            entropy = entropy_of(output)
            self.entropies = entropy if self.entropies is None else self.entropies + entropy
        elif self.kind == "labels":
            output = output.sigmoid()
        else:
            self._add_square(output)
        return output

    def _add_square(self, output: Tensor) -> None:
        """Add to the squared deviations from the running mean (Welford's recurrence, in float64)."""
        value = output.double()
        if self.center is None or self.squares is None:
            self.center, self.squares = value, torch.zeros_like(value)
            return
        delta = value - self.center
        self.center = self.center + delta / self.count
        self.squares = self.squares + delta * (value - self.center)

    def result(self) -> Any:
        """Return the average, in the form that each sample's output had."""
        out = [self._mean(i, total) for i, total in enumerate(self.sums)]
        return out[0] if len(out) == 1 else tuple(out)

    def _mean(self, i: int, total: Tensor) -> Tensor:
        if not total.is_floating_point():
            return total
        if i == 0 and self.kind == "classes":
            return (total - torch.tensor(float(self.count)).log().to(total)).clamp_max(0)
        mean = total / self.count
        return mean.logit(eps=torch.finfo(mean.dtype).eps) if i == 0 and self.kind == "labels" else mean

    def mutual_information(self, log_probs: Tensor) -> Tensor:
        """Return the entropy of the average minus the average entropy, item by item."""
        assert self.entropies is not None
        return (entropy_of(log_probs) - self.entropies / self.count).clamp_min(0)


def _flat(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested output, which a Trainer would pass on as they are."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _flat(tuple(output.values()))
    elif isinstance(output, (tuple, list)):
        for entry in output:
            yield from _flat(entry)


class PinnedSamples:
    """A few posterior samples that a model can be, one after the other, as often as wanted.

    Args:
        model: The bayesified model, or what contains it.
        samples: How many samples; 0 is the posterior mean.
        seed: Which samples; those of `bayesify.samples(model, n, seed)`.
    """

    def __init__(self, model: nn.Module, samples: int, seed: int | None) -> None:
        self.scopes = scopes_of(model)
        seeds = draw_seeds(samples, seed)
        self.modes = [Mode(draw=Draw(s, pinned=True, keep=True), member=i) for i, s in enumerate(seeds)] or [MEAN]
        size = sum(p.original.nbytes for scope in self.scopes for p in scope.posteriors)
        self.keeps_weights = size * samples <= KEPT_BYTES

    def __iter__(self) -> Iterator[int]:
        for i, mode in enumerate(self.modes):
            with override(self.scopes, mode):
                yield i
            if mode.draw is not None and not self.keeps_weights:
                mode.draw.forget()


class Evaluation:
    """One pass over an evaluation set: the same draws for every batch, and the scores of all items.

    Args:
        model: The bayesified model, or what contains it.
        samples: How many samples; 0 is the posterior mean. So is any number before the posterior can be sampled.
        seed: Which samples.
        shifts: Whether the first label of a sequence has no prediction.
    """

    def __init__(self, model: nn.Module, samples: int | None, *, seed: int, shifts: bool) -> None:
        if samples is None:
            samples = default_samples(model)
        self.samples = samples if can_be_sampled(model) else 0
        self.each_sample = PinnedSamples(model, self.samples, seed)
        self.shifts = shifts
        self.problem = getattr(getattr(model, "config", None), "problem_type", None)
        self.rows: list[Tensor] = []
        self.squared_errors: list[Tensor] = []
        self.variances: list[Tensor] = []

    def kind(self, output: Any, labels: Any) -> str:
        """Tell what the main output is: "classes", "labels" (several at a time) or "values"."""
        if self.problem == "multi_label_classification":
            return "labels"
        first = next(_flat(output), None)
        if first is None or first.dim() < 2 or first.shape[-1] < 2 or self.problem == "regression":
            return "values"
        whole = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == first.shape[:-1]
        return "classes" if whole or self.problem == "single_label_classification" else "values"

    def score(self, average: Average, labels: Any) -> Tensor | None:
        """Return of each item whether it counts, NLL, error, confidence and mutual information, (B, T, 5)."""
        if average.kind != "classes" or not isinstance(labels, Tensor):
            return None
        log_probs = next(_flat(average.result()))
        if labels.shape != log_probs.shape[:-1]:
            return None
        information = average.mutual_information(log_probs)
        if self.shifts and labels.dim() == 2:
            log_probs, information, labels = log_probs[:, :-1], information[:, :-1], labels[:, 1:]
        nll = -log_probs.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        top, prediction = log_probs.max(-1)
        counted, wrong = (labels != IGNORED).to(nll), (prediction != labels).to(nll)
        row = torch.stack([counted, nll, wrong, top.exp(), information], -1)
        return row.reshape(len(row), -1, row.shape[-1])

    def add(self, row: Tensor | None) -> None:
        """Add the items of a batch, as `score` gave them."""
        if row is not None:
            flat = row.flatten(0, 1).detach().cpu()
            self.rows.append(flat[flat[:, COUNTED] == 1])

    def values(self, average: Average, labels: Any) -> Tensor | None:
        """Return the squared errors and variances of a batch of regression outputs, (N, 2), if it is one."""
        if average.kind != "values" or average.squares is None or not isinstance(labels, Tensor):
            return None
        value = next(_flat(average.result()))
        if not (labels.is_floating_point() and labels.numel() == value.numel()):
            return None
        errors = (value - labels.reshape(value.shape)).square().double()
        variances = average.squares / max(average.count - 1, 1)
        return torch.stack([x.reshape(len(value), -1).mean(1) for x in (errors, variances)], -1)

    def add_values(self, values: Tensor) -> None:
        """Add what `values` gave for a batch."""
        self.squared_errors.append(values[:, 0].cpu())
        self.variances.append(values[:, 1].cpu())

    def metrics(self) -> dict[str, float]:
        """Return NLL, error, ECE (top label) and mutual information; or, for regression, RMSE and spread."""
        out: dict[str, float] = {}
        if self.rows and len(rows := torch.cat(self.rows)):
            out = {
                "nll": float(rows[:, NLL].double().mean()),
                "error": float(rows[:, WRONG].mean()),
                "ece": metrics.binned(rows[:, CONFIDENCE].double(), rows[:, WRONG] == 0, BIN_EDGES).ece,
                "mutual_information": float(rows[:, INFORMATION].mean()),
            }
        elif self.squared_errors:
            out = {
                "rmse": float(torch.cat(self.squared_errors).mean().sqrt()),
                "std": float(torch.cat(self.variances).mean().sqrt()),
            }
        return {**out, "posterior_samples": float(self.samples)} if out else out


def default_samples(model: nn.Module) -> int:
    """Return the largest `nst` of a model's methods; of a mixture so many for each member, but no more than five."""
    own, members = max(scope.method.nst for scope in scopes_of(model)), member_count(model)
    return own if members == 1 else members * min(max(own, 1), MOST)


def can_be_sampled(model: nn.Module) -> bool:
    """Tell whether the posterior can be sampled already: SGLD needs moments, Laplace its fit."""
    try:
        for scope in scopes_of(model):
            scope.method.check_ready(scope.posteriors)
    except RuntimeError:
        return False
    return True
