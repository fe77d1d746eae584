"""Every number and picture of a prediction on one HTML page without links, or its numbers as JSON."""

from __future__ import annotations

import base64
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, TypeAlias

import torch

from bayesify.core import VERSION
from bayesify.quality import metrics
from bayesify.quality.calibration import tempered_probs
from bayesify.quality.conformal import conformal_pvalues

_PIXELS_PER_INCH = 120
_NO_INFORMATION = 1e-6
_SCORES: tuple[tuple[str, str, Callable[..., float]], ...] = (
    ("Error", "fraction of wrong predictions", metrics.error),
    ("NLL", "mean negative log-likelihood, nats", metrics.nll),
    ("Brier score", "squared distance to the one-hot label, 0 to 2", metrics.brier),
    ("ECE, top label", "expected calibration error, 15 bins of the highest probability", metrics.ece),
    ("MCE, top label", "the largest gap of these bins; in the first column, that of {worst} examples", metrics.mce),
    ("ECE, pooled", "the same over the probabilities of all classes", partial(metrics.ece, kind="pooled")),
    ("MCE, pooled", "the largest gap of these bins", partial(metrics.mce, kind="pooled")),
    ("AURC", "area under the risk-coverage curve, by confidence", metrics.aurc),
)
_REGRESSION = {
    "rmse": ("RMSE", "root of the mean squared error"),
    "nll": ("NLL", "mean negative log-likelihood, nats"),
    "crps": ("CRPS", "continuous ranked probability score, in the target's unit"),
    "coverage": ("Coverage", "targets inside the 95% interval"),
    "width": ("Width", "mean width of the 95% interval"),
}
_RISKS = (0.01, 0.02, 0.05, 0.1)
_UNCERTAINTIES = (
    ("Confidence", "the highest probability", "confidence"),
    ("Entropy", "total uncertainty, nats", "entropy"),
    ("Expected entropy", "aleatoric: noise that more data would not remove", "expected_entropy"),
    ("Mutual information", "epistemic: what the posterior samples disagree about", "mutual_information"),
)
_DEVIATIONS = (
    ("Epistemic", "what the posterior samples disagree about", "epistemic"),
    ("Aleatoric", "noise of the data; 0 where it is not known", "aleatoric"),
    ("Both", "together", "std"),
)


class Table(NamedTuple):
    """A table: its rows are a name, an explanation, and a number or text for each column but the first."""

    header: Sequence[str]
    rows: Sequence[tuple[Any, ...]]


Pictures: TypeAlias = dict[str, Callable[[], Any]]  # captions, with functions that return a figure
Part: TypeAlias = Table | Pictures | str


def report(
    predictive: Any,
    path: str | os.PathLike[str],
    *,
    ood: Any = None,
    temperature: metrics.Temperature | float | None = None,
    title: str = "Predictive uncertainty",
    validation: Any = None,
    threshold: float | None = None,
) -> Path:
    """Write one self-contained HTML page with every number and picture of a prediction, or its numbers as JSON.

    Args:
        predictive: What `predict` returned for classification or regression; without labels, only the uncertainties
            are shown.
        path: The file to write, replaced as a whole; one that ends in .json gets the numbers alone.
        ood: The prediction for out-of-distribution data, to measure its detection.
        temperature: A temperature fitted on other data. If None it is fitted on the labels of `predictive`, which
            flatters the numbers, and the page says so.
        title: The heading.
        validation: The prediction for the validation set, to compare `predictive` with: a window of production data, in
            the order of its arrival, whose confidence, abstentions, alarms and drift are shown.
        threshold: The confidence below which the model abstains, for this comparison. If None, that of
            `metrics.abstain_threshold` for the validation set, where it has labels.

    Returns:
        The path.

    Raises:
        TypeError: `predictive`, `ood` or `validation` has no class probabilities.

    Example:
        >>> import tempfile
        >>> from bayesify.prediction.predictive import Predictive
        >>> out = Predictive.from_logits(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report(out, f"{folder}/report.html").name
        'report.html'
    """
    regression = hasattr(predictive, "interval")
    for name, value in {"predictive": predictive, "ood": ood, "validation": validation}.items():
        missing = getattr(value, "interval" if regression else "probs", None) is None
        if missing and (name == "predictive" or value is not None):
            what = "a regression, as predictive" if regression else "class probabilities"
            raise TypeError(f"{name} must hold {what}, got {type(value).__name__}; pass what predict(...) returns")
    sections: dict[str, list[Part]] = {}
    if validation is not None:
        sections["Compared with the validation set"] = _compared(predictive, validation, threshold)
    predictive, ood = (x.flat() if hasattr(x, "flat") else x for x in (predictive, ood))
    draws = predictive.num_samples
    facts = [f"{len(predictive):,} examples", *([] if regression else [f"{predictive.probs.shape[1]:,} classes"])]
    facts += [f"method {predictive.method}"] if predictive.method else []
    drawn = f"{draws} posterior sample{'s'[: draws > 1]}" if draws else "no samples"
    facts += ["in closed form" if predictive.closed_form else drawn]
    facts += [] if ood is None else [f"{len(ood):,} out-of-distribution examples"]
    if regression:
        sections |= _regression(predictive)
    else:
        sections |= _scored(predictive, temperature) | _uncertainty(predictive, ood)
    made = f"Made on {date.today().isoformat()} by bayesify {VERSION} with torch {torch.__version__}."
    head = {"title": title, "facts": " · ".join(facts), "made": made}
    return _write(Path(path), (_json if str(path).endswith(".json") else _html)(head, sections))


