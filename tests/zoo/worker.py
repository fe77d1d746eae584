"""Try some models of the zoo in this process; each verdict is one line of the output."""

import json
import resource
import signal
import sys
import warnings
from typing import Any, NoReturn

import torch

from .checks import Case, PlainModelError, Violation, check

MARK = "ZOO "
FULL = 75  # exit code of a process that has no memory left for the next model
NO_MEMORY = "needs more memory than the sweep had"
MEMORY_ERRORS = ("allocate memory", "could not create a primitive", "MemoryError", "bad_alloc")


def case_of(library: str, name: str) -> Case:
    """Return the case of one entry of a library."""
    if library == "transformers":
        from .huggingface import transformers_case

        return transformers_case(name)
    from .vision import timm_case, torchvision_case

    return timm_case(name) if library == "timm" else torchvision_case(name)


def verdict(library: str, name: str) -> dict[str, Any]:
    """Try one model.

    Returns:
        A row of the table: "ok", "fails" (bayesify does not hold on it) or "not run" (the plain model does not run).
    """
    row: dict[str, Any] = {"library": library, "name": name, "model": name, "parameters": None}
    try:
        case = case_of(library, name)
    except (Exception, OutOfTime) as error:
        return {**row, "verdict": "not run", "reason": _short(str(error))}
    row["model"] = case.model
    try:
        row["parameters"] = check(case)
        return {**row, "verdict": "ok", "reason": ""}
    except (PlainModelError, OutOfTime) as error:
        return {**row, "verdict": "not run", "reason": _short(str(error))}
    except Violation as error:
        return {**row, "verdict": "fails", "reason": _short(str(error))}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return {**row, "verdict": "not run" if _lacks_memory(reason) else "fails", "reason": _short(reason)}


def _lacks_memory(reason: str) -> bool:
    return any(words in reason for words in MEMORY_ERRORS)


def _short(reason: str) -> str:
    """Return the first line of a reason, without what a table cannot hold; the lack of memory has many names."""
    if _lacks_memory(reason):
        return NO_MEMORY
    line = (reason.strip().splitlines() or [""])[0].replace("|", "/")
    return line if len(line) <= 240 else line[:237] + "..."


class OutOfTime(BaseException):
    """A model takes too long; no handler of ordinary errors on the way may keep it."""


def _out_of_time(*_: object) -> NoReturn:
    raise OutOfTime("takes too long to be tried here")


def main(library: str, memory: str, timeout: str, names: list[str]) -> None:
    """Try each name in turn, within bounds on memory (GB) and on processor time (seconds, for each)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bound = int(float(memory) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    signal.signal(signal.SIGPROF, _out_of_time)
    for name in names:
        signal.setitimer(signal.ITIMER_PROF, float(timeout))
        row = verdict(library, name)
        print(MARK + json.dumps(row), flush=True)
        if row["reason"] == NO_MEMORY:
            sys.exit(FULL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
