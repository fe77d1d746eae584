"""The parts of a deployed module: plain models whose outputs are points or Gaussian, and the novelty of an input."""

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core.scopes import named_posteriors, prior
from bayesify.core.wrap import unbayesify
from bayesify.prediction.batches import call_model, logits_of
from bayesify.prediction.gaussian import GaussianLogits, Spread, normal_points
from bayesify.prediction.last_layer import base_of, hidden, pooled, same_output
from bayesify.prediction.novelty import Novelty
from bayesify.prediction.predict import is_plain
from bayesify.quality.metrics import Reference


class PointVoice(nn.Module):
    """A model with fixed weights: its outputs have no spread of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)

    def forward(self, inputs: Any) -> Tensor:
        """Return the model's outputs."""
        return logits_of(call_model(self.model, inputs))


class LastLayerVoice(PointVoice):
    """A model whose last layer has Gaussian weights: its outputs are Gaussian."""

    def __init__(self, model: nn.Module, layer: str, spread: Spread) -> None:
        model, head = tapped(model, layer)
        super().__init__(model)
        self.head = head
        for name, tensor in spread._asdict().items():
            self.register_buffer(name, None if tensor is None else _own(tensor))
        classes = spread.variances.shape[1]
        points = normal_points(classes) if classes > 1 else torch.zeros(1, 1)
        self.register_buffer("points", _own(points.to(spread.variances.dtype)))

    def forward(self, inputs: Any) -> GaussianLogits:  # type: ignore[override]
        """Return the distribution of the model's outputs."""
        output = super().forward(inputs)
        features, own = self.head.taken()
        watched = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None
        if watched and not same_output(own, output):
            raise ValueError("the Bayesian layer is not the model's last: pass samples=, a number of draws")
        return Spread(*(getattr(self, name) for name in Spread._fields)).logits(features, output)


class NoveltyVoice(nn.Module):
    """How strange an input is, by the statistics of `fit_novelty`.

    Args:
        novelty: The statistics.
        body: Whether the features are the body's outputs, as those of a Hugging Face model, or a layer's inputs.
        tap: The layer in the model that is run.
        mean: The model at the mean, whose entropy counts; None where it is the first of the average.
        start: The model at the prior mean, where the features are read from that.
        false_alarms: The share of ordinary inputs that are refused.
    """

    center: Tensor
    means: Tensor
    whitening: Tensor
    held_out: Tensor

    def __init__(
        self,
        novelty: Novelty,
        tap: "Tap",
        mean: nn.Module | None,
        start: nn.Module | None,
        *,
        body: bool,
        false_alarms: float,
    ) -> None:
        super().__init__()
        self.mean, self.start, self.tap = mean, start, tap
        self.body, self.layer, self.scales, self.false_alarms = body, novelty.layer, novelty.scales, false_alarms
        self.kind = novelty.reference.kind
        for name, value in vars(novelty.reference).items():
            if name != "kind":
                self.register_buffer(name, None if value is None else _own(value))
        self.register_buffer("held_out", _own(novelty.held_out))

    @classmethod
    def of(
        cls, model: nn.Module, host: nn.Module, novelty: Novelty, first: PointVoice, false_alarms: float | None
    ) -> "NoveltyVoice":
        """Return what measures a model's novelty; `first` is run at its mean anyhow if it is such a voice."""
        bayesian = not is_plain(host)
        shared = isinstance(first, LastLayerVoice) or not bayesian
        mean = None if shared else PointVoice(unbayesify(copy.deepcopy(host)))
        source = first if mean is None else mean
        start = None
        if novelty.at == "prior":
            source = start = PointVoice(_at_prior(host))
        base = base_of(host)
        source.model, tap = tapped(source.model, novelty.layer)
        alarms = novelty.false_alarms if false_alarms is None else false_alarms
        return cls(novelty, tap, mean, start, body=novelty.layer == base, false_alarms=alarms)

    def forward(self, inputs: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return novelty and p-value of a batch, for the outputs of the mean if the average has run it."""
        if self.mean is not None:
            logits = self.mean(inputs)
        if self.start is not None:
            self.start(inputs)
        given, output = self.tap.taken()
        mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
        features = pooled(hidden(output) if self.body else given, mask, self.layer).float()
        names = ("center", "means", "whitening", "overall", "bank")
        reference = Reference(self.kind, **{name: getattr(self, name) for name in names})
        novelty = Novelty(self.layer, "", reference, self.held_out, self.scales, self.false_alarms, 0.0)
        entropy = entropy_of(logits.float().softmax(-1)) if len(self.scales) > 1 else None
        score = novelty.score(features, entropy)
        return score, novelty.pvalue(score)


def _at_prior(host: nn.Module) -> nn.Module:
    """Return a plain copy of a model at its prior mean, with the buffers of the start."""
    with prior(host):
        plain = unbayesify(copy.deepcopy(host))
    parameters = dict(plain.named_parameters())
    with torch.no_grad():
        for name, posterior in named_posteriors(host):
            parameters[name].copy_(posterior.prior_mean)
    return plain


def tapped(model: nn.Module, layer: str) -> tuple[nn.Module, "Tap"]:
    """Put a tap on a layer of a model; return the model, which is the tap where the layer is the model."""
    if not layer:
        tap = model if isinstance(model, Tap) else Tap(model)
        tap.readers += 1
        return tap, tap
    parent, _, name = layer.rpartition(".")
    if isinstance(model, Tap):  # of the whole model: names go on inside
        model.layer, tap = tapped(model.layer, layer)
        return model, tap
    home = model.get_submodule(parent)
    found = home.get_submodule(name)
    tap = found if isinstance(found, Tap) else Tap(found)
    tap.readers += 1
    setattr(home, name, tap)
    return model, tap


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Tap(nn.Module):
    """A layer that keeps what it was last called with, and what it gave, for whoever runs the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.readers = 0
        self.calls: dict[int, list[tuple[Tensor, Any]]] = {}  # by thread, so that threads may share the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        output = self.layer(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()))
        self.calls[_thread()] = [(first, output)] * self.readers
        return output

    def taken(self) -> tuple[Tensor, Any]:
        """Return (first input, output) of this thread's last call, once for every reader."""
        calls = self.calls[_thread()]
        found = calls.pop()
        if not calls:
            del self.calls[_thread()]
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models look at `head.weight.dtype`


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def entropy_of(probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    return -torch.where(probs > 0, probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), 0.0).sum(-1)
