"""Peak memory of a few training steps, each in a process of its own."""

import resource
import subprocess
import sys

from tests.benchmarks.workloads import Workload, bayesian_step, plain_step


def peak_gigabytes(work: Workload, method: str) -> float:
    """Return the peak resident memory of training with a method ("plain" for none)."""
    command = [sys.executable, "-m", "tests.benchmarks.memory", work.name, str(work.batch), method]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Train two steps and print the peak."""
    name, batch, method = sys.argv[1:]
    work = Workload(name, int(batch), 1)
    step = plain_step(work) if method == "plain" else bayesian_step(work, method)
    for _ in range(2):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


if __name__ == "__main__":
    main()
