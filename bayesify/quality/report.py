"""One self-contained HTML page with every number and picture of a prediction.

The page has nothing to fetch, and every string on it is escaped.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bayesify.quality import metrics
from bayesify.quality.temperature import Temperature, TemperatureError, fit_temperature, tempered_probs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; --ink: #1c2733; --soft: #5b6876; --line: #dde3ea; --accent: #1f4e79; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 2rem 1rem 3rem; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.2; overflow-wrap: anywhere; }
header p { margin: .4rem 0 0; color: var(--soft); }
section { margin-top: 1.25rem; padding: 1.25rem; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
h2 { margin: 0 0 .75rem; font-size: 1.15rem; color: var(--accent); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
thead th { color: var(--soft); font-size: .85rem; font-weight: 600; }
tbody tr:last-child td { border-bottom: 0; }
small { display: block; color: var(--soft); font-size: .8rem; }
.note { margin: .75rem 0 0; padding: .6rem .8rem; border-left: 3px solid var(--accent); background: #f4f6f8;
  font-size: .9rem; overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem; justify-content: space-evenly; }
figure { margin: 0; flex: 0 1 auto; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { margin-top: .25rem; color: var(--soft); font-size: .85rem; text-align: center; }
@media (max-width: 480px) { section { padding: 1rem .75rem; } th, td { padding: .4rem .25rem; } }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""
_PIXELS_PER_INCH = 120
_NO_INFORMATION = 1e-6
_MOST_UNCERTAIN = 8
_SCORES = (
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
    "nll": ("NLL", "mean negative log-likelihood, nats; infinite where the noise is not known"),
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


def report(
    predictive: Any,
    path: str | os.PathLike[str],
    *,
    ood: Any = None,
    temperature: Temperature | float | None = None,
    title: str = "Predictive uncertainty",
    items: Sequence[Any] | None = None,
) -> Path:
    """Write one self-contained HTML page with every number and picture of a prediction.

    Args:
        predictive: What `predict` returned for classification or regression; without labels, only the uncertainties
            are shown.
        path: The file to write, replaced as a whole.
        ood: The prediction for out-of-distribution data, to measure its detection.
        temperature: A temperature fitted on other data. If None it is fitted on the labels of `predictive`, which
            flatters the numbers, and the page says so.
        title: The heading.
        items: The examples of a classification in their order, texts or images, to show the most uncertain ones.

    Returns:
        The path.

    Raises:
        TypeError: `predictive` or `ood` has no class probabilities.
        ValueError: `items` are not one text or image for each example.

    Example:
        >>> from types import SimpleNamespace
        >>> import tempfile
        >>> probs, zeros = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.zeros(2)
        >>> out = SimpleNamespace(probs=probs, logits=None, labels=torch.tensor([0, 1]), confidence=probs.amax(1),
        ...     entropy=metrics.entropy(probs), expected_entropy=metrics.entropy(probs), mutual_information=zeros)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report(out, f"{folder}/report.html").name
        'report.html'
    """
    if hasattr(predictive, "interval"):
        return _write(path, title, _way(predictive, [f"{len(predictive):,} examples"]), _regression(predictive))
    for name, value in (("predictive", predictive), ("ood", ood)):
        if (name == "predictive" or value is not None) and getattr(value, "probs", None) is None:
            raise TypeError(
                f"{name} must hold class probabilities, got {type(value).__name__}; "
                "pass what predict(..., task='classification') returns"
            )
    if items is not None and len(items) != len(predictive.probs):
        raise ValueError(
            f"items must be one text or image for each of {len(predictive.probs)} examples, got {len(items)}; "
            "give them in the order of the data"
        )
    predictive, ood = (x.flat() if hasattr(x, "flat") else x for x in (predictive, ood))
    if predictive.labels is None:
        sections = {"Scores": [_note("The data has no labels: scores, calibration and temperature are left out.")]}
    else:
        sections = _scored(predictive, temperature) | {"Selective prediction": _refusal(predictive)}
    sections |= _uncertainty(predictive, ood) | {"The most uncertain examples": _uncertain(predictive, items)}
    examples, classes = predictive.probs.shape
    facts = _way(predictive, [f"{examples:,} examples", f"{classes:,} classes"])
    facts += [] if ood is None else [f"{len(ood.probs):,} out-of-distribution examples"]
    return _write(path, title, facts, sections)


def _way(predictive: Any, facts: list[str]) -> list[str]:
    """Add by which method, and with how many samples, a prediction was made, as far as it knows."""
    if getattr(predictive, "method", ""):
        facts = [*facts, f"method {predictive.method}"]
    outputs = getattr(predictive, "logits", None)
    draws = getattr(predictive, "num_samples", None if outputs is None else len(outputs))
    if getattr(predictive, "closed_form", False):
        return [*facts, "in closed form"]
    if not draws:
        return [*facts, "no samples"] if draws == 0 else facts
    return [*facts, f"{draws} posterior sample{'s' if draws != 1 else ''}"]


# -- what it shows: sections of HTML parts by their headings -----------------------------------------------------------


def _regression(predictive: Any) -> dict[str, list[str]]:
    """Return scores, the calibration of intervals, and both kinds of uncertainty."""
    from bayesify.quality import plots

    sections = {"Scores": [_note("The data has no targets: scores and calibration are left out.")]}
    if predictive.labels is not None:
        rows = [(*_REGRESSION[key], _number(value)) for key, value in predictive.scores.items()]
        picture = _pictures({"Targets inside the intervals": plots.calibration_curve(predictive)})
        sections = {"Scores": [_table(("", "Value"), rows)], "Calibration": [picture]}
    parts = {"Epistemic": predictive.epistemic, "Aleatoric": predictive.aleatoric, "Both": predictive.std}
    meanings = ("what the posterior samples disagree about", "noise of the data; 0 where it is not known", "together")
    rows = [(name, text, _number(float(v.mean()))) for (name, v), text in zip(parts.items(), meanings, strict=True)]
    alarm = [] if predictive.novelty is None else [_note(f"{_alarm(predictive)} of the examples.")]
    return sections | {"Uncertainty": [_table(("Standard deviation", "Mean"), rows), *alarm]}


def _scored(predictive: Any, given: Temperature | float | None) -> dict[str, list[str]]:
    """Return the scores before and after temperature scaling, and the diagrams of both."""
    from bayesify.quality import plots

    probs, labels = predictive.probs, predictive.labels
    closed = getattr(predictive, "closed_form", False)
    scaling, remark = _temperature(predictive, given)
    columns = {"closed form" if closed else "T = 1": probs}
    if scaling is not None:
        # Beside a closed form, the temperature is one on the logits of the mean.
        t, weighted = float(scaling), getattr(predictive, "weights", None) is not None
        after = predictive.tempered(t).probs if weighted else tempered_probs(predictive.logits, t)
        columns[f"mean, T = {t:.3f}" if closed else f"T = {t:.3f}"] = after
    table = metrics.reliability(probs, labels)
    worst = int(table.counts[(table.accuracy - table.confidence).abs().nan_to_num(-1.0).argmax()])
    rows = [
        (name, meaning.format(worst=worst), *(_number(score(p, labels)) for p in columns.values()))
        for name, meaning, score in _SCORES
    ]
    diagrams = {
        "Top label: the highest probability of each example": plots.reliability_diagram(probs, labels),
        "Pooled: the probabilities of all classes": plots.reliability_diagram(probs, labels, kind="pooled"),
    }
    pictures = {
        f"{when}: {name}": plots.reliability_diagram(p, labels)
        for when, (name, p) in zip(("Before", "After"), columns.items(), strict=False)
        if scaling is not None
    }
    if isinstance(scaling, Temperature):
        pictures["Likelihood by temperature"] = plots.temperature_curve(scaling)
    return {
        "Scores": [_table(("", *(name.replace(" ", "\u00a0") for name in columns)), rows)],
        "Calibration": [_pictures(diagrams)],
        "Temperature scaling": [_note(remark), *([_pictures(pictures)] if pictures else [])],
    }


def _temperature(predictive: Any, given: Temperature | float | None) -> tuple[Temperature | float | None, str]:
    """Return the temperature to show, if there is one, and where it comes from or why there is none."""
    if predictive.logits is None:
        return None, "No temperature scaling: it needs the logits of each sample, and this prediction kept none."
    if given is not None:
        return given, f"T = {float(given):.4f} was fitted on other data."
    try:
        fitted = fit_temperature(predictive if hasattr(predictive, "weights") else predictive.logits, predictive.labels)
    except TemperatureError as error:
        return None, f"No temperature scaling: {error}."
    return fitted, f"T = {float(fitted):.4f} was fitted on these labels (optimistic): fit it on held-out data instead."


def _refusal(predictive: Any) -> list[str]:
    """Show what refusing the uncertain examples gains, and how uncertain the wrong ones are."""
    from bayesify.quality import plots

    probs, labels = predictive.probs, predictive.labels
    curves = {"Confidence": metrics.risk_coverage(probs, labels)}
    for name, uncertainty in _informative(predictive).items():
        curves[name] = metrics.risk_coverage(probs, labels, uncertainty=uncertainty)
    pictures = {"Error rate when the uncertain examples are refused": plots.risk_coverage(curves)}
    wrong = probs.argmax(1) != labels.to(probs.device)
    if wrong.any() and not wrong.all():
        groups = predictive.entropy[~wrong], predictive.entropy[wrong]
        histogram = plots.uncertainty_histogram(*groups, names=("Right", "Wrong"))
        pictures["Entropy of right and wrong predictions"] = histogram
    rows = []
    for risk in _RISKS:
        threshold = metrics.abstain_threshold(probs, labels, max_risk=risk)
        answered = float((predictive.confidence >= threshold).double().mean())
        said = f"answer {answered:.0%}" if answered else threshold.reason.split(":")[0] or "answer none of these"
        rows.append((f"Error at most {risk:.0%}", "with 95% confidence, on new data of this source", said))
    return [_pictures(pictures), _table(("Promise", "From these labels"), rows)]


def _uncertainty(predictive: Any, ood: Any) -> dict[str, list[str]]:
    """Tabulate the mean uncertainties, and how well they detect out-of-distribution data."""
    from bayesify.quality import plots

    sets = {"Mean": predictive} if ood is None else {"In-distribution": predictive, "Out-of-distribution": ood}
    rows = [
        (name, meaning, *(_number(getattr(value, attribute).mean().item()) for value in sets.values()))
        for name, meaning, attribute in _UNCERTAINTIES
    ]
    sections = {"Uncertainty": [_table(("", *sets), rows)]}
    if ood is None:
        return sections
    inside, outside = _informative(predictive), _informative(ood)
    pairs = {name: (inside[name], outside[name]) for name in inside if name in outside}
    detection = [
        ("AUROC", "1 is perfect, 0.5 is chance", *(_number(metrics.auroc(*pair)) for pair in pairs.values())),
        ("FPR95", "false alarms at 95% detection", *(_number(metrics.fpr95(*pair)) for pair in pairs.values())),
    ]
    parts = [_table(("", *pairs), detection)]
    if "Novelty" in pairs:
        others = f"{_flagged(ood)} of the out-of-distribution examples."
        parts.append(_note(f"{_alarm(predictive)} of the in-distribution and {others}"))
    if "Mutual information" not in pairs:
        parts.append(_note("Mutual information is left out: it is zero, as it is for a single sample."))
    histograms = {name: plots.uncertainty_histogram(*pair, quantity=name) for name, pair in pairs.items()}
    return sections | {"Out-of-distribution detection": [*parts, _pictures(histograms)]}


def _alarm(predictive: Any) -> str:
    return f"An alarm at a false-alarm rate of {predictive.false_alarms:.3g} flags {_flagged(predictive)}"


def _flagged(predictive: Any) -> str:
    return f"{float(predictive.alarm().double().mean()):.1%}"


def _informative(predictive: Any) -> dict[str, Any]:
    """Return the entropy, the mutual information where it is more than rounding, and the novelty where it is known."""
    kinds = {"Entropy": predictive.entropy}
    if predictive.mutual_information.max() > _NO_INFORMATION:
        kinds["Mutual information"] = predictive.mutual_information
    if getattr(predictive, "novelty", None) is not None:
        kinds["Novelty"] = predictive.novelty
    return kinds


def _uncertain(predictive: Any, items: Sequence[Any] | None) -> list[str]:
    """Show the examples of largest entropy, as they are if `items` were given."""
    said = {}
    for i in predictive.entropy.argsort(descending=True, stable=True)[:_MOST_UNCERTAIN].tolist():
        right = "" if predictive.labels is None else f", label {int(predictive.labels[i])}"
        said[i] = f"class {int(predictive.probs[i].argmax())} at {float(predictive.confidence[i]):.0%}{right}"
    if items is None or isinstance(items[0], str):
        texts = {i: f"number {i}" if items is None else items[i] for i in said}
        rows = [(texts[i], s, _number(float(predictive.entropy[i]))) for i, s in said.items()]
        return [_table(("", "Entropy"), rows)]
    look = 'width="112" style="image-rendering: pixelated"'
    return [_figures([_figure(f"number {i}: {s}", look, "png", _png(items[i])) for i, s in said.items()])]


# -- HTML --------------------------------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose rows are a name, its explanation, and one value for each further column."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(
        f"<tr><td>{escape(name)}<small>{escape(meaning)}</small></td>"
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for name, meaning, *values in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _pictures(figures: Mapping[str, Figure]) -> str:
    """Return figures by their captions; each is an image of its own, so that its ids clash with no other's."""
    shown = []
    for caption, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg")
        look = f'width="{figure.get_figwidth() * _PIXELS_PER_INCH:.0f}"'
        shown.append(_figure(caption, look, "svg+xml", base64.b64encode(buffer.getvalue()).decode("ascii")))
    return _figures(shown)


