"""Turn a fitted model into a plain module whose forward returns the prediction with its uncertainty.

The module holds copies of the weights that `predict` would use: one model and the covariance of its last layer where
the prediction has a closed form, else a fixed number of draws or members. Its forward is made of tensor operations
only, so that torch.export, ONNX, TorchScript and torch.compile take it, and what they make runs without bayesify.
"""

import copy
import json
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.mixing import components, mix
from bayesify.core.mixture import Mixture, mixture_in
from bayesify.core.seeds import is_whole
from bayesify.core.wrap import check_module, named_posteriors, samples, scopes_of, unbayesify
from bayesify.prediction.batches import call_model, logits_of
from bayesify.prediction.gaussian import GaussianLogits, Spread, normal_points
from bayesify.prediction.last_layer import same_output
from bayesify.prediction.predict import Member, is_plain
from bayesify.prediction.targets import classes_last, mean_and_log_var
from bayesify.quality.regression import check_level, mixture_quantile

BISECTIONS = 40  # halve an interval to the rounding of float32
TASKS = ("classification", "regression", "heteroscedastic", "multilabel")


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

    Its forward takes what the model takes, and returns a dict of tensors: for classes `probs`, `prediction`,
    `confidence`, `entropy` and `mutual_information`; for a regression `mean`, `std`, `epistemic`, `low` and `high`;
    after `fit_novelty` also `novelty` and `novelty_pvalue`; and `answer`, whether to answer at all, where there is a
    threshold or a novelty to decide by. It has no parametrizations and no hooks, and is in eval mode.

    A fitted last layer (`predict` in closed form) costs one pass. Other posteriors have `samples` draws baked in, each
    a pass, and the weights that differ between them are held once per draw: the prediction is that of `predict(model,
    x, samples=samples, seed=seed)`. A mixture or an ensemble has all of its members.

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
    divisor = 1.0 if temperature is None else float(temperature)
    if not (divisor > 0 and math.isfinite(divisor)):
        raise ValueError(f"temperature must be positive and finite, got {divisor}; 1.0 changes nothing")
    check_level(level)
    voices = list(_voices(model, samples, seed))
    if divisor != 1 and any(isinstance(voice.says, LastLayerVoice) for voice in voices):
        raise ValueError(
            "a closed form has no samples to divide by a temperature, and its prior was tuned; pass samples=, or no "
            "temperature"
        )
    return Deployed(voices, task, divisor, threshold, level, about=_about(model, voices, task, temperature, threshold))


class Voice(NamedTuple):
    """A part of the average: its member, the module that gives its outputs, and the noise of a regression."""

    member: int
    says: "PointVoice | LastLayerVoice"
    noise_var: Tensor | None


def _voices(model: nn.Module, wanted: int | None, seed: int) -> Iterator[Voice]:
    """Yield what `predict` would average: draws, members, closed forms."""
    if is_plain(model):
        yield Voice(0, PointVoice(copy.deepcopy(model)), None)
        return
    if wanted != 0 and any(p.particles for _, p in named_posteriors(model)):
        model = mix(components(model))
    mixture = mixture_in(model)
    if mixture is not None and mixture is not model:
        raise ValueError("the mixture lies inside another module; deploy the mixture itself")
    members = list(mixture.members) if isinstance(mixture, Mixture) else [model]
    members = members[:1] if wanted == 0 else members
    scopes = [scopes_of(member) for member in members]
    for own in scopes:
        for scope in own:
            scope.method.check_ready(scope.posteriors) if wanted != 0 else None
    forms = [own[0].method.closed_form(own[0]) if wanted is None and len(own) == 1 else None for own in scopes]
    counts = [
        0 if form else Member(i, own).share(wanted, len(members))
        for i, (own, form) in enumerate(zip(scopes, forms, strict=True))
    ]
    thetas = _thetas(model, members, counts, seed)
    speaking = [i for i, form in enumerate(forms) if form or thetas[i] or wanted == 0]
    for i in speaking:
        noise = next((v for scope in scopes[i] if (v := getattr(scope.method, "noise_var", None)) is not None), None)
        noise = None if noise is None else torch.as_tensor(noise, dtype=torch.float32)
        plain = unbayesify(copy.deepcopy(members[i]))
        form = forms[i]
        if form is not None:
            name = next(name for name, module in members[i].named_modules() if module is form.head)
            yield Voice(i, LastLayerVoice(plain, name, form.spread()), noise)
        elif not thetas[i]:
            yield Voice(i, PointVoice(plain), noise)
        else:
            for theta in thetas[i]:
                yield Voice(i, PointVoice(_with(plain, theta)), noise)


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


