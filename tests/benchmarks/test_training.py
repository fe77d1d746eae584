"""The training step of each method, and its peak memory."""

from tests.benchmarks.memory import peak_gigabytes
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import METHODS, bayesian_step, plain_step

SMALL = 3e7  # parameters; larger models are measured one method at a time, to fit into memory


def test_training_step(work, table, benchmark):
    count = sum(p.numel() for p in work.model().parameters())
    together = [METHODS] if count < SMALL else [(m,) for m in METHODS]
    for methods in together:
        steps = {"plain": plain_step(work), **{m: bayesian_step(work, m) for m in methods}}
        times = interleave(steps, work.rounds)
        for method in methods:
            table.add("training step", work, method, **times[method].over(times["plain"]), seconds=times[method].wall)
            assert times[method].wall < 10 * times["plain"].wall
    benchmark.pedantic(plain_step(work), rounds=1)


def test_peak_memory(work, table, benchmark):
    for method in ("plain", "vi") if work.name == "vit_l_32" else ("plain", "vi", "mc_dropout"):
        table.add("peak memory", work, method, gigabytes=peak_gigabytes(work, method))
    benchmark.pedantic(lambda: None, rounds=1)
