"""Try some models of the zoo in this process; each verdict is one line of the output."""

import json
import resource
import sys
import warnings
from typing import Any

import torch

from .checks import Case, PlainModelError, Violation, check

MARK = "ZOO "


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
        row["model"] = case.model
        row["parameters"] = check(case)
        return {**row, "verdict": "ok", "reason": ""}
    except PlainModelError as error:
        return {**row, "verdict": "not run", "reason": _short(str(error))}
    except Violation as error:
        return {**row, "verdict": "fails", "reason": _short(str(error))}
    except Exception as error:
        return {**row, "verdict": "fails", "reason": _short(f"{type(error).__name__}: {error}")}


def _short(reason: str) -> str:
    """Return the first line of a reason, without what a table cannot hold."""
    line = (reason.strip().splitlines() or [""])[0].replace("|", "/")
    return line if len(line) <= 240 else line[:237] + "..."


def main(library: str, memory: str, names: list[str]) -> None:
    """Try each name in turn, within a bound on memory (GB)."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bound = int(float(memory) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    for name in names:
        print(MARK + json.dumps(verdict(library, name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
