"""The page about GPUs: what `bayesify check` measures on one, and what a training step counts without one.

Counts need no GPU: kernels of ours are counted, and computed by torch, on tensors of a CPU that are taken for a GPU's.
Every operation of torch and every kernel is a launch, and reads and writes the tensors that it is given. Waiting for a
number is counted on tensors that claim another device.
"""

import json
import sys
from datetime import date
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bayesify import IVON, SGLD, bayesify, param_groups, penalty, predict
from bayesify.cli.check import METHODS, Counting, check, shown
from bayesify.engine import dispatch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks_gpu.md"
COUNTS = ROOT / "docs" / "results" / "launches.json"
MEASURED = COUNTS.with_name("gpu.json")
WIDTH = 64
PARTS = ("forward", "penalty", "backward", "optimizer", "predict")
OPTIMIZERS = {"sgld": SGLD, "ivon": IVON}


class Bytes(Counting):
    """Counts bytes too: all that a launch reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def launched(self, given) -> None:
        """Count a launch on some tensors."""
        super().launched(given)
        self.bytes += sum(t.nbytes for t in tree_leaves(given) if isinstance(t, Tensor))


def counted(method: str | None, layers: int, device: str = "cpu") -> dict[str, Bytes]:
    """Return what the parts of a third training step count, and a prediction of one batch by two samples."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    x, y = torch.ones(2, WIDTH).to(device), torch.zeros(2, dtype=torch.long).to(device)
    if method is not None:
        bayesify(model, method)
    model.to(device)
    if method in OPTIMIZERS:
        optimizer = OPTIMIZERS[method](model, 1e-4, num_data=100)
    else:
        groups = model.parameters() if method is None else param_groups(model, 1e-2)
        optimizer = torch.optim.SGD(groups, 1e-2, momentum=0.9, foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        counts = {part: Bytes() for part in PARTS}
        with counts["forward"]:
            loss = F.cross_entropy(model(x), y)
        with counts["penalty"]:
            loss = loss if method is None else loss + penalty(model, 100)
        with counts["backward"]:
            loss.backward()
        with counts["optimizer"]:
            optimizer.step()
    with counts["predict"]:
        predict(model, x, 0 if method in (None, "vanilla", "sgld") else 2, seed=0)
    return counts


def as_on_a_gpu(method: str | None, layers: int) -> dict[str, Bytes]:
    """Return the counts with the kernels of a GPU, which are not run."""
    from bayesify.engine import gpu

    alone, together = gpu.run, gpu.run_all

    def computed(formula, stream, inputs, outputs, p_drop):
        with _disable_current_modes():
            return dispatch._run_by_torch(dispatch.Job(formula, stream, inputs, outputs, p_drop))

    def run(formula, stream, inputs, outputs, size, p_drop):
        alone(formula, stream, inputs, outputs, size, p_drop)
        return computed(formula, stream, inputs, outputs, p_drop)

    def run_all(formula, p_drop, rows):
        together(formula, p_drop, rows)
        found = []
        for given, stream, _ in rows:
            arrays, numbers = iter(given.arrays), iter(given.numbers)
            inputs = [next(numbers if kind == "number" or kind[0] == "&" else arrays) for kind in given.kinds]
            outputs = [inputs[kind] if isinstance(kind, int) else next(arrays) for kind in given.targets]
            found.append(computed(formula, stream, inputs, outputs, p_drop))
        with _disable_current_modes():
            return None if found[0] is None else torch.stack(found)

    with (
        mock.patch.object(dispatch, "chosen", return_value="triton"),
        mock.patch.object(dispatch, "ready", return_value=gpu),
        mock.patch.object(gpu, "_launch"),
        mock.patch.object(gpu, "run", run),
        mock.patch.object(gpu, "run_all", run_all),
    ):
        return counted(method, layers)


def waits(method: str) -> dict[str, int]:
    """Return how often a step and a prediction wait for a number of a device."""
    sys.path.insert(0, str(ROOT / "tests"))
    from accelerator import NAME, Accelerator

    with Accelerator():
        found = counted(method, 2, NAME)
    return {"step": sum(found[p].syncs for p in PARTS[:-1]), "predict": found["predict"].syncs}


def counts(layers: int = 150) -> dict:
    """Return the counts of every method, less those of plain SGD: launches, bytes per weight, and waiting."""
    plain, found = as_on_a_gpu(None, layers), {}
    weights = layers * (WIDTH + 1) * WIDTH
    for method in METHODS:
        ours = as_on_a_gpu(method, layers)
        launches = {part: ours[part].launches - plain[part].launches for part in PARTS}
        size = sum(ours[part].bytes - plain[part].bytes for part in PARTS[:-1])
        found[method] = {"launches": launches, "bytes": round(size / weights), "syncs": waits(method)}
    return {"tensors": 2 * layers, "methods": found}


def page(counted: dict, measured: dict | None) -> str:
    """Return the page."""
    lines = ["# Benchmarks on a GPU", "", "`make bench-gpu` writes this page, and measures where there is a GPU.", ""]
    if measured is None:
        lines += ["Not yet run on a GPU; counted:", ""]
    else:
        lines += [f"{measured['machine']}, {measured['date']}:", "", "```text", shown(measured["found"]), "```", ""]
        lines += ["## Counts", ""]
    lines += [
        f"One training step of a model of {counted['tensors']} tensors, and a prediction of one batch by two samples "
        "(by the mean for vanilla, and for sgld before it has collected), less those of plain SGD. A launch "
        "is an operation of torch or a kernel; bytes are those that a step's launches read and write, where a tensor "
        "that a grouped launch overwrites counts once; waits are those for a number of the device.",
        "",
        "| method | "
        + " | ".join(f"launches, {part}" for part in PARTS)
        + " | bytes per weight | waits, step | waits, "
        "predict |",
        "|---" * (len(PARTS) + 4) + "|",
    ]
    for method, row in counted["methods"].items():
        cells = [*row["launches"].values(), row["bytes"], *row["syncs"].values()]
        lines.append(f"| {method} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def read(path: Path) -> dict | None:
    """Return a result, or None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    COUNTS.write_text(json.dumps(counts(), indent=1) + "\n")
    if torch.cuda.is_available() or torch.xpu.is_available():
        kind = torch.cuda if torch.cuda.is_available() else torch.xpu
        result = {"machine": kind.get_device_name(), "date": date.today().isoformat(), "found": check(progress=True)}
        MEASURED.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(read(COUNTS), read(MEASURED)))
