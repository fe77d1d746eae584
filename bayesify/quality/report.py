"""Gather every number and picture of a prediction in one self-contained HTML page.

The page has nothing to fetch, and every string on it is escaped. `plots.report` is the public door.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from datetime import date
from functools import partial
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayesify.quality import metrics, plots
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
_MOST_DOUBTFUL = 8
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


def write_report(
    predictive: Any,
    path: str | os.PathLike[str],
    *,
    ood: Any,
    temperature: Temperature | float | None,
    title: str,
    items: Sequence[Any] | None = None,
) -> Path:
    """Do what `plots.report` says."""
    if hasattr(predictive, "interval"):
        return _write_regression(predictive, path, title)
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
    page = Page(title, _size(predictive, ood))
    if predictive.labels is None:
        page.section("Scores").note("The data has no labels: scores, calibration and temperature are left out.")
    else:
        scaling, remark = _temperature(predictive, temperature)
        _add_scores(page, predictive, scaling)
        _add_calibration(page, predictive, scaling, remark)
        _add_refusal(page, predictive)
    _add_uncertainty(page, predictive, ood)
    _add_doubtful(page, predictive, items)
    return page.write(path)


def _write_regression(predictive: Any, path: str | os.PathLike[str], title: str) -> Path:
    """Write the page of a regression: scores, calibration of its intervals, and both kinds of doubt."""
    page = Page(title, " · ".join([f"{len(predictive):,} examples", *_way(predictive, predictive.outputs)]))
    page.section("Scores")
    if predictive.labels is None:
        page.note("The data has no targets: scores and calibration are left out.")
    else:
        page.table(("", "Value"), [(*_REGRESSION[key], _number(value)) for key, value in predictive.scores.items()])
        page.section("Calibration").pictures([("Targets inside the intervals", plots.calibration_curve(predictive))])
    parts = {"Epistemic": predictive.epistemic, "Aleatoric": predictive.aleatoric, "Both": predictive.std}
    meanings = ("what the posterior samples disagree about", "noise of the data; 0 where it is not known", "together")
    rows = [(name, text, _number(float(v.mean()))) for (name, v), text in zip(parts.items(), meanings, strict=True)]
    page.section("Uncertainty").table(("Standard deviation", "Mean"), rows)
    if predictive.novelty is not None:
        page.note(
            f"An alarm at a false-alarm rate of {predictive.false_alarms:.3g} flags {_flagged(predictive)} of the "
            "examples."
        )
    return page.write(path)


def _size(predictive: Any, ood: Any) -> str:
    """Say how much data and how many samples the page is about."""
    examples, classes = predictive.probs.shape
    parts = [f"{examples:,} examples", f"{classes:,} classes"]
    parts += _way(predictive, predictive.logits)
    if ood is not None:
        parts.append(f"{len(ood.probs):,} out-of-distribution examples")
    return " · ".join(parts)


def _way(predictive: Any, outputs: Any) -> list[str]:
    """Say by which method, and with how many samples, a prediction was made, as far as it knows."""
    said = [f"method {predictive.method}"] if getattr(predictive, "method", "") else []
    draws = getattr(predictive, "num_samples", None if outputs is None else len(outputs))
    if getattr(predictive, "closed_form", False):
        return [*said, "in closed form"]
    if not draws:
        return [*said, "no samples"] if draws == 0 else said
    return [*said, f"{draws} posterior sample{'s' if draws != 1 else ''}"]


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


def _tempered(predictive: Any, temperature: float) -> Any:
    """Return the probabilities at a temperature: those of its samples, or beside a closed form those of the mean."""
    weights = getattr(predictive, "weights", None)
    return tempered_probs(predictive.logits, temperature) if weights is None else predictive.tempered(temperature).probs


def _columns(predictive: Any, scaling: Temperature | float | None) -> tuple[str, str]:
    """Name a prediction as it is, and with a temperature: beside a closed form that is one on the mean's logits."""
    changed = "" if scaling is None else f"T = {float(scaling):.3f}"
    closed = getattr(predictive, "closed_form", False)
    return ("closed form", f"mean, {changed}") if closed else ("T = 1", changed)


def _add_scores(page: Page, predictive: Any, scaling: Temperature | float | None) -> None:
    """Tabulate the scores, before and after temperature scaling."""
    before, after = _columns(predictive, scaling)
    columns = {before.replace(" ", "\u00a0"): predictive.probs}
    if scaling is not None:
        columns[after.replace(" ", "\u00a0")] = _tempered(predictive, float(scaling))
    table = metrics.reliability(predictive.probs, predictive.labels)
    worst = int(table.counts[(table.accuracy - table.confidence).abs().nan_to_num(-1.0).argmax()])
    rows = [
        (name, meaning.format(worst=worst), *(_number(score(probs, predictive.labels)) for probs in columns.values()))
        for name, meaning, score in _SCORES
    ]
    page.section("Scores").table(("", *columns), rows)


