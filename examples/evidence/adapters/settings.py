"""Settings by validation data of a seed that is not reported; one setting for all tasks."""

import json
import statistics
import time

from . import rows
from .tasks import TASKS

SEED = 100
GRIDS = {
    "plain": [{"lr": 0.5}, {"lr": 1.0}, {"lr": 2.0}, {"lr": 4.0}, {"lr": 8.0}],
    "vi": [{"lr": 2.0}, {"lr": 4.0}, {"lr": 8.0}, {"lr": 16.0}],
    "ivon": [{"lr": 0.5}, {"lr": 1.0}, {"lr": 2.0}, {"lr": 4.0}],
    "sgld": [{"lr": 0.5}, {"lr": 1.0}, {"lr": 2.0}, {"lr": 4.0}],
    "one_budget": [
        {"lr": 1.0},
        {"lr": 2.0},
        {"lr": 4.0},
        {"lr": 4.0, "restart": "prior", "fresh": "*lora_A*"},
    ],
}


def read(path):
    """Return what was tried and chosen."""
    return json.loads(path.read_text()) if path.is_file() else {"seed": SEED, "validation_nll": {}, "chosen": {}}


def setting_of(row, path):
    """Return the setting of a row: its own, or that of plain training, whose adapters it takes."""
    chosen = read(path)["chosen"]
    return {} if row == "base" else dict(chosen.get(row if row in GRIDS else "plain", {}))


def tune(path, names, minutes):
    """Try what was not tried, within the time, and choose the lowest mean NLL where all of a grid was tried."""
    until, kept = time.monotonic() + 60 * minutes, read(path)
    for row, grid in GRIDS.items():
        tried = kept["validation_nll"].setdefault(row, {})
        for setting in grid:
            for name in names:
                found = tried.setdefault(json.dumps(setting), {})
                if name in found:
                    continue
                if time.monotonic() > until:
                    print("time is up; run again to go on")
                    return
                task = TASKS[name](SEED)
                kinds, _, seconds = rows.made(task, row, setting)
                found[name] = rows.scored(kinds["temperature"], *task.validation())["nll"]
                print(f"{name}/{row}/{setting}: {found[name]:.4f}, {seconds:.0f} s", flush=True)
                write(path, kept)
        mean = {key: statistics.mean(found.values()) for key, found in tried.items() if set(found) >= set(names)}
        kept["chosen"][row] = json.loads(min(mean, key=mean.get))
        write(path, kept)


def write(path, kept):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
