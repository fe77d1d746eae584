"""What `deploy` makes: tensor operations on plain weights, which every exporter takes and which need no bayesify."""

import copy
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from bayesify.core.modes import put_buffers_of_start
from bayesify.core.scopes import named_posteriors
from bayesify.core.wrap import unbayesify
from bayesify.prediction.batches import call_model, classes_last, logits_of, mean_and_log_var
from bayesify.prediction.gaussian import GaussianLogits, Spread, normal_points
from bayesify.prediction.last_layer import base_of, hidden, pooled, same_output, tapped
from bayesify.prediction.novelty import Novelty
from bayesify.prediction.predict import is_plain
from bayesify.quality.metrics import Reference
from bayesify.quality.regression import mixture_quantile

BISECTIONS = 40  # halve an interval to the rounding of float32
NUMBERS = ("regression", "heteroscedastic")


class Deployed(nn.Module):
    """A plain module that returns a prediction with its uncertainty; `deploy` makes it."""

    def __init__(
        self, voices: "Sequence[Voice]", stranger: "NoveltyVoice | None", level: float, about: dict[str, Any]
    ) -> None:
        super().__init__()
        self.voices, self.stranger, self.level, self.about = nn.ModuleList(voices), stranger, level, about
        self.task, self.threshold, self.temperature = about["task"], about["threshold"], about["temperature"] or 1.0
        members = dict.fromkeys(voice.member for voice in voices)
        self.noisy = self.task == "heteroscedastic" or all(voice.noise is not None for voice in voices)
        self.members = [[i for i, voice in enumerate(voices) if voice.member == m] for m in members]
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """Predict for one batch, given as the model takes it."""
        batch = named if named else inputs[0] if len(inputs) == 1 else inputs
        outputs = [voice(batch) for voice in self.voices]
        found = self._numbers(outputs) if self.task in NUMBERS else self._classes(outputs)
        if self.threshold is not None:
            found["answer"] = found["confidence"] >= self.threshold
        if self.stranger is not None:
            first = outputs[0].mean if isinstance(outputs[0], GaussianLogits) else outputs[0]
            score, pvalue = self.stranger(batch, first)
            usual = pvalue > self.stranger.false_alarms
            if self.threshold is not None:  # for each token, where there are some
                confident = found.pop("answer")
                usual = confident & usual.view(-1, *[1] * (confident.dim() - 1))
            found |= {"novelty": score, "novelty_pvalue": pvalue, "answer": usual}
        return found

    def train(self, mode: bool = True) -> "Deployed":
        """Stay in eval mode: dropout and batch statistics have no place in a prediction."""
        return super().train(False)

    @property
    def fields(self) -> list[str]:
        """The names of what `forward` returns, in their order."""
        certain = ["confidence"] if self.task == "classification" else []
        classes = ["probs", "prediction", *certain, "entropy", "mutual_information"]
        numbers = ["mean", "std", "epistemic", *(["low", "high"] if self.noisy else [])]
        names = numbers if self.task in NUMBERS else classes
        strange = [] if self.stranger is None else ["novelty", "novelty_pvalue"]
        return [*names, *strange, *(["answer"] if strange or self.threshold is not None else [])]

    def exported(self, *inputs: Any, **named: Any) -> torch.export.ExportedProgram:
        """Return the program of `torch.export` for inputs like these, in batches of any size.

        Every tensor's first dimension is the batch. Inputs that are given by keyword are one dict to the program.
        """
        batch = torch.export.Dim("batch", min=2)

        def several(value: Any) -> Any:  # torch.export takes a dimension of one for a constant
            return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() and len(value) == 1 else value

        def sizes(value: Any) -> Any:
            return ({0: batch} if value.dim() else {}) if isinstance(value, Tensor) else None

        # One dict for **named, whose names the guards of torch.export do not know.
        given = pytree.tree_map(several, (named,) if named else inputs)
        with torch.no_grad():
            return torch.export.export(self, given, dynamic_shapes={"inputs": pytree.tree_map(sizes, given)})

    def save(self, path: str | Path, *inputs: Any, **named: Any) -> None:
        """Write a file that runs without bayesify, with `about` as its metadata.

        Args:
            path: By its ending: ".pt2" for `torch.export.load`, ".onnx" for onnxruntime, whose outputs are `fields`, or
                ".ts" for `torch.jit.load`.
            *inputs: A batch as the model takes it, as an example.
            **named: Inputs by keyword, which are one dict to the loaded program; each an input of its own in ONNX.

        Raises:
            ValueError: The ending is another.
        """
        path, about = Path(path), self.metadata()
        if path.suffix == ".ts":
            traced: Any = torch.jit.trace(self, (named,) if named else inputs, strict=False)  # type: ignore[no-untyped-call]
            traced.save(str(path), _extra_files=about)
        elif path.suffix == ".pt2":
            torch.export.save(self.exported(*inputs, **named), path, extra_files=about)
        elif path.suffix == ".onnx":
            made: Any = torch.onnx.export(self.exported(*inputs, **named), verbose=False)
            graph = made.model.graph
            for value in (value for node in graph for value in node.outputs):
                value.name = f"value_{value.name}"  # which a field may have
            for value, name in zip(graph.outputs, self.fields, strict=True):
                value.name = name
            made.model.metadata_props.update(about)
            made.save(path)
        else:
            raise ValueError(f"path must end in .pt2, .onnx or .ts, got {str(path)!r}")

    def metadata(self) -> dict[str, str]:
        """Return `about` as texts, for the metadata of a file."""
        return {name: json.dumps(value) for name, value in self.about.items()}

    def _classes(self, outputs: list[Any]) -> dict[str, Tensor]:
        """Average probabilities and entropies: p = sum_v w_v p_v, and H(p) - sum_v w_v H(p_v)."""
        probs, information = [], []
        for voice, output in zip(self.voices, outputs, strict=True):
            if isinstance(output, GaussianLogits):
                probs.append(F.log_softmax(output.scaled(), -1).exp())
                own = output.mutual_information(voice.points)  # type: ignore[arg-type]
                information.append((entropy_of(probs[-1]) - own).clamp_min(0))
                continue
            logits = output.float() / self.temperature
            both = torch.stack([-logits, logits], -1) if self.task == "multilabel" else None
            probs.append(classes_last(logits).softmax(-1) if both is None else both.sigmoid())
            information.append(entropy_of(probs[-1]))
        average = self._average(probs)
        entropy = entropy_of(average)
        confidence, prediction = average.max(-1)
        answers = {"probs": average, "prediction": prediction, "confidence": confidence}
        if self.task == "multilabel":
            answers = {"probs": average[..., 1], "prediction": average[..., 1] > average[..., 0]}
        mutual = (entropy - self._average(information)).clamp_min(0)
        return answers | {"entropy": entropy, "mutual_information": mutual}

    def _numbers(self, outputs: list[Any]) -> dict[str, Tensor]:
        """Return the moments and the interval of the mixture of Gaussians, one for each voice."""
        means, spreads, noises = [], [], []
        for voice, output in zip(self.voices, outputs, strict=True):
            noise: Any = voice.noise
            if isinstance(output, GaussianLogits):
                mean, spread = output.mean, output.variance()
            else:
                mean = output.float()
                if self.task == "heteroscedastic":
                    mean, log_var = mean_and_log_var(mean)
                    noise = log_var.exp()
                spread = torch.zeros_like(mean)
            means.append(mean)
            spreads.append(spread)
            noises.append(torch.zeros_like(mean) if noise is None else noise.to(mean).expand_as(mean))
        mean = self._average(means)
        epistemic = self._average(spreads)
        for own in self.members:  # draws estimate their member's variance, members are all there are
            center = sum(means[i] for i in own) / len(own)
            within = sum((means[i] - center).square() for i in own) / max(len(own) - 1, 1)
            epistemic = epistemic + (within + (center - mean).square()) / len(self.members)
        std = (epistemic + self._average(noises)).sqrt()
        found = {"mean": mean, "std": std, "epistemic": epistemic.sqrt()}
        if not self.noisy:
            return found
        exact = any(isinstance(voice, LastLayerVoice) for voice in self.voices)
        if exact or len({len(own) for own in self.members}) > 1:
            centers, stds = mean.unsqueeze(0), std.unsqueeze(0)
        else:
            centers, stds = torch.stack(means), torch.stack(noises).sqrt()
        low, high = (mixture_quantile(centers, stds, (1 + sign * self.level) / 2, BISECTIONS) for sign in (-1, 1))
        return found | {"low": low, "high": high}

    def _average(self, values: list[Tensor]) -> Tensor:
        """Return the mean over members of the means over their voices."""
        return torch.stack([torch.stack([values[i] for i in own]).mean(0) for own in self.members]).mean(0)


