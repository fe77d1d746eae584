"""Predict with the posterior: the same few models on all the data, averaged.

Samples are the outer loop, so that n draws cost n draws. Batches are where the data can be read only once or in another
order each time, and where a part of the model has no posterior: that part is then computed once per batch.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from bayesify.core.mixture import member_scopes
from bayesify.core.modes import MEAN, Mode, override
from bayesify.core.penalty import noise_in
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import draw_seeds, is_whole
from bayesify.core.reading import Scope
from bayesify.core.sampling import Draw
from bayesify.core.scopes import check_averaged, check_module, not_finite, plain_name, scopes_of, warn_of_mistakes
from bayesify.prediction.averages import TALLIES, AnyPredictive, ClassificationTally, gathered, mixed
from bayesify.prediction.batches import (
    LabelPlaces,
    Readings,
    VariedError,
    as_batches,
    call_model,
    classes_at,
    device_of,
    logits_of,
    own_places,
    rereadable,
    run_through,
    split_batch,
    to_device,
)
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.last_layer import NotLastError, passed
from bayesify.prediction.linear import Linearized, member_of
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predictive import MultilabelPredictive, Predictive
from bayesify.prediction.regression import RegressionPredictive, noise_of
from bayesify.prediction.view import Memory, own_statistics, reusing, same_place, views, warn_where_stale

THETAS = 1 << 30  # bytes of all samples' weights in memory
MOST = 5  # samples of a mixture's member by default

Classes = Literal["classification", "tokens"]
Values = Literal["regression", "heteroscedastic"]


class Options(TypedDict, total=False):
    """The further keywords of `predict`."""

    seed: int | None
    linear: bool | None
    progress: bool
    keep_samples: bool
    update_bn: Any


@overload
def predict(
    model: nn.Module, data: Any, samples: int | None = ..., *, task: Classes | None = ..., **options: Unpack[Options]
) -> Predictive: ...
@overload
def predict(
    model: nn.Module, data: Any, samples: int | None = ..., *, task: Values, **options: Unpack[Options]
) -> RegressionPredictive: ...
@overload
def predict(
    model: nn.Module, data: Any, samples: int | None = ..., *, task: Literal["multilabel"], **options: Unpack[Options]
) -> MultilabelPredictive: ...
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = None,
    *,
    seed: int | None = None,
    task: str | None = None,
    linear: bool | None = None,
    progress: bool = False,
    keep_samples: bool = True,
    update_bn: Any = None,
) -> AnyPredictive:
    """Average a model's predictions over posterior samples, in eval mode and without gradients.

    Args:
        model: A bayesified model, or a module that contains one. A plain model will do: its posterior is a point.
        data: One batch (a tensor, a dict, an HF BatchEncoding) or an iterable of batches, in which a tuple or list is
            (inputs,) or (inputs, labels), and a dict may hold "labels". Labels of a dict are compared with the outputs
            as in the model's own loss, which shifts them in a causal language model of Hugging Face's; labels of
            (inputs, labels) place by place. Where processes read parts of the data by a DistributedSampler (or
            Accelerate, in order), all of them have to call, and each gets the prediction of the whole, in its order.
        samples: How many posterior samples; 0 is the posterior mean. None takes the best way that the posterior has:
            one pass and a closed form where a fitted "la" has spread in a linear last layer only, or is a regression
            with few outputs (`num_samples` is then 0, and `logits` are the mean's), else the method's `nst` samples. A
            mixture spreads its samples evenly over its members, which weigh the same; None does the best for every
            member: a closed form, one sample of a point, five of the others.
        seed: Which samples; the same as `samples(model, n, seed)`. None takes one number from torch's global generator,
            where there is anything to sample.
        task: "classification", "regression", "heteroscedastic" or "multilabel", the likelihoods of `fit_laplace`. None
            is that of the fit, or else "classification". The classes are the last of two dimensions, the second of four
            and more, and of three the last ("tokens", and the logits of Hugging Face's outputs) or the one that the
            labels lack. The noise of a regression is that of `fit_laplace`, if it found one, or what `with_noise` of
            the prediction is given; "heteroscedastic" outputs are means and log variances, in halves.
        linear: Whether to read the model linearly in its weights, f(x, m) + J(x) (theta - m), with the derivative by
            `torch.func.jvp`; in closed form where there are few outputs and `samples` is None. None does so for a
            regression that `fit_laplace` fitted, whose Gaussian belongs to that linear model.
        progress: Whether to show a progress bar.
        keep_samples: Whether to keep the outputs of every sample; False needs less memory.
        update_bn: Training data, as `data`, from which BatchNorm statistics are computed for every sample: those of
            training belong to other weights. The model keeps its own.

    Returns:
        The predictive distribution, on the CPU.

    Raises:
        ValueError: The data is empty or can be read in two ways, or an argument is out of range.
        TypeError: The data holds arrays or texts, which the model does not take.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, predict
        >>> model = bayesify(torch.nn.Linear(3, 2), "vi")
        >>> predict(model, torch.ones(4, 3), samples=5, seed=0)
        Predictive(4 examples, 2 classes, 5 samples)
    """
    if linear not in (None, True, False):
        raise ValueError(f"linear must be True, False or None, got {linear!r}")
    if linear and update_bn is not None:
        raise ValueError("linear=True reads the model at its mean, whose statistics it keeps; leave out update_bn")
    if task is not None and task not in TALLIES:
        raise ValueError(f"task must be one of {list(TALLIES)}, got {task!r}")
    if samples is not None and (not is_whole(samples) or samples < 0):
        got = f"a {type(samples).__name__}; labels go with the data, [(inputs, labels)]"
        got = repr(samples) if isinstance(samples, (int, float, str)) else got
        raise ValueError(f"samples must be an integer >= 0, or None, got {got}")
    scopes = [] if is_plain(model) else scopes_of(model)
    batches, places, members = as_batches(data), own_places(data), member_scopes(model, scopes)
    if samples is not None and 0 < samples < len(members):
        raise ValueError(
            f"samples={samples} leaves {len(members) - samples} of the mixture's {len(members)} members out; give "
            f"samples={len(members)} or more, or 0 for the first member's mean"
        )
    members = members[:1] if samples == 0 else members
    check_averaged(model)
    warn_of_mistakes(scopes, spread=samples != 0)
    if update_bn is None:
        warn_where_stale(model, scopes)
    elif isinstance(update_bn := as_batches(update_bn), Iterator):
        update_bn = list(update_bn)
    refresh = None if update_bn is None else partial(run_through, batches=update_bn)
    watch, task = Watch.of(model), task or task_of(model, scopes)
    run = Run(model, scopes, members, task, keep_samples, progress, refresh, linear, watch)
    if not rereadable(batches):
        batches = run.once(batches)
    elif isinstance(batches, DataLoader):
        batches = Readings(batches)
    try:
        found = run.over(batches, samples, seed)
    except VariedError:
        found = run.over(run.once(iter(data)), samples, seed)
    return found if places is None else gathered(found, places)


class Turn(NamedTuple):
    """What a sample gave for a batch."""

    batch: int
    output: Tensor
    target: Any
    exact: GaussianLogits | None = None  # the distribution around an output that is the mean's
    classes_last: bool = True  # of three dimensions; otherwise the labels tell


@dataclass(frozen=True)
class Run:
    """One call of `predict`; the members of a mixture go by their numbers, a model alone is number 0."""

    model: nn.Module
    scopes: list[Scope]
    members: list[list[Scope]]  # the scopes that a forward of each member reads
    task: str
    keep: bool
    progress: bool
    refresh: Callable[[nn.Module], bool] | None  # runs a model on the data of its BatchNorm statistics
    linear: bool | None
    watch: Watch | None
    seeds: list[int] = field(default_factory=list)  # drawn once, even where the data has to be read anew

    def once(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return data that can be read only once: as a list where it is needed again."""
        if len(self.members) > 1 or self.refresh is not None:
            return list(batches)
        return batches if self.watch is None else self.watch.follow(batches)

    def over(self, batches: Iterable[Any], samples: int | None, seed: int | None) -> AnyPredictive:
        """Average over the members: each in closed form where it has one, else by its share of the samples."""
        members, parts = len(self.members), dict[int, AnyPredictive]()
        for number in range(members) if samples is None else ():
            closed, batches = self.in_closed_form(number, batches)
            if closed is not None:
                parts[number] = closed
        counts = [0 if n in parts else share(own, n, members, samples) for n, own in enumerate(self.members)]
        if any(counts) and not self.seeds:
            self.seeds.extend(draw_seeds(members * max(counts), seed))
        for n, count in enumerate(counts):
            if n not in parts and (count or members == 1):
                seeds = self.seeds[n::members][:count]
                way = self.linearly if seeds and self.reads_linearly(n) else self.by_samples
                parts[n] = self.averaged(n, way(n, batches, seeds), count)
        names = dict.fromkeys(scope.method.name for own in self.members for scope in own)
        found = mixed([part for _, part in sorted(parts.items())])
        found = replace(found, method=f"mixture of {members}: " * (members > 1) + ", ".join(names))
        average = found.mean if isinstance(found, RegressionPredictive) else found.log_probs
        tensors = chain(self.model.named_parameters(), self.model.named_buffers())
        if bool(average.isnan().any()) and (name := not_finite(tensors)) is not None:
            raise ValueError(
                f"the predictions are NaN: {plain_name(name)!r} is the first parameter that is not finite; the "
                "training diverged, so train again with a lower learning rate"
            )
        return found if self.watch is None else self.watch.judged(found, batches if rereadable(batches) else ())

    def averaged(self, number: int, turns: Generator[Turn], samples: int) -> AnyPredictive:
        """Average a member's outputs; a regression has the noise that was learned or found by a fit."""
        tally, labels, exact = TALLIES[self.task](keep=self.keep), dict[int, Any](), False
        try:
            for turn in turns:
                exact = turn.exact is not None
                if isinstance(tally, ClassificationTally) and tally.classes is None:
                    tally.classes = classes_at(turn.output, turn.target, last=turn.classes_last)
                tally.add(turn.batch, turn.output, turn.exact)
                labels.setdefault(turn.batch, turn.target)
        except NotLastError as error:
            if labels:
                raise ValueError(f"{error}, not for all batches; give samples=, a number of samples") from None
            raise
        finally:
            turns.close()
        if not labels:
            raise ValueError("the data has no batches; pass a non-empty loader or tensor")
        found: AnyPredictive = tally.finish(samples, list(labels.values()), closed_form=exact)
        if not isinstance(found, RegressionPredictive) or self.task != "regression":
            return found
        noise = noise_of(member_of(self.model, number), self.members[number])
        return found if noise is None else found.with_noise(noise)

    def by_samples(self, number: int, batches: Iterable[Any], seeds: Sequence[int]) -> Generator[Turn]:
        """Yield the outputs of the draws of these seeds; without any, those of the mean."""
        alone, device, places = len(self.members) == 1, device_of(self.model), LabelPlaces(self.model)
        draws = [Draw(seed, pinned=True, keep=True) for seed in seeds]
        modes = [Mode(draw=draw, member=i if alone else number) for i, draw in enumerate(draws)] or [MEAN]
        several = self.refresh is None and len(modes) > 1 and _thetas_fit(self.model, len(modes))
        with (
            views(self.model, len(modes)) as own,
            reusing(self.model, own) if several else nullcontext() as memory,
            ExitStack() as statistics,
        ):
            for sample, i, batch in self.shown(_turns(batches, modes, memory), batches, len(modes)):
                (inputs, target), mode, one = split_batch(batch), modes[sample], own[sample]
                if self.refresh is not None and i == 0:  # the next sample; the last one has seen all the data
                    statistics.close()
                    statistics.enter_context(own_statistics(one, self.refresh, self.scopes, mode))
                with override(self.scopes, mode):
                    with self.watched(one, number, mode) as take:
                        output = call_model(one, to_device(inputs, device), to_device(target, device))
                    target = places(batch, output)
                take(i, inputs, output)
                last = self.task == "tokens" or not isinstance(output, Tensor)
                yield Turn(i, logits_of(output), target, classes_last=last)

    def linearly(self, number: int, batches: Iterable[Any], seeds: Sequence[int]) -> Generator[Turn]:
        """Yield the linear model's outputs for the draws of these seeds, in one reading of the data."""
        reader, device = Linearized(member_of(self.model, number), self.members[number]), device_of(self.model)
        directions = [reader.directions(Mode(draw=Draw(s, pinned=True), member=number)) for s in seeds]
        places = LabelPlaces(reader.plain)
        with torch.no_grad():
            for i, batch in enumerate(self.shown(batches, batches)):
                for output in reader.outputs(*split_batch(to_device(batch, device)), directions):
                    yield Turn(i, output, places(batch, output))

    def reads_linearly(self, number: int) -> bool:
        """Return whether a member is read linearly: as asked, or in a regression where the method says so."""
        scopes = self.members[number]
        if self.refresh is not None or not any(p.moves for scope in scopes for p in scope.posteriors):
            return False
        wanted = self.task == "regression" and all(scope.method.linear for scope in scopes)
        return wanted if self.linear is None else self.linear

    def in_closed_form(self, number: int, batches: Iterable[Any]) -> tuple[AnyPredictive | None, Iterable[Any]]:
        """Predict in one pass; where that cannot be, return None and data that can still be read from its beginning."""
        scopes, ways = self.members[number], list[Callable[[Iterable[Any]], Generator[Turn]]]()
        form = scopes[0].method.closed_form(scopes[0]) if len(scopes) == 1 else None
        if form is not None and self.task in ("classification", "tokens", "regression"):
            ways.append(partial(self.by_last_layer, number, form))
        if self.task == "regression" and self.reads_linearly(number):
            ways.append(partial(self.by_jacobian, number))
        for scope in self.scopes if ways else ():
            scope.method.check_ready(scope.posteriors)
        for way in ways:
            source = iter(batches)
            start = list(islice(source, 1))
            try:
                return self.averaged(number, way(self.shown(chain(start, source), batches)), 0), batches
            except NotLastError:
                batches = chain(start, source) if source is batches else batches
        return None, batches

    def by_last_layer(self, number: int, form: Any, batches: Iterable[Any]) -> Generator[Turn]:
        """Yield outputs and distributions where the last layer alone has a spread."""
        mode = MEAN._replace(member=number)
        with views(self.model) as (own,), own_statistics(own, self.refresh, self.scopes, mode):
            head = same_place(self.model, form.head, own)
            with self.watched(own, number, MEAN) as take:
                for i, one in enumerate(passed(own, self.scopes, head, batches, mode)):
                    take(i, one.inputs, one.output)
                    yield Turn(i, one.output, one.target, form.logits(one.features, one.output))

    def by_jacobian(self, number: int, batches: Iterable[Any]) -> Generator[Turn]:
        """Yield outputs and distributions of the model that is linear in its weights."""
        with torch.no_grad():
            reader = Linearized(member_of(self.model, number), self.members[number])
            for i, (output, exact, target) in enumerate(reader.gaussians(batches)):
                yield Turn(i, output, target, exact)

    @contextmanager
    def watched(self, model: nn.Module, number: int, mode: Mode) -> Iterator[Callable[[int, Any, Any], None]]:
        """Yield what takes a batch's number, inputs and output: for novelty, where a forward is one at the mean."""
        if self.watch is None or mode is not MEAN or number or self.refresh is not None:
            yield lambda *ignored: None
        else:
            with self.watch.noting(model) as calls:
                yield partial(self.watch.take, calls=calls)

    def shown(self, turns: Iterable[Any], batches: Iterable[Any], samples: int = 1) -> Iterable[Any]:
        """Show the progress of all forwards."""
        try:
            total = len(batches) * samples  # type: ignore[arg-type]
        except TypeError:  # unknown
            total = None
        bar: Iterable[Any] = tqdm(turns, total=total, desc="predict", unit="batch", disable=not self.progress)
        return bar


def share(scopes: Sequence[Scope], number: int, members: int, samples: int | None) -> int:
    """Return how many samples are a member's: its method's, `MOST` at most beside others, or an even part."""
    if samples is None:
        own = max((scope.method.default_samples(scope.posteriors) for scope in scopes), default=0)
        return own if members == 1 else min(max(own, 1), MOST)
    return 0 if not scopes else samples // members + (number < samples % members)  # the rest is the first members'


def task_of(model: nn.Module, scopes: Sequence[Scope]) -> str:
    """Return the task that a fit was for, or learned noise; else "classification"."""
    if noise_in(model) is not None:
        return "regression"
    found = next((name for scope in scopes if (name := getattr(scope.method, "likelihood", None))), None)
    return found if found in TALLIES else "classification"


def is_plain(model: nn.Module) -> bool:
    """Return whether a module has no posteriors at all."""
    check_module(model)
    return not any(isinstance(module, Posterior) for module in model.modules())


def _thetas_fit(model: nn.Module, count: int) -> bool:
    """Return whether the thetas of all samples may be in memory at once: they take a GiB, or what the model takes."""
    size = sum(m.original.nbytes for m in model.modules() if isinstance(m, Posterior) and m.moves)
    return count * size <= max(THETAS, sum(p.nbytes for p in model.parameters()))


def _turns(batches: Iterable[Any], modes: Sequence[Mode], memory: Memory | None) -> Iterator[tuple[int, int, Any]]:
    """Yield (sample, batch number, batch); where samples share a part of the model, batches are the outer loop."""
    if memory is None and rereadable(batches):
        for sample, mode in enumerate(modes):
            yield from ((sample, i, batch) for i, batch in enumerate(batches))
            if mode.draw is not None:
                mode.draw.forget()
        return
    for i, batch in enumerate(batches):
        if memory is not None:
            memory.forget()
        yield from ((sample, i, batch) for sample in range(len(modes)))