def _plot(name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Return a function that draws one of `plots`; JSON needs no picture, and so no matplotlib."""
    return lambda: getattr(import_module("bayesify.quality.plots"), name)(*args, **kwargs)


def _share(chosen: Any) -> float:
    return float(chosen.double().mean())


def _alarms(predictive: Any) -> str:
    return f"The alarm for {predictive.false_alarms:.1%} false alarms flags {_share(predictive.alarm()):.1%} of the"


def _means(sets: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return rows of the mean uncertainties of some predictions."""
    kinds = _DEVIATIONS if hasattr(next(iter(sets.values())), "interval") else _UNCERTAINTIES
    return [(name, text, *(float(getattr(x, kind).mean()) for x in sets.values())) for name, text, kind in kinds]


def informative(predictive: Any) -> dict[str, Any]:
    """Return the uncertainties of each example that say something: not those that are zero or not known."""
    regression = hasattr(predictive, "interval")
    kinds = {"Standard deviation": predictive.std} if regression else {"Entropy": predictive.entropy}
    if not regression and predictive.mutual_information.max() > _NO_INFORMATION:
        kinds["Mutual information"] = predictive.mutual_information
    kinds = {name: value.reshape(len(predictive), -1).mean(1) for name, value in kinds.items()}
    if predictive.novelty is not None:
        kinds["Novelty"] = predictive.novelty
    return kinds


def shared(first: Any, second: Any) -> dict[str, tuple[Any, Any]]:
    """Return the uncertainties that both predictions have."""
    one, other = informative(first), informative(second)
    return {name: (one[name], other[name]) for name in one if name in other}


def _compared(window: Any, validation: Any, threshold: float | None) -> list[Part]:
    """Compare a window of production data with the validation set."""
    pairs = shared(validation, window)  # one number for each example, as its tokens depend on each other
    window, validation = (x.flat() if hasattr(x, "flat") else x for x in (window, validation))
    sets = {"Validation": validation, "Window": window}
    rows = [("Examples", "", len(validation), len(window)), *_means(sets)]
    if not hasattr(window, "interval"):
        if threshold is None and validation.labels is not None:
            threshold = metrics.abstain_threshold(validation.probs, validation.labels)
        if threshold is not None:
            shares = (_share(x.confidence < threshold) for x in sets.values())
            rows.append(("Abstention rate", f"confidence below {threshold}", *shares))
    if "Novelty" in pairs:
        level, text = validation.false_alarms, "median; near 0.5 for data like the validation set"
        rows.append(("Novelty p-value", text, *(float(x.novelty_pvalue.double().median()) for x in sets.values())))
        rows.append(("Alarms", f"p-value of at most {level:.3g}", *(_share(x.alarm(level)) for x in sets.values())))
    drifts, changes = list[tuple[Any, ...]](), list[str]()
    for name, (known, new) in pairs.items():
        found = metrics.drift(conformal_pvalues(new.double(), known.double().sort().values), held_out=len(known))
        drifts.append((f"Drift: {name.lower()}", "higher than in validation", found.at, float(found.wealth.max())))
        changes += [] if found.at is None else [f"{name.lower()} is higher, seen at example {found.at}"]
    pictures = {k: _plot("uncertainty_histogram", *pair, quantity=k, names=tuple(sets)) for k, pair in pairs.items()}
    verdict = f"The data has changed: {'; '.join(changes)}." if changes else "No drift was detected."
    note = f"{verdict} Each test gives a false alarm with a probability of 1%, however long the window is."
    return [note, Table(("", *sets), rows), Table(("", "First alarm", "Wealth (alarm at 100)"), drifts), pictures]


def _regression(predictive: Any) -> dict[str, list[Part]]:
    """Return scores, the calibration of intervals, and both kinds of uncertainty."""
    uncertainty: list[Part] = [Table(("Standard deviation", "Mean"), _means({"Mean": predictive}))]
    uncertainty += [] if predictive.novelty is None else [f"{_alarms(predictive)} examples."]
    if predictive.labels is None:
        note = "The data has no targets: scores and calibration are left out."
        return {"Scores": [note], "Uncertainty": uncertainty}
    scores: list[Part] = [Table(("", "Value"), [(*_REGRESSION[k], v) for k, v in predictive.scores.items()])]
    if predictive.noise_known:
        scores.append({"Targets inside the intervals": _plot("calibration_curve", predictive)})
    else:
        scores.append("The noise of the data is not known: see with_noise and metrics.fit_noise.")
    return {"Scores": scores, "Uncertainty": uncertainty}


def _scored(predictive: Any, given: metrics.Temperature | float | None) -> dict[str, list[Part]]:
    """Return the scores before and after temperature scaling, the diagrams of both, and what abstaining gains."""
    probs, labels = predictive.probs, predictive.labels
    if labels is None:
        return {"Scores": ["The data has no labels: scores, calibration and temperature are left out."]}
    pictures: Pictures = {
        "Top label: the highest probability of each example": _plot("reliability_diagram", probs, labels),
        "Pooled: the probabilities of all classes": _plot("reliability_diagram", probs, labels, kind="pooled"),
    }
    columns = {"closed form" if predictive.closed_form else "T = 1": probs}
    scaling, remark = _temperature(predictive, given)
    if scaling is not None:
        # Beside a closed form, the temperature is one on the logits of the mean.
        t, name = float(scaling), f"T = {float(scaling):.3f}"
        after = tempered_probs(predictive.logits, t) if predictive.weights is None else predictive.tempered(t).probs
        columns[f"mean, {name}" if predictive.closed_form else name] = after
        pictures[f"Top label at {name}"] = _plot("reliability_diagram", after, labels)
    if isinstance(scaling, metrics.Temperature):
        pictures["Likelihood by temperature"] = _plot("temperature_curve", scaling)
    table = metrics.reliability(probs, labels)
    worst = int(table.counts[(table.accuracy - table.confidence).abs().nan_to_num(-1.0).argmax()])
    rows = [
        (name, meaning.format(worst=worst), *(score(p, labels) for p in columns.values()))
        for name, meaning, score in _SCORES
    ]
    scores: list[Part] = [Table(("", *columns), rows), remark]
    return {"Scores": scores, "Calibration": [pictures], "Selective prediction": _selective(predictive)}


def _temperature(predictive: Any, given: Any) -> tuple[Any, str]:
    """Return the temperature to show, if there is one, and where it comes from or why there is none."""
    if predictive.logits is None:
        return None, "No temperature scaling: it needs the logits of each sample, and this prediction kept none."
    if given is not None:
        return given, f"T = {float(given):.4f} was fitted on other data."
    try:
        fitted = metrics.fit_temperature(predictive)
    except metrics.TemperatureError as error:
        return None, f"No temperature scaling: {error}."
    return fitted, f"T = {float(fitted):.4f} was fitted on these labels (optimistic): fit it on held-out data instead."


def _selective(predictive: Any) -> list[Part]:
    """Show what refusing the uncertain examples gains, and how uncertain the wrong ones are."""
    probs, labels = predictive.probs, predictive.labels
    rankings = {"Confidence": None, **informative(predictive)}
    curves = {name: metrics.risk_coverage(probs, labels, uncertainty=values) for name, values in rankings.items()}
    pictures: Pictures = {"Error rate when the uncertain examples are refused": _plot("risk_coverage", curves)}
    wrong = probs.argmax(1) != labels.to(probs.device)
    if wrong.any() and not wrong.all():
        groups = predictive.entropy[~wrong], predictive.entropy[wrong]
        title = "Entropy of right and wrong predictions"
        pictures[title] = _plot("uncertainty_histogram", *groups, names=("Right", "Wrong"))
    rows = []
    for risk in _RISKS:
        threshold = metrics.abstain_threshold(probs, labels, max_risk=risk)
        answered = _share(predictive.confidence >= threshold)
        text = f"answer {answered:.0%}" if answered else threshold.reason.split(":")[0] or "answer none of these"
        rows.append((f"Error at most {risk:.0%}", "with 95% confidence, on new data of this source", text))
    return [pictures, Table(("Promise", "From these labels"), rows)]


def _uncertainty(predictive: Any, ood: Any) -> dict[str, list[Part]]:
    """Tabulate the mean uncertainties, and how well they detect out-of-distribution data."""
    if ood is None:
        return {"Uncertainty": [Table(("", "Mean"), _means({"Mean": predictive}))]}
    sets, pairs = {"In-distribution": predictive, "Out-of-distribution": ood}, shared(predictive, ood)
    rows = [
        ("AUROC", "1 is perfect, 0.5 is chance", *(metrics.auroc(*pair) for pair in pairs.values())),
        ("FPR95", "false alarms at 95% detection", *(metrics.fpr95(*pair) for pair in pairs.values())),
    ]
    parts: list[Part] = [Table(("", *pairs), rows)]
    if "Novelty" in pairs:
        parts.append(f"{_alarms(predictive)} in-distribution examples. {_alarms(ood)} out-of-distribution examples.")
    if "Mutual information" not in pairs:
        parts.append("Mutual information is left out: it is zero, as it is for a single sample.")
    parts.append({name: _plot("uncertainty_histogram", *pair, quantity=name) for name, pair in pairs.items()})
    return {"Uncertainty": [Table(("", *sets), _means(sets))], "Out-of-distribution detection": parts}


def _json(head: dict[str, str], sections: Mapping[str, Sequence[Part]]) -> str:
    """Return {section: {row: {column: value}}}, with the notes of each section; what is not finite is null."""
    content: dict[str, Any] = {**head}
    for heading, parts in sections.items():
        content[heading] = {"notes": [part for part in parts if isinstance(part, str)]} | {
            name: {k: None if v in (math.inf, -math.inf) else v for k, v in zip(part.header[1:], values, strict=True)}
            for part in parts
            if isinstance(part, Table)
            for name, _, *values in part.rows
        }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _html(head: dict[str, str], sections: Mapping[str, Sequence[Part]]) -> str:
    body = "\n".join(
        "\n".join([f"<section>\n<h2>{escape(heading)}</h2>", *map(_part, parts), "</section>"])
        for heading, parts in sections.items()
    )
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute({name: escape(text) for name, text in head.items()}, body=body)


def _part(part: Part) -> str:
    if isinstance(part, str):
        return f'<p class="note">{escape(part)}</p>'
    if isinstance(part, dict):
        shown = "\n".join(_figure(caption, picture) for caption, picture in part.items())
        return f'<div class="pictures">\n{shown}\n</div>' if part else ""
    head = "".join(f'<th scope="col">{escape(cell.replace(" ", chr(160)))}</th>' for cell in part.header)
    body = "\n".join(
        f"<tr><td>{escape(name)}<small>{escape(meaning)}</small></td>"
        + "".join(f"<td>{escape(_shown(value))}</td>" for value in values)
        + "</tr>"
        for name, meaning, *values in part.rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _shown(value: Any) -> str:
    """Format a number with four decimals, or with three digits where it is very small or large."""
    if not isinstance(value, float):
        return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def _figure(caption: str, picture: Callable[[], Any]) -> str:
    """Return a figure as an image of its own, so that its ids clash with no other's."""
    buffer, text, figure = io.BytesIO(), escape(caption), picture()
    figure.savefig(buffer, format="svg")
    width, data = figure.get_figwidth() * _PIXELS_PER_INCH, base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f'<figure><img width="{width:.0f}" alt="{text}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _write(target: Path, text: str) -> Path:
    """Write by one atomic rename: readers see the old file or the whole new one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{target.name}.{os.getpid()}.part")  # of this process alone
    try:
        partial_file.write_text(text, encoding="utf-8")
        return partial_file.replace(target)
    finally:
        partial_file.unlink(missing_ok=True)
