"""Compare on a user's own model and data: the model as it is, with a temperature, and with posteriors of several kinds.

Everything that is chosen is chosen on the validation data; the test data is what all are scored on. Differences to
temperature scaling are paired by test item, with their standard errors.
"""

import copy
import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.core.mixture import mix
from bayesify.core.penalty import penalty
from bayesify.core.scopes import param_groups
from bayesify.core.wrap import bayesify
from bayesify.methods.laplace.fit import fit_laplace
from bayesify.prediction.batches import call_model, device_of, logits_of, split_batch, to_device
from bayesify.prediction.calibrate import calibrate
from bayesify.prediction.novelty import fit_novelty
from bayesify.prediction.predict import predict
from bayesify.prediction.predictive import Predictive
from bayesify.quality import metrics

PLAIN, SCALED, NOVEL = "plain", "plain + temperature", "plain + novelty"
MEMBERS = 5
CLEAR = 2.0  # standard errors that count as a difference
BETTER = 0.03  # of an AUROC that counts as one
LINE = "def case(): return model, train, validation, test"

Way = Callable[[Any], Predictive]


class Case(NamedTuple):
    """What is compared on.

    Attributes:
        model: A classifier, trained unless `epochs` are to train it.
        train: Batches with labels, that are read anew in every epoch.
        validation: Batches with labels, on which everything is chosen.
        test: Batches with labels, that everything is scored on.
        ood: Batches of what the model has never seen, if any; labels mean nothing there.
    """

    model: nn.Module
    train: Iterable[Any]
    validation: list[Any]
    test: list[Any]
    ood: list[Any] | None


@dataclass(frozen=True, eq=False)
class Row:
    """One way to predict.

    Attributes:
        name: What it is.
        seconds: Of training and fitting, in processor time.
        cost: Processor time of the prediction over the plain model's.
        found: The prediction for the test data.
        unknown: The prediction for data of another kind, if there is any.
    """

    name: str
    seconds: float
    cost: float
    found: Predictive
    unknown: Predictive | None

    @property
    def losses(self) -> Tensor:
        """The negative log-likelihood of each test item."""
        flat = self.found.flat()
        assert flat.labels is not None
        return F.nll_loss(flat.log_probs, flat.labels.long(), reduction="none")


def read_case(source: str) -> Callable[[], Case]:
    """Return the function that makes model and data.

    Args:
        source: "file.py", "file.py:function" or "module:function". The function, `case` if none is named, takes nothing
            and returns (model, train, validation, test), with `ood` as a fifth if there is any, or a dict of these.

    Raises:
        ValueError: There is no such file, module or function, or it returns something else.
    """
    place, _, name = source.partition(":") if not Path(source).is_file() else (source, "", "")
    home = str((Path(place).parent if place.endswith(".py") else Path()).resolve())
    if home not in sys.path:
        sys.path.insert(0, home)  # as `python file.py` does: it may import what lies beside it
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(f"cannot read {place!r} ({error}); give file.py:function or module:function") from error
    make = getattr(module, name or "case", None)
    if not callable(make):
        raise ValueError(f"{place} has no function {name or 'case'!r}; write {LINE!r}, or name yours after a colon")
    return partial(_case, make, source)


def _case(make: Callable[[], Any], source: str) -> Case:
    """Call a user's function; test and validation data are read once, in one order for all."""
    made = make()
    parts: list[Any] = (
        [made.get(k) for k in Case._fields] if isinstance(made, Mapping) else [*made] if _is_row(made) else []
    )
    parts += [None] * (5 - len(parts))
    if len(parts) > 5 or any(part is None for part in parts[:4]) or not isinstance(parts[0], nn.Module):
        raise ValueError(f"{source} must return (model, train, validation, test) or these and ood, got {_said(made)}")
    model, train, validation, test, ood = parts
    return Case(model, train, list(validation), list(test), None if ood is None else list(ood))


def _is_row(made: Any) -> bool:
    return isinstance(made, (tuple, list))


