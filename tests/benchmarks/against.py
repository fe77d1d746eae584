"""Set this checkout beside another one in one run: `python -m tests.benchmarks.against OTHER [--long] [--turns 3]`.

Each turn is a process per checkout, one after the other, and each process times plain steps between its own: a busy
moment slows both. What counts is the surplus: of each process the best Bayesian step less the best plain step, and of
these the median over the turns.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "against.json"
METHODS = ("vi", "mc_dropout", "sgld")
LIMITS = {  # of the ratio between this checkout's number and the other's, or of the number itself
    **{f"surplus | {work} | {m}": 0.6 for work in ("mlp 128", "vit_b_32 8") for m in METHODS},
    "surplus | vit_l_32 16 | vi": 0.75,
}


def train(name: str, batch: str, rounds: str, *methods: str) -> dict[str, float]:
    """Time plain steps and those of some methods, in turn."""
    from tests.benchmarks.timing import interleave
    from tests.benchmarks.workloads import Workload, bayesian_step, plain_step

    work = Workload(name, int(batch), 1)
    steps = {"plain": plain_step(work), **{method: bayesian_step(work, method, prior_sig=0.1) for method in methods}}
    return {what: t.wall for what, t in interleave(steps, int(rounds)).items()}


def forecast(rounds: str) -> dict[str, float]:
    """Time a plain pass over 6 batches of 4 images through ViT-B/32, mean mode, and predictions."""
    import torch

    from bayesify import bayesify, mean, predict
    from tests.benchmarks.timing import interleave
    from tests.benchmarks.workloads import Workload

    work = Workload("vit_b_32", 4, 1)
    plain, model, batches = work.model().eval(), bayesify(work.model(), "vi", prior_sig=0.1), [work.data()[0]] * 6

    def passes(net):
        with torch.no_grad():
            return [net(batch) for batch in batches]

    def in_mean():
        with mean(model.eval()):
            return passes(model)

    calls = {
        "plain": lambda: passes(plain),
        "mean mode": in_mean,
        "samples=0": lambda: predict(model, batches, samples=0),
        "samples=5": lambda: predict(model, batches, samples=5, seed=0),
    }
    return {what: t.wall for what, t in interleave(calls, int(rounds)).items()}


def first() -> dict[str, float]:
    """Time the import, and the first training step of the MLP after it: draw, penalty, gradient."""
    import torch  # noqa: F401, before the clock starts

    start = time.perf_counter()
    import bayesify  # noqa: F401

    imported, numba = time.perf_counter(), float("numba" in sys.modules)
    from tests.benchmarks.workloads import MLP, bayesian_step

    step = bayesian_step(MLP, "vi", prior_sig=0.1)
    begun = time.perf_counter()
    step()
    return {"import": imported - start, "first step": time.perf_counter() - begun, "numba imported": numba}


WORKERS = {"train": train, "forecast": forecast, "first": first}


def work(library: str, task: str, *arguments: str) -> None:
    """Run a task with the library of a checkout, and print what it found."""
    sys.path.insert(0, library)
    found = WORKERS[task](*arguments)
    source = str(sys.modules["bayesify"].__file__)
    if not Path(source).is_relative_to(library):
        raise SystemExit(f"bayesify was that of {source}, not of {library}")
    print(json.dumps(found))


def turns(other: Path, count: int, task: str, *arguments: str) -> dict[str, list[dict[str, float]]]:
    """Run a task in both checkouts by turns; return what each process of "this" and "other" has found."""
    found: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for _ in range(count):
        for which, library in (("this", ROOT), ("other", other)):
            command = [sys.executable, "-m", "tests.benchmarks.against", "--work", str(library), task, *arguments]
            run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            found[which].append(json.loads(run.stdout.splitlines()[-1]))
    return found


def surpluses(name: str, found: dict[str, list[dict[str, float]]], rows: dict[str, float]) -> None:
    """Add the ratios of the surplus, and of the steps over plain ones."""
    for method in (what for what in found["this"][0] if what != "plain"):
        here, there = (median(one[method] - one["plain"] for one in found[which]) for which in ("this", "other"))
        rows[f"surplus | {name} | {method}"] = here / there
        for which in ("this", "other"):
            rows[f"over plain, {which} | {name} | {method}"] = median(o[method] / o["plain"] for o in found[which])


def main() -> None:
    """Measure, print the table with its limits, and keep it in build/against.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="the other checkout, as `git worktree add` makes one")
    parser.add_argument("--long", action="store_true", help="also ViT-L/32, which takes 16 GB and some minutes")
    parser.add_argument("--only-mlp", action="store_true", help="a minute, to see that everything runs")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    other, rows = options.other.resolve(), dict[str, float]()
    start = time.monotonic()

    def told(what: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)

    turns(other, 1, "first")  # fills the caches of kernels
    found = turns(other, options.turns, "first")
    here, there = (min(one["import"] + one["first step"] for one in found[which]) for which in ("this", "other"))
    rows["import and first step, seconds more than the other"] = here - there
    rows["numba imported by bayesify"] = found["this"][0]["numba imported"]
    told("first step")
    surpluses("mlp 128", turns(other, options.turns, "train", "mlp", "128", "30", *METHODS), rows)
    told("MLP")
    if not options.only_mlp:
        surpluses("vit_b_32 8", turns(other, options.turns, "train", "vit_b_32", "8", "5", *METHODS), rows)
        told("ViT-B/32")
        found = turns(other, options.turns, "forecast", "3")
        for which in ("this", "other"):
            for what in ("mean mode", "samples=0", "samples=5"):
                rows[f"prediction over plain, {which} | {what}"] = median(o[what] / o["plain"] for o in found[which])
        told("prediction")
    if options.long:
        surpluses("vit_l_32 16", turns(other, max(1, options.turns - 1), "train", "vit_l_32", "16", "2", "vi"), rows)
        told("ViT-L/32")
    limits = {
        **LIMITS,
        "import and first step, seconds more than the other": 1.5,
        "numba imported by bayesify": 0.0,
        "prediction over plain, this | mean mode": 1.03,
        "prediction over plain, this | samples=5": 5.6,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for what, value in rows.items():
        verdict = "" if what not in limits else f"at most {limits[what]}: {'yes' if value <= limits[what] else 'NO'}"
        print(f"{what:55} {value:7.3f}  {verdict}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
