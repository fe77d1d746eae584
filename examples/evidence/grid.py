"""Settings by validation data: a short grid per method, the same number of trainings for each, on unreported seeds."""

import json
import statistics
import time
from pathlib import Path

from bayesify import metrics, predict

from . import training
from .rows import SAMPLES, TUNABLE, with_temperature
from .texts import TASKS

SETTINGS = Path(__file__).with_name("settings.json")
TUNED = "_tuned"


def read():
    return json.loads(SETTINGS.read_text())


def tuned_rows():
    """Return the names of the rows with chosen settings."""
    return [row + TUNED for row in TUNABLE]


def is_known(row, task):
    """Tell whether a row can run: a tuned one needs a setting."""
    return not row.endswith(TUNED) or row.removesuffix(TUNED) in read()["chosen"].get(task, {})


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
    if name == "plain":
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
        for method in (row for row in TUNABLE if row in rows):
            tried = kept["validation_nll"].setdefault(name, {}).setdefault(method, {})
            for setting in kept["grids"][method]:
                for seed in kept["seeds"]:
                    key = json.dumps(setting)
                    if len(tried.get(key, [])) > kept["seeds"].index(seed):
                        continue
                    if time.monotonic() > until:
                        print("time is up; run again to go on")
                        return
                    begin = time.process_time()
                    nll = validation_nll(TASKS[name](seed), method, setting)
                    tried.setdefault(key, []).append(round(float(nll), 6))
                    print(f"{name}/{method}/{key}: {nll:.4f}, {time.process_time() - begin:.0f} s", flush=True)
                    write(kept)
            best = min(tried, key=lambda key: statistics.mean(tried[key]))
            kept["chosen"].setdefault(name, {})[method] = json.loads(best)
            write(kept)


def write(kept):
    SETTINGS.write_text(json.dumps(kept, indent=1) + "\n")
