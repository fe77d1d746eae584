"""What happens beside training: mean mode, sampling, the penalty, prediction, wrapping, Laplace, checkpoints."""

import time

import pytest
import torch
from torch.nn import functional as F

from bayesify import bayesify, fit_laplace, load, mean, penalty, predict, sample, save
from tests.benchmarks.memory import peak_gigabytes
from tests.benchmarks.timing import Time, interleave
from tests.benchmarks.workloads import LONG, MLP, NUM_DATA


def test_evaluation(work, table, benchmark):
    plain, wrapped, (x, _) = work.model().eval(), bayesify(work.model(), "vi").eval(), work.data()

    def run(model):
        with torch.no_grad():
            return model(x)

    def run_mean():
        with mean(wrapped):
            return run(wrapped)

    times = interleave({"plain": lambda: run(plain), "eval": lambda: run(wrapped), "mean": run_mean}, 2 * work.rounds)
    for what in ("eval", "mean"):
        table.add("evaluation over a plain pass", work, what, **times[what].over(times["plain"]))
    benchmark.pedantic(lambda: run(wrapped), rounds=2)


def test_prediction(work, table, benchmark):
    if work in LONG:
        pytest.skip("long, and no different from the smaller models")
    plain, wrapped, (x, _) = work.model().eval(), bayesify(work.model(), "vi"), work.data()
    batches = [x] * 20

    def run_plain():
        with torch.no_grad():
            return [plain(b) for b in batches]

    calls = {
        "plain": run_plain,
        "posterior mean": lambda: predict(wrapped, batches, samples=0),
        "5 samples": lambda: predict(wrapped, batches, samples=5, seed=0),
    }
    times = interleave(calls, 10 if work is MLP else 2)
    for what in ("posterior mean", "5 samples"):
        table.add(
            f"prediction over a plain pass of {len(batches)} batches", work, what, **times[what].over(times["plain"])
        )
    benchmark.pedantic(calls["posterior mean"], rounds=1)


def test_parts_of_a_step(work, table, benchmark):
    model = bayesify(work.model(), "vi", prior_sig=0.1)
    count = sum(p.numel() for p in work.model().parameters())
    names = [name for name, _ in model.named_modules() if name.endswith("parametrizations")]
    owners = [model.get_submodule(name.removesuffix("parametrizations").rstrip(".")) for name in names]

    def draw():
        with sample(model), torch.no_grad():
            for owner in owners:
                for attribute in owner.parametrizations:
                    getattr(owner, attribute)

    def prior():
        with torch.no_grad():
            penalty(model, NUM_DATA)

    times = interleave({"draw": draw, "penalty": prior}, work.rounds)
    for what, t in times.items():
        table.add("nanoseconds per parameter", work, what, wall=1e9 * t.wall / count, cpu=1e9 * t.cpu / count)
    benchmark.pedantic(prior, rounds=2)


def test_wrapping_and_checkpoints(work, table, benchmark, tmp_path):
    took = {}

    def clock(what, function):
        start = time.perf_counter()
        result = function()
        took[what] = time.perf_counter() - start
        return result

    model = work.model()
    clock("bayesify", lambda: bayesify(model, "vi"))
    clock("save", lambda: save(model, tmp_path))
    fresh = work.model()
    clock("load", lambda: load(fresh, tmp_path))
    for what, seconds in took.items():
        table.add("seconds", work, what, wall=seconds)
    benchmark.pedantic(lambda: None, rounds=1)


def test_laplace_fit(work, table, benchmark):
    if work in LONG:
        pytest.skip("long, and no different from the smaller models")
    batches = [work.data()] * (20 if work is MLP else 5)
    plain, wrapped = work.model().eval(), bayesify(work.model(), "la")

    def gradient():
        plain.zero_grad()
        for x, y in batches:
            F.cross_entropy(plain(x), y).backward()

    calls = {"plain": gradient, "fit": lambda: fit_laplace(wrapped, batches)}
    times: dict[str, Time] = interleave(calls, max(work.rounds // 4, 2))
    table.add("Laplace over a forward and backward pass", work, "fit_laplace", **times["fit"].over(times["plain"]))
    for what in ("plain pass", "fit_laplace"):
        table.add("peak memory of a Laplace fit", work, what, gigabytes=peak_gigabytes(work, what))
    benchmark.pedantic(gradient, rounds=1)