def _about(model: nn.Module, voices: Sequence[Voice], task: str, temperature: Any, threshold: Any) -> dict[str, Any]:
    """Say how a module was made: what an exported file carries as its metadata."""
    from bayesify import __version__

    scopes = [] if is_plain(model) else scopes_of(model)
    return {
        "bayesify": __version__,
        "torch": torch.__version__,
        "architecture": type(mixture.members[0] if (mixture := mixture_in(model)) else model).__name__,
        "methods": sorted({scope.method.name for scope in scopes}) or ["plain"],
        "prediction": "closed form" if any(isinstance(v.says, LastLayerVoice) for v in voices) else "draws",
        "passes": len(voices),
        "task": task,
        "temperature": None if temperature is None else float(temperature),
        "threshold": None if threshold is None else float(threshold),
        "scores": next((dict(scope.scores) for scope in scopes if scope.scores), {}),
    }


class PointVoice(nn.Module):
    """A model with fixed weights: its outputs have no spread of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)

    def forward(self, inputs: Any) -> Tensor:
        """Return the model's outputs."""
        return logits_of(call_model(self.model, inputs))


class LastLayerVoice(nn.Module):
    """A model whose last layer has Gaussian weights: its outputs are Gaussian."""

    def __init__(self, model: nn.Module, layer: str, spread: Spread) -> None:
        super().__init__()
        self.head = Tap(model.get_submodule(layer))
        if layer:
            parent, _, name = layer.rpartition(".")
            setattr(model.get_submodule(parent), name, self.head)
        self.model = (model if layer else self.head).eval().requires_grad_(False)
        for name, tensor in spread._asdict().items():
            self.register_buffer(name, None if tensor is None else _own(tensor))
        classes = spread.variances.shape[1]
        points = normal_points(classes) if classes > 1 else torch.zeros(1, 1)
        self.register_buffer("points", _own(points.to(spread.variances.dtype)))

    def forward(self, inputs: Any) -> GaussianLogits:
        """Return the distribution of the model's outputs."""
        output = logits_of(call_model(self.model, inputs))
        features, own = self.head.taken()
        watched = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None
        if watched and not same_output(own, output):
            raise ValueError("the Bayesian layer is not the model's last: pass samples=, a number of draws")
        return Spread(*(getattr(self, name) for name in Spread._fields)).logits(features, output)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Tap(nn.Module):
    """A layer that keeps what it was last called with, and what it gave, for whoever runs the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.calls: dict[int, tuple[Tensor, Any]] = {}  # by thread, so that threads may share the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        output = self.layer(*args, **kwargs)
        self.calls[_thread()] = (args[0] if args else next(iter(kwargs.values())), output)
        return output

    def taken(self) -> tuple[Tensor, Any]:
        """Return (first input, output) of this thread's last call, and forget them."""
        return self.calls.pop(_thread())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # models look at `head.weight.dtype`


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class Deployed(nn.Module):
    """A plain module that returns a prediction with its uncertainty; `deploy` makes it.

    Args:
        voices: What is averaged.
        task: The kind of outputs.
        temperature: What divides the logits.
        threshold: The least confidence of an answer.
        level: The probability of a regression's interval.
        about: How the module was made.
    """

    def __init__(
        self,
        voices: Sequence[Voice],
        task: str,
        temperature: float,
        threshold: float | None,
        level: float,
        *,
        about: dict[str, Any],
    ) -> None:
        super().__init__()
        self.voices = nn.ModuleList(voice.says for voice in voices)
        members = list(dict.fromkeys(voice.member for voice in voices))
        self.members = [[i for i, voice in enumerate(voices) if voice.member == m] for m in members]
        for i, voice in enumerate(voices):
            self.register_buffer(f"noise{i}", voice.noise_var)
        self.task, self.temperature, self.threshold, self.level = task, temperature, threshold, level
        self.about = about
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        """Predict for one batch, given as the model takes it."""
        batch = named if named else inputs[0] if len(inputs) == 1 else inputs
        if self.task in ("regression", "heteroscedastic"):
            return self._numbers(batch)
        found = self._classes(batch)
        if self.threshold is not None:
            found["answer"] = found["confidence"] >= self.threshold
        return found

    def train(self, mode: bool = True) -> "Deployed":
        """Stay in eval mode: dropout and batch statistics have no place in a prediction."""
        return super().train(False)

    @property
    def fields(self) -> list[str]:
        """The names of what `forward` returns, in their order."""
        if self.task in ("regression", "heteroscedastic"):
            return ["mean", "std", "epistemic", "low", "high"]
        names = ["probs", "prediction", *(["confidence"] if self.task == "classification" else [])]
        return [*names, "entropy", "mutual_information", *([] if self.threshold is None else ["answer"])]

    def exported(self, *inputs: Any, **named: Any) -> torch.export.ExportedProgram:
        """Return the program of `torch.export` for inputs like these, with a batch of any size from 2.

        What torch.export.save, torch.onnx.export and AOTInductor take. Every tensor's first dimension is the batch.
        Inputs that are given by keyword are one dict to the program.

        Args:
            *inputs: A batch as the model takes it, of two examples or more.
            **named: The same, by keyword.
        """
        batch = torch.export.Dim("batch", min=2)

        def shapes(value: Any) -> Any:
            if isinstance(value, Tensor):
                return {0: batch} if value.dim() else {}
            if isinstance(value, dict):
                return {key: shapes(v) for key, v in value.items()}
            return type(value)(map(shapes, value)) if isinstance(value, (tuple, list)) else None

        given = (named,) if named else inputs  # the guards of torch.export know no names of **named
        with torch.no_grad():
            return torch.export.export(self, given, dynamic_shapes={"inputs": shapes(given)})

    def metadata(self) -> dict[str, str]:
        """Return `about` as texts, for the metadata of a file."""
        return {name: json.dumps(value) for name, value in self.about.items()}

    def _classes(self, batch: Any) -> dict[str, Tensor]:
        """Average probabilities and entropies: p = sum_v w_v p_v, and H(p) - sum_v w_v H(p_v)."""
        probs, information = [], []
        for voice in self.voices:
            output = voice(batch)
            if isinstance(output, GaussianLogits):
                p = F.log_softmax(output.scaled(), -1).exp()
                probs.append(p)
                information.append((_entropy(p) - output.mutual_information(voice.points)).clamp_min(0))  # type: ignore[arg-type]
            else:
                logits = output.float() / self.temperature
                p = torch.stack([-logits, logits], -1).sigmoid() if self.task == "multilabel" else logits
                p = p if self.task == "multilabel" else classes_last(logits).softmax(-1)
                probs.append(p)
                information.append(_entropy(p))
        average = self._average(probs)
        entropy = _entropy(average)
        confidence, prediction = average.max(-1)
        answers = {"probs": average, "prediction": prediction, "confidence": confidence}
        if self.task == "multilabel":
            answers = {"probs": average[..., 1], "prediction": average[..., 1] > average[..., 0]}
        return answers | {
            "entropy": entropy,
            "mutual_information": (entropy - self._average(information)).clamp_min(0),
        }

    def _numbers(self, batch: Any) -> dict[str, Tensor]:
        """Return the moments and the interval of the mixture of Gaussians, one for each voice."""
        means, spreads, noises = [], [], []
        for i, voice in enumerate(self.voices):
            output = voice(batch)
            noise = getattr(self, f"noise{i}")
            if isinstance(output, GaussianLogits):
                mean, spread = output.mean, output.variance()
            elif self.task == "heteroscedastic":
                mean, log_var = mean_and_log_var(output.float())
                spread, noise = torch.zeros_like(mean), log_var.exp()
            else:
                mean = output.float()
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
        each = [torch.stack([values[i] for i in own]).mean(0) for own in self.members]
        return torch.stack(each).mean(0)


def _entropy(probs: Tensor) -> Tensor:
    """Return -sum_k p_k log p_k, with 0 log 0 = 0."""
    return -torch.where(probs > 0, probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), 0.0).sum(-1)