def _add_calibration(page: Page, predictive: Any, scaling: Temperature | float | None, remark: str) -> None:
    """Show the reliability diagrams and what a temperature does to them."""
    probs, labels = predictive.probs, predictive.labels
    page.section("Calibration").pictures(
        [
            ("Top label: the highest probability of each example", plots.reliability_diagram(probs, labels)),
            ("Pooled: the probabilities of all classes", plots.reliability_diagram(probs, labels, kind="pooled")),
        ]
    )
    page.section("Temperature scaling").note(remark)
    if scaling is not None:
        after, names = _tempered(predictive, float(scaling)), _columns(predictive, scaling)
        pictures = [
            (f"Before: {names[0]}", plots.reliability_diagram(probs, labels)),
            (f"After: {names[1]}", plots.reliability_diagram(after, labels)),
        ]
        if isinstance(scaling, Temperature):
            pictures.append(("Likelihood by temperature", plots.temperature_curve(scaling)))
        page.pictures(pictures)


def _add_refusal(page: Page, predictive: Any) -> None:
    """Show what refusing the uncertain examples gains, and how uncertain the wrong ones are."""
    probs, labels = predictive.probs, predictive.labels
    curves = {"Confidence": metrics.risk_coverage(probs, labels)}
    for name, uncertainty in _informative(predictive).items():
        curves[name] = metrics.risk_coverage(probs, labels, uncertainty=uncertainty)
    pictures = [("Error rate when the uncertain examples are refused", plots.risk_coverage(curves))]
    wrong = probs.argmax(1) != labels.to(probs.device)
    if wrong.any() and not wrong.all():
        groups = predictive.entropy[~wrong], predictive.entropy[wrong]
        histogram = plots.uncertainty_histogram(*groups, names=("Right", "Wrong"))
        pictures.append(("Entropy of right and wrong predictions", histogram))
    page.section("Selective prediction").pictures(pictures)
    rows = []
    for risk in _RISKS:
        threshold = metrics.abstain_threshold(probs, labels, max_risk=risk)
        answered = float((predictive.confidence >= threshold).double().mean())
        said = f"answer {answered:.0%}" if answered else threshold.reason.split(":")[0] or "answer none of these"
        rows.append((f"Error at most {risk:.0%}", "with 95% confidence, on new data of this source", said))
    page.table(("Promise", "From these labels"), rows)


def _add_uncertainty(page: Page, predictive: Any, ood: Any) -> None:
    """Tabulate the mean uncertainties and show how well they detect out-of-distribution data."""
    sets = {"Mean": predictive} if ood is None else {"In-distribution": predictive, "Out-of-distribution": ood}
    rows = [
        (name, meaning, *(_number(getattr(value, attribute).mean().item()) for value in sets.values()))
        for name, meaning, attribute in _UNCERTAINTIES
    ]
    page.section("Uncertainty").table(("", *sets), rows)
    if ood is None:
        return
    page.section("Out-of-distribution detection")
    inside, outside = _informative(predictive), _informative(ood)
    pairs = {name: (inside[name], outside[name]) for name in inside if name in outside}
    page.table(
        ("", *pairs),
        [
            ("AUROC", "1 is perfect, 0.5 is chance", *(_number(metrics.auroc(*pair)) for pair in pairs.values())),
            ("FPR95", "false alarms at 95% detection", *(_number(metrics.fpr95(*pair)) for pair in pairs.values())),
        ],
    )
    if "Novelty" in pairs:
        page.note(
            f"An alarm at a false-alarm rate of {predictive.false_alarms:.3g} flags {_flagged(predictive)} of the "
            f"in-distribution and {_flagged(ood)} of the out-of-distribution examples."
        )
    if "Mutual information" not in pairs:
        page.note("Mutual information is left out: it is zero, as it is for a single sample.")
    page.pictures([(name, plots.uncertainty_histogram(*pair, quantity=name)) for name, pair in pairs.items()])


def _flagged(predictive: Any) -> str:
    """Say which share of the examples the alarm flags."""
    return f"{float(predictive.alarm().double().mean()):.1%}"


def _add_doubtful(page: Page, predictive: Any, items: Sequence[Any] | None) -> None:
    """Show the examples of largest entropy: as they are, where they were given."""
    worst = predictive.entropy.argsort(descending=True, stable=True)[:_MOST_DOUBTFUL].tolist()
    said = []
    for i in worst:
        right = "" if predictive.labels is None else f", label {int(predictive.labels[i])}"
        said.append(f"class {int(predictive.probs[i].argmax())} at {float(predictive.confidence[i]):.0%}{right}")
    page.section("The most uncertain examples")
    if items is None or isinstance(items[0], str):
        texts = [f"number {i}" if items is None else items[i] for i in worst]
        rows = [(t, s, _number(float(predictive.entropy[i]))) for i, t, s in zip(worst, texts, said, strict=True)]
        page.table(("", "Entropy"), rows)
    else:
        page.thumbnails([(f"number {i}: {s}", _png(items[i])) for i, s in zip(worst, said, strict=True)])


