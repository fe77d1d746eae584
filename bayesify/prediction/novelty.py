"""How strange an input is: a distance in a network's features, and a p-value with a false-alarm rate that holds.

`fit_novelty` reads the features of known data in one pass and keeps a few statistics of them, `model.novelty`. Then
`predict` gives every input a score and its conformal p-value: the share of held-out data that is at least as strange.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from bayesify.core.scopes import check_module
from bayesify.core.selection import plain_tensors
from bayesify.prediction.batches import as_batches, split_batch
from bayesify.prediction.last_layer import Call, Reader, host_of, posteriors_of
from bayesify.prediction.predictive import Prediction, in_full
from bayesify.prediction.view import can_be_viewed, evaluation, view
from bayesify.quality.arrays import check_fraction
from bayesify.quality.conformal import conformal_pvalues
from bayesify.quality.metrics import Moments, Reference

PLACES = ("mean", "prior")
ATTRIBUTE = "novelty"
SET_ASIDE = 0.2  # of the loader, where there is no held-out data
MOST_HELD_OUT = 2000  # rows that are set aside at most
SCALING = 0.1  # of the held-out data: finds the scales of distance and entropy
FEW = 5  # rows, which find no scale
STEADY = 1e-4  # of the largest entropy; a standard deviation below it is rounding
PROBED = 64  # elements of each tensor by which a change of the weights is seen
CHANGED = 1e-6  # relative

M = TypeVar("M", bound=nn.Module)
P = TypeVar("P", bound=Prediction)


@dataclass(eq=False)
class Novelty:
    """What `fit_novelty` found about known data; `model.novelty`.

    Novelty is d/scales[0] + H/scales[1] of the distance d and the entropy H of the mean's probabilities; where the
    model is no classifier, there is one scale and no entropy.
    """

    layer: str  # whose inputs are the features; of a Hugging Face model, whose outputs are
    at: str  # whether features are those of the posterior's "mean" or of its "prior" mean
    reference: Reference  # the statistics that d is measured with
    held_out: Tensor  # the sorted novelty of held-out data, (n,)
    scales: tuple[float, ...]  # the standard deviations of d and of H
    false_alarms: float  # the rate of `alarm()`
    weights: float  # a number that changes with the posterior mean, which the statistics belong to

    def score(self, features: Tensor, entropy: Tensor | None = None) -> Tensor:
        """Return the novelty of features, (N, D), and of the mean's entropies, (N,)."""
        scores = self.reference.score(features) / self.scales[0]
        return scores if entropy is None or len(self.scales) == 1 else scores + entropy.to(scores) / self.scales[1]

    def pvalue(self, scores: Tensor) -> Tensor:
        """Return (1 + #{held-out >= score}) / (n + 1)."""
        return conformal_pvalues(scores, self.held_out)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, numbers and texts that `from_state_dict` understands, for `torch.save`."""
        kept = {f"reference.{name}": tensor for name, tensor in vars(self.reference).items()}
        return kept | {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reference"}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Novelty":
        """Return what `state_dict` was taken of; `model.novelty = Novelty.from_state_dict(state)` puts it back."""
        inner = {name.removeprefix("reference."): v for name, v in state.items() if name.startswith("reference.")}
        own = {name: v for name, v in state.items() if not name.startswith("reference.")}
        return cls(**(own | {"reference": Reference(**inner), "scales": tuple(own["scales"])}))

    def __repr__(self) -> str:
        return (
            f"Novelty(mahalanobis++ in {len(self.reference.center)} features of {self.layer!r} at the "
            f"{self.at}, {len(self.held_out)} held-out examples, {self.false_alarms:.3g} false alarms)"
        )


def fit_novelty(
    model: M,
    loader: Any,
    *,
    layer: str | None = None,
    at: str | None = None,
    held_out: Any = None,
    false_alarms: float = 0.05,
    seed: int = 0,
    progress: bool = False,
) -> M:
    """Learn what known inputs look like, so that `predict` tells how strange new ones are.

    Args:
        model: Any model, bayesified or plain; of a mixture the first member.
        loader: Batches of known data as `predict` takes them, such as the training data; read once. With integer
            labels, one for each example, every class has a mean of its own, and the entropy of the prediction counts.
        layer: The name of a layer whose inputs are the features. None takes the inputs of the last linear layer; of a
            Hugging Face model the last hidden state, averaged over the tokens that the attention mask shows.
        at: "mean" takes the features of the trained network; "prior" those of the prior mean, such as the pretrained
            weights, by a forward pass of its own. None is "prior" where that is another network, else "mean".
        held_out: Batches of known data that the model was not trained on, for the p-values. None sets a fifth of the
            loader aside, 2,000 examples at most.
        false_alarms: The false-alarm rate of `alarm()`; at least 1/(n + 1) for n held-out examples.
        seed: Which examples are set aside.
        progress: Whether to show a progress bar.

    Returns:
        The same model, with the attribute `novelty`.

    Raises:
        ValueError: An argument is out of range, the layer is not found, there are too few held-out examples, or
            at="prior" finds no prior mean that is another network than the trained one.

    Example:
        >>> import torch
        >>> from bayesify import fit_novelty, predict
        >>> x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        >>> model = fit_novelty(torch.nn.Linear(3, 2), x[:60], held_out=x[60:])
        >>> predict(model, torch.tensor([[0.1, 0.2, 0.3], [40.0, -70.0, 0.0]])).alarm().shape
        torch.Size([2])
    """
    check_module(model)
    check_fraction("false_alarms", false_alarms, "0.05 is one in twenty")
    if at not in (None, *PLACES):
        raise ValueError(f"at must be one of {list(PLACES)}, or None, got {at!r}")
    source = iter(as_batches(loader))
    if (first := next(source, None)) is None:
        raise ValueError("the loader has no batches; give at least one")
    inputs, _ = split_batch(first)
    reader = Reader(model, host_of(model), layer)
    reader.find(inputs)
    has_prior = at != "mean" and reader.has_prior(inputs)
    reader.at = "prior" if has_prior else "mean"
    if at == "prior" and not has_prior:
        raise ValueError(
            "at='prior' needs a prior mean that is a network, other than the trained one, in the layers before the "
            "features; pass the pretrained weights, bayesify(model, prior_mean=pretrained), or use at='mean'"
        )
    moments, held, generator = Moments(), Rows(), torch.Generator().manual_seed(seed)
    with evaluation(model):
        for batch in tqdm(chain([first], source), desc="fit_novelty", unit="batch", disable=not progress):
            inputs, target = split_batch(batch)
            z, output = reader.features(inputs, target)
            labels = _classes(target)
            keys = torch.rand(len(z), generator=generator) if held_out is None else torch.ones(len(z))
            some = (keys < SET_ASIDE).nonzero().squeeze(1)
            if len(some):
                entropy = reader.entropy(inputs, target, output, some) if labels is not None else None
                moments.add(*held.add(z[some], entropy, keys[some], None if labels is None else labels[some]))
            moments.add(z[keys >= SET_ASIDE], None if labels is None else labels[keys >= SET_ASIDE])
        classifies = moments.classes > 1
        for batch in () if held_out is None else as_batches(held_out):
            inputs, target = split_batch(batch)
            z, output = reader.features(inputs, target)
            held.add(z, reader.entropy(inputs, target, output) if classifies else None)
    _store(reader, moments, held, false_alarms, generator)
    if held_out is None and reader.at == "mean":
        warnings.warn(
            f"fit_novelty set {len(held.z)} examples of the loader aside for its p-values; if the model was trained on "
            "them, it raises more false alarms than promised: pass held_out=, data that the model has not seen",
            stacklevel=2,
        )
    return model


def _classes(target: Any) -> Tensor | None:
    """Return labels that are one class for each example; None for labels of another kind."""
    if target is None or isinstance(target, (str, Mapping)):
        return None
    labels = torch.as_tensor(target).cpu()
    return None if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool else labels.long()


class Rows:
    """Held-out rows: features, entropies where they count, and where they were drawn, their keys and labels."""

    def __init__(self) -> None:
        self.z = torch.empty(0)
        self.entropy: Tensor | None = torch.empty(0)
        self.keys, self.labels = torch.empty(0), torch.empty(0, dtype=torch.long)

    def add(
        self, z: Tensor, entropy: Tensor | None, keys: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add rows; where they have keys, keep those of the smallest ones, and return what is over with its labels."""
        self.z = torch.cat([self.z, z]) if len(self.z) else z
        self.entropy = None if entropy is None or self.entropy is None else torch.cat([self.entropy, entropy])
        if keys is None:
            return z[:0], None
        self.keys = torch.cat([self.keys, keys])
        self.labels = torch.cat([self.labels, torch.zeros(len(z), dtype=torch.long) if labels is None else labels])
        order = self.keys.argsort(stable=True)
        kept, over = order[:MOST_HELD_OUT].sort().values, order[MOST_HELD_OUT:]
        gone = self.z[over], None if labels is None else self.labels[over]
        self.z, self.keys, self.labels = self.z[kept], self.keys[kept], self.labels[kept]
        self.entropy = None if self.entropy is None else self.entropy[kept]
        return gone


