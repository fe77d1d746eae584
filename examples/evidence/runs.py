"""One run, in a process of its own: what came before it cannot change it, and what breaks it ends nothing else."""

import logging
import multiprocessing
import sys
import time
import traceback

import torch

from . import files, grid, training
from .rows import ROWS
from .texts import TASKS


class RunError(RuntimeError):
    """A run failed; the others can go on."""


def outcome_of(task, row):
    """Train a row; return what comes of it, and the setting that validation data chose, if it has one."""
    name, setting = grid.setting_of(row, task.name)
    torch.manual_seed(task.seed)  # whether a member was trained before or now must not matter
    return ROWS[name](task, **setting), setting


def score(name, row, seed, rerun):
    """Train a row, score it on the test data and write the result."""
    begin = time.process_time()
    task = TASKS[name](seed)
    training.warm_up(task)
    outcome, setting = outcome_of(task, row)
    result = files.score_once(task, row, outcome, setting=setting, rerun=rerun)
    show(f"{name}/{row}/{seed}", result, time.process_time() - begin)


def apart(work, *args):
    """Call a function in a process of its own, on one thread.

    Raises:
        RunError: It raised an error, which was printed, or the process was killed.
    """
    # A server that has imported everything forks the processes, so that a run need not.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([__name__])
    process = context.Process(target=alone, args=(work, args))
    process.start()
    try:
        process.join()
    except BaseException:
        process.terminate()
        raise
    if process.exitcode:
        killed = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "raised the error above"
        raise RunError(killed)


def alone(work, args):
    """Call a function quietly and on one thread; leave with 1 if it raises an error."""
    quiet()
    try:
        work(*args)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def quiet():
    """Take one thread, and leave to the table what the warnings would say."""
    torch.set_num_threads(1)
    logging.getLogger("bayesify").setLevel(logging.ERROR)


def show(key, result, seconds):
    """Print a result in one line."""
    kinds = result["predictions"].items()
    cells = [f"{kind} {s['nll']:.4f} ({100 * s['error']:.1f} %, {s['cost']:.2f} x)" for kind, s in kinds]
    cells += [f"{k} {v:.3g}" for k, v in result["notes"].items()]
    cells.append(f"training {result['train_seconds']:.1f} s, first loss {result['first_loss']:.3g}")
    ood = next(iter(result["predictions"].values()))["ood_entropy"]
    known = [s["ood_mi"] for _, s in kinds if s["ood_mi"] is not None]
    cells.append(f"OOD {ood:.3f} " + "/".join(f"{v:.3f}" for v in known))
    print(f"{key}: " + ", ".join(cells) + f", {seconds:.0f} s", flush=True)