def _said(made: Any) -> str:
    return f"{type(made).__name__} of {len(made)}" if isinstance(made, (tuple, list, dict)) else type(made).__name__


def compare(
    make: Callable[[], Case], *, minutes: float = 10.0, epochs: int = 0, lr: float = 1e-3, head: str | None = None
) -> tuple[list[Row], list[str]]:
    """Score every way to predict that the time allows.

    Args:
        make: Makes model and data; called again for each member of an ensemble, after another seed.
        minutes: After these no further row begins.
        epochs: Train the model so long, by AdamW; then also by methods that need a training of their own, and an
            ensemble. 0 takes the model as trained.
        lr: The learning rate of that training, which falls to 0.
        head: The name of the last linear layer; found by a forward pass if None.

    Returns:
        The rows, plain and temperature first, and what was left out, with the reason.
    """
    until = time.monotonic() + 60 * minutes
    torch.manual_seed(0)
    case = make()
    begin = time.process_time()
    plain = _train(case.model, case.train, epochs, lr) if epochs else case.model
    spent = time.process_time() - begin
    found = predict(plain, case.test)  # the first pass is slower than those that follow
    begin = time.process_time()
    predict(plain, case.test)
    pass_seconds = time.process_time() - begin
    rows, left_out = [_row(PLAIN, partial(predict, plain), case, spent, pass_seconds)], list[str]()
    if found.labels is None:
        raise ValueError("the test batches have no labels; give (inputs, labels), or dicts with 'labels'")
    for name, way in _ways(make, case, plain, epochs, lr, head):
        if time.monotonic() > until:
            left_out.append(f"{name}: no time was left")
            continue
        begin = time.process_time()
        try:
            predicted = way()
        except (ValueError, TypeError, NotImplementedError) as error:
            left_out.append(f"{name}: {' '.join(str(error).split())}")
            continue
        alone = 0.0 if name.startswith(TRAINED) else spent  # of the plain model, a member of the ensemble
        rows.append(_row(name, predicted, case, alone + time.process_time() - begin, pass_seconds))
    return rows, left_out


TRAINED = ("vi", "mc_dropout")


def _ways(
    make: Callable[[], Case], case: Case, plain: nn.Module, epochs: int, lr: float, head: str | None
) -> Iterator[tuple[str, Callable[[], Way]]]:
    """Yield names, and functions that fit and return a way to predict; the cheapest first."""
    yield SCALED, partial(_scaled, partial(predict, plain), case.validation)
    yield NOVEL, partial(_novel, plain, case)
    yield "la, last layer", partial(_last_layer, plain, case, head, case.validation)
    yield 'la, last layer, tune="self"', partial(_last_layer, plain, case, head, "self")
    yield "la, all weights, calibrated", partial(_all_weights, plain, case)
    if epochs:
        for method in TRAINED:
            yield f"{method}, + temperature", partial(_method, make, case, method, epochs, lr)
        yield f"ensemble of {MEMBERS}, + temperature", partial(_ensemble, make, case, plain, epochs, lr)


def _row(name: str, way: Way, case: Case, seconds: float, pass_seconds: float) -> Row:
    begin = time.process_time()
    found = way(case.test)
    cost = (time.process_time() - begin) / max(pass_seconds, 1e-9)
    return Row(name, seconds, 1.0 if name == PLAIN else cost, found, None if case.ood is None else way(case.ood))


def _scaled(way: Way, validation: list[Any]) -> Way:
    """Return a way with the temperature that suits the validation data; 1 where all of it is right."""
    found, temperature = way(validation).flat(), 1.0
    if found.labels is None:
        raise ValueError("the validation batches have no labels; give (inputs, labels), or dicts with 'labels'")
    with suppress(metrics.TemperatureError):
        temperature = float(metrics.fit_temperature(found))
    return lambda data: way(data).tempered(temperature)