# -- the parts of the average ------------------------------------------------------------------------------------------


class Voice(nn.Module):
    """A plain model with fixed weights: a member's mean or one of its draws, and the noise of a regression."""

    def __init__(self, member: int, model: nn.Module, noise: Tensor | None = None) -> None:
        super().__init__()
        self.member, self.model = member, model.eval().requires_grad_(False)
        self.register_buffer("noise", noise)

    def forward(self, inputs: Any) -> Tensor:
        """Return the model's outputs."""
        return logits_of(call_model(self.model, inputs))


class LastLayerVoice(Voice):
    """A model whose last layer has Gaussian weights: its outputs are Gaussian."""

    def __init__(self, member: int, model: nn.Module, noise: Tensor | None, layer: str, spread: Spread) -> None:
        model, head = tapped(model, layer)
        super().__init__(member, model, noise)
        self.head = head
        classes = spread.variances.shape[1]
        points = normal_points(classes) if classes > 1 else torch.zeros(1, 1)
        _hold(self, points=points.to(spread.variances.dtype), **spread._asdict())

    def forward(self, inputs: Any) -> GaussianLogits:  # type: ignore[override]
        """Return the distribution of the model's outputs."""
        output = super().forward(inputs)
        features, own = self.head.taken()
        watched = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None
        if watched and not same_output(own, output):
            raise ValueError("the Bayesian layer is not the model's last: pass samples=, a number of draws")
        return Spread(*(getattr(self, name) for name in Spread._fields)).logits(features, output)


