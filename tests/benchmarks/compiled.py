"""Set compiled training steps beside eager ones, in one run, as docs/scaling.md says.

    python -m tests.benchmarks.compiled [mlp] [vit_b_32]    # measures, and writes the page's part

Loss and penalty are one compiled function; the optimizer's step is the same on both sides. What counts is the ratio of
the best steps, in turn, on the clock and of all cores together.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from bayesify import bayesify, param_groups, penalty
from examples.sections import write_section
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import MLP, NUM_DATA, Workload

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "compiled.json"
PAGE = ROOT / "docs" / "scaling.md"
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


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the page's part."""
    lines = ["| model | threads | VI, compiled over eager | plain training |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {w} | {r['threads']} | {r['vi']:.2f} | {r['plain']:.2f} |" for w, r in results.items())]
    )


def main(names: list[str]) -> None:
    """Measure, print the ratios, and write the page's part."""
    results = json.loads(RESULTS.read_text())
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
        row = results[str(work)] = {"threads": torch.get_num_threads()}
        for kind in ("vi", "plain"):
            what, base = found[f"{kind}, compiled"], found[f"{kind}, eager"]
            ratio, times = what.over(base), f"{1e3 * what.wall:.1f}, {1e3 * base.wall:.1f}"
            print(f"{kind}, compiled over eager: wall {ratio['wall']:.3f}, cpu {ratio['cpu']:.3f} ({times} ms)")
            row[kind] = round(ratio["wall"], 3)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_section(PAGE, "compiled", table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
