"""Compare ways to predict on a user's own model and data: plain, recalibrated, Bayesian, or the user's own method.

Everything that is chosen is chosen on the validation data; all are scored on the test data. Differences to the
recalibrated plain model are paired by test item, with their standard errors.
"""

import copy
import importlib
import math
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import (
    IVON,
    SGLD,
    Cycles,
    bayesify,
    calibrate,
    fit_laplace,
    fit_novelty,
    methods,
    metrics,
    mix,
    param_groups,
    penalty,
    predict,
)
from bayesify.prediction.batches import call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.last_layer import same_output, watching
from bayesify.quality.regression import mixture_nll
from bayesify.quality.report import shared

PLAIN, MEMBERS = "plain", 5
CLEAR = 2.0  # standard errors that count as a difference
WORTH = 0.002  # nats of NLL that count as one
FITTED = ("novelty", "la", "la-self", "la-all")  # for a trained model
TRAINED = ("vi", "mc_dropout", "ensemble", "five")  # by trainings of their own
LINE = "def case(): return model, train, validation, test"
COLUMNS = {
    "nll": ("NLL", "{:.4f}"), "error": ("error", "{:.1%}"), "ece": ("ECE", "{:.1%}"), "rmse": ("RMSE", "{:.4g}"),
    "crps": ("CRPS", "{:.4g}"), "coverage": ("95% intervals hold", "{:.1%}"), "width": ("width", "{:.4g}"),
}  # fmt: skip

Way = Callable[[Any], Any]  # from batches to a prediction


class Case(NamedTuple):
    """What is compared on; floating-point labels make it a regression."""

    model: nn.Module  # trained, unless `epochs` are to train it
    train: Iterable[Any]  # batches with labels, read anew in every epoch
    validation: list[Any]  # batches with labels, on which everything is chosen
    test: list[Any]  # batches with labels, that everything is scored on
    ood: list[Any] | None = None  # batches of out-of-distribution data, if any; labels mean nothing there