class NoveltyVoice(nn.Module):
    """How strange an input is, by the statistics of `fit_novelty`."""

    held_out: Tensor

    def __init__(self, host: nn.Module, novelty: Novelty, first: Voice, false_alarms: float | None) -> None:
        super().__init__()
        at_mean = isinstance(first, LastLayerVoice) or is_plain(host)
        self.mean = None if at_mean else Voice(0, unbayesify(copy.deepcopy(host)))  # its entropy counts
        self.start = Voice(0, _at_prior(host)) if novelty.at == "prior" else None  # its features count
        source = self.start or self.mean or first
        source.model, self.tap = tapped(source.model, novelty.layer)
        self.layer, self.scales = novelty.layer, novelty.scales
        self.body = novelty.layer == base_of(host)  # whose outputs are the features, as of a Hugging Face model
        self.false_alarms = novelty.false_alarms if false_alarms is None else false_alarms
        _hold(self, held_out=novelty.held_out, **vars(novelty.reference))

    def forward(self, inputs: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return novelty and p-value of a batch, for the outputs of the mean if the average has run it."""
        if self.mean is not None:
            logits = self.mean(inputs)
        if self.start is not None:
            self.start(inputs)
        given, output = self.tap.taken()
        mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
        features = pooled(hidden(output) if self.body else given, mask, self.layer).float()
        reference = Reference(**{f.name: getattr(self, f.name) for f in fields(Reference)})
        novelty = Novelty(self.layer, "", reference, self.held_out, self.scales, self.false_alarms, 0.0)
        entropy = entropy_of(logits.float().softmax(-1)) if len(self.scales) > 1 else None
        score = novelty.score(features, entropy)
        return score, novelty.pvalue(score)


def _at_prior(host: nn.Module) -> nn.Module:
    """Return a plain copy of a model at its prior mean, with the buffers of the start."""
    twin = copy.deepcopy(host)
    put_buffers_of_start(twin)
    plain = unbayesify(twin)
    return with_values(plain, {name: posterior.prior_mean for name, posterior in named_posteriors(host)})


def with_values(plain: nn.Module, theta: dict[str, Tensor]) -> nn.Module:
    """Copy a plain model with other values of some parameters; the rest stays in memory once."""
    changed = dict(plain.named_parameters())
    kept = [t for n, t in (*changed.items(), *plain.named_buffers()) if n not in theta]
    twin = copy.deepcopy(plain, {id(t): t for t in kept})
    own = dict(twin.named_parameters())
    with torch.no_grad():
        for name, value in theta.items():
            own[name].copy_(value)
    return twin


def _hold(module: nn.Module, **tensors: Tensor | None) -> None:
    """Register copies of tensors as buffers."""
    for name, t in tensors.items():
        own = None if t is None else t.detach().clone(memory_format=torch.contiguous_format)
        module.register_buffer(name, own)


def entropy_of(probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    return -torch.where(probs > 0, probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), 0.0).sum(-1)
