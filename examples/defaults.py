"""What a newcomer gets: every method at its defaults on four tasks, beside plain training with temperature scaling.

    python examples/defaults.py [--tasks digits mnist] [--methods vi la] [--seeds 5] [--minutes 60]
    python examples/defaults.py --page          # docs/defaults.md from the results alone

Nothing is chosen but what `bayesify(model, method)` chooses. A fifth of the training data is held out of every run, for
the temperature of the plain model and for `calibrate`. The data is that of the folder that BAYESIFY_DATA names; the
digits come with scikit-learn. Runs that `docs/results/defaults.json` holds already are not made again.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from defaults_tasks import TASKS
from torch.nn import functional as F

from bayesify import (
    IVON,
    SGLD,
    bayesify,
    calibrate,
    fit_laplace,
    metrics,
    named_posteriors,
    penalty,
    predict,
    unbayesify,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results/defaults.json"
PAGE = ROOT / "docs/defaults.md"
METHODS = ("plain", "vi", "mc_dropout", "sgld", "la", "ivon")
SAMPLES = 10


def train(task, method, seed):
    """Train one method from the same start and in the same order as the others; return model and first loss."""
    torch.manual_seed(seed)
    model = task.model()
    count = len(task.train)
    if method != "plain":
        bayesify(model, method)
    if method == "sgld":
        optimizer = SGLD(model, task.sgd_groups(model), num_data=count, momentum=0.9)
    elif method == "ivon":
        optimizer = IVON(model, task.sgd_groups(model), num_data=count)
    else:
        optimizer = task.optimizer(model, bayesian=method != "plain")
    steps = task.epochs * -(-count // task.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    order, first = torch.Generator().manual_seed(seed), None
    task.set_training(model)
    for _ in range(task.epochs):
        for rows in torch.randperm(count, generator=order).split(task.batch):
            inputs, labels = task.batch_of(task.train, rows.tolist())
            optimizer.zero_grad()
            loss = F.cross_entropy(task.logits(model, inputs), labels)
            if method != "plain":
                loss = loss + penalty(model, num_data=count)
            first = float(loss.detach()) if first is None else first
            loss.backward()
            optimizer.step()
            schedule.step()
    if method == "la":
        fit_laplace(model, task.batches(task.train))
    return model.eval(), first


def scored(found, unknown):
    """Return the scores of a prediction, and how well entropy and mutual information tell the unknown data."""
    nll, error = metrics.nll(found.probs, found.labels), metrics.error(found.probs, found.labels)
    out = {"nll": float(nll), "error": float(error), "ece": float(metrics.ece(found.probs, found.labels))}
    out["ood_entropy"] = float(metrics.auroc(found.entropy, unknown.entropy))
    if found.num_samples > 1:
        out["ood_mi"] = float(metrics.auroc(found.mutual_information, unknown.mutual_information))
    return out


def follows(model, start, task):
    """Return the rank correlation of s over its start with the Fisher diagonal, the mean over tensors."""
    twin = task.model()
    twin.load_state_dict(plain_state(model))
    bayesify(twin, "la", prior_sig=1e6)
    fit_laplace(twin, task.batches(task.train))
    fisher = {name: 1 / q.std.double() ** 2 for name, q in named_posteriors(twin)}
    found = []
    for name, q in named_posteriors(model):
        ratio = (q.std / start[name]).double().flatten()
        if len(ratio) > 50 and ratio.std() > 0:
            ranks = [t.argsort().argsort().double() for t in (ratio, fisher[name].flatten())]
            found.append(float(torch.corrcoef(torch.stack(ranks))[0, 1]))
    return statistics.mean(found) if found else 0.0


def plain_state(model):
    """Return the state dict of the plain model at the posterior mean."""
    return unbayesify(copy.deepcopy(model)).state_dict()


def run(task, method, seed):
    """Train and score one method once; the test data is read here only."""
    started = time.process_time()
    model, first = train(task, method, seed)
    seconds = time.process_time() - started
    held, test, ood = (task.batches(part) for part in (task.held_out, task.test, task.ood))
    out = {"seconds": seconds, "first_loss": first}
    point, point_ood = predict(model, test, samples=0), predict(model, ood, samples=0)
    out["mean"] = scored(point, point_ood)
    if method == "plain":
        before = predict(model, held)
        fitted = metrics.fit_temperature(before.logits, before.labels)
        out["temperature"] = {"T": float(fitted), "nll": float(metrics.nll(fitted.apply(point.logits), point.labels))}
        return out
    options = {"samples": SAMPLES, "seed": seed}
    out["samples"] = scored(predict(model, test, **options), predict(model, ood, **options))
    if method in ("vi", "ivon"):
        torch.manual_seed(seed)
        start = {name: q.std for name, q in named_posteriors(bayesify(task.model(), method))}
        out["follows"] = follows(model, start, task)
    calibrate(model, held, samples=SAMPLES, progress=False)
    out["factor"] = next(q.calibration for _, q in named_posteriors(model))
    out["calibrated"] = scored(predict(model, test, **options), predict(model, ood, **options))
    return out


def collect(args):
    """Make the runs that have no result yet, within the time."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    until = time.monotonic() + 60 * args.minutes
    for seed in range(args.seeds):
        for name in args.tasks:
            task = None
            for method in args.methods:
                key = f"{name}/{method}/{seed}"
                if key in results:
                    continue
                if time.monotonic() > until:
                    print("time is up; run again to go on")
                    return
                task = task or TASKS[name](seed)
                results[key] = run(task, method, seed)
                shown = {k: v["nll"] for k, v in results[key].items() if isinstance(v, dict) and "nll" in v}
                print(key, {k: round(v, 4) for k, v in shown.items()}, f"{results[key]['seconds']:.0f} s", flush=True)
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def row(results, task, method, kind):
    """Return the table's cells of one method and kind of prediction, with paired differences to plain + temperature."""
    seeds = [s for s in range(100) if f"{task}/{method}/{s}" in results and f"{task}/plain/{s}" in results]
    values = [results[f"{task}/{method}/{s}"][kind] for s in seeds]
    bar = [results[f"{task}/plain/{s}"]["temperature"]["nll"] for s in seeds]
    apart = [v["nll"] - b for v, b in zip(values, bar, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    cells = [f"{statistics.mean(v['nll'] for v in values):.4f}", f"{statistics.mean(apart):+.4f} ± {error:.4f}"]
    for score, factor in (("error", 100), ("ece", 100), ("ood_entropy", 1), ("ood_mi", 1)):
        found = [v[score] * factor for v in values if score in v]
        cells.append(f"{statistics.mean(found):.{1 if factor == 100 else 3}f}" if found else "")
    return len(seeds), cells


def page():
    """Return the page, from the results alone."""
    results = json.loads(RESULTS.read_text())
    lines = [TEXT]
    for task in TASKS:
        methods = [m for m in METHODS if f"{task}/{m}/0" in results]
        if "plain" not in methods:
            continue
        count, cells = row(results, task, "plain", "mean")
        lines += [f"## {task}, {count} seeds", "", HEAD, "|---" * 8 + "|", "| plain | | " + " | ".join(cells) + " |"]
        scaled = statistics.mean(results[f"{task}/plain/{s}"]["temperature"]["nll"] for s in range(count))
        lines.append(f"| plain + temperature | | {scaled:.4f} | | | | | |")
        for method in methods[1:]:
            for kind in ("mean", "samples", "calibrated"):
                lines.append(f"| {method} | {kind} | " + " | ".join(row(results, task, method, kind)[1]) + " |")
        lines.append("")
        for method in ("vi", "ivon"):
            found = [results[k]["follows"] for k in results if k.startswith(f"{task}/{method}/")]
            if found:
                lines.append(
                    f"Rank correlation of {method}'s spread over its start with the Fisher diagonal, within tensors: "
                    f"{statistics.mean(found):.2f}."
                )
        lines.append("")
    return "\n".join(lines)


HEAD = "| method | prediction | NLL | against plain + temperature | error % | ECE % | OOD by entropy | OOD by MI |"
TEXT = f"""# What the defaults give

Every method as `bayesify(model, method)` makes it, nothing chosen, {SAMPLES} samples; the same training as plain. A
fifth of the training data is held out of every run: the plain model's temperature and `calibrate`'s factor are found
on it.
Differences are paired by seed, with their standard errors. OOD columns are AUROCs: noise for the digits, FashionMNIST
for MNIST, TREC questions for the sentences, MNIST for the photos. Written by `python examples/defaults.py --page` from
`docs/results/defaults.json`.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if not args.page:
        collect(args)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