@dataclass(frozen=True, eq=False)
class Row:
    """One way to predict, with its predictions."""

    name: str
    seconds: float  # of training and fitting, in processor time
    cost: float  # processor time of the prediction over the plain model's
    found: Any  # the prediction for the test data
    unknown: Any = None  # the prediction for out-of-distribution data, if there is any

    @property
    def losses(self) -> Tensor:
        """The negative log-likelihood of each test item."""
        if hasattr(self.found, "interval"):
            means, stds = self.found.components
            return mixture_nll(means, stds, self.found.targets()).reshape(len(self.found), -1).mean(1)
        flat = self.found.flat()
        return F.nll_loss(flat.log_probs, flat.labels.long(), reduction="none")

    @property
    def uncertainties(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The uncertainties of test and of out-of-distribution data, by name."""
        if self.unknown is None:
            return {}
        pairs = shared(*(x.flat() if hasattr(x, "flat") else x for x in (self.found, self.unknown)))
        return {name.lower(): (known.double(), new.double()) for name, (known, new) in pairs.items()}


def imported(source: str, name: str) -> Any:
    """Return what "file.py:name" or "module:name" names, or `name` of a file or module alone."""
    place, _, given = source.partition(":") if not Path(source).is_file() else (source, "", "")
    home = str((Path(place).parent if place.endswith(".py") else Path()).resolve())
    if home not in sys.path:
        sys.path.insert(0, home)  # as `python file.py` does: it may import what lies beside it
    try:
        names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(f"cannot read {place!r} ({error}); give file.py:function or module:function") from error
    found = names.get(given or name)
    if not callable(found) and not isinstance(found, methods.Method):
        raise ValueError(f"{place} has no function {given or name!r}; write {LINE!r}, or name yours after a colon")
    return found


def read_case(source: str) -> Callable[[], Case]:
    """Return the function that makes the case; test and validation data are read once, in one order for all."""
    make = imported(source, "case")

    def case() -> Case:
        made = make()
        parts = [made.get(k) for k in Case._fields] if isinstance(made, Mapping) else made
        listed = isinstance(parts, (tuple, list)) and len(parts) in (4, 5)
        if not listed or any(part is None for part in parts[:4]) or not isinstance(parts[0], nn.Module):
            got = type(made).__name__ + (f" of {len(made)}" if isinstance(made, (tuple, list, dict)) else "")
            raise ValueError(f"{source} must return (model, train, validation, test) or these and ood, got {got}")
        model, train, *others = parts
        return Case(model, train, *(None if part is None else list(part) for part in others))  # type: ignore[arg-type]

    return case


@dataclass(eq=False)
class Comparison:
    """A case with its plain model, and the ways to predict from it; the arguments are those of `compare`."""

    make: Callable[[], Case]
    epochs: int = 0
    lr: float = 1e-3
    head: str | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.case = self.make()
        self.labels = [split_batch(batch)[1] for batch in self.case.train]
        if any(y is None for y in self.labels):
            raise ValueError("the training batches have no labels; give (inputs, labels), or dicts with 'labels'")
        self.regression = torch.as_tensor(self.labels[0]).is_floating_point()
        self.task = "regression" if self.regression else None
        self.steps = self.epochs * len(self.labels)
        self.noise: Any = 1.0
        self.plain = self.trained(self.case.model) if self.epochs else self.case.model
        if self.regression and self.epochs:
            found = self.way(self.plain)(self.case.validation)
            self.noise = torch.as_tensor(metrics.fit_noise(found.outputs, found.targets()), dtype=torch.float32)

    def way(self, model: Any, **options: Any) -> Way:
        """Return how a model predicts; what a user's function made may be a way itself."""
        return partial(predict, model, task=self.task, **options) if isinstance(model, nn.Module) else model

    def recalibrated(self, way: Way) -> Way:
        """Recalibrate on the validation data: a temperature, or the noise of a regression that has none."""
        found = way(self.case.validation)
        if found.labels is None:
            raise ValueError("the validation batches have no labels; give (inputs, labels), or dicts with 'labels'")
        if self.regression:
            variance = None if found.noise_known else metrics.fit_noise(found.outputs, found.targets())
            return way if variance is None else lambda data: way(data).with_noise(variance)
        temperature = 1.0  # where all of the validation data is right
        with suppress(metrics.TemperatureError):
            temperature = float(metrics.fit_temperature(found))
        return lambda data: way(data).tempered(temperature)

    def named(self, method: str) -> tuple[str, Callable[[], Way]]:
        """Return the title of a method, and a function that fits or trains it."""
        suffix = "noise" if self.regression else "temperature"
        fitted: dict[str, tuple[str, Callable[[], Way]]] = {
            PLAIN: (f"plain + {suffix}", lambda: self.recalibrated(self.way(self.plain))),
            "novelty": ("plain + novelty", self.novelty),
            "la": ("la, last layer", lambda: self.last_layer(self.case.validation)),
            "la-self": ('la, last layer, tune="self"', lambda: self.last_layer("self")),
            "la-all": ("la, all weights, calibrated", self.all_weights),
            "five": (f"{MEMBERS} trainings + {suffix}", self.five),
        }
        if method in fitted:
            return fitted[method]
        if ":" not in method and not method.endswith(".py"):
            return f"{method} + {suffix}", lambda: self.bayesian(method)
        own: Any = imported(method, "method")
        if isinstance(own, methods.Method | type):
            return method, lambda: self.bayesian(own() if isinstance(own, type) else own)
        return method, lambda: self.way(own(self.case._replace(model=copy.deepcopy(self.plain))), seed=0)

    def novelty(self) -> Way:
        """Fit novelty to the plain model; the validation data sets the alarm."""
        model = fit_novelty(copy.deepcopy(self.plain), self.case.train, held_out=self.case.validation)
        return self.recalibrated(self.way(model))

    def last_layer(self, tune: Any) -> Way:
        """Fit a Laplace posterior of the last layer."""
        layer = self.head or last_linear(self.plain, self.case.validation[0])
        model = bayesify(copy.deepcopy(self.plain), "la", include=f"{layer}.*")
        return self.way(fit_laplace(model, self.case.train, likelihood=self.task, structure="kron", tune=tune))

    def all_weights(self) -> Way:
        """Fit a Laplace posterior of all weights, whose spread suits the validation data."""
        model = fit_laplace(bayesify(copy.deepcopy(self.plain), "la"), self.case.train, likelihood=self.task)
        return self.way(calibrate(model, self.case.validation, progress=False), samples=10, seed=0)

    def bayesian(self, method: Any) -> Way:
        """Train by a method."""
        torch.manual_seed(0)
        second_half: dict[str, Any] = {"burnin": self.steps // 2, "thin": 1} if method == "sgld" else {}
        model = bayesify(self.make().model, method, **second_half)
        model = self.trained(model, getattr(method, "name", method))
        return self.recalibrated(self.way(model, seed=0))

    def five(self) -> Way:
        """Train an ensemble of five, of which the plain model is one."""
        members = [copy.deepcopy(self.plain)]
        for seed in range(1, MEMBERS):
            torch.manual_seed(seed)
            members.append(self.trained(self.make().model))
        return self.recalibrated(self.way(mix(bayesify(m, "vanilla") for m in members)))

    def loss(self, outputs: Tensor, y: Tensor) -> Any:
        """Return cross-entropy, or the squared error over twice the noise in the plain model's residuals."""
        if not self.regression:
            return F.cross_entropy(outputs, y)
        return ((outputs - y.view_as(outputs)).square() / (2 * self.noise)).sum() / len(y)

    def trained(self, model: nn.Module, method: str = "") -> nn.Module:
        """Train with a rate that falls to 0, or in the cycles of a method, with the penalty of a posterior."""
        if not self.epochs:
            raise ValueError("it takes a training of its own; pass --epochs")
        count = sum(len(y) for y in self.labels)
        end = math.inf if method == "sgld" else self.steps  # where the rate is 0
        sampler: Any = {"ivon": IVON, "sgld": SGLD}.get(method)
        if sampler:
            optimizer = sampler(model, self.lr, num_data=count, like="adamw")
        else:
            groups: Any = param_groups(model, self.lr) if method else model.parameters()
            optimizer = torch.optim.AdamW(groups, self.lr, weight_decay=0.0)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / end))
        if method in ("ensemble", "swag"):
            schedule = Cycles(optimizer, model, steps=self.steps)
        model.train()
        for _ in range(self.epochs):
            for batch in self.case.train:
                inputs, y = split_batch(to_device(batch, device_of(model)))
                optimizer.zero_grad()
                outputs = logits_of(call_model(model, inputs))
                loss = self.loss(outputs, y)
                loss = loss + penalty(model, num_data=count) if method else loss
                loss.backward()
                optimizer.step()
                schedule.step()
        return model.eval()


