"""Settings by validation data: a short grid per method, the same number of trainings for each, on unreported seeds."""

import json
import statistics
import time
from pathlib import Path

from bayesify import metrics, predict

from . import training
from .rows import DEFAULTS, SAMPLES, TUNABLE, in_cycles, with_temperature
from .tasks import Task
from .texts import TASKS

SETTINGS = Path(__file__).with_name("settings.json")
TUNED = "_tuned"


def read():
    return json.loads(SETTINGS.read_text())


def tuned_rows():
    """Return the names of the rows with chosen settings."""
    return [row + TUNED for row in TUNABLE]


def is_known(row, task):
    """Return whether a row can run: a tuned one needs a setting, and one by SGD a task that has another optimizer."""
    if row.endswith("_sgd"):
        return has_own_optimizer(task)
    return not row.endswith(TUNED) or row.removesuffix(TUNED) in read()["chosen"].get(task, {})


def has_own_optimizer(task):
    """Return whether a task's plain training is by another optimizer than SGD."""
    return TASKS[task].optimizer is not Task.optimizer


def setting_of(row, task):
    """Return a row's function's name and its setting."""
    if not row.endswith(TUNED):
        return row, {}
    name = row.removesuffix(TUNED)
    return name, read()["chosen"][task][name]


def validation_nll(task, name, setting):
    """Train one setting and score it on validation data: samples, or for plain training the mean with a temperature."""
    lr, epochs = setting.get("lr", 1.0), setting.get("epochs", 1.0)
    options = {k: v for k, v in setting.items() if k not in ("lr", "epochs")}
    known = task.validation().known.batches()
    if name in DEFAULTS:
        found = in_cycles(task, **setting).predictions["temperature"](known)
    elif name == "plain":
        model = training.member(task, 0, **setting).model
        tempered, _ = with_temperature(lambda batches: predict(model, batches), task.held_out.batches())
        found = tempered(known)
    else:
        model = training.train(task, name, lr=lr, epochs=epochs, options=options).model
        found = predict(model, known, samples=SAMPLES, seed=task.seed)
    return metrics.nll(found.probs, found.labels)


def tune(names, rows, minutes):
    """Try what has not been tried, within the time, and choose where a grid is whole."""
    until = time.monotonic() + 60 * minutes
    kept = read()
    for name in names:
        for method in (row for row in (*TUNABLE, *DEFAULTS) if row in rows):
            tried = kept["validation_nll"].setdefault(name, {}).setdefault(method, {})
            settings = [s for s in kept["grids"][method] if "sgd" not in s or has_own_optimizer(name)]
            for setting in settings:
                for number, seed in enumerate(kept["seeds"].get(method, kept["seeds"]["every method"])):
                    key = json.dumps(setting)
                    if len(tried.get(key, [])) > number:
                        continue
                    if time.monotonic() > until:
                        print("time is up; run again to go on")
                        return
                    begin = time.process_time()
                    task = TASKS[name](seed)
                    nll = validation_nll(task, method, setting)
                    spent = time.process_time() - begin
                    tried.setdefault(key, []).append(round(float(nll), 6))
                    budget = kept["budget"].setdefault(name, {}).setdefault(method, {"steps": 0, "seconds": 0.0})
                    budget["steps"] += training.length(task, setting.get("epochs", 1.0))[1]
                    budget["seconds"] = round(budget["seconds"] + spent, 1)
                    print(f"{name}/{method}/{key}: {nll:.4f}, {spent:.0f} s", flush=True)
                    write(kept)
            if method in DEFAULTS:
                continue
            best = min(tried, key=lambda key: statistics.mean(tried[key]))
            kept["chosen"].setdefault(name, {})[method] = json.loads(best)
            write(kept)


def write(kept):
    SETTINGS.write_text(json.dumps(kept, indent=1) + "\n")