def _store(reader: "Reader", moments: Moments, held: Rows, false_alarms: float, generator: torch.Generator) -> None:
    """Find the scales by some of the held-out rows, score the others, and give the model what was found."""
    if moments.count < 2:
        raise ValueError(f"the loader has {moments.count} examples to learn from; give more")
    if not bool(torch.as_tensor(moments.squares).isfinite().all() and held.z.isfinite().all()):
        raise ValueError(f"the features of {reader.name!r} are not finite for some examples; look at the data")
    order = torch.randperm(len(held.z), generator=generator)
    some, rest = order[: round(SCALING * len(order))], order[round(SCALING * len(order)) :]
    reference, scales = moments.reference().to(torch.float32), tuple[float, ...]((1.0,))
    if held.entropy is not None and moments.classes > 1 and len(some) >= FEW:
        spread = float(reference.score(held.z[some]).std()), float(held.entropy[some].std())
        scales = spread if spread[0] > 0 and spread[1] > STEADY * float(held.entropy.max()) else scales
    rest = order if len(scales) == 1 else rest
    if (len(rest) + 1) * false_alarms < 1:
        raise ValueError(
            f"{len(rest)} held-out examples cannot promise a false-alarm rate of {false_alarms:.3g}; give at least "
            f"{math.ceil(1 / false_alarms) - 1}, or allow more false alarms"
        )
    found = Novelty(reader.name, reader.at, reference, torch.empty(0), scales, false_alarms, weights_of(reader.host))
    found.held_out = found.score(held.z[rest], None if held.entropy is None else held.entropy[rest]).sort().values
    setattr(reader.host, ATTRIBUTE, found)


