"""The training step of each method, and its peak memory."""

from tests.benchmarks.memory import peak_gigabytes
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import METHODS, bayesian_step, plain_step

SMALL = 3e7  # parameters; larger models are measured one method at a time, to fit into memory


STEPS = {method: (method, {}) for method in METHODS}
STEPS["vi, prior_sig=0.1"] = ("vi", {"prior_sig": 0.1})  # the textbook's, without what relative priors bring


def test_training_step(work, table, benchmark):
    count = sum(p.numel() for p in work.model().parameters())
    together = [tuple(STEPS)] if count < SMALL else [(name,) for name in STEPS]
    for names in together:
        steps = {name: bayesian_step(work, STEPS[name][0], **STEPS[name][1]) for name in names}
        times = interleave({"plain": plain_step(work), **steps}, work.rounds)
        for name in names:
            table.add("training step", work, name, **times[name].over(times["plain"]), seconds=times[name].wall)
            assert times[name].wall < 10 * times["plain"].wall
    benchmark.pedantic(plain_step(work), rounds=1)


def test_peak_memory(work, table, benchmark):
    for method in ("plain", "vi") if work.name == "vit_l_32" else ("plain", "vi", "mc_dropout"):
        table.add("peak memory", work, method, gigabytes=peak_gigabytes(work, method))
    benchmark.pedantic(lambda: None, rounds=1)
