"""The command line: compare ways to predict, look at saved posteriors, write reports, show a demonstration.

An error is one line on stderr and exit status 1; a wrong argument is argparse's own message and status 2.
"""

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesify
from bayesify.core.summary import inspect_file
from bayesify.prediction.predictive import Predictive
from bayesify.quality import plots

KEPT = ("logits", "labels", "novelty", "novelty_pvalue")  # tensors of a prediction that may be missing
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
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has seen enough
        return 1
    except OUR_ERRORS as error:
        print(f"bayesify: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bayesify", description=bayesify.__doc__)
    parser.add_argument("--version", action="version", version=f"bayesify {bayesify.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train on embedded digits, before and after bayesify (seconds)")
    demo.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report and the saved posterior")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run=_demo)

    compare = commands.add_parser(
        "compare", help="your own model and data: plain, temperature scaling, posteriors, in one table"
    )
    compare.add_argument("case", help="file.py:function or module:function; it returns model, train, validation, test")
    compare.add_argument("--minutes", type=float, default=10.0, help="after these nothing new begins (10)")
    compare.add_argument("--epochs", type=int, default=0, help="train the model so long; 0 takes it as trained (0)")
    compare.add_argument("--lr", type=float, default=1e-3, help="of that training, by AdamW (0.001)")
    compare.add_argument("--head", help="name of the last linear layer, where a forward pass does not tell")
    compare.add_argument("--out", type=Path, default=Path("compare"), help="folder for the table and the picture")
    compare.set_defaults(run=_compare)

    inspect = commands.add_parser("inspect", help="what a saved posterior holds: method, sizes, spread")
    summary = commands.add_parser("summary", help="every tensor of a saved posterior, or its modules")
    for command, run in ((inspect, _inspect), (summary, _summary)):
        command.add_argument("dir", type=Path, help="a folder that bayesify.save wrote")
        command.set_defaults(run=run)

    check = commands.add_parser("check", help="what this computer's engines compute, and what training steps cost")
    check.add_argument("--json", action="store_true", help="print one JSON object, for a bug report")
    check.add_argument("--device", help="such as cpu or cuda (a GPU where there is one)")
    check.set_defaults(run=_check)

    report = commands.add_parser("report", help="an HTML page of a saved prediction")
    report.add_argument("file", type=Path, help="made by numpy.savez(file, **predict(...).numpy())")
    report.add_argument("--ood", type=Path, help="the same for out-of-distribution data")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (report.html)")
    report.add_argument("--title", default="Predictive uncertainty")
    report.set_defaults(run=_report)
    return parser


def _demo(args: argparse.Namespace) -> None:
    from bayesify.cli.demo import run

    run(args.out, args.seed)


def _compare(args: argparse.Namespace) -> None:
    from bayesify.cli.compare import run

    run(args.case, minutes=args.minutes, epochs=args.epochs, lr=args.lr, head=args.head, out=args.out)


def _check(args: argparse.Namespace) -> None:
    from bayesify.cli.check import run

    run(args.device, as_json=args.json)


def _inspect(args: argparse.Namespace) -> None:
    print("\n\n".join(str(found) for found in inspect_file(args.dir)))


def _summary(args: argparse.Namespace) -> None:
    print("\n\n".join(str(found.summary) for found in inspect_file(args.dir)))


def _report(args: argparse.Namespace) -> None:
    found = read_prediction(args.file)
    ood = None if args.ood is None else read_prediction(args.ood)
    path = plots.report(found, args.out, ood=ood, title=args.title)
    print(f"{found}\nwrote {path}")


def read_prediction(path: Path) -> Predictive:
    """Read a prediction that was written with `numpy.savez(path, **out.numpy())`.

    Args:
        path: An .npz file of these arrays, or with `logits`, (S, N, ..., K) or (N, K), and perhaps `labels`.

    Returns:
        The prediction: that of the logits' softmax, unless the file says which averages were made of them.

    Raises:
        ValueError: It is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            content = dict(arrays)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; write it with numpy.savez({str(path)!r}, **out.numpy())") from None
    except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz file; write it with numpy.savez(file, **out.numpy())") from error
    probs, entropies = content.get("probs"), content.get("expected_entropy")
    if probs is None or entropies is None:
        if "logits" not in content:
            raise ValueError(
                f"{path} has no array 'logits', got {sorted(content)}; write it with numpy.savez(file, **out.numpy()), "
                "where out = predict(...) of a classification, or call plots.report(out, page) where it was made"
            )
        return Predictive.from_logits(content["logits"], content.get("labels"))
    if probs.ndim < 2 or entropies.shape != probs.shape[:-1]:
        raise ValueError(
            f"{path} must hold a classification, one expected_entropy for each row of probs, got shapes "
            f"{entropies.shape} and {probs.shape}; call plots.report(out, page) where other predictions were made"
        )
    # A closed form is not the softmax of its logits, which are the mean's.
    kept: dict[str, Any] = {name: torch.from_numpy(content[name]) if name in content else None for name in KEPT}
    samples = 0 if kept["logits"] is None else len(kept["logits"])
    return Predictive(
        log_probs=torch.from_numpy(probs).double().clamp_min(np.finfo(np.float64).tiny).log(),
        expected_entropy=torch.from_numpy(entropies),
        num_samples=int(content.get("num_samples", samples)),
        closed_form=bool(content.get("closed_form", False)),
        method=str(content.get("method", "")),
        **kept,
    )
