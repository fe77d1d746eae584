"""The run of a prediction: each member in closed form or over its samples, in the order that costs least."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core.gaussian_noise import noise_in
from bayesify.core.modes import MEAN, Draw, Mode, override
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import draw_seeds
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_module, plain_name
from bayesify.prediction.batches import (
    call_model,
    device_of,
    logits_of,
    rereadable,
    split_batch,
    to_device,
)
from bayesify.prediction.last_layer import Call, NotLastError, passed
from bayesify.prediction.linear import Exactly, Linearized, member_of
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predictive import ClassificationTally, Predictive
from bayesify.prediction.probabilities import MultilabelPredictive, MultilabelTally
from bayesify.prediction.regression import HeteroscedasticTally, RegressionPredictive, RegressionTally, noise_of
from bayesify.prediction.statistics import own_statistics
from bayesify.prediction.targets import LabelPlaces, classes_at
from bayesify.prediction.view import Memory, reusing, same_place, views

THETAS = 1 << 30  # bytes
MOST = 5  # samples of a mixture's member, where nobody says how many

Found = Predictive | MultilabelPredictive | RegressionPredictive
Exact = ClassificationTally | RegressionTally  # know what to do with a closed form
Tally = Exact | MultilabelTally

TALLIES: dict[str, type[Tally]] = {
    "classification": ClassificationTally,
    "tokens": ClassificationTally,
    "regression": RegressionTally,
    "heteroscedastic": HeteroscedasticTally,
    "multilabel": MultilabelTally,
}


class Member(NamedTuple):
    """One member of a mixture, or a whole model: its number, the scopes that a forward reads, and which of both."""

    number: int
    scopes: list[Scope]
    alone: bool = True

    def share(self, samples: int | None, members: int) -> int:
        """Return how many samples are this member's: its method's, five at most beside others, or an even part.

        What is left over goes to the first ones.
        """
        if samples is None:
            own = max((scope.method.default_samples(scope.posteriors) for scope in self.scopes), default=0)
            return own if members == 1 else min(max(own, 1), MOST)
        return 0 if not self.scopes else samples // members + (self.number < samples % members)


class Run(NamedTuple):
    """What a prediction is made with, whatever the member."""

    model: nn.Module
    scopes: list[Scope]
    task: str
    keep: bool
    progress: bool
    update_bn: Iterable[Any] | None
    linear: bool | None
    watch: Watch | None

    def over(
        self, members: Sequence[Member], batches: Iterable[Any], samples: int | None, seed: int | None, drawn: list[int]
    ) -> list[Found]:
        """Return the prediction of each member: in closed form where it has one, else by its share of the samples.

        The seeds of the samples are kept in `drawn`, for another run on the same data.
        """
        exact: dict[int, Found] = {}
        for member in members if samples is None else ():
            found, batches = self.in_closed_form(member, batches)
            if found is not None:
                exact[member.number] = found
        counts = [0 if m.number in exact else m.share(samples, len(members)) for m in members]
        if any(counts) and not drawn:
            drawn += draw_seeds(len(members) * max(counts), seed)
        return [
            exact[m.number] if m.number in exact else self.sampled(m, batches, drawn[m.number :: len(members)][:count])
            for m, count in zip(members, counts, strict=True)
            if m.number in exact or count or len(members) == 1
        ]

    def reads_linearly(self, member: Member) -> bool:
        """Return whether a member is read linearly: as asked, or in a regression where the method says so."""
        if self.update_bn is not None or not any(p.moves for scope in member.scopes for p in scope.posteriors):
            return False
        wanted = self.task == "regression" and all(scope.method.linear for scope in member.scopes)
        return wanted if self.linear is None else self.linear

    def linearly(self, member: Member, batches: Iterable[Any], seeds: list[int]) -> Found:
        """Average over the linear model's outputs for the draws of these seeds, in one reading of the data."""
        reader = Linearized(member_of(self.model, member.number), member.scopes)
        directions = [reader.directions(Mode(draw=Draw(s, pinned=True), member=member.number)) for s in seeds]
        tally, device = TALLIES[self.task](keep=self.keep), device_of(self.model)
        labels, places = list[Any](), LabelPlaces(reader.plain)
        with torch.no_grad(), _bar(batches, 1, self.progress) as bar:
            for i, batch in enumerate(batches):
                outputs = reader.outputs(*split_batch(to_device(batch, device)), directions)
                for sample, output in enumerate(outputs):
                    tally.add(sample, i, output)
                labels.append(places(batch, outputs[0]))
                bar.update()
        if not labels:
            raise ValueError("the data has no batches; pass a non-empty loader or tensor")
        return _with_noise(tally.finish(len(seeds), labels), member, self)

    def sampled(self, member: Member, batches: Iterable[Any], seeds: list[int]) -> Found:
        """Average over the draws of these seeds; without any, use the mean."""
        if seeds and self.reads_linearly(member):
            return self.linearly(member, batches, seeds)
        model, tally = self.model, TALLIES[self.task](keep=self.keep)
        turns = enumerate(seeds) if member.alone else ((member.number, seed) for seed in seeds)
        modes = [Mode(draw=Draw(s, pinned=True, keep=True), member=i) for i, s in turns] or [MEAN]
        labels: dict[int, Any] = {}
        device = device_of(model)
        # Statistics hold for one sample: it sees all the data before the next one comes.
        groups = [modes] if self.update_bn is None else [[mode] for mode in modes]
        several = len(groups[0]) > 1 and _thetas_fit(model, len(modes))
        with (
            views(model, len(modes)) as own,
            reusing(model, own) if several else nullcontext() as memory,
            _bar(batches, len(modes), self.progress) as bar,
        ):
            places = LabelPlaces(model)
            for first, together in enumerate(groups):
                with self.statistics(own[first], together[0]):
                    for sample, batch_index, batch, mode in _turns(batches, together, memory):
                        inputs, target = split_batch(batch)
                        one = own[first + sample]
                        with override(self.scopes, mode), self.watched(one, member, mode) as calls:
                            output = call_model(one, to_device(inputs, device), to_device(target, device))
                        if batch_index not in labels:
                            with override(self.scopes, mode):
                                labels[batch_index] = places(batch, output)
                        if calls is not None and self.watch is not None:
                            self.watch.take(batch_index, calls, inputs, output)
                        if isinstance(tally, ClassificationTally) and tally.classes is None:
                            last = self.task == "tokens" or not isinstance(output, Tensor)
                            tally.classes = classes_at(logits_of(output), labels[batch_index], last=last)
                        tally.add(first + sample, batch_index, logits_of(output))
                        bar.update()
        if not labels:
            raise ValueError("the data has no batches; pass a non-empty loader or tensor")
        return _with_noise(tally.finish(len(seeds), [labels[i] for i in sorted(labels)]), member, self)

    @contextmanager
    def statistics(self, model: nn.Module, mode: Mode) -> Iterator[None]:
        """Let a view use the BatchNorm statistics of one sample, if there is data to compute them from."""
        with ExitStack() as stack:
            if self.update_bn is not None:
                with override(self.scopes, mode):
                    stack.enter_context(own_statistics(model, self.update_bn))
            yield

    def in_closed_form(self, member: Member, batches: Iterable[Any]) -> tuple[Found | None, Iterable[Any]]:
        """Predict in one pass; where that cannot be, return None and data that can still be read from its beginning."""
        for way in self.closed_forms(member):
            for scope in self.scopes:
                scope.method.check_ready(scope.posteriors)
            tally, source = TALLIES[self.task](keep=self.keep), iter(batches)
            labels: list[Any] = []
            assert isinstance(tally, Exact)
            first = next(source, None)
            if first is None:
                raise ValueError("the data has no batches; pass a non-empty loader or tensor")
            mode = MEAN._replace(member=member.number)
            try:
                with (
                    views(self.model) as (own,),
                    self.statistics(own, mode),
                    _bar(batches, 1, self.progress) as bar,
                ):
                    for i, (output, logits, target) in enumerate(way(own, chain([first], source))):
                        tally.add_gaussian(i, logits, output)
                        labels.append(target)
                        bar.update()
                return _with_noise(tally.finish(0, labels, closed_form=True), member, self), batches
            except NotLastError as error:
                if labels:
                    raise ValueError(f"{error}, not for all batches; give samples=, a number of samples") from None
                batches = chain([first], source) if source is batches else batches
        return None, batches

    def closed_forms(self, member: Member) -> Iterator[Callable[[nn.Module, Iterable[Any]], Iterator[Exactly]]]:
        """Yield the ways to predict without samples that may do: for a last layer, then for a linear reading.

        Each takes a view of the model and batches; it yields outputs in mean mode, their distributions and the labels,
        or raises a NotLastError.
        """
        kind, mode = TALLIES[self.task], MEAN._replace(member=member.number)
        form = member.scopes[0].method.closed_form(member.scopes[0]) if len(member.scopes) == 1 else None
        if form is not None and kind in (ClassificationTally, RegressionTally):
            yield partial(self.by_last_layer, member, form, mode)
        if self.reads_linearly(member) and kind is RegressionTally:
            yield lambda _, batches: Linearized(member_of(self.model, member.number), member.scopes).gaussians(batches)

    def by_last_layer(
        self, member: Member, form: Any, mode: Mode, own: nn.Module, batches: Iterable[Any]
    ) -> Iterator[Exactly]:
        """Yield outputs, distributions and labels where the last layer alone has a spread."""
        head = same_place(self.model, form.head, own)
        with self.watched(own, member, MEAN) as calls:
            for i, one in enumerate(passed(own, self.scopes, head, batches, mode)):
                if calls is not None and self.watch is not None:
                    self.watch.take(i, calls, one.inputs, one.output)
                yield one.output, form.logits(one.features, one.output), one.target

    def watched(self, model: nn.Module, member: Member, mode: Mode) -> AbstractContextManager[list[Call] | None]:
        """Note what novelty is read from, where a forward is one at the mean; else return None."""
        if self.watch is None or mode is not MEAN or member.number or self.update_bn is not None:
            return nullcontext()
        return self.watch.noting(model)