def last_linear(model: nn.Module, batch: Any) -> str:
    """Return the name of the linear layer whose output is the model's."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name}
    with torch.no_grad(), watching(layers) as calls:
        outputs = logits_of(call_model(model, split_batch(to_device(batch, device_of(model)))[0]))
    for call in calls:
        if same_output(call.output, outputs):
            return call.name
    raise ValueError("the model's outputs are not those of a linear layer; name the last one with --head")


def compare(
    make: Callable[[], Case], *, methods: Sequence[str] | None = None, minutes: float = 10.0, **settings: Any
) -> tuple[list[Row], list[str]]:
    """Score every way to predict that the time allows.

    Args:
        make: Makes model and data; called again for each training.
        methods: "novelty", "la", "la-self", "la-all", "five", any method of `bayesify`, or one's own as "file.py:name",
            which is a `Method`, or a function of the case that returns a model or a function from batches to a
            prediction. None takes all that suit.
        minutes: After these no further row begins.
        **settings: `epochs`, for which AdamW trains the model and all others; 0 takes it as trained. `lr`, the learning
            rate of these trainings, which falls to 0. `head`, the name of the last linear layer; found by a forward
            pass if None.

    Returns:
        The rows, the plain model and the recalibrated one first, and what was left out, with the reason.
    """
    until, begin = time.monotonic() + 60 * minutes, time.process_time()
    setting = Comparison(make, **settings)
    spent = time.process_time() - begin if setting.epochs else 0.0
    plain = setting.way(setting.plain)
    if plain(setting.case.test).labels is None:  # also since the first pass is slower than those that follow
        raise ValueError("the test batches have no labels; give (inputs, labels), or dicts with 'labels'")
    if methods is None:
        methods = [m for m in FITTED + TRAINED * bool(setting.epochs) if m != "la-self" or not setting.regression]
    ways: dict[str, Callable[[], Way]] = {PLAIN: lambda: plain} | dict(map(setting.named, [PLAIN, *methods]))
    rows, left_out, unit = list[Row](), list[str](), 0.0
    for name, fit in ways.items():
        if rows and time.monotonic() > until:
            left_out.append(f"{name}: no time was left")
            continue
        begin = time.process_time()
        try:
            way = fit()
            fit_seconds, begin = time.process_time() - begin, time.process_time()
            found = way(setting.case.test)
            cost = time.process_time() - begin
            unknown = None if setting.case.ood is None else way(setting.case.ood)
        except (ValueError, TypeError, NotImplementedError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
            continue
        unit = unit or max(cost, 1e-9)
        rows.append(Row(name, fit_seconds + (spent if name == PLAIN else 0.0), cost / unit, found, unknown))
    return rows, left_out


def apart(row: Row, bar: Row) -> tuple[float, float]:
    """Return the mean difference in NLL over test items, and its standard error."""
    away = row.losses - bar.losses
    return float(away.mean()), float(away.std() / math.sqrt(len(away)))


def detects(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the difference of two AUROCs on the same data, and its standard error (DeLong and others, 1988)."""
    differences = []
    for i, sign in ((0, -1), (1, 1)):  # of each example the share of the other set that is ranked right
        shares = []
        for pair in (first, second):
            others = pair[1 - i].sort().values
            ranks = torch.searchsorted(others, pair[i]) + torch.searchsorted(others, pair[i], right=True)
            shares.append(sign * ranks.double() / (2 * len(others)))
        differences.append(shares[0] - shares[1])
    return float(differences[1].mean()), math.sqrt(sum(float(d.var()) / len(d) for d in differences))


