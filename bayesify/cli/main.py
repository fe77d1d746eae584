"""The command line: compare ways to predict, look at saved posteriors, write reports, show a demonstration.

An error is one line on stderr and exit status 1; a wrong argument is argparse's own message and status 2.
"""

import argparse
import sys
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesify
from bayesify.core.summary import inspect_file
from bayesify.prediction.predictive import Predictive
from bayesify.quality import plots

OPTIONAL = ("logits", "labels", "novelty", "novelty_pvalue")  # tensors of a prediction that may be missing
OUR_ERRORS = (ValueError, TypeError, ImportError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after `bayesify`; those of the process if None.

    Returns:
        The exit status.

    Example:
        >>> main(["inspect", "nowhere"])  # the message goes to stderr
        1
    """
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    try:
        if command == "inspect":
            print("\n\n".join(map(str, inspect_file(options["dir"]))))
        elif command == "report":
            _report(**options)
        else:
            import_module(f"bayesify.cli.{command}").run(**options)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has seen enough
        return 1
    except OUR_ERRORS as error:
        print(f"bayesify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser; the options of a command are the arguments of the function that runs it."""
    parser = argparse.ArgumentParser(prog="bayesify", description=bayesify.__doc__)
    parser.add_argument("--version", action="version", version=f"bayesify {bayesify.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    demo = commands.add_parser("demo", help="train on embedded digits, before and after bayesify (seconds)")
    demo.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report and the saved posterior")
    demo.add_argument("--seed", type=int, default=0)

    compare = commands.add_parser("compare", help="your own model and data: plain and Bayesian, in one table")
    returned = "file.py:function or module:function that returns (model, train, validation, test) or these and ood"
    compare.add_argument("source", metavar="CASE", help=returned)
    kinds = (
        "novelty, la, la-self, la-all, five (trainings), a method such as vi, file.py:name of your own (all that suit)"
    )
    compare.add_argument("--methods", nargs="+", metavar="METHOD", help=kinds)
    compare.add_argument("--minutes", type=float, default=10.0, help="after these nothing new begins (10)")
    compare.add_argument("--epochs", type=int, default=0, help="train the model so long; 0 takes it as trained (0)")
    compare.add_argument("--lr", type=float, default=1e-3, help="of that training, by AdamW (0.001)")
    compare.add_argument("--head", help="name of the last linear layer, where a forward pass does not find it")
    compare.add_argument("--out", type=Path, default=Path("compare"), help="folder for the table")

    inspect = commands.add_parser("inspect", help="what a saved posterior holds: method, tensors, spread")
    inspect.add_argument("dir", type=Path, help="a folder that bayesify.save wrote")

    check = commands.add_parser("check", help="what this computer's engines compute, and what training steps cost")
    check.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object, for a bug report")
    check.add_argument("--device", help="such as cpu or cuda (a GPU where there is one)")

    report = commands.add_parser("report", help="a page of a saved prediction, or of one compared with another")
    report.add_argument("file", type=Path, help="made by numpy.savez(file, **predict(...).numpy())")
    report.add_argument("--ood", type=Path, help="the same for out-of-distribution data")
    report.add_argument("--validation", type=Path, help="the same for the validation set, to compare FILE with")
    report.add_argument("--threshold", type=float, help="the confidence below which the model abstains")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page, or a .json (report.html)")
    report.add_argument("--title", default="Predictive uncertainty")
    return parser


def _report(file: Path, out: Path, title: str, threshold: float | None, **others: Path | None) -> None:
    found = read_prediction(file)
    sets: dict[str, Any] = {name: None if path is None else read_prediction(path) for name, path in others.items()}
    path = plots.report(found, out, title=title, threshold=threshold, **sets)
    print(f"{found}\nwrote {path}")


def read_prediction(path: Path) -> Predictive:
    """Read a classification that was written with `numpy.savez(path, **out.numpy())`, or raise a ValueError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            content = dict(arrays)
        probs, entropies = content["probs"], torch.from_numpy(content["expected_entropy"])
        if probs.ndim < 2 or entropies.shape != probs.shape[:-1]:
            raise ValueError("one entropy for each row of probabilities")
        kept: dict[str, Any] = {name: torch.from_numpy(content[name]) if name in content else None for name in OPTIONAL}
        return Predictive(
            log_probs=torch.from_numpy(probs).double().clamp_min(np.finfo(np.float64).tiny).log(),
            expected_entropy=entropies,
            num_samples=int(content["num_samples"]),
            closed_form=bool(content["closed_form"]),
            method=str(content["method"]),
            **kept,
        )
    except (OSError, ValueError, AttributeError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        found = f"there is no {path}" if isinstance(error, FileNotFoundError) else f"{path} holds no classification"
        fix = f"write it with numpy.savez({str(path)!r}, **out.numpy()), where out = predict(...)"
        raise ValueError(f"{found}; {fix}") from error
