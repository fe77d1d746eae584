"""Turn a fitted model into a plain module whose forward returns the prediction with its uncertainty.

The module holds copies of the weights that `predict` would use: one model and the covariance of its last layer where
the prediction has a closed form, else a fixed number of draws or members. Its forward is made of tensor operations
only, so that torch.export, ONNX, TorchScript and torch.compile take it, and what they make runs without bayesify.
"""

import copy
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core import VERSION
from bayesify.core.mixture import Mixture, components, mixture_in
from bayesify.core.ranks import is_whole
from bayesify.core.scopes import check_module, named_posteriors, samples, scopes_of
from bayesify.core.wrap import unbayesify
from bayesify.prediction.batches import classes_last, mean_and_log_var
from bayesify.prediction.gaussian import GaussianLogits
from bayesify.prediction.novelty import check_share, novelty_of
from bayesify.prediction.predict import is_plain, share
from bayesify.prediction.regression import noise_of
from bayesify.prediction.voices import LastLayerVoice, NoveltyVoice, PointVoice, entropy_of
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

    Its forward takes what the model takes, and returns a dict of tensors. For classes these are `probs`, `prediction`,
    `confidence`, `entropy` and `mutual_information`; for a regression `mean`, `std`, `epistemic`, `low` and `high`;
    after `fit_novelty` also `novelty` and `novelty_pvalue`. Where there is a threshold or a novelty, `answer` says
    whether the prediction is confident and the input not too strange. There are no parametrizations and no hooks.

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
    known = novelty_of(model)
    if false_alarms is not None:
        check_share(false_alarms)
        if known is None:
            raise ValueError("the model has no novelty to raise alarms by; call fit_novelty(model, train_loader) first")
    voices = list(_voices(model, samples, seed, task))
    stranger = None if known is None else NoveltyVoice.of(model, *known, voices[0].says, false_alarms)
    if divisor != 1 and any(isinstance(voice.says, LastLayerVoice) for voice in voices):
        raise ValueError(
            "a closed form has no samples to divide by a temperature, and its prior was tuned; pass samples=, or no "
            "temperature"
        )
    about = _about(model, voices, task, temperature, threshold)
    return Deployed(voices, task, divisor, threshold, level, stranger, about=about)


class Voice(NamedTuple):
    """A part of the average: its member, the module that gives its outputs, and the noise of a regression."""

    member: int
    says: "PointVoice | LastLayerVoice"
    noise_var: Tensor | None


def _voices(model: nn.Module, wanted: int | None, seed: int, task: str) -> Iterator[Voice]:
    """Yield what `predict` would average: draws, members, closed forms."""
    if is_plain(model):
        yield Voice(0, PointVoice(copy.deepcopy(model)), None)
        return
    mixture = mixture_in(model)
    if mixture is not None and mixture is not model:
        raise ValueError("the mixture lies inside another module; deploy the mixture itself")
    members = list(mixture.members) if isinstance(mixture, Mixture) else [model]
    members = members[:1] if wanted == 0 else members
    scopes = [scopes_of(member) for member in members]
    for own in scopes:
        for scope in own:
            scope.method.check_ready(scope.posteriors) if wanted != 0 else None
    particles = [] if mixture is not None or wanted == 0 else components(model)
    if len(particles) > 1:
        for draw in range(len(particles) if wanted is None else wanted):
            yield Voice(0, PointVoice(unbayesify(particles[draw % len(particles)])), None)
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
    speaking = [i for i, form in enumerate(forms) if form or thetas[i] or wanted == 0]
    for i in speaking:
        noise = noise_of(members[i], scopes[i])
        noise = None if noise is None else noise.float()
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
    scopes = [] if is_plain(model) else scopes_of(model)
    return {
        "bayesify": VERSION,
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


class Deployed(nn.Module):
    """A plain module that returns a prediction with its uncertainty; `deploy` makes it.

    Args:
        voices: What is averaged.
        task: The kind of outputs.
        temperature: What divides the logits.
        threshold: The least confidence of an answer.
        level: The probability of a regression's interval.
        stranger: What measures novelty.
        about: How the module was made.
    """

    def __init__(
        self,
        voices: Sequence[Voice],
        task: str,
        temperature: float,
        threshold: float | None,
        level: float,
        stranger: NoveltyVoice | None = None,
        *,
        about: dict[str, Any],
    ) -> None:
        super().__init__()
        self.stranger = stranger
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
        outputs = [voice(batch) for voice in self.voices]
        numbers = self.task in ("regression", "heteroscedastic")
        found = self._numbers(outputs) if numbers else self._classes(outputs)
        if self.stranger is not None:
            first = outputs[0].mean if isinstance(outputs[0], GaussianLogits) else outputs[0]
            found["novelty"], found["novelty_pvalue"] = self.stranger(batch, first)
        if self.threshold is not None:
            found["answer"] = found["confidence"] >= self.threshold
        if self.stranger is not None:
            usual = found["novelty_pvalue"] > self.stranger.false_alarms
            found["answer"] = usual & found["answer"] if self.threshold is not None else usual
        return found

    def train(self, mode: bool = True) -> "Deployed":
        """Stay in eval mode: dropout and batch statistics have no place in a prediction."""
        return super().train(False)

    @property
    def fields(self) -> list[str]:
        """The names of what `forward` returns, in their order."""
        names = ["probs", "prediction", *(["confidence"] if self.task == "classification" else [])]
        names += ["entropy", "mutual_information"]
        if self.task in ("regression", "heteroscedastic"):
            names = ["mean", "std", "epistemic", "low", "high"]
        names += [] if self.stranger is None else ["novelty", "novelty_pvalue"]
        return [*names, *([] if self.threshold is None and self.stranger is None else ["answer"])]

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

    def _classes(self, outputs: list[Any]) -> dict[str, Tensor]:
        """Average probabilities and entropies: p = sum_v w_v p_v, and H(p) - sum_v w_v H(p_v)."""
        probs, information = [], []
        for voice, output in zip(self.voices, outputs, strict=True):
            if isinstance(output, GaussianLogits):
                p = F.log_softmax(output.scaled(), -1).exp()
                probs.append(p)
                information.append((entropy_of(p) - output.mutual_information(voice.points)).clamp_min(0))  # type: ignore[arg-type]
            else:
                logits = output.float() / self.temperature
                p = torch.stack([-logits, logits], -1).sigmoid() if self.task == "multilabel" else logits
                p = p if self.task == "multilabel" else classes_last(logits).softmax(-1)
                probs.append(p)
                information.append(entropy_of(p))
        average = self._average(probs)
        entropy = entropy_of(average)
        confidence, prediction = average.max(-1)
        answers = {"probs": average, "prediction": prediction, "confidence": confidence}
        if self.task == "multilabel":
            answers = {"probs": average[..., 1], "prediction": average[..., 1] > average[..., 0]}
        return answers | {
            "entropy": entropy,
            "mutual_information": (entropy - self._average(information)).clamp_min(0),
        }

    def _numbers(self, outputs: list[Any]) -> dict[str, Tensor]:
        """Return the moments and the interval of the mixture of Gaussians, one for each voice."""
        means, spreads, noises = [], [], []
        for i, output in enumerate(outputs):
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