def verdict(rows: list[Row]) -> str:
    """Say whether a row is better than the recalibrated plain model, and what detects other data best."""
    bar = rows[min(1, len(rows) - 1)]
    gains = {row: apart(row, bar) for row in rows[2:]}
    better = [row for row, (gain, error) in gains.items() if gain < -max(CLEAR * error, WORTH)]
    words = f"{bar.name} is enough here: nothing has a clearly lower NLL."
    if better:
        best = min(better, key=lambda row: gains[row][0])
        gain, error = gains[best]
        words = f"{best.name} is best: its NLL is lower than that of {bar.name} by {-gain:.3f} ± {error:.3f}."
    known = [(row.name, kind, pair) for row in rows for kind, pair in row.uncertainties.items()]
    if not known:
        return words
    _, plain_kind, plain = known[0]
    name, kind, pair = max(known, key=lambda entry: metrics.auroc(*entry[2]))
    top, base = metrics.auroc(*pair), metrics.auroc(*plain)
    gain, error = detects(pair, plain)
    end = f"out-of-distribution data: AUROC {top:.3f}, against {base:.3f} for the plain model's {plain_kind}"
    if gain > CLEAR * error and round(gain, 3):
        return f"{words} The {kind} of {name} is best at detecting {end}."
    return f"{words} Nothing is clearly better than the plain model at detecting {end}."


def table(rows: list[Row], left_out: Sequence[str]) -> str:
    """Return the comparison as a Markdown table with its verdict."""
    bar = rows[min(1, len(rows) - 1)]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.uncertainties))
    keys = [key for key in COLUMNS if key in bar.found.scores]
    head = ["", *(COLUMNS[key][0] for key in keys), f"NLL minus {bar.name}", *(f"OOD AUROC, {kind}" for kind in kinds)]
    lines = [[*head, "training s", "prediction"], ["---"] * (len(head) + 2)]
    for row in rows:
        scores, pairs = row.found.scores, row.uncertainties
        difference = "" if row is bar or "nll" not in scores else "{:+.4f} ± {:.4f}".format(*apart(row, bar))
        cells = [COLUMNS[key][1].format(scores[key]) if key in scores else "" for key in keys]
        aurocs = [f"{metrics.auroc(*pairs[kind]):.3f}" if kind in pairs else "" for kind in kinds]
        lines.append([row.name, *cells, difference, *aurocs, f"{row.seconds:.1f}", f"{row.cost:.2f}"])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([*text, "", verdict(rows), *(f"Left out: {reason}" for reason in left_out)])


def run(source: str, out: Path, **settings: Any) -> None:
    """Compare, print the table and write it."""
    rows, left_out = compare(read_case(source), **settings)
    text = table(rows, left_out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(text + "\n")
    print(f"{text}\n\nwrote {out / 'compare.md'}")