def _novel(plain: nn.Module, case: Case) -> Way:
    """Return the plain model's prediction with its novelty, whose alarm is set by the validation data."""
    return partial(predict, fit_novelty(copy.deepcopy(plain), case.train, held_out=case.validation))


def _last_layer(plain: nn.Module, case: Case, head: str | None, tune: Any) -> Way:
    model = copy.deepcopy(plain)
    bayesify(model, "la", include=f"{head or last_linear(plain, case.validation[0])}.*")
    return partial(predict, fit_laplace(model, case.train, structure="kron", tune=tune))


def _all_weights(plain: nn.Module, case: Case) -> Way:
    model = fit_laplace(bayesify(copy.deepcopy(plain), "la"), case.train)
    return partial(predict, calibrate(model, case.validation, progress=False), samples=10, seed=0)


def _method(make: Callable[[], Case], case: Case, method: str, epochs: int, lr: float) -> Way:
    torch.manual_seed(0)
    model = _train(bayesify(make().model, method), case.train, epochs, lr)
    return _scaled(partial(predict, model, samples=10, seed=0), case.validation)


def _ensemble(make: Callable[[], Case], case: Case, plain: nn.Module, epochs: int, lr: float) -> Way:
    members = [copy.deepcopy(plain)]
    for seed in range(1, MEMBERS):
        torch.manual_seed(seed)
        members.append(_train(make().model, case.train, epochs, lr))
    return _scaled(partial(predict, mix(bayesify(m, "vanilla") for m in members)), case.validation)


def _train(model: nn.Module, batches: Iterable[Any], epochs: int, lr: float) -> nn.Module:
    """Train by AdamW with a rate that falls to 0, and by the posterior's penalty where there is one."""
    bayesian = any(hasattr(m, "parametrizations") for m in model.modules())
    labels = [split_batch(batch)[1] for batch in batches]
    if any(y is None for y in labels):
        raise ValueError("the training batches have no labels; give (inputs, labels), or dicts with 'labels'")
    count, steps = sum(len(y) for y in labels), epochs * len(labels)
    groups = param_groups(model, lr) if bayesian else [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model.train()
    for _ in range(epochs):
        for batch in batches:
            inputs, y = split_batch(to_device(batch, device_of(model)))
            optimizer.zero_grad()
            loss = F.cross_entropy(logits_of(call_model(model, inputs)), y)
            loss = loss + penalty(model, num_data=count) if bayesian else loss
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


def last_linear(model: nn.Module, batch: Any) -> str:
    """Return the name of the linear layer whose output is the model's.

    Raises:
        ValueError: There is none.
    """
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name
    ]
    try:
        with torch.no_grad():
            inputs, _ = split_batch(to_device(batch, device_of(model)))
            outputs = logits_of(call_model(model, inputs))
    finally:
        for hook in hooks:
            hook.remove()
    for name, out in seen.items():
        if out.shape == outputs.shape and out.data_ptr() == outputs.data_ptr():
            return name
    raise ValueError("the model's outputs are not those of a linear layer; name the last one with --head")


# -- what it says ------------------------------------------------------------------------------------------------------


def apart(row: Row, bar: Row) -> tuple[float, float]:
    """Return the mean difference in NLL over test items, and its standard error."""
    away = row.losses - bar.losses
    return float(away.mean()), float(away.std() / math.sqrt(len(away)))


def verdict(rows: list[Row]) -> str:
    """Say which row is worth it, and where temperature scaling is enough."""
    bar = next((row for row in rows if row.name == SCALED), rows[0])
    others = [row for row in rows if row not in (rows[0], bar)]
    clear = {row.name: apart(row, bar) for row in others if apart(row, bar)[0] < -CLEAR * apart(row, bar)[1]}
    if not clear:
        words = f"Temperature scaling is enough here: nothing has a lower NLL by more than {CLEAR:.0f} standard errors."
    else:
        best = min(clear, key=lambda name: clear[name][0])
        words = f"Beyond temperature scaling: {best} has an NLL lower by {-clear[best][0]:.4f} ± {clear[best][1]:.4f}."
    known = [(row.name, kind, value) for row in rows for kind, value in _ood(row).items()]
    if known:
        plain = _ood(rows[0])["entropy"]
        name, kind, value = max(known, key=lambda entry: entry[2])
        tells = f"{name} by its {kind} ({value:.3f} against {plain:.3f} for plain entropy)"
        enough = "Plain entropy tells the unknown data as well as anything; the best is"
        words += f" The unknown data is told best by {tells}." if value >= plain + BETTER else f" {enough} {tells}."
    return words


