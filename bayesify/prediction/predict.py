"""Predict with the posterior: the same few models on all the data, averaged.

Samples are the outer loop, so that n draws cost n draws; data that can be read only once, or comes in another order
each time, is read once, each batch under the same pinned draws. So it is where a part of the model has no posterior:
that part is then computed once per batch. The members of a mixture take turns, and their predictions are averaged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial, reduce
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from bayesify.core import ranks
from bayesify.core.draws import Draw
from bayesify.core.gaussian_noise import noise_in
from bayesify.core.mixture import member_scopes
from bayesify.core.modes import MEAN, Mode, override
from bayesify.core.posterior import Posterior
from bayesify.core.ranks import draw_seeds, is_whole
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_averaged, check_module, plain_name, scopes_of, warn_of_mistakes
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
    split_batch,
    to_device,
)
from bayesify.prediction.last_layer import Call, NotLastError, passed
from bayesify.prediction.linear import Exactly, Linearized, member_of
from bayesify.prediction.novelty import Watch
from bayesify.prediction.predictive import ClassificationTally, MultilabelPredictive, MultilabelTally, Predictive
from bayesify.prediction.regression import HeteroscedasticTally, RegressionPredictive, RegressionTally, noise_of
from bayesify.prediction.statistics import own_statistics, warn_where_stale
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


@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["classification", "tokens"] | None = ...,
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
) -> Predictive: ...
@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["regression", "heteroscedastic"],
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
) -> RegressionPredictive: ...
@overload
def predict(
    model: nn.Module,
    data: Any,
    samples: int | None = ...,
    *,
    seed: int | None = ...,
    task: Literal["multilabel"],
    linear: bool | None = ...,
    progress: bool = ...,
    keep_samples: bool = ...,
    update_bn: Any = ...,
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
) -> Predictive | RegressionPredictive | MultilabelPredictive:
    """Average a model's predictions over posterior samples, in eval mode and without gradients.

    Args:
        model: A bayesified model, or a module that contains one. A plain model will do: its posterior is a point.
        data: One batch (a tensor, a dict, an HF BatchEncoding) or an iterable of batches, in which a tuple or list is
            (inputs,) or (inputs, labels), and a dict may hold "labels". Labels of a dict are compared with the outputs
            as in the model's own loss: a causal language model of Hugging Face's shifts them, so that each output is
            about the next token; labels of (inputs, labels) are compared place by place. Where processes
            read parts of it by a DistributedSampler (or Accelerate, in order), each gets the prediction of the whole,
            in the data set's order; all of them have to call.
        samples: How many posterior samples; 0 is the posterior mean. None takes the best way that the posterior has:
            one pass and a closed form where a fitted "la" has spread in a linear last layer only, or is a regression
            with few outputs (`num_samples` is then 0, and `logits` are the mean's), else the method's `nst` samples. A
            mixture spreads its samples evenly over the members, of which each weighs the same and has one at least;
            None does the best for every member: a closed form, one sample of a point, five of the others.
        seed: Which samples; the same as `samples(model, n, seed)`. None takes one number from torch's global generator,
            where there is anything to sample.
        task: "classification", "regression", "heteroscedastic" or "multilabel", the likelihoods of `fit_laplace`. None
            is that of the fit, or else "classification". The classes are the last dimension of outputs (N, K), the
            second of four dimensions and more, as segmentation gives them, and of three dimensions the last one
            ("tokens", and the logits of Hugging Face's outputs) or the one that the labels lack. In a regression the
            noise is that of `fit_laplace`, if it found one, or what the prediction's `with_noise` is told;
            "heteroscedastic" outputs are means and log variances, in halves of the last dimension.
        linear: Whether to read the model linearly in its weights, f(x, m) + J(x) (theta - m), with the derivative by
            `torch.func.jvp`; where there are few outputs and `samples` is None, in closed form. None does so for a
            regression that `fit_laplace` fitted, whose Gaussian belongs to that linear model.
        progress: Whether to show a progress bar.
        keep_samples: Whether to keep the outputs of every sample; False needs less memory.
        update_bn: Training data, as `data`, from which the statistics of BatchNorm layers are computed for every sample
            before it predicts: those of training belong to other weights. The model keeps its own.

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
    if task is not None and task not in TALLIES:
        raise ValueError(f"task must be one of {list(TALLIES)}, got {task!r}")
    if samples is not None and (not is_whole(samples) or samples < 0):
        got = f"a {type(samples).__name__}; labels go with the data, [(inputs, labels)]"
        got = repr(samples) if isinstance(samples, (int, float, str)) else got
        raise ValueError(f"samples must be an integer >= 0, or None, got {got}")
    scopes = [] if is_plain(model) else scopes_of(model)
    batches, places = as_batches(data), own_places(data)
    whose = member_scopes(model, scopes)
    members = [Member(i, own, len(whose) == 1) for i, own in enumerate(whose)][: 1 if samples == 0 else None]
    if samples is not None and 0 < samples < len(members):
        raise ValueError(
            f"samples={samples} leaves {len(members) - samples} of the mixture's {len(members)} members out; give "
            f"samples={len(members)} or more, or 0 for the first member's mean"
        )
    if (len(members) > 1 or update_bn is not None) and not rereadable(batches):
        batches = list(batches)  # the members take their turns on the same data
    check_averaged(model)
    warn_of_mistakes(scopes, spread=samples != 0)
    if update_bn is None:
        warn_where_stale(model, scopes)
    elif linear:
        raise ValueError("linear=True reads the model at its mean, whose statistics it keeps; leave out update_bn")
    else:
        update_bn = as_batches(update_bn)
        update_bn = list(update_bn) if isinstance(update_bn, Iterator) else update_bn
    watch = Watch.of(model)
    if watch is not None and not rereadable(batches):
        batches = watch.follow(batches)
    run = Run(model, scopes, task or task_of(model, scopes), keep_samples, progress, update_bn, linear, watch)
    if isinstance(batches, DataLoader) and rereadable(batches):
        batches = Readings(batches)
    seeds: list[int] = []
    try:
        parts = run.over(members, batches, samples, seed, seeds)
    except VariedError:
        batches = list(data) if len(members) > 1 or update_bn is not None else iter(data)
        batches = batches if watch is None or rereadable(batches) else watch.follow(batches)
        parts = run.over(members, batches, samples, seed, seeds)
    found = replace(average(parts), method=methods_of(members))
    check_finite(model, found)
    if watch is not None:
        found = watch.judged(found, batches if rereadable(batches) else ())
    return found if places is None else together(found, places)


BY_SAMPLE = ("logits", "outputs", "noise_var")  # (S, N, ...); the other tensors are (N, ...)
SHARED = ("weights",)
C = TypeVar("C", Predictive, MultilabelPredictive)


def average(parts: Sequence[Found]) -> Found:
    """Return the mixture of members' predictions, which are of one kind and on the same data."""
    if len(parts) == 1:
        return parts[0]
    if regressions := [p for p in parts if isinstance(p, RegressionPredictive)]:
        return average_regressions(regressions)
    if several := [p for p in parts if isinstance(p, MultilabelPredictive)]:
        return average_probabilities(several)
    found = average_probabilities([p for p in parts if isinstance(p, Predictive)])
    return replace(found, closed_form=any(p.closed_form for p in parts if isinstance(p, Predictive)))


def average_probabilities(parts: Sequence[C]) -> C:
    """Return log(1/M sum_m p_m) and the mean of the expected entropies, for M members.

    The sums go from the first member to the last, as those over a model's samples do: equal logits give equal bits.
    """
    return replace(
        parts[0],
        log_probs=(reduce(torch.logaddexp, [p.log_probs for p in parts]) - math.log(len(parts))).clamp_max_(0),
        expected_entropy=reduce(torch.add, [p.expected_entropy for p in parts]) / len(parts),
        logits=in_turn([p.logits for p in parts]),
        weights=_weights([max(p.num_samples, 1) for p in parts]),
        num_samples=sum(p.num_samples for p in parts),
    )


def _weights(counts: Sequence[int]) -> Tensor | None:
    """Return the weight 1/(M S_m) of every row that `in_turn` joins; None where all are equal."""
    if len(set(counts)) == 1:
        return None
    each = [torch.full((count,), 1 / (len(counts) * count), dtype=torch.float64) for count in counts]
    return in_turn(each)


def average_regressions(parts: Sequence[RegressionPredictive]) -> RegressionPredictive:
    """Return the mixture's moments: mean m = 1/M sum m_k, and variance 1/M sum (v_k + (m_k - m)^2).

    The Gaussians of single samples are kept where every member has as many of them, since each weighs the same.
    """
    means = torch.stack([p.mean for p in parts])
    mean = means.mean(0)
    within = torch.stack([p.epistemic.square() for p in parts]).mean(0)
    even = len({p.num_samples for p in parts}) == 1 and not any(p.closed_form for p in parts)
    noises = [None if p.noise_var is None else p.noise_var.expand(max(p.num_samples, 1), *mean.shape) for p in parts]
    return replace(
        parts[0],
        mean=mean,
        epistemic=(within + (means - mean).square().mean(0)).sqrt(),
        aleatoric=torch.stack([p.aleatoric.square() for p in parts]).mean(0).sqrt(),
        outputs=in_turn([p.outputs for p in parts]) if even else None,
        noise_var=in_turn(noises) if even else None,
        num_samples=sum(p.num_samples for p in parts),
        closed_form=all(p.closed_form for p in parts),
    )


def in_turn(pieces: Sequence[Tensor | None]) -> Tensor | None:
    """Join what the members' samples gave, (S_m, N, ...) each: first every member's first, then the second ones.

    So row j is that of draw j of `samples(model, n, seed)`. None where one of the members has none.
    """
    kept = [piece for piece in pieces if piece is not None]
    if len(kept) < len(pieces):
        return None
    most = max(map(len, kept))
    return torch.stack([piece[turn] for turn in range(most) for piece in kept if turn < len(piece)])


def together(found: Found, places: list[int]) -> Found:
    """Join the parts of all processes: each item of the data set once, in its order."""
    if len(found) != len(places):
        raise ValueError(
            f"the loader's sampler names {len(places)} items, and its batches have {len(found)}; predict on batches "
            "with one row per item, or give every process all of the data"
        )
    parts = ranks.gathered((places, found))
    rows: dict[int, int] = {}
    for row, place in enumerate(chain.from_iterable(own for own, _ in parts)):
        rows.setdefault(place, row)  # samplers repeat items, so that all processes have as many
    joined = _joined([part for _, part in parts])
    return joined[torch.tensor([rows[place] for place in sorted(rows)])]


def _joined(parts: Sequence[Found]) -> Found:
    """Join predictions of one kind on different items."""
    tensors: dict[str, Tensor] = {}
    for field in fields(parts[0]):
        values: Iterable[Any] = [getattr(part, field.name) for part in parts]
        if field.name not in SHARED and all(isinstance(value, Tensor) for value in values):
            tensors[field.name] = torch.cat(list(values), dim=1 if field.name in BY_SAMPLE else 0)
    return replace(parts[0], **tensors)  # type: ignore[arg-type]


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