def novelty_of(model: nn.Module) -> tuple[nn.Module, Novelty] | None:
    """Return the module with the statistics, and these; None for a model without, with a warning for other weights."""
    found = ((m, m.__dict__.get(ATTRIBUTE)) for m in model.modules())
    known = next(((m, kept) for m, kept in found if isinstance(kept, Novelty)), None)
    if known is not None and not math.isclose(weights_of(known[0]), known[1].weights, rel_tol=CHANGED):
        warnings.warn(
            "the model's weights are not those of fit_novelty, and predictions have no novelty; call it again",
            stacklevel=4,
        )
        return None
    return known


def weights_of(host: nn.Module) -> float:
    """Return a number that changes with the weights of the posterior mean: the sum of squares of some elements."""
    means = {id(p.original): p.mean for p in posteriors_of(host).values()}
    tensors = [means.get(id(t), t).detach() for _, t in plain_tensors(host)]
    flat = [t.flatten() for t in tensors if t.is_floating_point() and t.numel() and not hasattr(t, "device_mesh")]
    some = in_full([t[:: max(1, len(t) // PROBED)] for t in flat])
    return sum(float(t.double().square().mean()) for t in some)


class Watch:
    """The novelty of what `predict` reads, batch by batch."""

    def __init__(self, model: nn.Module, novelty: Novelty) -> None:
        self.reader = Reader(model, host_of(model), novelty.layer, novelty.at)
        self.novelty = novelty
        self.needs_entropy = len(novelty.scales) > 1
        self.features: dict[int, Tensor] = {}  # by the batch's number
        self.entropies: dict[int, Tensor | None] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "Watch | None":
        """Return what watches a model with `fit_novelty`; None for others."""
        found = novelty_of(model)
        return None if found is None else cls(view(model) if can_be_viewed(model) else model, found[1])

    def noting(self, model: nn.Module) -> AbstractContextManager[list[Call]]:
        """Note the calls of the layer in a forward at the mean, where it is what features are read from."""
        return self.reader.tapped(model) if self.novelty.at == "mean" else nullcontext([])

    def take(self, number: int, inputs: Any, output: Any, calls: list[Call]) -> None:
        """Take what a forward at the mean gave for a batch."""
        if self.novelty.at == "mean":
            self.features[number] = self.reader.read(calls, inputs)
            calls.clear()
        self.entropies[number] = self.reader.entropy(inputs, None, output) if self.needs_entropy else None

    def complete(self, number: int, batch: Any) -> None:
        """Run what is missing for a batch."""
        (inputs, target), output = split_batch(batch), None
        with evaluation(self.reader.model):
            if number not in self.features:
                self.features[number], output = self.reader.features(inputs, target)
            if number not in self.entropies:
                self.entropies[number] = self.reader.entropy(inputs, target, output) if self.needs_entropy else None

    def pvalues(self, inputs: Any) -> Tensor:
        """Return the p-values of one batch, by forward passes of its own."""
        self.features, self.entropies = {}, {}
        self.complete(0, inputs)
        return self.novelty.pvalue(self.novelty.score(self.features[0], self.entropies[0]))

    def follow(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield data that can be read only once, and judge each batch after everybody else."""
        for number, batch in enumerate(batches):
            yield batch
            self.complete(number, batch)

    def judged(self, found: P, batches: Iterable[Any]) -> P:
        """Return a prediction with the novelty of its examples; of these batches, if `follow` has not seen them."""
        for number, batch in enumerate(batches):
            self.complete(number, batch)
        order, examples = sorted(self.features), len(found)
        z, entropies = torch.cat([self.features[i] for i in order]), [self.entropies[i] for i in order]
        if len(z) != examples:
            raise ValueError(
                f"the layer {self.novelty.layer!r} has {len(z)} rows of features for {examples} examples; name another "
                "one in fit_novelty(layer=)"
            )
        known = [e for e in entropies if e is not None]
        scores = self.novelty.score(z, torch.cat(known) if len(known) == len(entropies) else None)
        pvalues, level = self.novelty.pvalue(scores), self.novelty.false_alarms
        return replace(found, novelty=scores, novelty_pvalue=pvalues, false_alarms=level)
