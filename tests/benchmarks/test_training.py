"""The training step of each method, and its peak memory."""

from tests.benchmarks.memory import peak_gigabytes
from tests.benchmarks.timing import interleave
from tests.benchmarks.workloads import METHODS, bayesian_step, plain_step

SMALL = 3e7  # parameters; larger models are measured one method at a time, to fit into memory


STEPS = {method: (method, {}) for method in METHODS}
STEPS["vi, prior_sig=0.1"] = ("vi", {"prior_sig": 0.1})  # the textbook's, without what relative priors bring


def test_training_step(work, table, benchmark):
    count = sum(p.numel() for p in work.model().parameters())
    for names in [tuple(STEPS)] if count < SMALL else [(name,) for name in STEPS]:
        for name, (over, seconds) in timed(work, names).items():
            table.add("training step", work, name, **over, seconds=seconds)
            assert over["wall"] < 10
    benchmark.pedantic(lambda: None, rounds=1)


def timed(work, names):
    """Return by name the ratios to a plain step, and the seconds; the models are gone then."""
    steps = {name: bayesian_step(work, STEPS[name][0], **STEPS[name][1]) for name in names}
    times = interleave({"plain": plain_step(work), **steps}, work.rounds)
    return {name: (times[name].over(times["plain"]), times[name].wall) for name in names}


def test_peak_memory(work, table, benchmark):
    for method in ("plain", "vi") if work.name == "vit_l_32" else ("plain", "vi", "mc_dropout"):
        table.add("peak memory", work, method, gigabytes=peak_gigabytes(work, method))
    benchmark.pedantic(lambda: None, rounds=1)
