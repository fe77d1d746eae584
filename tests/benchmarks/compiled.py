"""Set compiled training steps beside eager ones, in one run: `python -m tests.benchmarks.compiled [mlp] [vit_b_32]`.

Loss and penalty are one compiled function; the optimizer's step is the same on both sides. What counts is the ratio of
the best steps, in turn, on the clock and of all cores together.
"""

import sys
import time

import torch
from torch.nn import functional as F

from bayesify import bayesify, param_groups, penalty
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import MLP, NUM_DATA, Workload

WORKS = {"mlp": MLP, "vit_b_32": Workload("vit_b_32", 8, 5)}


def step_of(work: Workload, *, compiled: bool, bayesian: bool = True):
    """Return a closure that does one training step, by VI or plain."""
    model, (x, y) = work.model(), work.data()
    if bayesian:
        bayesify(model, "vi", prior_sig=0.1)
    optimizer = torch.optim.SGD(param_groups(model, 1e-3) if bayesian else model.parameters(), lr=1e-3, momentum=0.5)

    def loss():
        value = F.cross_entropy(model(x), y)
        return value + penalty(model, NUM_DATA) if bayesian else value

    run = torch.compile(loss, fullgraph=True) if compiled else loss

    def step():
        optimizer.zero_grad()
        run().backward()
        optimizer.step()

    return step


def main(names: list[str]) -> None:
    """Measure, and print the ratios."""
    for name in names or list(WORKS):
        work = WORKS[name]
        steps = {
            f"{kind}, {how}": step_of(work, compiled=how == "compiled", bayesian=kind == "vi")
            for kind in ("vi", "plain")
            for how in ("eager", "compiled")
        }
        start = time.perf_counter()
        found = interleave(steps, work.rounds)
        print(f"{work}: {time.perf_counter() - start:.0f} s with compilation, {torch.get_num_threads()} threads")
        for what, base in (("vi, compiled", "vi, eager"), ("plain, compiled", "plain, eager")):
            ratio = found[what].over(found[base])
            times = ", ".join(f"{1e3 * found[one].wall:.1f}" for one in (what, base))
            print(f"{what} over eager: wall {ratio['wall']:.3f}, cpu {ratio['cpu']:.3f} ({times} ms)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