def task_of(model: nn.Module, scopes: list[Scope]) -> str:
    """Return the task that a fit was for, or learned noise; else "classification"."""
    if noise_in(model) is not None:
        return "regression"
    found = next((name for scope in scopes if (name := getattr(scope.method, "likelihood", None))), None)
    return found if found in TALLIES else "classification"


def check_finite(model: nn.Module, found: Found) -> None:
    """Raise where a prediction is no number because a weight is none, and name the first."""
    if not bool((found.mean if isinstance(found, RegressionPredictive) else found.log_probs).isnan().any()):
        return
    tensors = chain(model.named_parameters(), ((n, b) for n, b in model.named_buffers() if b.is_floating_point()))
    for name, tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"the predictions are NaN: {plain_name(name)!r} is the first parameter that is not finite; the "
                "training diverged, so train again with a lower learning rate"
            )


def _with_noise(found: Found, member: Member, run: Run) -> Found:
    """Give a regression the noise that was learned beside its model, or that a fit found."""
    if not isinstance(found, RegressionPredictive) or run.task != "regression":
        return found
    noise = noise_of(member_of(run.model, member.number), member.scopes)
    return found if noise is None else found.with_noise(noise)


def methods_of(members: Sequence[Member]) -> str:
    """Name the methods of a model, such as "la", or of a mixture's members, such as "mixture of 5: la"."""
    names = dict.fromkeys(scope.method.name for member in members for scope in member.scopes)
    return f"mixture of {len(members)}: " * (len(members) > 1) + ", ".join(names)


