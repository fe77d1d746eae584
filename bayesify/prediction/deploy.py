"""Turn a fitted model into a plain module whose forward returns the prediction with its uncertainty.

The module holds copies of the weights that `predict` would use: one model and the covariance of its last layer where
the prediction has a closed form, else a fixed number of draws or members. Its forward is made of tensor operations
only, so that torch.export, ONNX, TorchScript and torch.compile take it, and what they make runs without bayesify.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.core import VERSION
from bayesify.core.mixture import Mixture, components, mixture_in
from bayesify.core.ranks import is_whole
from bayesify.core.reading import Scope
from bayesify.core.scopes import check_module, named_posteriors, samples, scopes_of
from bayesify.core.wrap import unbayesify
from bayesify.prediction.deployed import NUMBERS, Deployed, LastLayerVoice, NoveltyVoice, Voice, with_values
from bayesify.prediction.novelty import novelty_of
from bayesify.prediction.predict import is_plain, share, task_of
from bayesify.prediction.regression import noise_of
from bayesify.quality.arrays import check_fraction

TASKS = ("classification", "tokens", *NUMBERS, "multilabel")


def deploy(
    model: nn.Module,
    *,
    temperature: float | None = None,
    threshold: float | None = None,
    samples: int | None = None,
    seed: int = 0,
    task: str | None = None,
    level: float = 0.95,
    false_alarms: float | None = None,
) -> Deployed:
    """Return a plain module that predicts what `predict` does, for a server or an exported file.

    Its forward takes what the model takes, and returns a dict of tensors: `probs`, `prediction`, `confidence`,
    `entropy` and `mutual_information` of classes, or `mean`, `std` and `epistemic` of a regression, and its interval
    from `low` to `high` where the noise is known;
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
        task: "classification", "tokens", "regression", "heteroscedastic" or "multilabel"; None is what `predict` takes.
        level: The probability of a regression's interval from `low` to `high`.
        false_alarms: The share of ordinary inputs that `answer` may refuse as strange; None is that of `fit_novelty`.

    Returns:
        The module. Its `about` is a dict that says how it was made, to which you may add; `save` writes it into files.

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
    task = task or task_of(model, [] if is_plain(model) else scopes_of(model))
    if task not in TASKS:
        raise ValueError(f"task must be one of {list(TASKS)}, got {task!r}")
    task = "classification" if task == "tokens" else task  # classes are last, or second of four dimensions
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
    check_fraction("level", level, "0.95 is customary")
    known = novelty_of(model)
    if false_alarms is not None:
        check_fraction("false_alarms", false_alarms, "0.05 is one in twenty")
        if known is None:
            raise ValueError("the model has no novelty to raise alarms by; call fit_novelty(model, train_loader) first")
    voices = list(_voices(model, samples, seed, task))
    if temperature not in (None, 1) and any(isinstance(voice, LastLayerVoice) for voice in voices):
        raise ValueError("a closed form has no samples to divide by a temperature; pass samples=, or no temperature")
    stranger = None if known is None else NoveltyVoice(*known, voices[0], false_alarms)
    about = _about(model, voices, task, temperature, threshold)
    if known is not None:
        about["novelty"] = {"layer": known[1].layer, "at": known[1].at, "held_out": len(known[1].held_out)}
    return Deployed(voices, stranger, level, about)


def _voices(model: nn.Module, wanted: int | None, seed: int, task: str) -> Iterator[Voice]:
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
            yield Voice(0, unbayesify(particles[draw % len(particles)]), _noise(model, scopes[0]))
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
        noise = _noise(member, scopes[i])
        plain = unbayesify(copy.deepcopy(member)) if form or thetas[i] or not any(counts) else None
        if plain is not None and form is not None:
            layer = next(name for name, module in member.named_modules() if module is form.head)
            yield LastLayerVoice(i, plain, noise, layer, form.spread())
        elif plain is not None:
            for theta in thetas[i] or [{}]:
                yield Voice(i, with_values(plain, theta), noise)


def _noise(model: nn.Module, scopes: Sequence[Scope]) -> Tensor | None:
    """Return the variances of a model's noise; None where it is not known."""
    found = noise_of(model, scopes)
    return None if found is None else found.float()


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


def _about(model: nn.Module, voices: Sequence[Voice], task: str, temperature: Any, threshold: Any) -> dict[str, Any]:
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
