"""Peak memory of a few training steps, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

from torch.nn import functional as F

from bayesify import bayesify, fit_laplace
from tests.benchmarks.workloads import Workload, bayesian_step, plain_step


def peak_gigabytes(work: Workload, method: str) -> float:
    """Return the peak resident memory of training with a method ("plain" for none), or of one of `PASSES`."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", work.name, str(work.batch), method]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def plain_pass(work: Workload):
    """Return a closure that computes the gradients of one batch, and keeps none."""
    model, (x, y) = work.model().eval(), work.data()

    def step():
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()

    return step


def laplace_pass(work: Workload):
    """Return a closure that fits Laplace to one batch."""
    model, batch = bayesify(work.model(), "la"), work.data()
    return lambda: fit_laplace(model, [batch])


PASSES = {"plain pass": plain_pass, "fit_laplace": laplace_pass}


def main() -> None:
    """Train two steps and print the peak."""
    name, batch, method = sys.argv[1:]
    work = Workload(name, int(batch), 1)
    if method in PASSES:
        step = PASSES[method](work)
    else:
        step = plain_step(work) if method == "plain" else bayesian_step(work, method)
    for _ in range(2):
        step()
    # Not getrusage, which counts the parent's memory at the fork.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak[1]) * 1024 / 1e9)


if __name__ == "__main__":
    main()