def _png(image: Any) -> str:
    """Return an image, (H, W), (1 or 3, H, W) or (H, W, 3), as a PNG in base64, from its darkest to its lightest."""
    import matplotlib.image
    import torch

    values = torch.as_tensor(image).detach().cpu().double()
    values = values.permute(1, 2, 0) if values.dim() == 3 and values.shape[0] in (1, 3) else values
    if values.dim() not in (2, 3) or (values.dim() == 3 and values.shape[-1] not in (1, 3)):
        raise ValueError(f"items must be texts or images such as (H, W) or (3, H, W), got shape {tuple(values.shape)}")
    values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)
    rgb = values.squeeze(-1) if values.shape[-1] == 1 else values
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, rgb.numpy(), cmap="gray", format="png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _informative(predictive: Any) -> dict[str, Any]:
    """Return the entropy, the mutual information where it is more than rounding, and the novelty where it is known."""
    kinds = {"Entropy": predictive.entropy}
    if predictive.mutual_information.max() > _NO_INFORMATION:
        kinds["Mutual information"] = predictive.mutual_information
    if getattr(predictive, "novelty", None) is not None:
        kinds["Novelty"] = predictive.novelty
    return kinds


def _made() -> str:
    """Say when and by what the page was made."""
    import torch

    try:
        own = version("bayesify")
    except PackageNotFoundError:  # imported from a folder
        own = "of a checkout"
    return f"Made on {date.today().isoformat()} by bayesify {own} with torch {torch.__version__}."


def _number(value: float) -> str:
    """Write four decimals, or three digits where those would say little."""
    return f"{value:.4f}" if value == 0 or value >= 0.01 else f"{value:.3g}"


class Page:
    """A page in the making: sections in the order of the calls.

    Args:
        title: The heading, plain text.
        subtitle: The line below it, plain text.

    Example:
        >>> page = Page("A & B", "ten examples")
        >>> page.section("Scores").table(("Score", "Value"), [("Error", "the fraction that is wrong", "0.1")])
        >>> "A &amp; B" in page.html()
        True
    """

    def __init__(self, title: str, subtitle: str) -> None:
        self._head = escape(title), escape(subtitle)
        self._parts: list[str] = []

    def section(self, heading: str) -> Page:
        """Begin a section; what is added next goes into it."""
        self._parts += ["</section>"] if self._parts else []
        self._parts.append(f"<section>\n<h2>{escape(heading)}</h2>")
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table whose rows are a name, its explanation, and one value for each further column."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
        body = "\n".join(
            f"<tr><td>{escape(name)}<small>{escape(meaning)}</small></td>"
            + "".join(f"<td>{escape(value)}</td>" for value in values)
            + "</tr>"
            for name, meaning, *values in rows
        )
        self._parts.append(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>")

    def note(self, text: str) -> None:
        """Add a remark."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def pictures(self, figures: Sequence[tuple[str, Figure]]) -> None:
        """Add figures with their captions, side by side where there is room."""
        shown = "\n".join(
            f'<figure><img width="{figure.get_figwidth() * _PIXELS_PER_INCH:.0f}" alt="{escape(caption)}" '
            f'src="data:image/svg+xml;base64,{_svg(figure)}"><figcaption>{escape(caption)}</figcaption></figure>'
            for caption, figure in figures
        )
        self._parts.append(f'<div class="pictures">\n{shown}\n</div>')

    def thumbnails(self, images: Sequence[tuple[str, str]]) -> None:
        """Add small images, PNGs in base64, with their captions."""
        shown = "\n".join(
            f'<figure><img width="112" style="image-rendering: pixelated" alt="{escape(caption)}" '
            f'src="data:image/png;base64,{png}"><figcaption>{escape(caption)}</figcaption></figure>'
            for caption, png in images
        )
        self._parts.append(f'<div class="pictures">\n{shown}\n</div>')

    def html(self) -> str:
        """Return the page as it stands."""
        title, subtitle = self._head
        body = "\n".join([*self._parts, "</section>"] if self._parts else [])
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<header>\n<h1>{title}</h1>\n<p>{subtitle}</p>\n</header>\n{body}\n<footer><small>{escape(_made())}</small></footer>\n</main>\n</body>\n</html>\n"
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to `path` by one atomic rename: readers see the old file or the whole new one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_text(self.html(), encoding="utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target


def _svg(figure: Figure) -> str:
    """Return the figure as an SVG in base64; as an image of its own, its ids cannot clash with another's."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