def _ood(row: Row) -> dict[str, float]:
    """Return the AUROCs of telling unknown data."""
    if row.unknown is None:
        return {}
    out = {"entropy": metrics.auroc(row.found.flat().entropy, row.unknown.flat().entropy)}
    if row.found.num_samples > 1 or row.found.closed_form:
        scores = [p.flat().mutual_information for p in (row.found, row.unknown)]
        out["mutual information"] = metrics.auroc(*scores)
    if row.found.novelty is not None and row.unknown.novelty is not None:
        out["novelty"] = metrics.auroc(row.found.novelty, row.unknown.novelty)
    return out


def table(rows: list[Row], left_out: list[str]) -> str:
    """Return the comparison as a Markdown table with its verdict."""
    bar = next((row for row in rows if row.name == SCALED), rows[0])
    head = (
        "| | NLL | minus temperature | error % | ECE % (debiased) | OOD, entropy | OOD, MI | OOD, novelty | training s "
        "| prediction |"
    )
    lines = [head, "|---" * 10 + "|"]
    for row in rows:
        scores, ood, (mean, error) = row.found.scores, _ood(row), apart(row, bar)
        flat = row.found.flat()
        assert flat.labels is not None
        cells = [
            row.name,
            f"{scores['nll']:.4f}",
            "" if row is bar else f"{mean:+.4f} ± {error:.4f}",
            f"{100 * scores['error']:.1f}",
            f"{100 * scores['ece']:.1f} ({100 * metrics.reliability(flat.probs, flat.labels).ece_debiased:.1f})",
            *(f"{ood[kind]:.3f}" if kind in ood else "" for kind in ("entropy", "mutual information", "novelty")),
            f"{row.seconds:.1f}",
            f"{row.cost:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", verdict(rows), *(f"Left out: {reason}" for reason in left_out)])


def draw(rows: list[Row], path: Path) -> None:
    """Draw NLL against the cost of a prediction, and error against coverage, as an SVG.

    Raises:
        ImportError: There is no matplotlib.
    """
    from bayesify.quality import plots
    from bayesify.quality.plots import SMALL, finish, new_figure

    figure = new_figure(7.5, 3.0)
    left, right = figure.subplots(1, 2)
    for row in rows:
        error = float(row.losses.std() / math.sqrt(len(row.losses)))
        left.errorbar(row.cost, row.found.scores["nll"], yerr=error, fmt="o", markersize=4, label=row.name)
    left.set_xscale("log")

    left.legend(fontsize=SMALL, frameon=False, loc="upper right")
    finish(left, None, "processor time of a prediction over a plain one's", "NLL of the test data")
    flat = {row.name: row.found.flat() for row in rows}
    plots.risk_coverage({name: metrics.risk_coverage(p.probs, p.labels) for name, p in flat.items()}, ax=right)  # type: ignore[arg-type]
    figure.savefig(path)


def run(source: str, *, minutes: float, epochs: int, lr: float, head: str | None, out: Path) -> None:
    """Compare, print the table and write it with its picture."""
    rows, left_out = compare(read_case(source), minutes=minutes, epochs=epochs, lr=lr, head=head)
    text = table(rows, left_out)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(text + "\n")
    written = [out / "compare.md"]
    try:
        draw(rows, out / "compare.svg")
        written.append(out / "compare.svg")
    except ImportError as error:
        print(f"no picture: {error}")
    print("\nwrote " + ", ".join(map(str, written)))