def _figure(caption: str, look: str, kind: str, data: str) -> str:
    said = escape(caption)
    return (
        f'<figure><img {look} alt="{said}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{said}</figcaption></figure>"
    )


def _figures(shown: Sequence[str]) -> str:
    return '<div class="pictures">\n' + "\n".join(shown) + "\n</div>"


def _png(image: Any) -> str:
    """Return an image, (H, W), (1 or 3, H, W) or (H, W, 3), as a PNG in base64, from its darkest to its lightest."""
    import matplotlib.image

    values = torch.as_tensor(image).detach().cpu().double()
    values = values.permute(1, 2, 0) if values.dim() == 3 and values.shape[0] in (1, 3) else values
    if values.dim() not in (2, 3) or (values.dim() == 3 and values.shape[-1] not in (1, 3)):
        raise ValueError(f"items must be texts or images such as (H, W) or (3, H, W), got shape {tuple(values.shape)}")
    values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)
    rgb = values.squeeze(-1) if values.shape[-1] == 1 else values
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, rgb.numpy(), cmap="gray", format="png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _number(value: float) -> str:
    """Write four decimals, or three digits where those would say little."""
    return f"{value:.4f}" if value == 0 or value >= 0.01 else f"{value:.3g}"


def _write(
    path: str | os.PathLike[str], title: str, facts: Sequence[str], sections: Mapping[str, Sequence[str]]
) -> Path:
    """Write the page by one atomic rename: readers see the old file or the whole new one."""
    try:
        own = version("bayesify")
    except PackageNotFoundError:  # imported from a folder
        own = "of a checkout"
    made = f"Made on {date.today().isoformat()} by bayesify {own} with torch {torch.__version__}."
    body = "\n".join(
        "\n".join([f"<section>\n<h2>{escape(heading)}</h2>", *parts, "</section>"])
        for heading, parts in sections.items()
    )
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(' · '.join(facts))}</p>\n</header>\n{body}\n"
        f"<footer><small>{escape(made)}</small></footer>\n</main>\n</body>\n</html>\n"
    )
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial_file.write_text(page, encoding="utf-8")
        partial_file.replace(target)
    finally:
        partial_file.unlink(missing_ok=True)
    return target
