"""Average a Trainer's predictions over posterior samples, batch by batch, and score the average.

All the samples see a batch before the next one comes, so that nothing larger than a batch is kept: of each item only
its score, its confidence and its mutual information. As in `predict`, a closed form takes the place of samples where
the posterior of every member has one.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.mixture import member_count, member_scopes
from bayesify.core.modes import MEAN, Mode, override
from bayesify.core.prior import wide
from bayesify.core.ranks import draw_seeds
from bayesify.core.sampling import Draw
from bayesify.core.scopes import scopes_of
from bayesify.prediction.batches import IGNORED
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.last_layer import Call, NotLastError, same_output, watching
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predict import MOST
from bayesify.prediction.predictive import entropy_of
from bayesify.quality.calibration import binned

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
        self.within: Tensor | None = None

    def add(self, output: Any, spread: GaussianLogits | None = None) -> None:
        """Add the outputs of one sample: a tensor, or a tuple of tensors.

        Args:
            output: What the model returned.
            spread: The distribution of the main output around it, where it is the mean of a posterior in closed form.
        """
        self.count += 1
        for i, tensor in enumerate(_flat(output)):
            term = self._first(tensor, spread) if i == 0 and tensor.is_floating_point() else tensor
            if self.count == 1:
                self.sums.append(term)
            elif term.is_floating_point():
                merge = torch.logaddexp if i == 0 and self.kind == "classes" else torch.add
                self.sums[i] = merge(self.sums[i], term)

    def _first(self, output: Tensor, spread: GaussianLogits | None) -> Tensor:
        """Turn the main output into what can be summed over samples."""
        output = output.float()
        if self.kind == "classes":
            log_probs = F.log_softmax(output, -1) if spread is None else spread.log_probs().float().to(output)
            entropy = entropy_of(log_probs)
            if spread is not None:
                entropy = (entropy - spread.mutual_information().float().to(output)).clamp_min(0)
            self.entropies = entropy if self.entropies is None else self.entropies + entropy
            return log_probs
        if self.kind == "labels":
            return output.sigmoid()
        self._add_square(output)
        if spread is not None:
            variance = spread.variance().to(wide(output))
            self.within = variance if self.within is None else self.within + variance
        return output

    def _add_square(self, output: Tensor) -> None:
        """Add to the squared deviations from the running mean (Welford's recurrence, in float64 where there is one)."""
        value = output.to(wide(output))
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

    def variance(self) -> Tensor:
        """Return the variance of values: that of the samples, or 1/M sum_m (v_m + (y_m - y)^2) of M closed forms."""
        assert self.squares is not None
        if self.within is None:
            return self.squares / max(self.count - 1, 1)
        return (self.within + self.squares) / self.count

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


class Means(PinnedSamples):
    """The posterior mean of every member, in the place of samples: what closed forms are computed from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, 0, 0)
        self.modes = [MEAN._replace(member=i) for i in range(member_count(model))]


class Evaluation:
    """One pass over an evaluation set: the same draws for every batch, and the scores of all items.

    Args:
        model: The bayesified model, or what contains it.
        samples: How many samples; 0 is the posterior mean. So is any number before the posterior can be sampled. None
            is a closed form where there is one, else what the method says.
        seed: Which samples.
        shifts: Whether the first label of a sequence has no prediction.
    """

    def __init__(self, model: nn.Module, samples: int | None, *, seed: int, shifts: bool) -> None:
        self.forms = closed_forms(model) if samples is None else []
        wanted = default_samples(model) if samples is None else samples
        self._drawn = PinnedSamples(model, wanted if can_be_sampled(model) else 0, seed)
        self.each_sample = Means(model) if self.forms else self._drawn
        self.shifts = shifts
        self.problem = getattr(getattr(model, "config", None), "problem_type", None)
        self.watch = Watch.of(model)
        self.rows: list[Tensor] = []
        self.pvalues: list[Tensor] = []
        self.squared_errors: list[Tensor] = []
        self.variances: list[Tensor] = []

    @property
    def samples(self) -> int:
        """How many samples the average is over; 0 for the posterior mean, and for a closed form."""
        return sum(mode.draw is not None for mode in self.each_sample.modes)

    def watching(self, member: int) -> "AbstractContextManager[list[Call]]":
        """Note the calls of the layer whose closed form is wanted, where one is."""
        return watching({"": self.forms[member].head}) if self.forms else nullcontext([])

    def spread(self, member: int, calls: list[Call], output: Any, kind: str) -> GaussianLogits | None:
        """Return the distribution of the main output in closed form, where one is wanted.

        Raises:
            NotLastError: There is none: the layer's output is not the model's, or the output is of another kind.
        """
        if not self.forms:
            return None
        first = next(_flat(output), None)
        if kind == "labels" or first is None or len(calls) != 1 or not same_output(calls[0].output, first):
            raise NotLastError
        found: GaussianLogits = self.forms[member].logits(calls[0].inputs, first)
        return found

    def take_samples(self) -> None:
        """Give up the closed form.

        Raises:
            ValueError: Some batches were evaluated by it.
        """
        if self.rows or self.squared_errors:
            raise ValueError("the model's last layer is not the same for all batches; give samples=, a number of them")
        self.forms, self.each_sample = [], self._drawn

    def kind(self, output: Any, labels: Any) -> str:
        """Return what the main output is: "classes", "labels" (several at a time) or "values"."""
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
        errors = (value - labels.reshape(value.shape)).square().to(average.squares)
        return torch.stack([x.reshape(len(value), -1).mean(1) for x in (errors, average.variance())], -1)

    def add_pvalues(self, values: Tensor) -> None:
        """Add the p-values of a batch's novelty."""
        self.pvalues.append(values.cpu())

    def add_values(self, values: Tensor) -> None:
        """Add what `values` gave for a batch."""
        self.squared_errors.append(values[:, 0].cpu())
        self.variances.append(values[:, 1].cpu())

    def metrics(self) -> dict[str, float]:
        """Return NLL, error, ECE (top label) and mutual information; or, for regression, RMSE and spread.

        Of a model with `fit_novelty` also the share of inputs that its alarm flags.
        """
        out: dict[str, float] = {}
        if self.rows and len(rows := torch.cat(self.rows)):
            out = {
                "nll": float(rows[:, NLL].double().mean()),
                "error": float(rows[:, WRONG].mean()),
                "ece": binned(rows[:, CONFIDENCE].double(), rows[:, WRONG] == 0, BIN_EDGES).ece,
                "mutual_information": float(rows[:, INFORMATION].mean()),
            }
        elif self.squared_errors:
            out = {
                "rmse": float(torch.cat(self.squared_errors).mean().sqrt()),
                "std": float(torch.cat(self.variances).mean().sqrt()),
            }
        if self.pvalues and self.watch is not None:
            out["alarms"] = float((torch.cat(self.pvalues) <= self.watch.novelty.false_alarms).double().mean())
        return {**out, "posterior_samples": float(self.samples)} if out else out


def default_samples(model: nn.Module) -> int:
    """Return the largest default of a model's methods; of a mixture so many for each member, but no more than five."""
    own = max(scope.method.default_samples(scope.posteriors) for scope in scopes_of(model))
    members = member_count(model)
    return own if members == 1 else members * min(max(own, 1), MOST)


def closed_forms(model: nn.Module) -> list[Any]:
    """Return the closed form of every member of a mixture, or of the whole model; none where one of them has none."""
    members = member_scopes(model, scopes_of(model))
    forms = [scopes[0].method.closed_form(scopes[0]) if len(scopes) == 1 else None for scopes in members]
    return [] if None in forms else forms


def can_be_sampled(model: nn.Module) -> bool:
    """Return whether the posterior can be sampled already: SGLD needs moments, Laplace its fit."""
    try:
        for scope in scopes_of(model):
            scope.method.check_ready(scope.posteriors)
    except RuntimeError:
        return False
    return True
