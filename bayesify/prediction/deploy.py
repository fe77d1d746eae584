"""Turn a fitted model into a plain module whose forward returns the prediction with its uncertainty.

The module holds copies of the weights that `predict` would use: one model and the covariance of its last layer where
the prediction has a closed form, else a fixed number of draws or members. Its forward is made of tensor operations
only, so that torch.export, ONNX, TorchScript and torch.compile take it, and what they make runs without bayesify.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from bayesify.core import VERSION
from bayesify.core.mixture import Mixture, components, mixture_in
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import check_module, named_posteriors, prior, samples, scopes_of
from bayesify.core.wrap import unbayesify
from bayesify.prediction.batches import call_model, classes_last, logits_of, mean_and_log_var
from bayesify.prediction.gaussian import GaussianLogits, Spread, normal_points
from bayesify.prediction.last_layer import base_of, hidden, pooled, same_output, tapped
from bayesify.prediction.novelty import Novelty, check_share, novelty_of
from bayesify.prediction.predict import is_plain, share
from bayesify.prediction.regression import noise_of
from bayesify.quality.metrics import Reference
from bayesify.quality.regression import check_level, mixture_quantile

BISECTIONS = 40  # halve an interval to the rounding of float32
NUMBERS = ("regression", "heteroscedastic")
TASKS = ("classification", *NUMBERS, "multilabel")


def deploy(
    model: nn.Module,
    *,
    temperature: float | None = None,
    threshold: float | None = None,
    samples: int | None = None,
    seed: int = 0,
    task: str = "classification",
    level: float = 0.95,
    false_alarms: float | None = None,
) -> "Deployed":
    """Return a plain module that predicts what `predict` does, for a server or an exported file.

    Its forward takes what the model takes, and returns a dict of tensors: `probs`, `prediction`, `confidence`,
    `entropy` and `mutual_information` of classes, or `mean`, `std`, `epistemic`, `low` and `high` of a regression;
    after `fit_novelty` also `novelty` and `novelty_pvalue`. With a threshold or a novelty, `answer` says whether the
    prediction is confident and the input is not too strange.

    A fitted last layer costs one pass. Other posteriors have `samples` draws baked in, each a pass: the prediction is
    that of `predict(model, x, samples=samples, seed=seed)`. A mixture or an ensemble has all of its members.

    Args:
        model: A bayesified model, or a plain one, which is a point. It is copied, not changed.
        temperature: What divides the logits, a number or what `metrics.fit_temperature` found: the prediction is that
            of `predict(...).tempered(temperature)`.
        threshold: The least confidence of an answer, such as `metrics.abstain_threshold` found.
        samples: How many draws of a posterior without a closed form; None is what `predict` takes.
        seed: Which draws.
        task: "classification", "regression", "heteroscedastic" or "multilabel".
        level: The probability of a regression's interval from `low` to `high`.
        false_alarms: The share of ordinary inputs that `answer` may refuse as strange; None is that of `fit_novelty`.

    Returns:
        The module; `about` is a dict that says how it was made.

    Raises:
        ValueError: An argument is out of range, or does not fit the model's posterior.

    Example:
        >>> import torch
        >>> from bayesify import bayesify, deploy
        >>> deployed = deploy(bayesify(torch.nn.Linear(3, 2), "vi"), threshold=0.8)
        >>> sorted(deployed(torch.ones(4, 3)))
        ['answer', 'confidence', 'entropy', 'mutual_information', 'prediction', 'probs']
    """
    check_module(model)
    if task not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {task!r}")
    if samples is not None and (not is_whole(samples) or samples < 0):
        raise ValueError(f"samples must be an integer >= 0, or None, got {samples!r}")
    if threshold is not None and not (0 <= float(threshold) <= 1 or float(threshold) == math.inf):
        raise ValueError(f"threshold must be a confidence between 0 and 1, got {threshold!r}")
    if threshold is not None and task != "classification":
        raise ValueError(f"a threshold is on the confidence of a classification, and the task is {task!r}")
    if temperature is not None and task not in ("classification", "multilabel"):
        raise ValueError(f"a temperature divides logits, and the task is {task!r}")
    if temperature is not None and not 0 < float(temperature) < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}; 1.0 changes nothing")
    check_level(level)
    known = novelty_of(model)
    if false_alarms is not None:
        check_share(false_alarms)
        if known is None:
            raise ValueError("the model has no novelty to raise alarms by; call fit_novelty(model, train_loader) first")
    voices = list(_voices(model, samples, seed, task))
    if temperature not in (None, 1) and any(isinstance(voice, LastLayerVoice) for voice in voices):
        raise ValueError("a closed form has no samples to divide by a temperature; pass samples=, or no temperature")
    stranger = None if known is None else NoveltyVoice(*known, voices[0], false_alarms)
    return Deployed(voices, stranger, level, _about(model, voices, task, temperature, threshold))


def _voices(model: nn.Module, wanted: int | None, seed: int, task: str) -> Iterator["Voice"]:
    """Yield what `predict` would average: draws, members, closed forms."""
    if is_plain(model):
        yield Voice(0, copy.deepcopy(model))
        return
    mixture = mixture_in(model)
    if mixture is not None and mixture is not model:
        raise ValueError("the mixture lies inside another module; deploy the mixture itself")
    members = list(mixture.members) if isinstance(mixture, Mixture) else [model]
    members = members[:1] if wanted == 0 else members
    scopes = [scopes_of(member) for member in members]
    for scope in (scope for own in scopes for scope in own if wanted != 0):
        scope.method.check_ready(scope.posteriors)
    particles = [] if mixture is not None or wanted == 0 else components(model)
    if len(particles) > 1:
        for draw in range(len(particles) if wanted is None else wanted):
            yield Voice(0, unbayesify(particles[draw % len(particles)]))
        return
    forms = [own[0].method.closed_form(own[0]) if wanted is None and len(own) == 1 else None for own in scopes]
    curved = any(f is None and any(s.method.linear for s in own) for f, own in zip(forms, scopes, strict=True))
    if curved and task == "regression" and wanted != 0:
        raise ValueError(
            "predict reads this regression linearly in its weights, which a plain module cannot; fit the last layer "
            "alone (include=), or deploy the mean with samples=0"
        )
    counts = [
        0 if form else share(own, i, len(members), wanted)
        for i, (own, form) in enumerate(zip(scopes, forms, strict=True))
    ]
    thetas = _thetas(model, members, counts, seed)
    for i, (member, form) in enumerate(zip(members, forms, strict=True)):
        noise = noise_of(member, scopes[i])
        noise = None if noise is None else noise.float()
        plain = unbayesify(copy.deepcopy(member)) if form or thetas[i] or wanted == 0 else None
        if plain is not None and form is not None:
            layer = next(name for name, module in member.named_modules() if module is form.head)
            yield LastLayerVoice(i, plain, noise, layer, form.spread())
        elif plain is not None:
            for theta in thetas[i] or [{}]:
                yield Voice(i, _with(plain, theta), noise)


def _thetas(model: nn.Module, members: list[nn.Module], counts: list[int], seed: int) -> list[list[dict[str, Tensor]]]:
    """Return the draws of every member by plain name, those of `predict` with this seed."""
    found: list[list[dict[str, Tensor]]] = [[] for _ in members]
    with torch.no_grad():
        for draw in samples(model, len(members) * max(counts), seed) if any(counts) else ():
            i = draw % len(members)
            if len(found[i]) < counts[i]:
                moving = [(name, p) for name, p in named_posteriors(members[i]) if p.moves]
                found[i].append({name: p(p.original).detach().clone() for name, p in moving})
    return found


def _with(plain: nn.Module, theta: dict[str, Tensor]) -> nn.Module:
    """Copy a plain model with other values of some parameters; the rest stays in memory once."""
    changed = dict(plain.named_parameters())
    kept = [t for n, t in (*changed.items(), *plain.named_buffers()) if n not in theta]
    twin = copy.deepcopy(plain, {id(t): t for t in kept})
    own = dict(twin.named_parameters())
    with torch.no_grad():
        for name, value in theta.items():
            own[name].copy_(value)
    return twin


def _about(model: nn.Module, voices: Sequence["Voice"], task: str, temperature: Any, threshold: Any) -> dict[str, Any]:
    """Return how a module was made: what an exported file carries as its metadata."""
    scopes = [] if is_plain(model) else scopes_of(model)
    return {
        "bayesify": VERSION,
        "torch": torch.__version__,
        "architecture": type(mixture.members[0] if (mixture := mixture_in(model)) else model).__name__,
        "methods": sorted({scope.method.name for scope in scopes}) or ["plain"],
        "prediction": "closed form" if any(isinstance(v, LastLayerVoice) for v in voices) else "draws",
        "passes": len(voices),
        "task": task,
        "temperature": None if temperature is None else float(temperature),
        "threshold": None if threshold is None else float(threshold),
        "scores": next((dict(scope.scores) for scope in scopes if scope.scores), {}),
    }


class Deployed(nn.Module):
    """A plain module that returns a prediction with its uncertainty; `deploy` makes it."""

    def __init__(
        self, voices: "Sequence[Voice]", stranger: "NoveltyVoice | None", level: float, about: dict[str, Any]
    ) -> None:
        super().__init__()
        self.voices, self.stranger, self.level, self.about = nn.ModuleList(voices), stranger, level, about
        self.task, self.threshold, self.temperature = about["task"], about["threshold"], about["temperature"] or 1.0
        members = dict.fromkeys(voice.member for voice in voices)
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
            answer = usual & found.pop("answer") if self.threshold is not None else usual
            found |= {"novelty": score, "novelty_pvalue": pvalue, "answer": answer}
        return found

    def train(self, mode: bool = True) -> "Deployed":
        """Stay in eval mode: dropout and batch statistics have no place in a prediction."""
        return super().train(False)

    @property
    def fields(self) -> list[str]:
        """The names of what `forward` returns, in their order."""
        certain = ["confidence"] if self.task == "classification" else []
        classes = ["probs", "prediction", *certain, "entropy", "mutual_information"]
        names = ["mean", "std", "epistemic", "low", "high"] if self.task in NUMBERS else classes
        strange = [] if self.stranger is None else ["novelty", "novelty_pvalue"]
        return [*names, *strange, *(["answer"] if strange or self.threshold is not None else [])]

    def exported(self, *inputs: Any, **named: Any) -> torch.export.ExportedProgram:
        """Return the program of `torch.export` for inputs like these, which `torch.onnx.export` takes too.

        Every tensor's first dimension is the batch, of two examples or more. Inputs that are given by keyword are one
        dict to the program.
        """
        batch = torch.export.Dim("batch", min=2)
        given = (named,) if named else inputs  # the guards of torch.export know no names of **named
        sized = lambda value: ({0: batch} if value.dim() else {}) if isinstance(value, Tensor) else None  # noqa: E731
        with torch.no_grad():
            return torch.export.export(self, given, dynamic_shapes={"inputs": pytree.tree_map(sized, given)})

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
        exact = any(isinstance(voice, LastLayerVoice) for voice in self.voices)
        if exact or len({len(own) for own in self.members}) > 1:
            centers, stds = mean.unsqueeze(0), std.unsqueeze(0)
        else:
            centers, stds = torch.stack(means), torch.stack(noises).sqrt()
        low, high = (mixture_quantile(centers, stds, (1 + sign * self.level) / 2, BISECTIONS) for sign in (-1, 1))
        return {"mean": mean, "std": std, "epistemic": epistemic.sqrt(), "low": low, "high": high}

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
    with prior(host):
        plain = unbayesify(copy.deepcopy(host))
    return _with(plain, {name: posterior.prior_mean for name, posterior in named_posteriors(host)})


def _hold(module: nn.Module, **tensors: Tensor | None) -> None:
    """Register copies of tensors as buffers."""
    for name, t in tensors.items():
        own = None if t is None else t.detach().clone(memory_format=torch.contiguous_format)
        module.register_buffer(name, own)


def entropy_of(probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    return -torch.where(probs > 0, probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), 0.0).sum(-1)