def is_plain(model: nn.Module) -> bool:
    """Tell whether a module has no posteriors at all."""
    check_module(model)
    return not any(isinstance(module, Posterior) for module in model.modules())


def _thetas_fit(model: nn.Module, count: int) -> bool:
    """Tell whether the thetas of all samples may be in memory at once: they take a GiB, or what the model takes."""
    size = sum(m.original.nbytes for m in model.modules() if isinstance(m, Posterior) and m.moves)
    return count * size <= max(THETAS, sum(p.nbytes for p in model.parameters()))


def _turns(batches: Iterable[Any], modes: list[Mode], memory: Memory | None) -> Iterator[tuple[int, int, Any, Mode]]:
    """Yield (sample number, batch number, batch, mode) in the order that costs least.

    Where a part of the model is computed once per batch, all samples come before the next batch.
    """
    if memory is None and rereadable(batches):
        for sample, mode in enumerate(modes):
            for i, batch in enumerate(batches):
                yield sample, i, batch, mode
            if mode.draw is not None:
                mode.draw.forget()
    else:
        for i, batch in enumerate(batches):
            if memory is not None:
                memory.forget()
            for sample, mode in enumerate(modes):
                yield sample, i, batch, mode


def _bar(batches: Iterable[Any], samples: int, progress: bool) -> Any:
    """Return a progress bar over all the forwards."""
    try:
        total = len(batches) * samples  # type: ignore[arg-type]
    except TypeError:
        total = None
    return tqdm(total=total, desc="predict", unit="batch", disable=not progress)
